"""What is wrong with a call of attention, as far as dtypes and static shapes show it."""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import masks
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import Lengths

_warned: weakref.WeakSet = weakref.WeakSet()  # each layer or model warns once


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Floats of shape `(batch, length, heads, size)` that agree."""
    operands = {"query": query, "key": key, "value": value}
    received = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
    if any(len(x.shape) != 4 for x in operands.values()):
        raise ValueError(
            "`query`, `key` and `value` must have shape (batch, length, heads, size). "
            f"Received: {received}."
        )
    dtypes = {name: keras.backend.standardize_dtype(x.dtype) for name, x in operands.items()}
    if any("float" not in dtype for dtype in dtypes.values()):
        raise TypeError(f"`query`, `key` and `value` must be floats. Received: {dtypes}.")
    same = ((0, operands.values()), (1, (key, value)), (2, operands.values()), (3, (query, key)))
    if any(len({x.shape[axis] for x in those} - {None}) > 1 for axis, those in same):
        raise ValueError(
            "`query` (B, T, H, D), `key` (B, S, H, D) and `value` (B, S, H, Dv) do not fit. "
            f"Received: {received}. (Fewer key heads than query heads: repeat the keys and values.)"
        )


def checked_tiled(tiled: Any) -> bool | None:
    if tiled is None or isinstance(tiled, bool):
        return tiled
    raise TypeError(f"`tiled` must be True, False or None. Received: {tiled!r}.")


def checked_call(
    query: Tensor,
    value: Tensor,
    num_heads: int,
    spec: MaskSpec | None,
    window: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None,
    query_offset: Length | None,
    attention_mask: Tensor | None,
    **of_tokens: Tensor | None,
) -> Length:
    """The `query_offset` of a layer's call, 0 by default, if nothing is wrong with the call.

    `of_tokens` are Keras masks, by the names of the layer's arguments.
    """
    if attention_mask is not None:
        attention_mask = masks.as_tensor(attention_mask)
        masks.as_bool(attention_mask, "attention_mask")
    if len(query.shape) != 3:
        offset = evaluation.checked_offset(0 if query_offset is None else query_offset)
        if spec is not None or mask_inputs or not is_zero(offset):
            raise ValueError(
                "A mask spec, `mask_inputs` and `query_offset` speak of one axis of queries and "
                "one of keys: the inputs must have shape (batch, length, size). Received: "
                f"query.shape={tuple(query.shape)}. Flatten the attention axes, or leave these "
                "arguments out."
            )
        return offset
    lengths = Lengths(query.shape[0], num_heads, query.shape[1], value.shape[1])
    both = window if spec is None else spec if window is None else spec & window
    offset = evaluation.given_offset(query_offset, both, lengths.queries, lengths.keys)
    for name, mask in of_tokens.items():
        if mask is not None:
            length = lengths.queries if name == "query_mask" else lengths.keys
            _check_keras_mask(name, masks.as_tensor(mask), (lengths.batch, length))
    if attention_mask is not None:
        masks.check_shape(attention_mask, "attention_mask", *lengths)
    evaluation.check_inputs(spec, mask_inputs, lengths, offset)
    return offset


def is_zero(offset: Length) -> bool:
    return isinstance(offset, int) and offset == 0


def _check_keras_mask(name: str, mask: Tensor, wanted: tuple[int | None, int | None]) -> None:
    if len(mask.shape) != 2 or not all(map(masks.fits, mask.shape, wanted)):
        raise ValueError(
            f"`{name}` must have shape (batch, length) = ({wanted[0]}, {wanted[1]}), true at real "
            f"tokens. Received: shape {tuple(mask.shape)}. A mask with an axis of queries is an "
            "`attention_mask`."
        )
    masks.as_bool(mask, name)  # refuses floats, and an additive mask of integers


def supports_unknown_lengths(holder: keras.Layer) -> bool:
    """Whether a layer or model under a rule may be compiled at unknown lengths; why not, once."""
    if keras.backend.backend() != "tensorflow":
        return True
    if holder not in _warned:
        _warned.add(holder)
        warnings.warn(
            f"'{holder.name}' is not compiled by XLA (`jit_compile`): its lengths are not known, "
            "and XLA cannot skip what a rule hides by slices of unknown size. It runs in a "
            "TensorFlow graph. For XLA give `keras.Input` the length, as in "
            "`keras.Input((128,), dtype='int32')`.",
            UserWarning,
            stacklevel=3,
        )
    return False
