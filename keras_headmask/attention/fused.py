"""Fused attention: PyTorch's and JAX' own functions, on a CPU or a GPU, given the whole mask.

They multiply operands of half precision as such, and sum and take the softmax in float32. PyTorch's
keeps no logits. inf and NaN are as in stock Keras: one that is hidden may make a row NaN.
"""

import contextlib
import math
from typing import Any

import keras
from keras import ops

from keras_headmask.attention.request import Request
from keras_headmask.masks import Mask, Tensor

_MOST_KEYS_ON_CUDA = 65_535  # beyond, the gradient crashes (PyTorch's issue 145040)


def takes(request: Request) -> bool:
    """Whether it computes `request`, of which nobody wants the probabilities.

    It has no dropout, soft cap, bias or sink, and no scale that is a tensor.
    """
    operands = request.query, request.key, request.value
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in operands}
    is_plain = not (request.dropout or request.changes.are_some)
    is_plain = is_plain and isinstance(request.scale, (int, float)) and len(dtypes) == 1
    if not is_plain or any(size == 0 for x in operands for size in x.shape):
        return False
    if keras.backend.backend() == "jax":  # its softmax is float32, whatever the operands are
        return "float64" not in dtypes and request.value.shape[3] == request.key.shape[3]
    if keras.backend.backend() == "torch":
        return not request.query.is_cuda or request.key.shape[1] <= _MOST_KEYS_ON_CUDA
    return False


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float) -> Tensor:
    """The context `(B, T, H, Dv)` of `dense.attention`.

    `key` and `value` are `(B, S, Hk, ...)`, where Hk divides H; `mask` is boolean and broadcasts to
    `(B, H, T, S)`, or `None`.
    """
    compute = _by_jax if keras.backend.backend() == "jax" else _by_torch
    if mask is None:
        return compute(query, key, value, None, scale)
    alive = ops.any(mask, axis=-1, keepdims=True)
    # A row that sees nothing sees everything before, so that it is not NaN, and is 0 after.
    opened = ops.logical_or(mask, ops.logical_not(alive))
    context = compute(query, key, value, opened, scale)
    return ops.where(ops.transpose(alive, (0, 2, 1, 3)), context, ops.zeros_like(context))


def _by_jax(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float) -> Tensor:
    import jax
    import jax.numpy as jnp

    # (In place of a hidden logit JAX' `mask` has a finite number, above which some logits are not.)
    bias = None if mask is None else jnp.where(mask, 0.0, -math.inf)
    return jax.nn.dot_product_attention(query, key, value, bias, scale=scale, implementation="xla")


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    sharing = query.shape[2] // key.shape[2]
    if sharing != 1:  # (of the kernels that take a mask, few read shared keys)
        key, value = (x.repeat_interleave(sharing, 2) for x in (key, value))
    engines: Any = contextlib.nullcontext()
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[1], key.shape[1])
        if query.is_cuda:  # cuDNN's reads masks wrongly (PyTorch's issues 177842, 191612, 196678)
            engines = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with engines:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        context = scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return context.transpose(1, 2)
