"""Which inputs of a model its rules read, by name, and which it lacks."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.finding import AttentionLayer
from keras_headmask.retrofit.frames import LayerRule, Source, names_in
from keras_headmask.rules.base import MaskSpec, leaves, merged_inputs
from keras_headmask.rules.protocol import InputType

Planned = list[tuple[AttentionLayer, LayerRule]]


def _available(model: keras.Model) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in getattr(model, "inputs", None) or ()}


def check_inputs(model: keras.Model, planned: Planned, add_inputs: bool) -> None:
    """Raise for what the inputs of `model` cannot give its rules."""
    inputs = model.input if isinstance(model, _keras.Functional) else None
    if isinstance(inputs, dict):
        read = {name for _, rule in planned for name in rule.spec.inputs}
        other = {key: t.name for key, t in inputs.items() if hasattr(t, "name") and t.name != key}
        if wrong := sorted(k for k, name in other.items() if k in read or name in read):
            raise ValueError(
                f"The model takes its input {wrong[0]!r} under that key, but the tensor is named "
                f"{other[wrong[0]]!r}, so the rule is ambiguous. Give keras.Input the name of its "
                "key."
            )
    for entry, rule in planned:
        ids = [name for name, kind in rule.spec.inputs.items() if kind.rank is not None]
        if ids and entry.runs_on_two:
            raise ValueError(
                f"The attention layer {entry} is called on two sequences, or on one that a "
                f"further input changes between the calls, and {ids} belong to one sequence. Give "
                "the rule to the model that both share (`apply_head_masks(encoder, ...)`), and "
                "call the result on each with its own ids."
            )
    new = new_inputs(model, [rule for _, rule in planned])
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
            f"are {has}. Name one of them in the rule ({_example(model, planned, new)}), or pass "
            "add_inputs=True, which adds what is missing as new inputs of the model."
        )


def _example(model: keras.Model, planned: Planned, new: Mapping[str, Any]) -> str:
    """A leaf of the rules that lacks an input, in code, with one that the model has."""
    found: list[Any] = [leaf for _, rule in planned for leaf in leaves(rule.spec)]
    for leaf in found:
        name: Any = getattr(leaf, "input", None)
        kind = leaf.inputs.get(name)
        if name in new and kind is not None and kind.rank is not None:
            fitting = [
                tensor.name
                for tensor in _available(model).values()
                if len(tensor.shape) == 2
                and "float" not in tensor.dtype
                and ("mask" in tensor.name) == (kind.dtype == "bool")
            ]
            if fitting:
                best = min(fitting, key=lambda name: ("id" not in name, name))
                return f"`{dataclasses.replace(leaf, input=best)}`"
    return "its `input` argument"


def sources_of(entry: AttentionLayer, spec: MaskSpec, model: keras.Model) -> dict[str, Source]:
    """Which inputs of the model each name of `spec` is read from."""
    available = _available(model)
    sources: dict[str, Source] = {}
    for name, kind in spec.inputs.items():
        if entry.kind == "self" or kind.rank is None:
            sources[name] = name
        elif kind.sides == {"query"}:
            sources[name] = (name, None)
        elif kind.sides == {"key"}:
            sources[name] = (None, name)
        else:
            pairs = (f"decoder_{name}", f"encoder_{name}"), (f"query_{name}", f"key_{name}")
            found = [pair for pair in pairs if set(pair) <= set(available)]
            if entry.kind == "unclear" and available and not found:
                why = "" if entry.ran else " It did not run when Keras inferred shapes."
                raise ValueError(
                    f"Cannot tell whether the attention layer {entry} attends to its own sequence "
                    f"or to another, so which side {name!r} belongs to.{why} Name the layer by "
                    "'self' or 'cross' (`MultiHeadAttention(..., name='self_attention')`), or give "
                    f"the model the inputs {pairs[1]}."
                )
            sources[name] = found[0] if found else pairs[1]
    return sources


def new_inputs(model: keras.Model, rules: Iterable[LayerRule]) -> dict[str, Any]:
    """A `keras.Input` for each name that `model` lacks; what it has is checked."""
    available = _available(model)
    kinds: dict[str, InputType] = {}
    heads: dict[str, int] = {}
    rules = list(rules)
    merged_inputs(tuple(rule.spec for rule in rules))  # raises for one name of two kinds
    for rule in rules:
        for name, source in rule.sources.items():
            kind = rule.spec.inputs[name]
            for place in names_in(source):
                known = kinds.get(place, kind)
                dtype = known.dtype if known.dtype == kind.dtype else "int32"
                kinds[place] = kind._replace(dtype=dtype)
                if kind.rank is None and heads.setdefault(place, rule.num_heads) != rule.num_heads:
                    raise ValueError(
                        f"The whole mask {place!r} is read by layers of {heads[place]} and of "
                        f"{rule.num_heads} heads. Give each its own name."
                    )
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
