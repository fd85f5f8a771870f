"""Changes to the logits of our layers beside the rule: arguments, weights and config.

Where a subclass, a rule from outside or an observer uses Keras' hooks, attention is computed by
them, and their signatures have no place for these changes. So a context variable holds them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.biases import PositionBias
from keras_headmask.attention.logits import (
    NONE,
    Changes,
    checked_bias,
    checked_position_bias,
    checked_soft_cap,
)
from keras_headmask.attention.tuning import Held, holding
from keras_headmask.masks import Length, Tensor


class Options(NamedTuple):
    """The constructor arguments that change logits."""

    position_bias: PositionBias | None = None
    soft_cap: float | None = None
    use_sinks: bool = False

    @classmethod
    def of(
        cls,
        num_heads: int,
        flash_attention: bool | None,
        position_bias: PositionBias | Mapping[str, Any] | None,
        logits_soft_cap: float | None,
        use_sinks: bool,
    ) -> "Options":
        """The arguments of the constructor, checked."""
        if isinstance(position_bias, Mapping):
            position_bias = PositionBias.from_config(position_bias)
        if not isinstance(use_sinks, bool):
            raise TypeError(f"`use_sinks` must be True or False. Received: {use_sinks!r}.")
        position_bias = checked_position_bias(position_bias, num_heads)
        options = cls(position_bias, checked_soft_cap(logits_soft_cap), use_sinks)
        if flash_attention and options != cls():
            raise ValueError(
                "A flash kernel knows no `position_bias`, `logits_soft_cap` or sinks. Leave "
                "`flash_attention` out: tiles keep memory as low. Received: flash_attention=True "
                f"and {options}."
            )
        return options

    def config(self) -> dict[str, Any]:
        """For the config of the layer: what differs from the default alone."""
        bias = None if self.position_bias is None else self.position_bias.get_config()
        fields = {"position_bias": bias, "logits_soft_cap": self.soft_cap}
        fields |= {"use_sinks": self.use_sinks or None}
        return {name: value for name, value in fields.items() if value is not None}


def add_weights(layer: Any, options: Options) -> None:
    """The table of a learned bias, and the sinks: float32 under mixed precision, 0 at first."""
    layer.position_bias_table = layer.sinks = None
    more = {"initializer": "zeros", "autocast": False}
    bias = options.position_bias
    if bias is not None and bias.table_shape is not None:
        layer.position_bias_table = layer.add_weight(
            shape=bias.table_shape, name="position_bias", **more
        )
    if options.use_sinks:
        layer.sinks = layer.add_weight(shape=(layer.num_heads,), name="sinks", **more)


def call_changes(layer: Any, query: Tensor, value: Tensor, attention_bias: Any) -> Changes:
    """The changes to logits in one call."""
    options: Options = layer.logit_options
    if len(query.shape) != 3 and (attention_bias is not None or options != Options()):
        raise ValueError(
            "`attention_bias`, `position_bias`, `logits_soft_cap` and sinks speak of one axis of "
            "queries and one of keys: the inputs must have shape (batch, length, size). Received: "
            f"query.shape={tuple(query.shape)}."
        )
    lengths = query.shape[0], layer.num_heads, query.shape[1], value.shape[1]
    return Changes(
        options.soft_cap,
        options.position_bias,
        checked_bias(attention_bias, "attention_bias", *lengths),
        getattr(layer, "position_bias_table", None),  # (not built yet for shapes alone)
        getattr(layer, "sinks", None),
    )


# --- By Keras' hooks -----------------------------------------------------------------------------


class _Held:
    """The changes of the current call of one layer, for its attention to read."""

    def __init__(self, layer: keras.Layer, changes: Changes):
        self.layer, self.changes, self.was_read = layer, changes, False


_held: Held[_Held | None] = Held("changes", None)


def now(layer: Any, default: Changes = NONE) -> Changes:
    """The changes to logits in the running call of `layer`."""
    held = _held.get()
    if held is None or not _are_one(layer, held.layer):
        return default
    held.was_read = True
    return held.changes


def _are_one(layer: Any, other: Any) -> bool:
    """Whether both are one layer, or stand in for it with its parts."""
    if layer is other or type(layer) is not type(other):
        return layer is other
    return _keras.projections(layer)[0] is _keras.projections(other)[0]


@contextlib.contextmanager
def by_hook(
    layer: keras.Layer, changes: Changes, query: Tensor, key: Tensor, offset: Length
) -> Iterator[None]:
    """Let the attention of `layer`, called inside, find `changes`.

    A hook does not know where its queries stand, so a bias by position becomes a whole tensor.

    Raises:
        ValueError: if the code that a subclass has for attention did not read them.
    """
    if not changes.are_some:
        yield
        return
    if (bias := changes.position_bias) is not None:
        queries = ops.arange(ops.shape(query)[1], dtype="int32") + ops.cast(offset, "int32")
        keys = ops.arange(ops.shape(key)[1], dtype="int32")
        dtype = (
            "float64" if keras.backend.standardize_dtype(query.dtype) == "float64" else "float32"
        )
        whole = bias.tile_bias(queries, keys, range(bias.num_heads), changes.table, dtype)
        whole = whole if changes.bias is None else whole + ops.cast(changes.bias, whole.dtype)
        changes = changes._replace(position_bias=None, table=None, bias=whole)
    held = _Held(layer, changes)
    with holding(_held, held):
        yield
    if not held.was_read:
        raise ValueError(
            f"`{type(layer).__name__}` computes attention by code of its own, so that the layer "
            f"'{layer.name}' cannot add a bias, a soft cap or sinks. Leave `attention_bias`, "
            "`position_bias`, `logits_soft_cap` and `use_sinks` out, or do not override it."
        )
