"""Our server in a thread of the test's process, asked over HTTP on loopback."""

import contextlib
import dataclasses
import socket
import threading


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask, and of which kind the server is: right answers follow from that.

    Ours merges no requests, and refuses what is malformed. TensorFlow Serving merges none ("none"),
    those of one length ("batching"), or pads them to one length ("padding").
    """

    url: str  # up to the model's name
    kind: str = "ours"
    server: object = None  # the `uvicorn.Server`, if it is ours

    @property
    def ours(self):
        return self.kind == "ours"


@contextlib.contextmanager
def running(versions, name="tiny", max_request_bytes=2**20, send_buffer=None, **limits):
    """The `Endpoint` of `versions` as model `name`, while the context lasts."""
    from keras_headmask.server import http_limits
    from keras_headmask.server.kserve_app import create_app

    limits = http_limits.Limits(request_bytes=max_request_bytes, **limits)
    app = create_app(versions, name, limits)
    server = http_limits.Server(app, limits, host="127.0.0.1", port=0, log_level="error")
    listener = server.config.bind_socket()
    if send_buffer is not None:  # a small one, so that an answer nobody takes soon waits
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Endpoint(
            f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models/{name}", server=server
        )
    finally:
        server.should_exit = True
        thread.join()
