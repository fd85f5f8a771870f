"""A model without the weights of the heads that its rules switch off.

A head under `Nothing()` has context 0, so its rows of all projections can go and the output stays
what it was, with the bias of the output projection. Attention is made anew in place, with fewer
heads, in a copy of the model: graphs, rules and the layers around stay. `pruned_layer` says how
files keep the new numbers of heads.
"""

import dataclasses
import warnings
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.heads import pruned_layer
from keras_headmask.layers import changing
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.retrofit.adapters import AttentionLayer, adapted, attention
from keras_headmask.retrofit.masked_model import copied
from keras_headmask.retrofit.rule import LayerRule, all_rules, is_masked, spec_of
from keras_headmask.retrofit.survey import Call, Survey
from keras_headmask.retrofit.wrap import add_rule, mask, unmask
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.per_head import PerHead
from keras_headmask.rules.positions import Keys


def prune_heads(model: keras.Model) -> keras.Model:
    """`model` without the weights of heads whose rule is `Nothing()`: same outputs, fewer weights.

    The other heads keep their order and get new numbers, in their rules too. What the result is
    saved to loads with the smaller weights. (`import keras_headmask` before loading a file.)

    A layer whose rules hide nothing any more becomes a stock layer without a rule, if no mask hides
    all keys from single queries. Else its rule becomes `Keys(0)`, all keys: under a rule such a
    query has context 0, where stock Keras gives it the mean of all values. (So does a stock layer
    in a text that is padding alone.)

    A layer keeps one head, if all are off: its first, under `Nothing()`. The query heads of a key
    head go with it where all of them are off; and where each of the other key heads has some that
    are off, as many as all of these can spare, since key heads have equally many queries.

    Not pruned, and named in a warning, is attention of a class with code of its own (KerasHub's
    decoders, whose caches have as many heads as the config says); with LoRA's or quantized weights;
    with `hm.alibi`, whose slopes go by the number of heads; under a `MaskInput`; whose
    probabilities are read; that is called with a mask or a bias for each head; of which no call was
    seen, as in a subclassed model.

    Args:
        model: Any Keras model, with rules by `apply_head_masks` or with layers such as
            `PerHeadMaskedMultiHeadAttention` that have one. It stays as it is.

    Returns:
        A copy, not compiled. `summary_masks` shows its heads.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if no head has the rule `Nothing()`, none of these can be pruned, or copying the
            model is not possible.

    Source: Michel et al. 2019, Are Sixteen Heads Really Better than One? (arXiv:1905.10650).

    >>> import keras_headmask as hm
    >>> x = keras.Input((None, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(4, 2, name="attention")(x, x))
    >>> rule = hm.PerHead({"0-1": hm.Nothing(), 3: hm.Window(1, 1)})
    >>> pruned = prune_heads(hm.apply_head_masks(model, rule))
    >>> hm.summary_masks(pruned)
    0  attention  MultiHeadAttention  2 heads  self  PerHead({1: Window(before=1, after=1)})
    >>> model.count_params(), pruned.count_params()
    (288, 148)
    """
    survey = Survey(model)
    calls = _Calls(survey)
    kept, left = _plan(model, survey.known, calls)
    if not kept:
        raise ValueError(_nothing_to_prune(model, left))
    if left:
        lines = "\n".join(left)
        warnings.warn(f"Some heads under Nothing() are not pruned.\n{lines}", stacklevel=2)
    twin = copied(survey)
    layers = attention(twin)
    whole = attention(model)
    for place, heads in kept.items():
        _prune(layers[place], heads, calls.may_hide_rows(whole[place]))
    pruned = [layers[place] for place in kept]
    for layer in list(_keras.layers_of(twin)):
        inside = attention(layer)
        if layer not in inside and any(x is y for x in inside for y in pruned):
            _prune_around(layer, inside)
    return twin


