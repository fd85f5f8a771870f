"""Tiles on TensorFlow: a loop over tiles of queries, each with the keys it may see.

The loop runs in the graph, so lengths may be unknown, and what is skipped may depend on data: on
the ids of packed documents, on padding, on flags. The backward pass computes the tiles again
instead of keeping them, so that peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask.attention import nonfinite
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import Changes
from keras_headmask.attention.tensorflow.graph import (
    Passes,
    Row,
    added,
    empty,
    guarded,
    looped,
    shared,
    with_own_gradient,
    written,
)
from keras_headmask.attention.tensorflow.logits import Gathered
from keras_headmask.attention.tensorflow.ranges import ranges_of
from keras_headmask.attention.tensorflow.tile import (
    alive_or_0,
    context_of,
    gradients_of,
    logits_of,
    softmax,
)
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.evaluation import allowed_tile, mask_of_all_heads
from keras_headmask.rules.protocol import WHOLE, Cuts


@shared
def compute(part: Part, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `changes` are the tensors of `part.changes`.
    """
    return with_own_gradient(guarded(passes(part)), query, key, value, *changes)


def passes(part: Part) -> Passes:
    """The same, forward and backward, where every operand is finite and has some position."""
    # Keys that query heads share are few: cut out of a tile, they cost less than a copy of all.
    are_shared = part.sharing != 1

    def forward(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> list[Tensor]:
        of_keys = [x if are_shared else _heads_first(x) for x in (key, value)]
        changes = part.changes.with_tensors(tensors)

        def tile(visit: Visit) -> tuple:
            keys, values = (visit.runs(x, not are_shared) for x in of_keys)
            return (_attended(part, changes, visit, visit.rows(query), keys, values),)

        return _over_tiles(part, query, tile, [Row.like(query, value)])

    def backward(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple:
        *tensors, upstream, context = rest
        gathered = Gathered(part, part.changes.with_tensors(tensors))
        delta = tf.reduce_sum(upstream * context, axis=-1)  # (B, T, H)
        is_sound = nonfinite.are_finite(context)
        of_keys = [x if are_shared else _heads_first(x) for x in (key, value)]

        def tile(visit: Visit) -> tuple:
            keys, values = (visit.runs(x, not are_shared) for x in of_keys)
            rows = [visit.rows(x) for x in (query, upstream, delta)]
            return _gradients(gathered, visit, is_sound, keys, values, *rows)

        rows = [Row.like(query, query), *gathered.rows_at_queries]
        sums = [Row.like(key, key), Row.like(value, value), *gathered.rows_at_keys]
        return _by_operand(gathered, _over_tiles(part, query, tile, rows, sums))

    return Passes(forward, backward)


def at_once(part: Part) -> Passes:
    """All logits as one tile, where there is little to skip.

    The rule of `part`, which is of all heads, may differ between them. Kept are the probabilities,
    what dropout does to them, and the operands heads first: where there are few logits, making and
    moving them again would take long.
    """
    if part.changes.are_some:
        return guarded(_in_one_tile(part))

    def by(factors: list[Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda tensor: functools.reduce(tf.multiply, factors, tensor)

    def forward(*operands: Tensor) -> list[Tensor]:
        query, key, value = map(_heads_first, nonfinite.marked(*operands))
        allowed = None if part.rule.constant else _allowed(part)
        logits, _, _ = logits_of(query * part.scale, key, allowed, part.sharing)
        probabilities = tf.nn.softmax(logits)
        if allowed is not None:  # for fully masked rows, and for rows that are NaN
            probabilities = tf.where(allowed, probabilities, tf.zeros([], logits.dtype))
        drawn = [] if part.dropout is None else [part.dropout.factors(logits.dtype)]
        context = context_of(probabilities, value, None, part.sharing, by(drawn))
        return [_heads_first(context), probabilities, query, key, value, *drawn]

    def backward(*given: Tensor) -> tuple:
        _, _, _, upstream, _, probabilities, query, key, value, *drawn = given
        query, key, value = nonfinite.without_bad(query, key, value)
        operands = query * part.scale, key, value, _heads_first(upstream)
        # (`delta` not of the context, which nobody else may need.)
        made = gradients_of(probabilities, *operands, sharing=part.sharing, dropped=by(drawn))
        return tuple(map(_heads_first, (made.queries * part.scale, made.keys, made.values)))

    return Passes(forward, backward, keeps=4 if part.dropout is None else 5)


@shared
def compute_at_once(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(at_once(part), *operands)


def _in_one_tile(part: Part) -> Passes:
    """The same, nothing kept."""
    visit = _whole_visit()

    def forward(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> list[Tensor]:
        changes = part.changes.with_tensors(tensors)
        of_tile = (_heads_first(x) for x in (query, key, value))
        return [_heads_first(_attended(part, changes, visit, *of_tile))]

    def backward(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple:
        *tensors, upstream, context = rest
        gathered = Gathered(part, part.changes.with_tensors(tensors))
        delta = tf.reduce_sum(upstream * context, axis=-1)
        of_tile = (_heads_first(x) for x in (key, value, query, upstream, delta))
        made = _gradients(gathered, visit, nonfinite.are_finite(context), *of_tile)
        return _by_operand(gathered, [_heads_first(x) for x in made])

    return Passes(forward, backward)


def _whole_visit() -> "Visit":
    def whole(tensor: Tensor, _: bool = True) -> Tensor:
        return tensor

    return Visit(whole, whole, WHOLE)


def _attended(
    part: Part, changes: Changes, visit: "Visit", queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The context `(b, H, t, Dv)` of a tile."""
    logits, alive, _ = _logits(part, changes, visit, queries * part.scale, keys)
    probabilities, _ = softmax(changes, logits)
    return context_of(probabilities, values, alive, part.sharing, _dropped(part, visit))


def _dropped(part: Part, visit: "Visit") -> Callable[[Tensor], Tensor]:
    return functools.partial(part.dropped, cuts=visit.cuts)


def _gradients(
    gathered: Gathered,
    visit: "Visit",
    is_sound: bool | Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    d_context: Tensor,
    delta: Tensor,
) -> tuple:
    """Of a tile: those at its queries, `(b, H, t, ...)`, and what it adds to those at its keys.

    `is_sound`: whether no row is NaN.
    """
    part, of_delta, queries = gathered.part, delta[..., None], queries * gathered.part.scale
    logits, alive, slope = _logits(part, gathered.changes, visit, queries, keys)
    probabilities, log_sum = softmax(gathered.changes, logits)
    # A row whose logits overflow is NaN, but not where keys are hidden.
    (probabilities,) = nonfinite.unless(is_sound, _hidden_as_0(logits), probabilities)
    # Fully masked rows add nothing, nor do those that are computed again.
    for which in (alive, visit.counts):
        d_context, of_delta = (alive_or_0(which, x) for x in (d_context, of_delta))
    rest = d_context, of_delta, part.sharing, _dropped(part, visit), slope
    made = gradients_of(probabilities, queries, keys, values, *rest)
    return (
        made.queries * part.scale,
        *gathered.at_queries(made.logits, log_sum, of_delta, visit.cuts),
        made.keys,
        made.values,
        *gathered.at_keys(made.logits),
    )


def _by_operand(gathered: Gathered, found: list[Tensor]) -> tuple:
    """What `_gradients` gives of all tiles, in the order of the operands."""
    last = 1 + len(gathered.rows_at_queries)
    (d_query, *at_queries), (d_key, d_value, *at_keys) = found[:last], found[last:]
    return d_query, d_key, d_value, *gathered.gradients(at_queries, at_keys)


def _logits(
    part: Part, changes: Changes, visit: "Visit", queries: Tensor, keys: Tensor
) -> tuple[Tensor, Mask | None, Tensor | None]:
    """As `logits_of`, of one tile."""

    def changed(products: Tensor) -> tuple[Tensor, Tensor | None]:
        return changes.of_logits(products, part.heads, part.bound[:2], visit.cuts)

    def masked() -> tuple:
        allowed = _allowed(part, visit.cuts)
        if visit.fresh is not None:
            allowed &= visit.fresh
        return logits(queries, keys, changes.allowed(allowed, visit.cuts))

    def plain() -> tuple:
        made, alive, slope = logits(queries, keys, changes.allowed(None, visit.cuts))
        return made, tf.ones([1, 1, 1, 1], tf.bool) if alive is None else alive, slope

    change = changed if changes.are_some else None
    logits = functools.partial(logits_of, sharing=part.sharing, changed=change)
    if part.rule.constant:
        return logits(queries, keys, changes.allowed(None, visit.cuts))
    # The product stands in each branch, so that a branch may write over it.
    return masked() if visit.needs_mask is None else tf.cond(visit.needs_mask, masked, plain)


def _allowed(part: Part, cuts: Cuts = WHOLE) -> Mask:
    """What a tile may see; of heads with several rules there is one tile alone."""
    (rule, _), *others = part.groups()
    if not others:
        return allowed_tile(rule, part.bound, part.heads, cuts)
    return mask_of_all_heads(part.rule, part.bound, len(part.heads))


def _hidden_as_0(logits: Tensor) -> Callable[[Tensor], list[Tensor]]:
    hidden = tf.constant(nonfinite.hidden_logit(logits.dtype), logits.dtype)
    return lambda x: [tf.where(tf.equal(logits, hidden), tf.zeros_like(x), x)]


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, ...)` to `(B, H, L, ...)`."""
    return tf.transpose(tensor, (0, 2, 1, 3)[: tensor.shape.rank])


def _cut(tensor: Tensor, axis: int, start: Tensor, stop: Tensor) -> Tensor:
    """`tensor[..., start:stop]` along an axis, by fewer nodes."""
    rank = tensor.shape.rank
    here = [int(i == axis) for i in range(rank)]
    others = 2**rank - 1 - 2**axis  # a bit for each
    whole = {"begin_mask": others, "end_mask": others}
    return tf.strided_slice(tensor, start * here, stop * here, [1] * rank, **whole)


# --- The loop ------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """One step of the loop: some queries, and the keys to look at.

    `rows` cuts a tensor `(B, T, H, ...)` and puts its heads first, `runs` one of keys with its
    heads first already, or (`False`) not yet. `needs_mask`: whether some pair may be hidden;
    `None`: it must be masked. `fresh`: the pairs that are not looked at twice, `counts`: the
    queries that no later step computes again; `None`: all.
    """

    rows: Callable[[Tensor], Tensor]
    runs: Callable[..., Tensor]
    cuts: Cuts
    needs_mask: Tensor | None = None
    fresh: Mask | None = None
    counts: Mask | None = None


def _over_tiles(
    part: Part, query: Tensor, tile: Callable[[Visit], tuple], rows_of: list[Row], sums_of: Any = ()
) -> list[Tensor]:
    """Run `tile` over the tiles of queries and put its results together, `(B, L, H, ...)` each.

    `tile` returns tensors `(batch, H, L, ...)`: first those that `rows_of` describe, where L are
    its queries, then those of `sums_of`, where L are its keys, which are summed over all tiles.
    """
    batch, size, bound = sizes(query)[0], part.tile, part.bound
    found = ranges_of(part.rule, bound, part.tuning, size, batch)
    length, keys = (tf.size(x) for x in (bound.query_positions, bound.key_positions))
    tiles = -(-length // size)
    # Where ranges differ between examples, each example has its own steps.
    examples = batch if found.of_examples else tf.constant(1)
    described = [(row, length, written) for row in rows_of]
    described += [(row, keys, added) for row in sums_of]

    def visited(
        example: Tensor, positions: Tensor, rows: Callable, runs: Callable, *rest: Any
    ) -> list[tuple]:
        """What `tile` gives for what `rows` and `runs` cut out of a tensor along an axis.

        For each result how it is put into all results, at which places, and its rows. A row is one
        position of one example, so that every result is written where it stays.
        """

        def of_batch(tensor: Tensor, axis: int = 0) -> Tensor:
            """One example, the batch axis kept; a batch axis of size 1 serves every example."""
            if not found.of_examples or tensor.shape[0] == 1:
                return tensor
            here, one = ([1] + [rest] * (tensor.shape.rank - 1) for rest in (0, -1))
            own = tf.slice(tensor, tf.minimum(example, tf.shape(tensor) - 1) * here, one)
            own.set_shape([1, *tensor.shape[1:]])  # an axis of size 1 is not cut into tiles
            return own

        def runs_of(tensor: Tensor, are_heads_first: bool = True) -> Tensor:
            if are_heads_first:
                return runs(of_batch(tensor), 2)
            return _heads_first(runs(of_batch(tensor), 1))

        made = tile(
            Visit(
                lambda tensor: _heads_first(rows(of_batch(tensor), 1)),
                runs_of,
                Cuts(rows, runs, of_batch),
                *rest,
            )
        )
        first = example if found.of_examples else tf.range(batch)[:, None]
        of_keys = runs(tf.range(keys), 0) if sums_of else None
        put = []
        for (row, count, write), x in zip(described, made, strict=True):
            places = positions if write is written else of_keys
            if found.of_examples or row.is_of_example:
                places = tf.reshape(first * count + places, [-1])
            put.append((write, places, row.of(x)))
        return put

    def of_tile(i: Tensor) -> list:
        """A tile of queries with its runs of keys and the keys that are flagged."""
        example, number = i // tiles, i % tiles
        start, stop = number * size, tf.minimum((number + 1) * size, length)
        positions = tf.range(start, stop)
        places = tf.unstack(found.runs[example, number])
        edges = list(zip(places[::2], places[1::2], strict=True))
        flagged = fresh = counts = None
        if found.others is not None:
            flagged = found.others.of(example)
            seen = tf.reduce_any([(flagged >= a) & (flagged < b) for a, b in edges], 0)
            run_length = tf.add_n([b - a for a, b in edges])
            fresh = tf.concat([~seen, tf.ones([run_length], tf.bool)], 0)
        if found.rows is not None:
            again = tf.equal(positions[:, None], found.rows.of(example))
            counts = ~tf.reduce_any(again, 1, keepdims=True)

        def runs(tensor: Tensor, axis: int) -> Tensor:
            pieces = [] if flagged is None else [tf.gather(tensor, flagged, axis=axis)]
            pieces += [_cut(tensor, axis, a, b) for a, b in edges]
            return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis)

        needs_mask = None if found.needs_mask is None else found.needs_mask[example, number]
        rows = functools.partial(_cut, start=start, stop=stop)
        return visited(example, positions, rows, runs, needs_mask, fresh, counts)

    batches = [batch if found.of_examples or row.is_of_example else 1 for row, _, _ in described]
    flat = [
        empty(query.dtype, [examples * count, *row.shape], zeros=write is added)
        for examples, (row, count, write) in zip(batches, described, strict=True)
    ]
    flat = looped(examples * tiles, of_tile, flat)
    if (flags := found.rows) is not None:  # they see what their tiles did not look at

        def of_flagged(example: Tensor) -> list:
            positions = flags.of(example)

            def rows(tensor: Tensor, axis: int) -> Tensor:
                return tf.gather(tensor, positions, axis=axis)

            return visited(example, positions, rows, WHOLE.keys)

        flat = looped(examples, of_flagged, flat)
    return [
        tf.reshape(x, [examples, count, *sizes(x)[1:]])
        for x, examples, (_, count, _) in zip(flat, batches, described, strict=True)
    ]
