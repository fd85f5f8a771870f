"""Several replicas behind a proxy: what is lost when one is killed, and how versions roll."""

import contextlib
import http.server
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

urllib3 = pytest.importorskip("urllib3")
pytestmark = pytest.mark.tensorflow

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
many = importlib.import_module("serve_many")
RETRY = many.CLIENTS["the client retries"][1]
BOTH = pytest.mark.parametrize("proxy", ["haproxy", "nginx"])


def installed(proxy=None):
    """The name and the program of a proxy; where there is none, the test is skipped."""
    try:
        return many.find_proxy(proxy)
    except FileNotFoundError as error:
        pytest.skip(str(error))


# --- The example ----------------------------------------------------------------------------------


def run_example(folder, monkeypatch, *arguments):
    """What the example reports; in this process, which has imported TensorFlow already."""
    for package in ("keras_hub", "kserve"):
        pytest.importorskip(package)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)  # for the servers
    many.main(["--quick", "--out", str(folder), *arguments])
    return json.loads((folder / "serve_many.json").read_text())


def check(report, printed):
    clients = report["clients"]
    assert clients.keys() == many.CLIENTS.keys()
    assert all(of_client["sent"] > 20 for of_client in clients.values())
    assert clients["the client retries"]["lost"] == 0
    assert report["wrong"] == 0  # each answer is that of a version's model
    assert report["answers"].keys() == {"a", "b"}
    for versions in report["answers"].values():
        assert versions["1"] > 0
        assert versions["2"] > 0
    assert report["last versions"] == {"a": 2, "b": 2}
    moments = report["moments"]
    assert moments["server a is killed"] < moments["server a answers again"]
    for name in "ab":
        assert f"server {name} serves version 2" in moments
    lost = clients["nobody retries"]["lost"]
    assert sum(clients["nobody retries"]["why"].values()) == lost >= 0
    assert re.search(
        rf"^nobody retries +{clients['nobody retries']['sent']} +{lost} ", printed, re.M
    )


@pytest.mark.long  # (one server is asked every day: `test_examples`)
def test_the_example(tmp_path, monkeypatch, capfd):
    """One server is killed and comes back, a version rolls: nothing that is retried is lost."""
    installed()
    check(run_example(tmp_path, monkeypatch, "--seconds", "0.5"), capfd.readouterr().out)


@pytest.mark.long
def test_the_example_with_the_other_proxy(tmp_path, monkeypatch, capfd):
    installed("nginx")
    report = run_example(tmp_path, monkeypatch, "--proxy", "nginx")
    check(report, capfd.readouterr().out)


def test_without_a_proxy_the_example_says_what_to_install(tmp_path, monkeypatch):
    """Before anything is exported."""
    monkeypatch.setattr(many.shutil, "which", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match=r"haproxy or nginx is not .*`apt-get install hapr"):
        many.main(["--quick", "--out", str(tmp_path / "out")])
    with pytest.raises(FileNotFoundError, match=r"nginx is not installed.*`apt-get install nginx`"):
        many.find_proxy("nginx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients must be at least 1. Received: 0."),
        (["--seconds", "0"], "--seconds must be positive. Received: 0.0."),
    ],
)
def test_numbers_out_of_range(arguments, message, capsys):
    with pytest.raises(SystemExit):
        many.main(arguments)
    assert message in capsys.readouterr().err


# --- Requests that are sent again -----------------------------------------------------------------


class Breaking(http.server.BaseHTTPRequestHandler):
    """Answers `{}`; a POST as `server.breaks` says: "before" or "within" the answer, or not."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        if self.server.breaks and self.server.asked <= self.server.times:
            self.close_connection = True
            if self.server.breaks == "within":
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{")
            return
        self.do_GET()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def listening(breaks=None, times=1):
    """A server that breaks off the first POSTs, so many."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        server.daemon_threads, server.asked = True, 0
        server.breaks, server.times = breaks, times
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("breaks", ["before", "within"])
def test_a_retrying_client_asks_again_where_an_answer_breaks_off(breaks):
    """A POST, too, and also within the body."""
    for retries, lost, asked in ((False, True, 1), (RETRY, False, 3)):
        with listening(breaks, times=2) as server, urllib3.PoolManager(timeout=60) as pool:
            url = f"http://127.0.0.1:{server.server_address[1]}/"
            answer, why = many.ask(pool, url, {}, retries)
            assert (bool(why), server.asked) == (lost, asked), why
        assert lost or answer.json() == {}


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"predictions": [[1, 2]]}', 1),
        (b'{"predictions": [[1, 2.1]]}', None),
        (b'{"predictions": [1, 2]}', None),  # broadcasts
        (b'{"predictions": []}', None),
        (b'{"predictions": [["a", null]]}', None),
        (b'{"error": "none"}', None),
        (b"[]", None),
        (b'{"predictions"', None),
    ],
)
def test_what_no_version_answers_counts_as_wrong(body, version):
    """Also what has no shape to compare: the client must not end without a word."""
    expected = {1: [np.array([[1.0, 2.0]])], 2: [np.array([[3.0, 4.0]])]}
    clients = many.Clients({}, [None], expected, {"127.0.0.1:1": "a"})
    headers = {"X-Replica": "127.0.0.1:2, 127.0.0.1:1"}
    about = clients._about(urllib3.HTTPResponse(body, headers), 0)
    assert (about["replica"], about["version"]) == ("a", version)
    assert clients._about(urllib3.HTTPResponse(body), 0)["replica"] == "no server"


