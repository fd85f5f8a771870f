"""Tiles on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention.parts import Part, cut
from keras_headmask.attention.ranges import ranges_of
from keras_headmask.attention.tensorflow_graph import (
    alive_or_0,
    computed_again,
    logits_of,
    product_of,
    shared,
    sum_for_keys,
    times,
)
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import WHOLE, Cuts

_DEAD = 1e30  # the log-sum of a fully masked row: exp(logit - _DEAD) is 0


@shared
def attend(part: Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk.
    """
    product = functools.partial(product_of, sharing=part.sharing)
    for_keys = functools.partial(sum_for_keys, sharing=part.sharing)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = _heads_first(key), _heads_first(value)

        def tile(visit: Visit) -> tuple:
            logits, alive = _logits(part, visit, visit.rows(query) * part.scale, visit.runs(key))
            probabilities = part.dropped(tf.nn.softmax(logits), visit.cuts)
            return (alive_or_0(alive, product(probabilities, visit.runs(value))),)

        return _over_tiles(part, query, tile, False, 4)[0]

    def backward(
        query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, context: Tensor
    ) -> tuple:
        delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, T, H)
        keys_first, values_first = _heads_first(key), _heads_first(value)

        def to_queries(visit: Visit) -> tuple:
            """Their gradient, and the log of each row's sum of exponentials `(B, H, T)`."""
            keys = visit.runs(keys_first)
            logits, alive = _logits(part, visit, visit.rows(query) * part.scale, keys)
            probabilities = tf.nn.softmax(logits)
            # The largest probability is exp(its logit - log_sum).
            log_sum = tf.reduce_max(logits, -1) - tf.math.log(tf.reduce_max(probabilities, -1))
            values = visit.runs(values_first)
            d_probabilities = product(visit.rows(upstream), values, transpose_b=True)
            d_probabilities = part.dropped(d_probabilities, visit.cuts)
            d_logits = times(probabilities, d_probabilities - visit.rows(delta)[..., None])
            d_query = alive_or_0(alive, product(d_logits, keys) * part.scale)
            if alive is not None:
                # (NaN or inf where logits overflow, which hidden keys must not get.)
                counts = tf.squeeze(alive, -1) & tf.math.is_finite(log_sum)
                log_sum = tf.where(counts, log_sum, _DEAD)
            return d_query, log_sum

        d_query, log_sum = _over_tiles(part, query, to_queries, False, 4, 3)
        of_queries = tuple(map(_heads_first, (query, upstream, delta, log_sum)))

        def to_keys(visit: Visit) -> tuple:
            """Tiles of keys and values, each with the queries that see it."""
            queries, d_context, of_delta, sums = map(visit.runs, of_queries)
            # Scaled as where `log_sum` was made: other roundings would show in large logits.
            queries = queries * part.scale
            logits, _ = _logits(part, visit, queries, visit.rows(key), whole_rows=False)
            probabilities = tf.exp(logits - sums[..., None])
            d_probabilities = product(d_context, visit.rows(value), transpose_b=True)
            d_probabilities = part.dropped(d_probabilities, visit.cuts)
            d_logits = times(probabilities, d_probabilities - of_delta[..., None])
            return (
                for_keys(d_logits, queries),
                for_keys(part.dropped(probabilities, visit.cuts), d_context),
            )

        return d_query, *_over_tiles(part, query, to_keys, True, 4, 4)

    return computed_again(forward, backward, query, key, value)


def _logits(
    part: Part, visit: "Visit", queries: Tensor, keys: Tensor, whole_rows: bool = True
) -> tuple[Tensor, Mask | None]:
    """As `logits_of`, of one tile."""

    def masked() -> tuple[Tensor, Mask | None]:
        allowed = allowed_tile(part.rule, part.bound, part.heads, visit.cuts)
        if visit.fresh is not None:
            allowed &= visit.fresh
        return logits(queries, keys, allowed, whole_rows)

    def plain() -> tuple[Tensor, Mask]:
        return logits(queries, keys, None)[0], tf.ones([1, 1, 1, 1], tf.bool)

    logits = functools.partial(logits_of, sharing=part.sharing)
    if part.rule.constant:
        return logits(queries, keys, None)
    # The product stands in each branch, so that a branch may write over it.
    return masked() if visit.needs_mask is None else tf.cond(visit.needs_mask, masked, plain)


