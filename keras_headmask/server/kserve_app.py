"""The development server's HTTP application: KServe's protocol around `ServedVersions`.

KServe's `ModelServer` always listens on all interfaces, and forgets its models at SIGTERM, before
requests in progress are answered. So its routes, data plane and metrics stand here in an
application of their own, which `keras_headmask.server` runs.
"""

import asyncio
import functools
import re
import uuid
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf import json_format
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelRepository
from kserve.errors import InvalidInput, ModelNotFound, generic_exception_handler
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.server import metrics_handler
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from prometheus_client import Counter, Gauge
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_headmask.server.http_limits import Limits
from keras_headmask.server.predict_requests import (
    DEFAULT_SIGNATURE,
    BadRequest,
    read_v1,
    read_v2,
    write_v1,
    write_v2,
)
from keras_headmask.server.served_versions import ServedVersions

# Beside those that KServe keeps: `request_predict_seconds` and others, by model.
_REQUESTS = Counter("keras_headmask_requests", "Requests answered, by HTTP status", ["code"])
_IN_PROGRESS = Gauge("keras_headmask_requests_under_way", "Requests whose answer is not sent yet")
_HELD = Gauge("keras_headmask_body_bytes", "Bytes of the bodies of requests in progress")
_VERSION = Gauge("keras_headmask_model_version", "The version that is served", ["model_name"])
_BROKEN = Gauge("keras_headmask_broken_versions", "Versions that do not load", ["model_name"])

_VERSIONED = re.compile(r"(/v[12]/models/[^/:]+)/versions/([^/:]+)([:/].*)?")
_ASKED_VERSION = "x-asked-version"  # passes the version in the path on to the model


