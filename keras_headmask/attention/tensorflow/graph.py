"""What TensorFlow's kernels share: one product, functions in a graph, hand-written gradients."""

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention.dense import capped, with_sinks
from keras_headmask.attention.request import Part, folded, unfolded
from keras_headmask.attention.scopes import functions_of_export, is_forward_only
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.evaluation import Bound, put_together, taken_apart


def attended(
    part: Part, hides: Tensor, number: Any, rows: Tensor, keys: Tensor, values: Tensor, *sinks: Any
) -> Tensor:
    """The context of scaled `rows` `(m, H, b, D)`, for `keys` and `values` `(m, Hk, w, ...)`.

    `hides` is added to the logits. `number` differs by call in a head group, for its dropout.
    """
    product = tf.matmul(folded(rows, part.sharing), keys, transpose_b=True)
    logits = unfolded(product, part.sharing)
    if part.soft_cap is not None:
        logits = capped(logits, part.soft_cap)
    logits += hides
    if sinks:
        logits = with_sinks(logits, sinks[0][:, None, None])
    probabilities = tf.nn.softmax(logits)
    probabilities = probabilities[..., :-1] if sinks else probabilities
    if part.dropout is not None:
        probabilities = part.dropout.of(probabilities, part, number)
    return unfolded(tf.matmul(folded(probabilities, part.sharing), values), part.sharing)


def hiding(allowed: Mask, alive: Mask, dtype: tf.DType) -> Tensor:
    """-inf for what is hidden, to be added to logits; 0 for the rest and in rows without a key."""
    # (-inf is an error where TensorFlow checks numbers.)
    lowest = dtype.min / 2 if _keras.checks_numerics() else -math.inf
    return tf.where(tf.equal(allowed, alive), tf.zeros([], dtype), tf.constant(lowest, dtype))


# --- Functions that layers share ------------------------------------------------------------------


def _kept(make: Callable[[], Callable], *key: Any) -> Callable:
    """`make()`, once for an equal `key` in what is traced now, or in all of an export.

    Kept for longer, the functions would be all that is left of models that are gone.
    """
    functions = functions_of_export()
    if functions is None:
        graph = _keras.outermost_graph()
        functions = getattr(graph, "headmask_functions", {})
        graph.headmask_functions = functions
    key = *key, is_forward_only(), _keras.checks_numerics()
    if key not in functions:
        functions[key] = make()
    return functions[key]


def one_function(compute: Callable) -> Callable:
    """Let `compute(part, shared, *operands)` be one function in a graph for all equal `Part`s.

    So a model of 24 layers holds, exports and loads each loop once. `shared` is a structure of
    tensors.
    """

    @functools.wraps(compute)
    def call(part: Any, shared: Any, *operands: Tensor) -> Tensor:
        bound, dropout = part.bound, part.dropout
        if tf.executing_eagerly():
            return compute(part, shared, *operands)
        names, values = taken_apart(bound.leaf_inputs)
        drawn = []
        if dropout is not None:
            drawn, dropout = [dropout.seed], dropout._replace(seed=None)
        part = part._replace(bound=None, dropout=dropout)
        # The part holds its tuning; what is traced depends on nothing else.
        about = compute, part, names
        function = _kept(lambda: _function(*about), *about)
        positions = bound.query_positions, bound.key_positions
        return function(*positions, values, drawn, shared, *operands)

    return call


def _function(compute: Callable, part: Any, names: tuple) -> Callable:
    """`compute` as a function of tensors alone, for a part without its `bound` and draws."""

    # Not inlined where it is called, or the graph would hold a copy for each call again, and be
    # optimised as many.
    @tf.function(autograph=False, experimental_attributes=_keras.NOT_INLINED)
    def function(
        queries: Tensor, keys: Tensor, values: list, drawn: list, shared: Any, *operands: Tensor
    ) -> Tensor:
        dropout = part.dropout
        if dropout is not None:
            dropout = dropout._replace(seed=drawn[0])
        bound = Bound(queries, keys, put_together(names, values))
        return compute(part._replace(bound=bound, dropout=dropout), shared, *operands)

    return function


# --- Gradients ------------------------------------------------------------------------------------


def with_own_gradient(forward: Callable, backward: Callable, *operands: Tensor) -> Tensor:
    """`forward(*operands)`, the context, with a gradient that computes it again.

    `backward` takes the operands and the gradient of the context, and gives the gradients of the
    operands.
    """

    def attention(*operands: Tensor) -> tuple[Tensor, Callable]:
        query, _, value = operands[:3]
        context = forward(*operands)
        context = tf.ensure_shape(context, [*query.shape[:3], value.shape[3]])

        def gradient(upstream: Tensor) -> tuple:
            return tuple(backward(*operands, tf.ensure_shape(upstream, context.shape)))

        return context, gradient

    # (Forward mode derives each operation; its own tape would record none of `backward`'s.)
    if is_forward_only() or _keras.in_forward_mode(*operands):
        return attention(*operands)[0]
    return _keras.custom_gradient(attention)(*operands)


def zeros_to_add_to(like: Tensor) -> Tensor:
    """Zeros that are one tensor with no others: TensorFlow would merge two of `zeros_like`."""
    return tf.raw_ops.Empty(shape=tf.shape(like), dtype=like.dtype, init=True)


def on_gpu() -> Tensor:
    """0 if what is traced runs on a CPU, else at least 1: an int32, which stays on the host.

    The graph asks when it runs: a model that is saved on a CPU may be served on a GPU.
    """
    return tf.raw_ops.DeviceIndex(device_names=["CPU", "GPU"])


@_keras.custom_gradient
def added(tensor: Tensor, where: Tensor, rows: Tensor, is_gpu: Tensor) -> tuple[Tensor, Callable]:
    """`tensor`, which nobody else may read, with `rows` added at places on its first axis."""

    def gradient(upstream: Tensor) -> tuple:
        return upstream, None, tf.gather(upstream, where), None

    def in_place() -> Tensor:
        return tf.raw_ops.InplaceAdd(x=tensor, i=tf.cast(where, tf.int32), v=rows)

    def in_copy() -> Tensor:
        return tf.tensor_scatter_nd_add(tensor, where[:, None], rows)

    # A GPU that adds in place loses rows of places that occur twice; a CPU would copy all of
    # `tensor` in each of its many steps.
    with _keras.unrecorded():
        if _keras.in_vectorized_map():
            return in_place(), gradient
        return tf.cond(is_gpu > 0, in_copy, in_place), gradient
