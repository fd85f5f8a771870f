"""Layers inside layers."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras


def attention(layer: keras.Layer) -> Iterator[keras.Layer]:
    if isinstance(layer, keras.layers.MultiHeadAttention):
        yield layer
        return  # its projections are no attention of their own
    for child in children(layer):
        yield from attention(child)


def children(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that `layer` holds, in forward order as far as its graph shows it."""
    inner = list(layer.layers) if isinstance(layer, keras.Model) else []
    seen = {id(x) for x in inner}
    return inner + [x for x in _keras.sublayers(layer) if id(x) not in seen]


def is_inside(layer: Any, owner: Any) -> bool:
    """Whether `owner` is a layer inside `layer`."""
    return owner is not layer and any(x is owner for x in _keras.layers_inside(layer))
