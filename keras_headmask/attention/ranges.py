"""What each step of TensorFlow's loop looks at, told in the graph by positions and by data.

Along one axis of the matrix of logits go tiles; along the other, blocks are kept or skipped by what
`coverage` says of the least and greatest value of the mask inputs in each. A few flagged positions
(Longformer's global tokens) would open a block or a tile each, so they are taken out and looked at
by themselves.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention.parts import Part
from keras_headmask.attention.tuning import Tuning
from keras_headmask.rules import coverage
from keras_headmask.rules.base import MaskSpec, leaves_under_or
from keras_headmask.rules.evaluation import Bound
from keras_headmask.rules.protocol import Sides, Span, Tiles


class Flagged(NamedTuple):
    """Positions `(n,)` and their examples, in order; example i's are from `splits[i]` on."""

    examples: Any
    positions: Any
    splits: Any

    def of(self, example: Any) -> Any:
        return self.positions[self.splits[example] : self.splits[example + 1]]


class Ranges(NamedTuple):
    """For each tile the run or two runs to look at, `(B or 1, tiles, 2 or 4)`, starts and stops.

    What lies between more than two runs is looked at too, and masked. `needs_mask`, `(B or 1,
    tiles)`, is `None` where it is not worth asking. `of_examples`: ranges differ between examples.
    `rows` see all of the other axis, whatever their tiles look at; `others` are seen by all tiles.
    """

    runs: Any
    needs_mask: Any
    of_examples: bool
    rows: Flagged | None
    others: Flagged | None


def ranges_of(part: Part, by_key: bool, batch: Any) -> Ranges:
    bound = part.bound
    queries, keys = tf.shape(bound.query_positions)[0], tf.shape(bound.key_positions)[0]
    block = part.tuning.tensorflow_block
    size = {"query": block if by_key else part.tile, "key": part.tile if by_key else block}
    flagged_queries = _flags(part.rule, bound, "query", part.tuning)
    flagged_keys = _flags(part.rule, bound, "key", part.tuning)
    spans = _spans(bound, size)
    for leaves, _ in filter(None, (flagged_queries, flagged_keys)):
        for leaf, few in leaves.items():
            spans[leaf] = {name: _without(sides, few) for name, sides in spans[leaf].items()}
    tiles = _tiles(bound, queries, keys, size)
    full = [tf.shape(tiles.query_first)[0], tf.shape(tiles.key_first)[1]]
    possible, certain = (
        _over_all(x, full, by_key) for x in coverage.bounds(part.rule, tiles, spans)
    )
    taken_out = [leaf for flags in (flagged_queries, flagged_keys) if flags for leaf in flags[0]]
    blocks = _runs(possible, part.rule.may_leave_gaps(taken_out))
    other = queries if by_key else keys
    runs = tf.minimum(blocks * block, other)
    needs_mask = None if taken_out or part.is_local else _needs_mask(blocks, certain)
    of_examples = any(x is not None and x.shape[0] != 1 for x in (runs, needs_mask))
    batch = batch if of_examples else 1
    if of_examples:  # it may still be 1 when run
        runs = tf.broadcast_to(runs, [batch, *tf.unstack(tf.shape(runs)[1:])])
        if needs_mask is not None:
            needs_mask = tf.broadcast_to(needs_mask, [batch, tf.shape(runs)[1]])
    rows, others = (
        None if flags is None else _positions(flags[1], batch)
        for flags in (
            (flagged_keys, flagged_queries) if by_key else (flagged_queries, flagged_keys)
        )
    )
    return Ranges(runs, needs_mask, of_examples, rows, others)


def _tiles(bound: Bound, queries: Any, keys: Any, size: dict[str, int]) -> Tiles:
    query_first = tf.range(0, queries, size["query"])
    key_first = tf.range(0, keys, size["key"])
    query_last = tf.minimum(query_first + size["query"], queries) - 1
    key_last = tf.minimum(key_first + size["key"], keys) - 1
    offset = tf.reduce_min(bound.query_positions)
    return Tiles(
        (query_first + offset)[:, None],
        (query_last + offset)[:, None],
        key_first[None],
        key_last[None],
    )


