"""What clients of the development server may send, hold and delay; and how it ends."""

import json
import re
import socket
import threading
import time
import types
from urllib.parse import urlsplit

import numpy as np
import pytest
from running_server import running

requests = pytest.importorskip("requests")
pytest.importorskip("kserve", reason='needs `pip install -e ".[server]"`')
pytestmark = pytest.mark.tensorflow  # no backend has a part in it: one run is enough

PATH = "/v1/models/tiny:predict"
BODY = json.dumps({"instances": [[1, 2]]}).encode()
ANSWER = {"predictions": [[2, 4]]}
WAIT = 60  # seconds until a test gives up, not a speed that it asks for


class Doubling:
    """Versions of which the current one doubles numbers, once `go` is set."""

    def __init__(self):
        from keras_headmask.server.predict_requests import DEFAULT_SIGNATURE, Signature, Tensor

        tensors = {"x": Tensor("int32", (None, None))}
        signature = Signature(DEFAULT_SIGNATURE, tensors, tensors, self._call)
        self.current = types.SimpleNamespace(
            version=1, signatures={DEFAULT_SIGNATURE: signature}, definitions={}
        )
        self.failures = {}
        self.go, self.called = threading.Event(), threading.Event()
        self.go.set()

    def _call(self, arrays):
        self.called.set()
        assert self.go.wait(WAIT)
        return {"x": 2 * np.asarray(arrays["x"])}


class Client:
    """A connection on which a test sends what no library would."""

    def __init__(self, url, receive_buffer=None):
        place = urlsplit(url)
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT)
        self.socket.connect((place.hostname, place.port))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def send_slowly(self, data, times):
        for _ in range(times):
            self.send(data)
            time.sleep(0.02)

    def post(self, body, length=None, headers=b""):
        head = f"POST {PATH} HTTP/1.1\r\nhost: tiny\r\ncontent-length: {length or len(body)}\r\n"
        self.send(head.encode() + headers + b"\r\n" + body)

    def answer(self):
        """Status, headers, and the body as JSON."""
        text = b""
        while b"\r\n\r\n" not in text:
            part = self.socket.recv(2**16)
            assert part, text
            text += part
        head, body = text.split(b"\r\n\r\n", 1)
        headers = head.decode().lower()
        while len(body) < int(re.search(r"content-length: (\d+)", headers)[1]):
            body += self.socket.recv(2**16)
        return int(head.split()[1]), headers, json.loads(body)

    def rest(self):
        """All that comes until the server closes or resets the connection."""
        text = b""
        try:
            while part := self.socket.recv(2**16):
                text += part
        except ConnectionError:
            pass
        return text


def metric(url, name):
    text = requests.get(url.partition("/v1/")[0] + "/metrics", timeout=WAIT).text
    return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


def wait_until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_headers_are_bounded():
    with running(Doubling(), header_bytes=10_000) as endpoint:
        for start in (b"GET / HTTP/1.1\r\nhost: tiny\r\n", b"GET /"):
            with Client(endpoint.url) as client:
                client.send(start)
                sent = 0
                try:
                    for _ in range(200):  # 13 MB; each a header of its own, or one long line
                        client.send(b"x: " + b"a" * 2**16 + b"\r\n" * (start[-1:] == b"\n"))
                        sent += 2**16
                        time.sleep(0)
                except ConnectionError:
                    pass
                else:
                    raise AssertionError(f"{sent} bytes of headers were taken")
        assert requests.get(endpoint.url, timeout=WAIT).status_code == 200


def test_requests_past_the_limit():
    text = json.dumps({"instances": [[0] * 100_000]}).encode()
    chunks = (text[i : i + 4096] for i in range(0, len(text), 4096))  # sent without a length
    with running(Doubling(), max_request_bytes=20_000) as endpoint:
        for data in (text, chunks):
            answer = requests.post(endpoint.url + ":predict", data=data, timeout=WAIT)
            assert answer.status_code == 413
            assert answer.json() == {"error": "The request is larger than 20000 bytes."}
        assert requests.get(endpoint.url, timeout=WAIT).status_code == 200


