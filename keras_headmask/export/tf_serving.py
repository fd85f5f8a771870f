"""`write_serving_config`: the text files that TensorFlow Serving reads."""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras_headmask.export.versions import (
    read_signatures,
    tensors_of,
    version_folders,
    written_whole,
)

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # what fits a URL, a flag and a metric alike
_MOST = 2**31 - 1  # of sizes, threads and microseconds
_LEAST_THREADS = 1024  # more than the server's own 4 x CPUs on any machine
_CONFIG, _BATCHING, _ENVIRONMENT = "models.config", "batching.txt", "server.env"
PADDED = "serve_padded"  # the signature with an input for the real length of each row

_ALIKE = """\
# Requests of different lengths are put into one batch all the same. Then merging them fails, and
# ALL requests of that batch are answered with an error (FAILED_PRECONDITION). Clients pad to one
# agreed length, or call `serve_padded` of a server whose file says
# `pad_variable_length_inputs: true`."""
_XLA = """\
# The serve_xla signatures are of one shape: a batch of several requests, or one filled up, does not
# fit them and fails. Call them on a server without --enable_batching."""
_PADDED = """\
# Requests of different lengths are padded, ALL inputs of ALL signatures, each with its own FIRST
# element: padding of a mask that begins with `true` is attended to, and the answer is wrong with
# status OK. So clients must call `serve_padded` with the real `lengths`, and cut their answers to
# those; `serving_default` only for requests of one and the same length.
# A request in which a tensor has another RANK than its signature says ENDS THE SERVER, with any
# model. Put a proxy in front that refuses it; or leave this `false`, and let clients pad to one
# length and call `serve_padded` with the real `lengths`."""
_ONE_DNN = """\
# By itself TensorFlow uses oneDNN only on newer CPUs; on others its products may take longer.
TF_ENABLE_ONEDNN_OPTS=1"""
_MODELS = """\
model_config_list {{
  config {{
    name: "{name}"
    base_path: "{path}"
    model_platform: "tensorflow"
  }}
}}"""


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    """The three files of `write_serving_config`, and flags for `tensorflow_model_server`."""

    models: pathlib.Path
    batching: pathlib.Path
    flags: tuple[str, ...]
    environment: pathlib.Path  # variables of the server's process, `NAME=value` in each line


