"""A Keras model or a function, called on NumPy arrays by name."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.heads.changes import Arrays
from keras_headmask.heads.reading import by_name, check_inputs, is_several


class Tested:
    """`what`, and its `inputs` as NumPy arrays by name, in `arrays`."""

    def __init__(self, what: Any, inputs: Any):
        if not callable(what):
            raise TypeError(
                "`what` must be a Keras model or a function of arrays; of a SavedModel, a function "
                f"that calls what `tf.saved_model.load` returns. Received: {what!r}."
            )
        self.what, self.inputs = what, inputs
        self.model = what if isinstance(what, keras.Model) else None
        try:
            self.arrays = {k: as_numpy(x) for k, x in by_name(self.model, inputs).items()}
        except ValueError:  # lists of several lengths
            self.arrays = {}
        if not self.arrays or any(not x.ndim for x in self.arrays.values()):
            raise TypeError(
                "`inputs` must hold arrays, (batch, length) or (batch, length, features), in a "
                f"dict or list where there are several. Received: {inputs!r}."
            )
        check_inputs(self.model, self.arrays)

    def run(self, arrays: Arrays) -> tuple[Arrays, list[np.ndarray]]:
        """The outputs by name, and the Keras masks of the inputs, `(batch, length)`."""
        masks: list[np.ndarray] = []
        with _masks_seen(self.model, masks):
            options = {} if self.model is None else {"training": False}
            outputs = self.what(self.packed(arrays), **options)
        numbers, self.skipped = numbers_of(outputs, "`what`")
        return numbers, masks

    def packed(self, arrays: Arrays) -> Any:
        """`arrays` as `inputs` came: in a dict, in a list, or one alone."""
        if isinstance(self.inputs, Mapping):
            return dict(arrays)
        values = list(arrays.values())
        return values if is_several(self.inputs) else values[0]


@contextlib.contextmanager
def _masks_seen(model: keras.Model | None, masks: list[np.ndarray]) -> Iterator[None]:
    """Put the Keras masks that layers make of the model's inputs in `masks`, in forward order."""

    def see(layer: Any, usual: Callable, read: Any, *args: Any, **kwargs: Any) -> Any:
        mask = layer.compute_mask(read)
        if mask is not None and len(mask.shape) == 2:
            masks.append(ops.convert_to_numpy(mask))
        return usual(read, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for layer in () if model is None else _keras.layers_of(model):
            if isinstance(layer, (keras.layers.Embedding, keras.layers.Masking)):
                seen = functools.partial(see, layer)
                stack.enter_context(observers.overriding(layer, "call", seen))
        yield


def numbers_of(outputs: Any, kind: str) -> tuple[Arrays, list[str]]:
    """The outputs of a function in float64 by name, and the names of those without numbers.

    Names are the keys of a dict, or numbers; of what lies inside of a nest, "a/0".
    """
    leaves = dict(_leaves(outputs, ()))
    start = "" if isinstance(outputs, Mapping) else "output "
    named = {start + "/".join(path): x for path, x in leaves.items()}
    if len(named) == 1 and start:
        named = {"output": next(iter(named.values()))}
    arrays = {
        name: as_numpy(x)
        for name, x in named.items()
        if hasattr(x, "dtype") or isinstance(x, (bool, int, float))
    }
    arrays = {k: x.astype("float64") for k, x in arrays.items() if x.dtype.kind not in "OSU"}
    if not arrays:
        raise TypeError(
            f"{kind} must return arrays of numbers, in a dict, list or tuple if there are several. "
            f"Received: {sorted({type(x).__name__ for x in named.values()})}."
        )
    return arrays, sorted(named.keys() - arrays.keys())


def _leaves(nest: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if dataclasses.is_dataclass(nest) and not hasattr(nest, "shape"):
        nest = vars(nest)
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(nest, Mapping):  # of any class, such as those of Hugging Face
        parts = nest.items()
    elif isinstance(nest, (list, tuple)):
        parts = enumerate(nest)
    elif nest is not None:
        yield path, nest
    for key, part in parts:
        yield from _leaves(part, (*path, str(key)))


def as_numpy(array: Any) -> np.ndarray:
    """An array of NumPy, TensorFlow, JAX or PyTorch in NumPy, off its graph and device."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float() if "bfloat16" in str(array.dtype) else array  # NumPy lacks it
    return np.asarray(array)


def shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name!r}: {x.dtype} {x.shape}" for name, x in arrays.items())
