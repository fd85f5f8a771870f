"""Changes to logits and softmax beside the mask: a soft cap, biases, sinks.

The order is fixed: query . key * scale; the soft cap; plus the biases; the mask; the softmax, with
the sink in its sum. What is hidden is hidden after all of them, so none can open it.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention.biases import PositionBias
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules.places import pairs_at
from keras_headmask.rules.protocol import WHOLE, Cuts, Places

Positions = tuple[Tensor, Tensor]  # of the queries `(T,)` and keys `(S,)`
_LARGEST_SINK = 1e30  # its difference from any logit is finite
_LEAST_SOFT_CAP = float(np.finfo("float32").tiny)
_AXES_OF_HEADS = {"bias": 1, "table": 1, "sinks": 0}


class Changes(NamedTuple):
    """Soft cap, biases, sinks. A bias of -inf hides a key as the mask does.

    A `Part` must be hashable, so each tensor is replaced by `True` there and passed as an operand.
    """

    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    position_bias: PositionBias | None = None
    bias: Tensor | None = None  # (B or 1, H or 1, T or 1, S or 1)
    table: Tensor | None = None  # of `position_bias`, (buckets, H)
    sinks: Tensor | None = None  # (H,): logits that join the sum of each row, and have no value

    @property
    def are_some(self) -> bool:
        return any(x is not None for x in self)

    @property
    def is_bias(self) -> bool:
        """Whether logits may lie anywhere."""
        return self.bias is not None or self.position_bias is not None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.bias, self.table, self.sinks) if x is not None]

    def cast(self, dtype: str) -> "Changes":
        """In the dtype of the logits. A sink of inf becomes one that takes all of each row, too."""
        changes = self._with(lambda _, x: ops.cast(x, dtype))
        if changes.sinks is None:
            return changes
        sinks, largest = changes.sinks, ops.cast(_LARGEST_SINK, dtype)
        return changes._replace(sinks=ops.where(sinks > _LARGEST_SINK, largest, sinks))

    def of_heads(self, heads: tuple[int, ...]) -> "Changes":
        """For some heads, sorted."""

        def of(name: str, tensor: Tensor) -> Tensor:
            is_shared = name == "bias" and tensor.shape[1] == 1
            return tensor if is_shared else select_heads(tensor, heads, _AXES_OF_HEADS[name])

        return self._with(of)

    def without_tensors(self) -> "Changes":
        """A hashable copy, for the key of a cache: `True` in place of each tensor."""
        return self._with(lambda *_: True)

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Changes":
        """With the tensors that `tensors` was made of, in their order."""
        rest = iter(tensors)
        return self._with(lambda *_: next(rest))

    def _with(self, change: Callable[[str, Tensor], Any]) -> "Changes":
        by_heads = {name: getattr(self, name) for name in _AXES_OF_HEADS}
        return self._replace(**{k: change(k, x) for k, x in by_heads.items() if x is not None})

    # --- In a tile ---

    def at(self, places: Places) -> "Changes":
        """For several tiles at once, as one: the bias is `(n, h or 1, queries or 1, keys or 1)`."""
        return self if self.bias is None else self._replace(bias=pairs_at(self.bias, places))

    def apply(
        self, logits: Tensor, heads: Sequence[int], positions: Positions | None, cuts: Cuts = WHOLE
    ) -> Tensor:
        """The logits `(B, h, queries, keys)` of a tile, changed; tensors are those of `heads`."""
        if self.soft_cap is not None:
            logits = self.soft_cap * tanh(logits / self.soft_cap)
        if self.bias is not None:
            logits = logits + self.bias_of_tile(cuts)
        if self.position_bias is not None:
            assert positions is not None
            queries, keys = cuts.queries(positions[0], 0), cuts.keys(positions[1], 0)
            dtype = keras.backend.standardize_dtype(logits.dtype)
            by_position = self.position_bias.tile_bias(queries, keys, heads, self.table, dtype)
            logits = logits + ops.cast(by_position, logits.dtype)
        return logits

    def allowed(self, allowed: Mask | None, cuts: Cuts = WHOLE) -> Mask | None:
        """The pairs of a tile that are allowed, without those that the bias hides."""
        if self.bias is None or _keras.tensorflow.checks_numerics():  # (then a bias of -inf raises)
            return allowed
        open_pairs = self.bias_of_tile(cuts) != float("-inf")
        return open_pairs if allowed is None else ops.logical_and(allowed, open_pairs)

    def bias_of_tile(self, cuts: Cuts) -> Tensor:
        """`bias` where a tile looks at it."""
        tile = cuts.batch(self.bias, 0)
        for axis, cut in ((2, cuts.queries), (3, cuts.keys)):
            if tile.shape[axis] != 1:  # 1 serves every position
                tile = cut(tile, axis)
        return tile

    def share_of_keys(self, log_sum: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The share of each row's softmax left for its keys by the sink; and the new log-sum-exp.

        `log_sum` is the log-sum-exp of the keys' logits minus `base`, a number for each row, with
        the heads on axis 1.
        """
        sinks = ops.reshape(self.sinks, [1, -1] + [1] * (len(log_sum.shape) - 2))
        above = log_sum - (sinks if base is None else sinks - base)
        return ops.sigmoid(above), log_sum + ops.softplus(-above)


NONE = Changes()


