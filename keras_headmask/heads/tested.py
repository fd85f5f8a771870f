"""The subject of a search for leaks: a Keras model, a SavedModel, or a function of arrays."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.heads import texts
from keras_headmask.heads.changes import Arrays, difference, scales
from keras_headmask.retrofit.adapters import walk


class Run(NamedTuple):
    """The result of one run.

    `outputs`: numbers by name, in float64, which holds every other dtype but int64 exactly.
    `masks`: the Keras masks, `(batch, length)`, by the layer that makes them of its inputs.
    `skipped`: the types of outputs that hold no numbers, by name.
    """

    outputs: Arrays
    masks: Arrays
    skipped: Mapping[str, str]


class Change(NamedTuple):
    """Changed inputs: `name` has other values at `places`, boolean `(batch, length)`.

    `column` is the position that is changed, `None` for all of them. With `in_embeddings` the ids
    stay, and what embedding layers make of them is changed there.
    """

    name: str
    column: int | None
    inputs: Arrays
    places: np.ndarray
    in_embeddings: bool = False


class Tested(NamedTuple):
    """A Keras model, a SavedModel (as `kind` says) or a function, on inputs by name.

    `lengths` has the second axis of each input, as it is declared; `model` is `None` if it is no
    Keras model.
    """

    kind: str
    call: Callable[[Arrays], Any]
    lengths: Mapping[str, int | None]
    model: keras.Model | None = None
    pack: Callable[[Arrays], Any] = dict  # the inputs as the model takes them

    def run(self, inputs: Arrays) -> Run:
        masks: Arrays = {}
        with _masks_seen(self.model, masks):
            outputs, skipped = numbers_of(self.call(inputs), self.kind)
        return Run(outputs, masks, skipped)

    @contextlib.contextmanager
    def embeddings_changed(self, change: Change) -> Iterator[list[Any]]:
        """Let embedding layers add noise where `change` says so; fill a list with their inputs."""
        reads: list[Any] = []

        def embedded(usual: Callable, read: Any, *args: Any, **kwargs: Any) -> Any:
            vectors, ids = usual(read, *args, **kwargs), change.inputs[change.name]
            if tuple(read.shape) != ids.shape or (ops.convert_to_numpy(read) != ids).any():
                return vectors
            reads.append(read)
            values = ops.convert_to_numpy(ops.cast(vectors, "float32"))
            noise = np.random.default_rng(0).normal(size=values.shape) * (values.std() or 1.0)
            added = ops.convert_to_tensor(noise * change.places[..., None])
            return vectors + ops.cast(added, vectors.dtype)

        layers = _layers(self.model, keras.layers.Embedding) if change.in_embeddings else []
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(observers.overriding(layer, "call", embedded))
            yield reads

    def first_layer(
        self, inputs: Arrays, change: Change, rows: np.ndarray, tolerance: float
    ) -> str | None:
        """The first layer whose output moves where it must not: at `rows`, boolean `(batch, T)`."""
        if self.model is None:
            return None
        usual = self._layer_outputs(change._replace(inputs=inputs, in_embeddings=False))
        for (path, before), (_, after) in zip(usual, self._layer_outputs(change), strict=False):
            if before.shape == after.shape and before.shape[:2] == rows.shape:
                limit = tolerance * scales(before, True)
                if difference(before, after, True, limit)[rows].any():
                    return path
        return None

    def _layer_outputs(self, change: Change) -> list[tuple[str, np.ndarray]]:
        """The first output of each run of a layer, in the order in which they end."""
        seen: list[tuple[str, np.ndarray]] = []

        def keep(path: str, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            outputs = usual(*args, **kwargs)
            for x in keras.tree.flatten(outputs)[:1]:
                if len(getattr(x, "shape", ())) > 1:
                    seen.append((path, ops.convert_to_numpy(x).astype("float64")))
            return outputs

        assert self.model is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.embeddings_changed(change))  # first: what is kept is changed
            for path, layer in walk(self.model):
                if not isinstance(layer, keras.Model):
                    kept = functools.partial(keep, f"'{path}' ({type(layer).__name__})")
                    stack.enter_context(observers.overriding(layer, "call", kept))
            self.call(change.inputs)
        return seen


# --- Arrays of any framework ----------------------------------------------------------------------


def outputs_by_name(outputs: Any) -> dict[str, Any]:
    """The outputs by the keys of a dict, or by their number; those inside of a nest as "a/0"."""
    leaves = list(_leaves(outputs, ()))
    if len(leaves) == 1 and not isinstance(outputs, Mapping):
        return {"output": leaves[0][1]}
    start = "" if isinstance(outputs, Mapping) else "output "
    return {start + "/".join(path): x for path, x in leaves}


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


def numbers_of(outputs: Any, kind: str) -> tuple[Arrays, dict[str, str]]:
    """The outputs of a function in float64 by name, and the types of those without numbers."""
    leaves = outputs_by_name(outputs)
    arrays = {
        name: as_numpy(x)
        for name, x in leaves.items()
        if hasattr(x, "dtype") or isinstance(x, (bool, int, float))
    }
    arrays = {k: x.astype("float64") for k, x in arrays.items() if x.dtype.kind not in "OSU"}
    skipped = {name: type(x).__name__ for name, x in leaves.items() if name not in arrays}
    if not arrays:
        raise TypeError(
            f"{kind} must return arrays of numbers, in a dict, list or tuple if there are several. "
            f"Received: {sorted(set(skipped.values()))}."
        )
    return arrays, skipped


def shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name!r}: {x.dtype} {x.shape}" for name, x in arrays.items())


def as_numpy(array: Any) -> np.ndarray:
    """An array of NumPy, TensorFlow, JAX or PyTorch in NumPy, off its graph and device."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float() if "bfloat16" in str(array.dtype) else array  # NumPy lacks it
    return np.asarray(array)


