"""Mask inputs as edges of a functional model's graph, from its inputs to masked layers."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_headmask import _keras, masks
from keras_headmask.retrofit.rule import (
    LayerRule,
    Source,
    all_rules,
    attention_inside,
    is_masked,
    names_in,
    prepared_names,
    sources_from_config,
)
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import Sides


@keras.saving.register_keras_serializable("keras_headmask")
class HeadMaskInputs(keras.layers.Layer):
    """Prepares ids for all layers at once: from token ids, say, the number of each one's sentence.

    `parts` are pairs of a leaf of a rule and the names of its inputs. It has no weights.
    """

    def __init__(self, parts: Iterable[Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.parts = [
            (MaskSpec.from_config(x) if isinstance(x, Mapping) else x, sources_from_config(sources))
            for x, sources in parts
        ]
        self.supports_masking = True

    def call(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = {}
        for leaf, sources in self.parts:
            sides = {name: _sides(source, tensors) for name, source in sources.items()}
            for name, pair in leaf.prepare(sides).items():
                names = prepared_names(leaf, name, sources)
                prepared |= {k: x for k, x in zip(names, pair, strict=True) if k is not None}
        return prepared

    def get_config(self) -> dict[str, Any]:
        parts = [[leaf.get_config(), sources] for leaf, sources in self.parts]
        return super().get_config() | {"parts": parts}


def _sides(source: Source, tensors: Mapping[str, Any]) -> Sides:
    if isinstance(source, str):
        tensor = masks.as_mask_input(tensors[source])
        return Sides(tensor, tensor)
    return Sides(*(None if x is None else masks.as_mask_input(tensors[x]) for x in source))


def layer_for(rules: Iterable[LayerRule]) -> HeadMaskInputs | None:
    """The layer that prepares what `rules` read; `None` if none reads ids."""
    parts: dict[Any, Any] = {}
    for rule in rules:
        for leaf in leaves(rule.spec):
            if leaf.inputs and all(kind.rank is not None for kind in leaf.inputs.values()):
                sources = {name: rule.sources[name] for name in leaf.inputs}
                parts[leaf, tuple(sorted(sources.items()))] = leaf, sources
    return HeadMaskInputs(parts.values()) if parts else None


def names_read(layer: HeadMaskInputs) -> list[str]:
    return sorted({n for _, of in layer.parts for source in of.values() for n in names_in(source)})


ARGUMENT = "head_mask_inputs"  # of a masked layer, beside those of its stock class


def rewire(model: keras.Model, new: Mapping[str, Any], drop_inputs: bool = False) -> None:
    """Run the graph of `model` anew, and call masked layers with the inputs of their rules.

    `new` are inputs to add. With `drop_inputs`, inputs that only rules have read are removed.
    """
    held = {op.name: op for op in model.operations if isinstance(op, HeadMaskInputs)}
    rules = {id(op): rules_read(model, op) for op in model.operations}
    if not new and not held and not any(rules.values()) and not _has_edges(model):
        return
    tensors = {tensor.name: tensor for tensor in model.inputs} | dict(new)
    of_rules = _read_by_rules_alone(model) if drop_inputs else set()
    prepares = layer_for(
        rule for read in rules.values() for rule in read if set(rule.reads) <= tensors.keys()
    )
    prepared: dict[str, Any] = {}
    if prepares is not None:
        prepared = prepares({name: tensors[name] for name in names_read(prepares)})

    def call(operation: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        before = kwargs.pop(ARGUMENT, None) or {}
        if read := rules[id(operation)]:
            kwargs[ARGUMENT] = _tensors_for(read, tensors, prepared, before)
        return operation(*args, **kwargs)

    outputs = _keras.run_anew(model, call)
    graph = keras.Model(_inputs(model.input, new, of_rules), outputs)
    vars(model).update({name: vars(graph)[name] for name in _keras.GRAPH})
    for layer in held.values():
        _keras.untrack(model, layer)
    if prepares is not None:
        _keras.track(model, prepares)
    for layer in graph.layers:
        if isinstance(layer, keras.layers.InputLayer) and layer.name in new:
            _keras.track(model, layer)


def rules_read(model: keras.Model, operation: Any) -> list[LayerRule]:
    """The rules inside an operation of `model` that read inputs of this model."""
    if not is_masked(operation):
        return []
    owners = {id(x) for x in model.operations}
    rules = (rule for x in attention_inside(operation) for rule in all_rules(x))
    return [rule for rule in rules if rule.reads and id(rule.owner) in owners]


def _tensors_for(
    rules: list[LayerRule],
    tensors: Mapping[str, Any],
    prepared: Mapping[str, Any],
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """The `head_mask_inputs` of a masked layer: the tensors `before`, and those still missing."""
    inputs = {name: tensors[name] for rule in rules for name in rule.reads if name not in before}
    inputs |= {name: x for rule in rules for name, x in before.items() if name in rule.reads}
    for rule in rules:
        if all(
            inputs[name] is tensors.get(name) for name in rule.reads
        ):  # (`prepared` was made from these)
            for leaf in leaves(rule.spec):
                for name in leaf.inputs:
                    pair = prepared_names(leaf, name, rule.sources)
                    inputs |= {side: prepared[side] for side in pair if side in prepared}
    return dict(sorted(inputs.items()))


def _has_edges(model: keras.Model) -> bool:
    return any(ARGUMENT in node.arguments.kwargs for node in _keras.nodes(model))


def _read_by_rules_alone(model: keras.Model) -> set[int]:
    """The ids of inputs that only rules read."""
    by_rules: set[int] = set()
    by_others: set[int] = set()
    for node in _keras.nodes(model):
        kwargs = dict(node.arguments.kwargs)
        edges = kwargs.pop(ARGUMENT, None)
        own = node.arguments.args, kwargs  # (they may hold inputs of rules, too)
        is_ours = isinstance(node.operation, HeadMaskInputs)
        by_rules |= {id(x) for x in keras.tree.flatten((edges, own) if is_ours else edges)}
        by_others |= set() if is_ours else {id(x) for x in keras.tree.flatten(own)}
    return (by_rules - by_others) & {id(x) for x in model.inputs}


def _inputs(inputs: Any, new: Mapping[str, Any], gone: set[int]) -> Any:
    if isinstance(inputs, dict):
        return {k: x for k, x in inputs.items() if id(x) not in gone} | dict(new)
    if not new and not gone:
        return inputs
    several = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    kept = [*(x for x in several if id(x) not in gone), *new.values()]
    return kept[0] if gone and len(kept) == 1 else type(several)(kept)
