"""The development server beyond single requests: V2, limits, and its life as a process."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_model import as_json, as_rows, as_v2, example, publish
from tolerance import assert_close

from keras_headmask.server.main import main

requests = pytest.importorskip("requests")
pytest.importorskip("kserve", reason='needs `pip install -e ".[server]"`')
pytestmark = pytest.mark.tensorflow

ROOT = pathlib.Path(__file__).parents[2]
# The whole: KERAS_HEADMASK_LOAD_SECONDS=60 python -m pytest tests/server/test_server.py -k load
LOAD_SECONDS = float(os.environ.get("KERAS_HEADMASK_LOAD_SECONDS", "10"))


# --- In this process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def v2(ours):
    return ours.url.replace("/v1/", "/v2/")


def test_v2_answers(v2, models):
    inputs = example(2, 5)
    answer = requests.post(v2 + "/infer", json={"id": "7", "inputs": as_v2(inputs)}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["id"], found["model_name"], found["model_version"]) == ("7", "tiny", "1")
    y, first = (next(o for o in found["outputs"] if o["name"] == name) for name in ("y", "first"))
    assert (y["datatype"], y["shape"], first["shape"]) == ("FP32", [2, 5, 8], [2, 8])
    expected = models[1]([inputs[name] for name in ("token_ids", "padding_mask", "x")])["y"]
    assert_close(np.reshape(y["data"], y["shape"]), expected)

    body = {
        "parameters": {"signature_name": "double"},
        "inputs": [{"name": "token_ids", "datatype": "INT32", "shape": [1, 2], "data": [[1, 2]]}],
        "outputs": [{"name": "doubled"}],
    }
    for path in ("/infer", "/versions/1/infer"):
        (output,) = requests.post(v2 + path, json=body, timeout=60).json()["outputs"]
        assert (output["name"], output["datatype"]) == ("doubled", "INT32")
        assert (output["shape"], output["data"]) == ([1, 2], [2, 4])


def test_v2_metadata_and_health(v2):
    found = requests.get(v2, timeout=60).json()
    assert {tensor["name"]: tensor["datatype"] for tensor in found["inputs"]} == {
        "token_ids": "INT32",
        "padding_mask": "BOOL",
        "x": "FP32",
    }
    assert [t["shape"] for t in found["inputs"] if t["name"] == "x"] == [[-1, -1, 8]]
    assert [tensor["name"] for tensor in found["outputs"]] == ["first", "y"]
    root = v2.partition("/models")[0]
    assert requests.get(root.removesuffix("/v2"), timeout=60).json() == {"status": "alive"}
    for path in ("/health/live", "/health/ready", "/models/tiny/ready"):
        assert requests.get(root + path, timeout=60).status_code == 200


INPUTS = as_v2(example(1, 2))
MASK = next(tensor for tensor in INPUTS if tensor["name"] == "padding_mask")


def with_mask(**changes):
    return {"inputs": [tensor for tensor in INPUTS if tensor is not MASK] + [MASK | changes]}


BAD_V2 = [
    ("a list", [], "V2's form"),
    ("no inputs", {}, "V2's form"),
    ("inputs by name", {"inputs": {"x": 1}}, "V2's form"),
    ("an input without data", {"inputs": [{"name": "x"}]}, "V2's form"),
    ("no JSON", b"{", "V2's form"),
    ("inputs missing", {"inputs": INPUTS[:1]}, "missing"),
    ("an unknown input", {"inputs": [*INPUTS, MASK | {"name": "mask"}]}, "['mask'] unknown"),
    ("a name twice", {"inputs": [*INPUTS, MASK]}, "a name of its own"),
    ("another datatype", with_mask(datatype="INT32"), "must have datatype BOOL. Received: INT32"),
    ("an unknown datatype", with_mask(datatype="MASK"), "must have datatype BOOL"),
    ("too few elements", with_mask(data=[True]), "must hold 2 elements. Received: 1"),
    ("another rank", with_mask(shape=[2]), "must have rank 2"),
    ("negative sizes", with_mask(shape=[-1, -2]), "must lie in [0, 2**31)"),
    ("a size past memory", with_mask(shape=[0, 10**18], data=[]), "must lie in [0, 2**31)"),
    ("ragged", with_mask(data=[[True], True]), "`padding_mask` is ragged"),
    ("1 for true", with_mask(data=[1, 1]), "must be true or false. Received: 1"),
    ("a batch apart", with_mask(shape=[2, 1]), "the same batch size"),
    (
        "an unknown signature",
        {"inputs": INPUTS, "parameters": {"signature_name": "no"}},
        "`signature_name` must be one of",
    ),
    ("an unknown output", {"inputs": INPUTS, "outputs": [{"name": "z"}]}, "must be among"),
    (
        "NaN",
        json.dumps({"inputs": [*INPUTS[:2], INPUTS[2] | {"data": [float("nan")] * 16}]}).encode(),
        "must be finite",
    ),
]


def test_malformed_v2_requests_are_refused(v2):
    wrong = {}
    json_type = {"content-type": "application/json"}
    for name, body, message in BAD_V2:
        data = body if isinstance(body, bytes) else json.dumps(body)
        answer = requests.post(v2 + "/infer", data=data, headers=json_type, timeout=60)
        if answer.status_code != 400 or message not in answer.json()["error"]:
            wrong[name] = (answer.status_code, answer.text)
    # KServe's binary form: numbers in headers and bodies that are none.
    for name, header, body in (
        ("no header", {}, b"{}"),
        ("no number", {"inference-header-content-length": "x"}, b"{}"),
        ("no inputs", {"inference-header-content-length": "2"}, b"{}"),
        ("no JSON", {"inference-header-content-length": "1"}, b"{}"),
    ):
        answer = requests.post(v2 + "/infer", data=body, headers=header, timeout=60)
        if answer.status_code != 400 or "error" not in answer.json():
            wrong[name] = (answer.status_code, answer.text)
    assert wrong == {}
    assert requests.post(v2 + "/infer", json={"inputs": INPUTS}, timeout=60).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def changed(value, data):
    """`value` with one part of it, at any depth, replaced by any JSON or taken away."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(JSON)
    copy = value.copy()
    key = data.draw(
        st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value)))
    )
    if data.draw(st.integers(0, 4)) == 0:
        del copy[key]
    else:
        copy[key] = changed(value[key], data)
    return copy


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_request_is_an_error_of_the_server(ours, v2, data):
    """Valid requests of both dialects, damaged anywhere: answered, or refused with a reason."""
    url, body = data.draw(
        st.sampled_from(
            [
                (ours.url + ":predict", {"inputs": as_json(example(1, 2))}),
                (ours.url + ":predict", {"instances": as_rows(example(2, 1))}),
                (v2 + "/infer", {"inputs": INPUTS, "outputs": [{"name": "y"}]}),
            ]
        )
    )
    text = json.dumps(changed(body, data)).encode()
    answer = requests.post(url, data=text, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code in (200, 400), (text, answer.text)
    assert answer.status_code == 200 or answer.json()["error"]


def test_what_clients_may_not_do(ours, v2):
    root = v2.partition("/models")[0]
    for url, code in (
        (f"{root}/repository/models/tiny/unload", 400),
        (f"{root}/repository/models/tiny/load", 400),
        (ours.url + ":explain", 400),
        (ours.url + "/labels/stable:predict", 404),
    ):
        answer = requests.post(url, json={}, timeout=60)
        assert answer.status_code == code, (url, answer.text)
    cloud_event = {"ce-id": "1", "ce-type": "t", "ce-source": "s", "ce-specversion": "1.0"}
    body = {"signature_name": "double", "inputs": [[1]]}
    answer = requests.post(ours.url + ":predict", json=body, headers=cloud_event, timeout=60)
    assert answer.json() == {"outputs": [[2]]}  # read as plain JSON, and answered so
    assert not [header for header in answer.headers if header.lower().startswith("ce-")]


def test_a_version_asked_for_is_the_one_that_answers(ours):
    """Also where it is replaced between the look at the path and the answer."""
    body = {"signature_name": "double", "inputs": [[1]]}
    header = {"x-asked-version": "7"}  # what the path would have said
    answer = requests.post(ours.url + ":predict", json=body, headers=header, timeout=60)
    assert answer.status_code == 404
    assert answer.json()["error"] == "Version 7 is not served."


def test_any_content_type(ours):
    data = json.dumps({"signature_name": "double", "inputs": [[1]]})
    for content_type in ("application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        answer = requests.post(
            ours.url + ":predict", data=data, headers={"content-type": content_type}, timeout=60
        )
        assert answer.json() == {"outputs": [[2]]}


def metric(url, line):
    text = requests.get(url.partition("/v1/")[0] + "/metrics", timeout=60).text
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count(ours):
    names = (
        'keras_headmask_requests_total{code="400"}',
        'request_predict_seconds_count{model_name="tiny"}',  # KServe's own
    )
    before = [metric(ours.url, name) for name in names]
    assert requests.post(ours.url + ":predict", json={}, timeout=60).status_code == 400
    assert [metric(ours.url, name) for name in names] == [count + 1 for count in before]
    assert metric(ours.url, 'keras_headmask_model_version{model_name="tiny"}') == 1


# --- Before anything is served --------------------------------------------------------------------


def failure(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_an_address_in_use_is_an_error_before_the_model_is_loaded(tmp_path):
    (tmp_path / "1").mkdir()  # which would not load
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = failure(tmp_path, "--name", "tiny", "--port", port)
    assert error.startswith(f"Error: Cannot listen on 127.0.0.1, port {port}: Address")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a/b"], "`name` must be made of letters"),
        (["--port", -1], "Invalid value for '--port': -1 is not in the range 0<=x<=65535."),
        (["--port", 70000], "Invalid value for '--port': 70000 is not in the range"),
        (["--poll-seconds", 0], "Invalid value for '--poll-seconds': 0.0 is not in the range x>0."),
        (["--max-request-bytes", -1], "Invalid value for '--max-request-bytes'"),
        (["--grace-seconds", 0], "Invalid value for '--grace-seconds'"),
        ([], "holds no version"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, arguments, message):
    assert message in failure(tmp_path, *arguments)


def test_without_the_extra_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "kserve"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "keras_headmask.server.kserve_app", raising=False)
    monkeypatch.delattr("keras_headmask.server.kserve_app", raising=False)
    error = failure(tmp_path)
    assert error.startswith("Error: The development server needs KServe")
    assert 'pip install "kserve>=0.21' in error


def test_help_names_defaults_and_what_writes_versions():
    text = " ".join(CliRunner().invoke(main, ["--help"]).stdout.split())
    assert "`keras-headmask export` writes them" in text
    assert "[default: 8501;" in text
    assert "None" not in text


# --- As a process ---------------------------------------------------------------------------------


class Process:
    """`python -m keras_headmask.server` with its output read line by line."""

    def __init__(self, base):
        self.base = base
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "keras_headmask.server", base, "--name", "tiny"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--poll-seconds", "0.1"],
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines, self._news = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.wait("Listening on ").removeprefix("Listening on ")

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("ended")
            self._news.notify_all()

    def wait(self, start):
        """The first line that begins so."""
        with self._news:
            self._news.wait_for(
                lambda: any(line.startswith((start, "ended")) for line in self.lines), timeout=120
            )
            found = [line for line in self.lines if line.startswith(start)]
        assert found, self.lines
        return found[0]


@pytest.fixture(scope="module")
def process(exports, tmp_path_factory):
    """A server, its base path in `base`; the last test ends it."""
    base = tmp_path_factory.mktemp("process")
    publish(exports[1], base, 1)
    server = Process(base)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.long  # (`test_served_versions` swaps and breaks versions every day)
def test_a_load_of_requests_over_versions_that_swap_and_break(exports, models, process):
    """Eight clients without pause: no request fails, and each gets the answer of one version."""
    inputs = example(2, 7)
    body = json.dumps({"signature_name": "serving_default", "inputs": as_json(inputs)}).encode()
    arrays = [inputs[name] for name in ("token_ids", "padding_mask", "x")]
    y = {scale: np.asarray(model(arrays)["y"]) for scale, model in models.items()}
    may_be = {1}  # scales of the versions that an answer may stem from
    stop, failures, answers = threading.Event(), [], []

    def client(url):
        session = requests.Session()
        while not stop.is_set():
            allowed = set(may_be)
            try:
                answer = session.post(url + ":predict", data=body, timeout=60)
                allowed |= may_be
                found = np.array(answer.json()["outputs"]["y"])
                fits = [scale for scale in allowed if np.allclose(found, y[scale], atol=1e-4)]
                if answer.status_code != 200 or not fits:
                    failures.append((answer.status_code, allowed, answer.text[:200]))
                answers.append(*fits[:1])
            except Exception as error:  # a refused or cut connection, above all
                failures.append(repr(error))
                answers.append(None)

    def swap(version, scale):
        """Publish, and narrow down what is allowed once the server has reported it."""
        may_be.add(scale)
        publish(exports[scale], process.base, version)
        process.wait(f"Serving version {version}")
        may_be.intersection_update({scale})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert process.url.startswith("http://127.0.0.1:")
        clients = [pool.submit(client, process.url) for _ in range(8)]
        try:
            time.sleep(LOAD_SECONDS / 4)
            swap(2, scale=2)
            time.sleep(LOAD_SECONDS / 4)
            broken = process.base / ".broken"
            shutil.copytree(exports[1], broken)
            data = next(broken.glob("variables/*.data-*"))
            data.write_bytes(data.read_bytes()[:40])
            broken.rename(process.base / "3")
            process.wait("Version 3 does not load.")
            time.sleep(LOAD_SECONDS / 4)
            status = requests.get(process.url, timeout=60).json()["model_version_status"]
            swap(4, scale=1)
            time.sleep(LOAD_SECONDS / 4)
        finally:
            stop.set()
        for done in clients:
            done.result()
    assert failures == []
    assert {answers.count(1) > 20, answers.count(2) > 20} == {True}, len(answers)
    assert [(s["version"], s["state"]) for s in status] == [("3", "END"), ("2", "AVAILABLE")]
    print(f"{len(answers)} requests, none failed")


def test_sigterm_lets_requests_in_progress_finish(process):
    """The last test of the server: it ends."""

    def slow(steps):
        body = {"signature_name": "slow", "inputs": [steps]}
        return requests.post(process.url + ":predict", json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(requests.ConnectionError):  # loopback's other addresses: not even those
            requests.get(process.url.replace("127.0.0.1", "127.0.0.2"), timeout=60)
        start = time.perf_counter()
        assert slow(500).json() == {"outputs": [256.0]}
        second = int(500 / (time.perf_counter() - start))
        answer = pool.submit(slow, 2 * second)  # so long that it is under way at the signal
        while metric(process.url, "keras_headmask_requests_under_way") < 2:  # that one is the first
            assert not answer.done()
        process.process.send_signal(signal.SIGTERM)
        assert answer.result().json() == {"outputs": [256.0]}
        assert process.process.wait(timeout=60) == 0
        process.wait("Stopped")
        with pytest.raises(requests.ConnectionError):
            requests.get(process.url, timeout=60)
