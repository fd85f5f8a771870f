"""A hidden inf or NaN does no harm.

0 * inf is NaN, so a probability of 0 does not hide a value that is not finite, nor a gradient of 0
a key or a query. Products meet 0 in place of such values. Queries that may see one get NaN, by
their logits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask._keras.tensorflow import checks_numerics, in_vectorized_map, in_xla
from keras_headmask.masks import Mask, Tensor

_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}


def hidden_logit(dtype: Any) -> float:
    """The value that replaces a hidden logit, even one that is inf or NaN.

    It is -inf, so a key stays hidden where every visible logit is -inf, too. (A row that sees no
    key has 0 instead, so that it is not NaN.) Where TensorFlow raises at any inf or NaN, the value
    is finite.
    """
    largest = _LARGEST[keras.backend.standardize_dtype(dtype)]
    return -largest / 2 if checks_numerics() else float("-inf")


def are_finite(*tensors: Tensor, may_branch: bool = True) -> bool | Tensor:
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

        if checks_numerics():  # then all are, or that has been said; and NaN may not be written
            return True
        if in_xla() or in_vectorized_map():
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
        except RuntimeError:  # inside `torch.func.vmap`, where values are not known
            return False


def repaired(
    finite: bool | Tensor, repair: Callable, *tensors: Tensor, beside: Sequence[Tensor] = ()
) -> list[Tensor]:
    """`tensors` as they are if `finite`, the answer of `are_finite`, else repaired.

    That is `repair(*tensors, *beside)`, a list. A graph traces it once for all of equal shapes,
    since branches took a quarter of the first `predict` of a model: so `repair` is a function of a
    module, which captures no tensor.
    """
    if isinstance(finite, bool):
        return list(tensors) if finite else repair(*tensors, *beside)
    from keras_headmask.attention.tensorflow.graph import for_equal_shapes

    return for_equal_shapes(_branch, repair)(finite, tensors, tuple(beside))


def _branch(
    repair: Callable, finite: Tensor, tensors: Sequence[Tensor], beside: Sequence[Tensor]
) -> list[Tensor]:
    return ops.cond(finite, lambda: list(tensors), lambda: repair(*tensors, *beside))


def replace_nonfinite(*tensors: Tensor) -> list[Tensor]:
    """`tensors` with 0 in place of inf and NaN."""
    return [ops.where(_is_finite(x), x, ops.zeros_like(x)) for x in tensors]


def replace_nonfinite_if_any(*tensors: Tensor) -> list[Tensor]:
    """The same, and nothing is copied where all are finite."""
    return repaired(are_finite(*tensors), replace_nonfinite, *tensors)


def nan_at_nonfinite(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The operands for logits that are NaN where a query may see what is not finite.

    `value` has 0 in place of inf and NaN; a key is NaN as a whole where it or its value had one,
    and a query where it had one. (An infinite query might give all allowed keys lower logits than
    hidden ones.) Any order of axes, the size last. Values alone are checked first: a key spoils no
    other row, and each check costs a percent or two.
    """
    return repaired(are_finite(value), _with_nan, query, key, value)


def _with_nan(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    nan = _nan(key.dtype)
    is_sound = ops.logical_and(_rows_are_finite(key), _rows_are_finite(value))
    query = ops.where(_rows_are_finite(query), query, nan)
    return [query, ops.where(is_sound, key, nan), *replace_nonfinite(value)]


def add_nan_to_logits(logits: Tensor, query: Tensor, *keys: Tensor) -> list[Tensor]:
    """`logits` `(B, H, T, S)`, NaN for each pair with a query or key that is not finite.

    `keys` are the keys and what else belongs to them. The operands are `(B, L, H, D)`.
    """
    # Floats are transposed, not booleans, which oneDNN cannot and logs.
    of_rows = ops.transpose(nan_marks(query), (0, 2, 1, 3))
    of_keys = ops.transpose(nan_marks(*keys), (0, 2, 3, 1))
    if keras.backend.backend() == "torch" and not keras.backend.is_keras_tensor(of_rows):
        # Else their sum has the heads innermost, and the logits are read out of order to add it.
        of_rows, of_keys = of_rows.contiguous(), of_keys.contiguous()
    return [logits + (of_rows + of_keys)]


def nan_marks(*tensors: Tensor) -> Tensor:
    """0, and NaN where a row of one of `tensors` is not finite: of their shape, the size 1."""
    rows = functools.reduce(ops.logical_and, map(_rows_are_finite, tensors))
    dtype = tensors[0].dtype
    return ops.where(rows, ops.cast(0.0, dtype), _nan(dtype))


def _nan(dtype: Any) -> Any:
    if keras.backend.backend() == "jax":  # where `jax_debug_nans` refuses one that is cast
        return np.asarray(float("nan"), dtype)
    return ops.cast(float("nan"), dtype)


def _is_finite(tensor: Tensor) -> Mask:
    # Not `isfinite`, which not every format of other runtimes has.
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    # (Not `ops.cast`, which makes a float32 of the number first on TensorFlow: inf, of float64.)
    return ops.abs(tensor) <= ops.convert_to_tensor(_LARGEST[dtype], dtype)


def _rows_are_finite(tensor: Tensor) -> Mask:
    return ops.all(_is_finite(tensor), axis=-1, keepdims=True)
