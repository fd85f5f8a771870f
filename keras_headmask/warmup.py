"""Requests that TF Serving runs when it loads a version, so that no client waits long."""

import pathlib
from collections.abc import Iterable
from typing import Any

_MOST = 1000  # what TF Serving takes
_FILE = "tf_serving_warmup_requests"


def check_installed() -> None:
    """Raise where the records cannot be written."""
    try:
        import tensorflow_serving.apis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "`warmup` writes TF Serving's records with tensorflow-serving-api, which is not "
            "installed. `pip install --no-deps tensorflow-serving-api` and `pip install grpcio`: "
            "without --no-deps it brings `tensorflow`, which would overwrite `tensorflow-cpu`."
        ) from error


def write(folder: pathlib.Path, requests: Iterable[tuple[str, Any]]) -> int:
    """Write `(signature, inputs as tensors)` pairs into a version; their number."""
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

    requests = list(requests)
    if len(requests) > _MOST:
        raise ValueError(
            f"TF Serving takes at most {_MOST} warm-up records. Received: {len(requests)}."
        )
    folder.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / _FILE)) as file:
        for signature, tensors in requests:
            request = predict_pb2.PredictRequest(
                # No name: the record belongs to whatever model the version is loaded as.
                model_spec=model_pb2.ModelSpec(signature_name=signature),
                inputs={name: tf.make_tensor_proto(value) for name, value in tensors.items()},
            )
            log = prediction_log_pb2.PredictLog(request=request)
            file.write(prediction_log_pb2.PredictionLog(predict_log=log).SerializeToString())
    return len(requests)
