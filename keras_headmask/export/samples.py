"""Inputs to try a model on: random, but such that its rules have something to decide."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.export.interface import PADDING, Arrays, Input, Interface
from keras_headmask.rules.base import MaskSpec, leaves


def sample(
    interface: Interface, specs: Iterable[MaskSpec], batch: int, length: int, seed: int = 0
) -> Arrays:
    """One request of `batch` examples of `length` positions, by input name; fixed sizes stay.

    Ids stay below the sizes of the embeddings that read them, and hold those that rules look for.
    Inputs that no embedding reads are made as what their name and dtype say: segments, flags,
    whole masks, numbers.
    """
    rng = np.random.default_rng([seed, batch, length])
    specs, inputs = tuple(specs), interface.inputs.items()
    return {name: _one(name, x, interface, specs, batch, length, rng) for name, x in inputs}


def _one(
    name: str,
    x: Input,
    interface: Interface,
    specs: tuple[MaskSpec, ...],
    batch: int,
    length: int,
    rng: np.random.Generator,
) -> np.ndarray:
    shape = [batch, *(length if size is None else size for size in x.shape[1:])]
    if x.dtype == "string":
        raise TypeError(
            f"The input {name!r} holds text, of which no examples can be made up. Pass some, "
            "check=[{name: array, ...}, ...], or check=False."
        )
    if "float" in x.dtype:
        return rng.normal(size=shape).astype(x.dtype if x.dtype != "bfloat16" else "float32")
    if len(shape) == 4:  # a whole mask: every query sees itself, and more or less half of the rest
        mask = rng.random(shape) < 0.5
        return (mask | np.eye(shape[2], shape[3], dtype=bool)).astype(x.dtype)
    if name == PADDING and len(shape) == 2:
        keep = np.maximum(1, shape[1] - np.arange(batch) * shape[1] // (4 * batch))
        return (np.arange(shape[1])[None, :] < keep[:, None]).astype(x.dtype)
    if x.dtype == "bool":
        return rng.random(shape) < 0.5
    below = _ids_below(interface.model, name)
    readers = _readers(specs, name)
    if below is None:
        if any(leaf.reads_segments for leaf in readers):
            return np.cumsum(rng.random(shape) < 0.25, axis=-1).astype(x.dtype)
        ids = rng.integers(0, 2, shape)
    else:
        ids = rng.integers(0, below, shape)
    wanted = [i for leaf in readers for i in leaf.ids_of_interest if below is None or i < below]
    if wanted:
        ids = np.where(rng.random(shape) < 0.2, rng.choice(wanted, shape), ids)
    return ids.astype(x.dtype)


def _readers(specs: Iterable[MaskSpec], name: str) -> list[MaskSpec]:
    """The leaves that read an input, also under the name of one side of cross-attention."""
    return [
        leaf
        for spec in specs
        for leaf in leaves(spec)
        if any(name in (read, *(f"{side}_{read}" for side in _SIDES)) for read in leaf.inputs)
    ]


_SIDES = ("query", "key", "decoder", "encoder")


def _ids_below(model: keras.Model, name: str) -> int | None:
    """The size of the smallest embedding that reads an input of a functional graph."""
    model = _keras.functional_of(model)
    if not isinstance(model, _keras.Functional):
        return None
    sizes: list[int] = []
    for tensor in model.inputs:
        if tensor.name == name:
            sizes += _sizes_of_embeddings(model, tensor)
    return min(sizes, default=None)


def _sizes_of_embeddings(model: _keras.Functional, tensor: Any) -> Iterator[int]:
    for operation in model.operations:
        for node in _keras.calls_of(operation):
            places = [i for i, x in enumerate(node.input_tensors) if x is tensor]
            if not places:
                continue
            if isinstance(operation, _keras.Functional) and len(node.input_tensors) == len(
                operation.inputs
            ):
                for i in places:
                    yield from _sizes_of_embeddings(operation, operation.inputs[i])
            elif isinstance(operation, keras.Layer):
                for layer in _keras.layers_of(operation):
                    if isinstance(layer, keras.layers.Embedding):
                        yield layer.input_dim
