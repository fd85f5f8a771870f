"""Tiles on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention import tensorflow_graph
from keras_headmask.attention.parts import Part
from keras_headmask.attention.ranges import Ranges, ranges_of
from keras_headmask.attention.tensorflow_graph import (
    alive_or_0,
    computed_again,
    masked_logits,
    times,
    widened,
)
from keras_headmask.rules.evaluation import Cuts, allowed_tile

_DEAD = 1e30  # the log-sum of a row that sees nothing: exp(logit - _DEAD) is 0


@tf.autograph.experimental.do_not_convert
def attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value`."""
    return tensorflow_graph.shared(_attend, part, query, key, value)


def _attend(part: Part, query: Any, key: Any, value: Any) -> Any:
    part = part._replace(bound=widened(part.bound))

    def backward(*given: Any) -> tuple:
        query, key, value, upstream, context = given
        delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, T, H)
        of_tiles = part, query, key, value, upstream, delta
        d_query, log_sum = _backward_to_queries(*of_tiles)
        return d_query, *_backward_to_keys(*of_tiles, log_sum)

    return computed_again(functools.partial(_forward, part), backward, query, key, value)


def _forward(part: Part, query: Any, key: Any, value: Any) -> Any:
    key, value = heads_first(key), heads_first(value)

    def tile(visit: Visit) -> tuple:
        logits, alive = _logits(part, visit, visit.rows(query) * part.scale, visit.runs(key))
        probabilities = _dropped(part, visit, tf.nn.softmax(logits))
        return (alive_or_0(alive, tf.matmul(probabilities, visit.runs(value))),)

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4,))[0]


def _backward_to_queries(
    part: Part, query: Any, key: Any, value: Any, upstream: Any, delta: Any
) -> tuple:
    """The gradient of `query`, and the log of each row's sum of exponentials `(B, T, H)`."""
    key, value = heads_first(key), heads_first(value)

    def tile(visit: Visit) -> tuple:
        keys = visit.runs(key)
        logits, alive = _logits(part, visit, visit.rows(query) * part.scale, keys)
        probabilities = tf.nn.softmax(logits)
        # The largest probability is exp(its logit - log_sum).
        log_sum = tf.reduce_max(logits, -1) - tf.math.log(tf.reduce_max(probabilities, -1))
        d_probabilities = tf.matmul(visit.rows(upstream), visit.runs(value), transpose_b=True)
        d_probabilities = _dropped(part, visit, d_probabilities)
        d_logits = times(probabilities, d_probabilities - visit.rows(delta)[..., None])
        d_query = alive_or_0(alive, tf.matmul(d_logits, keys) * part.scale)
        if alive is not None:
            # (NaN or inf where logits overflow: hidden keys get nothing of that.)
            counts = tf.squeeze(alive, -1) & tf.math.is_finite(log_sum)
            log_sum = tf.where(counts, log_sum, _DEAD)
        return d_query, log_sum

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4, 3))


def _backward_to_keys(
    part: Part, query: Any, key: Any, value: Any, upstream: Any, delta: Any, log_sum: Any
) -> tuple:
    """The gradients of `key` and `value`: tiles of keys, each with the queries that see it."""
    query, upstream, delta, log_sum = map(heads_first, (query, upstream, delta, log_sum))

    def tile(visit: Visit) -> tuple:
        # Scaled as where `log_sum` was made: other roundings would tell in large logits.
        queries, d_context = visit.runs(query) * part.scale, visit.runs(upstream)
        logits, _ = _logits(part, visit, queries, visit.rows(key), whole_rows=False)
        probabilities = tf.exp(logits - visit.runs(log_sum)[..., None])
        d_probabilities = tf.matmul(d_context, visit.rows(value), transpose_b=True)
        d_probabilities = _dropped(part, visit, d_probabilities)
        d_logits = times(probabilities, d_probabilities - visit.runs(delta)[..., None])
        return (
            tf.matmul(d_logits, queries, transpose_a=True),
            tf.matmul(_dropped(part, visit, probabilities), d_context, transpose_a=True),
        )

    return _over_tiles(part, query, key, tile, by_key=True, ranks=(4, 4))


def _logits(part: Part, visit: "Visit", queries: Any, keys: Any, whole_rows: bool = True) -> tuple:
    """The logits of one tile, -inf where the rule hides, and which rows see something."""

    def plain() -> Any:
        return tf.matmul(queries, keys, transpose_b=True)

    def masked() -> tuple:
        allowed = allowed_tile(part.rule, part.bound, part.heads, visit.cuts)
        if visit.fresh is not None:
            allowed &= visit.fresh
        return masked_logits(plain(), allowed, whole_rows)

    if part.rule.constant:
        return plain(), None
    if visit.needs_mask is None:
        return masked()
    # The product stands in each branch, so that a branch may write over it.
    return tf.cond(visit.needs_mask, masked, lambda: (plain(), tf.ones([1, 1, 1, 1], tf.bool)))


def _dropped(part: Part, visit: "Visit", probabilities: Any) -> Any:
    return probabilities if part.dropout is None else part.dropout.apply(probabilities, visit.cuts)


def heads_first(tensor: Any) -> Any:
    """`(B, L, H, ...)` to `(B, H, L, ...)`."""
    return tf.transpose(tensor, (0, 2, 1, 3)[: tensor.shape.rank])


# ---------------------------------------------------------------- the loop


class Visit(NamedTuple):
    """One step of the loop: some positions along one axis, those to look at on the other.

    `rows` cuts a tensor `(B, L, H, ...)` and puts its heads first, `runs` one with its heads first
    already. `needs_mask` tells whether some pair may be hidden; `None`: it must be looked at.
    `fresh` says which of the pairs are not looked at twice; `None`: all.
    """

    rows: Callable[[Any], Any]
    runs: Callable[[Any], Any]
    cuts: Cuts
    needs_mask: Any = None
    fresh: Any = None


