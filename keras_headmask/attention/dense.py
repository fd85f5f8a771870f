"""The definition of attention under a mask, and the oracle of every faster implementation.

Booleans are merged first; -1e9 is added once, in at least float32, before the softmax; a hidden key
has probability exactly 0, and a fully masked row gives exactly 0.

Beside the mask a soft cap, a bias and sinks change logits, in a fixed order: query . key * scale;
the soft cap; plus the bias; the mask; the softmax, with the sink in its sum. What is hidden is
hidden after all of them, so none can open it.
"""

import math
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention.request import NONE, Changes, sharing_of
from keras_headmask.masks import Mask, Tensor


def hidden_logit(dtype: str) -> np.floating:
    """What stands in place of a hidden logit: -1e9, added to the lowest number.

    Alone -1e9 would hide nothing where all allowed logits are below it.
    """
    return np.finfo(dtype).min + masks.HIDDEN


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    if soft_cap is None:
        return logits
    if keras.backend.backend() != "jax" or keras.backend.is_keras_tensor(logits):
        return soft_cap * ops.tanh(logits / soft_cap)
    import jax.numpy as jnp  # (Keras makes float64 float32 there.)

    return soft_cap * jnp.tanh(logits / soft_cap)


def with_sinks(logits: Tensor, sinks: Tensor) -> Tensor:
    """`logits` `(..., H, T, S)` and one key more, whose value is 0; `sinks` fit their axes."""
    of_rows = ops.sum(ops.zeros_like(logits), axis=-1, keepdims=True)
    return ops.concatenate([logits, sinks + of_rows], axis=-1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float,
    changes: Changes = NONE,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under `mask`, boolean of rank 4, or `None`.

    Of fewer key heads than query heads each is repeated for the queries that share it.

    Returns the context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before `drop`, both in
    the dtype of `value`.
    """
    # (`result_type` would make float64 float32 on JAX and torch.)
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    value_dtype = value.dtype
    sharing = sharing_of(query, key)
    if sharing != 1:
        key, value = (ops.repeat(x, sharing, axis=2) for x in (key, value))
    query, key = ops.cast(query, dtype) * scale, ops.cast(key, dtype)
    if keras.backend.standardize_dtype(value_dtype) in ("float16", "bfloat16"):
        value = ops.cast(value, dtype)
    logits = capped(ops.einsum("bthd,bshd->bhts", query, key), changes.soft_cap)
    sinks = changes.sinks
    if sinks is not None:
        sinks = ops.reshape(ops.cast(sinks, dtype), (-1, 1, 1))
    if changes.bias is not None:
        logits = logits + ops.cast(changes.bias, dtype)
    if mask is not None:
        hidden = ops.cast(hidden_logit(dtype), dtype)
        if changes.bias is not None:  # which may hide, too, or be as low as what is hidden
            mask = ops.logical_and(mask, changes.bias != -math.inf)
            allowed, lowest = ops.where(mask, logits, hidden), hidden_logit(dtype)
            largest = ops.stop_gradient(ops.max(allowed, axis=-1, keepdims=True, initial=lowest))
            logits = logits - largest
            sinks = None if sinks is None else sinks - largest
        logits = ops.where(mask, logits, hidden)
    if sinks is None:
        probabilities = ops.softmax(logits, axis=-1)
    else:
        probabilities = ops.softmax(with_sinks(logits, sinks), axis=-1)[..., :-1]
    if mask is not None:  # for fully masked rows
        probabilities = ops.where(mask, probabilities, ops.cast(0.0, dtype))
    rounded = ops.cast(probabilities, value_dtype)
    kept = ops.cast(probabilities if drop is None else drop(rounded), value.dtype)
    context = ops.einsum("bhts,bshd->bthd", kept, value)
    return ops.cast(context, value_dtype), rounded
