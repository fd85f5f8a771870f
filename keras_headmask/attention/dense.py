"""The definition of attention under a mask, and the oracle of every faster implementation.

Booleans are merged first; -1e9 is added once, in at least float32, before the softmax; a hidden key
has probability exactly 0, and a fully masked row gives exactly 0.

Beside the mask a soft cap, a bias and sinks change logits, in a fixed order: query . key * scale;
the soft cap; plus the bias; the mask; the softmax, with the sink in its sum. What is hidden is
hidden after all of them, so none can open it.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention.head_groups import sharing_of
from keras_headmask.masks import Mask, Tensor

_LEAST_SOFT_CAP = float(np.finfo("float32").tiny)


class Changes(NamedTuple):
    """Soft cap, bias, sinks. A bias takes all logits, the others are applied in tiles, too."""

    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    bias: Tensor | None = None  # (B or 1, H or 1, T or 1, S or 1)
    sinks: Tensor | None = None  # (H,): logits that join the sum of each row, and have no value

    @property
    def are_some(self) -> bool:
        return any(x is not None for x in self)


NONE = Changes()


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


# --- As callers give them ------------------------------------------------------------------------


def checked_bias(bias: Any, name: str, *lengths: int | None) -> Tensor | None:
    """`bias` as a tensor of rank 4, if its dtype and static shape fit `lengths`, (B, H, T, S)."""
    if bias is None:
        return None
    bias = masks.as_tensor(bias)
    dtype, shape = keras.backend.standardize_dtype(bias.dtype), tuple(bias.shape)
    if "float" not in dtype:
        raise TypeError(
            f"`{name}` must be floats, which are added to the logits. Received dtype {dtype}. What "
            "a query may attend to is a mask."
        )
    rank = len(shape)
    sizes = lengths[4 - rank :] if rank <= 4 else ()
    if rank > 4 or not all(map(masks.fits, shape, sizes)):
        raise ValueError(
            f"`{name}` must broadcast to (batch, heads, queries, keys) = {lengths}; a rank below 4 "
            f"lacks the first axes. Received: shape {shape}."
        )
    return ops.expand_dims(bias, tuple(range(4 - rank))) if rank < 4 else bias


def checked_changes(
    lengths: Sequence[int | None], bias: Any = None, soft_cap: Any = None, sinks: Any = None
) -> Changes:
    """The arguments of `hm.dot_product_attention`, checked; `lengths` are (B, H, T, S)."""
    if sinks is not None:
        sinks = masks.as_tensor(sinks)
        dtype = keras.backend.standardize_dtype(sinks.dtype)
        if "float" not in dtype or tuple(sinks.shape) != (lengths[1],):
            raise ValueError(
                f"`sinks` must be floats of shape ({lengths[1]},). Received: {dtype} of shape "
                f"{tuple(sinks.shape)}."
            )
    return Changes(_checked_soft_cap(soft_cap), checked_bias(bias, "bias", *lengths), sinks)


def _checked_soft_cap(soft_cap: Any) -> float | None:
    if soft_cap is None:
        return None
    is_number = isinstance(soft_cap, numbers.Real) and not isinstance(soft_cap, bool)
    if not is_number:
        raise TypeError(f"`logits_soft_cap` must be a number. Received: {soft_cap!r}.")
    if not (soft_cap >= _LEAST_SOFT_CAP and math.isfinite(soft_cap)):
        raise ValueError(
            f"`logits_soft_cap` must be at least {_LEAST_SOFT_CAP:.4g}, the smallest normal number "
            f"of float32, and finite. Received: {soft_cap!r}."
        )
    return float(soft_cap)
