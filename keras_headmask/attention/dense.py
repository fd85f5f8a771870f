"""The definition of attention under a mask, and the oracle of every faster implementation.

Booleans are merged first; -1e9 is added once, in at least float32, before the softmax; a hidden key
has probability exactly 0, and a fully masked row gives exactly 0.
"""

from collections.abc import Callable

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import finite
from keras_headmask.attention.parts import sharing_of
from keras_headmask.masks import Mask, Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float,
    soft_cap: float | None = None,
    bias: Tensor = None,
    drop: Callable[[Tensor], Tensor] | None = None,
    may_branch: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention under `mask`, boolean of rank 4, or `None`.

    Adding -1e9 hides a key as long as the allowed logits are well above -1e9, as all logits are
    that float32 resolves to better than 64; a bias may lie anywhere. Without `may_branch` the graph
    has no branch for operands that are all finite.

    Of fewer key heads than query heads each is repeated for the queries that share it.

    Returns the context `(B, T, H, Dv)` and the probabilities `(B, H, T, S)` before `drop`, both in
    the dtype of `value`.
    """
    # (`result_type` would make float64 float32 on JAX and torch.)
    is_double = keras.backend.standardize_dtype(query.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    sharing = sharing_of(query, key)
    if sharing != 1:
        key, value = (ops.repeat(x, sharing, axis=2) for x in (key, value))
    query, key = ops.cast(query, dtype) * scale, ops.cast(key, dtype)
    given = query, key, value
    if mask is not None:
        all_finite = finite.are_finite(*given, may_branch=may_branch)
        query, key, value = finite.unless(all_finite, finite.zeroed, *given)
    logits = ops.einsum("bthd,bshd->bhts", query, key)
    if soft_cap is not None:
        logits = soft_cap * ops.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + ops.cast(bias, dtype)
    if mask is not None:
        if bias is not None:  # each row's largest allowed logit becomes 0, so -1e9 is far below
            lowest = ops.cast(-3e38, dtype)
            largest = ops.max(ops.where(mask, logits, lowest), axis=-1, keepdims=True)
            logits = logits - ops.stop_gradient(ops.maximum(largest, lowest))
        (logits,) = finite.unless(all_finite, lambda x: [x + finite.marks(*given)], logits)
        # A hidden logit is taken as 0 first: were it infinite, -1e9 would not hide it.
        logits = ops.where(mask, logits, ops.zeros_like(logits)) + masks.to_additive(mask, dtype)
    probabilities = ops.softmax(logits, axis=-1)
    if mask is not None:  # for fully masked rows
        probabilities = ops.where(mask, probabilities, ops.zeros_like(probabilities))
    probabilities = ops.cast(probabilities, value.dtype)
    kept = probabilities if drop is None else drop(probabilities)
    return ops.einsum("bhts,bshd->bthd", kept, value), probabilities
