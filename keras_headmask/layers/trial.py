"""A trial of attention code that is not Keras' own: whether it obeys a mask."""

import functools
from collections.abc import Callable

import keras
import ml_dtypes
import numpy as np
from keras import ops


def check_obeys(
    compute: Callable,
    heads: int,
    sizes: tuple[int, int],
    dtype: str,
    per_head: bool,
    what: str,
    way_out: str = "",
) -> None:
    """Raise if `compute(query, key, value, mask, training)` was seen not to obey the mask.

    It returns the context `(B, T, H, D)` of operands `(B, T, H, D)` and of a boolean mask, which
    differs from head to head if `per_head`. `sizes` are those of a key and of a value in one head.
    `what` is whose code that is, in words.
    """
    for training in (False, True):
        trial = functools.partial(compute, training=training)
        wrong = _disobeys(trial, heads, sizes, dtype, per_head)
        if wrong is not None:
            wrong += " in training" if training else ""
            raise ValueError(
                f"{what} does not obey a mask: on random numbers, {wrong}. Let it use "
                "`attention_mask`, boolean (batch, heads, queries, keys), in each head"
                f"{way_out}."
            )


_LENGTHS = 6, 16, 64  # some code wants multiples of a block


def _disobeys(
    compute: Callable, heads: int, sizes: tuple[int, int], dtype: str, per_head: bool
) -> str | None:
    """How `compute(query, key, value, mask)` disobeys its mask, in words; `None` if it obeys.

    `None` also for code that raises on a few random numbers, or is random.
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
