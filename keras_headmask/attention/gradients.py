"""Gradients of a bias, of a table by position and of sinks, from tiles of known lengths."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_headmask.attention.head_groups import Part
from keras_headmask.masks import Tensor
from keras_headmask.rules.protocol import Cuts


class GradientsOfChanges:
    """Collects what each tile adds to the gradients of the tensors of `part.changes`.

    `plan` is that of `tiles_python`, and there are `keys` of them.
    """

    def __init__(self, part: Part, plan: Any, tensors: Sequence[Tensor], keys: int):
        self.part, self.plan, self.keys = part, plan, keys
        self.changes: Any = part.changes.with_tensors(tensors)
        self.of_bias: list[Tensor] = []
        self.of_table: list[Tensor] = []
        self.of_sinks: list[Tensor] = []

    def add(self, number: int, cuts: Cuts, d_logits: Tensor, of_sink: Tensor | None) -> None:
        """From a tile: the gradient of its logits, `(B, h, T, S)`, and of the sink in each row."""
        if self.changes.bias is not None:
            self.of_bias.append(self._placed(number, summed_as(d_logits, self.changes.bias)))
        if self.changes.table is not None:
            self.of_table.append(self._by_bucket(cuts, d_logits))
        if of_sink is not None:
            self.of_sinks.append(ops.sum(of_sink, axis=(0, 2, 3)))

    def _placed(self, number: int, of_tile: Tensor) -> Tensor:
        """The keys of a tile at their places among all keys, 0 between."""
        if self.changes.bias.shape[3] == 1:
            return of_tile
        pieces, done, taken = [], 0, 0
        for start, stop in [*self.plan.runs[number], (self.keys, self.keys)]:
            pieces.append(ops.zeros((*ops.shape(of_tile)[:3], start - done), of_tile.dtype))
            pieces.append(of_tile[..., taken : taken + stop - start])
            done, taken = stop, taken + stop - start
        return ops.concatenate(pieces, axis=3)

    def _by_bucket(self, cuts: Cuts, d_logits: Tensor) -> Tensor:
        bias, bound = self.changes.position_bias, self.part.bound
        queries, keys = cuts.queries(bound.query_positions, 0), cuts.keys(bound.key_positions, 0)
        buckets = ops.reshape(bias.buckets(queries, keys), (-1,))
        of_heads = ops.transpose(ops.sum(d_logits, axis=0), (1, 2, 0))
        rows = ops.reshape(of_heads, (-1, of_heads.shape[2]))
        count = self.changes.table.shape[0]
        if keras.backend.backend() == "torch":  # (Keras' own sums in float32 there.)
            return rows.new_zeros((count, rows.shape[1])).index_add(0, buckets, rows)
        return ops.segment_sum(rows, buckets, count)

    def summed(self) -> list[Tensor]:
        """The gradients of the tensors, in their order."""
        gradients = []
        if self.changes.bias is not None:
            by_tile = self.changes.bias.shape[2] != 1
            joined = ops.concatenate(self.of_bias, axis=2) if by_tile else sum(self.of_bias)
            gradients.append(joined)
        gradients += [sum(x) for x in (self.of_table, self.of_sinks) if x]
        return gradients


def summed_as(gradient: Tensor, like: Tensor) -> Tensor:
    """`gradient` summed over the axes along which `like`, of as many axes, has size 1."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1)
    return ops.sum(gradient, axis=axes, keepdims=True) if axes else gradient
