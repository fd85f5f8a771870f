"""The development server's HTTP application: KServe's protocol around `ServedVersions`.

KServe's `ModelServer` always listens on all interfaces, and forgets its
models at SIGTERM, before requests under way are answered. So its routes, data plane and metrics
stand here in an application of their own, which `keras_headmask.server` runs.
"""

import asyncio
import re
import uuid

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from google.protobuf import json_format
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelRepository
from kserve.errors import InvalidInput, ModelNotFound, generic_exception_handler
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from prometheus_client import REGISTRY, Counter, Gauge, exposition
from starlette.exceptions import HTTPException

from keras_headmask.server import predict_requests
from keras_headmask.server.predict_requests import DEFAULT_SIGNATURE, BadRequest

# Beside those that KServe keeps: `request_predict_seconds` and others, by model.
_REQUESTS = Counter("keras_headmask_requests", "Requests answered, by HTTP status", ["code"])
_UNDER_WAY = Gauge("keras_headmask_requests_under_way", "Requests whose answer is not sent yet")
_HELD = Gauge("keras_headmask_body_bytes", "Bytes of the bodies of requests under way")
_VERSION = Gauge("keras_headmask_model_version", "The version that is served", ["model_name"])
_BROKEN = Gauge("keras_headmask_broken_versions", "Versions that do not load", ["model_name"])

_VERSIONED = re.compile(r"(/v[12]/models/[^/:]+)/versions/([^/:]+)([:/].*)?")
_ASKED_VERSION = "x-asked-version"  # hands the version in the path on to the model


def create_app(versions, name, limits):
    """The ASGI application that serves `versions`, a `ServedVersions`, as model `name`.

    `limits` are `http_limits.Limits`, of which it keeps those on bodies.
    """
    app = FastAPI(title="keras_headmask development server", docs_url=None, redoc_url=None)
    repository = ModelRepository()
    repository.update(_ServedModel(name, versions))
    _VERSION.labels(name).set_function(lambda: versions.current.version)
    _BROKEN.labels(name).set_function(lambda: len(versions.failures))

    _add_status(app, name, versions)  # before KServe's, since the first route that fits is taken
    data_plane = _DataPlane(model_registry=repository)
    app.add_api_route("/", data_plane.live, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])
    extension = _NoLoading(model_registry=repository)
    register_v1_endpoints(app, data_plane, extension)
    register_v2_endpoints(app, data_plane, extension)

    app.add_exception_handler(InvalidInput, _error(400))
    app.add_exception_handler(ModelNotFound, _error(404))
    app.add_exception_handler(RequestValidationError, _invalid_v2)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, generic_exception_handler)
    app.add_middleware(_Gate, versions=versions, limits=limits)
    return app


class _ServedModel(Model):
    """What KServe calls with a decoded request of either dialect."""

    def __init__(self, name, versions):
        super().__init__(name)
        self._versions = versions
        self.ready = True

    def validate(self, payload):
        return payload  # `predict` does, against the signature

    async def predict(self, payload, headers=None):
        # In a thread, so that other requests are read meanwhile.
        return await asyncio.to_thread(self._answer, payload, headers or {})

    def _answer(self, payload, headers):
        served = self._versions.current  # once: it may be replaced while this request is answered
        if headers.get(_ASKED_VERSION, str(served.version)) != str(served.version):
            raise ModelNotFound(f"{self.name}, version {headers[_ASKED_VERSION]},")
        try:
            if isinstance(payload, InferRequest):
                return self._answer_v2(payload, served)
            predict = predict_requests.read_v1(payload, served.signatures)
            outputs = predict.signature.call(predict.arrays)
            return predict_requests.write_v1(predict, outputs)
        except BadRequest as error:
            raise InvalidInput(str(error)) from error

    def _answer_v2(self, request, served):
        predict = predict_requests.read_v2(request.inputs, request.parameters, served.signatures)
        names = predict_requests.asked_outputs(
            [output.name for output in request.request_outputs or ()], predict.signature
        )
        outputs = predict.signature.call(predict.arrays)
        tensors = []
        for name in names:
            array, datatype = predict_requests.write_v2(outputs[name])
            tensor = InferOutput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array, binary_data=False)
            tensors.append(tensor)
        return InferResponse(
            request.id or str(uuid.uuid4()), self.name, tensors, model_version=str(served.version)
        )

    async def explain(self, payload, headers=None):
        raise InvalidInput("This server explains nothing. Ask with `:predict`.")

    def get_input_types(self):
        return self._types("inputs")

    def get_output_types(self):
        return self._types("outputs")

    def _types(self, side):
        """Of the default signature, V2's metadata having room for one."""
        signatures = self._versions.current.signatures
        signature = signatures.get(DEFAULT_SIGNATURE) or next(iter(signatures.values()))
        return [
            {
                "name": name,
                "datatype": tensor.datatype,
                "shape": [-1 if size is None else size for size in tensor.shape or ()],
            }
            for name, tensor in getattr(signature, side).items()
        ]


class _NoLoading(ModelRepositoryExtension):
    """Versions come and go with their folders; a client neither loads nor unloads."""

    async def load(self, model_name):
        raise InvalidInput("A version is loaded when its folder appears, not on request.")

    async def unload(self, model_name):
        raise InvalidInput("Models are not unloaded on request. Stop the server.")


