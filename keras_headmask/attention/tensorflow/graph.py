"""What both implementations in TensorFlow graphs share.

Layers with the same rule share one function, so that a model of 24 layers holds, exports and loads
each loop once; and a backward pass computes the logits again instead of keeping them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention import nonfinite
from keras_headmask.attention.tensorflow.functions import held
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Mask, Tensor, sizes
from keras_headmask.rules.protocol import Bound, Sides


def shared(compute: Callable, is_called: bool = True) -> Callable:
    """Let `compute(part, query, key, value)` be one function in a graph for all equal `Part`s.

    Whole masks come widened: see `_widened`.
    """

    @functools.wraps(compute)
    def call(part: Any, *operands: Tensor) -> Tensor:
        bound, dropout = part.bound, part.dropout
        if tf.executing_eagerly():
            return compute(part._replace(bound=_widened(bound) if is_called else bound), *operands)
        names = tuple((leaf, tuple(values)) for leaf, values in bound.leaf_inputs.items())
        values = [list(values.values()) for values in bound.leaf_inputs.values()]
        drawn = []
        if dropout is not None:
            drawn = [dropout.rows, dropout.columns]
            dropout = dropout._replace(rows=None, columns=None)
        part = part._replace(bound=None, dropout=dropout)
        # The part holds its tuning; what is traced depends on nothing else.
        key = compute, part, names, is_forward_only(), _keras.checks_numerics()
        functions = held()
        if key not in functions:
            functions[key] = _function(compute, part, names, is_called)
        positions = bound.query_positions, bound.key_positions
        return functions[key](*positions, values, drawn, *operands)

    return call


def traced_once(compute: Callable) -> Callable:
    """The same, but TensorFlow puts the function in place of each call before the graph runs.

    So layers share the time that Python takes, and the graph runs as if each had its own. Whole
    masks come as they are.
    """
    return shared(compute, is_called=False)


def _function(compute: Callable, part: Any, names: tuple, is_called: bool) -> Callable:
    """`compute` as a function of tensors alone, for a part without its `bound` and draws."""

    # Not inlined where it is called, or the graph would hold a copy for each call again, and be
    # optimised as many.
    @tf.function(autograph=False, experimental_attributes=_keras.NOT_INLINED if is_called else None)
    def function(
        queries: Tensor, keys: Tensor, values: list, drawn: list, *operands: Tensor
    ) -> Tensor:
        inputs = {
            leaf: dict(zip(of_leaf, given, strict=True))
            for (leaf, of_leaf), given in zip(names, values, strict=True)
        }
        dropout = part.dropout
        if dropout is not None:
            dropout = dropout._replace(rows=drawn[0], columns=drawn[1])
        bound = Bound(queries, keys, inputs)
        whole = part._replace(bound=_widened(bound) if is_called else bound, dropout=dropout)
        return compute(whole, *operands)

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


class Passes(NamedTuple):
    """Attention of `(query, key, value, ...)`, and its gradient.

    `forward` takes the operands and gives a list: the context, and as many tensors of rank 4 as it
    `keeps`. `backward` takes the operands, the gradient of the context and that list, and gives the
    gradients of the operands.
    """

    forward: Callable[..., list[Tensor]]
    backward: Callable[..., tuple]
    keeps: int = 0


def with_own_gradient(passes: Passes, *operands: Tensor) -> Tensor:
    """The context."""

    def attention(*operands: Tensor) -> tuple[Tensor, Callable]:
        query, _, value = operands[:3]
        context, *kept = passes.forward(*operands)
        context = tf.ensure_shape(context, [*query.shape[:3], value.shape[3]])

        def gradient(upstream: Tensor) -> tuple:
            upstream = tf.ensure_shape(upstream, context.shape)
            return tuple(passes.backward(*operands, upstream, context, *kept))

        return context, gradient

    return (
        attention(*operands)[0]
        if is_forward_only()
        else _keras.custom_gradient(attention)(*operands)
    )


def guarded(passes: Passes) -> Passes:
    """`passes`, which keep nothing, for any operands.

    Neither is called where there is no query or no key, and neither meets what is not finite.
    """

    def something(query: Tensor, key: Tensor, *_: Tensor) -> Mask:
        return (tf.size(query) > 0) & (tf.size(key) > 0)

    def forward(*operands: Tensor) -> list[Tensor]:
        query, key, value, *rest = operands

        def attended() -> list[Tensor]:
            return passes.forward(*nonfinite.marked(query, key, value), *rest)

        def nothing() -> list[Tensor]:
            return [empty(value.dtype, [*sizes(query)[:3], sizes(value)[3]], zeros=True)]

        return tf.cond(something(query, key), attended, nothing)

    def backward(*given: Tensor) -> tuple:
        def attended() -> tuple:
            return passes.backward(*nonfinite.without_bad(*given[:3]), *given[3:])

        def nothing() -> tuple:
            return tuple(empty(x.dtype, tf.shape(x), zeros=True) for x in given[:-2])

        return tf.cond(something(*given), attended, nothing)

    return Passes(forward, backward)


# --- Results of a loop, written where they belong -------------------------------------------------

# A `TensorArray` would hold the results a second time while it joins them.


class Row(NamedTuple):
    """What a result has for one position: `shape`, heads first.

    Not `is_of_example`: it is summed over the examples of a step.
    """

    shape: list[Any]
    is_of_example: bool = True

    @classmethod
    def like(cls, of_heads: Tensor, *of_size: Tensor) -> "Row":
        """As many heads as one tensor has, and the size of others; each is `(B, L, H, size)`."""
        return cls([sizes(of_heads)[2], *(sizes(tensor)[3] for tensor in of_size)])

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of `(batch, H, positions, ...)`, one after the other."""
        positions_first = tf.transpose(tensor, (0, 2, 1, 3)[: tensor.shape.rank])
        return tf.reshape(positions_first, [-1, *self.shape])


