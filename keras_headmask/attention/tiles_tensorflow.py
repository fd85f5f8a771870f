"""Tiles on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention import ranges
from keras_headmask.attention.parts import Part, cut
from keras_headmask.attention.ranges import Ranges
from keras_headmask.attention.tensorflow_graph import (
    alive_or_0,
    computed_again,
    masked_logits,
    shared,
    times,
)
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import coverage
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import WHOLE, Cuts

_DEAD = 1e30  # the log-sum of a fully masked row: exp(logit - _DEAD) is 0


@shared
def attend(part: Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value`."""

    def backward(*given: Tensor) -> tuple:
        query, key, value, upstream, context = given
        delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, T, H)
        of_tiles = part, query, key, value, upstream, delta
        d_query, log_sum = _backward_to_queries(*of_tiles)
        return d_query, *_backward_to_keys(*of_tiles, log_sum)

    return computed_again(functools.partial(_forward, part), backward, query, key, value)


def _forward(part: Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = heads_first(key), heads_first(value)

    def tile(visit: Visit) -> tuple:
        logits, alive = _logits(part, visit, visit.rows(query) * part.scale, visit.runs(key))
        probabilities = _dropped(part, visit, tf.nn.softmax(logits))
        return (alive_or_0(alive, tf.matmul(probabilities, visit.runs(value))),)

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4,))[0]