def select_heads(tensor: Tensor, heads: tuple[int, ...], axis: int) -> Tensor:
    """Some heads of `tensor`, sorted; heads that are side by side are not gathered."""
    first, last = heads[0], heads[-1]
    if len(heads) != last - first + 1:
        return ops.take(tensor, list(heads), axis=axis)
    if len(heads) == tensor.shape[axis]:
        return tensor
    return tensor[(slice(None),) * axis + (slice(first, last + 1),)]


def tanh(tensor: Tensor) -> Tensor:
    """`ops.tanh`, in float64 where `tensor` is: on JAX Keras makes that float32."""
    if keras.backend.backend() != "jax" or keras.backend.is_keras_tensor(tensor):
        return ops.tanh(tensor)
    import jax.numpy as jnp

    return jnp.tanh(tensor)


def for_tiles(
    changes: Changes, dtype: Any, batch: Length, heads: int, queries: Length, keys: Length
) -> Changes:
    """Cast, and broadcast the bias along each axis whose size is unknown until the run.

    Tiles are not cut along an axis of size 1; here nobody knows yet whether it is 1.
    """
    changes = changes.cast(dtype)
    bias = changes.bias
    if bias is None or None not in bias.shape:
        return changes
    sizes = zip(bias.shape, (batch, heads, queries, keys), strict=True)
    shape = [size if known is None else 1 for known, size in sizes]
    return changes._replace(bias=bias + ops.zeros(shape, dtype))


# --- As callers give them ------------------------------------------------------------------------


def checked_bias(bias: Any, name: str, *lengths: int | None) -> Tensor | None:
    """`bias` as a tensor of rank 4, if its dtype and static shape fit `lengths`, (B, H, T, S)."""
    if bias is None:
        return None
    bias = masks.as_tensor(bias)
    dtype, shape = keras.backend.standardize_dtype(bias.dtype), tuple(bias.shape)
    if "float" not in dtype:
        raise TypeError(
            f"`{name}` must be floats, which are added to the logits. Received dtype {dtype}. What "
            "a query may attend to is a mask."
        )
    rank = len(shape)
    sizes = lengths[4 - rank :] if rank <= 4 else ()
    if rank > 4 or not all(map(masks.fits, shape, sizes)):
        raise ValueError(
            f"`{name}` must broadcast to (batch, heads, queries, keys) = {lengths}; a rank below 4 "
            f"lacks the first axes. Received: shape {shape}."
        )
    return ops.expand_dims(bias, tuple(range(4 - rank))) if rank < 4 else bias


def checked_soft_cap(soft_cap: Any) -> float | None:
    if soft_cap is None:
        return None
    is_number = isinstance(soft_cap, numbers.Real) and not isinstance(soft_cap, bool)
    if not is_number:
        raise TypeError(f"`logits_soft_cap` must be a number. Received: {soft_cap!r}.")
    if not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"`logits_soft_cap` must be above 0 and finite. Received: {soft_cap!r}.")
    if soft_cap < _LEAST_SOFT_CAP:
        raise ValueError(
            f"`logits_soft_cap` must be at least {_LEAST_SOFT_CAP:.4g}, the smallest normal number "
            f"of float32: logits are divided by it. Received: {soft_cap!r}. Pass a larger one, or "
            "leave it out."
        )
    return float(soft_cap)


def checked_position_bias(position_bias: Any, heads: int) -> PositionBias | None:
    if position_bias is None:
        return None
    if not isinstance(position_bias, PositionBias):
        raise TypeError(
            "`position_bias` must be hm.alibi(num_heads) or hm.relative_position_bias(num_heads). "
            f"Received: {position_bias!r}."
        )
    if position_bias.num_heads != heads:
        raise ValueError(
            f"`position_bias` is of {position_bias.num_heads} heads where the attention has "
            f"{heads}. Received: {position_bias!r}."
        )
    return position_bias


def checked_weights(name: str, tensor: Any, *shape: int) -> Tensor:
    """A learned tensor, of floats and that shape."""
    tensor = masks.as_tensor(tensor)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if "float" not in dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be floats of shape {shape}. Received: {dtype} of shape "
            f"{tuple(tensor.shape)}."
        )
    return tensor


def checked_changes(
    lengths: Sequence[int | None],
    bias: Any = None,
    position_bias: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
) -> Changes:
    """The arguments of `hm.dot_product_attention`, checked; `lengths` are (B, H, T, S)."""
    heads, table = lengths[1], None
    assert heads is not None
    if isinstance(position_bias, (tuple, list)) and len(position_bias) == 2:
        position_bias, table = position_bias
    position_bias = checked_position_bias(position_bias, heads)
    shape = None if position_bias is None else position_bias.table_shape
    if shape is not None and table is None:
        raise ValueError(
            f"`position_bias` is learned: pass a pair (position_bias, table), the table a tensor "
            f"of shape {shape}. Received: {position_bias!r} alone."
        )
    if shape is not None:
        table = checked_weights("The table of `position_bias`", table, *shape)
    elif table is not None:
        raise ValueError(f"{position_bias!r} has no table. Received one beside it.")
    return Changes(
        soft_cap=checked_soft_cap(soft_cap),
        position_bias=position_bias,
        bias=checked_bias(bias, "bias", *lengths),
        table=table,
        sinks=None if sinks is None else checked_weights("`sinks`", sinks, heads),
    )
