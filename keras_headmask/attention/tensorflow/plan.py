"""The plan of TensorFlow's loop, computed in the graph: by positions, and by data."""

import functools
from typing import NamedTuple

import tensorflow as tf

from keras_headmask.attention.planner import Arrays, across, bounds_of
from keras_headmask.attention.request import Part
from keras_headmask.masks import Length, Mask, Tensor, sizes
from keras_headmask.rules.algebra import leaves_under_or
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.graphs import made_once
from keras_headmask.rules.protocol import Sides, Span, Tiles

_MOST_LOGITS_ON_GPU = 2**26  # of a step: 256 MB. A GPU is idle between steps of some 20 kernels.


class Plan(NamedTuple):
    """The tiles of all examples, N of b queries each; those that meet most key blocks come first.

    `queries` `(N, 1, b, 1)`: their places in the sequence, -1 for one whose result nobody wants.
    `examples` `(N, 1, 1, 1)`. `blocks` `(N, 1, 1, most)`: the numbers of the key blocks that a tile
    meets, -1 where it meets fewer. `columns` `(N, 1, 1, F)`: single keys that it looks at beside
    these blocks, -1 where there are fewer. `sizes` `(N + 1, 2)`: how many tiles from this one on
    are looked at together, which makes so many `steps`, and how many keys its blocks have. `slots`
    `(B, T)`: where the result of each query is, of N * b. `is_gpu`: what `on_gpu` gives.
    """

    queries: Tensor
    examples: Tensor
    blocks: Tensor
    columns: Tensor | None
    sizes: Tensor
    steps: Tensor
    slots: Tensor
    is_gpu: Tensor | int


