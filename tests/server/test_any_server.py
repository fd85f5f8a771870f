"""What a client asks of a server of SavedModels: ours, or TensorFlow Serving at `TF_SERVING_URL`.

python tests/server/serving_model.py /tmp/tiny      # then serve /tmp/tiny as model `tiny`
TF_SERVING_URL=http://localhost:8501 TF_SERVING_GRPC=localhost:8500 TF_SERVING_BATCHING=none \
    python -m pytest tests/server/test_any_server.py

TF_SERVING_BATCHING says how the server merges requests, and what is right follows from it: `none`;
`batching`, with --enable_batching; `padding`, with `pad_variable_length_inputs: true`, too.
"""

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving_model import as_json, as_rows, example
from tolerance import assert_close

requests = pytest.importorskip("requests")
pytestmark = pytest.mark.tensorflow


def ask(endpoint, body, path=":predict"):
    response = requests.post(endpoint.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def expected(models, inputs):
    outputs = models[1]([inputs[name] for name in ("token_ids", "padding_mask", "x")])
    return {name: np.asarray(output) for name, output in outputs.items()}


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (5, 17)])
def test_by_row(endpoint, models, batch, length):
    inputs = example(batch, length)
    rows = ask(endpoint, {"instances": as_rows(inputs)})["predictions"]
    for name, output in expected(models, inputs).items():
        assert_close([row[name] for row in rows], output)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (5, 17)])
def test_by_column(endpoint, models, batch, length):
    inputs = example(batch, length)
    body = {"signature_name": "serving_default", "inputs": as_json(inputs)}
    outputs = ask(endpoint, body)["outputs"]
    assert outputs.keys() == {"y", "first"}
    for name, output in expected(models, inputs).items():
        assert_close(outputs[name], output)


def test_one_input_and_one_output_stand_without_names(endpoint):
    body = {"signature_name": "double"}
    rows = ask(endpoint, body | {"instances": [[1, 2], [3, 4]]})
    assert rows == {"predictions": [[2, 4], [6, 8]]}
    assert ask(endpoint, body | {"instances": [{"token_ids": [1, 2]}]}) == {"predictions": [[2, 4]]}
    assert ask(endpoint, body | {"inputs": [[1, 2]]}) == {"outputs": [[2, 4]]}
    assert ask(endpoint, body | {"inputs": {"token_ids": [[1, 2]]}}) == {"outputs": [[2, 4]]}


def test_the_masks_are_obeyed(endpoint, models):
    """A number in a hidden position changes nothing, in an open one it does."""
    inputs = example(1, 4)
    inputs["padding_mask"][:] = [[True, True, True, False]]
    answers = []
    for position in (None, 3, 2):
        changed = inputs | {"x": inputs["x"].copy()}
        if position is not None:
            changed["x"][0, position] += 10
        answers.append(np.array(ask(endpoint, {"inputs": as_json(changed)})["outputs"]["y"])[:, 0])
    unchanged, hidden, seen = answers
    np.testing.assert_array_equal(hidden, unchanged)
    assert np.abs(seen - unchanged).max() > 1e-3


def test_padding_by_the_first_element_is_safe_with_lengths(endpoint, models):
    """What `pad_variable_length_inputs` makes of a short row, and `serve_padded` of that."""
    short = example(1, 3)
    short["padding_mask"][:] = True
    first = {name: array.reshape(-1)[0] for name, array in short.items()}
    padded = {
        name: np.concatenate(
            [array, np.full((1, 4, *array.shape[2:]), first[name], array.dtype)], axis=1
        )
        for name, array in short.items()
    }
    body = {"signature_name": "serve_padded", "inputs": as_json(padded) | {"lengths": [3]}}
    y = np.array(ask(endpoint, body)["outputs"])
    assert_close(y[:, :3], expected(models, short)["y"])
    assert not y[:, 3:].any()
    trusting = np.array(ask(endpoint, {"inputs": as_json(padded)})["outputs"]["y"])
    assert np.abs(trusting[:, :3] - y[:, :3]).max() > 0.1  # which is why there is `serve_padded`