def create_app(versions: ServedVersions, name: str, limits: Limits) -> FastAPI:
    """The application that serves `versions` as model `name`, and keeps the limits on bodies."""
    app = FastAPI(title="keras_headmask development server", docs_url=None, redoc_url=None)
    repository = ModelRepository()
    repository.update(_ServedModel(name, versions))
    _VERSION.labels(name).set_function(lambda: versions.current.version)
    _BROKEN.labels(name).set_function(lambda: len(versions.failures))

    # Before KServe's, since the first route that fits is taken: status and metadata in TensorFlow
    # Serving's words, and what clients may not do.
    @app.get(f"/v1/models/{name}")
    async def status() -> dict[str, Any]:
        states = [(versions.current.version, "AVAILABLE", "OK", "")]
        states += [(number, "END", "UNKNOWN", why) for number, why in versions.failures.items()]
        shown = [
            {
                "version": str(number),
                "state": state,
                "status": {"error_code": code, "error_message": message},
            }
            for number, state, code, message in sorted(states, reverse=True)
        ]
        # The first two as KServe has it.
        return {"name": name, "ready": True, "model_version_status": shown}

    @app.get(f"/v1/models/{name}/metadata")
    async def metadata() -> dict[str, Any]:
        served = versions.current
        as_dict = functools.partial(
            json_format.MessageToDict,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        signatures = {key: as_dict(definition) for key, definition in served.definitions.items()}
        return {
            "model_spec": {"name": name, "signature_name": "", "version": str(served.version)},
            "metadata": {"signature_def": {"signature_def": signatures}},
        }

    @app.post("/v1/models/{model_name}:explain")
    @app.post("/v2/repository/models/{model_name}/{action}")
    async def refused() -> None:
        raise BadRequest(
            "This server explains nothing, and loads or unloads nothing on request: a version is "
            "loaded when its folder appears. Ask with `:predict`."
        )

    data_plane = _DataPlane(model_registry=repository)
    app.add_api_route("/", data_plane.live, methods=["GET"])
    app.add_api_route("/metrics", metrics_handler, methods=["GET"])
    extension = ModelRepositoryExtension(model_registry=repository)
    register_v1_endpoints(app, data_plane, extension)
    register_v2_endpoints(app, data_plane, extension)
    for kind in (BadRequest, InvalidInput, ModelNotFound, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(Exception, generic_exception_handler)
    app.add_middleware(_Gate, versions=versions, limits=limits)
    return app


class _ServedModel(Model):
    """What KServe calls with a decoded request of either dialect."""

    def __init__(self, name: str, versions: ServedVersions):
        super().__init__(name)
        self._versions = versions
        self.ready = True

    async def predict(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        # In a thread, so that other requests are read meanwhile.
        return await asyncio.to_thread(self._answer, payload, headers or {})

    def _answer(self, payload: Any, headers: dict[str, str]) -> Any:
        served = self._versions.current  # once: it may be replaced while this request is answered
        version = str(served.version)
        if (asked := headers.get(_ASKED_VERSION, version)) != version:
            raise HTTPException(404, f"Version {asked} is not served.")
        if not isinstance(payload, InferRequest):
            predict = read_v1(payload, served.signatures)
            return write_v1(predict, predict.answer())
        tensors = []
        for name, output in read_v2(payload, served.signatures).answer().items():
            array, datatype = write_v2(output)
            tensors.append(InferOutput(name, list(array.shape), datatype))
            tensors[-1].set_data_from_numpy(array, binary_data=False)
        return InferResponse(
            payload.id or str(uuid.uuid4()), self.name, tensors, model_version=version
        )

    def _types(self, side: str) -> list[dict[str, Any]]:
        """Of the default signature: V2's metadata describe one."""
        signatures = self._versions.current.signatures
        signature = signatures.get(DEFAULT_SIGNATURE) or next(iter(signatures.values()))
        tensors = getattr(signature, side).items()
        shapes = {name: [-1 if n is None else n for n in x.shape or ()] for name, x in tensors}
        return [{"name": k, "datatype": x.datatype, "shape": shapes[k]} for k, x in tensors]

    get_input_types = functools.partialmethod(_types, "inputs")
    get_output_types = functools.partialmethod(_types, "outputs")


class _DataPlane(DataPlane):
    """Reads and writes plain JSON whatever the content type says: no cloud events."""

    def decode(
        self, body: Any, headers: Any, protocol_version: str = "v1", model_name: str | None = None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            if protocol_version == "v1":
                return orjson.loads(body), {}
            return super().decode(body, headers, protocol_version, model_name)
        except Exception as error:  # KServe's readers index and cast what the client sent
            raise BadRequest(f"Cannot read the request. {type(error).__name__}: {error}") from error

    def encode(self, model_name: str, response: Any, headers: Any, req_attributes: Any) -> Any:
        return super().encode(model_name, response, {}, {})


# --- Errors and limits ----------------------------------------------------------------------------


async def _refuse(_: Any, error: Any) -> JSONResponse:
    status, text, headers = 400, str(error), None
    if isinstance(error, HTTPException):
        status, text, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, ModelNotFound):
        status = 404
    elif isinstance(error, RequestValidationError):  # FastAPI's own status would be 422
        problems = (f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
        text = f"The request is not of V2's form. {'; '.join(problems)}"
    return JSONResponse({"error": text}, status, headers)


class _Gate:
    """In front of all routes: limits on bodies, `/versions/<n>` in paths, and counters."""

    def __init__(self, app: ASGIApp, versions: ServedVersions, limits: Limits):
        self._app, self._versions, self._limits = app, versions, limits
        self._bodies: dict[int, bytearray] = {}  # from their first byte to the end of their answer
        self._held = lambda: sum(map(len, list(self._bodies.values())))
        _HELD.set_function(self._held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = bytearray()
        self._bodies[id(body)] = body
        code, unread = 500, True  # the status where an exception passes all handlers

        async def replay() -> Message:
            nonlocal unread
            if not unread:
                return await receive()
            unread = False
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        async def counted(message: Message) -> None:
            nonlocal code
            code = message.get("status", code)
            await send(message)

        with _IN_PROGRESS.track_inprogress():
            try:
                if match := _VERSIONED.fullmatch(scope["path"]):  # to a header instead of the path
                    model, version, rest = match.groups(default="")
                    if version != str(self._versions.current.version):
                        raise HTTPException(404, f"Version {version} is not served.")
                    headers = [*scope["headers"], (_ASKED_VERSION.encode(), version.encode())]
                    scope = {**scope, "path": model + rest, "headers": headers}
                await self._read(receive, body)
                await self._app(scope, replay, counted)
            except HTTPException as error:
                await (await _refuse(None, error))(scope, receive, counted)
            finally:
                del self._bodies[id(body)]
                _REQUESTS.labels(code).inc()

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Fill `body`.

        What is too large is read to its end and thrown away, since many clients look for an answer
        only when they have sent all.
        """
        limits, size, is_full, more = self._limits, 0, False, True
        try:
            async with asyncio.timeout(limits.read_seconds):
                while more:
                    message = await receive()
                    part = message.get("body", b"")
                    more = message.get("more_body", False)  # also false where the client has gone
                    size += len(part)
                    is_full = is_full or self._held() + len(part) > limits.bytes_in_all
                    body += part
                    if is_full or size > limits.request_bytes:
                        body.clear()
        except TimeoutError:
            text = f"The request did not arrive whole in {limits.read_seconds} seconds."
            raise HTTPException(408, text, {"connection": "close"}) from None
        if size > limits.request_bytes:
            raise HTTPException(413, f"The request is larger than {limits.request_bytes} bytes.")
        if is_full:
            text = (
                f"The requests in progress hold {limits.bytes_in_all} bytes, the most they may "
                "together. Try again later."
            )
            raise HTTPException(503, text, {"retry-after": "1"})