def _over_all(tiles: Any, full: list, by_key: bool) -> Any:
    """`(B or 1, rows, columns)`: rows of what goes by tiles, columns of what goes by blocks."""
    batch = [1] if tiles.shape.rank == 2 else [tf.shape(tiles)[0]]
    static = 1 if tiles.shape.rank == 2 else tiles.shape[0]
    tiles = tf.ensure_shape(tf.broadcast_to(tiles, [*batch, *full]), [static, None, None])
    return tf.transpose(tiles, (0, 2, 1)) if by_key else tiles


def _runs(possible: Any, two: bool) -> Any:
    """First and last block of each row, `(..., 2)`; with `two`, cut at the first gap: 4."""
    count = tf.shape(possible)[-1]
    number = tf.range(count)
    some = tf.reduce_any(possible, -1)

    def first_true(x: Any) -> Any:
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


def _needs_mask(blocks: Any, certain: Any) -> Any:
    """Whether a row looks at a block that may hide some pair, or at nothing."""
    number = tf.range(tf.shape(certain)[-1])
    looked_at = tf.zeros_like(certain)
    for i in range(0, blocks.shape[-1], 2):
        looked_at |= (number >= blocks[..., i, None]) & (number < blocks[..., i + 1, None])
    return tf.reduce_any(looked_at & ~certain, -1) | ~tf.reduce_any(looked_at, -1)


# ---------------------------------------------------------------- what data tell


def _spans(bound: Bound, size: dict[str, int]) -> dict[MaskSpec, dict[str, Sides]]:
    """The least and greatest value of each mask input, per tile or block, for each leaf."""
    spans = {}
    for leaf, inputs in bound.leaf_inputs.items():
        if all(isinstance(value, Sides) for value in inputs.values()):
            spans[leaf] = {
                name: Sides(_span(sides.query, size["query"], 2), _span(sides.key, size["key"], 1))
                for name, sides in inputs.items()
            }
    return spans


def _span(values: Any, size: int, axis: int) -> Span | None:
    """Of `(B, L)` the least and greatest of every `size` values, `(B, n, 1)` or `(B, 1, n)`."""
    if values is None:
        return None
    values = tf.cast(values, tf.int32) if values.dtype == tf.bool else values
    rest = -tf.shape(values)[1] % size
    padded = tf.concat([values, tf.repeat(values[:, -1:], rest, axis=1)], axis=1)
    blocks = tf.reshape(padded, [tf.shape(values)[0], -1, size])
    return Span(
        tf.expand_dims(tf.reduce_min(blocks, 2), axis),
        tf.expand_dims(tf.reduce_max(blocks, 2), axis),
    )


def _flags(
    rule: MaskSpec, bound: Bound, side: str, tuning: Tuning
) -> tuple[dict[MaskSpec, Any], Any] | None:
    """The leaves that open whole columns (rows) where they are true, and where one of them is.

    A pair that such a leaf alone allows, because it stands under `|` and under no `~`, has its key
    (query) among the flagged. With each leaf goes whether its flags are few enough to take out.
    """
    leaves, flags = {}, None
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
        flags = of_leaf & few if flags is None else flags | (of_leaf & few)
    return None if flags is None else (leaves, flags)


def _without(sides: Sides, few: Any) -> Sides:
    """The spans of flags as if none were set, where they are taken out."""

    def without(span: Span | None) -> Span | None:
        if span is None:
            return None
        return Span(span.low, tf.where(few, tf.zeros_like(span.high), span.high))

    return Sides(*map(without, sides))


def _positions(flags: Any, batch: Any) -> Flagged:
    flags = tf.broadcast_to(flags, [batch, tf.shape(flags)[1]])
    where = tf.cast(tf.where(flags), tf.int32)
    counts = tf.reduce_sum(tf.cast(flags, tf.int32), 1)
    splits = tf.concat([[0], tf.cumsum(counts)], 0)
    return Flagged(where[:, 0], where[:, 1], splits)