def test_status_and_metadata(endpoint):
    status = requests.get(endpoint.url, timeout=60).json()["model_version_status"]
    assert [(s["version"], s["state"]) for s in status] == [("1", "AVAILABLE")]
    assert status[0]["status"] == {"error_code": "OK", "error_message": ""}
    metadata = requests.get(endpoint.url + "/metadata", timeout=60).json()
    assert metadata["model_spec"]["version"] == "1"
    signatures = metadata["metadata"]["signature_def"]["signature_def"]
    assert signatures.keys() >= {"serving_default", "serve_padded", "double"}
    inputs = signatures["serving_default"]["inputs"]
    assert {name: tensor["dtype"] for name, tensor in inputs.items()} == {
        "token_ids": "DT_INT32",
        "padding_mask": "DT_BOOL",
        "x": "DT_FLOAT",
    }
    sizes = [dim["size"] for dim in inputs["x"]["tensor_shape"]["dim"]]
    assert sizes == ["-1", "-1", "8"]


def test_a_version_by_number(endpoint):
    body = {"signature_name": "double", "inputs": [[1]]}
    assert ask(endpoint, body, "/versions/1:predict") == {"outputs": [[2]]}
    for path in ("/versions/7:predict", "/versions/one:predict"):
        response = requests.post(endpoint.url + path, json=body, timeout=60)
        assert 400 <= response.status_code < 500, response.text
    assert requests.get(endpoint.url + "/versions/1", timeout=60).status_code == 200
    for path in ("/versions/7", "/versions/7/metadata"):
        assert 400 <= requests.get(endpoint.url + path, timeout=60).status_code < 500


SHAPES = list(itertools.product((1, 2, 4), (2, 5, 9))) * 4


def at_once(one, shapes):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, shapes, range(len(shapes))))


def test_many_clients_of_many_shapes(endpoint, models):
    """Of one length where requests of several cannot be merged."""
    shapes = [(batch, 5 if endpoint.kind == "batching" else length) for batch, length in SHAPES]

    def one(shape, seed):
        inputs = example(*shape, seed=seed)
        body = {"inputs": as_json(inputs)}
        if endpoint.kind == "padding":  # where `serving_default` may attend to padding
            body["signature_name"] = "serve_padded"
            body["inputs"]["lengths"] = [shape[1]] * shape[0]
            return inputs, np.array(ask(endpoint, body)["outputs"])[:, : shape[1]]
        return inputs, ask(endpoint, body)["outputs"]["y"]

    for inputs, y in at_once(one, shapes):
        assert_close(y, expected(models, inputs)["y"])


def test_lengths_that_cannot_be_merged_are_refused_and_never_answered_wrongly(endpoint, models):
    if endpoint.kind != "batching":
        pytest.skip("of servers that batch and do not pad")

    def one(shape, seed):
        inputs = example(*shape, seed=seed)
        body = {"inputs": as_json(inputs)}
        return inputs, requests.post(endpoint.url + ":predict", json=body, timeout=60)

    for inputs, answer in at_once(one, SHAPES):
        if answer.status_code == 200:
            assert_close(answer.json()["outputs"]["y"], expected(models, inputs)["y"])
        else:
            assert answer.json()["error"]
    inputs = example(2, 3)
    y = ask(endpoint, {"inputs": as_json(inputs)})["outputs"]["y"]  # alone, nothing is in its path
    assert_close(y, expected(models, inputs)["y"])


def test_a_mask_of_batch_1(endpoint, models):
    """It broadcasts where requests are not merged; else it fails, and alone."""
    inputs = example(4, 5)
    inputs["padding_mask"] = inputs["padding_mask"][:1]
    answer = requests.post(endpoint.url + ":predict", json={"inputs": as_json(inputs)}, timeout=60)
    if endpoint.kind == "none":
        inputs["padding_mask"] = np.repeat(inputs["padding_mask"], 4, axis=0)
        assert answer.status_code == 200, answer.text
        assert_close(answer.json()["outputs"]["y"], expected(models, inputs)["y"])
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]


