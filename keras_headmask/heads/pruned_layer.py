"""A layer around attention with fewer heads than the layer's own config would make.

Attention itself needs nothing: it gets fewer heads and smaller weights in place, as its config then
says. A layer or model that makes its attention by itself, such as KerasHub's, has a config that
knows the first number of heads alone. Its class is replaced by a subclass made for it, whose config
holds that of the whole layer and the heads of the attention inside; these are set again when the
layer is made, before its weights are read. Rules stay what `retrofit` makes of them: a masked layer
has the pruned class for its stock class.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.layers.grouped_query import PerHeadMaskedGroupedQueryAttention
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.layers.multi_head import PerHeadMaskedMultiHeadAttention
from keras_headmask.retrofit.adapters import attention
from keras_headmask.retrofit.rule import entries

# Their subclasses may compute anything.
CLASSES = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    PerHeadMaskedMultiHeadAttention,
    PerHeadMaskedGroupedQueryAttention,
)
_FILED_AS = "keras_headmask>PrunedLayer"
_STATE = "headmask_pruned"

if TYPE_CHECKING:
    from keras.layers import Layer as _Layer
else:
    _Layer = object


class _State:
    """The one attribute that a `PrunedLayer` adds to the whole layer; Keras does not track it.

    `heads` are the arguments of each attention layer inside; `None` for one of another class.
    """

    def __init__(self, heads: list[Any]):
        self.heads = heads
        # A layer to be saved in its place: always the same one, as files know layers by id.
        self.whole: Any = None


class PrunedLayer(_Layer):
    """Keeps the heads of the attention inside a layer in the layer's config."""

    _whole_class: type

    def get_config(self) -> dict[str, Any]:
        state = vars(self)[_STATE]
        if state.whole is None:
            state.whole = object.__new__(self._whole_class)
        attributes = {k: v for k, v in observers.attributes(self).items() if k != _STATE}
        vars(state.whole).update(attributes)
        config = keras.saving.serialize_keras_object(state.whole)
        config.pop("compile_config", None)
        return {"layer": config, "heads": state.heads}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Layer:
        whole = getattr(cls, "_whole_class", None)  # (it may be registered nowhere)
        known = {} if whole is None else {whole.__name__: whole}
        custom_objects = known | dict(custom_objects or {})
        of_whole, heads = entries(config, "layer", "heads")
        layer = keras.saving.deserialize_keras_object(of_whole, custom_objects=custom_objects)
        _set_when_made(layer, heads)
        _become(layer, heads)
        return layer

    def __reduce__(self) -> Any:
        arguments = super().__reduce__()[1]
        return _keras.files.unpickle_model, arguments  # (pickle cannot find the class by its name)

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, which knows no pruned "
            "heads. Save the model by `model.save('model.keras')`."
        )


def keep_in_config(layer: Any) -> None:
    """Make `layer`, around attention that has got fewer heads, keep these in its config.

    A functional or Sequential model needs nothing: its config holds those of its layers.
    """
    _keras.after_build(layer)
    if type(layer) not in (_keras.Functional, keras.Sequential):
        _become(layer, [_arguments(x) for x in attention(layer)])


def _become(layer: Any, heads: list[Any]) -> None:
    cls: Any = getattr(type(layer), "_whole_class", type(layer))
    vars(layer)[_STATE] = _State(heads)
    object.__setattr__(layer, "__class__", _class_of(cls))


@functools.cache
def _class_of(cls: type) -> type:
    """The class that is `cls` and a `PrunedLayer`. All of them are filed under one name."""
    body = {
        "__module__": __name__,
        "__qualname__": f"PrunedLayer[{cls.__name__}]",
        "_whole_class": cls,
    }
    # The name stays the one of `cls`: Keras files weights under it.
    pruned_class = type(cls)(cls.__name__, (PrunedLayer, cls), body)
    _keras.files.file_under(pruned_class, _FILED_AS)
    return pruned_class


def _set_when_made(layer: Any, heads: list[Any]) -> None:
    """Set the heads of the attention inside `layer`, which its `build` may still have to make."""
    layers = attention(layer)
    if len(layers) == len(heads):
        for inner, arguments in zip(layers, heads, strict=True):
            if arguments is not None and _arguments(inner) != arguments:
                set_arguments(inner, arguments)
        for around in _keras.layers_of(layer):
            if around.built:
                _keras.after_build(around)
        return
    if layer.built:
        raise ValueError(
            f"The file has the heads of {len(heads)} attention layers in '{layer.name}', which "
            f"has {len(layers)}. Was it saved with another version of its code? Prune the model "
            "again."
        )
    build = layer.build

    @functools.wraps(build)
    def build_and_set(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        _set_when_made(layer, heads)

    vars(layer)["build"] = build_and_set  # (Keras sets its own wrapper in this place)


# --- Attention -----------------------------------------------------------------------------------


def _arguments(layer: Any) -> dict[str, Any] | None:
    """What of the config of an attention layer belongs to a number of heads."""
    cls = getattr(type(layer), "_stock_class", type(layer))
    if cls not in CLASSES:
        return None
    of_grouped = "num_query_heads", "num_key_value_heads"
    names = of_grouped if _keras.is_grouped(layer) else ("num_heads",)
    arguments = {name: getattr(layer, name) for name in names}
    if isinstance(layer, MaskedAttention):
        own = {"mask_spec": layer.mask_spec, "position_bias": layer.logit_options.position_bias}
        arguments |= {k: None if x is None else x.get_config() for k, x in own.items()}
    return arguments


def set_arguments(layer: Any, arguments: Mapping[str, Any]) -> None:
    """Give attention what `_arguments` says; what is built becomes new, with fresh weights."""
    numbers = dict(arguments)
    spec, bias = numbers.pop("mask_spec", None), numbers.pop("position_bias", None)
    _keras.set_heads(layer, **numbers)
    if isinstance(layer, MaskedAttention):
        options = layer.logit_options
        flash = layer._flash_attention_argument
        layer._obey(spec, layer._tiled, flash, bias, options.soft_cap, options.use_sinks)
    if layer.built:
        _keras.rebuild(layer)


def keep_heads(
    layer: Any, arguments: Mapping[str, Any], heads: list[int], key_heads: list[int]
) -> None:
    """Set `arguments` and keep the weights of `heads` of the query, and of `key_heads`."""
    parts = [(part.trainable, _keras.remat_mode(part)) for part in _keras.layers_of(layer)]
    of_keys = {id(w) for part in _keras.projections(layer)[1:3] for w in part.weights}
    before = [(w.value, key_heads if id(w) in of_keys else heads) for w in layer.weights]
    set_arguments(layer, arguments)
    for weight, (value, kept) in zip(layer.weights, before, strict=True):
        # Of each weight at most one axis counts heads.
        sizes = enumerate(zip(weight.shape, value.shape, strict=True))
        axis = next((i for i, (new, old) in sizes if new != old), None)
        weight.assign(ops.copy(value) if axis is None else ops.take(value, kept, axis=axis))
    for part, (trainable, mode) in zip(_keras.layers_of(layer), parts, strict=True):
        _keras.set_remat_mode(part, mode)
        if part.trainable != trainable:  # from the outside in: setting it sets all inside
            part.trainable = trainable


keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(PrunedLayer)
