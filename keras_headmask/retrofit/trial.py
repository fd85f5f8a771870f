"""A trial of attention code that is not Keras' own, before it gets a rule."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import looking
from keras_headmask.retrofit.families import adapted
from keras_headmask.retrofit.finding import AttentionLayer
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.heads import head_groups, restricts


def check_obeys(entry: AttentionLayer, spec: MaskSpec) -> None:
    """Raise if the class of a layer was seen not to obey the mask of a rule."""
    adapter = adapted(entry.layer)
    if not adapter.has_own_code or not restricts(spec, adapter.num_heads):
        return
    # Another object, as code may keep what it likes on its own.
    stand_in = looking.standing_in(entry.layer, {_keras.FLASH: False})
    method = getattr(type(entry.layer), adapter.hook).__get__(stand_in)

    def compute(query: Any, key: Any, value: Any, mask: Any, training: bool) -> Any:
        copy = type(adapter)(stand_in)
        return copy.called(method, copy.arguments(query, key, value, mask, training=training))[0]

    size = adapter.head_dim
    sizes = size, getattr(entry.layer, "value_dim", size)
    per_head = len(head_groups(spec, adapter.num_heads)) > 1
    dtype = entry.layer.compute_dtype
    for training in (False, True):
        trial = functools.partial(compute, training=training)
        wrong = _disobeys(trial, adapter.num_heads, sizes, dtype, per_head)
        if wrong is None:
            continue
        wrong += " in training" if training else ""
        raise ValueError(
            f"The attention layer {entry} does not obey a mask: on random numbers, {wrong} in its "
            f"own `{adapter.hook}`. Let that use `attention_mask`, boolean (batch, heads, queries, "
            "keys), in each head, or leave the layer out by `layers=`."
        )


_LENGTHS = 6, 16, 64  # some code wants multiples of a block


def _disobeys(
    compute: Callable, heads: int, sizes: tuple[int, int], dtype: str, per_head: bool
) -> str | None:
    """What a mask fails to do in `compute(query, key, value, mask)`, in words; `None` if nothing.

    It returns the context `(B, T, H, D)` of operands `(B, T, H, D)` and of a boolean mask, which
    differs from head to head if `per_head`. `sizes` are those of a key and of a value in one head.
    Of code that fails on a few random numbers nothing is known, nor of code that is random.
    """
    for length in _LENGTHS:
        try:
            with keras.StatelessScope():  # nothing that it assigns stays
                return _fault(compute, heads, sizes, dtype, per_head, length)
        except Exception:  # whatever a subclass raises that wants other sizes
            continue
    return None


def _fault(
    compute: Callable,
    heads: int,
    sizes: tuple[int, int],
    dtype: str,
    per_head: bool,
    length: int,
) -> str | None:
    """The same, of sequences of one length.

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
