"""Attention of a model that gets a rule and, as the graph shows, no mask of padding."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import lost_masks
from keras_headmask.retrofit.families import adapter_of
from keras_headmask.retrofit.masked_layer import rules_in_force
from keras_headmask.retrofit.model_inputs import Planned
from keras_headmask.retrofit.nesting import attention


def warn_of_lost_padding(model: keras.Model, planned: Planned) -> None:
    """Warn where `model` loses the Keras mask before a layer whose rule lets padding be seen.

    A layer that has a rule already was looked at when it got that.
    """
    rules = {id(entry.layer): (entry, rule) for entry, rule in planned}
    found: dict[Any, tuple[lost_masks.Lost, list[str]]] = {}
    for layer, lost in _losses(model):
        entry, rule = rules.get(id(layer), (None, None))
        if entry is None or rule is None or rules_in_force(layer):
            continue
        if not lost_masks.hides_padding(rule.spec, entry.num_heads):
            paths = found.setdefault(lost.operation, (lost, []))[1]
            paths += [entry.path] if entry.path not in paths else []
    for lost, paths in found.values():
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        ways = "Pass the attention an `attention_mask`, or add `& {padding}` to the rule."
        name = f"The attention layer '{paths[0]}'{more}"
        lost_masks.warn(name, lost, ways, stacklevel=3)


def _losses(model: keras.Model) -> Iterator[tuple[keras.Layer, lost_masks.Lost]]:
    """Attention in the graphs of `model` that is called without a mask, and where that is lost."""
    graphs = {id(x): x for x in map(_keras.functional_of, _keras.layers_of(model))}
    for graph in graphs.values():
        calls = _keras.nodes(graph) if isinstance(graph, _keras.Functional) else ()
        taken: dict[int, lost_masks.Lost] = {}  # by attention that ran before, on the same tensor
        for node in calls:
            taken_before = dict(taken)
            if _keras.takes_masks_off(node.operation):
                for x in node.input_tensors:
                    taken.setdefault(id(x), lost_masks.Lost(node.operation, None))
            layers = [] if node.is_input else _attention_of(node.operation)
            if not layers:
                continue
            args, kwargs = node.arguments.args, node.arguments.kwargs
            given = _keras.arguments_of(node.operation, args, kwargs) | kwargs
            own = [_keras.get_keras_mask(x) for x in node.input_tensors]  # filled in by Keras
            masks = (x for name, x in given.items() if name.endswith("mask"))
            if any(hasattr(x, "shape") and not any(x is mask for mask in own) for x in masks):
                continue
            value = given.get("value") if adapter_of(node.operation) is not None else None
            tensor = node.input_tensors[0] if value is None else value
            lost = lost_masks.lost_mask(tensor)
            if lost is None and _keras.get_keras_mask(tensor) is not None:
                lost = taken_before.get(id(tensor))
            if lost is not None:
                yield from ((layer, lost) for layer in layers)


def _attention_of(operation: Any) -> list[keras.Layer]:
    is_layer = isinstance(operation, keras.Layer) and not isinstance(operation, keras.Model)
    return attention(operation) if is_layer else []