@BOTH
def test_a_retrying_proxy_asks_the_other_server(proxy, tmp_path):
    """Also for a body of many packets; a proxy that does not retry loses the request."""
    _, program = installed(proxy)
    body = {"instances": list(range(20_000))}
    ports = dict(zip(("plain", "retrying"), many.free_ports(2), strict=True))
    with listening("before", times=10**9) as broken, listening() as well:
        replicas = {
            name: f"127.0.0.1:{server.server_address[1]}"
            for name, server in (("broken", broken), ("well", well))
        }
        config = many.write_config(proxy, tmp_path, replicas, ports)
        command = [program, *many.PROXIES[proxy].command, config]
        with many.running(command) as process, urllib3.PoolManager(timeout=60) as pool:
            for kind, port in ports.items():
                many.wait_until(lambda port=port: many.is_served(port), proxy, process)
                url, lost, broken.asked = f"http://127.0.0.1:{port}/", [], 0

                def until_it_breaks(url=url, lost=lost):
                    lost.append(many.ask(pool, url, body, False)[1])
                    return broken.asked  # nginx leaves it alone for two seconds after a failure

                many.wait_until(until_it_breaks, "the broken server is asked", process)
                assert [bool(why) for why in lost] == [False] * (len(lost) - 1) + [kind == "plain"]


@BOTH
def test_the_proxy_accepts_its_configuration(proxy, tmp_path):
    _, program = installed(proxy)
    ports = dict(zip(("plain", "retrying"), many.free_ports(2), strict=True))
    config = many.write_config(proxy, tmp_path, {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}, ports)
    flags = {"haproxy": ("-c", "-f"), "nginx": ("-t", "-c")}[proxy]
    run = subprocess.run([program, *flags, config], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not re.search(r"warn", run.stderr, re.I), run.stderr


# --- The sums of docs/serving.md ------------------------------------------------------------------


def test_the_sums_take_the_measured_seconds():
    record = json.loads((ROOT / "benchmarks/results/serving.json").read_text())
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^rate, seconds, busy = \d+, ([\d.]+)", page, re.MULTILINE)
    assert float(seconds) == round(record["c++"]["seconds"]["rule"], 3)
    assert f"{record['batch']} rows of {record['length']} tokens" in page
    assert record["machine"]["cores"] == 2
    assert "the two cores" in page


@pytest.mark.long
def test_what_a_replica_holds_is_measured(tmp_path):
    for package in ("keras_hub", "kserve", "requests"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "benchmarks.replica", "--quick", "--out", tmp_path / "r.json"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["mib"]["idle"] > record["weights_mib"] > 0
    assert record["parameters"] * 4 / 2**20 == record["weights_mib"]


def test_the_sums_take_the_measured_memory():
    """What the page says of memory is what the record holds, and its formula is near it."""
    page = " ".join((ROOT / "docs/serving.md").read_text(encoding="utf-8").split())
    record = json.loads((ROOT / "benchmarks/results/replica.json").read_text(encoding="utf-8"))
    mib = record["mib"]
    added, at_once = (
        mib["a request adds at most"],
        mib["requests of 8 x 256 in progress add at most"],
    )
    assert not record["quick"]
    assert f"the first {mib['idle, a tiny model']:.0f} MiB" in page
    assert (
        f"idle {mib['idle']:.0f} MiB; a request of 8 x 256 added {added['8 x 256']:.0f} MiB" in page
    )
    assert (
        f"one of 16 x 256 {added['16 x 256']:.0f}, one of 8 x 512 {added['8 x 512']:.0f};" in page
    )
    assert f"four of 8 x 256 at once {at_once['4']:.0f}, " in page
    assert f"a new version {mib['a new version adds at most']:.0f}." in page
    fixed, each = re.search(r"return (\d+) \+ rows \* tokens \* (\d+) / 1024", page).groups()
    for size, measured in added.items():
        rows, tokens = map(int, size.split(" x "))
        assert int(fixed) + rows * tokens * int(each) / 1024 == pytest.approx(measured, rel=0.1)