def _like(array: np.ndarray, original: Any) -> Any:
    """`array` in the framework and on the device of `original`."""
    framework = type(original).__module__.split(".")[0]
    if framework == "torch":
        return original.new_tensor(array)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.constant(array, original.dtype)
    if framework.startswith("jax"):
        import jax.numpy as jnp

        return jnp.asarray(array)
    return array


def as_inputs(model: Any, inputs: Any) -> Arrays:
    """The inputs of a Keras model, or of a function (`None`), as NumPy arrays by name.

    Raises:
        TypeError, ValueError: for what is not an array, a dict or list of arrays, or what `model`
            does not take.
    """
    texts.check_no_strings(model, inputs)
    try:
        arrays = {name: as_numpy(x) for name, x in texts.by_name(model, inputs).items()}
    except ValueError as error:  # lists of several lengths
        raise ValueError(
            f"`inputs` must be arrays. Received: {inputs!r}. Pad them to one length."
        ) from error
    if not arrays or any(not x.ndim for x in arrays.values()):
        raise TypeError(
            "`inputs` must hold arrays, (batch, length) or (batch, length, features), in a dict or "
            f"list where there are several. Received: {inputs!r}."
        )
    texts.check_inputs(model, arrays)
    return arrays


# --- What runs ------------------------------------------------------------------------------------


def as_tested(what: Any, inputs: Any) -> tuple[Tested, Arrays]:
    """A model, the path of a SavedModel or a function, and its inputs as arrays by name."""
    if isinstance(what, (str, os.PathLike)):
        return _saved_model(pathlib.Path(what), inputs)
    if isinstance(what, keras.Model):
        return _keras_model(what, inputs)
    if not callable(what):
        raise TypeError(
            "`what` must be a Keras model, the path of a SavedModel such as 'served/1', or a "
            f"function of arrays. Received: {what!r}."
        )
    call = functools.partial(called, what, inputs)
    return Tested("The function", call, {}), as_inputs(None, inputs)


def called(function: Callable, inputs: Any, arrays: Arrays, *args: Any) -> Any:
    """`function` of `arrays` in the nest and the framework of `inputs`, and of `args`."""
    originals = zip(arrays.items(), texts.by_name(None, inputs).values(), strict=True)
    return function(_packed({k: _like(x, one) for (k, x), one in originals}, inputs), *args)


