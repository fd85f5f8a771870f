"""What changes logits in JAX' loops beside the mask, block by block, and its gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.jax.runs import Runs
from keras_headmask.attention.jax.steps import KeyBlock, Steps, places
from keras_headmask.attention.logits import Changes
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.protocol import Bound


class Sums(NamedTuple):
    """What blocks have added to the gradients of the bias and of the table, `None` without."""

    bias: Tensor | None
    table: Tensor | None


class ChangesOfBlocks(NamedTuple):
    """`changes` with its tensors, the bias in whole tiles and blocks."""

    changes: Changes
    heads: tuple[int, ...]
    bound: Bound

    @classmethod
    def of(cls, part: Part, tensors: list[Tensor], steps: Steps | Runs) -> "ChangesOfBlocks":
        changes = part.changes.with_tensors(tensors)
        if changes.bias is not None:
            assert isinstance(steps, Steps)
            changes = changes._replace(bias=steps.lengthened(changes.bias))
        return cls(changes, part.heads, steps.bound)

    def of_logits(self, logits: Tensor, visit: KeyBlock) -> Tensor:
        return self.changes.of_logits(logits, self.heads, self.bound[:2], visit.cuts)

    def allowed(self, visit: KeyBlock) -> Mask | None:
        return self.changes.allowed(visit.allowed, visit.cuts)

    def pulled(self, logits: Tensor, d_changed: Tensor, visit: KeyBlock, sums: Sums) -> tuple:
        """The gradient of `logits`, of that of the changed ones, and the sums with this block."""
        if not self.changes.are_some:
            return d_changed, sums
        positions = visit.cuts.queries(self.bound[0], 0), visit.cuts.keys(self.bound[1], 0)
        bias, table = self.changes.bias, self.changes.table
        tile = None if bias is None else self.changes.bias_of_tile(visit.cuts)

        def changed(logits: Tensor, bias: Tensor | None, table: Tensor | None) -> Tensor:
            changes = self.changes._replace(bias=bias, table=table)
            return changes.of_logits(logits, self.heads, positions)

        d_logits, d_tile, d_table = jax.vjp(changed, logits, tile, table)[1](d_changed)
        if bias is not None:
            at = self._place(bias, visit)
            there = lax.dynamic_slice(sums.bias, at, d_tile.shape)
            sums = sums._replace(bias=lax.dynamic_update_slice(sums.bias, there + d_tile, at))
        if table is not None:
            sums = sums._replace(table=sums.table + d_table)
        return d_logits, sums

    def nothing_yet(self) -> Sums:
        bias, table = self.changes.bias, self.changes.table
        return Sums(*(None if x is None else jnp.zeros_like(x) for x in (bias, table)))

    def gradients(self, sums: Sums, of_sinks: Tensor | None, like: list[Tensor]) -> list[Tensor]:
        """Of the tensors, in their order."""
        found = [x for x in (*sums, of_sinks) if x is not None]
        cut = [x[tuple(map(slice, of.shape))] for x, of in zip(found, like, strict=True)]
        return [x.astype(of.dtype) for x, of in zip(cut, like, strict=True)]

    def _place(self, bias: Tensor, visit: KeyBlock) -> tuple[Any, ...]:
        example, query, key = visit.corner
        first = example, 0, query, key
        return places(0 if size == 1 else x for size, x in zip(bias.shape, first, strict=True))


def as_bias(part: Part, changes: Changes, bound: Bound, dtype: str) -> Changes:
    """`changes`, with its tensors, of the heads of `part`, the bias by position as a tensor."""
    if changes.position_bias is None:
        return changes
    by_position = changes.position_bias.of_tile(*bound[:2], part.heads, changes.table, dtype)
    bias = by_position if changes.bias is None else by_position + changes.bias
    return changes._replace(position_bias=None, table=None, bias=bias)
