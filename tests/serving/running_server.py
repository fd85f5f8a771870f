"""Our server in a thread of the test's process, asked over HTTP on loopback."""

import contextlib
import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask, and of which kind the server is: right answers follow from that.

    Ours merges no requests, and refuses what is malformed. TensorFlow Serving merges none ("none"),
    those of one length ("batching"), or pads them to one length ("padding").
    """

    url: str  # up to the model's name
    kind: str = "ours"

    @property
    def ours(self):
        return self.kind == "ours"


@contextlib.contextmanager
def running(versions, name="tiny", max_request_bytes=2**20):
    """The `Endpoint` of `versions` as model `name`, while the context lasts."""
    import uvicorn

    from keras_headmask.kserve_app import create_app

    app = create_app(versions, name, max_request_bytes)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    socket.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{socket.getsockname()[1]}/v1/models/{name}")
    finally:
        server.should_exit = True
        thread.join()