def empty(dtype: Any, shape: Any, zeros: bool = False) -> Tensor:
    """A tensor of any values, to be written over as a whole, or of zeros.

    (Zeros also where TensorFlow raises for inf. `tf.zeros` in a branch that is seldom taken would
    be made whichever branch is.)
    """
    if is_forward_only():  # other runtimes do not know the operation
        return tf.zeros(shape, dtype)
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=zeros or _keras.checks_numerics())


def looped(count: Tensor, step: Callable[[Tensor], list], results: list[Tensor]) -> list[Tensor]:
    """`results` after `count` steps.

    `step(i)` returns for each of them `written` or `added`, places on its first axis, and rows.
    """

    def run(body: Callable, start: Any) -> Any:
        start = tf.constant(0), start
        return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=10)[1]

    def write(i: Tensor, results: list[Tensor]) -> tuple:
        return i + 1, [put(x, *made) for x, (put, *made) in zip(results, step(i), strict=True)]

    if not is_forward_only():
        return run(write, results)

    # What is saved is read by other runtimes, and may be differentiated where ours is not there.
    def array(dtype: Any, rank: int) -> tf.TensorArray:
        return tf.TensorArray(dtype, count, infer_shape=False, element_shape=[None] * rank)

    def keep(i: Tensor, arrays: list[tuple]) -> tuple:
        pairs = zip(arrays, step(i), strict=True)
        return i + 1, [
            tuple(map(lambda a, x: a.write(i, x), both, made)) for both, (_, *made) in pairs
        ]

    kept = run(keep, [(array("int32", 1), array(x.dtype, x.shape.rank)) for x in results])
    return [
        tf.tensor_scatter_nd_update(x, places.concat()[:, None], rows.concat())
        for x, (places, rows) in zip(results, kept, strict=True)
    ]


@_keras.custom_gradient
def written(tensor: Tensor, where: Tensor, rows: Tensor) -> tuple[Tensor, Callable]:
    """`tensor`, which nobody else may read, with `rows` at the places `where` on its first axis."""

    def gradient(upstream: Tensor) -> tuple:
        of_rows = tf.gather(upstream, where)
        others = tf.tensor_scatter_nd_update(upstream, where[:, None], tf.zeros_like(of_rows))
        return others, None, of_rows

    with _keras.unrecorded():
        return tf.raw_ops.InplaceUpdate(x=tensor, i=where, v=rows), gradient


@_keras.custom_gradient
def added(tensor: Tensor, where: Tensor, rows: Tensor) -> tuple[Tensor, Callable]:
    """`tensor`, which nobody else may read, with `rows` added at places on its first axis."""

    def gradient(upstream: Tensor) -> tuple:
        return upstream, None, tf.gather(upstream, where)

    with _keras.unrecorded():
        return tf.raw_ops.InplaceAdd(x=tensor, i=where, v=rows), gradient
