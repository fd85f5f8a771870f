"""A model as a function from named tensors to named tensors."""

import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.export import fresh_process
from keras_headmask.masks import Tensor
from keras_headmask.rules.base import MaskSpec

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LARGE = 1e4  # from here on an output's element is compared with itself alone
PADDING = "padding_mask"  # what KerasHub calls the input that marks real tokens
LENGTHS = "lengths"  # the input of `serve_padded` that says how long each example really is
Tensors = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
Shape = tuple[int | None, ...]


class Input(NamedTuple):
    """One input of a model: sizes along `None` axes are known when a request comes."""

    shape: Shape
    dtype: str

    @property
    def is_sequence(self) -> bool:
        """Whether its second axis is the length."""
        return len(self.shape) > 1 and self.shape[1] is None


class Interface(NamedTuple):
    """A model, or a signature of its export, as a function of named inputs.

    `arguments` are the inputs' names in the structures that the model's own call takes, by
    parameter. `as_returned` turns named outputs into what that call returns.
    """

    model: keras.Model
    inputs: dict[str, Input]
    call: Callable[[Tensors], Tensors]
    output_shapes: dict[str, Shape] | None  # of a graph
    arguments: dict[str, Any]
    as_returned: Callable[[Tensors], Any]
    rules: Mapping[str, MaskSpec] = {}  # of each attention layer that has one, by path
    is_restricted: bool = False  # whether they keep any head from any key
    read_as: Mapping[str, frozenset[str]] = {}  # what rules call an input, beside its own name


def interface_of(model: keras.Model, input_signature: Any) -> Interface:
    """How `model` is called, by its graph or by `input_signature`."""
    from keras_headmask.retrofit.masked_model import mask_specs
    from keras_headmask.retrofit.observe import is_restricted  # needs all of retrofit/

    graph, shapes, by_name = _keras.functional_of(model), None, False
    given = None if input_signature is None else _given_inputs(input_signature)
    if isinstance(graph, _keras.Functional):
        # The keys of a dict of inputs, else the tensors' names.
        struct, names = graph.input, [tensor.name for tensor in graph.inputs]
        if isinstance(struct, Mapping) and all(hasattr(x, "shape") for x in struct.values()):
            keys = {id(tensor): key for key, tensor in struct.items()}
            names = [keys[id(tensor)] for tensor in graph.inputs]
        inputs = {name: _input(x) for name, x in zip(names, graph.inputs, strict=True)}
        if given is not None and given.keys() != inputs.keys():
            raise ValueError(
                f"`input_signature` must name the model's inputs, {sorted(inputs)}. "
                f"Received: {sorted(given)}."
            )
        inputs |= given or {}
        arguments = {"inputs": keras.tree.pack_sequence_as(struct, names)}
        shapes = {name: tuple(x.shape) for name, x in _named_outputs(graph.output).items()}
    elif isinstance(model, keras.Sequential):
        raise ValueError(
            f"The Sequential model '{model.name}' has no inputs yet: start it with a "
            "keras.Input, or call its `build`, before it is exported."
        )
    else:
        inputs, by_name = _of_subclassed(model, given)
        names_of = {name: name for name in inputs}
        arguments = names_of if by_name else {"inputs": names_of}
    for name in inputs:
        if keyword.iskeyword(name) or name == "self" or not _NAME.fullmatch(name):
            raise ValueError(
                f"The input {name!r} has a name that is reserved in Python, or that TensorFlow "
                "would change. Use letters, digits and _: keras.Input(..., name='token_ids')."
            )
    structure: Any = None  # of what the last call returned

    def call(given: Tensors) -> Tensors:
        nonlocal structure
        filled = keras.tree.map_structure(given.__getitem__, arguments)
        outputs = model(**filled) if by_name else model(filled["inputs"])
        structure = keras.tree.map_structure(lambda _: 0, outputs)
        return _named_outputs(outputs)

    def as_returned(named: Tensors) -> Any:
        if isinstance(structure, Mapping):
            return named
        flat = [named[f"output_{i}"] for i in range(len(named))]
        return keras.tree.pack_sequence_as(structure, flat)

    if not model.built:
        call({name: ops.ones([n or 2 for n in x.shape], x.dtype) for name, x in inputs.items()})
    rules = mask_specs(model), is_restricted(model)
    return Interface(model, inputs, call, shapes, arguments, as_returned, *rules)


