"""Requests to try a model on: given, or random, with something for its rules to decide."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.export.interface import LENGTHS, PADDING, Arrays, Interface, answer
from keras_headmask.masks import Tensor
from keras_headmask.rules.base import MaskSpec, leaves

_SIDES = ("", "query_", "key_", "decoder_", "encoder_")


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
        return sample(interface, interface.rules.values(), *item)
    if item.keys() != interface.inputs.keys():
        raise ValueError(
            f"An example must have the inputs {sorted(interface.inputs)}. Received: {sorted(item)}."
        )
    given = {name: _as_array(item[name]) for name in interface.inputs}
    for name, x in interface.inputs.items():
        shape, dtype = given[name].shape, given[name].dtype
        sizes_fit = len(shape) == len(x.shape) and all(
            size in (None, have) for size, have in zip(x.shape, shape, strict=True)
        )
        if not sizes_fit or _kind("string" if dtype.kind == "S" else dtype.name) != _kind(x.dtype):
            raise ValueError(
                f"The example's {name!r} must be {x.dtype} of shape {x.shape}. Received: "
                f"{dtype} of shape {shape}."
            )
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


def _as_array(value: Any) -> np.ndarray:
    """As an array; text as the bytes of UTF-8, as TensorFlow has it."""
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(item, (str, bytes)) for item in array.flat):
        items = [item.encode() if isinstance(item, str) else item for item in array.flat]
        return np.array(items, "S").reshape(array.shape)
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array


def _kind(dtype: str) -> str:
    return next((kind for kind in ("float", "int") if kind in dtype), dtype)


def sample(
    interface: Interface, specs: Iterable[MaskSpec], batch: int, length: int, seed: int = 0
) -> Arrays:
    """One request of `batch` examples of `length` positions, by input name; fixed sizes stay.

    Ids stay below the sizes of the embeddings that read them, and include those that rules look
    for. Other inputs are what their name and dtype say: segments, flags, whole masks, numbers.
    """
    rng = np.random.default_rng([seed, batch, length])
    all_leaves = [leaf for spec in specs for leaf in leaves(spec)]
    made: Arrays = {}
    for name, x in interface.inputs.items():
        if x.dtype == "string":
            raise TypeError(
                f"The input {name!r} holds text, of which no examples can be made up. Pass some, "
                "check=[{name: array, ...}, ...], or check=False."
            )
        batch = x.shape[0] or batch
        shape = [batch, *(length if size is None else size for size in x.shape[1:])]
        # A leaf reads an input also under the name of one side of cross-attention.
        named = [(leaf, {s + read for s in _SIDES for read in leaf.inputs}) for leaf in all_leaves]
        readers = [leaf for leaf, names in named if name in names]
        if "float" in x.dtype:
            value: np.ndarray = rng.normal(size=shape)
        elif len(shape) == 4:  # a whole mask: every query sees itself and about half of the rest
            value = (rng.random(shape) < 0.5) | np.eye(shape[2], shape[3], dtype=bool)
        elif name == PADDING and len(shape) == 2:
            keep = np.maximum(1, shape[1] - np.arange(batch) * shape[1] // (4 * batch))
            value = np.arange(shape[1])[None, :] < keep[:, None]
        elif x.dtype == "bool":
            value = rng.random(shape) < 0.5
        else:
            value = _ids(readers, _ids_below(interface.model, name), shape, rng)
        made[name] = value.astype(x.dtype if x.dtype != "bfloat16" else "float32")
    return made


def _ids(
    readers: list[MaskSpec], below: int | None, shape: list[int], rng: np.random.Generator
) -> np.ndarray:
    if below is None and any(leaf.reads_segments for leaf in readers):
        return np.cumsum(rng.random(shape) < 0.25, axis=-1)
    ids = rng.integers(0, 2 if below is None else below, shape)
    wanted = [i for leaf in readers for i in leaf.ids_of_interest if below is None or i < below]
    return np.where(rng.random(shape) < 0.2, rng.choice(wanted, shape), ids) if wanted else ids


def _ids_below(model: keras.Model, name: str) -> int | None:
    """The size of the smallest embedding that reads an input of a functional graph."""
    graph = _keras.functional_of(model)
    if not isinstance(graph, _keras.Functional):
        return None
    tensors = [tensor for tensor in graph.inputs if tensor.name == name]
    return min((n for tensor in tensors for n in _sizes_of_embeddings(graph, tensor)), default=None)


def _sizes_of_embeddings(graph: _keras.Functional, tensor: Tensor) -> Iterator[int]:
    for operation in graph.operations:
        for node in _keras.calls_of(operation):
            places = [i for i, x in enumerate(node.input_tensors) if x is tensor]
            inner = getattr(operation, "inputs", ()) if places else ()
            if isinstance(operation, _keras.Functional) and len(node.input_tensors) == len(inner):
                for i in places:
                    yield from _sizes_of_embeddings(operation, inner[i])
            elif places and isinstance(operation, keras.Layer):
                for layer in _keras.layers_of(operation):
                    if isinstance(layer, keras.layers.Embedding):
                        yield layer.input_dim


def padded_cases(interface: Interface, length: int) -> Iterator[tuple[Arrays, Arrays]]:
    """A request padded as by TensorFlow Serving, with first elements, and one with others.

    Each with the right answer: what the examples give alone, and 0 past their lengths.
    """
    inputs, rules = interface.inputs.items(), interface.rules.values()
    given = sample(interface, rules, 3, length)
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
    for filler in (None, sample(interface, rules, 3, length, seed=1)):
        request = {}
        for name, x in inputs:
            first = given[name][(slice(None), *(slice(1) for _ in x.shape[1:]))]
            padded = np.broadcast_to(first, given[name].shape) if filler is None else filler[name]
            request[name] = padded.copy()
            for place in real:
                request[name][place[name]] = given[name][place[name]]
        yield request | {LENGTHS: lengths}, wanted
