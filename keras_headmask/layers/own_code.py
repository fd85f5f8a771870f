"""Code of a subclass that computes attention by itself: a trial whether it obeys a mask."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.by_head import head_groups


def check_ours(layer: Any, ours: type, spec: MaskSpec, is_for_good: bool) -> None:
    """Raise if the class of a layer was seen not to obey the mask of its rule.

    `ours` is our class, of which that may be a subclass. `is_for_good`: it is not tried again.
    """
    name = _keras.COMPUTE_ATTENTION
    if getattr(type(layer), name) is getattr(ours, name):
        if not _keras.has_own_softmax(layer):
            return
        name = _keras.MASKED_SOFTMAX
    if layer._is_tried or _has_no_numbers():
        return
    stand_in = observers.standing_in(layer, {_keras.FLASH: False})

    def compute(query: Any, key: Any, value: Any, mask: Any, training: bool) -> Any:
        return stand_in._attend_all_heads([query, key, value], mask, training, False)[0]

    size = layer.head_dim if _keras.is_grouped(layer) else layer.key_dim
    what = f"The attention layer '{layer.name}', of class {type(layer).__name__} with its own"
    with _eagerly():
        check(compute, layer, spec, layer.num_heads, size, f"{what} `{name}`,")
    layer._is_tried = is_for_good


def _eagerly() -> AbstractContextManager[Any]:
    """Compute at once what runs inside, also where a function is traced."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.init_scope()
    if keras.backend.backend() == "jax":
        import jax

        return jax.ensure_compile_time_eval()
    return contextlib.nullcontext()


def _has_no_numbers() -> bool:
    """Whether PyTorch compiles, or Keras infers shapes on it: a later call will try the code."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling() or ops.zeros(()).device.type == "meta"


# --- A trial -------------------------------------------------------------------------------------


def check(
    compute: Callable,
    layer: Any,
    spec: MaskSpec,
    heads: int,
    key_size: int,
    what: str,
    way_out: str = "",
) -> None:
    """Raise if `compute(query, key, value, mask, training)` was seen not to obey the mask.

    It computes for `layer`, under `spec`: the context `(B, T, H, D)` of operands `(B, T, H, D)` and
    of a boolean mask. `key_size` is that of a key in one head. `what` is whose code that is, in
    words.
    """
    sizes = key_size, getattr(layer, "value_dim", key_size)
    per_head = len(head_groups(spec, heads)) > 1
    for training in (False, True):
        trial = functools.partial(compute, training=training)
        wrong = _disobeys(trial, heads, sizes, layer.compute_dtype, per_head)
        if wrong is not None:
            wrong += " in training" if training else ""
            raise ValueError(
                f"{what} does not obey a mask: on random numbers, {wrong}. Let it use "
                "`attention_mask`, boolean (batch, heads, queries, keys), in each head"
                f"{way_out}."
            )


_LENGTHS = 6, 16, 64  # some code wants multiples of a block


def _disobeys(compute: Callable, *how: Any) -> str | None:
    """How `compute(query, key, value, mask)` disobeys its mask, in words; `None` if it obeys.

    `None` also for code that raises on a few random numbers, or is random. `how`: see `_fault`.
    """
    for length in _LENGTHS:
        try:
            with keras.StatelessScope():  # nothing that it assigns stays
                return _fault(compute, length, *how)
        except Exception:  # whatever a subclass raises that wants other sizes
            continue
    return None


def _fault(
    compute: Callable,
    length: int,
    heads: int,
    sizes: tuple[int, int],
    dtype: str,
    per_head: bool,
) -> str | None:
    """The same, of sequences of one length, under a mask that differs by head if `per_head`.

    The batch holds the same example twice, and then once for each of a few keys, with that key and
    its value changed: where the mask hides a key, no context may change.
    """
    keys = min(length, _LENGTHS[0])
    batch = keys + 2
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, length, heads, n)) for n in (sizes[0], *sizes))
    query, key, value = (np.repeat(x, batch, axis=0) for x in (query, key, value))
    for j in range(keys):
        key[2 + j, j], value[2 + j, j] = (3 + random.normal(size=x.shape[2:]) for x in (key, value))
    # A query sees itself, lest a class that is causal has none to see; and about half of the keys.
    mask = random.random((heads if per_head else 1, length, length)) < 0.5
    mask |= np.eye(length, dtype=bool)
    operands = [ops.cast(ops.convert_to_tensor(x), dtype) for x in (query, key, value)]
    context, again, free = (
        ops.convert_to_numpy(ops.cast(compute(*operands, ops.array(m)), "float32"))
        for m in (mask[None], mask[None], np.ones_like(mask)[None])
    )
    if context.shape[:3] != (batch, length, heads) or not np.isfinite(context).all():
        return None
    changed, without_mask = (abs(x[2:] - x[0]).max(-1) for x in (context, free))  # (key, query, ..)
    of_itself = np.eye(keys, length, dtype=bool)[:, :, None]
    most = np.where(of_itself, 0, np.maximum(changed, without_mask)).max()
    rounding = 4 * float(ml_dtypes.finfo(dtype).eps) * max(abs(free).max(), abs(context).max())
    is_random = max(abs(again - context).max(), abs(context[1] - context[0]).max()) > 0.01 * most
    if most <= rounding or is_random:
        return None
    hidden = ~np.broadcast_to(mask, (heads, length, length)).transpose(2, 1, 0)[:keys]
    if not (hidden & (changed > max(0.01 * most, rounding))).any():
        return None
    is_ignored = abs(free - context).max() <= 0.01 * most
    return "the mask changes nothing" if is_ignored else "a hidden key is seen"
