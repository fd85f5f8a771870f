"""A mask for every head of a model people already have."""

import json
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.adapters import (
    OF_KERAS,
    AttentionLayer,
    adapted,
    errors_naming,
    holds,
)
from keras_headmask.retrofit.masked_model import copied, masked, owners_in
from keras_headmask.retrofit.rule import LayerRule, all_rules, combined, rules_in_force
from keras_headmask.retrofit.select import specs_by_layer
from keras_headmask.retrofit.sources import Planned, check_inputs, sources_of
from keras_headmask.retrofit.stale import check_not_traced, drop_all_that_run
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.by_head import check_heads, restricts

_WAYS = ("error", "and", "replace")


def apply_head_masks(
    model: keras.Model,
    mask_spec: MaskSpec | Mapping[Any, Any] | str,
    layers: Any = None,
    existing: str = "error",
    copy: bool = True,
    add_inputs: bool = False,
    ignore: Any = (),
) -> keras.Model:
    """`model` with a mask for every head of its attention layers; same weights, names and outputs.

    The rule lives in the layers, ANDed with whatever masks the model has of its own. What is built
    on the result, cut from it, cloned, copied, saved or exported obeys. (`import keras_headmask`
    before loading a file.) KerasHub's backbones and tasks keep their class; `GPT2CausalLM`
    generates under the rule.

    What the rule reads is taken from the model's inputs by name, and handed to each masked layer as
    `head_mask_inputs`, edges of the graph. With `add_inputs=True`, a name that the model lacks
    becomes a new `keras.Input`, integer or boolean `(batch, length)`, at the end of a list of
    inputs or under its name in a dict of them. (`MaskInput`: `(batch, heads, queries, keys)`.) In
    cross-attention, a rule that reads `x` on both sides takes the inputs `decoder_x` and
    `encoder_x` if the model has them, and else `query_x` and `key_x`.

    The ids of a rule are read in the order and the dtype of the model's input: a model that
    reverses, shifts or packs its sequence must get ids in the order that attention sees, and an
    int32 input cuts ids of 64 bits, as in any Keras model.

    Attention is known by its class. What else may attend is an error until `ignore` names it: a
    layer or model whose code is not of Keras or KerasHub, also around attention that is known, a
    `Lambda`, a class named for attention, and a softmax in a graph that has a product of two
    tensors, too.

    Args:
        model: A model that holds `keras.layers.MultiHeadAttention`, a subclass that computes by
            `_compute_attention`, `PerHeadMaskedMultiHeadAttention`, or the attention of KerasHub's
            Llama, Gemma and others (docs/decoders.md: a rule names their query heads), in nested
            layers and models too. A Sequential model whose rule reads inputs comes back as a
            functional one. Without a graph, a subclassed model takes rules on positions alone.
        mask_spec: A `MaskSpec`, its config (a dict, or JSON text), or a mapping from selectors of
            layers to specs: `{"0-1": a, "2": b}`. (Not `2: b`: a number may mean a head.)
        layers: Which attention layers: `None` for all self-attention; a number, counted over
            self-attention in forward order; an inclusive range `"0-3"`; a regex on layer paths,
            such as `"decoder.*cross"`, which alone names cross-attention; a tuple or list of
            those. Self or cross is known by the tensors of the calls, and else by the name.
        existing: What to do where a layer has a rule already: `"error"`, `"and"` or `"replace"`.
        copy: Whether to leave `model` as it is and return a copy, not compiled. With `False` the
            model itself is masked, and stays compiled. Keras retraces `fit` and `predict`, also of
            models around it; recreate your own `jax.jit` and `torch.compile` functions.
        add_inputs: Whether the model gets a new input for each name that the rule reads and the
            model lacks. With `False` such a name is an error.
        ignore: A regex on paths, or a list of them: layers and operations that may attend without
            the rule, if they do. A model itself goes by its name. Not needed with `layers`, which
            leaves all others as they are.

    Returns:
        A Keras model. `mask_specs`, `summary_masks` and `unmasked` of this package take it, and
        any model that is made of it.

    Raises:
        TypeError: if `model` is not a Keras model, or has no graph and the rule reads inputs; if a
            spec or selector is of another type.
        ValueError: if a selector names no layer, the key of a mapping is a number, no input of the
            model has a name that the rule reads (unless `add_inputs=True`), something may attend
            without the rule that neither `ignore` nor `layers` allows, a layer gets two rules, a
            spec names a head >= `num_heads`, it is unclear whether a layer is self-attention and no
            regex names it, the class of a layer overrides how Keras computes attention, `existing`,
            `ignore` or the JSON of a spec is not valid, copying the model is not possible, a
            Sequential model has no graph yet, or attention runs in a `tf.function` inside the
            model. With `copy=False`, if a `tf.function` has traced the model, or a Sequential model
            gets a rule that reads inputs.
            From the result, when a masked layer is called without what its rule reads.
        RuntimeError: from the result, when a masked layer does not use its rule, or runs in a
            `tf.function` inside the model.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence, summary_masks
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, PerHead({0: SameSentence(9)}))
    >>> summary_masks(masked)
    0  attention  MultiHeadAttention  2 heads  self  PerHead({0: SameSentence((9,))})
    >>> masked(np.array([[5, 9, 6, 9]])).shape == (1, 4, 8)
    True
    """
    if isinstance(mask_spec, keras.Model):
        raise TypeError(
            "`mask_spec` must be a rule. Received a model: the model comes first, "
            "`hm.apply_head_masks(model, rule)`."
        )
    if hasattr(model, "set_attn_implementation"):
        used = "use `hm.hugging_face.mask_heads(model, rule)`."
        raise TypeError(f"{type(model).__name__} is a PyTorch model: {used}")
    survey = Survey(model)
    _check_graph(survey)
    if existing not in _WAYS:
        raise ValueError(f"`existing` must be one of {_WAYS}. Received: {existing!r}.")
    rule = _from_text(mask_spec) if isinstance(mask_spec, str) else mask_spec
    return masked_by(survey, rule, layers, existing, copy, add_inputs, ignore)


