"""What is wrong with a call of an attention layer, as far as dtypes and static shapes show it."""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import masks
from keras_headmask.attention.request import checked_bias
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec

# The first arguments of a layer's call.
_TENSORS = ("query", "value", "key", "query_mask", "value_mask", "key_mask", "attention_mask")
_warned: weakref.WeakSet = weakref.WeakSet()  # each layer or model warns once


def refuse_rule_by_position(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise if an argument of Keras' constructor is a rule: a layer of ours takes it by name."""
    place = next((x for x, value in arguments.items() if isinstance(value, MaskSpec)), None)
    if place is not None:
        raise TypeError(
            f"`{place}` takes no rule. Pass the rule by name: {name}(..., mask_spec=...). "
            f"Received: {place}={arguments[place]!r}."
        )


def refuse_rule_and_ids(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if a layer is called with its rule, on ids, or with a dict in place of a tensor."""
    if "mask_spec" in kwargs or any(isinstance(x, MaskSpec) for x in (*args, *kwargs.values())):
        raise TypeError(
            "The call of a layer takes no rule. Pass the rule when you make the layer: "
            f"{name}(..., mask_spec=...)."
        )
    arguments = {**dict(zip(_TENSORS, args, strict=False)), **kwargs}
    for place in _TENSORS:
        if isinstance(arguments.get(place), Mapping):
            names = ", ".join(f"{name!r}: ..." for name in arguments[place])
            raise TypeError(
                f"`{place}` must be a tensor. Received: a dict of {list(arguments[place])}. What a "
                f"rule reads is passed by name: layer(x, mask_inputs={{{names}}})."
            )
    query: Any = arguments.get("query")
    if len(getattr(query, "shape", None) or ()) == 2 and "int" in str(query.dtype):
        raise TypeError(
            "`query` must be embeddings, of shape (batch, length, size). Received: integers of "
            f"shape {tuple(query.shape)}. Embed ids first, by `keras.layers.Embedding(...)(ids)`. "
            "What a rule reads is passed as `mask_inputs`."
        )


def checked_call(
    layer: Any,
    query: Tensor,
    value: Tensor,
    window: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None,
    query_offset: Length | None,
    outside: Mapping[str, Tensor | None],
) -> Length:
    """The `query_offset` of a layer's call, 0 by default, if nothing is wrong with the call.

    `outside` are the masks beside the rule, by the names of the layer's arguments.
    """
    spec, attention_mask = layer.mask_spec, outside["attention_mask"]
    if attention_mask is not None:
        attention_mask = masks.as_bool(attention_mask, "attention_mask")
    if len(query.shape) != 3:
        offset = evaluation.checked_offset(0 if query_offset is None else query_offset)
        if spec is not None or mask_inputs or evaluation.as_int(offset) != 0:
            raise ValueError(
                "A mask spec, `mask_inputs` and `query_offset` speak of one axis of queries and "
                "one of keys: the inputs must have shape (batch, length, size). Received: "
                f"query.shape={tuple(query.shape)}. Flatten the attention axes, or leave these "
                "arguments out."
            )
        return offset
    lengths = evaluation.Lengths(query.shape[0], layer.num_heads, query.shape[1], value.shape[1])
    both = window if spec is None else spec if window is None else spec & window
    offset = evaluation.checked_or_default_offset(query_offset, both, lengths.queries, lengths.keys)
    for name, axis in (("query_mask", "queries"), ("value_mask", "keys"), ("key_mask", "keys")):
        if outside[name] is None:
            continue
        mask, wanted = masks.as_tensor(outside[name]), (lengths.batch, getattr(lengths, axis))
        if len(mask.shape) != 2 or not all(map(masks.fits, mask.shape, wanted)):
            raise ValueError(
                f"`{name}` must have shape (batch, length) = {wanted}, true at real tokens. "
                f"Received: shape {tuple(mask.shape)}. A mask with an axis of queries is an "
                "`attention_mask`."
            )
        masks.as_bool(mask, name)  # refuses floats, and an additive mask of integers
    if attention_mask is not None:
        masks.check_shape(attention_mask, "attention_mask", *lengths)
        masks.warn_of_heads(attention_mask, "attention_mask", lengths.batch, layer.num_heads)
    evaluation.check_inputs(spec, mask_inputs, lengths, offset)
    return offset


def checked_attention_bias(layer: Any, query: Tensor, value: Tensor, bias: Any) -> Tensor | None:
    """`bias` as a tensor of rank 4, if its dtype and static shape fit the call."""
    if bias is not None and len(query.shape) != 3:
        raise ValueError(
            "`attention_bias` speaks of one axis of queries and one of keys: the inputs must have "
            f"shape (batch, length, size). Received: query.shape={tuple(query.shape)}."
        )
    lengths = query.shape[0], layer.num_heads, query.shape[1], value.shape[1]
    return checked_bias(bias, "attention_bias", *lengths)


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
