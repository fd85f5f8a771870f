"""The rules of a model's layers, and the inputs of the model that they read."""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import looking
from keras_headmask.retrofit.selectors import AttentionLayer, Found
from keras_headmask.rules import heads
from keras_headmask.rules.base import MaskSpec, leaves, merged_inputs
from keras_headmask.rules.protocol import InputType

HOOK = _keras.COMPUTE_ATTENTION  # the method whose place the hook of a rule takes on a layer
Rules = dict[int, tuple[MaskSpec, bool]]  # by layer: the spec, and whether the layer's own is off


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRule:
    """The rule of one attention layer, and where its inputs come from.

    `sources` maps each name the rule reads to the name of a model input, or to a pair of them,
    `(query_side, key_side)`.
    """

    entry: AttentionLayer
    spec: MaskSpec
    sources: Mapping[str, str | tuple[str | None, str | None]]
    replaces: bool = False

    @property
    def layer(self) -> keras.Layer:
        return self.entry.layer

    @property
    def heads(self) -> int:
        return self.layer.num_heads

    @functools.cached_property
    def restricts(self) -> bool:
        """Whether any head is kept from any key."""
        return heads.restricts(self.spec, self.heads)

    def given(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The mask inputs of this rule, out of the model's inputs by name."""

        def side(name: str | None) -> Any:
            return None if name is None else tensors[name]

        return {
            name: side(source) if isinstance(source, str) else tuple(map(side, source))
            for name, source in self.sources.items()
        }


def rules_of_layers(model: keras.Model, rules: Rules, found: Found) -> list[LayerRule]:
    """The rules with their layers, and where in the inputs of `model` each reads."""
    available = _available(model)
    chosen = [(found.known[i], spec, replaces) for i, (spec, replaces) in rules.items()]
    return [
        LayerRule(entry, spec, _sources(entry, spec, available), replaces)
        for entry, spec, replaces in chosen
    ]


def _available(model: keras.Model) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in model.inputs}


def check_inputs(model: keras.Model, rules: list[LayerRule], add_inputs: bool) -> None:
    """Raise for what the inputs of `model` cannot give its rules."""
    inputs = model.input if isinstance(model, _keras.Functional) else None
    if isinstance(inputs, dict):
        read = {name for rule in rules for name in rule.spec.inputs}
        other = {key: t.name for key, t in inputs.items() if hasattr(t, "name") and t.name != key}
        if wrong := sorted(k for k, name in other.items() if k in read or name in read):
            raise ValueError(
                f"The model takes its input {wrong[0]!r} under that key, but the tensor is named "
                f"{other[wrong[0]]!r}, so the rule is ambiguous. Give keras.Input the name of its "
                "key."
            )
    for rule in rules:
        ids = [name for name, kind in rule.spec.inputs.items() if kind.rank is not None]
        if ids and rule.entry.runs_on_two:
            raise ValueError(
                f"The attention layer {rule.entry} is called on two sequences, or on one that a "
                f"further input changes between the calls, and {ids} belong to one sequence. Give "
                "the rule to the model that both share (`apply_head_masks(encoder, ...)`), and "
                "call the result on each with its own ids."
            )
    new = new_inputs(model, rules)
    taken = {layer.name for layer in getattr(model, "layers", ())}
    if clash := sorted(taken & set(new)):
        raise ValueError(
            f"The rule reads {clash[0]!r}. The model has no such input, and none can be added, "
            "since a layer has that name. Give the mask input another name."
        )
    if new and not add_inputs:
        has = sorted(_available(model))
        raise ValueError(
            f"The rule reads {sorted(new)}, and the model has no inputs of those names. Its inputs "
            f"are {has}. Name one of them in the rule ({_example(model, rules, new)}), or pass "
            "add_inputs=True, which adds what is missing as new inputs of the model."
        )


def _example(model: keras.Model, rules: list[LayerRule], new: Mapping[str, Any]) -> str:
    """A leaf of the rules that lacks an input, in code, with one that the model has."""
    found: list[Any] = [leaf for rule in rules for leaf in leaves(rule.spec)]
    for leaf in found:
        name = getattr(leaf, "input", "")
        kind = leaf.inputs.get(name)
        if name in new and kind is not None and kind.rank is not None:
            fitting = [
                tensor.name
                for tensor in model.inputs
                if len(tensor.shape) == 2
                and "float" not in tensor.dtype
                and ("mask" in tensor.name) == (kind.dtype == "bool")
            ]
            if fitting:
                best = min(fitting, key=lambda name: ("id" not in name, name))
                return f"`{dataclasses.replace(leaf, input=best)}`"
    return "its `input` argument"


