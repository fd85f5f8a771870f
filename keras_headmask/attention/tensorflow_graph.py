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
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.rules.evaluation import Bound
from keras_headmask.rules.protocol import Sides


def shared(how: Callable, part: Any, *operands: Any) -> Any:
    """`how(part, *operands)` for a `parts.Part`; in a graph by one function for all equal parts."""
    if tf.executing_eagerly() or part.dropout is not None:
        return how(part, *operands)
    bound = part.bound
    names = tuple((leaf, tuple(values)) for leaf, values in bound.leaf_inputs.items())
    values = [list(values.values()) for values in bound.leaf_inputs.values()]
    function = _shared(how, part._replace(bound=None), names, is_forward_only())
    return function(bound.query_positions, bound.key_positions, values, *operands)


@functools.lru_cache(maxsize=128)
def _shared(how: Callable, part: Any, names: tuple, forward_only: bool) -> Callable:
    """`how` as a function of tensors alone, for a part without its `bound`.

    Of the key are `forward_only`, as what was traced with gradients is not for an export, and the
    tuning, which the part holds.
    """

    # Not inlined, or the graph would hold a copy for each call again, and be optimised as many.
    @tf.function(autograph=False, experimental_attributes=_keras.NOT_INLINED)
    def attend(queries: Any, keys: Any, values: list, *operands: Any) -> Any:
        inputs = {
            leaf: dict(zip(of_leaf, given, strict=True))
            for (leaf, of_leaf), given in zip(names, values, strict=True)
        }
        return how(part._replace(bound=Bound(queries, keys, inputs)), *operands)

    return attend


def computed_again(forward: Callable, backward: Callable, query: Any, key: Any, value: Any) -> Any:
    """`forward(query, key, value)`, with `backward` for a gradient that keeps no logits.

    `backward` takes the operands, the gradient of the context and the context. Neither is called
    where there is no query or no key.
    """

    def attention(query: Any, key: Any, value: Any) -> Any:
        operands = query, key, value
        something = (tf.size(query) > 0) & (tf.size(key) > 0)

        def nothing() -> Any:
            return tf.zeros([*tf.unstack(tf.shape(query)[:3]), tf.shape(value)[3]], value.dtype)

        context = tf.cond(something, lambda: forward(*finite.marked(*operands)), nothing)
        context = tf.ensure_shape(context, [*query.shape[:3], value.shape[3]])

        def gradient(upstream: Any) -> Any:
            upstream = tf.ensure_shape(upstream, context.shape)
            return tf.cond(
                something,
                lambda: backward(*finite.without_bad(*operands), upstream, context),
                lambda: tuple(map(tf.zeros_like, operands)),
            )

        return context, gradient

    if is_forward_only():
        return attention(query, key, value)[0]
    return tf.custom_gradient(attention)(query, key, value)


def widened(bound: Bound) -> Bound:
    """Whole masks, widened to all queries and keys along the axes of a size not known yet.

    An axis of size 1 is not cut into tiles, and here only the run tells whether it is 1.
    """

    def widen(value: Any) -> Any:
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


def masked_logits(logits: Any, allowed: Any, whole_rows: bool = True) -> tuple[Any, Any]:
    """`logits`, -inf where hidden, and which rows see something.

    With `whole_rows` one that sees nothing has 0 throughout, of which no NaN comes.
    """
    alive = tf.reduce_any(allowed, axis=-1, keepdims=True)
    hidden = tf.constant(finite.HIDDEN, logits.dtype)
    if whole_rows:
        hidden = tf.where(alive, hidden, tf.zeros([], logits.dtype))
    return tf.where(allowed, logits, hidden), alive


def times(probabilities: Any, gradients: Any) -> Any:
    """Their product, 0 where the probability is 0: a hidden value may let a gradient overflow."""
    return tf.math.multiply_no_nan(gradients, probabilities)


def alive_or_0(alive: Any, rows: Any) -> Any:
    return rows if alive is None else tf.where(alive, rows, tf.zeros_like(rows))
