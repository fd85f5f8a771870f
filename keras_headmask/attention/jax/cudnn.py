"""All logits by cuDNN's kernel, which keeps none of them: half precision on an NVIDIA GPU.

A number is added to the logits of hidden pairs. So that their probability is exactly 0, whatever
the keys hold, those that are not finite, or so large that this number would not hide them, become
0 in the products; queries that may see one get NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_headmask.attention.half_precision import HALF
from keras_headmask.masks import Mask, Tensor

_HIDES = -(2.0**41)  # as in JAX: cuDNN subtracts larger ones wrongly
_LARGEST_LOGIT = 2.0**38  # so any two of them differ by less than that
_LARGEST_VALUE = 2.0**64  # whose product with a gradient is finite


def limit(
    query: Tensor, key: Tensor, value: Tensor, scale: Any = 1.0, is_masked: bool = True
) -> str | None:
    """The first limit that the operands break, in words; `None` if they break none.

    Those of JAX (`fused_attention_stablehlo.py`), which raises for them, and two of this file.
    """
    capability = _capability()
    most = 256 if capability >= (9, 0) else 128
    size = query.shape[3]
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (query, key, value)}
    limits = {
        "cuDNN needs an NVIDIA GPU since Ampere": capability < (8, 0),
        "operands are not all bfloat16, or all float16": dtypes not in ({x} for x in HALF),
        f"the head size is no multiple of 8, or above {most}": size % 8 != 0 or size > most,
        "values have another size than keys": value.shape[-1] != size,
        "the scale is a tensor": not isinstance(scale, (int, float, np.floating)),
        "in float16 no number that is added hides every logit": is_masked and "float16" in dtypes,
    }
    return next((words for words, is_broken in limits.items() if is_broken), None)


def _is_at_hand() -> bool:
    return jax.default_backend() == "gpu"


def is_mapped(tensor: Any) -> bool:
    """Whether `jax.vmap` maps it now: JAX' rule for cuDNN fails where one operand is not mapped."""
    inner = getattr(tensor, "primal", None)  # of a gradient that is traced
    return type(tensor).__name__ == "BatchTracer" or (inner is not None and is_mapped(inner))


def _capability() -> tuple[int, ...]:
    """The compute capability of the GPU; the least that cuDNN needs where none is at hand."""
    if not _is_at_hand():
        return 8, 0
    numbers = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")
    return tuple(map(int, numbers)) if all(x.isdecimal() for x in numbers) else (0, 0)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float) -> Tensor:
    """The context `(B, T, H, D)` of `dense.attention`, in the dtype of the operands.

    `key` and `value` are `(B, S, Hk, D)`, where Hk divides H; `mask` is of rank 4, or `None`.
    """
    scale = float(scale)
    if mask is None:
        return _fused(query, key, value, None, scale)
    (_, queries, heads, size), (_, keys, _, _) = query.shape, key.shape
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], queries, keys))
    if queries % 2 or keys % 2:  # (of odd lengths JAX refuses a bias in training)
        rows, columns = (0, queries % 2), (0, keys % 2)
        query = jnp.pad(query, ((0, 0), rows, (0, 0), (0, 0)))
        key, value = (jnp.pad(x, ((0, 0), columns, (0, 0), (0, 0))) for x in (key, value))
        mask = jnp.pad(mask, ((0, 0), (0, 0), rows, columns))
        return attention(query, key, value, mask, scale)[:, :queries]
    largest = (_LARGEST_LOGIT / (size * max(abs(scale), 1e-9))) ** 0.5
    good_rows, good_keys = _are_small(query, largest), _are_small(key, largest)
    good_values = _are_small(value, _LARGEST_VALUE)
    sees = jnp.any(mask, axis=-1, keepdims=True)
    # A row that sees nothing is opened, and 0 in the end.
    bias = jnp.where(mask | ~sees, *(np.asarray(x, query.dtype) for x in (0.0, _HIDES)))
    pairs = (query, good_rows), (key, good_keys), (value, good_values)
    zeroed = [jnp.where(are_good, x, 0) for x, are_good in pairs]
    context = _fused(zeroed[0], zeroed[1], zeroed[2], bias, scale)
    bad_keys = ~(jnp.all(good_keys, axis=-1) & jnp.all(good_values, axis=-1))
    bad_rows = ~jnp.all(good_rows, axis=-1, keepdims=True) | _see(bias, bad_keys, heads)
    sees = jnp.transpose(sees, (0, 2, 1, 3))
    # (NaN by the query alone: through a row of NaN cuDNN would spoil gradients of hidden keys.)
    marks = jnp.where(bad_rows & sees, np.asarray(np.nan, query.dtype), 0)
    spoilt = jnp.sum(query, axis=-1, keepdims=True) * marks
    return jnp.where(sees, jnp.where(bad_rows, spoilt, context), 0)


def _fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    kernel: Any = "cudnn" if _is_at_hand() else "xla"  # which computes the same anywhere
    operands = query, key, value, bias
    return jax.nn.dot_product_attention(*operands, scale=scale, implementation=kernel)


def _are_small(tensor: Tensor, largest: float) -> Mask:
    """Whether each number is finite and at most `largest`."""
    largest = min(largest, float(jnp.finfo(tensor.dtype).max))
    return jnp.abs(tensor) <= jnp.asarray(largest, tensor.dtype)


def _see(bias: Tensor, are_bad: Mask, heads: int) -> Mask:
    """Which rows `(B, T, H, 1)` may see some of the keys that `are_bad`, `(B, S, Hk)`.

    All that are bad less those that the bias hides, by one product that reads the bias once.
    """
    batch, keys, key_heads = are_bad.shape
    examples, of_heads, queries, _ = bias.shape
    axes = (key_heads, heads // key_heads) if of_heads > 1 else (1, 1)
    if not _is_at_hand():  # a CPU may lack a product of half operands
        bias = bias.astype("float32")
    bias = jnp.reshape(bias, (examples, *axes, queries, keys))
    bad = are_bad.astype(bias.dtype)
    hidden = jnp.einsum("bkgts,bsk->btkg", bias, bad, preferred_element_type="float32") / _HIDES
    count = jnp.sum(are_bad, axis=1)[:, None, :, None]
    seen = jnp.broadcast_to(count - hidden > 0.5, (batch, queries, key_heads, heads // key_heads))
    return jnp.reshape(seen, (batch, queries, heads, 1))