def _backward_to_queries(
    part: Part, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, delta: Tensor
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
            # (NaN or inf where logits overflow, which hidden keys must not get.)
            counts = tf.squeeze(alive, -1) & tf.math.is_finite(log_sum)
            log_sum = tf.where(counts, log_sum, _DEAD)
        return d_query, log_sum

    return _over_tiles(part, query, key, tile, by_key=False, ranks=(4, 3))


def _backward_to_keys(part: Part, *operands: Tensor) -> tuple:
    """The gradients of `key` and `value`: tiles of keys, each with the queries that see it."""
    query, key, value, upstream, delta, log_sum = operands
    query, upstream, delta, log_sum = map(heads_first, (query, upstream, delta, log_sum))

    def tile(visit: Visit) -> tuple:
        # Scaled as where `log_sum` was made: other roundings would show in large logits.
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


def _logits(
    part: Part, visit: "Visit", queries: Tensor, keys: Tensor, whole_rows: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The logits of one tile, -inf where the rule hides, and which rows see something."""

    def plain() -> Tensor:
        return tf.matmul(queries, keys, transpose_b=True)

    def masked() -> tuple[Tensor, Tensor]:
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


def _dropped(part: Part, visit: "Visit", probabilities: Tensor) -> Tensor:
    return probabilities if part.dropout is None else part.dropout.apply(probabilities, visit.cuts)


def heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, ...)` to `(B, H, L, ...)`."""
    return tf.transpose(tensor, (0, 2, 1, 3)[: tensor.shape.rank])


# --- The loop ------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """One step of the loop: some positions along one axis, and those to look at on the other.

    `rows` cuts a tensor `(B, L, H, ...)` and puts its heads first, `runs` one with its heads first
    already. `needs_mask`: whether some pair may be hidden; `None`: it must be masked. `fresh`: the
    pairs that are not looked at twice; `None`: all.
    """

    rows: Callable[[Tensor], Tensor]
    runs: Callable[[Tensor], Tensor]
    cuts: Cuts
    needs_mask: Tensor | None = None
    fresh: Mask | None = None


def _over_tiles(
    part: Part,
    query: Tensor,
    key: Tensor,
    tile: Callable[[Visit], tuple],
    by_key: bool,
    ranks: tuple[int, ...],
) -> tuple:
    """Run `tile` over the tiles of queries (or of keys) and put its results together.

    `tile` returns tensors `(batch, H, positions, ...)`; the results are `(B, L, H, ...)`.
    """
    batch = tf.shape(query)[0]
    found = ranges_of(part, by_key, batch)
    length = tf.shape(part.bound.key_positions if by_key else part.bound.query_positions)[0]
    tiles = -(-length // part.tile)
    # Where ranges differ between examples, each example has its own steps.
    examples = batch if found.of_examples else tf.constant(1)

    def of_tile(i: Tensor) -> tuple:
        example, number = i // tiles, i % tiles
        start, stop = number * part.tile, tf.minimum((number + 1) * part.tile, length)
        return tile(_visit(found, by_key, example, number, start, stop))

    def of_flagged(example: Tensor) -> tuple:
        positions = found.rows.of(example)

        def rows(tensor: Tensor, axis: int) -> Tensor:
            return tf.gather(tensor, positions, axis=axis)

        return tile(_visit_by(found, by_key, example, rows, WHOLE.keys))

    flat = _loop(examples * tiles, of_tile, ranks, query.dtype)
    if found.rows is not None:  # they see what their tiles did not look at
        rows = _loop(examples, of_flagged, ranks, query.dtype)
        where = (found.rows.examples * length + found.rows.positions)[:, None]
        flat = [tf.tensor_scatter_nd_update(x, where, r) for x, r in zip(flat, rows, strict=True)]
    if found.of_examples:  # (B * L, 1, H, ...), else (L, B, H, ...)
        shapes = [tf.concat([[batch, length], tf.shape(x)[2:]], 0) for x in flat]
        return tuple(tf.reshape(x, shape) for x, shape in zip(flat, shapes, strict=True))
    return tuple(tf.transpose(x, (1, 0, 2, 3)[:rank]) for x, rank in zip(flat, ranks, strict=True))


def _loop(
    steps: Tensor, step: Callable[[Tensor], tuple], ranks: tuple[int, ...], dtype: Any
) -> list[Tensor]:
    """The results of all steps, `(batch, H, positions, ...)` each, joined: positions first."""

    def body(i: Tensor, arrays: tuple) -> tuple:
        # `concat` joins along the first axis, tiles of any length.
        written = [
            array.write(i, tf.transpose(x, (2, 0, 1, 3)[:rank]))
            for array, x, rank in zip(arrays, step(i), ranks, strict=True)
        ]
        return i + 1, tuple(written)

    arrays = tuple(
        tf.TensorArray(dtype, size=steps, infer_shape=False, element_shape=[None] * rank)
        for rank in ranks
    )
    _, arrays = tf.while_loop(
        lambda i, _: i < steps, body, (tf.constant(0), arrays), parallel_iterations=10
    )
    return [array.concat() for array in arrays]


def _visit(
    found: Ranges, by_key: bool, example: Tensor, number: Tensor, start: Tensor, stop: Tensor
) -> Visit:
    """A tile of rows, with its runs and the flagged positions of the other axis."""
    r = found.runs[example, number]
    edges = [(r[i], r[i + 1]) for i in range(0, found.runs.shape[-1], 2)]
    flagged = fresh = None
    if found.others is not None:
        flagged = found.others.of(example)
        seen = tf.reduce_any([(flagged >= a) & (flagged < b) for a, b in edges], 0)
        run_length = tf.add_n([b - a for a, b in edges])
        fresh = tf.concat([~seen, tf.ones([run_length], tf.bool)], 0)
        fresh = fresh[:, None] if by_key else fresh

    def rows(tensor: Tensor, axis: int) -> Tensor:
        return cut(tensor, axis, start, stop)

    def runs(tensor: Tensor, axis: int) -> Tensor:
        pieces = [] if flagged is None else [tf.gather(tensor, flagged, axis=axis)]
        pieces += [cut(tensor, axis, a, b) for a, b in edges]
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis)

    needs_mask = None if found.needs_mask is None else found.needs_mask[example, number]
    visit = _visit_by(found, by_key, example, rows, runs)
    return visit._replace(needs_mask=needs_mask, fresh=fresh)


def _visit_by(
    found: Ranges, by_key: bool, example: Tensor, rows: Callable, runs: Callable
) -> Visit:
    """`rows` and `runs` cut a tensor along an axis."""

    def of_batch(tensor: Tensor, axis: int = 0) -> Tensor:
        """One example, the batch axis kept; a batch axis of size 1 serves every example."""
        if not found.of_examples or tensor.shape[0] == 1:
            return tensor
        place = tf.where(tf.equal(tf.shape(tensor)[0], 1), 0, example)
        return tensor[place : place + 1]

    return Visit(
        lambda tensor: heads_first(rows(of_batch(tensor), 1)),
        lambda tensor: runs(of_batch(tensor), 2),
        Cuts(*((runs, rows) if by_key else (rows, runs)), of_batch),
    )


def ranges_of(part: Part, by_key: bool, batch: Length) -> Ranges:
    """What each step of the loop over queries (or over keys) looks at."""
    bound = part.bound
    queries, keys = tf.shape(bound.query_positions)[0], tf.shape(bound.key_positions)[0]
    block = part.tuning.tensorflow_block
    size = {"query": block if by_key else part.tile, "key": part.tile if by_key else block}
    few_queries, flagged_queries = ranges.flags(part.rule, bound, "query", part.tuning)
    few_keys, flagged_keys = ranges.flags(part.rule, bound, "key", part.tuning)
    taken_out = few_queries | few_keys
    tiles = ranges.tiles(bound, queries, keys, size)
    full = [tf.shape(tiles.query_first)[0], tf.shape(tiles.key_first)[1]]
    bounds = coverage.bounds(part.rule, tiles, ranges.spans(bound, size, taken_out))
    possible, certain = (ranges.over_all(x, full, by_key) for x in bounds)
    blocks = ranges.runs(possible, part.rule.may_leave_gaps(list(taken_out)))
    runs = tf.minimum(blocks * block, queries if by_key else keys)
    needs_mask = None if taken_out or part.is_local else ranges.needs_mask(blocks, certain)
    of_examples = any(x is not None and x.shape[0] != 1 for x in (runs, needs_mask))
    batch = batch if of_examples else 1
    if of_examples:  # it may still be 1 when run
        runs = tf.broadcast_to(runs, [batch, *tf.unstack(tf.shape(runs)[1:])])
        if needs_mask is not None:
            needs_mask = tf.broadcast_to(needs_mask, [batch, tf.shape(runs)[1]])
    rows, others = (ranges.positions(x, batch) for x in (flagged_queries, flagged_keys))
    rows, others = (others, rows) if by_key else (rows, others)
    return Ranges(runs, needs_mask, of_examples, rows, others)
