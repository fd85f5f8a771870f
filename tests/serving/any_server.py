"""Asks a running TensorFlow Serving what clients ask, and compares its answers with the model's.

python tests/serving/any_server.py write /tmp/tiny   # then serve /tmp/tiny as model `tiny`
python tests/serving/any_server.py ask http://localhost:8501 --grpc localhost:8500 --batching none

--batching says how the server merges requests, since right answers follow from it: `none`;
`batching`, with --enable_batching; `padding`, with `pad_variable_length_inputs: true`, too.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import serving_model  # noqa: E402
from serving_model import as_json, as_rows, example  # noqa: E402
from tolerance import assert_close  # noqa: E402

KINDS = ("none", "batching", "padding")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how the server merges requests: right answers follow from that."""

    url: str  # up to the model's name
    kind: str


@pytest.fixture(scope="session")
def model():
    return serving_model.build()


@pytest.fixture(scope="session")
def endpoint():
    url, kind = os.environ["TF_SERVING_URL"], os.environ["TF_SERVING_BATCHING"]
    return Endpoint(f"{url.rstrip('/')}/v1/models/tiny", kind)


def ask(endpoint, body, path=":predict"):
    response = requests.post(endpoint.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def expected(model, inputs):
    outputs = model([inputs[name] for name in ("token_ids", "padding_mask", "x")])
    return {name: np.asarray(output) for name, output in outputs.items()}


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (5, 17)])
def test_by_row(endpoint, model, batch, length):
    inputs = example(batch, length)
    rows = ask(endpoint, {"instances": as_rows(inputs)})["predictions"]
    for name, output in expected(model, inputs).items():
        assert_close([row[name] for row in rows], output)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 3), (5, 17)])
def test_by_column(endpoint, model, batch, length):
    inputs = example(batch, length)
    body = {"signature_name": "serving_default", "inputs": as_json(inputs)}
    outputs = ask(endpoint, body)["outputs"]
    assert outputs.keys() == {"y", "first"}
    for name, output in expected(model, inputs).items():
        assert_close(outputs[name], output)


def test_one_input_and_one_output_stand_without_names(endpoint):
    body = {"signature_name": "double"}
    rows = ask(endpoint, body | {"instances": [[1, 2], [3, 4]]})
    assert rows == {"predictions": [[2, 4], [6, 8]]}
    assert ask(endpoint, body | {"instances": [{"token_ids": [1, 2]}]}) == {"predictions": [[2, 4]]}
    assert ask(endpoint, body | {"inputs": [[1, 2]]}) == {"outputs": [[2, 4]]}
    assert ask(endpoint, body | {"inputs": {"token_ids": [[1, 2]]}}) == {"outputs": [[2, 4]]}


def test_the_masks_are_obeyed(endpoint, model):
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


def test_padding_by_the_first_element_is_safe_with_lengths(endpoint, model):
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
    assert_close(y[:, :3], expected(model, short)["y"])
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


def test_many_clients_of_many_shapes(endpoint, model):
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
        assert_close(y, expected(model, inputs)["y"])


def test_lengths_that_cannot_be_merged_are_refused_and_never_answered_wrongly(endpoint, model):
    if endpoint.kind != "batching":
        pytest.skip("of servers that batch and do not pad")

    def one(shape, seed):
        inputs = example(*shape, seed=seed)
        body = {"inputs": as_json(inputs)}
        return inputs, requests.post(endpoint.url + ":predict", json=body, timeout=60)

    for inputs, answer in at_once(one, SHAPES):
        if answer.status_code == 200:
            assert_close(answer.json()["outputs"]["y"], expected(model, inputs)["y"])
        else:
            assert answer.json()["error"]
    inputs = example(2, 3)
    y = ask(endpoint, {"inputs": as_json(inputs)})["outputs"]["y"]  # alone, nothing is in its path
    assert_close(y, expected(model, inputs)["y"])


def test_a_mask_of_batch_1(endpoint, model):
    """It broadcasts where requests are not merged; else it fails, and alone."""
    inputs = example(4, 5)
    inputs["padding_mask"] = inputs["padding_mask"][:1]
    answer = requests.post(endpoint.url + ":predict", json={"inputs": as_json(inputs)}, timeout=60)
    if endpoint.kind == "none":
        inputs["padding_mask"] = np.repeat(inputs["padding_mask"], 4, axis=0)
        assert answer.status_code == 200, answer.text
        assert_close(answer.json()["outputs"]["y"], expected(model, inputs)["y"])
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]


