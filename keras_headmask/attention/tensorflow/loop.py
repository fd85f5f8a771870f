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

from keras_headmask._keras.tensorflow import checks_numerics
from keras_headmask.attention import head_groups, nonfinite
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.logits import Changes
from keras_headmask.attention.tensorflow.graph import (
    added,
    one_function,
    with_own_gradient,
    zeros_to_add_to,
)
from keras_headmask.attention.tensorflow.plan import Plan
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.evaluation import mask_at
from keras_headmask.rules.places import rows_at
from keras_headmask.rules.protocol import Bound, Places, Sides


@one_function
def attend(part: Part, plans: Sequence[Plan], *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. The tensors of `part.changes` follow the three operands. There is one
    plan for each head group.
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

    def forward(*operands: Tensor) -> Tensor:
        query, key, value, *tensors = operands
        query, key, value = nonfinite.nan_at_nonfinite(query, key, value)
        steps, changes = _Steps(plan, query, key), part.changes.with_tensors(tensors)
        keys, values = map(_rows_of_heads, (key, value))

        def step(visit: Visit) -> tuple[Tensor]:
            rows = visit.rows(query)
            _, logits, alive = _logits(part, changes, visit, rows, visit.keys(keys))
            probabilities = _dropped(part, visit, _softmax(changes, logits)[0])
            return (_alive_or_0(alive, product_of(probabilities, visit.keys(values), sharing)),)

        return steps.over(step, value.dtype)[0]

    def backward(*tensors_and_results: Tensor) -> tuple:
        query, key, value, *tensors, upstream, context = tensors_and_results
        query, key, value = nonfinite.replace_nonfinite_if_any(query, key, value)
        steps, changes = _Steps(plan, query, key), part.changes.with_tensors(tensors)
        keys, values = map(_rows_of_heads, (key, value))
        delta = tf.reduce_sum(upstream * context, axis=-1, keepdims=True)
        is_sound = nonfinite.are_finite(context)
        if tf.is_tensor(is_sound):  # as a number the host has it once, as a boolean in each step
            is_sound = tf.cast(is_sound, tf.int32)

        def step(visit: Visit, d_keys: Tensor, d_values: Tensor, *sums: Tensor) -> tuple:
            rows, of_keys, of_values = visit.rows(query), visit.keys(keys), visit.keys(values)
            products, logits, alive = _logits(part, changes, visit, rows, of_keys)
            probabilities, log_sum = _softmax(changes, logits)
            probabilities = _without_hidden(is_sound, probabilities, logits)
            # Fully masked rows add nothing, nor do those beyond the last query.
            counts = visit.counts & alive
            d_context, of_delta = (_alive_or_0(counts, visit.rows(x)) for x in (upstream, delta))
            d_dropped = product_of(d_context, of_values, sharing, transpose_b=True)
            d_changed = _times(probabilities, _dropped(part, visit, d_dropped) - of_delta)
            of_changes = d_changed, log_sum, of_delta
            d_products, more = _through_changes(part, changes, visit, sums, products, *of_changes)
            dropped = _dropped(part, visit, probabilities)
            return (
                product_of(d_products, of_keys, sharing) * part.scale,
                visit.added(d_keys, _sum_for_keys(d_products, rows * part.scale, sharing)),
                visit.added(d_values, _sum_for_keys(dropped, d_context, sharing)),
                *more,
            )

        nothing = [*map(zeros_to_add_to, (keys, values)), *map(tf.zeros_like, changes.tensors)]
        d_query, *sums = steps.over(step, query.dtype, *nothing)
        return d_query, *map(steps.keys_joined, sums[:2]), *sums[2:]

    return with_own_gradient(forward, backward, *operands)


def _dropped(part: Part, visit: "Visit", pairs: Tensor) -> Tensor:
    """`pairs` after dropout: some are 0, the rest are scaled up."""
    if part.dropout is None:
        return pairs
    return pairs * part.dropout.factors_at(pairs.dtype, visit.places)


def _logits(
    part: Part, changes: Changes, visit: "Visit", rows: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Mask]:
    """The products `q k^T` of a step, its logits, and which rows see a key."""
    queries, here = rows * part.scale, changes.at(visit.places)

    def changed() -> tuple[Tensor, Tensor]:
        products = product_of(queries, keys, part.sharing, transpose_b=True)
        if not here.are_some:
            return products, products
        positions = part.positions_at(visit.places)
        return products, here.apply(products, part.heads, positions)

    def masked() -> tuple:
        allowed = visit.valid
        if not part.rule.constant:
            of_part = mask_at(part.rule, part.bound, part.heads, visit.places)
            allowed = of_part if allowed is None else of_part & allowed
        return by(allowed)

    def by(allowed: Mask | None) -> tuple:
        (products, logits), allowed = changed(), here.allowed(allowed)
        if allowed is not None:
            return products, *_hidden(logits, allowed)
        return products, logits, tf.ones([1, 1, 1, 1], tf.bool)

    # The product stands in each branch, so that a branch may write over it.
    return (
        masked()
        if visit.needs_mask is None
        else tf.cond(visit.needs_mask, masked, lambda: by(None))
    )


def _hidden(logits: Tensor, allowed: Mask) -> tuple[Tensor, Mask]:
    """Masked logits (`hidden_logit` where hidden), and which rows see a key.

    A fully masked row is 0 throughout, so that it does not become NaN.
    """
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    lowest = tf.constant(nonfinite.hidden_logit(logits.dtype), logits.dtype)
    return tf.where(allowed, logits, tf.where(alive, lowest, tf.zeros([], logits.dtype))), alive


def _without_hidden(is_sound: bool | Tensor, probabilities: Tensor, logits: Tensor) -> Tensor:
    """Probabilities that are 0 at hidden keys, also in a row of NaN, where logits overflow."""

    def repaired() -> Tensor:
        hidden = tf.constant(nonfinite.hidden_logit(logits.dtype), logits.dtype)
        return tf.where(tf.equal(logits, hidden), tf.zeros_like(probabilities), probabilities)

    if isinstance(is_sound, bool):
        return probabilities if is_sound else repaired()
    return tf.cond(is_sound > 0, lambda: probabilities, repaired)


def _softmax(changes: Changes, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """The probabilities of a tile; with sinks, also the log-sum-exp of each row."""
    probabilities = tf.nn.softmax(logits)
    if changes.sinks is None:
        return probabilities, None
    of_rows = [(logits, nonfinite.hidden_logit(logits.dtype)), (probabilities, 1e-30)]
    if checks_numerics():  # the largest of a tile without keys would be -inf
        one_more = [[0, 0]] * 3 + [[0, 1]]
        of_rows = [(tf.pad(x, one_more, constant_values=least), least) for x, least in of_rows]
    # The largest probability is exp(its logit - log_sum).
    logit, probability = (tf.reduce_max(x, -1) for x, _ in of_rows)
    of_keys, log_sum = changes.share_of_keys(logit - tf.math.log(probability))
    return probabilities * of_keys[..., None], log_sum


def _times(probabilities: Tensor, gradients: Tensor) -> Tensor:
    """The product, but 0 where a probability is 0: a gradient may overflow at a hidden value."""
    return tf.math.multiply_no_nan(gradients, probabilities)


def _alive_or_0(alive: Mask, rows: Tensor) -> Tensor:
    return tf.where(alive, rows, tf.zeros_like(rows))


def product_of(rows: Tensor, keys: Tensor, sharing: int, transpose_b: bool = False) -> Tensor:
    """`rows @ keys`, rows of every query head by keys (or values) of the key head that it reads."""
    product = tf.matmul(folded(rows, sharing), keys, transpose_b=transpose_b)
    return unfolded(product, sharing)


def _sum_for_keys(pairs: Tensor, rows: Tensor, sharing: int) -> Tensor:
    """`pairs^T @ rows`, summed over the query heads that share a key head."""
    return tf.matmul(folded(pairs, sharing), folded(rows, sharing), transpose_a=True)


# --- Soft caps, biases and sinks, backward -------------------------------------------------------


def _through_changes(
    part: Part,
    changes: Changes,
    visit: "Visit",
    sums: Sequence[Tensor],
    products: Tensor,
    d_changed: Tensor,
    log_sum: Tensor | None,
    delta: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Backpropagate from the changed logits to the `products` `(m, h, b, w)` of a step.

    Also returns `sums`, the gradients of the tensors of `changes`, plus the part of this step.
    `log_sum` and `delta` hold a number for each row; `delta` has one more axis of size 1.
    """
    if not changes.are_some:
        return d_changed, []
    places = visit.places
    here = changes.at(places)
    tensors = [x for x in (here.bias, here.table) if x is not None]
    with tf.GradientTape() as tape:
        tape.watch([products, *tensors])
        changed = here.apply(products, part.heads, part.positions_at(places))
    d_products, *d_tensors = tape.gradient(changed, [products, *tensors], d_changed)
    # (A hidden product may make the gradient of a soft cap NaN.)
    d_products = tf.where(tf.equal(d_changed, 0), d_changed, d_products)
    before, after = list(sums), []
    if here.bias is not None:
        after.append(_added_to_bias(before.pop(0), d_tensors.pop(0), visit))
    if here.table is not None:
        after.append(before.pop(0) + d_tensors.pop(0))
    if here.sinks is not None:
        of_sinks = tf.exp(here.sinks[:, None] - log_sum)
        after.append(before.pop(0) - tf.reduce_sum(_times(delta[..., 0], of_sinks), (0, 2)))
    return d_products, after


def _added_to_bias(total: Tensor, of_tiles: Tensor, visit: "Visit") -> Tensor:
    """Add `of_tiles` `(m, h, b or 1, w or 1)` to `total`, the gradient of the whole bias."""
    keys = sizes(total)[3]
    rows = rows_at(total, visit.places)
    if total.shape[3] != 1:
        of_tiles = _at_all_keys(of_tiles, visit, keys)
    flat = tf.reshape(total, [-1, keys])
    return tf.reshape(tf.tensor_scatter_nd_add(flat, rows[..., None], of_tiles), tf.shape(total))


def _at_all_keys(of_tiles: Tensor, visit: "Visit", keys: Tensor) -> Tensor:
    """Spread the keys of each tile over all keys, by a gather, since a scatter is slow."""
    to = visit.places.keys
    if visit.valid is not None:
        to = tf.where(visit.valid, to, tf.cast(keys, to.dtype))
    to = to[:, 0, 0]
    shape = tiles, count = sizes(to)
    number, place = (tf.cast(tf.range(size), to.dtype) for size in shape)
    at = tf.stack([tf.broadcast_to(number[:, None], shape), to], -1)
    nowhere = tf.fill([tiles, keys + 1], tf.cast(count, to.dtype))
    which = tf.tensor_scatter_nd_update(nowhere, at, tf.broadcast_to(place, shape))[:, :-1]
    with_0 = tf.pad(of_tiles, [[0, 0], [0, 0], [0, 0], [0, 1]])
    return tf.gather(with_0, which, axis=3, batch_dims=1)


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

    `valid` `(m, 1, 1, w)` is false for filler and repeated keys; `None`: all are real. `counts`
    `(m, 1, b, 1)` is false for filler queries. `needs_mask`: whether some pair may be hidden;
    `None`: always mask.
    """

    steps: "_Steps"
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
        return Visit(self, places, valid, plan.counts[first:stop], needs_mask)


def _run(start: Tensor, width: Tensor) -> Tensor:
    """`width` places from each `start` `(m, 1, 1, 1)` on: `(m, 1, 1, width)`."""
    return tf.cast(start, tf.int64) + tf.cast(tf.range(width), tf.int64)
