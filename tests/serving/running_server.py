"""Our server in a thread of the test's process, asked over HTTP on loopback."""

import contextlib
import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask; `ours` is false for a server that somebody else started."""

    url: str  # up to the model's name
    ours: bool = True


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