class _DataPlane(DataPlane):
    """Plain JSON whatever the content type says; what cannot be read is the client's fault."""

    def decode(self, body, headers, protocol_version="v1", model_name=None):
        try:
            if protocol_version == "v1":
                return orjson.loads(body), {}
            return super().decode(body, headers, protocol_version, model_name)
        except InvalidInput:
            raise
        except Exception as error:  # KServe's readers index and cast what the client sent
            raise InvalidInput(
                f"The request cannot be read. {type(error).__name__}: {error}"
            ) from error

    def encode(self, model_name, response, headers, req_attributes):
        return super().encode(model_name, response, {}, {})  # no headers: no cloud event


# --- Routes of our own ----------------------------------------------------------------------------


def _add_status(app, name, versions):
    """Status and metadata in TensorFlow Serving's words."""

    def current(model_name):
        if model_name != name:
            raise ModelNotFound(model_name)
        return versions.current

    @app.get("/v1/models/{model_name}")
    async def status(model_name: str):
        served = current(model_name)
        states = [(served.version, "AVAILABLE", "OK", "")]
        states += [(number, "END", "UNKNOWN", why) for number, why in versions.failures.items()]
        return {
            "name": name,  # this and the next as KServe has it
            "ready": True,
            "model_version_status": [
                {
                    "version": str(number),
                    "state": state,
                    "status": {"error_code": code, "error_message": message},
                }
                for number, state, code, message in sorted(states, reverse=True)
            ],
        }

    @app.get("/v1/models/{model_name}/metadata")
    async def metadata(model_name: str):
        served = current(model_name)
        definitions = {
            key: json_format.MessageToDict(
                definition,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            for key, definition in served.definitions.items()
        }
        return {
            "model_spec": {"name": name, "signature_name": "", "version": str(served.version)},
            "metadata": {"signature_def": {"signature_def": definitions}},
        }


async def _metrics():
    encode, content_type = exposition.choose_encoder(None)
    return Response(encode(REGISTRY), media_type=content_type)


# --- Errors and limits ----------------------------------------------------------------------------


def _error(code):
    async def handler(_, error):
        return JSONResponse({"error": str(error)}, status_code=code)

    return handler


async def _http_error(_, error):
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _invalid_v2(_, error):
    """What FastAPI finds wrong with the form of a V2 request; its own status would be 422."""
    problems = "; ".join(
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
    )
    return JSONResponse({"error": f"The request is not of V2's form. {problems}"}, status_code=400)


class _Gate:
    """In front of all routes: limits on bodies, `/versions/<n>` in paths, and counters."""

    def __init__(self, app, versions, limits):
        self._app = app
        self._versions = versions
        self._limits = limits
        self._held = 0  # bytes of bodies, from their first byte to the end of their answer

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        code = 500  # where an exception gets past us

        async def counted(message):
            nonlocal code
            code = message.get("status", code)
            await send(message)

        with _UNDER_WAY.track_inprogress():
            try:
                await self._answer(scope, receive, counted)
            finally:
                _REQUESTS.labels(code).inc()

    async def _answer(self, scope, receive, send):
        if match := _VERSIONED.fullmatch(scope["path"]):
            model, version, rest = match.groups(default="")
            if version != str(self._versions.current.version):
                answer = {"error": f"Version {version} is not served."}
                return await JSONResponse(answer, status_code=404)(scope, receive, send)
            header = (_ASKED_VERSION.encode(), version.encode())
            scope = {**scope, "path": model + rest, "headers": [*scope["headers"], header]}
        body = bytearray()
        try:
            refusal = await self._read(receive, body)
            if refusal is not None:
                return await refusal(scope, receive, send)
            unread = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def replay():
                return unread.pop() if unread else await receive()

            await self._app(scope, replay, send)
        finally:
            self._hold(-len(body))

    async def _read(self, receive, body):
        """Fill `body`; the answer that refuses it, or None.

        What is too large is read to its end and thrown away, since many clients look for an answer
        only when they have sent all.
        """
        refusal, more, size = None, True, 0
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                while more:
                    message = await receive()
                    part = message.get("body", b"")
                    more = message.get("more_body", False)  # also false where the client has gone
                    size += len(part)
                    refusal = refusal or self._refusal(size, len(part))
                    if refusal is None:
                        self._hold(len(part))
                        body += part
                    else:
                        self._hold(-len(body))
                        body.clear()
        except TimeoutError:
            late = f"The request did not arrive whole in {self._limits.read_seconds} seconds."
            return JSONResponse({"error": late}, 408, {"connection": "close"})
        return refusal

    def _refusal(self, size, news):
        if size > self._limits.request_bytes:
            reason = f"The request is larger than {self._limits.request_bytes} bytes."
            return JSONResponse({"error": reason}, 413)
        if self._held + news > self._limits.bytes_in_all:
            reason = (
                f"The requests under way hold {self._limits.bytes_in_all} bytes, the most they "
                "may together. Try again later."
            )
            return JSONResponse({"error": reason}, 503, {"retry-after": "1"})
        return None

    def _hold(self, size):
        self._held += size
        _HELD.set(self._held)
