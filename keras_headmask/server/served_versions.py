"""The newest version of a SavedModel that loads, watched for a newer one."""

import contextlib
import dataclasses
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_headmask.export.versions import read_signatures, tensors_of, version_folders
from keras_headmask.server.predict_requests import Arrays, BadRequest, Signature, Tensor


@dataclasses.dataclass(frozen=True)
class Served:
    """A loaded version. It lives as long as a request holds it, whatever replaced it since."""

    version: int
    signatures: dict[str, Signature]
    definitions: dict[str, Any]  # name: SignatureDef, for metadata
    model: Any = dataclasses.field(repr=False)


class ServedVersions:
    """Serves `current`, the newest version under `base_path` that loads; `check` looks for a newer.

    A newer version takes over when it is loaded and has answered once for each signature; until
    then, and for requests in progress, the old one stays. A version that does not load is kept in
    `failures` and tried again when its files change. If the newest is taken away, the one before it
    returns.

    Args:
        base_path: The folder of versions.
        report: Called with a line of text for what happens.

    Raises:
        FileNotFoundError: `base_path` is not a folder, or holds no version.
        ValueError: No version loads.
    """

    current: Served

    def __init__(self, base_path: str | pathlib.Path, report: Callable[[str], Any] = print):
        self.base_path = base_path
        self.failures: dict[int, str] = {}  # version: why it did not load
        self._tried: dict[int, Any] = {}  # version: state of the files that did not load
        self._report = report
        self._stop = threading.Event()
        if not version_folders(base_path):
            raise FileNotFoundError(
                f"{str(base_path)!r} holds no version. Export one first: "
                "`model.export(base_path + '/1')`."
            )
        self.check()
        if not hasattr(self, "current"):
            reasons = "; ".join(f"{version}: {why}" for version, why in self.failures.items())
            raise ValueError(f"No version under {str(base_path)!r} loads. {reasons}")

    def check(self) -> None:
        """Take up the newest version that loads, if it is not the current one."""
        folders = version_folders(self.base_path)
        failures = {v: why for v, why in self.failures.items() if v in folders}
        for version, folder in folders.items():
            if hasattr(self, "current") and version == self.current.version:
                break
            state = _state(folder)
            if version in failures and state == self._tried[version]:
                continue
            failures.pop(version, None)
            try:
                # One assignment: a request has either the old or the new.
                self.current = _load(version, folder, self._report)
            except Exception as error:  # whatever a damaged folder makes TensorFlow raise
                self._tried[version] = state
                failures[version] = f"{type(error).__name__}: {error}"
                self._report(f"Version {version} does not load. {failures[version]}")
            else:
                self._report(f"Serving version {version}")
                break
        self.failures = failures  # a new dictionary, since another thread may be reading the old

    def watch(self, seconds: float) -> None:
        """Call `check` every so many seconds, in a thread of its own, until `close`."""

        def poll() -> None:
            while not self._stop.wait(seconds):
                try:
                    self.check()
                except Exception as error:  # the base path gone for a moment, say
                    self._report(f"Cannot look for versions. {type(error).__name__}: {error}")

        threading.Thread(target=poll, name="versions", daemon=True).start()

    def close(self) -> None:
        self._stop.set()


def _state(folder: pathlib.Path) -> list[Any]:
    """What changes when a file of the version is written: so a copy in progress is tried again."""
    files = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            files.append((path, path.stat().st_size, path.stat().st_mtime_ns))
    return files


def _load(version: int, folder: pathlib.Path, report: Callable[[str], Any]) -> Served:
    """The version, each of its signatures called once: with one row of one position, of zeros."""
    import tensorflow as tf

    definitions = read_signatures(folder)
    model = tf.saved_model.load(str(folder), tags=["serve"])
    signatures = {
        name: _signature(name, function, definitions[name])
        for name, function in model.signatures.items()
        if name in definitions
    }
    for signature in signatures.values():
        smallest = {}
        for name, tensor in signature.inputs.items():
            dtype = tf.dtypes.as_dtype(tensor.dtype)
            shape = [1 if size is None else size for size in tensor.shape or ()]
            smallest[name] = np.full(shape, b"" if dtype == tf.string else 0, dtype.as_numpy_dtype)
        try:
            signature.call(smallest)
        except BadRequest as error:  # it may want more than one position
            report(f"Version {version}, `{signature.name}`: not warmed up. {error}")
    return Served(version, signatures, definitions, model)


def _signature(name: str, function: Any, definition: Any) -> Signature:
    import tensorflow as tf

    inputs, outputs = (
        {key: Tensor(*tensor) for key, tensor in tensors_of(infos).items()}
        for infos in (definition.inputs, definition.outputs)
    )

    def call(arrays: Arrays) -> Arrays:
        tensors = {key: tf.constant(array, inputs[key].dtype) for key, array in arrays.items()}
        try:
            return {key: value.numpy() for key, value in function(**tensors).items()}
        except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as error:
            # Lengths that do not fit together, a sequence longer than the model's positions, ...
            why = reason(str(error.message))
            raise BadRequest(f"The model cannot compute this request: {why}") from error

    return Signature(name, inputs, outputs, call)


# Of TensorFlow's messages: lines about where in the graph, and names of nodes within other lines.
_INTERNAL = re.compile(
    r"^(Graph execution error:|Detected at node|<stack traces|\s*File \"|\d+ root error).*"
    r"|^(Exception encountered when calling|Arguments received by|\s*•).*"
    r"|^\s*\(\d+\) [A-Z_]+:|\[\[?\{\{.*|\{\{[^}]*\}\}|\[Op:\w+\].*"
)
_BOLD = re.compile(r"\x1b\[[0-9;]*m")  # as Keras writes it around what TensorFlow says


def reason(message: str) -> str:
    """The line of TensorFlow's message that says what is wrong, without places in the graph."""
    plain = _BOLD.sub("", message)
    lines = (_INTERNAL.sub("", line).strip() for line in plain.splitlines())
    return next((line for line in lines if line), "it gives no reason")
