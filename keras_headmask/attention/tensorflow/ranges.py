"""What each step of TensorFlow's loop looks at: the planner's answer in the graph, as runs."""

from typing import NamedTuple

import tensorflow as tf

from keras_headmask.attention.blocks import Arrays, bounds_of, flags_of
from keras_headmask.attention.tuning import Tuning
from keras_headmask.masks import Length, Mask, Tensor, sizes
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bound, leaves_gaps


class Flagged(NamedTuple):
    """Positions `(n,)` and their examples, in order; example i's are from `splits[i]` on."""

    examples: Tensor
    positions: Tensor
    splits: Tensor

    def of(self, example: Tensor) -> Tensor:
        return self.positions[self.splits[example] : self.splits[example + 1]]


class Ranges(NamedTuple):
    """For each tile the run or two runs to look at, `(B or 1, tiles, 2 or 4)`, starts and stops.

    What lies between more than two runs is looked at too, and masked. `needs_mask`, `(B or 1,
    tiles)`, is `None` where all are masked. `of_examples`: ranges differ between examples.
    `rows` are queries that see all keys, whatever their tiles look at; `others` are keys that all
    tiles look at.
    """

    runs: Tensor
    needs_mask: Tensor | None
    of_examples: bool
    rows: Flagged | None
    others: Flagged | None


def ranges_of(rule: MaskSpec, bound: Bound, tuning: Tuning, tile: int, batch: Length) -> Ranges:
    """What each step of the loop over queries, `tile` of them at once, looks at."""
    queries, keys = tf.size(bound.query_positions), tf.size(bound.key_positions)
    block, inputs = tuning.tensorflow_block, bound.leaf_inputs
    flags = flags_of(rule, inputs, tuning, _most_set)
    offset = tf.reduce_min(bound.query_positions)
    of_grid = (queries, keys), (tile, block), offset, _ARRAYS, flags.leaves
    possible, certain = bounds_of(rule, inputs, *of_grid)
    blocks = _runs(possible, leaves_gaps(rule, flags.leaves))
    runs = tf.minimum(blocks * block, keys)
    needs_mask = None if flags.leaves or rule.tiling.is_local else _needs_mask(blocks, certain)
    of_examples = any(x is not None and x.shape[0] != 1 for x in (runs, needs_mask))
    batch = batch if of_examples else 1
    if of_examples:  # it may still be 1 when run
        runs = tf.broadcast_to(runs, [batch, *sizes(runs)[1:]])
        if needs_mask is not None:
            needs_mask = tf.broadcast_to(needs_mask, [batch, sizes(needs_mask)[1]])

    def flagged(found: Mask | None) -> Flagged | None:
        if found is None:
            return None
        found = tf.broadcast_to(found, [batch, sizes(found)[1]])
        where = tf.cast(tf.where(found), tf.int32)
        counts = tf.reduce_sum(tf.cast(found, tf.int32), 1)
        return Flagged(where[:, 0], where[:, 1], tf.concat([[0], tf.cumsum(counts)], 0))

    both = flagged(flags.by_side.get("query")), flagged(flags.by_side.get("key"))
    return Ranges(runs, needs_mask, of_examples, *both)


def _runs(possible: Mask, two: bool) -> Tensor:
    """First and last block of each row, `(..., 2)`; with `two`, cut at the first gap: 4."""
    count = sizes(possible)[-1]
    number = tf.range(count)

    def first_true(x: Tensor) -> Tensor:
        return tf.argmax(tf.cast(x, tf.int32), -1, tf.int32)

    start = first_true(possible)
    stop = tf.where(tf.reduce_any(possible, -1), count - first_true(possible[..., ::-1]), start)
    if not two:
        return tf.stack([start, stop], -1)
    ended = ~possible & (number >= tf.expand_dims(start, -1))
    gap = tf.minimum(tf.where(tf.reduce_any(ended, -1), first_true(ended), count), stop)
    again = possible & (number >= tf.expand_dims(gap, -1))
    after = tf.where(tf.reduce_any(again, -1), first_true(again), stop)
    return tf.stack([start, gap, after, stop], -1)


def _needs_mask(blocks: Tensor, certain: Mask) -> Tensor:
    """Whether a row looks at a block that may hide some pair, or at nothing."""
    number, looked_at = tf.range(sizes(certain)[-1]), tf.zeros_like(certain)
    edges = tf.split(blocks, blocks.shape[-1], -1)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        looked_at |= (number >= start) & (number < stop)
    return tf.reduce_any(looked_at & ~certain, -1) | ~tf.reduce_any(looked_at, -1)


def _most_set(flags: Mask) -> Tensor:
    return tf.reduce_max(tf.reduce_sum(tf.cast(flags, tf.int32), 1))


def _extremes(values: Tensor, size: int, axis: int) -> list[Tensor]:
    length = sizes(values)[1]
    # (The last value once more as often as the last block is short.)
    places = tf.minimum(tf.range((length + size - 1) // size * size), length - 1)
    places = tf.reshape(places, [-1, 1, size] if axis == 0 else [1, -1, size])
    blocks = tf.gather(values, places, axis=1)
    return [tf.reduce_min(blocks, 3), tf.reduce_max(blocks, 3)]


_ARRAYS = Arrays(
    starts=lambda length, size: tf.range(0, length, size),
    at_most=tf.minimum,
    extremes=_extremes,
    as_numbers=lambda mask: tf.cast(mask, tf.int32),
)