def write_serving_config(
    base_path: str | os.PathLike,
    *,
    name: str | None = None,
    served_path: str | os.PathLike | None = None,
    max_batch_size: int = 32,
    allowed_batch_sizes: Sequence[int] = (),
    batch_timeout_micros: int = 2000,
    num_batch_threads: int | None = None,
    max_enqueued_batches: int = 100,
    pad_variable_length_inputs: bool = False,
    folder: str | os.PathLike | None = None,
) -> ServingConfig:
    """Write `models.config`, `batching.txt` and `server.env` for TensorFlow Serving.

    Each file is written whole or not at all; one that is there is replaced.

    `pad_variable_length_inputs=True` makes the server batch requests of different lengths. It pads
    every input with that input's FIRST element, so a mask that begins with `True` lets padding in,
    and answers are wrong with status OK. So the newest version must have `serve_padded` with
    `lengths: int32 (batch,)`, and clients must call it. A request in which a tensor has another
    rank than its signature says then ends the server's process, with any model: put a proxy in
    front that refuses it. Without padding, all requests of a batch of two lengths get an error.
    Signatures of one shape, `serve_xla_...`, are for servers without batching.

    The flags have `--grpc_max_threads`, a thread for each row that batches may hold: the server's
    own limit, 4 x its CPUs, refuses the rest (`RESOURCE_EXHAUSTED: Server Threadpool Exhausted`)
    before a batch is full. Threads start only when they are needed.

    `server.env` sets `TF_ENABLE_ONEDNN_OPTS=1` (`docker run --env-file`, `EnvironmentFile=` of
    systemd): on CPUs on which TensorFlow leaves oneDNN off, it answers faster.

    Args:
        base_path: the folder that holds `<integer>/` versions, one at least.
        name: the model's name in URLs; by default the folder's.
        served_path: `base_path` as the server sees it (`/models/bert` in a container), absolute;
            by default where it is here.
        max_batch_size: rows in a batch. The server refuses a request of more, and a version whose
            warm-up has one.
        allowed_batch_sizes: batches are filled up to one of these: rising, the last one equal to
            `max_batch_size`. Empty: any size.
        batch_timeout_micros: how long a request waits for others, in microseconds.
        num_batch_threads: batches computed at once; by default the number of CPUs here.
        max_enqueued_batches: batches that may wait before requests are refused.
        pad_variable_length_inputs: see above.
        folder: where the files go, made if it is not there; by default `base_path`.

    Returns:
        `ServingConfig(models, batching, flags, environment)`: the files, and the flags for the
        server, with paths as it sees them.

    Raises:
        FileNotFoundError: `base_path` is not a folder, or has no version.
        ValueError: a value is out of its range; the newest version is not a SavedModel, or warms up
            with more rows than `max_batch_size`; padding without a fit `serve_padded`.

    >>> import pathlib, tempfile, keras
    >>> base = pathlib.Path(tempfile.mkdtemp()) / "bert"
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.export(base / "1", verbose=False)
    >>> config = write_serving_config(base, served_path="/models/bert", max_batch_size=8)
    >>> config.flags[0]
    '--model_config_file=/models/bert/models.config'
    >>> print(config.models.read_text())
    model_config_list {
      config {
        name: "bert"
        base_path: "/models/bert"
        model_platform: "tensorflow"
      }
    }
    <BLANKLINE>
    """
    from google.protobuf.text_encoding import CEscape

    base = pathlib.Path(base_path)
    versions = version_folders(base)
    if not versions:
        raise FileNotFoundError(
            f"{str(base)!r} holds no version. Export one first: `model.export(base_path + '/1')`."
        )
    name = check_model_name(base.resolve().name if name is None else name)
    served = str(base.resolve() if served_path is None else served_path)
    if not served.startswith("/") or not served.isprintable():
        raise ValueError(
            f"`served_path` must be an absolute path of printable characters, where the server "
            f"finds the versions. Received: {served!r}"
        )
    served = served.rstrip("/") or "/"
    batch_threads = (os.cpu_count() or 1) if num_batch_threads is None else num_batch_threads
    numbers = {
        "max_batch_size": max_batch_size,
        "batch_timeout_micros": batch_timeout_micros,
        "num_batch_threads": batch_threads,
        "max_enqueued_batches": max_enqueued_batches,
    }
    sizes = list(allowed_batch_sizes)
    _check_batching(numbers, sizes, pad_variable_length_inputs)
    version, newest = next(iter(versions.items()))
    signatures = read_signatures(newest)
    if pad_variable_length_inputs:
        inputs = tensors_of(signatures[PADDED].inputs) if PADDED in signatures else {}
        dtype, shape = inputs.get("lengths", ("", None))
        if dtype != "int32" or shape is None or len(shape) != 1:
            raise ValueError(
                f"`pad_variable_length_inputs` needs a signature `{PADDED}` with an input "
                f"`lengths`, int32 of shape (batch,): the server pads each input with its first "
                f"element, and padding after a true mask would be attended to. Version {version} "
                f"has {sorted(signatures)}. Export that signature, or leave padding to the clients."
            )
    if (rows := largest_batch(newest)) > max_batch_size:
        raise ValueError(
            f"`max_batch_size` must be at least {rows}: version {version} warms up with a request "
            f"of {rows} rows, and a server that refuses a warm-up request does not load the "
            f"version. Received: {max_batch_size}. Pass max_batch_size={rows}, or export the "
            f"version with a smaller `warmup`."
        )

    folder = base if folder is None else pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen = pathlib.PurePosixPath(served) if folder == base else folder.resolve()
    # One thread for each request that batches may hold, if each request is a row.
    threads = max(_LEAST_THREADS, max_batch_size * (batch_threads + max_enqueued_batches))
    flags = [
        f"--model_config_file={seen / _CONFIG}",
        "--enable_batching=true",
        f"--batching_parameters_file={seen / _BATCHING}",
        f"--grpc_max_threads={min(threads, _MOST)}",
    ]
    lines = [f"{key} {{ value: {value} }}" for key, value in numbers.items()]
    lines += [f"allowed_batch_sizes: {size}" for size in sizes]
    if any(signature.startswith("serve_xla") for signature in signatures):
        lines.append(_XLA)
        # Else a call of such a signature fails: "XLA compilation disabled".
        flags += ["--xla_cpu_compilation_enabled=true", "--xla_gpu_compilation_enabled=true"]
    lines.append(_PADDED if pad_variable_length_inputs else _ALIKE)
    lines.append(f"pad_variable_length_inputs: {str(pad_variable_length_inputs).lower()}")
    models = _MODELS.format(name=name, path=CEscape(served, as_utf8=True))
    written = ((_CONFIG, models), (_BATCHING, "\n".join(lines)), (_ENVIRONMENT, _ONE_DNN))
    for file, text in written:
        with written_whole(folder / file) as path:
            path.write_text(text + "\n", encoding="utf-8")
    return ServingConfig(folder / _CONFIG, folder / _BATCHING, tuple(flags), folder / _ENVIRONMENT)


