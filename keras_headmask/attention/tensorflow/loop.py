"""The loop over tiles on TensorFlow: each tile of queries meets only the keys that it may see.

It is a `tf.while_loop`, so lengths may be unknown, and skipping may depend on data: on the ids of
packed documents, on padding, on flags. One step computes as many tiles, of one example or several,
as fit into the budget of logits. The backward pass computes the tiles again instead of keeping
them, so peak memory grows with length x tile.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_headmask.attention import head_groups
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.logits import capped, hidden_logit, with_sinks
from keras_headmask.attention.tensorflow.graph import (
    added,
    one_function,
    with_own_gradient,
    zeros_to_add_to,
)
from keras_headmask.attention.tensorflow.plan import Plan
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.evaluation import mask_at
from keras_headmask.rules.protocol import Bound, Places, Sides


@one_function
def attend(part: Part, plans: Sequence[Plan], *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. Sinks follow the three operands, if there are some. There is one plan
    for each head group.
    """
    part = part._replace(bound=_widened(part.bound))
    of_groups = iter(plans)
    return head_groups.by_group(
        lambda group, *tensors: _attend_group(group, next(of_groups), *tensors), part, *operands
    )


def _widened(bound: Bound) -> Bound:
    """Broadcast whole masks along each axis whose size is unknown until the run.

    Tiles are not cut along an axis of size 1; here nobody knows yet whether it is 1.
    """

    def widen(value: Tensor | Sides) -> Tensor | Sides:
        if isinstance(value, Sides):
            return value
        if value.shape[2] is None:
            value = value & (bound.query_positions >= bound.query_positions)[:, None]
        if value.shape[3] is None:
            value = value & (bound.key_positions >= bound.key_positions)
        return value

    return bound.changed(widen)


