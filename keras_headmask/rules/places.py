"""Positions, and what tensors hold at the places of several tiles: specs, biases, dropout."""

from contextvars import ContextVar

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask._keras.tensorflow import in_xla
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Places

narrow: ContextVar[bool] = ContextVar("positions of 32 bits", default=False)


def position_dtype() -> str:
    """The dtype of positions and ids: int64 on TensorFlow, which has no int32 arithmetic on a GPU.

    (It computes int32 on the host. XLA does not; and LiteRT has no `//` of int64.)
    """
    if keras.backend.backend() != "tensorflow" or narrow.get() or in_xla():
        return "int32"
    return "int64"


def pairs_at(value: Tensor, places: Places) -> Tensor:
    """Cut n tiles `(n, h, queries or 1, keys or 1)` out of `(B or 1, h, T or 1, S or 1)`."""
    keys = masks.sizes(value)[3]
    rows = places.take(ops.reshape(value, (-1, keys)), rows_at(value, places))
    if value.shape[3] == 1:
        return rows
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(rows, places.keys[:, 0, 0], axis=3, batch_dims=1)
    return ops.take_along_axis(rows, places.keys, axis=3)


def rows_at(value: Tensor, places: Places) -> Tensor:
    """The rows of `(B or 1, h, T or 1, ...)`, as one axis, that n tiles read: `(n, h, b or 1)`."""
    dtype = keras.backend.standardize_dtype(places.examples.dtype)
    (batch, heads, queries, _), examples = masks.sizes(value, dtype), places.examples
    if value.shape[0] in (1, None):  # 1 serves every example, and may show when a graph runs
        examples = ops.minimum(examples, batch - 1)
    of_head = ops.reshape(ops.arange(heads, dtype=examples.dtype), (-1, 1, 1))
    rows = examples * heads + of_head
    rows = rows * queries  # of each tile and head the first
    return ops.squeeze(rows if value.shape[2] == 1 else rows + places.queries, 3)
