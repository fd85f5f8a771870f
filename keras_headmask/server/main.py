"""A development server: a base path of SavedModel versions over HTTP, on KServe's SDK.

    pip install "kserve>=0.21,<0.22"
    python -m keras_headmask.server saved_models/bert --name bert

It speaks the REST dialect of TensorFlow Serving, `POST /v1/models/<name>:predict`, and KServe's V2,
`POST /v2/models/<name>/infer`. It takes up new versions without dropping requests, answers a bad
request with 400 and the rule it breaks, and keeps metrics for Prometheus at `/metrics`. It does not
batch, and has neither TLS nor users: for production there is TensorFlow Serving.
"""

import argparse
import importlib.util
import logging
import pathlib
import signal
import socket
import sys
import warnings

from keras_headmask.export.tf_serving import check_model_name
from keras_headmask.rules.terminal import shown
from keras_headmask.server.served_versions import ServedVersions

_MIB = 2**20


def serve(
    base_path,
    *,
    name=None,
    host="127.0.0.1",
    port=8501,
    poll_seconds=1.0,
    max_request_bytes=64 * _MIB,
    read_seconds=60,
    grace_seconds=30,
):
    """Serve `base_path` until SIGTERM or SIGINT, then finish the requests under way and return.

    Args:
        base_path: the folder that holds `<integer>/` versions, one at least.
        name: the model's name in URLs; by default the folder's.
        host: the address to listen on. On anything but loopback, whoever can reach it may ask.
        port: the port to listen on; 0 takes a free one, which is printed.
        poll_seconds: how often to look for a new version.
        max_request_bytes: a larger request is answered with 413; where the bodies of all requests
            under way exceed four times as many bytes, with 503.
        read_seconds: a request that has not arrived whole by then is answered with 408, or its
            connection closed; so is one whose client takes nothing of its answer for as long.
        grace_seconds: how long requests under way may take after the signal.

    Raises:
        ImportError: the extra `server` is not installed.
        FileNotFoundError: `base_path` is no folder of versions.
        OSError: the address cannot be listened on.
        ValueError: no version loads, or a value is out of its range.
    """
    name = check_model_name(pathlib.Path(base_path).resolve().name if name is None else name)
    if not 0 <= port < 2**16:
        raise ValueError(f"`port` must lie in [0, 65535]; 0 takes a free one. Received: {port!r}")
    seconds = {"poll": poll_seconds, "read": read_seconds, "grace": grace_seconds}
    positive = {f"{key}_seconds": value for key, value in seconds.items()}
    for key, value in (positive | {"max_request_bytes": max_request_bytes}).items():
        if not value > 0:
            raise ValueError(f"`{key}` must be positive. Received: {value!r}")
    create_app, http_limits = _import_extra()
    _silence_what_means_nothing_here()

    with _bound(host, port) as listener:  # before the model is loaded, which takes a while

        def report(text):  # which may hold what the files of a version say
            print(shown(text), flush=True)

        versions = ServedVersions(base_path, report)
        limits = http_limits.Limits(
            request_bytes=max_request_bytes,
            bytes_in_all=4 * max_request_bytes,
            read_seconds=read_seconds,
            grace_seconds=grace_seconds,
        )
        app = create_app(versions, name, limits)
        server = http_limits.server(app, limits, host=host, port=port, log_level="warning")
        # uvicorn acts on these and raises them again, which would end the process with an error.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        versions.watch(poll_seconds)
        listener.listen()  # from here on clients wait where they were refused before
        address = f"[{host}]" if ":" in host else host
        report(f"Listening on http://{address}:{listener.getsockname()[1]}/v1/models/{name}")
        server.run(sockets=[listener])
        versions.close()
        report("Stopped")


def _bound(host, port):
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}. Pass another port, "
            "or 0 for a free one."
        ) from error
    return found


def _import_extra():
    arguments, sys.argv[1:] = sys.argv[1:], []  # KServe parses them when it is imported
    try:
        if importlib.util.find_spec("kserve") is None:  # before the rest is imported, slowly
            raise ImportError("no module named 'kserve'")
        from keras_headmask.server import http_limits
        from keras_headmask.server.kserve_app import create_app
    except ImportError as error:
        raise ImportError(
            "The development server needs KServe's SDK. Install it with "
            f'`pip install "kserve>=0.21,<0.22"`. ({error})'
        ) from error
    finally:
        sys.argv[1:] = arguments
    return create_app, http_limits


def _silence_what_means_nothing_here():
    """Warnings that would worry whoever starts the server, and that nobody there can act on."""
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")  # KServe answers so
    # TensorFlow speaks of gradients through a loaded model; no request asks for them.
    logging.getLogger("absl").addFilter(lambda r: "unsaved custom gradients" not in r.getMessage())


_OPTIONS = (
    ("--host", "127.0.0.1", str, "the address to listen on"),
    ("--port", 8501, int, "the port to listen on; 0 takes a free one"),
    ("--poll-seconds", 1.0, float, "between looks for a new version"),
    ("--max-request-bytes", 64 * _MIB, int, "a larger request is answered with 413"),
    ("--read-seconds", 60, float, "for a request to arrive whole"),
    ("--grace-seconds", 30, int, "to finish after SIGTERM"),
)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m keras_headmask.server",
        description="Serve the newest version under a base path, for development. "
        "keras_headmask.export_saved_model writes versions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("base_path", help="the folder that holds <integer>/ versions")
    parser.add_argument(
        "--name", default=argparse.SUPPRESS, help="the model's name in URLs (default: the folder's)"
    )
    for option, default, kind, meaning in _OPTIONS:
        parser.add_argument(option, default=default, type=kind, help=meaning)
    args = vars(parser.parse_args(argv))
    try:
        serve(args.pop("base_path"), **args)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(shown(f"error: {error}"))