# --- Which heads ---------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """The heads of the query that stay, and those of keys and values, in order."""

    queries: list[int]
    keys: list[int]

    @classmethod
    def of(cls, layer: keras.Layer, off: set[int]) -> "_Kept":
        """All heads of `layer`, but as many of `off` as can go."""
        adapter = adapted(layer)
        of_one_key = adapter.num_heads // adapter.num_key_heads
        # The heads that are off come last, so a key head keeps them only to have enough.
        groups = [
            sorted(range(start, start + of_one_key), key=lambda head: (head in off, head))
            for start in range(0, adapter.num_heads, of_one_key)
        ]
        sizes = [sum(head not in off for head in group) for group in groups]
        size = max(*sizes, 1)
        keys = [key for key, needed in enumerate(sizes) if needed] or [0]
        return cls(sorted(head for key in keys for head in groups[key][:size]), keys)


def _plan(
    model: keras.Model, known: list[AttentionLayer], calls: "_Calls"
) -> tuple[dict[int, _Kept], list[str]]:
    """The heads that layers keep, by place among all attention; layers not pruned, and why."""
    places = {id(layer): place for place, layer in enumerate(attention(model))}
    kept: dict[int, _Kept] = {}
    left = []
    for entry in known:
        if not (off := _heads_off(entry)):
            continue
        heads = _Kept.of(entry.layer, off)
        reason = _why_not(entry.layer, calls)
        if reason is None and len(heads.queries) < entry.num_heads:
            kept[places[id(entry.layer)]] = heads
        if reason is None and (stay := sorted(off & set(heads.queries))):
            is_last = off.issuperset(heads.queries)
            why = "a layer has one head at least" if is_last else "key heads share queries evenly"
            reason = f"{words.heads_in_words(stay)} must stay, since {why}"
        if reason is not None:
            left.append(f"{entry}: {reason}.")
    return kept, left


def _heads_off(entry: AttentionLayer) -> set[int]:
    spec = spec_of(entry.layer)
    if spec is None:
        return set()
    return {head for head in range(entry.num_heads) if spec.for_head(head).constant is False}


def _why_not(layer: Any, calls: "_Calls") -> str | None:
    """Why pruning a layer is not possible; `None` if it is."""
    cls = getattr(type(layer), "_stock_class", type(layer))
    if cls not in pruned_layer.CLASSES:
        return f"the class {cls.__name__} has code of its own, which may count on all heads"
    if id(layer) not in calls.by_head:
        return "no call of it was seen, so its code may count on all heads"
    if reason := calls.by_head[id(layer)] or _why_not_weights(layer):
        return reason
    own_spec = getattr(layer, "mask_spec", None)
    specs = [rule.spec for rule in all_rules(layer)] + ([] if own_spec is None else [own_spec])
    for spec in specs:
        if whole := [name for name, kind in spec.inputs.items() if kind.rank is None]:
            return f"its rule reads {whole}, masks with a row for each head"
    return None


def _why_not_weights(layer: Any) -> str | None:
    """Why the weights of a layer are not its heads, one beside the other."""
    for dense in (*_keras.projections(layer), _keras.gate(layer)):
        if dense is None:
            continue
        if type(dense) is not keras.layers.EinsumDense:
            return f"its projection '{dense.name}' is a {type(dense).__name__}"
        if dense.lora_enabled:
            return "it has LoRA weights: save the model and load it, which merges them"
        if dense.quantization_mode is not None:
            return f"its weights are quantized ({dense.quantization_mode}): prune, then quantize"
    options = getattr(layer, "logit_options", changing.Options())
    if (bias := options.position_bias) is not None and bias.table_shape is None:
        return f"its position_bias goes by the number of heads ({bias.kind})"
    return None


class _Calls:
    """What calls of attention layers have: `by_head`, something for each head, or `None`."""

    def __init__(self, survey: Survey):
        self.by_head: dict[int, str | None] = {}
        self._with_rows: set[int] = set()  # called with a mask that has a row for each query
        self._masks = any(map(_makes_mask, _keras.layers_of(survey.model)))
        for call in survey.calls:
            self._read(call)

    def may_hide_rows(self, layer: keras.Layer) -> bool:
        """Whether a mask may hide all keys from some queries of a text, and not from others.

        Keras' masks go into layers and nested models, where no call shows them.
        """
        return self._masks or id(layer) in self._with_rows

    def _read(self, call: Call) -> None:
        layer, arguments = call.layer, call.arguments
        reason = self.by_head.get(id(layer))
        if arguments.get("return_attention_scores"):
            reason = "its probabilities are read"
        for name in ("attention_mask", "attention_bias"):
            shape = tuple(getattr(arguments.get(name), "shape", ()))
            has_heads = len(shape) > (3 if name == "attention_mask" else 2)
            if has_heads and shape[-3] != 1:
                reason = f"it is called with an `{name}` that has a row for each head"
            if len(shape) > 1 and shape[-2] != 1 and name == "attention_mask":
                self._with_rows.add(id(layer))
        of_query = arguments.get("query_mask"), _keras.get_keras_mask(arguments.get("query"))
        if any(mask is not None for mask in of_query):
            self._with_rows.add(id(layer))
        self.by_head[id(layer)] = reason