def test_bodies_are_bounded_in_sum():
    body = json.dumps({"instances": [[1] * 5000]}).encode()
    limit = int(1.5 * len(body))
    with running(Doubling(), bytes_in_all=limit) as endpoint, Client(endpoint.url) as first:
        first.post(body[:-1], len(body))
        wait_until(lambda: metric(endpoint.url, "keras_headmask_body_bytes") == len(body) - 1)
        for _ in range(3):
            with Client(endpoint.url) as other:
                other.post(body)
                status, headers, found = other.answer()
                assert (status, "retry-after: 1" in headers) == (503, True)
                assert f"hold {limit} bytes" in found["error"]
        first.send(body[-1:])
        assert first.answer()[0] == 200
        with Client(endpoint.url) as other:
            other.post(body)
            assert other.answer()[0] == 200
            wait_until(lambda: metric(endpoint.url, "keras_headmask_body_bytes") == 0)
        with Client(endpoint.url) as gone:
            gone.post(body[:-1], len(body))
            wait_until(lambda: metric(endpoint.url, "keras_headmask_body_bytes") > 0)
        wait_until(lambda: metric(endpoint.url, "keras_headmask_body_bytes") == 0)


def test_connections_are_bounded():
    with running(Doubling(), connections=3) as endpoint:
        held = [Client(endpoint.url) for _ in range(2)]
        try:
            wait_until(lambda: len(endpoint.server.server_state.connections) == 2)
            assert requests.get(endpoint.url, timeout=WAIT).status_code == 503
        finally:
            for client in held:
                client.socket.close()
        wait_until(lambda: requests.get(endpoint.url, timeout=WAIT).status_code == 200)


@pytest.fixture(scope="module")
def hasty():
    with running(Doubling(), read_seconds=1, send_buffer=4096) as endpoint:
        yield endpoint


@pytest.mark.parametrize("start", [b"", b"POST / HTTP/1.1\r\nhost: t"])
def test_a_client_that_sends_no_more_is_let_go(hasty, start):
    with Client(hasty.url) as client:
        client.send(start)
        assert client.rest() == b""


def test_a_client_that_is_slow_after_an_answer_is_let_go(hasty):
    with Client(hasty.url) as client:
        client.send(b"GET /v1/models/tiny HTTP/1.1\r\nhost: tiny\r\n\r\n")
        assert client.answer()[0] == 200
        client.send(b"G")
        assert client.rest() == b""


def test_headers_byte_by_byte_are_not_waited_for(hasty):
    with Client(hasty.url) as client:
        client.send(b"GET / HTTP/1.1\r\nx: ")
        with pytest.raises(ConnectionError):
            client.send_slowly(b"a", times=1200)


def test_a_body_that_does_not_arrive_is_answered(hasty):
    with Client(hasty.url) as client:
        client.post(BODY[:1], len(BODY))
        status, headers, found = client.answer()
        assert (status, "connection: close" in headers) == (408, True)
        assert found == {"error": "The request did not arrive whole in 1 seconds."}
        assert client.rest() == b""


def test_an_answer_that_is_not_taken_is_not_kept(hasty):
    asked = b"GET /metrics HTTP/1.1\r\nhost: tiny\r\n\r\n"
    with Client(hasty.url, receive_buffer=4096) as client, pytest.raises(ConnectionError):
        client.send_slowly(asked, times=1200)
    wait_until(lambda: len(hasty.server.server_state.connections) == 0)


def test_at_its_end_the_server_answers_who_has_connected():
    versions = Doubling()
    with (
        running(versions, linger_seconds=WAIT) as endpoint,
        Client(endpoint.url) as new,
        Client(endpoint.url) as idle,
        Client(endpoint.url) as sent,
    ):
        idle.post(BODY)
        assert idle.answer()[2] == ANSWER
        sent.post(BODY[:1], len(BODY))
        wait_until(lambda: len(endpoint.server.server_state.connections) == 3)
        wait_until(lambda: metric(endpoint.url, "keras_headmask_body_bytes") == 1)
        endpoint.server.should_exit = True
        versions.called.clear()
        versions.go.clear()
        wait_until(lambda: endpoint.server.server_state.default_headers[-1][0] == b"connection")
        late = Client(endpoint.url)  # not refused while others are waited for
        for client in (new, idle, late):
            client.post(BODY)
        sent.send(BODY[1:])
        assert versions.called.wait(WAIT)
        versions.go.set()
        for client in (new, idle, late, sent):
            status, headers, found = client.answer()
            assert (status, found) == (200, ANSWER)
            assert "connection: close" in headers
        late.socket.close()