def _over_tiles(
    part: Part,
    query: Any,
    key: Any,
    tile: Callable[[Visit], tuple],
    by_key: bool,
    ranks: tuple[int, ...],
) -> tuple:
    """Run `tile` over the tiles of queries (or of keys) and put its results together.

    `tile` returns tensors `(batch, H, positions, ...)`; the results are `(B, L, H, ...)`.
    """
    batch = tf.shape(query)[0]
    ranges = ranges_of(part, by_key, batch)
    length = tf.shape(part.bound.key_positions if by_key else part.bound.query_positions)[0]
    tiles = -(-length // part.tile)
    # Where the ranges differ between examples, each example has its own steps.
    alone = ranges.of_examples
    examples = batch if alone else tf.constant(1)

    def tile_step(i: Any) -> tuple:
        example, number = i // tiles, i % tiles
        start, stop = number * part.tile, tf.minimum((number + 1) * part.tile, length)
        return tile(_visit(ranges, by_key, example, number, start, stop))

    flat = _loop(examples * tiles, tile_step, ranks, query.dtype)
    if ranges.rows is not None:  # they see what their tiles did not look at
        rows = _loop(examples, lambda i: tile(_visit_of_all(ranges, by_key, i)), ranks, query.dtype)
        where = (ranges.rows.examples * length + ranges.rows.positions)[:, None]
        flat = [tf.tensor_scatter_nd_update(x, where, r) for x, r in zip(flat, rows, strict=True)]
    if alone:  # (B * L, 1, H, ...), else (L, B, H, ...)
        shapes = [tf.concat([[batch, length], tf.shape(x)[2:]], 0) for x in flat]
        return tuple(tf.reshape(x, shape) for x, shape in zip(flat, shapes, strict=True))
    return tuple(tf.transpose(x, (1, 0, 2, 3)[:rank]) for x, rank in zip(flat, ranks, strict=True))


def _loop(
    steps: Any, step: Callable[[Any], tuple], ranks: tuple[int, ...], dtype: Any
) -> list[Any]:
    """The results of all steps, `(batch, H, positions, ...)` each, joined: positions first."""

    def body(i: Any, arrays: tuple) -> tuple:
        written = []
        for array, x, rank in zip(arrays, step(i), ranks, strict=True):
            # `concat` joins along the first axis, tiles of any length.
            written.append(array.write(i, tf.transpose(x, (2, 0, 1, 3)[:rank])))
        return i + 1, tuple(written)

    arrays = tuple(
        tf.TensorArray(dtype, size=steps, infer_shape=False, element_shape=[None] * rank)
        for rank in ranks
    )
    _, arrays = tf.while_loop(
        lambda i, _: i < steps, body, (tf.constant(0), arrays), parallel_iterations=10
    )
    return [array.concat() for array in arrays]


def _visit(ranges: Ranges, by_key: bool, example: Any, number: Any, start: Any, stop: Any) -> Visit:
    """A tile of rows, with its runs and the flagged positions of the other axis."""
    r = ranges.runs[example, number]
    edges = [(r[i], r[i + 1]) for i in range(0, ranges.runs.shape[-1], 2)]
    flagged = fresh = None
    if ranges.others is not None:
        flagged = ranges.others.of(example)
        seen = tf.reduce_any([(flagged >= a) & (flagged < b) for a, b in edges], 0)
        run_length = tf.add_n([b - a for a, b in edges])
        fresh = tf.concat([~seen, tf.ones([run_length], tf.bool)], 0)
        fresh = fresh[:, None] if by_key else fresh

    def rows(tensor: Any, axis: int) -> Any:
        return _slice(tensor, axis, start, stop)

    def runs(tensor: Any, axis: int) -> Any:
        pieces = [] if flagged is None else [tf.gather(tensor, flagged, axis=axis)]
        pieces += [_slice(tensor, axis, a, b) for a, b in edges]
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis)

    needs_mask = None
    if ranges.needs_mask is not None:
        needs_mask = ranges.needs_mask[example, number]
    return _as_visit(ranges, by_key, example, rows, runs)._replace(
        needs_mask=needs_mask, fresh=fresh
    )


def _visit_of_all(ranges: Ranges, by_key: bool, example: Any) -> Visit:
    """The flagged rows of one example, with all positions of the other axis."""
    positions = ranges.rows.of(example)

    def rows(tensor: Any, axis: int) -> Any:
        return tf.gather(tensor, positions, axis=axis)

    return _as_visit(ranges, by_key, example, rows, lambda tensor, axis: tensor)


def _as_visit(ranges: Ranges, by_key: bool, example: Any, rows: Callable, runs: Callable) -> Visit:
    def of_batch(tensor: Any, axis: int = 0) -> Any:
        return _pick(tensor, example) if ranges.of_examples else tensor

    return Visit(
        lambda tensor: heads_first(rows(of_batch(tensor), 1)),
        lambda tensor: runs(of_batch(tensor), 2),
        Cuts(*((runs, rows) if by_key else (rows, runs)), of_batch),
    )


def _slice(tensor: Any, axis: int, start: Any, stop: Any) -> Any:
    return tensor[(slice(None),) * axis + (slice(start, stop),)]


def _pick(tensor: Any, example: Any) -> Any:
    """One example, the batch axis kept; a batch axis of size 1 serves every example."""
    if tensor.shape[0] == 1:
        return tensor
    example = tf.where(tf.equal(tf.shape(tensor)[0], 1), 0, example)
    return tensor[example : example + 1]
