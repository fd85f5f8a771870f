"""The tiled way on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_headmask import coverage
from keras_headmask.evaluation import Bound, Cuts, allowed_tile
from keras_headmask.leaves import Full
from keras_headmask.specs import MaskSpec, Sides, Span, Tiles

_BLOCK = 32  # positions that are kept or skipped together, along the other axis than the tile's
_HIDDEN = -1e9  # the most that a hidden score may be, so that none is too large to be hidden
_DEAD = 1e30  # the log-sum of a row that sees nothing: exp(score - _DEAD) is 0


class Part(NamedTuple):
    """The heads that obey one rule, its mask inputs, and how many positions make a tile."""

    rule: MaskSpec
    heads: tuple[int, ...]
    bound: Bound
    tile: int


def attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    """The context `(B, H, T, Dv)` for `query` `(B, H, T, D)`, already scaled, `key` and `value`."""
    part = part._replace(bound=_widened(part.bound))

    @tf.custom_gradient
    def attention(query: Any, key: Any, value: Any) -> Any:
        context = _forward(part, query, key, value)

        def gradient(upstream: Any) -> Any:
            delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, H, T)
            d_query, log_sum = _backward_to_queries(part, query, key, value, upstream, delta)
            d_key, d_value = _backward_to_keys(part, query, key, value, upstream, delta, log_sum)
            return d_query, d_key, d_value

        return context, gradient

    return attention(query, key, value)


def _widened(bound: Bound) -> Bound:
    """Whole masks, widened to all queries and keys along the axes of a size not known yet.

    An axis of size 1 is not cut into tiles, and here only the run tells whether it is 1.
    """

    def widen(value: Any) -> Any:
        if isinstance(value, Sides):
            return value
        if value.shape[2] is None:
            value = value & (bound.query_positions >= bound.query_positions)[:, None]
        if value.shape[3] is None:
            value = value & (bound.key_positions >= bound.key_positions)
        return value

    inputs = {
        leaf: {name: widen(value) for name, value in values.items()}
        for leaf, values in bound.leaf_inputs.items()
    }
    return bound._replace(leaf_inputs=inputs)


def _forward(part: Part, query: Any, key: Any, value: Any) -> Any:
    def tile(visit: Visit) -> tuple:
        scores, alive = _scores(part, visit, visit.row(query, 2), visit.runs(key, 2))
        context = tf.matmul(tf.nn.softmax(scores), visit.runs(value, 2))
        return (_alive_or_0(alive, context),)

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4,))[0]


def _backward_to_queries(
    part: Part, query: Any, key: Any, value: Any, upstream: Any, delta: Any
) -> tuple:
    """The gradient of `query`, and the log of each row's sum of exponentials `(B, H, T)`."""

    def tile(visit: Visit) -> tuple:
        keys = visit.runs(key, 2)
        scores, alive = _scores(part, visit, visit.row(query, 2), keys)
        probabilities = tf.nn.softmax(scores)
        # The largest probability is exp(its score - log_sum).
        log_sum = tf.reduce_max(scores, -1) - tf.math.log(tf.reduce_max(probabilities, -1))
        d_scores = _d_scores(
            probabilities, visit.row(upstream, 2), visit.runs(value, 2), visit.row(delta, 2)
        )
        d_query = _alive_or_0(alive, tf.matmul(d_scores, keys))
        if alive is not None:
            log_sum = tf.where(tf.squeeze(alive, -1), log_sum, _DEAD)
        return d_query, log_sum

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4, 3))


def _backward_to_keys(
    part: Part, query: Any, key: Any, value: Any, upstream: Any, delta: Any, log_sum: Any
) -> tuple:
    """The gradients of `key` and `value`: tiles of keys, each with the queries that see it."""

    def tile(visit: Visit) -> tuple:
        queries, d_context = visit.runs(query, 2), visit.runs(upstream, 2)
        scores, _ = _scores(part, visit, queries, visit.row(key, 2))
        probabilities = tf.exp(scores - visit.runs(log_sum, 2)[..., None])
        d_scores = _d_scores(probabilities, d_context, visit.row(value, 2), visit.runs(delta, 2))
        return (
            tf.matmul(d_scores, queries, transpose_a=True),
            tf.matmul(probabilities, d_context, transpose_a=True),
        )

    return _over_tiles(part, query, key, tile, by_key=True, ranks=(4, 4))


def _scores(part: Part, visit: "Visit", queries: Any, keys: Any) -> tuple:
    """The scores of one tile, -1e9 where the rule hides, and which rows see something."""
    scores = tf.matmul(queries, keys, transpose_b=True)
    if part.rule == Full():
        return scores, None
    allowed = allowed_tile(part.rule, part.bound, part.heads, visit.cuts)
    # The least of two is faster than a choice between them, which broadcasts slowly.
    bound = tf.where(allowed, tf.constant(np.inf, scores.dtype), tf.constant(_HIDDEN, scores.dtype))
    return tf.minimum(scores, bound), tf.reduce_any(allowed, axis=-1, keepdims=True)


def _d_scores(probabilities: Any, d_context: Any, values: Any, delta: Any) -> Any:
    return probabilities * (tf.matmul(d_context, values, transpose_b=True) - delta[..., None])


def _alive_or_0(alive: Any, rows: Any) -> Any:
    return rows if alive is None else tf.where(alive, rows, tf.zeros_like(rows))


# ---------------------------------------------------------------- the loop


