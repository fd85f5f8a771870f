"""`hm.dot_product_attention`: attention for a layer of one's own."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_headmask import masks
from keras_headmask.attention.kernels import attend
from keras_headmask.attention.request import (
    Changes,
    Request,
    all_that_restricts,
    bound_to,
    check_operands,
    checked_bias,
    checked_tiled,
)
from keras_headmask.attention.scopes import adapt_exports
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.evaluation import checked_or_default_offset

_CALLED = "hm.dot_product_attention(query, key, value, ...)"
_LEAST_SOFT_CAP = float(np.finfo("float32").tiny)


# This file is imported when the function is first used. The function itself cannot change Keras:
# `torch.compile` may read it.
adapt_exports()


def _plain(scale: Any) -> Any:
    """NumPy's numbers as Python's, which engines take for one that is known."""
    return scale.item() if isinstance(scale, np.generic) else scale


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    mask_spec: MaskSpec | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    scale: float | None = None,
    query_offset: Length | None = None,
    dropout: float = 0.0,
    return_scores: bool = False,
    bias: Tensor | None = None,
    seed: Any = None,
    tiled: bool | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """`softmax(query @ key^T * scale + bias)` over the allowed keys, times `value`.

    Args:
        query: `(B, T, H, D)`.
        key: `(B, S, Hk, D)`. Hk divides H: query head h reads key head h // (H / Hk). Tiles do not
            repeat the keys and values.
        value: `(B, S, Hk, Dv)`.
        mask: Boolean or integer, True = may attend: `(T, S)`, `(B, T, S)` or
            `(B or 1, H or 1, T, S)`.
        mask_spec: A `MaskSpec`; what it allows is ANDed with `mask`.
        mask_inputs: The tensors that `mask_spec` reads, by name.
        scale: Factor of the logits; `1 / sqrt(D)` by default.
        query_offset: Query i stands at position i + `query_offset` (for `mask_spec`). Left out it
            is 0, with a warning where a rule on positions meets fewer queries than keys: a step
            with a cache of keys needs it.
        dropout: Share of the probabilities set to 0, the rest scaled up; applied whenever it is
            above 0, so pass 0 at inference.
        return_scores: Whether to return the probabilities, before dropout, too.
        bias: Float tensor added to the logits, broadcastable to `(B, H, T, S)`. It grades the
            allowed keys; no bias can open a hidden one. It needs all logits.
        seed: For `dropout`: an int or a `keras.random.SeedGenerator`.
        tiled: Whether to skip masked-out work, tile by tile (`True`), or to compute all logits
            (`False`). By default the faster of the two, by size and rule. Returned probabilities
            need all logits, and so do a `bias` and symbolic Keras tensors; where nothing restricts
            there is nothing to skip. Dense and tiled attention draw different dropouts from one
            seed.
        logits_soft_cap: Logits become `cap * tanh(logits / cap)`, before any bias.
        sinks: `(H,)`, a logit for each head that joins the softmax's sum and has no value, so that
            the probabilities of a row sum to less than 1.

    Returns:
        The context `(B, T, H, Dv)` in the dtype of `value`; with `return_scores`, a pair with the
        probabilities `(B, H, T, S)`.

    Raises:
        TypeError: for operands that are not floats, a float mask or mask input, or a `mask_spec`
            that is not a spec.
        ValueError: for shapes that do not fit, mask inputs that the spec does not read or lacks, a
            `dropout` outside [0, 1), a soft cap below the smallest normal float32 (1.18e-38), or
            `tiled=True` where tiling is not possible.

    >>> import numpy as np
    >>> from keras import ops
    >>> from keras_headmask import Window
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> rule = Window(after=0)
    >>> _, probabilities = dot_product_attention(x, x, x, mask_spec=rule, return_scores=True)
    >>> print(ops.convert_to_numpy(probabilities[0, 0]).round(2))
    [[1.   0.   0.  ]
     [0.5  0.5  0.  ]
     [0.33 0.33 0.33]]
    """
    query, key, value = (masks.as_tensor(x) for x in (query, key, value))
    _check_operands(query=query, key=key, value=value)
    batch, queries, heads, size = query.shape
    lengths = evaluation.Lengths(batch, heads, queries, key.shape[1])
    if mask is not None:
        as_given = masks.as_bool(mask)
        masks.check_shape(as_given, "mask", *lengths)
        masks.warn_of_heads(as_given, "mask", batch, heads)
    if mask_spec is not None:
        check_spec(mask_spec, "mask_spec", _CALLED.replace("...", "mask_spec=SPEC"))
    changed = checked_changes(lengths, bias, logits_soft_cap, sinks)
    query_offset = checked_or_default_offset(query_offset, mask_spec, queries, lengths.keys)
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be at least 0 and below 1. Received: {dropout}.")
    tiled = checked_tiled(tiled)
    evaluation.check_inputs(mask_spec, mask_inputs, lengths, query_offset, _CALLED)
    rule, inputs = all_that_restricts(mask_spec, mask_inputs, mask)
    bound = None
    if rule is not None:
        bound, query = bound_to(rule, inputs, query, key, value, query_offset)
    request = Request(
        query,
        key,
        value,
        rule,
        bound,
        scale=1 / math.sqrt(size) if scale is None else _plain(scale),
        query_offset=query_offset,
        dropout=dropout,
        seed=seed,
        changes=changed,
        wants_probabilities=return_scores,
        tiled=tiled,
    )
    context, probabilities = attend(request)
    return (context, probabilities) if return_scores else context


def _check_operands(**operands: Tensor) -> None:
    """Floats of shape `(batch, length, heads, size)` that agree; the key heads may be fewer."""

    def received() -> str:  # (`torch.compile` cannot read it where lengths vary)
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())

    query, key, value = operands.values()
    if any(len(x.shape) != 4 for x in (query, key, value)):
        raise ValueError(
            "`query`, `key` and `value` must have shape (batch, length, heads, size). "
            f"Received: {received()}."
        )
    dtypes = {name: keras.backend.standardize_dtype(x.dtype) for name, x in operands.items()}
    if any("float" not in dtype for dtype in dtypes.values()):
        raise TypeError(f"`query`, `key` and `value` must be floats. Received: {dtypes}.")
    check_operands(query, key, value)
    heads, key_heads = query.shape[2], key.shape[2]
    if heads != key_heads and None not in (heads, key_heads) and heads % (key_heads or heads + 1):
        raise ValueError(
            f"The number of key heads must divide the number of query heads: {key_heads} does not "
            f"divide {heads}. Received: {received()}."
        )


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
