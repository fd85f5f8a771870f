"""Leaves that divide positions into blocks of one size: neighbouring blocks, random blocks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_headmask.rules import fields, words
from keras_headmask.rules.base import MaskSpec, register_spec
from keras_headmask.rules.positions import FARTHEST
from keras_headmask.rules.protocol import Bounds, Reach, Sampling, Tensor, Tiles, Tiling


@register_spec("chunk")
@dataclasses.dataclass(frozen=True, repr=False)
class Chunk(MaskSpec):
    """Keys in the same block of `size` positions as the query, or in neighbouring blocks.

    Args:
        size: Positions in a block.
        before: Further blocks that are open behind the query's own.
        after: Further blocks that are open ahead of it.

    >>> from keras_headmask import draw
    >>> print(draw(Chunk(2), queries=4))
    1 1 0 0
    1 1 0 0
    0 0 1 1
    0 0 1 1
    """

    size: fields.Positive
    before: fields.NotNegative = 0
    after: fields.NotNegative = 0
    tiling = Tiling(is_local=True)

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        query, key = query_positions // self.size, key_positions // self.size
        # (As in `Window`: pairs are compared, and not subtracted first.)
        return (key + min(self.before, FARTHEST) >= query) & (key - self.after <= query)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first // self.size - tiles.query_last // self.size
        greatest = tiles.key_last // self.size - tiles.query_first // self.size
        return Bounds(
            (greatest >= -self.before) & (least <= self.after),
            (least >= -self.before) & (greatest <= self.after),
        )

    def looks_back(self, hidden: bool = False) -> Reach:
        # From the end of the query's block to the start of the first one that is open.
        return Reach() if hidden else Reach(before=self.size * (self.before + 1) - 1)

    @property
    def sampling(self) -> Sampling:
        distance = self.size * max(1, self.before, self.after)
        return Sampling(distance, closes=("before", "after"))

    def in_words(self) -> str:
        sides = [(self.before, "before it"), (self.after, "after it")]
        if self.before == self.after:
            sides = [(self.before, "on each side")]
        more = [f"{words.counted(count, 'block')} {where}" for count, where in sides if count]
        return words.listed([f"its own block of {words.counted(self.size, 'token')}", *more], "and")


@register_spec("random_blocks")
@dataclasses.dataclass(frozen=True, repr=False)
class RandomBlocks(MaskSpec):
    """BigBird's random blocks (Zaheer et al. 2020), the same in every process and backend.

    A pair (query block, key block) is open where an integer hash of `(seed, query block, key
    block)` falls under `density`; so a block does not change with the sequence length. Heads differ
    by seeds given through `PerHead`.

    Args:
        size: Positions in a block.
        density: The share of pairs of blocks that is open, from 0 to 1.
        seed: A whole number from 0.

    >>> from keras_headmask import draw
    >>> print(draw(RandomBlocks(2, 0.5, seed=2), 6))
    1 1 0 0 1 1
    1 1 0 0 1 1
    0 0 1 1 1 1
    0 0 1 1 1 1
    0 0 0 0 0 0
    0 0 0 0 0 0
    """

    size: fields.Positive
    density: fields.Fraction
    seed: fields.Seed

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        blocks = query_positions // self.size, key_positions // self.size
        return _open_pairs(*blocks, *self._numbers)

    @property
    def _numbers(self) -> tuple[int, int]:
        """The start of each pair's hash, and the number below which the pair is open."""
        start = _scramble(_scramble(self.seed % _PRIME) + self.seed // _PRIME % _PRIME)
        return start, round(self.density * _PRIME)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        unknown = MaskSpec.coverage(self, tiles, inputs)
        if not isinstance(tiles.query_first, np.ndarray):
            return unknown
        rows = tiles.query_first[:, 0] // self.size, tiles.query_last[:, 0] // self.size + 1
        columns = tiles.key_first[0] // self.size, tiles.key_last[0] // self.size + 1
        ranges = [  # one block more on each axis, since `reduceat` needs a place for the last stop
            range(int(first.min(initial=0)), int(stop.max(initial=0)) + 1)
            for first, stop in (rows, columns)
        ]
        if math.prod(map(len, ranges)) > _MOST_BLOCKS:
            return unknown
        queries, keys = np.ix_(*ranges)
        count = _is_open(queries, keys, *self._numbers).astype(np.int32)
        for axis, (first, stop) in enumerate((rows, columns)):
            cuts = np.stack([first, stop], axis=1).ravel() - ranges[axis].start
            count = np.add.reduceat(count, cuts, axis).compress([True, False] * len(first), axis)
        of = np.multiply.outer(rows[1] - rows[0], columns[1] - columns[0])
        return Bounds(count > 0, count == of)

    @property
    def tiling(self) -> Tiling:
        return Tiling(is_sparse=self.density <= 0.5)

    @property
    def sampling(self) -> Sampling:
        # With few blocks, none may be open.
        return Sampling(int(self.size * min(8 / max(self.density, 1e-9) ** 0.5, 10**6)))

    def in_words(self) -> str:
        drawn = f"each open with probability {self.density!r}, seed {self.seed}"
        return f"random blocks of {words.counted(self.size, 'token')} ({drawn})"


# The largest prime whose square fits int32, the one integer type that all backends share. Cubing
# permutes the residues, since 3 does not divide _PRIME - 1; a few rounds of "add, cube" are the
# MiMC cipher (Albrecht et al. 2016), small.
_PRIME = 46337
_MOST_BLOCKS = 2**24  # more are not counted one by one, 64 MiB of them, to plan what to skip
_ROUND_CONSTANTS = (31607, 12289, 40503)


def _is_open(query_blocks: Tensor, key_blocks: Tensor, start: Any, limit: Any) -> Tensor:
    value = _scramble(_scramble(query_blocks % _PRIME + start))
    return _scramble(_scramble(key_blocks % _PRIME + value)) < limit


def _scramble(value: Tensor) -> Tensor:
    for constant in _ROUND_CONSTANTS:
        value = (value + constant) % _PRIME
        value = value * value % _PRIME * value % _PRIME
    return value


def _open_pairs(query_blocks: Tensor, key_blocks: Tensor, start: int, limit: int) -> Tensor:
    """`_is_open` for blocks of positions, `(..., T, 1)` and `(..., S)`.

    In TensorFlow each operation on all pairs of a tile is a pass over memory, and a hash is forty
    of them. Those on pairs of blocks are small, so they are looked up. (XLA makes one pass of it.)
    """
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from keras_headmask._keras.tensorflow import in_xla

        are_wide = all(tf.is_tensor(x) and x.dtype == tf.int64 for x in (query_blocks, key_blocks))
        if are_wide and not in_xla():
            are_open = _looked_up()(query_blocks, key_blocks, start, limit)
            are_open.set_shape(tf.broadcast_static_shape(query_blocks.shape, key_blocks.shape))
            return are_open
    return _is_open(query_blocks, key_blocks, start, limit)


@functools.cache
def _looked_up() -> Callable:
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
        table = _is_open(rows[:, None], columns[None], start, limit)
        places = (query_blocks - first[0]) * tf.size(columns, tf.int64) + (key_blocks - first[1])
        return tf.gather(tf.reshape(table, [-1]), places)

    return looked_up
