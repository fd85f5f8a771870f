"""Requests to try a model on: given, or random, with something for its rules to decide."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.export.interface import LENGTHS, PADDING, Arrays, Interface, answer
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.graph import ARGUMENT
from keras_headmask.rules.base import MaskSpec, leaves

_MOST_SHOWN = 8  # ids of an input, in a message
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


def sample(
    interface: Interface, specs: Iterable[MaskSpec], batch: int, length: int, seed: int = 0
) -> Arrays:
    """One request of `batch` examples of `length` positions, by input name; fixed sizes stay.

    Ids stay below the sizes of the embeddings that read them, and include those that rules look
    for. Other inputs are what their name and dtype say: segments, flags, whole masks, numbers.
    """
    rng = np.random.default_rng([seed, batch, length])
    all_leaves = [leaf for spec in specs for leaf in leaves(spec)]
    graph = _keras.functional_of(interface.model)
    tensors = graph.inputs if isinstance(graph, _keras.Functional) else []
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
        names = interface.read_as.get(name, frozenset()) | {name}
        readers = [leaf for leaf in all_leaves if not names.isdisjoint(_names_of(leaf.inputs))]
        embeddings = (_sizes_of_embeddings(graph, t) for t in tensors if t.name == name)
        below = min((n for sizes in embeddings for n in sizes), default=None)
        wanted = [i for leaf in readers for i in leaf.sampling.ids if below is None or i < below]
        if "float" in x.dtype:
            value: np.ndarray = rng.normal(size=shape)
        elif len(shape) == 4:  # a whole mask: every query sees itself and about half of the rest
            value = (rng.random(shape) < 0.5) | np.eye(shape[2], shape[3], dtype=bool)
        elif name == PADDING and len(shape) == 2:
            keep = np.maximum(1, shape[1] - np.arange(batch) * shape[1] // (4 * batch))
            value = np.arange(shape[1])[None, :] < keep[:, None]
        elif x.dtype == "bool":
            value = rng.random(shape) < 0.5
        elif below is None and any(leaf.sampling.segments for leaf in readers):
            value = np.cumsum(rng.random(shape) < 0.25, axis=-1)
        else:
            value = rng.integers(0, 2 if below is None else below, shape)
            if wanted:
                value = np.where(rng.random(shape) < 0.2, rng.choice(wanted, shape), value)
        made[name] = value.astype(x.dtype if x.dtype != "bfloat16" else "float32")
    return made


def _names_of(reads: Iterable[str]) -> set[str]:
    return {side + name for side in _SIDES for name in reads}


def with_reads(interface: Interface) -> Interface:
    """`interface` with the inputs that rules read under another name, found by trying the model.

    The name is that of `mask_inputs`. What such a tensor holds depends on an input where it changes
    as that input does.
    """
    from keras_headmask.retrofit.observe import mask_inputs_seen  # needs all of retrofit/

    rules = list(interface.rules.values())
    read = {name for spec in rules for leaf in leaves(spec) for name in leaf.inputs}
    if all(interface.inputs.keys() & _names_of([name]) for name in read):
        return interface

    def seen(given: Arrays) -> list[tuple[str, np.ndarray]]:
        with mask_inputs_seen(interface.model) as found:
            answer(interface, given)
        return found

    read_as: dict[str, frozenset[str]] = {}
    # What cannot be run is an error of the check, which says more.
    with contextlib.suppress(Exception):
        first, other = (sample(interface, rules, 2, 8, seed) for seed in (0, 1))
        before = seen(first)
        for name in (name for name, x in interface.inputs.items() if "int" in x.dtype):
            after = seen(first | {name: other[name]})
            changed = zip(before, after, strict=True)
            read_as[name] = frozenset(k for (k, x), (_, y) in changed if not np.array_equal(x, y))
    return interface._replace(read_as=read_as)


def tried(interface: Interface, given: Iterable[Arrays]) -> str:
    """The ids that rules look for, and those that the integer inputs of requests held, in words."""
    wanted: dict[str, set[int]] = {}
    for leaf in (leaf for spec in interface.rules.values() for leaf in leaves(spec)):
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
    shown = ", ".join(map(str, ids[:_MOST_SHOWN]))
    return f"{'id' if len(ids) == 1 else 'ids'} {shown}" + (
        f", ... ({len(ids)} ids)" if len(ids) > _MOST_SHOWN else ""
    )


def _sizes_of_embeddings(graph: _keras.Functional, tensor: Tensor) -> Iterator[int]:
    """The sizes of all embeddings that may read an input of a functional graph."""
    for operation in graph.operations:
        for node in _keras.calls_of(operation):
            args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
            kwargs.pop(ARGUMENT, None)  # (what rules read, no embedding reads there)
            if all(x is not tensor for x in keras.tree.flatten((args, kwargs))):
                continue
            taken = []
            if isinstance(operation, _keras.Functional):
                taken = _keras.taken_by_inputs(operation, args[0] if args else None)
            if taken:
                for inner in (own for x, own in taken if x is tensor):
                    yield from _sizes_of_embeddings(operation, inner)
            elif isinstance(operation, keras.Layer):
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
