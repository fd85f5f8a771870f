"""Short sequences on TensorFlow: head by head.

Where one tile would hold a whole sequence there is little to skip, and what costs is memory: the
logits of a batch are written and read again by each operation on them. Those of some rows, one head
of one example each, stay in the processor's cache. As in the loop over tiles, the backward pass
computes them again instead of keeping them. A step takes well under a millisecond, so it has few
operations beside its products: what can be is made once, before the loop. Keys and values that
query heads share are repeated within a step alone.
"""

from collections.abc import Callable

import tensorflow as tf

from keras_headmask.attention.head_groups import Part, in_order, of_heads
from keras_headmask.attention.tensorflow.graph import (
    Passes,
    empty,
    guarded,
    looped,
    shared,
    with_own_gradient,
    written,
)
from keras_headmask.attention.tensorflow.tile import context_of, gradients_of, logits_of
from keras_headmask.masks import Length, Mask, Tensor, sizes
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import allowed_tile


@shared
def compute(part: Part, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)`. `part` is of all heads, and its rule may differ between them."""
    return with_own_gradient(guarded(passes(part)), query, key, value)


def passes(part: Part) -> Passes:
    """The same, forward and backward, where every operand is finite and has some position."""

    def forward(*operands: Tensor) -> list[Tensor]:
        query, _, value = operands
        return _over_heads(part, _context, [_row(query, value)], *operands)

    def backward(*given: Tensor) -> tuple:
        of_operands = [_row(operand, operand) for operand in given[:3]]
        d_query, *of_keys = _over_heads(part, _gradients, of_operands, *given)
        return d_query * part.scale, *(_summed(gradient, part.sharing) for gradient in of_keys)

    return Passes(forward, backward)


def _row(of_length: Tensor, of_size: Tensor) -> list[Tensor]:
    """The shape of a result for one head of one example: as long as one tensor, as wide as one."""
    return [sizes(of_length)[1], sizes(of_size)[3]]


def _summed(gradient: Tensor, sharing: int) -> Tensor:
    """`(B, S, H, size)`, summed over the heads that share a key head: `(B, S, Hk, size)`."""
    if sharing == 1:
        return gradient
    batch, length, heads, size = sizes(gradient)
    by_key = tf.reshape(gradient, [batch, length, heads // sharing, sharing, size])
    return tf.reduce_sum(by_key, axis=3)


# Both are of some rows, `(n, 1, L, size)` each. The axis of size 1 is for `tf.vectorized_map` and
# `tape.jacobian`, which put one more before a tensor or not: TensorFlow 2.21's product with oneDNN
# writes past its end for `(many, 1, L, size)` by `(1, 1, size, L)`.


def _context(allowed: Mask | None, query: Tensor, key: Tensor, value: Tensor) -> tuple:
    logits, alive, _ = logits_of(query, key, allowed)
    return (context_of(tf.nn.softmax(logits), value, alive),)


def _gradients(allowed: Mask | None, *operands: Tensor) -> tuple:
    """Those of the queries (times the scale), keys and values."""
    query, key, value, upstream, context = operands
    logits, _, _ = logits_of(query, key, allowed)
    probabilities = tf.nn.softmax(logits)
    if allowed is not None:  # a row whose logits overflow is NaN, but not where keys are hidden
        probabilities = tf.where(allowed, probabilities, tf.zeros([], probabilities.dtype))
    delta = tf.reduce_sum(upstream * context, axis=-1, keepdims=True)
    return gradients_of(probabilities, query, key, value, upstream, delta)[1:]


def _heads_first(mask: Mask) -> Mask:
    """`(H, B, T, S)` of `(B, H, T, S)`; by places, as oneDNN logs a transpose of booleans."""
    batch, heads, *lengths = sizes(mask)
    places = tf.transpose(tf.reshape(tf.range(batch * heads), [batch, heads]))
    return tf.gather(tf.reshape(mask, [-1, *lengths]), places)


def _of_step(allowed: Mask, heads: int, batch: Length) -> Callable[[Tensor, Tensor], Mask]:
    """Gives the masks of the rows in a slice, `(n or 1, 1, T or 1, S or 1)`.

    `allowed`: `(B or 1, h or 1, T or 1, S or 1)`; there are `heads` x `batch` rows, head by head.
    """
    if tuple(allowed.shape[:2]) == (1, 1):
        return lambda begin, size: allowed
    by_head = _heads_first(allowed)
    own_heads, examples, *lengths = sizes(by_head)
    if heads == 1 or allowed.shape[2] == 1:
        # A mask for every row is there, or is small, and a slice of them copies nothing.
        rows = _as_rows(tf.broadcast_to(by_head, [heads, batch, *lengths]))
        return lambda begin, size: tf.slice(rows, begin, size)
    # Else it would take a quarter of what all logits take: each step gathers its own.
    different = _as_rows(by_head)
    place = tf.reshape(tf.range(own_heads * examples), [own_heads, examples])
    place = tf.reshape(tf.broadcast_to(place, [heads, batch]), [-1])
    return lambda begin, size: tf.gather(different, tf.slice(place, begin[:1], size[:1]))


def _rows_of(
    tensor: Tensor, heads: tuple[int, ...], sharing: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Gives the rows in a slice, `(n, 1, L, size)`, of query `heads`, each of which has a row.

    `tensor`: `(H, B, L, size)`; `(H / sharing, B, L, size)` for heads that share.
    """
    if sharing == 1:
        rows = _as_rows(of_heads(tensor, heads, axis=0))
        # (A slice along the first axis copies nothing.)
        return lambda begin, size: tf.slice(rows, begin, size)
    every, batch = _as_rows(tensor), sizes(tensor)[1]
    read = tf.constant([[head // sharing] for head in heads])
    place = tf.reshape(read * batch + tf.range(batch), [-1])
    return lambda begin, size: tf.gather(every, tf.slice(place, begin[:1], size[:1]))


def _over_heads(
    part: Part, step: Callable, shapes: list[list[Tensor]], query: Tensor, *others: Tensor
) -> list[Tensor]:
    """The results of `step`, `(n, 1, L, size)` each, for all together: `(B, L, H, size)`.

    `shapes`: L and size of each.
    """
    batch, queries, heads, _ = sizes(query)
    logits_of_a_row = queries * sizes(others[0])[1]
    rows = tf.clip_by_value(part.tuning.most_logits_of_a_step // logits_of_a_row, 1, heads * batch)
    operands = [tf.transpose(tensor, (2, 0, 1, 3)) for tensor in (query * part.scale, *others)]
    sharing = [part.sharing if place in (1, 2) else 1 for place in range(len(operands))]
    groups = part.groups()
    results = [empty(query.dtype, [heads * batch, 1, *shape]) for shape in shapes]

    def of_rule_alone(
        results: list[Tensor], rule: MaskSpec, of_rule: tuple[int, ...], done: Length
    ) -> list[Tensor]:
        """`results` with those of the heads with one rule, after the rows `done`."""
        own = [_rows_of(x, of_rule, n) for x, n in zip(operands, sharing, strict=True)]

        count = len(of_rule) * batch

        def masked_by(masks: Callable | None) -> list[Tensor]:
            def of_step(i: Tensor) -> list:
                first = i * rows
                begin = tf.stack([first, 0, 0, 0])
                size = tf.stack([tf.minimum(rows, count - first), -1, -1, -1])
                operands = [rows_in(begin, size) for rows_in in own]
                places = done + tf.range(first, first + size[0])
                return [(written, places, x) for x in step(masks and masks(begin, size), *operands)]

            return looped(-(-count // rows), of_step, results)

        if rule.constant:
            return masked_by(None)
        allowed = allowed_tile(rule, part.bound, of_rule)
        masks = _of_step(allowed, len(of_rule), batch)
        if allowed.shape[2] != 1:
            return masked_by(masks)
        # Of keys alone, padding as a rule: a batch without any is not masked for it.
        return tf.cond(tf.reduce_all(allowed), lambda: masked_by(None), lambda: masked_by(masks))

    done = 0
    for rule, of_rule in groups:
        results = of_rule_alone(results, rule, of_rule, done)
        done += len(of_rule) * batch
    order = [head for _, of_rule in groups for head in of_rule]

    def positions_first(tensor: Tensor) -> Tensor:
        """`(H * B, 1, L, size)`, the heads in some order, to `(B, L, H, size)`."""
        tensor = tf.reshape(tensor, [len(order), -1, *sizes(tensor)[2:]])
        return tf.transpose(in_order(tensor, order, axis=0), (1, 2, 0, 3))

    return [positions_first(x) for x in results]


def _as_rows(tensor: Tensor) -> Tensor:
    """`(h, B, L, size)` to `(h * B, 1, L, size)`."""
    return tf.reshape(tensor, [-1, 1, *sizes(tensor)[2:]])
