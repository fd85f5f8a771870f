"""The body of a step of TensorFlow's loop, forward and backward.

Rows are queries of some heads, `(b, h, t, size)`, keys those that they may see, `(b, hk, s, size)`;
`sharing` query heads read each key head.
"""

from collections.abc import Callable

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


def hidden(logits: Tensor, allowed: Mask) -> tuple[Tensor, Mask]:
    """The logits, `hidden_logit` where hidden, and which rows see something.

    Fully masked rows have 0 throughout, so that they do not become NaN.
    """
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    lowest = tf.constant(nonfinite.hidden_logit(logits.dtype), logits.dtype)
    return tf.where(allowed, logits, tf.where(alive, lowest, tf.zeros([], logits.dtype))), alive


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


def context_of(
    probabilities: Tensor,
    values: Tensor,
    alive: Mask | None,
    sharing: int,
    dropped: Callable[[Tensor], Tensor],
) -> Tensor:
    """The context `(b, h, t, Dv)`, 0 in rows that see nothing."""
    return alive_or_0(alive, product_of(dropped(probabilities), values, sharing))


def gradients_of_pairs(
    probabilities: Tensor,
    values: Tensor,
    d_context: Tensor,
    delta: Tensor,
    sharing: int,
    dropped: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Those of a step's logits and of its values, from that of the context.

    `probabilities` are those before `dropped`. `delta`, `(b, h, t, 1)`, is the sum of the context
    times its gradient.
    """
    d_probabilities = dropped(product_of(d_context, values, sharing, transpose_b=True))
    d_logits = times(probabilities, d_probabilities - delta)
    return d_logits, sum_for_keys(dropped(probabilities), d_context, sharing)