def batch_limit(base_path: pathlib.Path) -> int:
    """The rows of a batch that `batching.txt` beside the versions allows, or the default."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (base_path / _BATCHING).read_text(encoding="utf-8")
        if match := re.search(r"^max_batch_size \{ value: (\d+) \}$", text, re.MULTILINE):
            return int(match[1])
    return (write_serving_config.__kwdefaults__ or {})["max_batch_size"]


def check_model_name(name: Any) -> str:
    """`name`; a ValueError if it does not fit a URL."""
    if not (isinstance(name, str) and _MODEL_NAME.fullmatch(name)):
        raise ValueError(
            f"`name` must be made of letters, digits and `_ . -`, since it stands in URLs. "
            f"Received: {name!r}"
        )
    return name


def _check_batching(numbers: Mapping[str, int], sizes: list[int], pad: bool) -> None:
    for key, value in numbers.items():
        least = 0 if key == "batch_timeout_micros" else 1
        if type(value) is not int or not least <= value <= _MOST:
            raise ValueError(
                f"`{key}` must be an integer of at least {least} and at most {_MOST}. Received: "
                f"{value!r}"
            )
    if not isinstance(pad, bool):
        raise ValueError(f"`pad_variable_length_inputs` must be True or False. Received: {pad!r}")
    if any(type(size) is not int or size < 1 for size in sizes) or sizes != sorted(set(sizes)):
        raise ValueError(
            f"`allowed_batch_sizes` must be integers of at least 1 that rise. Received: {sizes}"
        )
    if sizes and sizes[-1] != numbers["max_batch_size"]:
        raise ValueError(
            f"The last of `allowed_batch_sizes` must equal `max_batch_size`, or the server does "
            f"not start. Received: {sizes} and {numbers['max_batch_size']}."
        )


# --- Requests that a server runs when it loads a version, so that no client waits long ------------

EXTRA = "assets.extra"  # where TensorFlow Serving looks for what is no graph and no variable
_MOST_RECORDS = 1000  # what TF Serving takes
_FILE = "tf_serving_warmup_requests"


def check_installed() -> None:
    """Raise where writing warm-up records is not possible."""
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

    if len(requests) > _MOST_RECORDS:
        raise ValueError(
            f"TF Serving takes at most {_MOST_RECORDS} warm-up records. Received: {len(requests)}."
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
        records = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
        # PredictionLog.predict_log.request.inputs, a map, whose entries have their value as 2: read
        # by the numbers of fields, which needs no package of stubs.
        for number in (6, 1, 2, 2):
            parsed = [
                unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(x)) for x in records
            ]
            records = [field.data for x in parsed for field in x if field.field_number == number]
        shapes = [tensor_pb2.TensorProto.FromString(x).tensor_shape.dim for x in records]
    except (message.DecodeError, tf.errors.OpError) as error:
        raise ValueError(
            f"{str(path)!r} holds no warm-up records that can be read: {error}. No server loads "
            "such a version. Export it again, or remove that file."
        ) from error
    return max((shape[0].size for shape in shapes if shape), default=0)