def planned(part: Part, is_gpu: Tensor | int = 0) -> Plan:
    """The plan for the heads of `part`, which obey one rule.

    Flagged queries are put into tiles more, which look at all keys; flagged keys are columns.
    """
    rule, bound, block = part.rule, part.bound, part.tuning.block
    batch, queries, keys = map(tf.convert_to_tensor, bound.sizes)
    none, one = tf.constant(-1), tf.constant(1)  # (of each number a graph makes a node)
    largest = part.tuning.local_tile if part.is_local(rule) else part.tuning.wide_tile
    count = -(-queries // largest)
    tile = tf.maximum(-(-queries // tf.maximum(count, one)), one)  # as many in each
    blocks = -(-keys // block)
    offset = tf.reduce_min(bound.query_positions, 0)
    lengths = tf.cast(queries, offset.dtype), tf.cast(keys, offset.dtype)
    flagged = _flagged(part, *lengths, offset)
    of_grid = lengths, (tf.cast(tile, offset.dtype), block), offset, _ARRAYS, flagged
    possible, _ = bounds_of(rule, bound.leaf_inputs, *of_grid)
    apart, of_keys = (
        functools.reduce(tf.logical_or, of_side) if of_side else None
        for of_side in ([x for side, x in flagged.values() if side == y] for y in ("query", "key"))
    )
    possible = tf.broadcast_to(tf.cast(possible, tf.int32), [batch, count, blocks])
    rows = tf.range(count * tile)
    rows = tf.where(rows < queries, rows, none)  # of any example, or (B, ...)
    if apart is not None:
        rows = tf.where(tf.gather(apart, tf.maximum(rows, 0), axis=1), none, rows)
        apart = _places(apart)
        more = -(-tf.shape(apart)[1] // tile)
        apart = tf.pad(apart, [[0, 0], [0, more * tile - tf.shape(apart)[1]]], constant_values=-1)
        rows, count = tf.concat([rows, apart], 1), count + more
        rows = tf.broadcast_to(rows, [batch, count * tile])
        possible = tf.pad(possible, [[0, 0], [0, more], [0, 0]], constant_values=1)
    # What decides sizes and branches is int32, which TensorFlow computes on the host: a GPU is not
    # waited for. What is as large as tiles x keys is int64, which it computes there.
    tiles = batch * count
    possible = tf.reshape(possible, [tiles, one, one, blocks])
    counts, order = tf.math.top_k(tf.reduce_sum(possible, [1, 2, 3]), tiles)
    possible, examples = tf.gather(possible, order), tf.reshape(order // count, [-1, 1, 1, 1])
    rows = tf.reshape(rows, [-1, one, tile, one])
    rows = tf.gather(rows, order % count if apart is None else order)
    padded = tf.pad(counts, [[0, 1]])
    widths, most = tf.minimum(padded * block, keys), padded[0]
    first = tf.math.top_k(possible, most).indices
    first = tf.where(tf.range(most) < tf.reshape(counts, [-1, 1, 1, 1]), first, none)
    columns, all_widths = None, widths
    if of_keys is not None:
        of_keys = _places(of_keys)[:, None, None]
        shape = [batch, one, one, tf.shape(of_keys)[3]]
        of_keys = tf.gather(tf.broadcast_to(of_keys, shape), examples[:, 0, 0, 0])
        is_met = tf.gather(possible, tf.maximum(of_keys, 0) // block, batch_dims=3)
        columns = tf.cast(tf.where(is_met > 0, -1, of_keys), tf.int64)
        all_widths += tf.shape(columns)[3]
    # (One by one: 64 heads x 256 queries x 131,072 keys are 0 in 32 bits.)
    logits = tf.maximum(part.tuning.most_logits_of_a_step, is_gpu * _MOST_LOGITS_ON_GPU)
    fits = tf.maximum(logits // len(part.heads) // tile // tf.maximum(all_widths, one), one)
    # Known before the loop, since `tape.jacobian` maps no array that grows.
    steps, _ = tf.while_loop(
        lambda _, first: first < tiles,
        lambda steps, first: (steps + 1, first + fits[first]),
        (tf.constant(0), tf.constant(0)),
    )
    steps = tf.maximum(steps, one)  # (of no step the results have no shape)
    # Results in the order of examples and queries; those that nobody wants come last.
    numbers = tf.where(rows < 0, tf.int32.min, -(examples * queries + rows))
    slots = tf.math.top_k(tf.reshape(numbers, [-1]), batch * queries).indices
    slots = tf.reshape(slots, [batch, queries])
    rows, examples, first = (tf.cast(x, tf.int64) for x in (rows, examples, first))
    return Plan(rows, examples, first, columns, tf.stack([fits, widths], 1), steps, slots, is_gpu)


def _flagged(
    part: Part, queries: Tensor, keys: Tensor, offset: Tensor
) -> dict[MaskSpec, tuple[str, Mask]]:
    """The leaves that open whole columns ("key") or rows ("query"), and where, `(E, L)`.

    A pair that such a leaf alone allows, since it stands under `|` and under no `~`, has its key
    (query) there: `coverage` of single positions says so. Nowhere where too many are flagged.
    """
    rule, found = part.rule, {}
    for leaf in dict.fromkeys(leaves_under_or(rule)):
        sides = [(name, side) for name, kind in leaf.inputs.items() for side in kind.sides]
        if len(sides) != 1:
            continue
        ((name, side),) = sides
        values = getattr(part.bound.leaf_inputs[leaf].get(name), side, None)
        if values is None or values.dtype != tf.bool:
            continue
        axis, length = (0, queries) if side == "query" else (1, keys)
        each, one = across(tf.range(length)[None], axis)[0], offset[None, None]
        grid = Tiles(one, one + queries - 1, each, each)
        if axis == 0:
            grid = Tiles(each + offset, each + offset, one - one, one - one + keys - 1)
        number = tf.cast(across(values, axis), offset.dtype)
        spans = {name: Sides(*[Span(number, number)] * 2)}
        flags = leaf.coverage(grid, spans).certain & (number + each >= 0)
        flags = flags[:, 0] if axis else flags[:, :, 0]
        count = tf.reduce_max(tf.reduce_sum(tf.cast(flags, offset.dtype), 1))
        tuning = part.tuning
        few = (count <= tuning.most_flagged) & (count * tuning.one_flagged_in <= length)
        found[leaf] = side, flags & few
    return found


def _places(is_flagged: Mask) -> Tensor:
    """Where each row is true, `(E, most of a row)`, -1 where it has fewer."""
    numbers = tf.cast(is_flagged, tf.int32)
    counts = tf.reduce_sum(numbers, 1, keepdims=True)
    most = tf.maximum(tf.reduce_max(counts), 0)  # (of no example the least of all numbers)
    return tf.where(tf.range(most) < counts, tf.math.top_k(numbers, most).indices, -1)


@made_once
def _extremes(values: Tensor, size: Length, axis: int) -> list[Tensor]:
    if values.dtype == tf.bool:
        values = tf.cast(values, tf.int32)
    length = sizes(values, "int64")[1]
    # (The last value once more as often as the last block is short.)
    places = tf.minimum(tf.range(-(-length // size) * size), length - 1)
    places = tf.reshape(places, [-1, 1, size] if axis == 0 else [1, -1, size])
    blocks = tf.gather(values, places, axis=1)
    return [tf.reduce_min(blocks, 3), tf.reduce_max(blocks, 3)]


_ARRAYS = Arrays(
    lambda length, size, axis: tf.expand_dims(tf.range(0, length, size), 1 - axis),
    tf.minimum,
    _extremes,
)
