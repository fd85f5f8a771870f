"""A model as a function from named tensors to named tensors, and requests to try it on."""

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask.export import fresh_process
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.made_up import made_up
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import leaves

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LARGE = 1e4  # from here on an output's element is compared with itself alone
_MOST_SHOWN = 8  # ids of an input, in a message
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

    survey: Survey  # of the model
    inputs: dict[str, Input]
    call: Callable[[Tensors], Tensors]
    output_shapes: dict[str, Shape] | None  # of a graph
    arguments: dict[str, Any]
    as_returned: Callable[[Tensors], Any]

    def sample(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """A made-up request of `batch` examples of `length` positions, for the rules to decide."""
        rules = self.survey.rules.values()
        return made_up(self.survey, rules, batch, length, seed, self.inputs)


def interface_of(survey: Survey, input_signature: Any) -> Interface:
    """How a model is called, by its graph or by `input_signature`."""
    model, graph, shapes, by_name = survey.model, survey.graph, None, False
    given = None if input_signature is None else _signature_inputs(input_signature)
    if graph is not None:
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
        inputs, by_name = _inputs_of_subclassed(model, given)
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
    return Interface(survey, inputs, call, shapes, arguments, as_returned)


def _input(spec: Any) -> Input:
    dtype = getattr(spec.dtype, "name", spec.dtype)
    return Input((None, *tuple(spec.shape)[1:]), keras.backend.standardize_dtype(dtype))


def _inputs_of_subclassed(
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


def _signature_inputs(input_signature: Any) -> dict[str, Input]:
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
    """The outputs of the model in memory, on the CPU like those of the fresh process."""
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


# --- Requests -------------------------------------------------------------------------------------


def request(interface: Interface, item: Any) -> Arrays:
    """One request: inputs by name as arrays, or a sample for a pair (batch, length)."""
    if not isinstance(item, Mapping):
        if not is_pair(item):
            raise TypeError(
                "An example must be a dict of arrays by input name, or a pair (batch, length), "
                f"from 1. Received: {item!r}."
            )
        sizes = {x.shape[1] for x in interface.inputs.values() if len(x.shape) > 1}
        if sizes and not sizes & {None, item[1]}:
            raise ValueError(
                f"(batch, length) {tuple(item)} asks for the length {item[1]}, and the sizes of "
                f"the inputs are fixed: {sorted(filter(None, sizes))}. Pass pairs of that length."
            )
        return interface.sample(*item)
    if item.keys() != interface.inputs.keys():
        raise ValueError(
            f"An example must have the inputs {sorted(interface.inputs)}. Received: {sorted(item)}."
        )
    given = {}
    for name, x in interface.inputs.items():
        array = np.asarray(item[name])
        if array.dtype.kind == "O" and all(isinstance(part, (str, bytes)) for part in array.flat):
            parts = [part.encode() if isinstance(part, str) else part for part in array.flat]
            array = np.array(parts, "S").reshape(array.shape)
        elif array.dtype.kind == "b" and "int" in x.dtype:  # KerasHub's padding masks
            array = array.astype(x.dtype)
        elif array.dtype.kind == "U":  # text as the bytes of UTF-8, as TensorFlow has it
            array = np.char.encode(array, "utf-8")
        sizes_fit = array.ndim == len(x.shape) and all(
            size in (None, have) for size, have in zip(x.shape, array.shape, strict=True)
        )
        dtypes = ["string" if array.dtype.kind == "S" else array.dtype.name, x.dtype]
        kinds = {next((k for k in ("float", "int") if k in dtype), dtype) for dtype in dtypes}
        if not sizes_fit or len(kinds) > 1:
            raise ValueError(
                f"The example's {name!r} must be {x.dtype} of shape {x.shape}. Received: "
                f"{array.dtype} of shape {array.shape}."
            )
        given[name] = array
    return given


def size_of(interface: Interface, given: Arrays) -> tuple[int, int]:
    """(batch, length): the length of the first sequence, else of any second axis."""
    inputs = sorted(interface.inputs.items(), key=lambda item: not item[1].is_sequence)
    lengths = (given[name].shape[1] for name, x in inputs if len(x.shape) > 1)
    return len(given[inputs[0][0]]), next(lengths, 1)


def is_pair(item: Any) -> bool:
    """Whether `item` is (batch, length), whole numbers from 1."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    return pair and all(type(size) is int and size > 0 for size in item)


def tried(interface: Interface, given: Iterable[Arrays]) -> str:
    """The ids that rules look for, and those that the integer inputs of requests held, in words."""
    wanted: dict[str, set[int]] = {}
    for leaf in (leaf for spec in interface.survey.rules.values() for leaf in leaves(spec)):
        for name in leaf.inputs if leaf.sampling.ids else ():
            wanted.setdefault(name, set()).update(leaf.sampling.ids)
    if not wanted:
        return ""
    ids = {
        name: np.unique(np.concatenate([one[name].ravel() for one in given]))
        for name, x in interface.inputs.items()
        if "int" in x.dtype
    }
    looks_for = (f"{_in_words(sorted(values))} in {name!r}" for name, values in wanted.items())
    held = (f"{name!r} with {_in_words(values.tolist())}" for name, values in ids.items())
    return f"It looks for {', '.join(looks_for)}. Tried: {', '.join(held) or 'no ids'}. "


def _in_words(ids: list[int]) -> str:
    some = ", ".join(map(str, ids[:_MOST_SHOWN]))
    return f"{'id' if len(ids) == 1 else 'ids'} {some}" + (
        f", ... ({len(ids)} ids)" if len(ids) > _MOST_SHOWN else ""
    )


def padded_cases(interface: Interface, length: int) -> Iterator[tuple[Arrays, Arrays]]:
    """A request padded as by TensorFlow Serving, with first elements, and one with others.

    Each with the right answer: what the examples give alone, and 0 past their lengths.
    """
    inputs = interface.inputs.items()
    given = interface.sample(3, length)
    lengths = np.array([length, length - length // 3, max(1, length // 2)], "int32")
    # Where an input holds the positions of an example itself.
    real = [
        {name: (slice(i, i + 1), *(slice(size or n) for size in x.shape[1:])) for name, x in inputs}
        for i, n in enumerate(lengths)
    ]
    wanted = {name: np.zeros_like(x) for name, x in answer(interface, given).items()}
    for i, place in enumerate(real):
        alone = answer(interface, {name: given[name][place[name]] for name, _ in inputs})
        for name, value in alone.items():
            wanted[name][(slice(i, i + 1), *map(slice, value.shape[1:]))] = value
    for filler in (None, interface.sample(3, length, seed=1)):
        request = {}
        for name, x in inputs:
            first = given[name][(slice(None), *(slice(1) for _ in x.shape[1:]))]
            padded = np.broadcast_to(first, given[name].shape) if filler is None else filler[name]
            request[name] = padded.copy()
            for place in real:
                request[name][place[name]] = given[name][place[name]]
        yield request | {LENGTHS: lengths}, wanted
