"""Rules as cuDNN's fused kernel takes them, on JAX.

What it takes of a rule is decided without such a device, in `rules/fused.py`. A rule that it does
not take is computed as elsewhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_headmask.attention import finite
from keras_headmask.masks import Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fused import Fused, lowered
from keras_headmask.rules.heads import head_groups

_HALVES = "float16", "bfloat16"  # what cuDNN takes
_MOST_SIZE = 128  # of a head, on each of its devices


def fused(
    spec: MaskSpec,
    query_offset: int,
    scale: float,
    *operands: Tensor,
    implementation: str = "cudnn",
) -> Tensor | None:
    """The context `(B, T, H, Dv)` by JAX' own function; `None` where the rule of a head differs.

    All heads that say the same go to the kernel together. A key or value that is not finite makes
    the rows NaN that may see it, and no other.
    """
    query, key, value = operands
    lengths = query.shape[1], key.shape[1]
    heads, sharing = query.shape[2], query.shape[2] // key.shape[2]
    arguments: dict[Fused, list[int]] = {}
    for rule, members in head_groups(spec, heads):
        arguments_of_rule = lowered(rule, *lengths, query_offset)
        if arguments_of_rule is None:
            return None
        arguments.setdefault(arguments_of_rule, []).extend(members)
    if len(arguments) > 1 and sharing > 1:  # a part of the heads that share would repeat their keys
        return None
    sound = finite.zeroed(*operands)
    harmed = ~_rows_are_finite(query)
    spoilt = jnp.repeat(~(_rows_are_finite(key) & _rows_are_finite(value)), sharing, axis=2)
    context = jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
    for of_heads, of_arguments in arguments.items():
        own = np.array(sorted(of_arguments))
        given = sound if len(own) == heads else [x[:, :, own] for x in sound]
        made = jax.nn.dot_product_attention(
            *given,
            scale=scale,
            is_causal=of_heads.is_causal,
            local_window_size=of_heads.local_window_size,
            implementation=implementation,
        )
        see_it = harmed[:, :, own] | _sees(of_heads, spoilt[:, :, own])
        context = context.at[:, :, own].set(jnp.where(see_it, jnp.nan, made))
    return context


def _rows_are_finite(rows: Tensor) -> Tensor:
    return jnp.isfinite(rows).all(-1, keepdims=True)


def _sees(arguments: Fused, spoilt: Tensor) -> Tensor:
    """Which queries may see one of the `spoilt` keys, `(B, S, H, 1)`."""
    if not arguments.is_causal:
        return spoilt.any(1, keepdims=True)
    upto = jnp.cumsum(spoilt.astype("int32"), axis=1)
    if arguments.local_window_size is None:
        return upto > 0
    reach = arguments.local_window_size[0] + 1  # the keys before these are out of sight
    hidden = jnp.pad(upto[:, :-reach], [(0, 0), (reach, 0), (0, 0), (0, 0)])
    return upto > hidden


@functools.lru_cache(maxsize=1)
def _has_cudnn() -> bool:
    """Whether one NVIDIA GPU computes here, new enough for cuDNN's kernels (JAX brings cuDNN)."""
    if jax.default_backend() != "gpu" or jax.device_count() != 1:
        return False
    (device,) = jax.devices()
    try:
        return "cuda" in device.client.platform_version and float(device.compute_capability) >= 8
    except (AttributeError, ValueError):  # a GPU of another maker
        return False


def by_cudnn(spec: MaskSpec, query_offset: Any, scale: Any, *operands: Tensor) -> Tensor | None:
    """The context by cuDNN, where it is there and takes the rule and the operands."""
    query, key, value = operands
    sizes = (*query.shape, *key.shape, *value.shape, query_offset)
    if not (all(isinstance(size, int) for size in sizes) and isinstance(scale, float)):
        return None
    size = query.shape[3]
    if size != value.shape[3] or size % 8 or size > _MOST_SIZE or 0 in query.shape:
        return None
    dtypes = {str(x.dtype) for x in operands}
    if len(dtypes) != 1 or not dtypes <= set(_HALVES) or not _has_cudnn():
        return None
    return fused(spec, query_offset, scale, *operands)
