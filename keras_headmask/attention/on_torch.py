"""Which tiles of PyTorch's own can compute a request; importing this imports no PyTorch."""

from collections.abc import Callable
from typing import Any


def tiles(request: Any) -> Callable | None:
    """By `scaled_dot_product_attention` where values are known, by FlexAttention in compiled code.

    `None` where neither is possible. They know neither dropout nor what changes logits.
    """
    from keras_headmask.attention import flex_torch, tiles_torch

    operands = request.query, request.key, request.value
    if tiles_torch.can_read(request.bound, *operands):
        return tiles_torch.attend
    if flex_torch.is_possible(request.bound, request.scale, *operands):
        return flex_torch.attend
    return None
