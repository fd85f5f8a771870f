"""Requests that TF Serving runs when it loads a version, so that no client waits long."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

EXTRA = "assets.extra"  # where TensorFlow Serving looks for what is no graph and no variable
_MOST = 1000  # what TF Serving takes
_FILE = "tf_serving_warmup_requests"


def check_installed() -> None:
    """Raise where writing the records is not possible."""
    try:
        import tensorflow_serving.apis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "`warmup` writes TF Serving's records with tensorflow-serving-api, which is not "
            "installed. `pip install --no-deps tensorflow-serving-api` and `pip install grpcio`: "
            "without --no-deps it brings `tensorflow`, which would overwrite `tensorflow-cpu`."
        ) from error


def write_records(folder: pathlib.Path, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write `(signature, inputs by name)` pairs into a version."""
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

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


def largest_batch(version: pathlib.Path) -> int:
    """The most rows of a predict request among the warm-up records of a version; 0 without any.

    Raises:
        ValueError: the records are not readable; no server would load them.
    """
    path = version / EXTRA / _FILE
    if not path.is_file():
        return 0
    import tensorflow as tf
    from google.protobuf import empty_pb2, message, unknown_fields
    from tensorflow.core.framework import tensor_pb2

    try:
        found = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
        # PredictionLog.predict_log.request.inputs, a map, whose entries have their value as 2: read
        # by the numbers of fields, which needs no package of stubs.
        for number in (6, 1, 2, 2):
            parsed = [unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(x)) for x in found]
            found = [field.data for x in parsed for field in x if field.field_number == number]
        shapes = [tensor_pb2.TensorProto.FromString(x).tensor_shape.dim for x in found]
    except (message.DecodeError, tf.errors.OpError) as error:
        raise ValueError(
            f"{str(path)!r} holds no warm-up records that can be read: {error}. No server loads "
            "such a version. Export it again, or remove that file."
        ) from error
    return max((shape[0].size for shape in shapes if shape), default=0)
