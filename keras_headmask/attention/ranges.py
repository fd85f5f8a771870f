"""What each step of TensorFlow's loop looks at, decided in the graph by positions and by data.

Along one axis of the matrix of logits go tiles; along the other, blocks are kept or skipped by what
`coverage` says of the least and greatest value of the mask inputs in each. A few flagged positions
(Longformer's global tokens) would open a block or a tile each, so they are taken out and looked at
by themselves.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention.tuning import Tuning
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules.base import MaskSpec, leaves_under_or
from keras_headmask.rules.protocol import Bound, Sides, Span, Tiles


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
    `rows` see all of the other axis, whatever their tiles look at; `others` are seen by all tiles.
    """

    runs: Tensor
    needs_mask: Tensor | None
    of_examples: bool
    rows: Any  # Flagged | None
    others: Flagged | None


def tiles(bound: Bound, queries: Tensor, keys: Tensor, size: dict[str, int]) -> Tiles:
    query_first = tf.range(0, queries, size["query"])
    key_first = tf.range(0, keys, size["key"])
    query_last = tf.minimum(query_first + size["query"], queries) - 1
    key_last = tf.minimum(key_first + size["key"], keys) - 1
    offset = tf.reduce_min(bound.query_positions)
    on_queries = (query_first + offset)[:, None], (query_last + offset)[:, None]
    return Tiles(*on_queries, key_first[None], key_last[None])


def over_all(tiles: Tensor, full: list, by_key: bool) -> Tensor:
    """`(B or 1, rows, columns)`: rows of what goes by tiles, columns of what goes by blocks."""
    batch = [1] if tiles.shape.rank == 2 else [tf.shape(tiles)[0]]
    static = 1 if tiles.shape.rank == 2 else tiles.shape[0]
    tiles = tf.ensure_shape(tf.broadcast_to(tiles, [*batch, *full]), [static, None, None])
    return tf.transpose(tiles, (0, 2, 1)) if by_key else tiles


def runs(possible: Mask, two: bool) -> Tensor:
    """First and last block of each row, `(..., 2)`; with `two`, cut at the first gap: 4."""
    count = tf.shape(possible)[-1]
    number = tf.range(count)
    some = tf.reduce_any(possible, -1)

    def first_true(x: Tensor) -> Tensor:
        return tf.argmax(tf.cast(x, tf.int32), -1, tf.int32)

    start = first_true(possible)
    stop = tf.where(some, count - first_true(possible[..., ::-1]), start)
    if not two:
        return tf.stack([start, stop], -1)
    ended = ~possible & (number >= start[..., None])
    gap = tf.minimum(tf.where(tf.reduce_any(ended, -1), first_true(ended), count), stop)
    again = possible & (number >= gap[..., None])
    after = tf.where(tf.reduce_any(again, -1), first_true(again), stop)
    return tf.stack([start, gap, after, stop], -1)


def needs_mask(blocks: Tensor, certain: Mask) -> Tensor:
    """Whether a row looks at a block that may hide some pair, or at nothing."""
    number = tf.range(tf.shape(certain)[-1])
    looked_at = tf.zeros_like(certain)
    for i in range(0, blocks.shape[-1], 2):
        looked_at |= (number >= blocks[..., i, None]) & (number < blocks[..., i + 1, None])
    return tf.reduce_any(looked_at & ~certain, -1) | ~tf.reduce_any(looked_at, -1)


def spans(
    bound: Bound, size: dict[str, int], few: dict[MaskSpec, Tensor]
) -> dict[MaskSpec, dict[str, Sides]]:
    """The least and greatest value of each mask input, per tile or block, for each leaf."""
    return {
        leaf: {
            name: Sides(
                _span(sides.query, size["query"], 2, few.get(leaf)),
                _span(sides.key, size["key"], 1, few.get(leaf)),
            )
            for name, sides in inputs.items()
        }
        for leaf, inputs in bound.leaf_inputs.items()
        if all(isinstance(value, Sides) for value in inputs.values())
    }


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


def flags(
    rule: MaskSpec, bound: Bound, side: str, tuning: Tuning
) -> tuple[dict[MaskSpec, Tensor], Tensor | None]:
    """The leaves that open whole columns (rows) where they are true, and where one of them is.

    A pair that such a leaf alone allows, because it stands under `|` and under no `~`, has its key
    (query) among the flagged. With each leaf goes whether its flags are few enough to take out.
    """
    leaves: dict[MaskSpec, Tensor] = {}
    flagged = None
    for leaf in dict.fromkeys(leaves_under_or(rule)):
        if leaf.opens != side:
            continue
        read = [getattr(sides, side) for sides in bound.leaf_inputs.get(leaf, {}).values()]
        if [flag.dtype for flag in read] != [tf.bool]:
            continue  # it is not what `opens` promises: treated as any other leaf
        (of_leaf,) = read
        count = tf.reduce_max(tf.reduce_sum(tf.cast(of_leaf, tf.int32), 1))
        few = count <= tuning.most_flagged
        few &= count * tuning.one_flagged_in <= tf.shape(of_leaf)[1]
        leaves[leaf] = few
        flagged = of_leaf & few if flagged is None else flagged | (of_leaf & few)
    return leaves, flagged


def positions(flags: Tensor | None, batch: Length) -> Flagged | None:
    if flags is None:
        return None
    flags = tf.broadcast_to(flags, [batch, tf.shape(flags)[1]])
    where = tf.cast(tf.where(flags), tf.int32)
    counts = tf.reduce_sum(tf.cast(flags, tf.int32), 1)
    return Flagged(where[:, 0], where[:, 1], tf.concat([[0], tf.cumsum(counts)], 0))
