"""What tensors hold at the places of several tiles: for specs, biases and dropout alike."""

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Places


def pairs_at(value: Tensor, places: Places) -> Tensor:
    """Of `(B or 1, h, T or 1, S or 1)`, in n tiles: `(n, h, queries or 1, keys or 1)`."""
    keys = masks.sizes(value)[3]
    found = places.take(ops.reshape(value, (-1, keys)), rows_at(value, places))
    if value.shape[3] == 1:
        return found
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(found, places.keys[:, 0, 0], axis=3, batch_dims=1)
    return ops.take_along_axis(found, places.keys, axis=3)


def rows_at(value: Tensor, places: Places) -> Tensor:
    """The rows of `(B or 1, h, T or 1, ...)`, as one axis, that n tiles read: `(n, h, b or 1)`."""
    (batch, heads, queries, _), examples = masks.sizes(value), places.examples
    if value.shape[0] in (1, None):  # 1 serves every example, and may show when a graph runs
        examples = ops.minimum(examples, batch - 1)
    rows = examples * heads + ops.reshape(ops.arange(heads, dtype="int32"), (-1, 1, 1))
    rows = rows * queries  # of each tile and head the first
    return ops.squeeze(rows if value.shape[2] == 1 else rows + places.queries, 3)
