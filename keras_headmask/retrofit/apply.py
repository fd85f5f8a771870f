"""A mask for every head of a model people already have."""

import json
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit import compiled, tracing
from keras_headmask.retrofit.binding import Plan
from keras_headmask.retrofit.layer_rules import Rules, check_inputs, rules_of_layers, spec_beneath
from keras_headmask.retrofit.masked_model import HeadMasked, masked, stock_copy, unhooked
from keras_headmask.retrofit.selectors import Found, find_attention, specs_by_layer
from keras_headmask.retrofit.stock import moved
from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.heads import check_heads

_WAYS = ("error", "and", "replace")


def apply_head_masks(
    model: keras.Model,
    mask_spec: MaskSpec | Mapping[Any, Any] | str,
    layers: Any = None,
    existing: str = "error",
    copy: bool = True,
    add_inputs: bool = False,
) -> keras.Model:
    """`model` with a mask for every head of its attention layers; same weights, names and outputs.

    The rule is evaluated once per forward, for all layers, and ANDed with whatever masks the model
    has of its own. It is saved and loaded with the model (`import keras_headmask` before loading).
    The class stays the model's: a masked `GPT2CausalLM` is one, and generates under the rule.

    What the rule reads is taken from the model's inputs by name. With `add_inputs=True`, a name
    that the model lacks becomes a new `keras.Input`, integer or boolean `(batch, length)`, at the
    end of a list of inputs or under its name in a dict of them. (`MaskInput`: `(batch, heads,
    queries, keys)`.) In cross-attention, a rule that reads `x` on both sides takes the inputs
    `decoder_x` and `encoder_x` if the model has them, and else `query_x` and `key_x`.

    The ids of a rule are read in the order and the dtype of the model's input. A model that
    reverses, shifts or packs its sequence must get ids in the order that attention sees. An outer
    model with an int32 input cuts ids of 64 bits before this one gets them: ids that differ by
    2^32 become one there. Declare the outer input as int64.

    Attention written by hand is refused where it shows: in a class named for attention, by
    `dot_product_attention` in the code of a layer or in what that calls, or in the graph. A class
    of another name that computes with `matmul` and `softmax` escapes the rule, and so do an
    operation named by a text (`getattr(ops, "dot_product_attention")`) and a call in a function
    compiled by `jax.jit` or `torch.compile` inside a layer. (In a `tf.function` it is refused.)

    Args:
        model: A functional or Sequential model that holds `keras.layers.MultiHeadAttention`, a
            subclass that computes by `_compute_attention`, or `PerHeadMaskedMultiHeadAttention`, in
            nested layers and models too. A Sequential model comes back as a functional one.
        mask_spec: A `MaskSpec`, its config (a dict, or JSON text), or a mapping from selectors of
            layers to specs: `{"0-1": a, "2": b}`. (Not `2: b`: a number may mean a head.)
        layers: Which attention layers: `None` for all self-attention; a number, counted over
            self-attention in forward order; an inclusive range `"0-3"`; a regex on layer paths,
            such as `"decoder.*cross"`, which alone names cross-attention; a tuple or list of
            those. Self and cross, and the order, follow from how the model calls its layers.
        existing: What to do where a layer has a rule already: `"error"`, `"and"` or `"replace"`.
        copy: Whether to leave `model` as it is and return a copy, not compiled. With `False` the
            weights stay in place and `model` is used up: what it was is now the result. Keras makes
            its compiled functions anew, those of models around it too. What you compiled by
            `jax.jit` or `torch.compile` you must make anew from the result.
        add_inputs: Whether the model gets a new input for each name that the rule reads and the
            model lacks. With `False` such a name is an error.

    Returns:
        A model with `mask_specs` (the spec of each masked layer, by path), `summary_masks()`, and
        `unmasked()`, which gives a stock model with the same weights.

    Raises:
        TypeError: if `model` has no graph, or a spec or selector is of another type.
        ValueError: if a selector names no layer, the key of a mapping is a number, no input of the
            model has a name that the rule reads (unless `add_inputs=True`), there is attention that
            no rule reaches, a layer gets two rules, a spec names a head >= `num_heads`, it is
            unclear whether a layer is self-attention and no regex names it, or, with `copy=False`,
            a `tf.function` has traced the model.
        RuntimeError: from the result, when a masked layer runs outside it, or does not use its
            rule.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, PerHead({0: SameSentence(9)}))
    >>> masked.summary_masks()
    0  attention  MultiHeadAttention  2 heads  self  PerHead({0: SameSentence((9,))})
    >>> masked(np.array([[5, 9, 6, 9]])).shape == (1, 4, 8)
    True
    """
    _check_model(model)
    if existing not in _WAYS:
        raise ValueError(f"`existing` must be one of {_WAYS}. Received: {existing!r}.")
    given: Any = mask_spec
    if isinstance(mask_spec, str):
        try:
            given = json.loads(mask_spec)
        except json.JSONDecodeError as error:
            hint = ""
            if not mask_spec.lstrip().startswith(("{", "[")):
                meant = config.call_of(mask_spec)
                start = config.names_of_recipes() if meant is None else "Call it"
                meant = meant or "hm.recipes.causal()"
                hint = f" {start}: hm.apply_head_masks(model, {meant})."
            raise ValueError(
                f"`mask_spec` is a text, so it must be a rule's JSON, but fails to parse: {error}. "
                f"Received: {mask_spec[:80]!r}.{hint}"
            ) from error
    found = find_attention(model)
    specs = specs_by_layer(given, layers, found)
    plan = model._head_masks if isinstance(model, HeadMasked) else None
    rules = _with_existing(_own_rules(model, found), specs, found, existing, plan)
    _check_layers(model, rules, found)
    check_inputs(model, rules_of_layers(model, rules, found), add_inputs)  # before any change
    if not copy:
        compiled.drop_all_that_run([found.known[i].layer for i in rules])
    model = stock_copy(model) if copy else unhooked(moved(model))
    if isinstance(model, keras.Sequential):
        model = keras.Model(model.inputs, model.outputs, name=model.name)
    return masked(model, rules_of_layers(model, rules, find_attention(model)))


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a functional or Sequential Keras model. Received: {model!r}. A layer "
            "takes a rule by `PerHeadMaskedMultiHeadAttention(..., mask_spec=...)`."
        )
    if isinstance(model, keras.Sequential):
        if not model.built or not _keras.functional_of(model):
            raise ValueError(
                f"The Sequential model '{model.name}' has no graph yet: start it with a "
                "keras.Input, or call its `build`, before it gets a rule."
            )
    elif not isinstance(model, _keras.Functional):
        raise TypeError(
            f"`{type(model).__name__}` is a subclassed model without a graph: a rule could not be "
            "saved with it. Use PerHeadMaskedMultiHeadAttention in its code, or apply the rule to "
            "a functional model inside it."
        )


