"""A functional model with a config of its own, such as KerasHub's, under rules.

It keeps its class by one made for it. Its config is that of the stock model, whose code builds the
stock graph, and the rules, which are applied again when it is loaded.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit import masked_layer, report, rewiring
from keras_headmask.retrofit.copies import copied
from keras_headmask.retrofit.finding import find_attention
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.retrofit.generating import Generates, generates
from keras_headmask.retrofit.masked_layer import MaskedLayer, attention_inside
from keras_headmask.retrofit.model_inputs import new_inputs
from keras_headmask.retrofit.nesting import holds, is_inside
from keras_headmask.retrofit.rule_files import (
    entries,
    rules_config,
    rules_from_config,
    stock_and_rules,
)
from keras_headmask.rules.base import MaskSpec

_FILED_AS = "keras_headmask>HeadMaskedModel"


class HeadMasked(MaskedLayer):
    """What such a model does beside its own class: see `apply_head_masks`."""

    @property
    def mask_specs(self) -> dict[str, MaskSpec]:
        """See `keras_headmask.mask_specs`."""
        return report.mask_specs(self)

    def summary_masks(self, print_fn: Callable[[str], Any] = print) -> None:
        """See `keras_headmask.summary_masks`."""
        report.summary_masks(self, print_fn)

    def unmasked(self) -> keras.Model:
        """See `keras_headmask.unmasked`."""
        return unmasked(self)

    def _is_filed_inside(self, rule: LayerRule) -> bool:
        own = any(rule.owner is x for x in _keras.operations(self))
        return not own and is_inside(self, rule.owner)

    def get_config(self) -> dict[str, Any]:
        """Beside the rules of its own graph, those that an outer model gave it."""
        owners = {id(x) for x in _keras.operations(self)}
        filed = masked_layer.to_file(self)
        own = [(place, rule) for place, rule in filed if id(rule.owner) in owners]
        config = {
            "model": masked_layer.stock_config(self, filed),
            "mask_specs": rules_config(own),
        }
        outer = [one for one in filed if one not in own]
        count = {"attention": len(attention_inside(self))}
        return config | count | {"rules": rules_config(outer)} if outer else config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Model:
        model, own = stock_and_rules(config, "model", "mask_specs", custom_objects)
        model = masked(model, list(rules_from_config(own, attention_inside(model), model.name)))
        if outer := config.get("rules"):
            masked_layer.wait(model, outer, *entries(config, "attention"))
        return model

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`hm.unmasked(model)` as a preset and apply the rule again after `from_preset`."
        )


class HeadMaskedCausalLM(Generates, HeadMasked):
    """One that generates text."""


def masked(model: keras.Model, planned: list[tuple[keras.Layer, LayerRule]]) -> keras.Model:
    """`model` itself, each attention layer of `planned` under its rule.

    A Sequential one becomes functional where its rules read inputs, which are edges of a graph.
    """
    rules = [rule for _, rule in planned]
    if isinstance(model, keras.Sequential) and any(rule.reads for rule in rules):
        model = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    has_edges = isinstance(model, _keras.Functional)
    new = new_inputs(model, rules) if has_edges else {}
    for layer, rule in planned:
        roots = operations_around(model, layer) or [model]
        owner = next(x for x in roots if not any(is_inside(other, x) for other in roots))
        for root in roots:  # a layer may stand in several, each of which hands it what it reads
            masked_layer.add_rule(root, layer, dataclasses.replace(rule, owner=owner))
    if generates(model):  # all keep their keys in one cache
        for layer in attention_inside(model):
            masked_layer.mask(layer)
    if has_edges:
        rewiring.rewire(model, new)
        if not _keras.is_plain_functional(model):
            masked_layer.mask(model, HeadMaskedCausalLM if generates(model) else HeadMasked)
    return model


def unmasked(model: keras.Model) -> keras.Model:
    """A stock model with the weights of `model`, without the rules of `apply_head_masks`.

    `model` stays as it is. A layer of `PerHeadMaskedMultiHeadAttention` keeps its own rule.

    Args:
        model: Any Keras model with masked layers: cut, extended, nested.

    Returns:
        A copy. Inputs that the rules alone read are gone.

    Raises:
        ValueError: if copying the model is not possible.
    """
    twin = copied(model, find_attention(model))
    layers = list(_keras.layers_of(twin))
    for layer in layers:
        masked_layer.unmask(layer)
    for layer in reversed(layers):
        if isinstance(layer, _keras.Functional):
            rewiring.rewire(layer, {}, drop_inputs=layer is twin)
    return twin


def operations_around(model: keras.Model, layer: keras.Layer) -> list[keras.Layer]:
    """The layers in the graph of `model` that are `layer`, or hold it."""
    operations = [x for x in _keras.operations(model) if isinstance(x, keras.Layer)]
    return [x for x in operations if holds(x, layer)]


def _check_cloned(operation: Any, clone: Any) -> None:
    """Raise if a `clone_function` makes a stock layer of a masked one."""
    if not isinstance(operation, MaskedLayer) or not masked_layer.has_rules(operation):
        return
    made = _keras.layers_of(clone) if isinstance(clone, keras.Layer) else []
    if not any(isinstance(x, MaskedLayer) for x in made):
        raise ValueError(
            f"The layer '{operation.name}' of the model to clone obeys a rule, and "
            f"`clone_function` made a stock layer ({type(clone).__name__}) of it, which would not. "
            "Return `layer.__class__.from_config(layer.get_config())` for it, or clone "
            "`hm.unmasked(model)`, and give the clone its rule by `hm.apply_head_masks`."
        )


_keras.after_cloning(_check_cloned)

# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(HeadMasked)
_keras.file_under(HeadMaskedCausalLM, _FILED_AS)
