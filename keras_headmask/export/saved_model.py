"""`export_saved_model`: a model as a version that TensorFlow Serving loads."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.export import checking
from keras_headmask.export.signature import named_outputs, signature_of, traced
from keras_headmask.retrofit.find import Found

_PAST = 2**63  # versions are int64


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was published. `print` it to read it.

    Attributes:
        path: The folder of the version.
        version: Its number.
        signature: `{"inputs": {name: (dtype, shape)}, "outputs": {...}}` of `serving_default`.
        differences: The largest difference of each output from the model's, in units of its largest
            element if that is above 1; `None` without a check.
        seconds: How long it took.
    """

    path: pathlib.Path
    version: int
    signature: dict[str, dict[str, Any]]
    differences: dict[str, float] | None
    seconds: float

    def __str__(self) -> str:
        inputs, outputs = (
            ", ".join(
                f"{name} {dtype}[{', '.join('?' if n is None else str(n) for n in shape)}]"
                for name, (dtype, shape) in self.signature[side].items()
            )
            for side in ("inputs", "outputs")
        )
        checked = "not checked"
        if self.differences is not None:
            checked = (
                "checked in a process without keras_headmask: differs from the model by at most "
                f"{max(self.differences.values()):.1e}"
            )
        return f"{self.path}, in {self.seconds:.1f} s: {inputs} -> {outputs}\n  {checked}"


def export_saved_model(
    model: keras.Model,
    base_path: str | os.PathLike,
    *,
    version: int | None = None,
    check: Any = True,
) -> ExportReport:
    """Write `model` as `<base_path>/<version>/`, a SavedModel for TensorFlow Serving.

    The rule is in the graph: a client sends what the model takes, never a mask. The version is
    written beside the others under a hidden name, compared with the model in a process that cannot
    import this package, and appears by one rename. In `dense_scope()` the graph has no loops: for
    OpenVINO, which fails in loops of more than one step.

    The signature `serving_default` has inputs as the model names them, any batch and, where the
    model allows it, any length; outputs by the keys of a dict, else `output_0`, `output_1`, ...
    Loaded by `tf.saved_model.load`, the version has `serve` too, called as the model itself, as
    after `model.export`. Keep what `load` returns as long as `serve` is called: it holds the
    variables.

    Args:
        model: A model under `apply_head_masks`, one that holds `PerHeadMaskedMultiHeadAttention`,
            or any Keras model with named inputs. Other threads may run and export it meanwhile.
        base_path: A folder of versions, or a new one.
        version: A whole number that is not there yet; by default the next free one.
        check: Whether to compare the answers, on made-up requests of three shapes. Or the requests
            to compare on: a dict of arrays by input name, or a list of such dicts. Models that take
            text need these.

    Returns:
        An `ExportReport`; `print` it.

    Raises:
        TypeError, ValueError: for arguments that do not fit, and a model without named inputs.
        FileExistsError: for a version that exists.
        OSError: where the folder is not writable.
        RuntimeError: for another backend than TensorFlow, and for a model that a server cannot run,
            or that answers otherwise there; nothing is published then.

    >>> import tempfile
    >>> from keras_headmask import PerHead, PerHeadMaskedMultiHeadAttention, SameSentence
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> attention = PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=PerHead({0: SameSentence(9)}))
    >>> model = keras.Model(ids, attention(x, mask_inputs={"token_ids": ids}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_saved_model(model, folder, check=False)
    >>> report.version, report.signature["inputs"]
    (1, {'token_ids': ('int32', (None, None))})
    """
    start = time.perf_counter()
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Exports need the TensorFlow backend, and this process runs on "
            f"{keras.backend.backend()}. Save the model as .keras; load and export it in a process "
            "with KERAS_BACKEND=tensorflow."
        )
    signature = signature_of(Found(model))
    base = _checked_base(base_path)
    _checked_version(version, base)
    cases = [] if check is False else checking.cases(signature, check)
    serve, function = traced(signature)
    differences = None
    with _being_written(base) as folder:
        _write(model, serve, function, folder)
        if cases:
            served = checking.run_fresh(folder, [case.request for case in cases])
            differences = checking.differences(signature, cases, served)
        number = _publish(folder, base, version)
    outputs = named_outputs(function.structured_outputs)
    described = {
        "inputs": {name: (x.dtype, x.shape) for name, x in signature.inputs.items()},
        "outputs": {name: (x.dtype.name, tuple(x.shape)) for name, x in outputs.items()},
    }
    seconds = time.perf_counter() - start
    return ExportReport(base / str(number), number, described, differences, seconds)


def _write(model: keras.Model, serve: Any, function: Any, folder: pathlib.Path) -> None:
    """Write a SavedModel with the variables and tables that `function` reads.

    By TensorFlow's own saver: Keras' ExportArchive would trace the model again, and put the
    functions of `fit` and `predict` aside meanwhile, which another thread may be running.
    """
    import tensorflow as tf

    root = tf.Module()
    root.read = [
        *function.variables,
        *(
            value
            for layer in _keras.layers_of(model)
            for value in list(vars(layer).values())  # (another thread may look at the layer)
            if isinstance(value, tf.saved_model.experimental.TrackableResource)
        ),
    ]
    root.serve = serve
    try:
        tf.saved_model.save(root, str(folder), signatures={"serving_default": function})
    except tf.errors.OpError as error:  # a full disk has many names there
        raise OSError(error.message) from error


# --- Versions -------------------------------------------------------------------------------------


def _checked_base(base_path: str | os.PathLike) -> pathlib.Path:
    """`base_path` as a folder of versions, there already or not."""
    text = os.fspath(base_path)
    if not isinstance(text, str) or not text or "://" in text:
        raise ValueError(
            "`base_path` must be a local folder, where a version appears by one rename. Received: "
            f"{text!r}. Export to a local folder and copy the finished version, its "
            "saved_model.pb last."
        )
    base = pathlib.Path(text).expanduser()
    if (base.exists() and not base.is_dir()) or (base / "saved_model.pb").exists():
        raise ValueError(
            "`base_path` must be a folder of versions, <base>/1, <base>/2, ... Received: "
            f"{text!r}, which is a file or a SavedModel itself."
        )
    return base


def _checked_version(version: int | None, base: pathlib.Path) -> int:
    """`version`, or the next free one. A name means the number that servers read: "0003" is 3."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    taken = {int(name) for name in names if name.isascii() and name.isdigit()}
    number = max(taken, default=0) + 1 if version is None else version
    if type(number) is not int or not 0 <= number < _PAST:
        raise ValueError(
            f"`version` must be a whole number from 0 that a server can hold. Received: {number!r}."
        )
    if number in taken:
        raise FileExistsError(
            f"Version {version} exists in '{base}', and servers treat a version as final. Pass "
            "another number, or version=None for the next free one."
        )
    return number


@contextlib.contextmanager
def _being_written(base: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder on the file system of `base`, hidden from servers, gone at the end."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".being-written-", dir=base) as hidden:
            yield pathlib.Path(hidden) / "version"
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(
            f"The export could not be written to '{base}', and nothing was published: {error}"
        ) from error


def _publish(folder: pathlib.Path, base: pathlib.Path, version: int | None) -> int:
    """Give `folder` its number by one rename, and return the number.

    A rename onto a folder that holds something fails, so two writers never share a version.
    """
    while True:
        number = _checked_version(version, base)
        try:
            os.rename(folder, base / str(number))
            return number
        except OSError:
            if not (base / str(number)).exists():
                raise
            # Another writer was faster: take the next number, or raise that it exists.