class Visit(NamedTuple):
    """One step of the loop: a tile of positions along one axis, the runs to look at on the other.

    Both are functions of a tensor and its axis, as are `cuts`, which cut the mask inputs.
    """

    row: Callable[[Any, int], Any]
    runs: Callable[[Any, int], Any]
    cuts: Cuts


def _over_tiles(
    part: Part,
    query: Any,
    key: Any,
    tile: Callable[[Visit], tuple],
    by_key: bool,
    ranks: tuple[int, ...],
) -> tuple:
    """Run `tile` over the tiles of queries (or of keys) and put its results together.

    `tile` returns tensors `(batch, H, positions, ...)`; so are the results, over all positions.
    """
    batch = tf.shape(query)[0]
    length = tf.shape(key if by_key else query)[2]
    ranges = _ranges(part, tf.shape(query)[2], tf.shape(key)[2], by_key)
    tiles = -(-length // part.tile)
    # Where the ranges differ between examples, each example has its own steps.
    alone = ranges.shape[0] != 1
    examples = batch if alone else 1

    def step(i: Any, results: tuple) -> tuple:
        example, number = i // tiles, i % tiles
        start, stop = number * part.tile, tf.minimum((number + 1) * part.tile, length)
        r = ranges[tf.minimum(example, tf.shape(ranges)[0] - 1), number]

        def of_batch(tensor: Any, axis: int) -> Any:
            # A mask input with batch size 1 serves all examples.
            return tensor if not alone else _pick(tensor, example)

        def row(tensor: Any, axis: int) -> Any:
            return _slice(tensor, axis, start, stop)

        def runs(tensor: Any, axis: int) -> Any:
            first = _slice(tensor, axis, r[0], r[1])
            if ranges.shape[-1] == 2:
                return first
            return tf.concat([first, _slice(tensor, axis, r[2], r[3])], axis)

        cuts = Cuts(*((runs, row) if by_key else (row, runs)), of_batch)
        visit = Visit(
            lambda tensor, axis: row(of_batch(tensor, 0), axis),
            lambda tensor, axis: runs(of_batch(tensor, 0), axis),
            cuts,
        )
        written = []
        for array, x, rank in zip(results, tile(visit), ranks, strict=True):
            # Positions first: `concat` joins along the first axis, tiles of any length.
            order = (2, 0, 1, 3)[:rank]
            written.append(array.write(i, tf.transpose(x, order)))
        return i + 1, tuple(written)

    total = examples * tiles
    arrays = tuple(
        tf.TensorArray(query.dtype, size=total, infer_shape=False, element_shape=[None] * rank)
        for rank in ranks
    )
    _, arrays = tf.while_loop(
        lambda i, _: i < total, step, (tf.constant(0), arrays), parallel_iterations=10
    )
    joined = []
    for array, rank in zip(arrays, ranks, strict=True):
        flat = array.concat()  # (length, B, H, ...), or (B * length, 1, H, ...)
        rest = tf.shape(flat)[2:]
        if alone:
            flat = tf.reshape(flat, tf.concat([[batch, length], rest], 0))
            joined.append(tf.transpose(flat, (0, 2, 1, 3)[:rank]))
        else:
            joined.append(tf.transpose(flat, (1, 2, 0, 3)[:rank]))
    return tuple(joined)


def _slice(tensor: Any, axis: int, start: Any, stop: Any) -> Any:
    return tensor[(slice(None),) * axis + (slice(start, stop),)]


def _pick(tensor: Any, example: Any) -> Any:
    """One example, the batch axis kept; a batch axis of size 1 serves every example."""
    if tensor.shape[0] == 1:
        return tensor
    example = tf.minimum(example, tf.shape(tensor)[0] - 1)
    return tensor[example : example + 1]


# ---------------------------------------------------------------- what to visit


def _ranges(part: Part, queries: Any, keys: Any, by_key: bool) -> Any:
    """For each tile the run or two runs to look at: `(B or 1, tiles, 2 or 4)`, starts and stops.

    Two runs where the rule may leave a gap (sinks and a window); what lies between more than two is
    looked at too, and masked.
    """
    size = {"query": _BLOCK if by_key else part.tile, "key": part.tile if by_key else _BLOCK}
    query_first = tf.range(0, queries, size["query"])
    key_first = tf.range(0, keys, size["key"])
    query_last = tf.minimum(query_first + size["query"], queries) - 1
    key_last = tf.minimum(key_first + size["key"], keys) - 1
    offset = part.bound.query_positions[0]
    tiles = Tiles(
        (query_first + offset)[:, None],
        (query_last + offset)[:, None],
        key_first[None],
        key_last[None],
    )
    possible = coverage.bounds(part.rule, tiles, _spans(part.bound, size)).possible
    full = [tf.shape(query_first)[0], tf.shape(key_first)[0]]
    if possible.shape.rank == 2:
        possible = tf.broadcast_to(possible, full)[None]
    else:
        possible = tf.broadcast_to(possible, [tf.shape(possible)[0], *full])
    if by_key:
        possible = tf.transpose(possible, (0, 2, 1))
    other, block = (queries, size["query"]) if by_key else (keys, size["key"])
    return tf.minimum(_runs(possible, _may_leave_gaps(part.rule)) * block, other)


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


def _may_leave_gaps(rule: MaskSpec) -> bool:
    """Only an interval rule has one run: what `|` and `~` make may have more."""
    if rule.kind in ("or", "not"):
        return True
    return any(_may_leave_gaps(child) for child in rule.children)


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