def _input(spec: Any) -> Input:
    dtype = getattr(spec.dtype, "name", spec.dtype)
    return Input((None, *tuple(spec.shape)[1:]), keras.backend.standardize_dtype(dtype))


def _of_subclassed(
    model: keras.Model, given: dict[str, Input] | None
) -> tuple[dict[str, Input], bool]:
    """The inputs, and whether they are arguments of the call; then they are in its order."""
    parameters = [
        name
        for name, p in inspect.signature(model.call).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "training"
    ]
    if given is None:
        raise ValueError(
            f"`{type(model).__name__}` is a subclassed model, without a graph that names its "
            f"inputs. Its call takes {parameters}. Pass `input_signature`, a dict of arguments of "
            'the call (or of what it gets as one dict), with None for batch and length: {"x": '
            'keras.InputSpec(shape=(None, None, 32), dtype="float32"), ...}.'
        )
    named = {name: given[name] for name in parameters if name in given}
    if 0 < len(named) < len(given):
        raise ValueError(
            f"`input_signature` names some arguments of the call, {parameters}, and some that the "
            f"call lacks. Received: {sorted(given)}."
        )
    return named or given, bool(named)


def _given_inputs(input_signature: Any) -> dict[str, Input]:
    if not isinstance(input_signature, Mapping):
        raise TypeError(
            "`input_signature` must be a dict from input names to keras.InputSpec or "
            f"tf.TensorSpec. Received: {type(input_signature).__name__}."
        )
    for name, spec in input_signature.items():
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        if shape is None or dtype is None or len(shape) == 0:
            raise ValueError(
                f"`input_signature[{name!r}]` must have a shape with a batch axis, and a dtype. "
                f"Received: {spec}."
            )
    return {name: _input(spec) for name, spec in input_signature.items()}


def _named_outputs(outputs: Any) -> Tensors:
    """A dict keeps its keys; else `output_0`, `output_1`, ..., as in Keras' own export."""
    if not isinstance(outputs, Mapping):
        several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        outputs = {f"output_{i}": x for i, x in enumerate(several)}
    for name, x in outputs.items():
        if not isinstance(name, str):
            raise ValueError(
                f"Keys of a dict of outputs must be text, the outputs' names. Received: {name!r}."
            )
        if not hasattr(x, "shape"):
            raise ValueError(
                f"The output {name!r} holds several tensors: a signature gives one tensor for "
                "each name. Return a flat dict, list or tensor."
            )
    return dict(outputs)


def answer(interface: Interface, given: Arrays) -> Arrays:
    """What the model in memory gives, on the CPU, as the fresh process does."""
    with keras.device("cpu:0"):
        outputs = interface.call(as_tensors(interface, given))
    return {name: as_array(x) for name, x in outputs.items()}


def as_tensors(interface: Interface, given: Arrays) -> Tensors:
    inputs = interface.inputs
    return {name: ops.convert_to_tensor(x, inputs[name].dtype) for name, x in given.items()}


def as_array(tensor: Tensor) -> np.ndarray:
    return fresh_process.plain(ops.convert_to_numpy(tensor))


def distance(got: Arrays, wanted: Arrays) -> float:
    """The largest difference; infinite where names, shapes or what is finite differ.

    Differences of floats are in units of their output's largest element, at least 1: what rounding
    grows with. Elements from 1e4 on, such as the -1e9 of masked logits, have their own size for a
    unit instead, and so do not widen what the others may differ by.
    """
    if got.keys() != wanted.keys():
        return float("inf")
    furthest = 0.0
    for name, right in wanted.items():
        if got[name].shape != right.shape:
            return float("inf")
        if right.dtype.kind == "S":
            furthest = max(furthest, 0.0 if (got[name] == right).all() else float("inf"))
            continue
        one, other = got[name].astype("complex128"), right.astype("complex128")
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        size = np.abs(other)
        largest = size[size < _LARGE].max(initial=1)
        unit = 1 if right.dtype.kind in "biu" else np.where(size < _LARGE, largest, size)
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0, np.abs(one - other) / unit)
        furthest = max(furthest, float(np.nan_to_num(apart, nan=np.inf).max(initial=0)))
    return furthest