def _attend_group(part: Part, plan: Plan, *operands: Tensor) -> Tensor:
    """The context of the heads of `part`, which obey one rule, with its gradient."""
    sharing = part.sharing

    def forward(query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        steps = _Steps(plan, query, key)
        keys, values = map(_rows_of_heads, (key, value))

        def step(visit: Visit) -> tuple[Tensor]:
            _, logits, alive = _logits(part, visit, visit.rows(query), visit.keys(keys))
            probabilities, _ = _softmax(logits, *sinks)
            if part.dropout is not None:
                probabilities = part.dropout.of(probabilities, part, visit.number)
            return (_alive_or_0(alive, product_of(probabilities, visit.keys(values), sharing)),)

        return steps.over(step, value.dtype)[0]

    def backward(*tensors_and_results: Tensor) -> tuple:
        query, key, value, *sinks, upstream, context = tensors_and_results
        steps = _Steps(plan, query, key)
        keys, values = map(_rows_of_heads, (key, value))
        delta = tf.reduce_sum(upstream * context, axis=-1, keepdims=True)

        def step(visit: Visit, d_keys: Tensor, d_values: Tensor, *d_sinks: Tensor) -> tuple:
            rows, of_keys, of_values = visit.rows(query), visit.keys(keys), visit.keys(values)
            before, logits, alive = _logits(part, visit, rows, of_keys)
            probabilities, of_sinks = _softmax(logits, *sinks)
            # Fully masked rows add nothing, nor do those beyond the last query.
            counts = visit.counts & alive
            d_context, of_delta = (_alive_or_0(counts, visit.rows(x)) for x in (upstream, delta))
            d_dropped = product_of(d_context, of_values, sharing, transpose_b=True)
            dropped = probabilities
            if part.dropout is not None:
                factors = part.dropout.of(tf.ones_like(dropped), part, visit.number)
                d_dropped, dropped = d_dropped * factors, dropped * factors
            d_logits = probabilities * (d_dropped - of_delta)
            if part.soft_cap is not None:
                d_logits *= 1 - tf.square(before / part.soft_cap)
            of_rows = -tf.reduce_sum(of_sinks * of_delta, (0, 2, 3)) if sinks else None
            return (
                product_of(d_logits, of_keys, sharing) * part.scale,
                visit.added(d_keys, _sum_for_keys(d_logits, rows * part.scale, sharing)),
                visit.added(d_values, _sum_for_keys(dropped, d_context, sharing)),
                *(x + of_rows for x in d_sinks),
            )

        nothing = [*map(zeros_to_add_to, (keys, values)), *map(tf.zeros_like, sinks)]
        d_query, *sums = steps.over(step, query.dtype, *nothing)
        return d_query, *map(steps.keys_joined, sums[:2]), *sums[2:]

    return with_own_gradient(forward, backward, *operands)


def _logits(part: Part, visit: "Visit", rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Mask]:
    """The logits of a step before they are masked, and after; and which rows see a key."""
    queries = rows * part.scale

    def plain() -> Tensor:
        return capped(product_of(queries, keys, part.sharing, transpose_b=True), part.soft_cap)

    def free() -> tuple[Tensor, Tensor, Mask]:
        logits = plain()
        return logits, logits, tf.ones([1, 1, 1, 1], tf.bool)

    def masked() -> tuple[Tensor, Tensor, Mask]:
        allowed = visit.valid
        if not part.rule.constant:
            of_part = mask_at(part.rule, part.bound, part.heads, visit.places)
            allowed = of_part if allowed is None else of_part & allowed
        if allowed is None:
            return free()
        logits = plain()
        lowest = tf.constant(hidden_logit(logits.dtype.name), logits.dtype)
        alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
        return logits, tf.where(allowed, logits, lowest), alive

    # The product stands in each branch, so that a branch may write over it.
    return masked() if visit.needs_mask is None else tf.cond(visit.needs_mask, masked, free)


def _softmax(logits: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the keys of a tile; with sinks, also those of the sinks."""
    if not sinks:
        return tf.nn.softmax(logits), None
    probabilities = tf.nn.softmax(with_sinks(logits, sinks[0][:, None, None]))
    return probabilities[..., :-1], probabilities[..., -1:]


def _alive_or_0(alive: Mask, rows: Tensor) -> Tensor:
    return tf.where(alive, rows, tf.zeros_like(rows))


def product_of(rows: Tensor, keys: Tensor, sharing: int, transpose_b: bool = False) -> Tensor:
    """`rows @ keys`, rows of every query head by keys (or values) of the key head that it reads."""
    product = tf.matmul(folded(rows, sharing), keys, transpose_b=transpose_b)
    return unfolded(product, sharing)


def _sum_for_keys(pairs: Tensor, rows: Tensor, sharing: int) -> Tensor:
    """`pairs^T @ rows`, summed over the query heads that share a key head."""
    return tf.matmul(folded(pairs, sharing), folded(rows, sharing), transpose_a=True)


# --- Where rows and keys stand -------------------------------------------------------------------


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, h, size)` to `(B, h, L, size)`, and back."""
    return tf.transpose(tensor, (0, 2, 1, 3))


def _rows_of_heads(tensor: Tensor) -> Tensor:
    """`(B, S, h, size)` as `(B * h * S, size)`: each key is read by several tiles."""
    return tf.reshape(_heads_first(tensor), [-1, tensor.shape[3]])


# --- Steps ---------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """One step of the loop: m tiles of b queries, and w keys for each tile.

    `number` is that of its first tile. `valid` `(m, 1, 1, w)` is false for filler and repeated
    keys; `None`: all are real. `counts` `(m, 1, b, 1)` is false for filler queries. `needs_mask`:
    whether some pair may be hidden; `None`: always mask.
    """

    steps: "_Steps"
    number: Tensor
    places: Places  # in the whole sequences
    valid: Mask | None
    counts: Mask
    needs_mask: Tensor | None

    def rows(self, tensor: Tensor) -> Tensor:
        """Gather the queries of the tiles, `(m, h, b, size)`, from `(B, T, h, size)`."""
        heads, size = tensor.shape[2:]
        at = self.places.rows * heads + tf.range(heads, dtype=tf.int64)[:, None, None]
        return tf.gather(tf.reshape(tensor, [-1, size]), tf.squeeze(at, 3))

    def keys(self, tensor: Tensor) -> Tensor:
        """Gather the keys of the tiles, `(m, h, w, size)`, from `(B * h * S, size)`."""
        return tf.gather(tensor, tf.squeeze(self._at, 2))

    @property
    def _at(self) -> Tensor:
        steps = self.steps
        heads = tf.range(steps.heads, dtype=tf.int64)[:, None, None]
        of_head = (self.places.examples * steps.heads + heads) * steps.lengths[1]
        return of_head + self.places.keys

    def added(self, sums: Tensor, addend: Tensor) -> Tensor:
        """Add `addend` `(m, h, w, size)` to `sums` `(B * h * S, size)` at the keys of this step."""
        rows = tf.reshape(addend, [-1, addend.shape[3]])
        return added(sums, tf.reshape(self._at, [-1]), rows, self.steps.plan.is_gpu)


class _Steps:
    """All steps of the loop over the tiles of `plan`."""

    def __init__(self, plan: Plan, query: Tensor, key: Tensor):
        self.plan = plan
        self.batch, self.keys, self.heads, _ = sizes(key)
        self.lengths = [sizes(x, "int64")[1] for x in (query, key)]

    def keys_joined(self, sums: Tensor) -> Tensor:
        """`(B * h * S, size)` as `(B, S, h, size)`."""
        return _heads_first(tf.reshape(sums, [self.batch, self.heads, self.keys, sums.shape[1]]))

    def over(self, step: Callable[..., tuple], dtype: tf.DType, *sums: Tensor) -> list[Tensor]:
        """Run `step(visit, *sums)` for all steps: results `(B, T, h, size)`, and the last sums.

        A step returns the results of its tiles, `(m, h, b, size)`, and the new sums.
        """
        total, in_step = tf.shape(self.plan.queries)[0], self.plan.in_step
        count = tf.maximum(-(-total // in_step), 1)  # (no step would have no shape)
        results = tf.TensorArray(dtype, count, infer_shape=False, element_shape=[None] * 4)

        def body(i: Tensor, results: tf.TensorArray, sums: list[Tensor]) -> tuple:
            first = i * in_step
            result, *sums = step(self._visit(first, tf.minimum(first + in_step, total)), *sums)
            return i + 1, results.write(i, _heads_first(result)), sums

        start = tf.constant(0), results, list(sums)
        run = tf.while_loop(lambda i, *_: i < count, body, start, parallel_iterations=10)
        rows = run[1].concat()  # (N, b, h, size)
        rows = tf.reshape(rows, tf.concat([[-1], tf.shape(rows)[2:]], 0))
        return [tf.gather(rows, self.plan.slots), *run[2]]

    def _visit(self, first: Tensor, stop: Tensor) -> Visit:
        """The `Visit` of tiles `first` to `stop` of the plan."""
        plan = self.plan
        # What decides sizes and branches is int32, which TensorFlow computes on the host: a GPU
        # is not waited for. What is as large as tiles x keys is int64, which it computes there.
        count = plan.runs.shape[-1]
        number, *edges = tf.split(plan.runs[first:stop], [1] * count, -1)
        pairs, valid = list(zip(edges[::2], edges[1::2], strict=True)), None
        lengths = [stop - start for start, stop in pairs]
        widths = [tf.maximum(tf.reduce_max(of_run), 0) for of_run in lengths]
        if len(pairs) == 1 and plan.flagged is None:  # keys beside the run are as good as padding
            keys = _run(tf.minimum(edges[0], self.keys - widths[0]), widths[0])
        else:
            pieces = [_run(start, width) for (start, _), width in zip(pairs, widths, strict=True)]
            wide = [[tf.cast(edge, tf.int64) for edge in pair] for pair in pairs]
            are_there = [x < stop for x, (_, stop) in zip(pieces, wide, strict=True)]
            if plan.flagged is not None:
                flagged = tf.gather(plan.flagged, tf.squeeze(number, [2, 3]))
                seen = [(flagged >= start) & (flagged < stop) for start, stop in wide]
                pieces.append(flagged)
                are_there.append((flagged >= 0) & ~functools.reduce(tf.logical_or, seen))
            keys = tf.clip_by_value(tf.concat(pieces, 3), 0, self.lengths[1] - 1)
            valid = tf.concat(are_there, 3)
        needs_mask = None
        if plan.needs_mask is not None:
            uneven = [x - tf.reduce_min(y) for x, y in zip(widths, lengths, strict=True)]
            masked = tf.reduce_max(plan.needs_mask[first:stop])
            needs_mask = functools.reduce(tf.maximum, uneven, masked) > 0
        example, queries = tf.cast(number, tf.int64), plan.queries[first:stop]
        rows, columns = (
            example * x + at for x, at in zip(self.lengths, (queries, keys), strict=True)
        )
        places = Places(example, queries, keys, rows, columns, tf.gather)
        return Visit(self, first, places, valid, plan.counts[first:stop], needs_mask)


def _run(start: Tensor, width: Tensor) -> Tensor:
    """`width` places from each `start` `(m, 1, 1, 1)` on: `(m, 1, 1, width)`."""
    return tf.cast(start, tf.int64) + tf.cast(tf.range(width), tf.int64)
