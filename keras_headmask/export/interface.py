"""A model as a function from named tensors to named tensors."""

import functools
import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
PADDING = "padding_mask"  # what KerasHub calls the input that marks real tokens
Tensors = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Input(NamedTuple):
    """One input of a model: sizes along `None` axes are known when a request comes."""

    shape: tuple[int | None, ...]
    dtype: str

    @property
    def is_sequence(self) -> bool:
        """Whether its second axis is the length."""
        return len(self.shape) > 1 and self.shape[1] is None


class Interface(NamedTuple):
    """A model as a function of named inputs; `output_shapes` where its graph has them.

    `arguments` are the inputs' names in the structures that the model's own call takes, by
    parameter. `as_returned` makes of named outputs what that call returns.
    """

    model: keras.Model
    inputs: dict[str, Input]
    call: Callable[[Tensors], Tensors]
    output_shapes: dict[str, tuple[int | None, ...]] | None
    arguments: dict[str, Any]
    as_returned: Callable[[Tensors], Any]


def interface_of(model: keras.Model, input_signature: Any) -> Interface:
    """How `model` is called, by its graph or by `input_signature`."""
    if isinstance(model, keras.Sequential):
        if not model.built or not _keras.functional_of(model):
            raise ValueError(
                f"The Sequential model '{model.name}' has no inputs yet: start it with a "
                "keras.Input, or call its `build`, before it is exported."
            )
        names, tensors = _names(model.inputs), list(model.inputs)
        graph = _keras.functional_of(model)
        struct, outputs = graph.input, graph.output
    elif isinstance(model, _keras.Functional):
        names, tensors = _graph_names(model), list(model.inputs)
        struct, outputs = model.input, model.output
    else:
        return _of_subclassed(model, input_signature)
    inputs = {
        name: Input((None, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in zip(names, tensors, strict=True)
    }
    if input_signature is not None:
        inputs = _narrowed(inputs, input_signature)

    def call(given: Tensors) -> Tensors:
        flat = [given[name] for name in names]
        return _named_outputs(model(keras.tree.pack_sequence_as(struct, flat)))

    shapes = {name: tuple(tensor.shape) for name, tensor in _named_outputs(outputs).items()}
    arguments = {"inputs": keras.tree.pack_sequence_as(struct, names)}
    as_returned = functools.partial(_packed, _structure(outputs))
    return Interface(model, _checked_names(inputs), call, shapes, arguments, as_returned)


def _graph_names(model: _keras.Functional) -> list[str]:
    """The keys of a dict of inputs, else the tensors' names, in the order of `model.inputs`."""
    struct = model.input
    if isinstance(struct, Mapping) and all(hasattr(x, "shape") for x in struct.values()):
        keys = {id(tensor): key for key, tensor in struct.items()}
        return [keys[id(tensor)] for tensor in model.inputs]
    return _names(model.inputs)


def _names(tensors: Any) -> list[str]:
    return [tensor.name for tensor in tensors]


def _narrowed(inputs: dict[str, Input], input_signature: Any) -> dict[str, Input]:
    """The inputs of a graph with sizes that `input_signature` fixes."""
    given = _specs(input_signature)
    if sorted(given) != sorted(inputs):
        raise ValueError(
            f"`input_signature` must name the model's inputs, {sorted(inputs)}. "
            f"Received: {sorted(given)}."
        )
    return {name: given[name] for name in inputs}


def _of_subclassed(model: keras.Model, input_signature: Any) -> Interface:
    parameters = [
        name
        for name, p in inspect.signature(model.call).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "training"
    ]
    if input_signature is None:
        raise ValueError(
            f"`{type(model).__name__}` is a subclassed model, without a graph that names its "
            f"inputs. Its call takes {parameters}. Pass `input_signature`, a dict from names to "
            'keras.InputSpec, with None for batch and length: {"x": keras.InputSpec(shape=(None, '
            'None, 32), dtype="float32"), ...}. Names of the call\'s arguments are passed as such; '
            "else the call gets one dict."
        )
    inputs = _checked_names(_specs(input_signature))
    as_arguments = set(inputs) <= set(parameters)
    if not as_arguments and set(inputs) & set(parameters):
        raise ValueError(
            f"`input_signature` names some arguments of the call, {parameters}, and some that the "
            f"call lacks. Received: {sorted(inputs)}."
        )

    structure = None  # of what the last call returned: no graph says it before

    def call(given: Tensors) -> Tensors:
        nonlocal structure
        outputs = model(**given) if as_arguments else model(dict(given))
        structure = _structure(outputs)
        return _named_outputs(outputs)

    def as_returned(named: Tensors) -> Any:
        return _packed(structure, named)

    if not model.built:
        call(
            {name: ops.ones([size or 2 for size in x.shape], x.dtype) for name, x in inputs.items()}
        )
    arguments = {"inputs": {name: name for name in inputs}}
    if as_arguments:
        arguments = {name: name for name in parameters if name in inputs}
    return Interface(model, inputs, call, None, arguments, as_returned)


def _specs(input_signature: Any) -> dict[str, Input]:
    if not isinstance(input_signature, Mapping):
        raise TypeError(
            "`input_signature` must be a dict from input names to keras.InputSpec or "
            f"tf.TensorSpec. Received: {type(input_signature).__name__}."
        )
    found = {}
    for name, spec in input_signature.items():
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        if shape is None or dtype is None or len(shape) == 0:
            raise ValueError(
                f"`input_signature[{name!r}]` must have a shape with a batch axis, and a dtype. "
                f"Received: {spec}."
            )
        dtype = getattr(dtype, "name", dtype)
        found[name] = Input((None, *tuple(shape)[1:]), keras.backend.standardize_dtype(dtype))
    return found


def _checked_names(inputs: dict[str, Input]) -> dict[str, Input]:
    if bad := [name for name in inputs if keyword.iskeyword(name) or name == "self"]:
        raise ValueError(
            f"The input {bad[0]!r} has a name that is reserved in Python. Give it another: "
            "keras.Input(..., name='token_ids')."
        )
    if bad := [name for name in inputs if not _NAME.fullmatch(name)]:
        raise ValueError(
            f"The input {bad[0]!r} has a name that TensorFlow would change in the signature. Use "
            "letters, digits and _: keras.Input(..., name='token_ids')."
        )
    return inputs


def _named_outputs(outputs: Any) -> Tensors:
    """A dict keeps its keys; else `output_0`, `output_1`, ..., as in Keras' own export."""
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    else:
        several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        named = {f"output_{i}": x for i, x in enumerate(several)}
    if odd := [name for name in named if not isinstance(name, str)]:
        raise ValueError(
            f"The keys of a dict of outputs must be text, the outputs' names. Received: {odd[0]!r}."
        )
    if nested := [name for name, x in named.items() if not hasattr(x, "shape")]:
        raise ValueError(
            f"The output {nested[0]!r} holds several tensors: a signature gives one tensor for "
            "each name. Return a flat dict, list or tensor."
        )
    return named


def _structure(outputs: Any) -> Any:
    return keras.tree.map_structure(lambda _: 0, outputs)


def _packed(structure: Any, named: Tensors) -> Any:
    """Named outputs in the structure that `_named_outputs` took them from."""
    if isinstance(structure, Mapping):
        return {name: named[name] for name in structure}
    flat = [named[f"output_{i}"] for i in range(len(named))]
    return keras.tree.pack_sequence_as(structure, flat)


# --- On arrays ------------------------------------------------------------------------------------


def answer(interface: Interface, given: Arrays) -> Arrays:
    """What the model in memory gives, on the CPU, as the fresh process does."""
    with keras.device("cpu:0"):
        outputs = interface.call(as_tensors(interface, given))
    return {name: as_array(x) for name, x in outputs.items()}


def as_tensors(interface: Interface, given: Arrays) -> dict[str, Any]:
    return {
        name: keras.ops.convert_to_tensor(
            value, interface.inputs[name].dtype if name in interface.inputs else None
        )
        for name, value in given.items()
    }


def as_array(tensor: Any) -> np.ndarray:
    array = keras.ops.convert_to_numpy(tensor)
    if array.dtype.kind == "V":  # bfloat16, which is none of NumPy's own
        return array.astype("float32")
    return array.astype("S") if array.dtype.kind == "O" else array
