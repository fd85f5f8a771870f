"""One query for each example against keys that were kept: a step of generation.

There is one row of logits for each head, so nothing is tiled. Keys stand heads first, as the
product reads them: a step moves no key but the new one.
"""

import operator

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention.logits import NONE, Changes, tanh
from keras_headmask.masks import Length, Mask, Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    changes: Changes = NONE,
) -> Tensor:
    """The context `(B, 1, H, Dv)` of `query` `(B, 1, H, D)`.

    `key` `(B, K, S, D)` and `value` may have fewer heads, each for H / K heads of the query side by
    side. `mask`: `(B or 1, H or 1, 1, S)`. Of `changes` a soft cap and sinks.
    """
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    product = operator.matmul if is_double else ops.matmul  # (Keras' is float32 on PyTorch)
    heads, of_keys, size = query.shape[2], key.shape[1], query.shape[3]
    rows = ops.reshape(query, (-1, of_keys, heads // of_keys, size))
    logits = ops.cast(product(ops.cast(rows, dtype) * scale, _keys(key, dtype)), dtype)
    if changes.soft_cap is not None:
        logits = changes.soft_cap * tanh(logits / changes.soft_cap)
    if mask.shape[1] != 1:
        mask = ops.reshape(mask, (-1, of_keys, heads // of_keys, key.shape[2]))
    hidden = ops.cast(np.finfo(dtype).min + masks.HIDDEN, dtype)  # as in `dense`
    logits = ops.where(mask, logits, hidden)
    if changes.sinks is not None:  # one key more, whose value is 0
        sinks = ops.reshape(changes.cast(dtype).sinks, (1, of_keys, heads // of_keys, 1))
        with_sink = ops.concatenate([logits, sinks + ops.zeros_like(logits[..., :1])], axis=-1)
        probabilities = ops.softmax(with_sink, axis=-1)[..., :-1]
    elif key.shape[2] == 1:  # of which Keras' softmax warns
        probabilities = ops.ones_like(logits)
    else:
        probabilities = ops.softmax(logits, axis=-1)
    probabilities = ops.where(mask, probabilities, ops.zeros_like(logits))
    context = product(ops.cast(probabilities, value.dtype), value)
    return ops.reshape(context, (-1, 1, heads, value.shape[3]))


def _keys(key: Tensor, dtype: str) -> Tensor:
    """`(B, K, D, S)`."""
    return ops.transpose(ops.cast(key, dtype), (0, 1, 3, 2))


def written(kept: Tensor, new: Tensor, place: Length) -> Tensor:
    """`kept` `(B, K, S, D)` with `new` `(B, K, 1, D)` at `place` along S."""
    if keras.backend.backend() != "tensorflow":
        return ops.slice_update(kept, (0, 0, place, 0), new)
    import tensorflow as tf

    # `slice_update` copies all of it; a scatter over the first axis writes in place.
    _, heads, slots, size = kept.shape
    rows = tf.reshape(kept, (-1, size))
    where = tf.range(tf.shape(kept)[0] * heads)[:, None] * slots + place
    rows = tf.tensor_scatter_nd_update(rows, where, tf.reshape(new, (-1, size)))
    return tf.reshape(rows, tf.shape(kept))
