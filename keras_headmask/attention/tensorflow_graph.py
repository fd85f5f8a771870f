"""What both implementations in TensorFlow graphs share.

Layers with the same rule share one function, so that a model of 24 layers holds, exports and loads
each loop once; and a backward pass computes the logits again instead of keeping them.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention import finite
from keras_headmask.attention.parts import folded, unfolded
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.protocol import Bound, Sides


def shared(attend: Callable) -> Callable:
    """Let `attend(part, query, key, value)` be one function in a graph for all equal `Part`s."""

    @functools.wraps(attend)
    @tf.autograph.experimental.do_not_convert
    def call(part: Any, *operands: Tensor) -> Tensor:
        bound = part.bound
        if tf.executing_eagerly() or part.dropout is not None:
            return attend(part._replace(bound=_widened(bound)), *operands)
        names = tuple((leaf, tuple(values)) for leaf, values in bound.leaf_inputs.items())
        values = [list(values.values()) for values in bound.leaf_inputs.values()]
        function = _shared(attend, part._replace(bound=None), names, is_forward_only())
        return function(bound.query_positions, bound.key_positions, values, *operands)

    return call


@functools.lru_cache(maxsize=128)
def _shared(attend: Callable, part: Any, names: tuple, forward_only: bool) -> Callable:
    """`attend` as a function of tensors alone, for a part without its `bound`.

    The key of the cache holds `forward_only`, as an export has no use for what was traced with
    gradients, and the part's tuning.
    """

    # Not inlined, or the graph would hold a copy for each call again, and be optimised as many.
    @tf.function(autograph=False, experimental_attributes=_keras.NOT_INLINED)
    def function(queries: Tensor, keys: Tensor, values: list, *operands: Tensor) -> Tensor:
        inputs = {
            leaf: dict(zip(of_leaf, given, strict=True))
            for (leaf, of_leaf), given in zip(names, values, strict=True)
        }
        return attend(part._replace(bound=_widened(Bound(queries, keys, inputs))), *operands)

    return function


def _widened(bound: Bound) -> Bound:
    """Whole masks, widened to all queries and keys along the axes of a size not known yet.

    An axis of size 1 is not cut into tiles, and here only the run shows whether it is 1.
    """

    def widen(value: Tensor | Sides) -> Tensor | Sides:
        if isinstance(value, Sides):
            return value
        if value.shape[2] is None:
            value = value & (bound.query_positions >= bound.query_positions)[:, None]
        if value.shape[3] is None:
            value = value & (bound.key_positions >= bound.key_positions)
        return value

    inputs = {
        leaf: {name: widen(value) for name, value in values.items()}
        for leaf, values in bound.leaf_inputs.items()
    }
    return bound._replace(leaf_inputs=inputs)


def computed_again(forward: Callable, backward: Callable, *operands: Tensor) -> Tensor:
    """`forward(query, key, value)`, with `backward` for a gradient that keeps no logits.

    `backward` takes the operands, the gradient of the context and the context. Neither is called
    where there is no query or no key.
    """

    def attention(*operands: Tensor) -> tuple[Tensor, Callable]:
        query, key, value = operands
        something = (tf.size(query) > 0) & (tf.size(key) > 0)

        def nothing() -> Tensor:
            return tf.zeros([*tf.unstack(tf.shape(query)[:3]), tf.shape(value)[3]], value.dtype)

        context = tf.cond(something, lambda: forward(*finite.marked(*operands)), nothing)
        context = tf.ensure_shape(context, [*query.shape[:3], value.shape[3]])

        def gradient(upstream: Tensor) -> tuple:
            upstream = tf.ensure_shape(upstream, context.shape)
            return tf.cond(
                something,
                lambda: backward(*finite.without_bad(*operands), upstream, context),
                lambda: tuple(map(tf.zeros_like, operands)),
            )

        return context, gradient

    return (
        attention(*operands)[0] if is_forward_only() else tf.custom_gradient(attention)(*operands)
    )


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
    whole_rows: bool = True,
    sharing: int = 1,
) -> tuple[Tensor, Mask | None]:
    """The logits, -inf where hidden, and which rows see something (`None`: all do).

    With `whole_rows` fully masked rows have 0 throughout, so that they do not become NaN.
    """
    logits = product_of(queries, keys, sharing, transpose_b=True)
    if allowed is None:
        return logits, None
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    hidden = tf.constant(finite.HIDDEN, logits.dtype)
    if whole_rows:
        hidden = tf.where(alive, hidden, tf.zeros([], logits.dtype))
    return tf.where(allowed, logits, hidden), alive


def times(probabilities: Tensor, gradients: Tensor) -> Tensor:
    """Their product, 0 where the probability is 0: a hidden value may let a gradient overflow."""
    return tf.math.multiply_no_nan(gradients, probabilities)


def alive_or_0(alive: Mask | None, rows: Tensor) -> Tensor:
    return rows if alive is None else tf.where(alive, rows, tf.zeros_like(rows))