def test_grpc(models):
    address = os.environ.get("TF_SERVING_GRPC")
    if not address:
        pytest.skip("asks TensorFlow Serving at TF_SERVING_GRPC; our server has REST alone")
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tensorflow_serving", reason="pip install --no-deps tensorflow-serving-api")
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    inputs = example(4, 9)
    message = predict_pb2.PredictRequest()
    message.model_spec.name = os.environ.get("TF_SERVING_MODEL", "tiny")
    message.model_spec.signature_name = "serving_default"
    for name, array in inputs.items():
        message.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    unlimited = [("grpc.max_receive_message_length", -1)]  # a client's own limit is 4 MB
    with grpc.insecure_channel(address, options=unlimited) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(message, timeout=60)
        for name, output in expected(models, inputs).items():
            assert_close(tf.make_ndarray(answer.outputs[name]), output)
        message.inputs["x"].CopyFrom(tf.make_tensor_proto(inputs["x"][..., 0]))
        with pytest.raises(grpc.RpcError) as raised:
            stub.Predict(message, timeout=60)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# --- Malformed requests ---------------------------------------------------------------------------

ROW = as_rows(example(1, 2))[0]
ROWS = as_rows(example(2, 2))
COLUMNS = as_json(example(2, 2))


def column(**changes):
    return {"inputs": COLUMNS | changes}


def row(**changes):
    return {"instances": [ROW | changes]}


def without(name, mapping):
    return {key: value for key, value in mapping.items() if key != name}


def raw(number):
    """A request whose `x` holds `number` as it is written."""
    text = json.dumps(row(x=[["HERE"] * 8, [0.0] * 8]))
    return text.replace('"HERE"', number).encode()


