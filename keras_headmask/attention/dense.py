"""The definition of attention under a mask, and the oracle of every faster implementation.

Booleans are merged first; -1e9 is added once, in at least float32, before the softmax; a hidden key
has probability exactly 0, and a fully masked row gives exactly 0.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import nonfinite
from keras_headmask.attention.head_groups import sharing_of
from keras_headmask.attention.logits import NONE, Changes, Positions
from keras_headmask.masks import Mask, Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float,
    changes: Changes = NONE,
    positions: Positions | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
    may_branch: bool = True,
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under `mask`, boolean of rank 4, or `None`.

    `positions` are for a bias by position, and the numbers of the `heads`, by default 0 to H - 1.
    Without `may_branch` the graph has no branch for operands that are all finite.

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
    operands, changes, zero = (query, key, value), changes.cast(dtype), ops.cast(0.0, dtype)
    if mask is not None or may_branch:  # (else other runtimes would not fuse a bias alone)
        mask = changes.allowed(mask)
    if mask is not None:
        all_finite = nonfinite.are_finite(*operands, may_branch=may_branch)
        query, key, value = nonfinite.repaired(all_finite, nonfinite.replace_nonfinite, *operands)
    logits = ops.einsum("bthd,bshd->bhts", query, key)
    if mask is not None and changes.soft_cap is not None:
        # Whose derivative is NaN where a product overflows.
        logits = ops.where(mask, logits, zero)
    logits = changes.apply(logits, heads or range(query.shape[2]), positions)
    sinks = None if changes.sinks is None else ops.reshape(changes.sinks, (1, -1, 1, 1))
    if mask is not None:
        lowest = np.finfo(dtype).min
        if changes.is_bias:  # (which may be as low itself as hidden logits become)
            allowed = ops.where(mask, logits, ops.cast(lowest, dtype))
            largest = ops.stop_gradient(ops.max(allowed, axis=-1, keepdims=True, initial=lowest))
            logits = logits - largest
            sinks = None if sinks is None else sinks - largest
        (logits,) = nonfinite.repaired(
            all_finite, nonfinite.add_nan_to_logits, logits, beside=operands
        )
        # -1e9 is added to the lowest number, in place of a hidden logit: alone it would hide none
        # that is infinite, nor any where all allowed ones are below -1e9.
        hidden = ops.cast(lowest + masks.HIDDEN, dtype)
        logits = ops.where(mask, logits, hidden)
    if sinks is None:
        probabilities = ops.softmax(logits, axis=-1)
    else:  # one key more, whose value is 0
        of_rows = ops.sum(ops.zeros_like(logits), axis=-1, keepdims=True)
        with_sink = ops.concatenate([logits, sinks + of_rows], axis=-1)
        probabilities = ops.softmax(with_sink, axis=-1)[..., :-1]
    if mask is not None:  # for fully masked rows
        probabilities = ops.where(mask, probabilities, zero)
    rounded = ops.cast(probabilities, value_dtype)
    kept = ops.cast(probabilities if drop is None else drop(rounded), value.dtype)
    context = ops.einsum("bhts,bshd->bthd", kept, value)
    return ops.cast(context, value_dtype), rounded