def _heads_first(tensor: Tensor) -> Tensor:
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
    part: Part, query: Tensor, tile: Callable[[Visit], tuple], by_key: bool, *ranks: int
) -> tuple:
    """Run `tile` over the tiles of queries (or of keys) and put its results together.

    `tile` returns tensors `(batch, H, positions, ...)`; the results are `(B, L, H, ...)`.
    """
    batch, size = tf.shape(query)[0], part.tile
    found = ranges_of(part.rule, part.bound, part.tuning, size, by_key, batch)
    length = tf.shape(part.bound.key_positions if by_key else part.bound.query_positions)[0]
    tiles = -(-length // size)
    # Where ranges differ between examples, each example has its own steps.
    examples = batch if found.of_examples else tf.constant(1)

    def visited(example: Tensor, rows: Callable, runs: Callable, *rest: Any) -> tuple:
        """`tile` of what `rows` and `runs` cut out of a tensor along an axis."""

        def of_batch(tensor: Tensor, axis: int = 0) -> Tensor:
            """One example, the batch axis kept; a batch axis of size 1 serves every example."""
            if not found.of_examples or tensor.shape[0] == 1:
                return tensor
            place = tf.where(tf.equal(tf.shape(tensor)[0], 1), 0, example)
            return tensor[place : place + 1]

        visit = Visit(
            lambda tensor: _heads_first(rows(of_batch(tensor), 1)),
            lambda tensor: runs(of_batch(tensor), 2),
            Cuts(*((runs, rows) if by_key else (rows, runs)), of_batch),
            *rest,
        )
        return tile(visit)

    def of_tile(i: Tensor) -> tuple:
        """Its runs, and the flagged positions of the other axis."""
        example, number = i // tiles, i % tiles
        start, stop = number * size, tf.minimum((number + 1) * size, length)
        r = found.runs[example, number]
        edges = [(r[i], r[i + 1]) for i in range(0, found.runs.shape[-1], 2)]
        flagged = fresh = None
        if found.others is not None:
            flagged = found.others.of(example)
            seen = tf.reduce_any([(flagged >= a) & (flagged < b) for a, b in edges], 0)
            run_length = tf.add_n([b - a for a, b in edges])
            fresh = tf.concat([~seen, tf.ones([run_length], tf.bool)], 0)
            fresh = fresh[:, None] if by_key else fresh

        def runs(tensor: Tensor, axis: int) -> Tensor:
            pieces = [] if flagged is None else [tf.gather(tensor, flagged, axis=axis)]
            pieces += [cut(tensor, axis, a, b) for a, b in edges]
            return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis)

        needs_mask = None if found.needs_mask is None else found.needs_mask[example, number]
        rows = functools.partial(cut, start=start, stop=stop)
        return visited(example, rows, runs, needs_mask, fresh)

    flat = _loop(examples * tiles, of_tile, ranks, query.dtype)
    if (flags := found.rows) is not None:  # they see what their tiles did not look at

        def of_flagged(example: Tensor) -> tuple:
            positions = flags.of(example)
            return visited(example, lambda x, axis: tf.gather(x, positions, axis=axis), WHOLE.keys)

        rows = _loop(examples, of_flagged, ranks, query.dtype)
        where = (flags.examples * length + flags.positions)[:, None]
        flat = [tf.tensor_scatter_nd_update(x, where, r) for x, r in zip(flat, rows, strict=True)]
    if found.of_examples:  # (B * L, 1, H, ...), else (L, B, H, ...)
        shapes = [tf.concat([[batch, length], tf.shape(x)[2:]], 0) for x in flat]
        return tuple(tf.reshape(x, shape) for x, shape in zip(flat, shapes, strict=True))
    if query.shape[0] == 1:  # a reshape, where a transpose would copy
        return tuple(x[None, :, 0] for x in flat)
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
