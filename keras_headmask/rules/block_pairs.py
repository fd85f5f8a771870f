"""Pairs of blocks, looked up for pairs of positions: on TensorFlow a hash of each pair is slow.

There each operation on all pairs of a tile is a pass over memory, and a hash is forty of them.
Those on pairs of blocks are small. (XLA, on JAX, makes one pass of a hash.)
"""

import functools
from collections.abc import Callable
from typing import Any

from keras_headmask.rules.protocol import Tensor

Hash = Callable[[Tensor, Tensor, Any, Any], Tensor]


def open_pairs(
    is_open: Hash, query_blocks: Tensor, key_blocks: Tensor, start: int, limit: int
) -> Tensor:
    """`is_open(query_blocks, key_blocks, start, limit)`, of blocks `(..., T, 1)` and `(..., S)`."""
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from keras_headmask._keras import in_xla

        are_wide = all(tf.is_tensor(x) and x.dtype == tf.int64 for x in (query_blocks, key_blocks))
        if are_wide and not in_xla():
            are_open = _looked_up(is_open)(query_blocks, key_blocks, start, limit)
            are_open.set_shape(tf.broadcast_static_shape(query_blocks.shape, key_blocks.shape))
            return are_open
    return is_open(query_blocks, key_blocks, start, limit)


@functools.cache
def _looked_up(is_open: Hash) -> Callable:
    """A function that is traced once, whatever the number of rules that call it."""
    import tensorflow as tf

    of_blocks, number = tf.TensorSpec(None, tf.int64), tf.TensorSpec([], tf.int64)

    @tf.function(autograph=False, input_signature=[of_blocks, of_blocks, number, number])
    def looked_up(query_blocks: Tensor, key_blocks: Tensor, start: Tensor, limit: Tensor) -> Tensor:
        # As many blocks as lie between the first and the last position.
        # (TensorFlow has no least int64 on a GPU.)
        first = [-tf.reduce_max(-blocks) for blocks in (query_blocks, key_blocks)]
        # (At least `first - 1`: there may be no position.)
        last = [
            tf.maximum(tf.reduce_max(blocks), at - 1)
            for blocks, at in zip((query_blocks, key_blocks), first, strict=True)
        ]
        rows, columns = (tf.range(a, b + 1) for a, b in zip(first, last, strict=True))
        table = is_open(rows[:, None], columns[None], start, limit)
        places = (query_blocks - first[0]) * tf.size(columns, tf.int64) + (key_blocks - first[1])
        return tf.gather(tf.reshape(table, [-1]), places)

    return looked_up
