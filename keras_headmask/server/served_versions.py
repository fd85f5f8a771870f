"""The newest version of a SavedModel that loads, watched for a newer one."""

import dataclasses
import threading

import numpy as np

from keras_headmask.export.versions import read_signatures, version_folders
from keras_headmask.server.predict_requests import BadRequest, Signature, Tensor
from keras_headmask.server.tensorflow_errors import reason


@dataclasses.dataclass(frozen=True)
class Served:
    """A loaded version. It lives as long as a request holds it, whatever replaced it since."""

    version: int
    signatures: dict
    definitions: dict  # name: SignatureDef, for metadata
    model: object = dataclasses.field(repr=False)


class ServedVersions:
    """Serves `current`, the newest version under `base_path` that loads; `check` looks for a newer.

    A newer version takes over when it is loaded and has answered once for each signature; until
    then, and for requests under way, the old one stays. A version that does not load is kept in
    `failures` and tried again when its files change. If the newest is taken away, the one before it
    returns.

    Args:
        base_path: the folder of versions.
        report: called with a line of text for what happens.

    Raises:
        FileNotFoundError: `base_path` is no folder, or holds no version.
        ValueError: no version loads.
    """

    def __init__(self, base_path, report=print):
        self.base_path = base_path
        self.current = None
        self.failures = {}  # version: why it did not load
        self._tried = {}  # version: state of the files that did not load
        self._report = report
        self._stop = threading.Event()
        if not version_folders(base_path):
            raise FileNotFoundError(
                f"{str(base_path)!r} holds no version. Export one first: "
                f"`model.export(base_path + '/1')`."
            )
        self.check()
        if self.current is None:
            reasons = "; ".join(f"{version}: {why}" for version, why in self.failures.items())
            raise ValueError(f"No version under {str(base_path)!r} loads. {reasons}")

    def check(self):
        """Take up the newest version that loads, if it is not the current one."""
        folders = version_folders(self.base_path)
        self.failures = {v: why for v, why in self.failures.items() if v in folders}
        for version, folder in folders.items():
            if self.current is not None and version == self.current.version:
                return
            state = _state(folder)
            if version in self.failures and state == self._tried[version]:
                continue
            try:
                served = _load(version, folder, self._report)
            except Exception as error:  # whatever a damaged folder makes TensorFlow raise
                self._tried[version] = state
                why = f"{type(error).__name__}: {error}"
                # A new dictionary, since another thread may be reading the old one.
                self.failures = {**self.failures, version: why}
                self._report(f"Version {version} does not load. {why}")
                continue
            self.failures = {v: why for v, why in self.failures.items() if v != version}
            self.current = served  # one assignment: a request has either the old or the new
            self._report(f"Serving version {version}")
            return

    def watch(self, seconds):
        """Call `check` every so many seconds, in a thread of its own, until `close`."""

        def poll():
            while not self._stop.wait(seconds):
                try:
                    self.check()
                except Exception as error:  # the base path gone for a moment, say
                    self._report(f"Cannot look for versions. {type(error).__name__}: {error}")

        threading.Thread(target=poll, name="versions", daemon=True).start()

    def close(self):
        self._stop.set()


def _state(folder):
    """What changes when a file of the version is written: so a copy under way is tried again."""
    files = []
    for path in sorted(folder.rglob("*")):
        try:
            stat = path.stat()
        except FileNotFoundError:  # between listing it and looking at it
            continue
        files.append((str(path), stat.st_size, stat.st_mtime_ns))
    return files


def _load(version, folder, report):
    import tensorflow as tf

    definitions = read_signatures(folder)
    model = tf.saved_model.load(str(folder), tags=["serve"])
    signatures = {
        name: _signature(name, function, definitions[name])
        for name, function in model.signatures.items()
        if name in definitions
    }
    for signature in signatures.values():
        try:
            signature.call(_smallest(signature))
        except BadRequest as error:  # it may want more than one position
            report(f"Version {version}, `{signature.name}`: not warmed up. {error}")
    return Served(version, signatures, definitions, model)


def _signature(name, function, definition):
    import tensorflow as tf

    def call(arrays):
        tensors = {key: tf.constant(array, inputs[key].dtype) for key, array in arrays.items()}
        try:
            return {key: value.numpy() for key, value in function(**tensors).items()}
        except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as error:
            # Lengths that do not fit together, a sequence longer than the model's positions, ...
            why = reason(str(error.message))
            raise BadRequest(f"The model cannot compute this request: {why}") from error

    inputs, outputs = (
        {key: _tensor(info) for key, info in sorted(infos.items())}
        for infos in (definition.inputs, definition.outputs)
    )
    return Signature(name, inputs, outputs, call)


def _tensor(info):
    import tensorflow as tf

    sizes = None
    if not info.tensor_shape.unknown_rank:
        sizes = tuple(dim.size if dim.size >= 0 else None for dim in info.tensor_shape.dim)
    return Tensor(tf.dtypes.as_dtype(info.dtype).name, sizes)


def _smallest(signature):
    """One row of one position, of zeros."""
    import tensorflow as tf

    arrays = {}
    for name, tensor in signature.inputs.items():
        shape = [1 if size is None else size for size in tensor.shape or ()]
        dtype = tf.dtypes.as_dtype(tensor.dtype).as_numpy_dtype
        arrays[name] = np.full(shape, b"" if tensor.dtype == "string" else 0, dtype)
    return arrays
