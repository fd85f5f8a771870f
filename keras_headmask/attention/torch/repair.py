"""Operands that PyTorch's kernels for GPUs can take whatever they hold, and what to make of it.

Such a kernel multiplies what is hidden by 0, or adds -inf to it: 0 * NaN and inf - inf are NaN.
"""

from typing import NamedTuple

import torch

from keras_headmask.masks import Mask, Tensor

_LARGEST = 1e18  # whose products are finite


class Sound(NamedTuple):
    """Finite operands, `(B, L, H or Hk, size)`, and where they were not: `(B, L, H or Hk)`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bad_rows: Mask
    bad_keys: Mask  # or their values


def sound(query: Tensor, key: Tensor, value: Tensor, trains: bool) -> Sound:
    """0 in place of inf and NaN.

    Queries and keys are cut at a number beyond which softmax is 0 or 1. Gradients are sums of
    products with values: in training those beyond it count as infinite.
    """
    most = _LARGEST if trains else torch.finfo(value.dtype).max
    largest = min(_LARGEST, torch.finfo(query.dtype).max)
    are_good = query.isfinite(), key.isfinite(), value.abs() <= most
    pairs = zip(are_good, (query, key, value), strict=True)
    query, key, value = (torch.where(good, x, 0.0) for good, x in pairs)
    bad_rows, bad_of_key, bad_of_value = (~good.all(-1) for good in are_good)
    query, key = (x.clamp(-largest, largest) for x in (query, key))
    return Sound(query, key, value, bad_rows, bad_of_key | bad_of_value)


def shaded(context: Tensor, query: Tensor, bad: Mask) -> Tensor:
    """`context` with NaN in rows that are `bad` `(B, T, H)`, and in the gradient of their queries.

    The kernel gets a gradient of 0 for those, so that no hidden key has NaN.
    """
    bad = bad[..., None]
    of_query = torch.where(bad, query, 0.0).sum(-1, keepdim=True)
    return context.masked_fill(bad, 0.0) + of_query * torch.where(bad, float("nan"), 1.0).to(
        context.dtype
    )
