"""Models under rules: what their layers obey, and a class for models with a config of their own.

Models of KerasHub, for one, are functional models of a class whose code builds the graph. Under
rules such a model gets a subclass made for it. Its config holds that of the stock model, and the
rules, which are applied again when it is loaded.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.adapters import holds, is_inside
from keras_headmask.retrofit.edges import rewire
from keras_headmask.retrofit.rule import (
    LayerRule,
    attention_inside,
    entries,
    rules_config,
    rules_from_config,
    spec_of,
    stock_and_rules,
)
from keras_headmask.retrofit.sources import new_inputs
from keras_headmask.retrofit.survey import Survey
from keras_headmask.retrofit.wrap import (
    MaskedLayer,
    add_rule,
    mask,
    stock_config,
    to_file,
    unmask,
    wait,
)
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.words import aligned, numbers_in_words


def mask_specs(model: keras.Model) -> dict[str, MaskSpec]:
    """The rule of each attention layer of `model` that has one, by the path of the layer.

    Args:
        model: Any Keras model: a masked one, one built on its layers or its tensors, one that holds
            it, or one with layers of `PerHeadMaskedMultiHeadAttention`.

    Returns:
        All that a layer obeys, as one spec: its own rule and those of `apply_head_masks`.

    >>> import keras_headmask as hm
    >>> x = keras.Input((None, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> mask_specs(hm.apply_head_masks(model, hm.Window(1, 1)))
    {'attention': Window(before=1, after=1)}
    """
    return Survey(model).rules


def summary_masks(model: keras.Model, print_fn: Callable[[str], Any] = print) -> None:
    """Print the attention layers: numbers, path, class, heads, self, cross or unclear, rule.

    The numbers are those by which `layers` of `apply_head_masks` names self-attention. Layers with
    equal rules, and paths that differ in numbers alone, are one row: `*` stands for the numbers.

    Args:
        model: Any Keras model.
        print_fn: Called with each line.
    """
    rows: dict[tuple[str, ...], list[tuple[int | None, str]]] = {}
    for number, entry in Survey(model).numbered():
        heads = f"{'?' if entry.num_heads is None else entry.num_heads} heads"
        name, spec = type(entry.layer).__name__, repr(spec_of(entry.layer))
        equal = _NUMBER.sub("", entry.path), name, heads, entry.kind, spec
        rows.setdefault(equal, []).append((number, entry.path))
    lines = []
    for (_, *row), layers in rows.items():
        numbers, paths = zip(*layers, strict=True)
        place = "-" if None in numbers else numbers_in_words(numbers)
        of_all = f"{_NUMBER.sub('*', paths[-1])} ({len(paths)} layers)"
        lines.append((place, of_all if len(paths) > 1 else paths[0], *row))
    for line in aligned(lines):
        print_fn(line)


_NUMBER = re.compile(r"_?\d+")
_FILED_AS = "keras_headmask>HeadMaskedModel"


class HeadMasked(MaskedLayer):
    """Adds rules to the class of a functional model that has a config of its own."""

    def _is_filed_inside(self, rule: LayerRule) -> bool:
        own = any(rule.owner is x for x in _keras.operations(self))
        return not own and is_inside(self, rule.owner)

    def get_config(self) -> dict[str, Any]:
        """The config of the stock model, the rules of its graph, and those of a model around it."""
        owners = {id(x) for x in _keras.operations(self)}
        filed = to_file(self)
        own = [(place, rule) for place, rule in filed if id(rule.owner) in owners]
        config = {
            "model": stock_config(self, filed),
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
            wait(model, outer, *entries(config, "attention"))
        return model


# Subclasses of `HeadMasked`, and for which models each is.
_kinds: list[tuple[type, Callable[[Any], bool]]] = []


def add_kind(kind: type[HeadMasked], fits: Callable[[Any], bool]) -> None:
    """Let models for which `fits(model)` holds become a `kind`, not just a `HeadMasked`."""
    _kinds.append((kind, fits))
    _keras.files.file_under(kind, _FILED_AS)


def _kind_for(model: keras.Model) -> type[HeadMasked]:
    return next((kind for kind, fits in _kinds if fits(model)), HeadMasked)


def masked(model: keras.Model, planned: list[tuple[keras.Layer, LayerRule]]) -> keras.Model:
    """`model` itself, each attention layer of `planned` under its rule.

    A Sequential one becomes functional where its rules read inputs, which are edges of a graph.
    """
    rules = [rule for _, rule in planned]
    if isinstance(model, keras.Sequential) and any(rule.reads for rule in rules):
        model = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    has_edges = isinstance(model, _keras.Functional)
    new = new_inputs({x.name: x for x in model.inputs}, rules) if has_edges else {}
    for layer, rule in planned:
        roots = owners_in(model, layer)
        owner = next(x for x in roots if not any(is_inside(other, x) for other in roots))
        for root in roots:  # several may hold one layer, and each hands it what it reads
            add_rule(root, layer, dataclasses.replace(rule, owner=owner))
    if has_edges:
        rewire(model, new)
        if type(model) is not _keras.Functional:  # whose file is its graph
            mask(model, _kind_for(model))
    return model


def copied(survey: Survey) -> keras.Model:
    """A copy of the surveyed model, with its rules, weights and training state."""
    model = survey.model
    unregistered: dict[str, type] = {}
    for layer in _keras.layers_of(model):
        cls = _class_in_config(layer)
        name = cls.__name__
        is_known = keras.saving.get_registered_name(cls) != name or cls.__module__.startswith(
            ("keras.", "keras_hub.")
        )
        if not is_known and unregistered.setdefault(name, cls) is not cls:
            raise ValueError(
                f"Copying the model '{model.name}' is not possible: its config would confuse two "
                f"classes named '{name}'. Register them under two names, by "
                "keras.saving.register_keras_serializable, or, for a rule, pass copy=False, which "
                "masks the model itself."
            )
    try:
        if survey.untracked:
            raise ValueError(
                f"it uses weights that Keras does not track, so a copy would lack them: "
                f"{survey.untracked}. Assign the layers that have them to attributes of those "
                "that call them."
            )
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _check_all_there(model, twin)
        pairs = _in_pairs(model, twin)
        _copy_training_state(pairs)
        _copy_weights(model, twin)
        _copy_other_state(pairs)
        _keras.copy_values(model, twin)
    except Exception as error:  # (the config of a layer may raise anything)
        raise ValueError(
            f"Copying the model '{model.name}' is not possible: {error} Fix that, or, for a rule, "
            "pass copy=False, which masks the model itself."
        ) from error
    return twin


def _class_in_config(layer: Any) -> type:
    """The class that a config names: masked layers have classes made for each."""
    return getattr(type(layer), "_stock_class", type(layer))


Pairs = list[tuple[Any, Any]]  # each layer with its twin in the copy; the model itself, too


def _in_pairs(source: keras.Model, target: keras.Model) -> Pairs:
    """The layers of both by the paths that files have, each before the layers inside it.

    A layer without state may lack a twin: KerasHub's preprocessors make some at their first text.
    """
    twins = _keras.files.layers_in_file(target)
    pairs = []
    for path, layer in _keras.files.layers_in_file(source).items():
        twin = twins.get(path)
        if _class_in_config(twin) is _class_in_config(layer):
            pairs.append((layer, twin))
        elif layer.weights or hasattr(layer, "save_assets"):
            raise ValueError(
                f"its config makes a model without the layer {path!r} ({type(layer).__name__}), "
                "whose state would be lost."
            )
    return pairs


def _copy_training_state(pairs: Pairs) -> None:
    """Adapters, what is rematerialised, and which layers are frozen: no config holds them."""
    for layer, twin in pairs:
        if getattr(twin, "compiled", False):
            _keras.uncompile(twin, layer)
        if getattr(layer, "lora_enabled", False) and not getattr(twin, "lora_enabled", False):
            twin.enable_lora(layer.lora_rank, lora_alpha=layer.lora_alpha)
        _keras.set_remat_mode(twin, _keras.remat_mode(layer))  # the RematScope of when it was built
    for layer, twin in pairs:  # from the outside in, since setting it sets all layers inside
        if twin.trainable != layer.trainable:
            twin.trainable = layer.trainable


def _check_all_there(source: keras.Model, target: keras.Model) -> None:
    if len(target.weights) < len(source.weights):
        inside = {id(w) for x in _keras.operations(source) for w in getattr(x, "weights", ())}
        tracked = _keras.sublayers(source)
        if missing := [x.name for x in tracked if any(id(w) not in inside for w in x.weights)]:
            raise ValueError(
                f"it holds layers outside of its graph, which no config holds: {missing}."
            )


def _copy_other_state(pairs: Pairs) -> None:
    """State outside the weights: what layers derive from them, and vocabularies."""
    for layer, twin in pairs:
        if hasattr(layer, "finalize_state"):  # a Normalization, say, that was adapted
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            twin.load_own_variables({k: keras.ops.convert_to_numpy(v) for k, v in store.items()})
        if hasattr(layer, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                if any(pathlib.Path(folder).iterdir()):
                    twin.load_assets(folder)


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    if [w.shape for w in target.weights] == [w.shape for w in source.weights]:
        for new, weight in zip(target.weights, source.weights, strict=True):
            new.assign(keras.ops.copy(weight.value))  # JAX and torch would share the memory
            new.trainable = weight.trainable  # LoRA freezes the kernel alone, not its layer
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)


def unmasked(model: keras.Model) -> keras.Model:
    """A stock model with the weights of `model`, without the rules of `apply_head_masks`.

    `model` stays as it is. A layer of `PerHeadMaskedMultiHeadAttention` keeps its own rule.

    Args:
        model: Any Keras model with masked layers: cut, extended, nested.

    Returns:
        A copy, not compiled. Inputs that the rules alone read are gone.

    Raises:
        ValueError: if copying the model is not possible.
    """
    twin = copied(Survey(model))
    layers = list(_keras.layers_of(twin))
    for layer in layers:
        unmask(layer)
    for layer in reversed(layers):
        if isinstance(layer, _keras.Functional):
            rewire(layer, {}, drop_inputs=layer is twin)
    return twin


def owners_in(model: keras.Model, layer: keras.Layer) -> list[keras.Layer]:
    """The layers in the graph of `model` that are `layer` or hold it; else the model itself."""
    operations = [x for x in _keras.operations(model) if isinstance(x, keras.Layer)]
    return [x for x in operations if holds(x, layer)] or [model]


# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(HeadMasked)