def _packed(arrays: Mapping[str, Any], inputs: Any) -> Any:
    """`arrays` as `inputs` come: in a dict, in a list, or one alone."""
    if isinstance(inputs, Mapping):
        return dict(arrays)
    return list(arrays.values()) if texts.is_several(inputs) else next(iter(arrays.values()))


def _keras_model(model: keras.Model, inputs: Any) -> tuple[Tested, Arrays]:
    arrays = as_inputs(model, inputs)
    graph = _keras.functional_of(model)
    names = [x.name for x in graph.inputs] if isinstance(graph, _keras.Functional) else []

    def pack(arrays: Arrays) -> Any:
        is_by_name = isinstance(inputs, Mapping) and set(names) == set(arrays)
        if is_by_name and not isinstance(graph.input, Mapping):
            return keras.tree.pack_sequence_as(graph.input, [arrays[name] for name in names])
        return _packed(arrays, inputs)

    def call(arrays: Arrays) -> Any:
        return model(pack(arrays), training=False)

    shapes = {name: x.shape for name, x in texts.declared(model).items() if name in arrays}
    return Tested("The model", call, _lengths(shapes), model, pack), arrays


def _saved_model(path: pathlib.Path, inputs: Any) -> tuple[Tested, Arrays]:
    """A signature of it, and the inputs as arrays by its names."""
    if not (path / "saved_model.pb").is_file():
        raise ValueError(
            f"'{path}' is not the folder of a SavedModel: it holds no saved_model.pb. Pass the "
            "folder of one version, such as 'served/1'; load a .keras file by "
            "`keras.saving.load_model`, and pass the model."
        )
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    names = list(loaded.signatures)
    if not names:
        raise ValueError(
            f"The SavedModel '{path}' has no signatures, so nothing says how to call it. Write it "
            "by `hm.export_saved_model` or `model.export`."
        )
    function = loaded.signatures[
        next((x for x in ("serving_default", "serve") if x in names), names[0])
    ]
    wanted = function.structured_input_signature[1]
    if len(wanted) == 1 and not isinstance(inputs, Mapping):
        inputs = dict.fromkeys(wanted, inputs)
    arrays = as_inputs(None, inputs)
    if set(arrays) != set(wanted):
        raise ValueError(
            f"The SavedModel '{path}' has the inputs {sorted(wanted)}. Received: {sorted(arrays)}. "
            "Pass a dict of arrays by these names."
        )
    for name, x in arrays.items():
        if not wanted[name].dtype.is_floating:
            texts.check_ids(name, x)
        if not wanted[name].shape.is_compatible_with(x.shape):
            raise ValueError(
                f"The input {name!r} of the SavedModel '{path}' has the shape "
                f"{tuple(wanted[name].shape)}. Received: {x.shape}."
            )

    def call(arrays: Arrays) -> Any:
        assert loaded is not None  # held here: the function alone does not keep its variables
        return function(**{name: tf.constant(x, wanted[name].dtype) for name, x in arrays.items()})

    shapes = {name: spec.shape.as_list() for name, spec in wanted.items() if spec.shape.rank}
    return Tested("The SavedModel", call, _lengths(shapes)), arrays


def _lengths(shapes: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}


@contextlib.contextmanager
def _masks_seen(model: keras.Model | None, masks: Arrays) -> Iterator[None]:
    """Put the Keras masks that layers make of the model's inputs in `masks`, by layer."""

    def see(layer: Any, usual: Callable, read: Any, *args: Any, **kwargs: Any) -> Any:
        mask = layer.compute_mask(read)
        if mask is not None and len(mask.shape) == 2:
            masks[layer.name] = ops.convert_to_numpy(mask)
        return usual(read, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for layer in _layers(model, (keras.layers.Embedding, keras.layers.Masking)):
            stack.enter_context(observers.overriding(layer, "call", functools.partial(see, layer)))
        yield


def _layers(model: keras.Model | None, kinds: Any) -> list[Any]:
    layers = () if model is None else _keras.layers_of(model)
    return [layer for layer in layers if isinstance(layer, kinds)]
