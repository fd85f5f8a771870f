"""A hidden inf or NaN does no harm.

0 * inf is NaN, so a probability of 0 does not hide a value that is not finite, nor a gradient of 0
a key or a query. Products meet 0 in place of such values. Who may see one gets NaN by the logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_headmask._keras import in_xla

# In place of a hidden logit: whatever that is, inf or NaN, it is hidden, and no less so where all
# that a query may see is -inf. (A row that sees nothing has 0 instead, so that no NaN comes of it.)
HIDDEN = float("-inf")
_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}


def are_finite(*tensors: Any, may_branch: bool = True) -> Any:
    """Whether all of `tensors` are finite: a bool, or in a TensorFlow graph a boolean tensor.

    `False` also where a branch is not possible, or would wait for an accelerator: there XLA and the
    like make the repair a part of other operations. Sums too large are taken for infinite: the
    repair then changes nothing.
    """
    backend = keras.backend.backend()
    if not may_branch or backend == "jax" or any(map(keras.backend.is_keras_tensor, tensors)):
        return False
    if backend == "tensorflow":
        import tensorflow as tf

        if in_xla():
            return False
        total = tf.add_n([tf.cast(tf.reduce_sum(x), "float32") for x in tensors])
        finite = tf.math.is_finite(total)
        return bool(finite) if tf.executing_eagerly() else finite
    import torch

    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return False
    with torch.no_grad():
        try:
            return bool(torch.isfinite(sum(x.sum().float() for x in tensors)))
        except RuntimeError:  # inside `torch.func.vmap`, which knows no value
            return False


def unless(finite: Any, repair: Callable, *tensors: Any) -> list[Any]:
    """`tensors` as they are if `finite`, the answer of `are_finite`, else `repair(*tensors)`."""
    if isinstance(finite, bool):
        return list(tensors if finite else repair(*tensors))
    return list(ops.cond(finite, lambda: list(tensors), lambda: list(repair(*tensors))))


def zeroed(*tensors: Any) -> list[Any]:
    """`tensors` with 0 in place of inf and NaN."""
    return [ops.where(_is_finite(x), x, ops.zeros_like(x)) for x in tensors]


def without_bad(*tensors: Any) -> list[Any]:
    """`zeroed`, and where nothing is to be done nothing is copied."""
    return unless(are_finite(*tensors), zeroed, *tensors)


def marked(query: Any, key: Any, value: Any) -> list[Any]:
    """The operands for logits that show who may see what is not finite: those become NaN.

    `value` has 0 in place of inf and NaN; a key is NaN as a whole where it or its value had one,
    and a query where it had one. (An infinite query might give all allowed keys lower logits
    than hidden ones.) A hidden logit is taken out, whatever it is. Any order of axes with the size
    last. Only values are looked at first: a key spoils no other row, and each look costs a percent
    or two.
    """

    def mark(query: Any, key: Any, value: Any) -> list[Any]:
        bad = ops.cast(float("nan"), key.dtype)
        sound = ops.logical_and(_rows_are_finite(key), _rows_are_finite(value))
        query = ops.where(_rows_are_finite(query), query, bad)
        return [query, ops.where(sound, key, bad), *zeroed(value)]

    return unless(are_finite(value), mark, query, key, value)


def marks(query: Any, *keys: Any, heads_first: bool = False) -> Any:
    """0, and NaN for each pair with a query or key that is not finite: `(B, H, T, S)`.

    `keys` are the keys and what else belongs to them. The operands are `(B, L, H, D)`, or
    `(B, H, L, D)` if `heads_first`. It is to be added to the logits before hidden ones are taken
    out.
    """
    rows = _rows_are_finite(query)
    columns = functools.reduce(ops.logical_and, map(_rows_are_finite, keys))
    heads, length = (1, 2) if heads_first else (2, 1)
    good = ops.logical_and(
        ops.transpose(rows, (0, heads, length, 3)), ops.transpose(columns, (0, heads, 3, length))
    )
    return ops.where(good, ops.cast(0.0, query.dtype), ops.cast(float("nan"), query.dtype))


def _is_finite(tensor: Any) -> Any:
    # Not `isfinite`, which not every format of other runtimes has.
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return ops.abs(tensor) <= ops.cast(_LARGEST[dtype], dtype)


def _rows_are_finite(tensor: Any) -> Any:
    return ops.all(_is_finite(tensor), axis=-1, keepdims=True)
