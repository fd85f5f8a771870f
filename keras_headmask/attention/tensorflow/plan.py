"""The plan of TensorFlow's loop: runs of keys for each tile, computed in the graph."""

import functools
from typing import NamedTuple

import tensorflow as tf

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.planner import Arrays, bounds_of, flags_of
from keras_headmask.masks import Length, Mask, Tensor, sizes
from keras_headmask.rules.protocol import leaves_gaps

_MOST_LOGITS_ON_GPU = 2**26  # of a step: 256 MB. A GPU is idle between steps of some 20 kernels.


class Plan(NamedTuple):
    """The tiles of all examples, N of b queries each, and the keys that each looks at.

    `queries` `(N, 1, b, 1)`: their places in the sequence; `counts`: whether the result of one is
    wanted. `runs` `(N, 1, 1, 3 or 5)`: the example, and where the one run or the two start and
    stop; what lies between more than two runs is looked at too, and masked. `flagged` `(B, 1, F)`:
    keys that all tiles of an example look at, -1 where it has fewer. `needs_mask` `(N,)`: 1 where
    some pair may be hidden, else 0; `None`: all are masked. `slots` `(B, T)`: where the results
    are, counted over all tiles. `in_step`: how many tiles are looked at together. `is_gpu`: what
    `on_gpu` gives.
    """

    queries: Tensor
    counts: Mask
    runs: Tensor
    flagged: Tensor | None
    needs_mask: Tensor | None
    slots: Tensor
    in_step: Tensor
    is_gpu: Tensor | int


