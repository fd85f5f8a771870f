"""Rules on positions as masks of JAX' splash attention, the fused kernel for TPUs.

The kernel asks a mask for one block after the other when a program is made, keeps the blocks that
are partly allowed, equal ones once, and skips those that hold nothing. So no mask of all queries
and keys is made.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from keras_headmask.rules import coverage
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fused import window

_TILE = 128


@dataclasses.dataclass(frozen=True)
class RuleMask(splash.Mask):
    """What `rule`, which reads no input and is free of `PerHead`, allows in any block."""

    rule: MaskSpec
    lengths: tuple[int, int]  # of the queries and keys
    query_offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.lengths

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (
            np.arange(size, dtype="int32")[of_axis]
            for size, of_axis in zip(self.lengths, block, strict=True)
        )
        rows = rows + self.query_offset
        shape, ends = (len(rows), len(columns)), (rows[:1], rows[-1:], columns[:1], columns[-1:])
        with jax.ensure_compile_time_eval():  # where a program is made, these are numbers still
            bounds = coverage.bounds(self.rule, coverage.Tiles(*(x[None] for x in ends)))
            if not np.any(bounds.possible):
                return np.broadcast_to(np.array(False), shape)
            if np.all(bounds.certain):
                return np.broadcast_to(np.array(True), shape)
        return self._allowed(rows[:, None], columns[None], shape)

    def rows_alive(self) -> np.ndarray:
        """Which queries may see some key, `(T,)`."""
        queries, keys = self.lengths
        with jax.ensure_compile_time_eval():
            grid = coverage.tile_grid(queries, keys, _TILE, _TILE, self.query_offset)
            possible, certain = coverage.bounds(self.rule, grid)
            shape = len(grid.query_first), grid.key_first.shape[1]
            possible, certain = (np.broadcast_to(x, shape) for x in (possible, certain))
        alive = np.zeros(queries, bool)
        for row in range(shape[0]):
            rows = slice(row * _TILE, (row + 1) * _TILE)
            alive[rows] = (possible[row] & certain[row]).any()
            for column in np.nonzero(possible[row])[0]:
                if alive[rows].all():
                    break
                alive[rows] |= self[rows, slice(column * _TILE, (column + 1) * _TILE)].any(1)
        return alive

    def diagonal(self) -> np.ndarray:
        """Which queries may see the key at their own position, `(T,)`."""
        queries, keys = self.lengths
        own = np.arange(queries, dtype="int32")[:, None] + self.query_offset
        return (self._allowed(own, own, own.shape) & (own >= 0) & (own < keys))[:, 0]

    def _allowed(self, queries: np.ndarray, keys: np.ndarray, shape: tuple) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            allowed = self.rule.fold(
                lambda leaf: leaf.allowed(queries, keys, {}),
                both=lambda a, b: a & b,
                either=lambda a, b: a | b,
                neither=lambda a: ~a,
            )
            return np.array(np.broadcast_to(np.asarray(allowed), shape))


def mask_of(rule: MaskSpec, queries: int, keys: int, query_offset: int = 0) -> Any:
    """`rule`, which reads no input, as a mask; a window is one that the kernel computes itself."""
    lengths = queries, keys
    if rule.constant:
        return splash.FullMask(lengths)
    sides = window(rule)
    if sides is None:
        return RuleMask(rule, lengths, query_offset)
    # All distances of a key ahead of a query; the kernel's numbers are of 32 bits.
    least, greatest = 1 - queries - query_offset, keys - 1 - query_offset
    before, after = sides
    if before is not None and (-before > greatest or -before <= least):
        before = None if -before <= least else -greatest - 1
    if after is not None and (after < least or after >= greatest):
        after = None if after >= greatest else least - 1
    if before is None and after is None:
        return splash.FullMask(lengths)
    if before is None and after == 0:
        return splash.CausalMask(lengths, query_offset)
    return splash.LocalMask(lengths, (before, after), query_offset)