def _sources(
    entry: AttentionLayer, spec: MaskSpec, available: Mapping[str, Any]
) -> dict[str, str | tuple[str | None, str | None]]:
    """Which inputs of the model each name of `spec` is read from."""
    sources: dict[str, Any] = {}
    for name, kind in spec.inputs.items():
        if entry.kind == "self" or kind.rank is None:
            sources[name] = name
        elif kind.sides == {"query"}:
            sources[name] = (name, None)
        elif kind.sides == {"key"}:
            sources[name] = (None, name)
        else:
            pairs = (f"decoder_{name}", f"encoder_{name}"), (f"query_{name}", f"key_{name}")
            sources[name] = pairs[0] if set(pairs[0]) <= set(available) else pairs[1]
    return sources


def new_inputs(model: keras.Model, rules: list[LayerRule]) -> dict[str, Any]:
    """A `keras.Input` for each name that `model` lacks; what it has is checked."""
    available = _available(model)
    kinds: dict[str, InputType] = {}
    heads: dict[str, int] = {}
    merged_inputs(tuple(rule.spec for rule in rules))  # raises for one name of two kinds
    for rule in rules:
        for name, source in rule.sources.items():
            kind = rule.spec.inputs[name]
            for place in (source,) if isinstance(source, str) else source:
                if place is not None:
                    known = kinds.get(place, kind)
                    dtype = known.dtype if known.dtype == kind.dtype else "int32"
                    kinds[place] = kind._replace(dtype=dtype)
                    heads[place] = rule.heads
    new = {}
    for name, kind in sorted(kinds.items()):
        if name not in available:
            shape = (None,) if kind.rank is not None else (heads[name], None, None)
            new[name] = keras.Input(shape, dtype=kind.dtype, name=name)
            continue
        tensor = available[name]
        if kind.rank is not None and len(tensor.shape) != 2:
            raise ValueError(
                f"The mask spec reads {name!r} as one value per position, (batch, length), but the "
                f"model's input of that name has shape {tuple(tensor.shape)}. Give the mask input "
                "another name."
            )
        if "float" in tensor.dtype:
            raise TypeError(
                f"The mask spec reads the model's input {name!r}, which has dtype {tensor.dtype}: "
                "ids must be integers or booleans, since floats get rounded. Give the mask input "
                "another name."
            )
    return new


def attention_arguments(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> dict[str, Any]:
    """The arguments of a call of `_compute_attention`, by name."""
    given = dict(locals())
    if not use_causal_mask:
        del given["use_causal_mask"]  # subclasses written for an older Keras lack it
    return given


def numbered(found: Found) -> Iterator[tuple[int | None, AttentionLayer]]:
    """All attention layers, with the numbers by which `layers` names self-attention."""
    number = 0
    for entry in (*found.known, *found.unknown):
        counted = entry.kind == "self" and entry in found.known
        yield number if counted else None, entry
        number += counted


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


# --- What a layer obeys ---------------------------------------------------------------------------


def spec_beneath(layer: keras.Layer, plan: Any = None) -> MaskSpec | None:
    """The rule that `layer` obeys beside that of `plan`: its own, or of a masked model inside."""
    hook = looking.held(layer, HOOK)
    if hook is not None and hook.plan is plan:
        hook = hook.inner
    specs: list[MaskSpec] = []
    while hook is not None:
        specs.insert(0, hook.rule.spec)
        if hook.rule.replaces:
            break
        hook = hook.inner
    else:
        own = getattr(layer, "mask_spec", None)
        specs[:0] = [] if own is None else [own]
    return functools.reduce(operator.and_, specs) if specs else None


def rules_at_work(layer: keras.Layer) -> Iterator[tuple[LayerRule, Any]]:
    """The rules of masked models that `layer` obeys in the forward now running in this thread."""
    hook = looking.held(layer, HOOK)
    while getattr(hook, "rule", None) is not None:
        if hook.plan.running.binding is not None:
            yield hook.rule, hook.plan.running.binding
        hook = hook.inner  # `None` where the rule replaces what was there
