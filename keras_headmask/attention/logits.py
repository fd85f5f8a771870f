"""Changes to logits and softmax beside the mask: a soft cap, a bias, sinks.

The order is fixed: query . key * scale; the soft cap; plus the bias; the mask; the softmax, with
the sink in its sum. What is hidden is hidden after all of them, so none can open it.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.masks import Tensor

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


def select_heads(tensor: Tensor, heads: tuple[int, ...], axis: int) -> Tensor:
    """Some heads of `tensor`, sorted; heads that are side by side are not gathered."""
    first, last = heads[0], heads[-1]
    if len(heads) != last - first + 1:
        return ops.take(tensor, list(heads), axis=axis)
    if len(heads) == tensor.shape[axis]:
        return tensor
    return tensor[(slice(None),) * axis + (slice(first, last + 1),)]


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