def masked_by(
    survey: Survey,
    mask_spec: MaskSpec | Mapping[Any, Any],
    layers: Any = None,
    existing: str = "error",
    copy: bool = True,
    add_inputs: bool = False,
    ignore: Any = None,
) -> keras.Model:
    """The masked model, made from a `Survey`; `ignore`: see `specs_by_layer`."""
    specs = specs_by_layer(mask_spec, layers, survey, ignore)
    rules = {i: _rule(survey, survey.known[i], spec, existing) for i, spec in specs.items()}
    planned = [(survey.known[i], rule) for i, rule in rules.items()]
    _check_hands_on(survey, planned, copy)
    check_inputs(survey, planned, add_inputs)  # before any change
    for entry, rule in planned:
        check_obeys(entry, rule.spec)
    if not copy:
        drop_all_that_run([entry.layer for entry, _ in planned])
        return masked(survey.model, [(entry.layer, rule) for entry, rule in planned])
    twin = copied(survey)
    known = Survey(twin).known  # (this runs it, which shows functions that are traced inside)
    check_not_traced([known[i].layer for i in rules])
    return masked(twin, [(known[i].layer, rule) for i, rule in rules.items()])


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if not text.lstrip().startswith(("{", "[")):
            meant = config.call_of(text)
            start = config.names_of_recipes() if meant is None else "Call it"
            hint = f" {start}: hm.apply_head_masks(model, {meant or 'hm.recipes.causal()'})."
        raise ValueError(
            f"`mask_spec` is a text, so it must be a rule's JSON, but fails to parse: {error}. "
            f"Received: {text[:80]!r}.{hint}"
        ) from error


def _check_graph(survey: Survey) -> None:
    model, graph = survey.model, survey.graph
    if graph is not None and not _keras.is_whole(graph):
        raise ValueError(
            f"The graph of '{model.name}' is older than a rule that `copy=False` gave to its "
            "layers. Build the model anew, on tensors of the masked one."
        )
    if isinstance(model, keras.Sequential) and (graph is None or not model.built):
        raise ValueError(
            f"The Sequential model '{model.name}' has no graph yet: start it with a keras.Input, "
            "or call its `build`, before it gets a rule."
        )


def _check_hands_on(survey: Survey, planned: Planned, copy: bool) -> None:
    """Raise if a rule reads inputs and the model has no graph to hand them on."""
    model, reads = survey.model, sorted({name for _, rule in planned for name in rule.spec.inputs})
    if reads and not copy and isinstance(model, keras.Sequential):
        raise ValueError(
            f"The rule reads {reads}, which a Sequential model cannot hand on to its layers: pass "
            "copy=True, which returns a functional model. Rules on positions alone hold in place."
        )
    if reads and survey.graph is None:
        raise TypeError(
            f"`{type(model).__name__}` is a subclassed model without a graph, and the rule reads "
            f"{reads}, which its code cannot hand on. Make the model functional, or use "
            "PerHeadMaskedMultiHeadAttention in its code and call it with `mask_inputs`. Rules on "
            "positions alone hold in any model."
        )


def _rule(survey: Survey, entry: AttentionLayer, spec: MaskSpec, existing: str) -> LayerRule:
    """The rule of one layer, joined with the one that the model gave it before."""
    layer, model = entry.layer, survey.model
    beneath = combined(layer, rules_in_force(layer))
    if existing == "error" and beneath is not None:
        raise ValueError(
            f"The attention layer {entry} has a rule already: {beneath!r}. Pass existing='and' to "
            "keep both, or existing='replace'."
        )
    owners = {id(x) for x in owners_in(model, layer)}
    own = next((rule for rule in all_rules(layer) if id(rule.owner) in owners), None)
    around = (rule for rule in all_rules(layer) if rule is not own and holds(rule.owner, model))
    if any(rule.replaces for rule in around):
        raise ValueError(
            f"The rule of the attention layer {entry} was replaced by a model around "
            f"'{model.name}', where a rule of '{model.name}' would not hold. Give the rule to the "
            "model around it."
        )
    replaces = existing == "replace" and beneath is not None
    if own is not None:
        spec = own.spec & spec if existing == "and" else spec
        others = combined(layer, tuple(r for r in rules_in_force(layer) if r is not own))
        replaces = own.replaces or (replaces and others is not None)
    spec.get_config()  # raises for a spec that could not be saved
    with errors_naming(entry):
        check_heads(spec, entry.num_heads, adapted(entry.layer).num_key_heads)
    sources = sources_of(entry, spec, survey.inputs)
    return LayerRule(spec, entry.num_heads, sources, replaces, is_cross=entry.kind == "cross")


def check_obeys(entry: AttentionLayer, spec: MaskSpec) -> None:
    """Raise if the class of a layer computes attention by code of its own that no adapter knows."""
    adapter = adapted(entry.layer)
    is_of_keras = isinstance(entry.layer, OF_KERAS)
    if is_of_keras and adapter.overridden and restricts(spec, adapter.num_heads):
        raise ValueError(
            f"The attention layer {entry} takes no rule: its class overrides "
            f"`{adapter.overridden}`, where a rule holds. Leave the layer out by `layers=`, or do "
            "not override that."
        )