def _makes_mask(layer: Any) -> bool:
    """Whether it is one of Keras' layers that make a mask of what they read."""
    return isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))


# --- A layer with fewer heads --------------------------------------------------------------------


def _renumbered(spec: MaskSpec, heads: list[int]) -> MaskSpec:
    """The rule of `heads` alone, numbered from 0.

    It reads what `spec` reads, since the layer is still given that.
    """
    rules = [spec.for_head(head) for head in heads]
    on = {head: rule for head, rule in enumerate(rules) if rule.constant is not True}
    renumbered = rules[0] if len(set(rules)) == 1 else PerHead(on)
    for leaf in leaves(spec):
        if leaf.inputs.keys() - renumbered.inputs.keys():
            renumbered &= Keys(0) | leaf  # hides nothing
    return renumbered


def _prune(layer: Any, heads: _Kept, stays_masked: bool) -> None:
    """Take all heads but `heads` out of an attention layer, and out of its rules."""
    rules, own = _fewer(layer, heads.queries, stays_masked)
    unmask(layer)
    arguments: dict[str, Any] = {"num_heads": len(heads.queries)}
    if _keras.is_grouped(layer):
        sizes = len(heads.queries), len(heads.keys)
        arguments = dict(zip(("num_query_heads", "num_key_value_heads"), sizes, strict=True))
    if isinstance(layer, MaskedAttention):
        bias = layer.logit_options.position_bias
        if own is not None:
            arguments["mask_spec"] = own.get_config()
        if bias is not None:
            arguments["position_bias"] = bias.get_config() | {"num_heads": len(heads.queries)}
    pruned_layer.keep_heads(layer, arguments, *heads)
    if any(rule.restricts or rule.reads or rule.replaces for rule in rules):
        for rule in rules:
            add_rule(layer, layer, rule)


def _fewer(
    layer: Any, heads: list[int], stays_masked: bool
) -> tuple[list[LayerRule], MaskSpec | None]:
    """The rules of a layer and the one of its own, for `heads`; one that restricts, if it must."""
    rules = [
        dataclasses.replace(rule, spec=_renumbered(rule.spec, heads), num_heads=len(heads))
        for rule in all_rules(layer)
    ]
    own = layer.mask_spec if isinstance(layer, MaskedAttention) else None
    own = None if own is None else _renumbered(own, heads)
    specs = [rule.spec for rule in rules] + ([] if own is None else [own])
    if stays_masked and all(spec.constant is True for spec in specs):
        if own is not None:
            own = Keys(0)
        else:
            rules[0] = dataclasses.replace(rules[0], spec=Keys(0))
    return rules, own


def _prune_around(layer: Any, inside: list[keras.Layer]) -> None:
    """Let a layer around attention keep its heads in files; it stays masked if there are rules."""
    kind = type(layer).__bases__[0] if is_masked(layer) else None
    unmask(layer)
    pruned_layer.keep_in_config(layer)
    if kind is not None and any(map(all_rules, inside)):
        mask(layer, kind)


# --- What is said --------------------------------------------------------------------------------


def _nothing_to_prune(model: keras.Model, left: list[str]) -> str:
    if left:
        lines = "\n".join(left)
        return (
            f"None of the heads of '{model.name}' under Nothing() can be pruned:\n{lines}\n"
            "Change that where you can, or keep the masked model: its outputs are those of a "
            "pruned one."
        )
    return (
        f"No head of '{model.name}' has the rule Nothing(), so there is nothing to prune. Switch "
        "heads off first: `hm.prune_heads(hm.apply_head_masks(model, hm.PerHead({0: "
        "hm.Nothing()})))`."
    )