def test_grpc(model):
    address = os.environ.get("TF_SERVING_GRPC")
    if not address:
        pytest.skip("no --grpc")
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tensorflow_serving", reason="pip install --no-deps tensorflow-serving-api")
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    inputs = example(4, 9)
    message = predict_pb2.PredictRequest()
    message.model_spec.name = "tiny"
    message.model_spec.signature_name = "serving_default"
    for name, array in inputs.items():
        message.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    unlimited = [("grpc.max_receive_message_length", -1)]  # a client's own limit is 4 MB
    with grpc.insecure_channel(address, options=unlimited) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(message, timeout=60)
        for name, output in expected(model, inputs).items():
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


MALFORMED = {
    "no JSON": b"{",
    "no body": b"",
    "not text": b"\xff\xfe\x00",
    "nested without end": b"[" * 100_000,
    "a list": [],
    "null": None,
    "nothing asked": {},
    "both formats": {"instances": ROWS, "inputs": COLUMNS},
    "null for instances": {"instances": None},
    "instances no list": {"instances": 3},
    "no instances": {"instances": []},
    "unknown signature": {"signature_name": "predict", "inputs": COLUMNS},
    "signature no string": {"signature_name": 1, "inputs": COLUMNS},
    "a row lacks an input": {"instances": [without("x", ROW)]},
    "a column is missing": {"inputs": without("x", COLUMNS)},
    "the second row is a list": {"instances": [ROW, [1]]},
    "the second row lacks": {"instances": [ROW, without("x", ROW)]},
    "bare rows for three inputs": {"instances": [[1, 2]]},
    "bare tensor for three inputs": {"inputs": [[1, 2]]},
    "ragged between rows": {"instances": [ROW, ROW | {"token_ids": [1, 2, 3]}]},
    "ragged within a row": row(x=[[0.0] * 8, [0.0] * 7]),
    "lists beside elements": row(token_ids=[1, [2]]),
    "rank too low": column(token_ids=[1, 2]),
    "rank too high": column(token_ids=[[[1]], [[2]]]),
    "a scalar": column(x=1.0),
    "a wrong size": row(x=[[0.0] * 7] * 2),
    "0 and 1 for booleans": row(padding_mask=[1, 0]),
    "strings for booleans": row(padding_mask=["true", "x"]),
    "a fraction for an integer": row(token_ids=[1.5, 2]),
    "a string for a number": row(x=[["1"] * 8] * 2),
    "null in place of a number": row(token_ids=[None, 1]),
    "an object for a number": row(token_ids=[{}, 1]),
    "past int32": row(token_ids=[2**31, 1]),
    "lengths that do not fit": row(padding_mask=[True] * 3),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_and_the_next_one_answered(endpoint, name):
    body = MALFORMED[name]
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = requests.post(endpoint.url + ":predict", data=data, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]
    assert "outputs" in ask(endpoint, {"inputs": COLUMNS})


def test_paths_that_lead_nowhere(endpoint):
    base, _, name = endpoint.url.rpartition("/")
    body = {"signature_name": "double", "inputs": [[1]]}
    assert requests.post(f"{base}/no-{name}:predict", json=body, timeout=60).status_code == 404
    assert requests.get(f"{base}/no-{name}", timeout=60).status_code == 404
    for path in (":predict", "/nowhere"):  # GET of the first
        answer = requests.get(endpoint.url + path, timeout=60)
        assert 400 <= answer.status_code < 500


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the model as FOLDER/1")
    write.add_argument("folder", type=pathlib.Path)
    ask = commands.add_parser("ask", help="ask the server that serves it as `tiny`")
    ask.add_argument("url", help="of REST, such as http://localhost:8501")
    ask.add_argument("--grpc", metavar="HOST:PORT", help="ask over gRPC, too")
    ask.add_argument("--batching", choices=KINDS, required=True)
    arguments = parser.parse_args()
    if arguments.command == "write":
        return serving_model.export(serving_model.build(), arguments.folder / "1")
    os.environ |= {"TF_SERVING_URL": arguments.url, "TF_SERVING_BATCHING": arguments.batching}
    os.environ["TF_SERVING_GRPC"] = arguments.grpc or ""
    return sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "tensorflow"
    main()
