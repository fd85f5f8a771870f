"""What each step of TensorFlow's loop looks at, decided in the graph by positions and by data.

Of each tile of queries, blocks of keys are kept or skipped by what `coverage` says of the least and
greatest value of the mask inputs in each. A few flagged positions (Longformer's global tokens)
would open a block or a tile each, so they are taken out and looked at by themselves.
"""

from typing import NamedTuple

import tensorflow as tf

from keras_headmask.attention.tuning import Tuning
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import coverage
from keras_headmask.rules.algebra import leaves_under_or
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bound, Sides, Span, Tiles, leaves_gaps


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
    queries, keys = tf.shape(bound.query_positions)[0], tf.shape(bound.key_positions)[0]
    block = tuning.tensorflow_block
    taken_out, flags_on = _flags(rule, bound, tuning)
    query_first, key_first = tf.range(0, queries, tile), tf.range(0, keys, block)
    query_last = tf.minimum(query_first + tile, queries) - 1
    key_last = tf.minimum(key_first + block, keys) - 1
    offset = tf.reduce_min(bound.query_positions)
    on_queries = (query_first + offset)[:, None], (query_last + offset)[:, None]
    spans = {
        leaf: {
            name: Sides(
                _span(sides.query, tile, 2, taken_out.get(leaf)),
                _span(sides.key, block, 1, taken_out.get(leaf)),
            )
            for name, sides in inputs.items()
        }
        for leaf, inputs in bound.leaf_inputs.items()
        if all(isinstance(value, Sides) for value in inputs.values())
    }
    full = [tf.shape(query_first)[0], tf.shape(key_first)[0]]

    def over_all(of_tiles: Tensor) -> Tensor:
        """`(B or 1, tiles, blocks)`."""
        examples, known = 1, 1
        if of_tiles.shape.rank != 2:
            examples, known = tf.shape(of_tiles)[0], of_tiles.shape[0]
        return tf.ensure_shape(tf.broadcast_to(of_tiles, [examples, *full]), [known, None, None])

    tiles = Tiles(*on_queries, key_first[None], key_last[None])
    possible, certain = map(over_all, coverage.bounds(rule, tiles, spans))
    blocks = _runs(possible, leaves_gaps(rule, taken_out))
    runs = tf.minimum(blocks * block, keys)
    needs_mask = None if taken_out or rule.tiling.is_local else _needs_mask(blocks, certain)
    of_examples = any(x is not None and x.shape[0] != 1 for x in (runs, needs_mask))
    batch = batch if of_examples else 1
    if of_examples:  # it may still be 1 when run
        runs = tf.broadcast_to(runs, [batch, *tf.unstack(tf.shape(runs)[1:])])
        if needs_mask is not None:
            needs_mask = tf.broadcast_to(needs_mask, [batch, tf.shape(runs)[1]])

    def flagged(flags: Tensor | None) -> Flagged | None:
        if flags is None:
            return None
        flags = tf.broadcast_to(flags, [batch, tf.shape(flags)[1]])
        where = tf.cast(tf.where(flags), tf.int32)
        counts = tf.reduce_sum(tf.cast(flags, tf.int32), 1)
        return Flagged(where[:, 0], where[:, 1], tf.concat([[0], tf.cumsum(counts)], 0))

    both = flagged(flags_on.get("query")), flagged(flags_on.get("key"))
    return Ranges(runs, needs_mask, of_examples, *both)


def _runs(possible: Mask, two: bool) -> Tensor:
    """First and last block of each row, `(..., 2)`; with `two`, cut at the first gap: 4."""
    count = tf.shape(possible)[-1]
    number = tf.range(count)

    def first_true(x: Tensor) -> Tensor:
        return tf.argmax(tf.cast(x, tf.int32), -1, tf.int32)

    start = first_true(possible)
    stop = tf.where(tf.reduce_any(possible, -1), count - first_true(possible[..., ::-1]), start)
    if not two:
        return tf.stack([start, stop], -1)
    ended = ~possible & (number >= start[..., None])
    gap = tf.minimum(tf.where(tf.reduce_any(ended, -1), first_true(ended), count), stop)
    again = possible & (number >= gap[..., None])
    after = tf.where(tf.reduce_any(again, -1), first_true(again), stop)
    return tf.stack([start, gap, after, stop], -1)


def _needs_mask(blocks: Tensor, certain: Mask) -> Tensor:
    """Whether a row looks at a block that may hide some pair, or at nothing."""
    number = tf.range(tf.shape(certain)[-1])
    looked_at = tf.zeros_like(certain)
    for i in range(0, blocks.shape[-1], 2):
        looked_at |= (number >= blocks[..., i, None]) & (number < blocks[..., i + 1, None])
    return tf.reduce_any(looked_at & ~certain, -1) | ~tf.reduce_any(looked_at, -1)


def _span(values: Tensor | None, size: int, axis: int, few: Tensor | None = None) -> Span | None:
    """Of `(B, L)` the least and greatest of every `size` values, `(B, n, 1)` or `(B, 1, n)`.

    Flags that are `few` are taken out: as if none were set.
    """
    if values is None:
        return None
    values = tf.cast(values, tf.int32) if values.dtype == tf.bool else values
    rest = -tf.shape(values)[1] % size
    padded = tf.concat([values, tf.repeat(values[:, -1:], rest, axis=1)], axis=1)
    blocks = tf.reshape(padded, [tf.shape(values)[0], -1, size])
    low = tf.expand_dims(tf.reduce_min(blocks, 2), axis)
    high = tf.expand_dims(tf.reduce_max(blocks, 2), axis)
    return Span(low, high if few is None else tf.where(few, tf.zeros_like(high), high))


def _flags(
    rule: MaskSpec, bound: Bound, tuning: Tuning
) -> tuple[dict[MaskSpec, Tensor], dict[str, Tensor]]:
    """The leaves that open whole columns or rows where they are true, and where, by side.

    A pair that such a leaf alone allows, because it stands under `|` and under no `~`, has its key
    (query) among the flagged. With each leaf goes whether its flags are few enough to take out.
    """
    leaves: dict[MaskSpec, Tensor] = {}
    flagged: dict[str, Tensor] = {}
    # (A rule that allows all is not masked, so none of its keys may be looked at twice.)
    opening = () if rule.constant else leaves_under_or(rule)
    for leaf in dict.fromkeys(opening):
        if (side := leaf.tiling.opens) is None:
            continue
        read = [getattr(sides, side) for sides in bound.leaf_inputs.get(leaf, {}).values()]
        if [flag.dtype for flag in read] != [tf.bool]:
            continue  # it is not what `opens` promises: treated as any other leaf
        (of_leaf,) = read
        count = tf.reduce_max(tf.reduce_sum(tf.cast(of_leaf, tf.int32), 1))
        few = count <= tuning.most_flagged
        few &= count * tuning.one_flagged_in <= tf.shape(of_leaf)[1]
        leaves[leaf] = few
        flagged[side] = flagged[side] | (of_leaf & few) if side in flagged else of_leaf & few
    return leaves, flagged
