"""Tiles on JAX of rules on positions: one product each, over the run of keys that it may see.

All runs are equally long, so that one loop serves them. Heads and examples stand in one axis,
`(1, B * heads, L, size)`, since no mask differs among them, and go a few at a time: what a step
holds stays in the processor's cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_headmask.attention.blocks import bounds_of
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.jax.steps import (
    ARRAYS,
    KeyBlock,
    Program,
    QueryTile,
    bound_of,
    filled,
    heads_first,
    lengthened,
    places,
)
from keras_headmask.masks import Tensor
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import WHOLE, Bound, Cuts

_LEAST = 0.75  # of what the runs hold, the blocks that a tile may see


class Runs(NamedTuple):
    """What `Steps` is to other rules: each tile, of some heads, has one block of keys, its run."""

    part: Part
    bound: Bound
    batch: int
    queries: int
    tile: int
    size: int  # of a run
    starts: Tensor  # of the runs, `(tiles,)`
    chunks: int  # of key heads, those of all examples
    together: int  # key heads of a chunk

    @classmethod
    def of(cls, program: Program, query: Tensor, key: Tensor) -> "Runs | None":
        """`None` if runs of one length would hold much that is hidden, or too much at once."""
        part, (batch, queries, heads, _), keys = program.part, query.shape, key.shape[1]
        if part.rule.inputs or part.changes.are_some or len(part.groups()) > 1:
            return None
        tile, block = min(part.tile, queries), min(part.tuning.jax_block, keys)
        rest = (queries, keys), (tile, block), program.query_offset, ARRAYS
        possible = bounds_of(part.rule, {}, *rest).possible[0]
        if not isinstance(possible, np.ndarray):  # by a user's `coverage`, of JAX' arrays
            return None
        first, last = possible.argmax(1), possible.shape[1] - 1 - possible[:, ::-1].argmax(1)
        longest = int(np.where(possible.any(1), last - first + 1, 0).max())
        if possible.sum() <= _LEAST * longest * len(possible):
            return None
        size = min(longest * block, keys)
        starts = np.minimum(first * block, keys - size).astype("int32")
        of_keys = batch * heads // part.sharing
        most = part.tuning.most_logits_of_a_step // 2 // (part.sharing * tile * size)
        bound = bound_of(program, [], queries, keys)
        if most == 0 or not _is_one_mask(part, bound):
            return None
        together = max(n for n in range(1, of_keys + 1) if of_keys % n == 0 and n <= most)
        bound = lengthened(bound, -queries % tile, 0)
        chunks = of_keys // together
        return cls(part, bound, batch, queries, tile, size, jnp.asarray(starts), chunks, together)

    @property
    def number(self) -> int:
        return self.chunks * len(self.starts)

    def rows_first(self, rows: Tensor) -> Tensor:
        """`(B, T, H, size)` as `(1, B * H, tiles * tile, size)`, 0 in the rows that are added."""
        return filled(_in_one_axis(rows), self.tile)

    def prepared(self, query: Tensor, *of_keys: Tensor) -> list[Tensor]:
        """All heads first, the queries in whole tiles."""
        return [self.rows_first(query), *map(_in_one_axis, of_keys)]

    def joined(self, results: Tensor) -> Tensor:
        """The results of all steps, `(steps, 1, heads, tile, size)`, as `(B, T, H, size)`."""
        tiles, size = len(self.starts), results.shape[-1]
        results = results.reshape(self.chunks, tiles, -1, self.tile, size)
        rows = results.transpose(0, 2, 1, 3, 4).reshape(1, -1, tiles * self.tile, size)
        return self.joined_keys(rows)[:, : self.queries]

    def joined_keys(self, rows: Tensor) -> Tensor:
        """`(1, B * heads, L, size)` as `(B, L, heads, size)`."""
        return heads_first(rows.reshape(self.batch, -1, *rows.shape[2:]))

    def step(self, number: Tensor) -> QueryTile:
        chunk, place = number // len(self.starts), number % len(self.starts)
        start = self.starts[place]

        def of_heads(tensor: Tensor, sharing: int) -> Tensor:
            size = self.together * sharing
            return lax.dynamic_slice_in_dim(tensor, chunk * size, size, 1)

        def rows(tensor: Tensor, axis: int = 2) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, place * self.tile, self.tile, axis)

        def cut(tensor: Tensor, axis: int = 2) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, start, self.size, axis)

        def added(tensor: Tensor, more: Tensor) -> Tensor:
            at = places((0, chunk * self.together, start, 0))
            there = lax.dynamic_slice(tensor, at, more.shape)
            return lax.dynamic_update_slice(tensor, there + more, at)

        def block(number: int) -> KeyBlock:
            allowed, cuts = None, Cuts(rows, cut, WHOLE.batch)
            if not self.part.rule.constant:
                allowed = allowed_tile(self.part.rule, self.bound, self.part.heads, cuts)
            return KeyBlock(lambda x: cut(of_heads(x, 1)), added, allowed, cuts, ())

        return QueryTile(lambda x: rows(of_heads(x, self.part.sharing)), 1, block)


def _is_one_mask(part: Part, bound: Bound) -> bool:
    """Whether the mask is one for all heads and examples; that of a user's leaf need not be."""
    if part.rule.constant:
        return True
    return jax.eval_shape(lambda: allowed_tile(part.rule, bound, part.heads)).shape[:2] == (1, 1)


def _in_one_axis(rows: Tensor) -> Tensor:
    rows = heads_first(rows)
    return rows.reshape(1, -1, *rows.shape[2:])
