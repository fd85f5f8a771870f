"""The body of a tile on TensorFlow, forward and backward: of its loop, at once, and head by head.

Rows are queries of some heads, `(b, h, t, size)`, keys those that they may see, `(b, hk, s, size)`;
`sharing` query heads read each key head. A kernel decides which rows and keys these are, and what
is kept for the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_headmask._keras import checks_numerics
from keras_headmask.attention import nonfinite
from keras_headmask.attention.head_groups import folded, unfolded
from keras_headmask.attention.logits import Changes
from keras_headmask.masks import Mask, Tensor


def product_of(rows: Tensor, keys: Tensor, sharing: int, transpose_b: bool = False) -> Tensor:
    """`rows @ keys`, rows of every query head by keys (or values) of the key head that it reads."""
    product = tf.matmul(folded(rows, sharing), keys, transpose_b=transpose_b)
    return unfolded(product, sharing)


def sum_for_keys(pairs: Tensor, rows: Tensor, sharing: int) -> Tensor:
    """`pairs^T @ rows`, summed over the query heads that share a key head."""
    return tf.matmul(folded(pairs, sharing), folded(rows, sharing), transpose_a=True)


def logits_of(
    queries: Tensor,
    keys: Tensor,
    allowed: Mask | None,
    sharing: int = 1,
    changed: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, Mask | None, Tensor | None]:
    """The logits, `hidden_logit` where hidden, and which rows see something (`None`: all do).

    Fully masked rows have 0 throughout, so that they do not become NaN. `changed` makes of the
    products the logits, and the soft cap's derivative, which is returned, too.
    """
    logits, slope = product_of(queries, keys, sharing, transpose_b=True), None
    if changed is not None:
        logits, slope = changed(logits)
    if allowed is None:
        return logits, None, slope
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    hidden = tf.constant(nonfinite.hidden_logit(logits.dtype), logits.dtype)
    hidden = tf.where(alive, hidden, tf.zeros([], logits.dtype))
    return tf.where(allowed, logits, hidden), alive, slope


def times(probabilities: Tensor, gradients: Tensor) -> Tensor:
    """Their product, 0 where the probability is 0: a hidden value may let a gradient overflow."""
    return tf.math.multiply_no_nan(gradients, probabilities)


def alive_or_0(alive: Mask | None, rows: Tensor) -> Tensor:
    return rows if alive is None else tf.where(alive, rows, tf.zeros_like(rows))


def softmax(changes: Changes, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """The probabilities of a tile; with sinks, the log of each row's sum of exponentials, too."""
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


def as_they_are(probabilities: Tensor) -> Tensor:
    return probabilities


def context_of(
    probabilities: Tensor,
    values: Tensor,
    alive: Mask | None,
    sharing: int = 1,
    dropped: Callable[[Tensor], Tensor] = as_they_are,
) -> Tensor:
    """The context `(b, h, t, Dv)`, 0 in rows that see nothing."""
    return alive_or_0(alive, product_of(dropped(probabilities), values, sharing))


class Gradients(NamedTuple):
    """Of a tile's logits, queries, keys and values; of the logits before a soft cap's slope."""

    logits: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def gradients_of(
    probabilities: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    d_context: Tensor,
    delta: Tensor | None = None,
    sharing: int = 1,
    dropped: Callable[[Tensor], Tensor] = as_they_are,
    slope: Tensor | None = None,
) -> Gradients:
    """From the gradient of the context. `probabilities` are those before `dropped`.

    `delta`, `(b, h, t, 1)`, is the sum of the context times its gradient; `None`: not known, and
    found from the probabilities. `slope` is the derivative of a soft cap.
    """
    d_probabilities = dropped(product_of(d_context, values, sharing, transpose_b=True))
    if delta is None:
        delta = tf.reduce_sum(times(probabilities, d_probabilities), -1, keepdims=True)
    d_logits = times(probabilities, d_probabilities - delta)
    d_products = d_logits if slope is None else times(d_logits, slope)
    return Gradients(
        d_logits,
        product_of(d_products, keys, sharing),
        sum_for_keys(d_products, queries, sharing),
        sum_for_keys(dropped(probabilities), d_context, sharing),
    )