# (name, body, what the message says); `strict` ones TensorFlow Serving lets pass.
BAD = [
    ("no JSON", b"{", "Cannot read"),
    ("no body", b"", "Cannot read"),
    ("not text", b"\xff\xfe\x00", "Cannot read"),
    ("nested without end", b"[" * 100_000, "Cannot read"),
    ("a list", [], "must be a JSON object. Received: a list"),
    ("null", None, "must be a JSON object. Received: null"),
    ("nothing asked", {}, "not neither"),
    ("both formats", {"instances": ROWS, "inputs": COLUMNS}, "not both"),
    ("null for instances", {"instances": None}, "at least one row. Received: null"),
    ("instances no list", {"instances": 3}, "at least one row. Received: 3"),
    ("no instances", {"instances": []}, "at least one row"),
    ("unknown signature", {"signature_name": "predict", "inputs": COLUMNS}, "must be one of"),
    ("signature no string", {"signature_name": 1, "inputs": COLUMNS}, "must be one of"),
    ("a row lacks an input", {"instances": [without("x", ROW)]}, "['x'] missing"),
    ("a column is missing", {"inputs": without("x", COLUMNS)}, "['x'] missing"),
    ("the second row is a list", {"instances": [ROW, [1]]}, "`instances[1]` must be an object"),
    ("the second row lacks", {"instances": [ROW, without("x", ROW)]}, "`instances[1]` must hold"),
    ("bare rows for three inputs", {"instances": [[1, 2]]}, "has 3"),
    ("bare tensor for three inputs", {"inputs": [[1, 2]]}, "has 3"),
    (
        "ragged between rows",
        {"instances": [ROW, ROW | {"token_ids": [1, 2, 3]}]},
        "`token_ids` is ragged: rows of [2, 3]",
    ),
    ("ragged within a row", row(x=[[0.0] * 8, [0.0] * 7]), "`x` is ragged: rows of [7, 8]"),
    ("lists beside elements", row(token_ids=[1, [2]]), "`token_ids` is ragged"),
    ("rank too low", column(token_ids=[1, 2]), "must have rank 2, shape (any, any)"),
    ("rank too high", column(token_ids=[[[1]], [[2]]]), "must have rank 2"),
    ("a scalar", column(x=1.0), "must have rank 3"),
    ("a wrong size", row(x=[[0.0] * 7] * 2), "shape (any, any, 8). Received: (1, 2, 7)"),
    ("0 and 1 for booleans", row(padding_mask=[1, 0]), "must be true or false. Received: 1"),
    ("strings for booleans", row(padding_mask=["true", "x"]), 'Received: "true"'),
    ("a fraction for an integer", row(token_ids=[1.5, 2]), "must be integers. Received: 1.5"),
    ("a string for a number", row(x=[["1"] * 8] * 2), 'must be numbers. Received: "1"'),
    ("null in place of a number", row(token_ids=[None, 1]), "must be integers. Received: null"),
    ("an object for a number", row(token_ids=[{}, 1]), "Received: an object"),
    ("past int32", row(token_ids=[2**31, 1]), "must lie in [-2147483648, 2147483647]"),
    ("lengths that do not fit", row(padding_mask=[True] * 3), "cannot compute this request"),
]
STRICT = [
    ("an unknown key", {"signature": "double", "inputs": COLUMNS}, "also: ['signature']"),
    # (Elsewhere: test_a_mask_of_batch_1.)
    ("a mask of batch 1", column(padding_mask=[[True, True]]), "the same batch size"),
    ("an unknown input", column(mask=[[True]]), "['mask'] unknown"),
    ("booleans for integers", row(token_ids=[True, 1]), "must be integers. Received: true"),
    ("NaN", raw("NaN"), "Cannot read"),
    ("infinity", raw("1e999"), "finite|Cannot read"),
    ("past float32", row(x=[[1e39] * 8] * 2), "must be finite in float32"),
    ("an integer of 400 digits", raw("1" + "0" * 400), "must be finite|Cannot read"),
    ("no rows in the columns", {"signature_name": "double", "inputs": []}, "rank 2"),
    ("a batch of none", column(token_ids=[], padding_mask=[], x=[]), "rank"),
    ("an empty batch", {"signature_name": "slow", "inputs": []}, "at least one row"),
]


def malformed(endpoint, table):
    """`{name: answer}` of those that are not refused with 400 and their message."""
    import re

    wrong = {}
    for name, body, message in table:
        data = body if isinstance(body, bytes) else json.dumps(body)
        answer = requests.post(endpoint.url + ":predict", data=data, timeout=60)
        error = answer.json().get("error", "") if answer.text else ""
        parts = message.split("|")
        fits = any(re.search(re.escape(part), error) for part in parts) or not endpoint.ours
        if answer.status_code != 400 or not error or not fits:
            wrong[name] = (answer.status_code, answer.text)
    return wrong


def test_malformed_requests_are_refused_with_the_rule_they_break(endpoint):
    assert len(BAD) > 30
    assert malformed(endpoint, BAD) == {}
    assert "outputs" in ask(endpoint, {"inputs": COLUMNS})


def test_what_tensorflow_serving_lets_pass_is_refused_too(endpoint):
    if not endpoint.ours:
        pytest.skip("our server is stricter")
    assert malformed(endpoint, STRICT) == {}
    assert "outputs" in ask(endpoint, {"inputs": COLUMNS})


def test_paths_that_lead_nowhere(endpoint):
    base, _, name = endpoint.url.rpartition("/")
    body = {"signature_name": "double", "inputs": [[1]]}
    assert requests.post(f"{base}/no-{name}:predict", json=body, timeout=60).status_code == 404
    assert requests.get(f"{base}/no-{name}", timeout=60).status_code == 404
    for path in (":predict", "/nowhere"):  # GET of the first
        answer = requests.get(endpoint.url + path, timeout=60)
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"] or not endpoint.ours
