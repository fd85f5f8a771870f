"""The development server: a base path of SavedModel versions over HTTP, on KServe's SDK.

    pip install "kserve>=0.21,<0.22"
    python -m keras_headmask.server saved_models/bert --name bert

It speaks the REST dialect of TensorFlow Serving, `POST /v1/models/<name>:predict`, and KServe's V2,
`POST /v2/models/<name>/infer`. It takes up new versions without dropping requests, answers a bad
request with 400 and the rule it breaks, and keeps metrics for Prometheus at `/metrics`. It does not
batch, and has neither TLS nor users: for production there is TensorFlow Serving.
"""

import logging
import pathlib
import signal
import socket
import sys
import warnings
from typing import Any

import click

from keras_headmask.export.tf_serving import check_model_name
from keras_headmask.rules.words import in_one_line, shown
from keras_headmask.server.served_versions import ServedVersions

_POSITIVE = click.FloatRange(min=0, min_open=True)


class _CannotServe(click.ClickException):
    exit_code = 2


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("base", type=click.Path(path_type=pathlib.Path))
@click.option("--name", help="The model's name in URLs; by default the folder's.")
@click.option(
    "--host",
    default="127.0.0.1",
    help="The address to listen on. Any client that can reach it may send requests.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8501, help="0 takes a free one.")
@click.option(
    "--poll-seconds", type=_POSITIVE, default=1.0, help="Between looks for a new version."
)
@click.option(
    "--max-request-bytes",
    "request_bytes",
    type=click.IntRange(min=1),
    default=64 * 2**20,
    help="A larger request gets a 413; past four times as many in all requests, a 503.",
)
@click.option(
    "--read-seconds",
    type=_POSITIVE,
    default=60.0,
    help="For a request to arrive, else a 408, and for a client to take a part of its answer.",
)
@click.option(
    "--grace-seconds",
    type=click.IntRange(min=1),
    default=30,
    help="For requests in progress to finish after SIGTERM.",
)
def main(base: pathlib.Path, name: str | None, **options: Any) -> None:
    """Serve the newest version under BASE, for development.

    BASE holds folders <integer>/, as `keras-headmask export` writes them. The server answers over
    HTTP until SIGTERM or SIGINT; then it finishes the requests in progress.

    \b
    keras-headmask serve saved_models/bert --port 8501
    """
    try:
        _serve(base, check_model_name(base.resolve().name if name is None else name), **options)
    except (ImportError, OSError, ValueError) as error:
        raise _CannotServe(in_one_line(str(error))) from error


def _serve(
    base: pathlib.Path, name: str, host: str, port: int, poll_seconds: float, **given: Any
) -> None:
    arguments, sys.argv[1:] = sys.argv[1:], []  # KServe parses them when it is imported
    try:
        from keras_headmask.server import http_limits, kserve_app
    except ImportError as error:
        raise ImportError(
            "The development server needs KServe's SDK. Install it with "
            f'`pip install "kserve>=0.21,<0.22"`. ({error})'
        ) from error
    finally:
        sys.argv[1:] = arguments
    # Warnings on which nobody here can act. KServe answers by this class:
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
    # TensorFlow speaks of gradients through a loaded model; no request asks for them.
    logging.getLogger("absl").addFilter(lambda r: "unsaved custom gradients" not in r.getMessage())

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # before the model is loaded, which takes a while; until then clients wait
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"Cannot listen on {host}, port {port}: {error.strerror}. Pass another port, or 0 for "
            "a free one."
        ) from error
    with listener:

        def report(text: str) -> None:  # which may hold what the files of a version say
            print(shown(text), flush=True)

        versions = ServedVersions(base, report)
        limits = http_limits.Limits(**given, bytes_in_all=4 * given["request_bytes"])
        app = kserve_app.create_app(versions, name, limits)
        server = http_limits.Server(app, limits, host=host, port=port, log_level="warning")
        # uvicorn acts on these and raises them again, which would end the process with an error.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        versions.watch(poll_seconds)
        address = f"[{host}]" if ":" in host else host
        report(f"Listening on http://{address}:{listener.getsockname()[1]}/v1/models/{name}")
        server.run(sockets=[listener])
        versions.close()
        report("Stopped")
