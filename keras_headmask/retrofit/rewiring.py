"""What rules read, as edges of a functional model's graph."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit import prepared_inputs
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.retrofit.masked_layer import MaskedLayer, all_rules, attention_inside
from keras_headmask.retrofit.prepared_inputs import HeadMaskInputs
from keras_headmask.rules.base import leaves

_ARGUMENT = "head_mask_inputs"


def rewire(model: keras.Model, new: Mapping[str, Any], drop_inputs: bool = False) -> None:
    """Run the graph of `model` anew, with what its rules read as arguments of the masked layers.

    `new` are inputs to add. With `drop_inputs`, inputs go that rules alone have read.
    """
    held = {op.name: op for op in model.operations if isinstance(op, HeadMaskInputs)}
    rules = {id(op): rules_read(model, op) for op in model.operations}
    if not new and not held and not any(rules.values()) and not _has_edges(model):
        return
    tensors = {tensor.name: tensor for tensor in model.inputs} | dict(new)
    of_rules = _read_by_rules_alone(model) if drop_inputs else set()
    prepares = prepared_inputs.layer_for(
        rule for read in rules.values() for rule in read if set(rule.reads) <= tensors.keys()
    )
    made: dict[str, Any] = {}
    if prepares is not None:
        made = prepares({name: tensors[name] for name in prepared_inputs.names_read(prepares)})

    def call(operation: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        before = kwargs.pop(_ARGUMENT, None) or {}
        if read := rules[id(operation)]:
            kwargs[_ARGUMENT] = _given(read, tensors, made, before)
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
    if not isinstance(operation, MaskedLayer):
        return []
    owners = {id(x) for x in model.operations}
    found = (rule for x in attention_inside(operation) for rule in all_rules(x))
    return [rule for rule in found if rule.reads and id(rule.owner) in owners]


def _given(
    rules: list[LayerRule],
    tensors: Mapping[str, Any],
    made: Mapping[str, Any],
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """What a masked layer is called with: the tensors `before`, and what they lack."""
    given = {name: tensors[name] for rule in rules for name in rule.reads if name not in before}
    given |= {name: x for rule in rules for name, x in before.items() if name in rule.reads}
    for rule in rules:
        if all(given[name] is tensors.get(name) for name in rule.reads):  # of which `made` is made
            for leaf in leaves(rule.spec):
                for name in leaf.inputs:
                    pair = prepared_inputs.prepared_names(leaf, name, rule.sources)
                    given |= {side: made[side] for side in pair if side in made}
    return dict(sorted(given.items()))


def _has_edges(model: keras.Model) -> bool:
    return any(_ARGUMENT in node.arguments.kwargs for node in _keras.nodes(model))


def _read_by_rules_alone(model: keras.Model) -> set[int]:
    """The ids of inputs that nothing reads but what prepares and hands on for rules."""
    by_rules: set[int] = set()
    by_others: set[int] = set()
    for node in _keras.nodes(model):
        kwargs = dict(node.arguments.kwargs)
        edges = kwargs.pop(_ARGUMENT, None)
        own = node.arguments.args, kwargs  # which may hold what the rules read, too
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
