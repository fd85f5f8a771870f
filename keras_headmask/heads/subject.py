"""A model whose leaks are searched, or a SavedModel: how it is called, and its inputs by name."""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.heads import texts

Arrays = dict[str, np.ndarray]


class Subject(NamedTuple):
    """What is tried: a Keras model, or a signature of a SavedModel (`model` is `None`)."""

    model: keras.Model | None
    call: Callable[[Arrays], Arrays]
    pack: Callable[[Arrays], Any]  # as the model takes them
    lengths: Mapping[str, int | None]  # the second axis of each input, as it is declared


def subject_of(model: Any, inputs: Any) -> tuple[Subject, Arrays]:
    """A model or the path of a SavedModel, and its inputs as arrays by name."""
    if isinstance(model, (str, os.PathLike)):
        return _of_saved_model(pathlib.Path(model), inputs)
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a Keras model, or the path of a SavedModel such as 'served/1'. "
            f"Received: {model!r}."
        )
    graph = _keras.functional_of(model)
    names = [x.name for x in graph.inputs] if isinstance(graph, _keras.Functional) else []
    given = _arrays(model, inputs)

    def pack(arrays: Arrays) -> Any:
        is_by_name = isinstance(inputs, Mapping)
        if is_by_name and set(names) == set(arrays) and not isinstance(graph.input, Mapping):
            return keras.tree.pack_sequence_as(graph.input, [arrays[name] for name in names])
        if is_by_name:
            return dict(arrays)
        return list(arrays.values()) if texts.is_several(inputs) else next(iter(arrays.values()))

    def call(arrays: Arrays) -> Arrays:
        return arrays_of_outputs(model(pack(arrays), training=False))

    declared = {name: x.shape for name, x in texts.declared(model).items() if name in given}
    return Subject(model, call, pack, _lengths(declared)), given


def _lengths(shapes: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}


def _arrays(model: Any, inputs: Any) -> Arrays:
    given = {name: _array(x) for name, x in texts.by_name(model, inputs).items()}
    if not given or any(not x.ndim for x in given.values()):
        raise TypeError(
            "`inputs` must hold arrays, (batch, length) or (batch, length, features), in a dict or "
            f"list where the model has several inputs. Received: {inputs!r}."
        )
    texts.check_inputs(model, given)
    return given


def _array(value: Any) -> np.ndarray:
    try:
        return ops.convert_to_numpy(value) if hasattr(value, "device") else np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise ValueError(
            f"`inputs` must be arrays. Received: {value!r}. Pad them to one length."
        ) from error


def arrays_of_outputs(outputs: Any) -> Arrays:
    """Numbers by name, in float64, in which each output dtype but int64 is exact."""
    named = {k: x for k, x in outputs_by_name(outputs).items() if x is not None}
    arrays = {k: np.asarray(ops.convert_to_numpy(x)) for k, x in named.items()}
    return {name: x.astype("float64") for name, x in arrays.items() if x.dtype.kind not in "OSU"}


def outputs_by_name(outputs: Any) -> dict[str, Any]:
    """The outputs by the keys of a dict, or by their number; those inside of a nest as "a/0"."""
    flat = keras.tree.flatten_with_path(outputs)
    if len(flat) == 1 and not isinstance(outputs, Mapping):
        return {"output": flat[0][1]}
    before = "" if isinstance(outputs, Mapping) else "output "
    return {before + "/".join(map(str, path)): x for path, x in flat}


def _of_saved_model(path: pathlib.Path, inputs: Any) -> tuple[Subject, Arrays]:
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
    given = _arrays(None, inputs)
    if set(given) != set(wanted):
        raise ValueError(
            f"The SavedModel '{path}' has the inputs {sorted(wanted)}. Received: {sorted(given)}. "
            "Pass a dict of arrays by these names."
        )
    for name, x in given.items():
        if not wanted[name].dtype.is_floating:
            texts.check_ids(name, x)
        if not wanted[name].shape.is_compatible_with(x.shape):
            raise ValueError(
                f"The input {name!r} of the SavedModel '{path}' has the shape "
                f"{tuple(wanted[name].shape)}. Received: {x.shape}."
            )

    def call(arrays: Arrays) -> Arrays:
        made = function(**{name: tf.constant(x, wanted[name].dtype) for name, x in arrays.items()})
        made = {name: x.numpy() for name, x in made.items()}
        return {k: x.astype("float64") for k, x in made.items() if x.dtype.kind not in "OSU"}

    call.loaded = loaded  # type: ignore[attr-defined]  # the function alone does not keep it
    declared = {name: spec.shape.as_list() for name, spec in wanted.items() if spec.shape.rank}
    return Subject(None, call, dict, _lengths(declared)), given


def batch_of(given: Arrays) -> int:
    """The number of examples: the largest first axis, since some inputs may serve all examples."""
    sizes = [x.shape[0] for x in given.values() if x.ndim > 1]
    return 0 if 0 in sizes else max(sizes, default=0)


def shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name!r}: {x.dtype} {x.shape}" for name, x in arrays.items())
