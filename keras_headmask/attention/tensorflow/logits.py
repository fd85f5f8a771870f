"""Gradients of a bias, of a table by position and of sinks, from the steps of TensorFlow's loop.

All are results at positions, as those of queries and keys are: a flagged position is computed apart
from its tile, and takes its place in them.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import Changes
from keras_headmask.attention.tensorflow.graph import Row
from keras_headmask.attention.tensorflow.tile import times
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Cuts


class Gathered(NamedTuple):
    """What of the gradients of `changes` comes at the queries, and what at the keys."""

    part: Part
    changes: Changes

    @property
    def is_bias_of_keys(self) -> bool:
        """Whether the bias is one for all queries, so that its gradient is summed over them."""
        bias = self.changes.bias
        return bias is not None and bias.shape[2] == 1 and bias.shape[3] != 1

    @property
    def rows_at_queries(self) -> list[Row]:
        """Of what `at_queries` returns."""
        found, heads = [], len(self.part.heads)
        bias, table = self.changes.bias, self.changes.table
        if bias is not None and not self.is_bias_of_keys:
            keys = 1 if bias.shape[3] == 1 else tf.shape(self.part.bound.key_positions)[0]
            found.append(Row([1 if bias.shape[1] == 1 else heads, keys], bias.shape[0] != 1))
        if table is not None:
            found.append(Row([heads, table.shape[0]], False))
        if self.changes.sinks is not None:
            found.append(Row([heads]))
        return found

    @property
    def rows_at_keys(self) -> list[Row]:
        return [Row([len(self.part.heads)])] * self.is_bias_of_keys

    def at_queries(
        self, d_logits: Tensor, log_sum: Tensor | None, delta: Tensor, cuts: Cuts
    ) -> list[Tensor]:
        """From a tile's `(batch, h, queries, keys)`: `(batch or 1, h or 1, queries, ...)`.

        `log_sum` and `delta`, with an axis of size 1 more, are of its rows.
        """
        found, bias, table = [], self.changes.bias, self.changes.table
        if bias is not None and not self.is_bias_of_keys:
            axes = [axis for axis in (0, 1, 3) if bias.shape[axis] == 1]
            of_bias = tf.reduce_sum(d_logits, axes, keepdims=True)
            found.append(of_bias if 3 in axes else self._at_their_places(of_bias, cuts))
        if table is not None:
            found.append(self._by_bucket(tf.reduce_sum(d_logits, 0), cuts)[None])
        sinks: Any = self.changes.sinks
        if sinks is not None:
            of_sinks = tf.exp(sinks[:, None] - log_sum)
            found.append(-times(delta[..., 0], of_sinks))
        return found

    def at_keys(self, d_logits: Tensor) -> list[Tensor]:
        """From a tile's `(batch, h, queries, keys)`: `(batch, h, keys)`."""
        return [tf.reduce_sum(d_logits, 2)] if self.is_bias_of_keys else []

    def _at_their_places(self, of_tile: Tensor, cuts: Cuts) -> Tensor:
        """The keys of a tile among all keys, 0 between."""
        keys = tf.shape(self.part.bound.key_positions)[0]
        keys_first = tf.transpose(of_tile, (3, 0, 1, 2))
        # (Not `scatter_nd`, which refuses a tile without a query.)
        every = tf.math.unsorted_segment_sum(keys_first, cuts.keys(tf.range(keys), 0), keys)
        return tf.transpose(every, (1, 2, 3, 0))

    def _by_bucket(self, d_logits: Tensor, cuts: Cuts) -> Tensor:
        """`(h, queries, keys)`, summed for each query over the keys of a bucket."""
        bias, table, bound = self.changes.position_bias, self.changes.table, self.part.bound
        assert bias is not None
        assert table is not None
        queries, keys = cuts.queries(bound.query_positions, 0), cuts.keys(bound.key_positions, 0)
        count, of_table = tf.shape(queries)[0], table.shape[0]
        places = bias.buckets(queries, keys) + tf.range(count)[:, None] * of_table
        pairs_first = tf.transpose(d_logits, (1, 2, 0))
        sums = tf.math.unsorted_segment_sum(pairs_first, places, count * of_table)
        by_query = tf.reshape(sums, [count, of_table, tf.shape(d_logits)[0]])
        return tf.transpose(by_query, (2, 0, 1))

    def gradients(self, at_queries: list[Tensor], at_keys: list[Tensor]) -> list[Tensor]:
        """Of the tensors, in their order, from all results."""
        found, at_queries, changes = [], list(at_queries), self.changes
        if changes.bias is not None:
            if self.is_bias_of_keys:
                of_bias = tf.transpose(at_keys[0], (0, 2, 1))[:, :, None]
            else:
                of_bias = tf.transpose(at_queries.pop(0), (0, 2, 1, 3))
            axes = [axis for axis in range(4) if changes.bias.shape[axis] == 1]
            found.append(tf.reduce_sum(of_bias, axes, keepdims=True))
        if changes.table is not None:
            found.append(tf.transpose(tf.reduce_sum(at_queries.pop(0), (0, 1))))
        if changes.sinks is not None:
            found.append(tf.reduce_sum(at_queries.pop(0), (0, 1)))
        pairs = zip(found, changes.tensors, strict=True)
        return [tf.ensure_shape(x, tensor.shape) for x, tensor in pairs]
