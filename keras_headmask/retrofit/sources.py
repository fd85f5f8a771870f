"""From which inputs of a model the rules of its layers read: found, checked, or new."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.find import Found
from keras_headmask.retrofit.rule import LayerRule, Source, names_in
from keras_headmask.rules.base import MaskSpec, leaves, merged_inputs
from keras_headmask.rules.protocol import InputType

Planned = list[tuple[AttentionLayer, LayerRule]]


def check_inputs(found: Found, planned: Planned, add_inputs: bool) -> None:
    """Raise if a rule reads something that the inputs of the model cannot give it."""
    inputs = None if found.graph is None else found.graph.input
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
    new = new_inputs(found.inputs, [rule for _, rule in planned])
    taken = {layer.name for layer in found.model.layers}
    if clash := sorted(taken & set(new)):
        raise ValueError(
            f"The rule reads {clash[0]!r}. The model has no such input, and none can be added, "
            "since a layer has that name. Give the mask input another name."
        )
    if new and not add_inputs:
        example = _example(found.inputs, planned, new)
        raise ValueError(
            f"The rule reads {sorted(new)}, and the model has no inputs of those names. Its inputs "
            f"are {sorted(found.inputs)}. "
            + (f"Name one of them in the rule ({example}), or pass " if example else "Pass ")
            + "add_inputs=True, which adds what is missing as new inputs of the model."
        )


def _example(inputs: Mapping[str, Any], planned: Planned, new: Mapping[str, Any]) -> str:
    """For an error: a leaf whose input the model lacks, as code that names one it has.

    Empty for a rule on ids of a model that takes none, such as one of embeddings.
    """
    by_position = [
        tensor
        for tensor in inputs.values()
        if len(tensor.shape) == 2 and "float" not in tensor.dtype
    ]
    if not by_position and all(len(tensor.shape) == 2 for tensor in new.values()):
        return ""
    all_leaves: list[Any] = [leaf for _, rule in planned for leaf in leaves(rule.spec)]
    for leaf in all_leaves:
        name: Any = getattr(leaf, "input", None)
        kind = leaf.inputs.get(name)
        if name in new and kind is not None and kind.rank is not None:
            fitting = [
                tensor.name
                for tensor in by_position
                if ("mask" in tensor.name) == (kind.dtype == "bool")
            ]
            if fitting:
                best = min(fitting, key=lambda name: ("id" not in name, name))
                return f"`{dataclasses.replace(leaf, input=best)}`"
    return "its `input` argument"


def sources_of(
    entry: AttentionLayer, spec: MaskSpec, available: Mapping[str, Any]
) -> dict[str, Source]:
    """The one of the `available` inputs, or the pair, from which each name in `spec` is read."""
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
            known_pairs = [pair for pair in pairs if set(pair) <= set(available)]
            if entry.kind == "unclear" and not known_pairs:
                raise ValueError(
                    f"{entry.why_unclear} Name the layer by 'self' or 'cross' "
                    "(`MultiHeadAttention(..., name='self_attention')`), or give the model the "
                    f"inputs {pairs[1]}, which say the side of {name!r}."
                )
            sources[name] = known_pairs[0] if known_pairs else pairs[1]
    return sources


def new_inputs(available: Mapping[str, Any], rules: Iterable[LayerRule]) -> dict[str, Any]:
    """A `keras.Input` for each name that is not `available`; what is there is checked."""
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
