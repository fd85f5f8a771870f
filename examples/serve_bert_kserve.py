"""A development server on KServe's SDK, for the newest version of a SavedModel.

    pip install "kserve>=0.21,<0.22"
    python examples/serve_bert_kserve.py saved_models/bert

It answers KServe's V1 (`instances`, one row each) and V2, and needs TensorFlow, but not
keras_headmask: the rule is in the graph. KServe's own servers are started by
`kserve.ModelServer(...).start([model])`, which listens on all addresses; this one keeps to
127.0.0.1.
"""

import argparse
import logging
import pathlib
import socket
import sys
import uuid
import warnings

import numpy as np
import tensorflow as tf

arguments, sys.argv[1:] = sys.argv[1:], []  # KServe reads them when it is imported
import kserve  # noqa: E402
from kserve.errors import InvalidInput  # noqa: E402
from kserve.protocol.rest.server import RESTServer  # noqa: E402
from kserve.utils.numpy_codec import from_np_dtype  # noqa: E402


class SavedModel(kserve.Model):
    """The signature `serving_default` of the newest version in a folder of versions."""

    def __init__(self, name: str, base: pathlib.Path):
        super().__init__(name)
        versions = [path for path in base.iterdir() if path.name.isdigit()]
        if not versions:
            raise FileNotFoundError(f"{base} holds no version: export a model there first.")
        newest = max(versions, key=lambda path: int(path.name))
        self.loaded = tf.saved_model.load(str(newest))  # it holds the variables
        self.signature = self.loaded.signatures["serving_default"]
        self.inputs = self.signature.structured_input_signature[1]
        self.ready = True

    def predict(self, payload, headers=None):
        """The outputs for a request of either protocol; each error says what the request lacks."""
        is_v2 = isinstance(payload, kserve.InferRequest)
        outputs = self.compute(self.columns_v2(payload) if is_v2 else self.columns_v1(payload))
        if is_v2:
            tensors = [
                kserve.InferOutput(name, list(x.shape), from_np_dtype(x.dtype), x.ravel().tolist())
                for name, x in outputs.items()
            ]
            return kserve.InferResponse(payload.id or str(uuid.uuid4()), self.name, tensors)
        rows = [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]
        rows = [{name: np.asarray(x).tolist() for name, x in row.items()} for row in rows]
        # One output alone stands without its name, as TensorFlow Serving has it.
        return {"predictions": [next(iter(x.values())) if len(x) == 1 else x for x in rows]}

    def columns_v1(self, payload):
        rows = payload.get("instances") if isinstance(payload, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidInput('The body must be {"instances": [{"<input>": ...}, ...]}.')
        return {name: [row[name] for row in rows if name in row] for name in self.inputs}

    def columns_v2(self, request):
        return {tensor.name: tensor.as_numpy() for tensor in request.inputs}

    def compute(self, columns):
        try:
            tensors = {
                name: tf.cast(columns[name], spec.dtype) for name, spec in self.inputs.items()
            }
            outputs = self.signature(**tensors)
        except (KeyError, TypeError, ValueError, tf.errors.OpError) as error:
            asked = {name: (spec.dtype.name, *spec.shape) for name, spec in self.inputs.items()}
            raise InvalidInput(f"The inputs must be {asked}. {error}") from error
        return {name: output.numpy() for name, output in outputs.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=pathlib.Path, help="the folder of versions")
    parser.add_argument("--name", default="bert", help="the model's name in URLs")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    options = parser.parse_args(arguments)

    model = SavedModel(options.name, options.base)
    server = kserve.ModelServer(enable_grpc=False)
    logging.getLogger("kserve.trace").setLevel(logging.WARNING)  # two lines for each request
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")  # KServe's business
    server.register_model(model)
    rest = RESTServer(
        "kserve.model_server:app",
        server.dataplane,
        server.model_repository_extension,
        options.port,
    )
    with socket.create_server(("127.0.0.1", options.port)) as listener:
        port = listener.getsockname()[1]
        print(f"Listening on http://127.0.0.1:{port}/v1/models/{options.name}", flush=True)
        rest.run(sockets=[listener])


if __name__ == "__main__":
    main()
