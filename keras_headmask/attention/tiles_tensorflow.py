"""Tiles on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask._keras import checks_numerics
from keras_headmask.attention import finite
from keras_headmask.attention.changes import Changes
from keras_headmask.attention.changes_tensorflow import Gathered
from keras_headmask.attention.parts import Part, cut
from keras_headmask.attention.ranges import ranges_of
from keras_headmask.attention.tensorflow_graph import (
    Row,
    alive_or_0,
    computed_again,
    empty,
    logits_of,
    looped,
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
def attend(part: Part, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `changes` are the tensors of `part.changes`.
    """
    product = functools.partial(product_of, sharing=part.sharing)
    for_keys = functools.partial(sum_for_keys, sharing=part.sharing)

    # Keys that query heads share are few: cut out of a tile, they cost less than a copy of all.
    are_shared = part.sharing != 1

    def forward(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> Tensor:
        key, value = (x if are_shared else _heads_first(x) for x in (key, value))
        changes = part.changes.with_tensors(tensors)

        def tile(visit: Visit) -> tuple:
            queries = visit.rows(query) * part.scale
            keys, values = (visit.runs(x, not are_shared) for x in (key, value))
            logits, alive, _ = _logits(part, changes, visit, queries, keys)
            is_plain = changes.sinks is None
            probabilities = tf.nn.softmax(logits) if is_plain else _softmax(changes, logits)[0]
            probabilities = part.dropped(probabilities, visit.cuts)
            return (alive_or_0(alive, product(probabilities, values)),)

        return _over_tiles(part, query, tile, False, Row.like(query, value))[0]

    def backward(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple:
        *tensors, upstream, context = rest
        changes = part.changes.with_tensors(tensors)
        gathered = Gathered(part, changes)
        delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, T, H)
        of_keys = [x if are_shared else _heads_first(x) for x in (key, value)]

        def to_queries(visit: Visit) -> tuple:
            """Their gradient, and the log of each row's sum of exponentials `(B, H, T)`."""
            keys, values = (visit.runs(x, not are_shared) for x in of_keys)
            queries = visit.rows(query) * part.scale
            logits, alive, slope = _logits(part, changes, visit, queries, keys)
            probabilities, log_sum = _softmax(changes, logits)
            d_probabilities = product(visit.rows(upstream), values, transpose_b=True)
            d_probabilities = part.dropped(d_probabilities, visit.cuts)
            d_logits = times(probabilities, d_probabilities - visit.rows(delta)[..., None])
            more = []
            if gathered.rows_at_queries:  # a row that is NaN leaves hidden pairs alone
                hidden = tf.equal(
                    logits, tf.constant(finite.hidden_logit(logits.dtype), logits.dtype)
                )
                of_pairs = tf.where(hidden, tf.zeros_like(d_logits), d_logits)
                more = gathered.at_queries(alive_or_0(alive, of_pairs), visit.cuts)
            d_logits = d_logits if slope is None else times(d_logits, slope)
            d_query = alive_or_0(alive, product(d_logits, keys) * part.scale)
            if alive is not None:
                # (NaN or inf where logits overflow, which hidden keys must not get.)
                counts = tf.squeeze(alive, -1) & tf.math.is_finite(log_sum)
                log_sum = tf.where(counts, log_sum, _DEAD)
            return d_query, log_sum, *more

        rows = Row.like(query, query), Row.like(query), *gathered.rows_at_queries
        d_query, log_sum, *at_queries = _over_tiles(part, query, to_queries, False, *rows)
        of_queries = tuple(map(_heads_first, (query, upstream, delta, log_sum)))

        def to_keys(visit: Visit) -> tuple:
            """Tiles of keys and values, each with the queries that see it."""
            queries, d_context, of_delta, sums = map(visit.runs, of_queries)
            # Scaled as where `log_sum` was made: other roundings would show in large logits.
            queries = queries * part.scale
            keys = visit.rows(key)
            logits, _, slope = _logits(part, changes, visit, queries, keys, whole_rows=False)
            probabilities = tf.exp(logits - sums[..., None])
            d_probabilities = product(d_context, visit.rows(value), transpose_b=True)
            d_probabilities = part.dropped(d_probabilities, visit.cuts)
            d_logits = times(probabilities, d_probabilities - of_delta[..., None])
            more = gathered.at_keys(d_logits)
            d_logits = d_logits if slope is None else times(d_logits, slope)
            return (
                for_keys(d_logits, queries),
                for_keys(part.dropped(probabilities, visit.cuts), d_context),
                *more,
            )

        rows = Row.like(key, key), Row.like(value, value), *gathered.rows_at_keys
        d_key, d_value, *at_keys = _over_tiles(part, query, to_keys, True, *rows)
        of_changes = gathered.gradients(at_queries, at_keys, log_sum, delta)
        return d_query, d_key, d_value, *of_changes

    return computed_again(forward, backward, query, key, value, *changes)


def _logits(
    part: Part,
    changes: Changes,
    visit: "Visit",
    queries: Tensor,
    keys: Tensor,
    whole_rows: bool = True,
) -> tuple[Tensor, Mask | None, Tensor | None]:
    """As `logits_of`, of one tile."""

    def changed(products: Tensor) -> tuple[Tensor, Tensor | None]:
        return changes.of_logits(products, part.heads, part.bound[:2], visit.cuts)

    def masked() -> tuple:
        allowed = allowed_tile(part.rule, part.bound, part.heads, visit.cuts)
        if visit.fresh is not None:
            allowed &= visit.fresh
        return logits(queries, keys, changes.allowed(allowed, visit.cuts), whole_rows)

    def plain() -> tuple:
        made, alive, slope = logits(queries, keys, changes.allowed(None, visit.cuts), whole_rows)
        return made, tf.ones([1, 1, 1, 1], tf.bool) if alive is None else alive, slope

    change = changed if changes.are_some else None
    logits = functools.partial(logits_of, sharing=part.sharing, changed=change)
    if part.rule.constant:
        return logits(queries, keys, changes.allowed(None, visit.cuts), whole_rows)
    # The product stands in each branch, so that a branch may write over it.
    return masked() if visit.needs_mask is None else tf.cond(visit.needs_mask, masked, plain)


def _softmax(changes: Changes, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of a tile, and the log of each row's sum of exponentials `(B, H, T)`."""
    probabilities = tf.nn.softmax(logits)
    of_rows = [(logits, finite.hidden_logit(logits.dtype)), (probabilities, 1e-30)]
    if checks_numerics():  # the largest of a tile without keys would be -inf
        one_more = [[0, 0]] * 3 + [[0, 1]]
        of_rows = [(tf.pad(x, one_more, constant_values=least), least) for x, least in of_rows]
    # The largest probability is exp(its logit - log_sum).
    logit, probability = (tf.reduce_max(x, -1) for x, _ in of_rows)
    log_sum = logit - tf.math.log(probability)
    if changes.sinks is None:
        return probabilities, log_sum
    of_keys, log_sum = changes.share_of_keys(log_sum)
    return probabilities * of_keys[..., None], log_sum


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, ...)` to `(B, H, L, ...)`."""
    return tf.transpose(tensor, (0, 2, 1, 3)[: tensor.shape.rank])


# --- The loop ------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """One step of the loop: some positions along one axis, and those to look at on the other.

    `rows` cuts a tensor `(B, L, H, ...)` and puts its heads first, `runs` one with its heads first
    already, or (`False`) not yet. `needs_mask`: whether some pair may be hidden; `None`: it must be
    masked. `fresh`: the pairs that are not looked at twice; `None`: all.
    """

    rows: Callable[[Tensor], Tensor]
    runs: Callable[..., Tensor]
    cuts: Cuts
    needs_mask: Tensor | None = None
    fresh: Mask | None = None


def _over_tiles(
    part: Part, query: Tensor, tile: Callable[[Visit], tuple], by_key: bool, *rows_of: Row
) -> tuple:
    """Run `tile` over the tiles of queries (or of keys) and put its results together.

    `tile` returns tensors `(batch, H, positions, ...)`, which `rows_of` describe; the results are
    `(B, L, H, ...)`.
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

        def runs_of(tensor: Tensor, are_heads_first: bool = True) -> Tensor:
            if are_heads_first:
                return runs(of_batch(tensor), 2)
            return _heads_first(runs(of_batch(tensor), 1))

        visit = Visit(
            lambda tensor: _heads_first(rows(of_batch(tensor), 1)),
            runs_of,
            Cuts(*((runs, rows) if by_key else (rows, runs)), of_batch),
            *rest,
        )
        return tile(visit)

    def in_place(example: Tensor, positions: Tensor, made: tuple) -> list[tuple[Tensor, Tensor]]:
        """The rows of each result that belong to `positions` of an example, or of each, and these.

        A row is one position of one example, so that every result is written where it stays.
        """
        first = example if found.of_examples else tf.range(batch)[:, None]
        of_batch = tf.reshape(first * length + positions, [-1])
        return [
            (of_batch if found.of_examples or row.is_of_example else positions, row.of(x))
            for row, x in zip(rows_of, made, strict=True)
        ]

    def of_tile(i: Tensor) -> list:
        """Its places, and what it gives by its runs and the flagged positions of the other axis."""
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
        made = visited(example, rows, runs, needs_mask, fresh)
        return in_place(example, tf.range(start, stop), made)

    batches = [batch if found.of_examples or row.is_of_example else 1 for row in rows_of]
    flat = [
        empty(query.dtype, [examples * length, *row.shape])
        for examples, row in zip(batches, rows_of, strict=True)
    ]
    flat = looped(examples * tiles, of_tile, flat)
    if (flags := found.rows) is not None:  # they see what their tiles did not look at

        def of_flagged(example: Tensor) -> list:
            positions = flags.of(example)

            def rows(tensor: Tensor, axis: int) -> Tensor:
                return tf.gather(tensor, positions, axis=axis)

            return in_place(example, positions, visited(example, rows, WHOLE.keys))

        flat = looped(examples, of_flagged, flat)
    return tuple(
        tf.reshape(x, tf.concat([[examples, length], tf.shape(x)[1:]], 0))
        for x, examples in zip(flat, batches, strict=True)
    )