def _own_rules(model: keras.Model, found: Found) -> Rules:
    """The rules that `model` has from an earlier `apply_head_masks`."""
    if not isinstance(model, HeadMasked):
        return {}
    rules = model._head_masks.rules
    return {
        i: (rules[id(entry.layer)].spec, rules[id(entry.layer)].replaces)
        for i, entry in enumerate(found.known)
        if id(entry.layer) in rules
    }


def _with_existing(
    own: Rules,
    specs: Mapping[int, MaskSpec],
    found: Found,
    existing: str,
    plan: Plan | None,
) -> Rules:
    rules = dict(own)
    for i, spec in specs.items():
        earlier, was_replaced = own.get(i, (None, False))
        beneath = None if was_replaced else spec_beneath(found.known[i].layer, plan)
        if existing == "error" and (earlier is not None or beneath is not None):
            raise ValueError(
                f"The attention layer {found.known[i]} has a rule already: "
                f"{beneath if earlier is None else earlier!r}. Pass existing='and' to keep both, "
                "or existing='replace'."
            )
        if existing == "and" and earlier is not None:
            spec = earlier & spec
        rules[i] = spec, was_replaced or (existing == "replace" and beneath is not None)
    return dict(sorted(rules.items()))


def _check_layers(model: keras.Model, rules: Rules, found: Found) -> None:
    inside = tracing.called_in_functions(model)
    for i, (spec, _) in rules.items():
        entry = found.known[i]
        spec.get_config()  # raises for a spec that could not be saved
        try:
            check_heads(spec, entry.layer.num_heads)
        except ValueError as error:
            raise ValueError(f"In the attention layer {entry}: {error}") from error
        if id(entry.layer) in inside:
            raise ValueError(compiled.in_own_function(entry))