def planned(part: Part, is_gpu: Tensor | int = 0) -> Plan:
    """The plan for the heads of `part`, which obey one rule."""
    rule, bound, tuning = part.rule, part.bound, part.tuning
    _, queries, keys = map(tf.convert_to_tensor, bound.sizes)
    tiles = -(-queries // part.tile)
    tile = tf.maximum(-(-queries // tf.maximum(tiles, 1)), 1)  # as many in each
    block, inputs = tuning.block, bound.leaf_inputs
    flags = flags_of(rule, inputs, _most_set)
    has_gaps = leaves_gaps(rule, flags.leaves)
    run_of_all = tf.stack([0, keys, keys, keys] if has_gaps else [0, keys])[None, None]
    offset = tf.reduce_min(bound.query_positions)
    wide = functools.partial(tf.cast, dtype=offset.dtype)
    of_grid = (wide(queries), wide(keys)), (wide(tile), block), offset, _ARRAYS, flags.leaves
    possible, certain = bounds_of(rule, inputs, *of_grid)
    blocks = _runs(possible, has_gaps)
    runs = tf.minimum(blocks * block, keys)
    always_masked = bool(flags.leaves) or rule.tiling.is_local
    needs_mask = None if always_masked else _needs_mask(blocks, certain)
    places = {side: _places(is_flagged) for side, is_flagged in flags.by_side.items()}
    return _tiles(part, tile, tiles, runs, run_of_all, needs_mask, places, is_gpu)


def _tiles(
    part: Part,
    tile: Tensor,
    tiles: Tensor,
    runs: Tensor,
    run_of_all: Tensor,
    needs_mask: Mask | None,
    places: dict[str, Tensor],
    is_gpu: Tensor | int,
) -> Plan:
    """The `tiles` of a sequence, of so many queries, as those of all examples, side by side.

    `runs` `(E, tiles, 2 or 4)`, `needs_mask` `(E, tiles)` and the places of flagged queries and
    keys `(E, most)` are of each example, or of all. Flagged queries are put into tiles more, which
    look at all keys.
    """
    batch, queries, _ = part.bound.sizes
    example, place = tf.range(batch)[:, None], tf.range(queries)
    rows = tf.reshape(tf.minimum(tf.range(tiles * tile), queries - 1), [tiles, 1, tile])
    rows = tf.broadcast_to(rows, [tiles, batch, tile])
    slots = (place // tile * batch + example) * tile + place % tile
    runs = tf.broadcast_to(tf.transpose(runs, (1, 0, 2)), [tiles, batch, runs.shape[-1]])
    if needs_mask is not None:
        # (As numbers: oneDNN cannot transpose booleans, and logs that.)
        numbers = tf.transpose(tf.cast(needs_mask, tf.int32))
        needs_mask = tf.reshape(tf.broadcast_to(numbers, [tiles, batch]), [-1])
    if (apart := places.get("query")) is not None:
        count = tf.shape(apart)[1]
        more = -(-count // tile)
        apart = tf.broadcast_to(apart, [batch, count])
        flagged = tf.where(apart >= 0)
        at = tf.stack([flagged[:, 0], tf.gather_nd(tf.cast(apart, tf.int64), flagged)], 1)
        examples, number = tf.unstack(tf.cast(flagged, tf.int32), axis=1)
        slot = ((tiles + number // tile) * batch + examples) * tile + number % tile
        slots = tf.tensor_scatter_nd_update(slots, at, slot)
        apart = tf.pad(tf.maximum(apart, 0), [[0, 0], [0, more * tile - count]])
        apart = tf.transpose(tf.reshape(apart, [batch, more, tile]), (1, 0, 2))
        rows, tiles = tf.concat([rows, apart], 0), tiles + more
        see_all = tf.broadcast_to(run_of_all, [more, batch, runs.shape[-1]])
        runs = tf.concat([runs, see_all], 0)
    widest = tf.reduce_max(tf.reduce_sum(runs[..., 1::2] - runs[..., ::2], -1))
    if (of_keys := places.get("key")) is not None:
        most = tf.shape(of_keys)[1]
        widest, of_keys = widest + most, tf.broadcast_to(of_keys, [batch, most])[:, None]
    total = tiles * batch
    # (In 64 bits: 64 heads x 256 queries x 131,072 keys are 0 in 32.)
    logits = len(part.heads) * tf.cast(tile, tf.int64) * tf.cast(widest, tf.int64)
    tuning = part.tuning
    most = tf.maximum(tuning.most_logits_of_a_step, is_gpu * _MOST_LOGITS_ON_GPU)
    fitting = tf.cast(most, tf.int64) // tf.maximum(logits, 1)
    in_step = tf.clip_by_value(tf.cast(fitting, tf.int32), 1, tf.maximum(total, 1))
    wanted = tf.scatter_nd(slots[..., None], tf.ones_like(slots), tf.reshape(total * tile, [1]))
    with_example = tf.concat([tf.broadcast_to(example[:, 0], [tiles, batch])[..., None], runs], -1)
    return Plan(
        tf.cast(tf.reshape(rows, [total, 1, tile, 1]), tf.int64),
        tf.reshape(wanted > 0, [total, 1, tile, 1]),
        tf.reshape(with_example, [total, 1, 1, runs.shape[-1] + 1]),
        None if of_keys is None else tf.cast(of_keys, tf.int64),
        needs_mask,
        slots,
        in_step,
        is_gpu,
    )


def _places(is_flagged: Mask) -> Tensor:
    """Where each row is true, `(E, most of a row)`, -1 where it has fewer."""
    numbers = tf.cast(is_flagged, tf.int32)
    counts = tf.reduce_sum(numbers, 1, keepdims=True)
    most = tf.reduce_max(counts)
    return tf.where(tf.range(most) < counts, tf.math.top_k(numbers, most).indices, -1)


def _runs(possible: Mask, two: bool) -> Tensor:
    """First and last block of each row, `(..., 2)`; with `two`, cut at the first gap: 4."""
    count = sizes(possible)[-1]
    number = tf.range(count)

    def first_true(x: Tensor) -> Tensor:
        """Where it is true first, or `count`; of no block, too, where `argmax` raises."""
        return tf.minimum(tf.reduce_min(tf.where(x, number, count), -1), count)

    start = first_true(possible)
    stop = tf.maximum(count - first_true(possible[..., ::-1]), start)
    if not two:
        return tf.stack([start, stop], -1)
    ended = ~possible & (number >= tf.expand_dims(start, -1))
    gap = tf.minimum(first_true(ended), stop)
    again = possible & (number >= tf.expand_dims(gap, -1))
    return tf.stack([start, gap, tf.minimum(first_true(again), stop), stop], -1)


def _needs_mask(blocks: Tensor, certain: Mask) -> Tensor:
    """Whether a row looks at a block that may hide some pair, or at nothing."""
    number, looked_at = tf.range(sizes(certain)[-1]), tf.zeros_like(certain)
    edges = tf.split(blocks, [1] * blocks.shape[-1], -1)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        looked_at |= (number >= start) & (number < stop)
    return tf.reduce_any(looked_at & ~certain, -1) | ~tf.reduce_any(looked_at, -1)


def _most_set(flags: Mask) -> Tensor:
    return tf.reduce_max(tf.reduce_sum(tf.cast(flags, tf.int32), 1))


def _extremes(values: Tensor, size: Length, axis: int) -> list[Tensor]:
    length = sizes(values, "int64")[1]
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
