"""What a lint must know of a model under rules: its layers, and the masks that reach them."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.lost_masks import marks_padding
from keras_headmask.masks import Mask, lift
from keras_headmask.retrofit.adapters import adapted
from keras_headmask.retrofit.find import AttentionLayer, find_attention, longest_sequence
from keras_headmask.retrofit.rule import rules_in_force, spec_of
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import make_mask

# Made-up inputs: those of queries are longer, so that cross-attention shows as such.
_OF_QUERIES, _LENGTH, _REAL = ("query", "decoder"), 24, 0.75


@dataclasses.dataclass
class SeenLayer:
    """An attention layer, its rule, and one forward: mask inputs, lengths, other masks, padding.

    `outside` is the mask that reaches the layer beside its rule, `(B, 1 or H, T, S)` or True. (A
    layer that was built with the rule has ANDed it to that already.)
    """

    entry: AttentionLayer
    spec: MaskSpec
    given: Mapping[str, Any]
    lengths: tuple[int, int] | None = None
    outside: Mask = True
    paddings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> Any:
        """Equal for layers of which the same is found."""
        outside = None if self.outside is True else (self.outside.shape, self.outside.tobytes())
        given = tuple(map(id, keras.tree.flatten(self.given)))
        of_layer = self.entry.num_heads, self.entry.kind
        return self.spec, of_layer, given, self.lengths, outside


def layers_under_rules(model: Any) -> list[AttentionLayer]:
    """Those with a rule by `apply_head_masks` or of their own; none where there is no graph."""
    if not isinstance(_keras.functional_of(model), _keras.Functional):
        return []
    known = find_attention(model).known
    return [x for x in known if rules_in_force(x.layer) or getattr(x.layer, "_restricts", False)]


def seen_in_a_forward(
    model: Any, entries: list[AttentionLayer], inputs: Mapping[str, Any] | None
) -> tuple[list[SeenLayer], str]:
    """The layers of `entries` as one forward shows them; and why it does not, if it fails."""
    from keras_headmask.retrofit.observe import called, probabilities_seen  # all of retrofit/

    problem, graph = "", _keras.functional_of(model)
    tensors = _made_up(graph) if inputs is None else _checked(graph, inputs)
    calls: dict[str, Any] = {}  # the arguments of each layer's call, by its path
    arriving: dict[str, Any] = {}  # those of its attention, and "lengths"
    try:
        # Eagerly, so that the masks are arrays.
        with contextlib.ExitStack() as stack:
            for entry in entries:
                keep = functools.partial(_keep, arriving, entry.path)
                stack.enter_context(probabilities_seen(entry.layer, keep))
                keep = functools.partial(_keep, calls, entry.path)
                stack.enter_context(called(entry.layer, keep))
            flat = [tensors[tensor.name] for tensor in graph.inputs]
            graph(keras.tree.pack_sequence_as(graph.input, flat), training=False)
    except Exception as error:  # of a layer that takes no such made-up inputs
        if inputs is not None:
            raise
        problem, arriving = str(error).strip().split("\n")[0], {}
    paddings, found = _paddings(graph, tensors), []
    for entry in entries:
        given = dict(calls.get(entry.path, {}).get("mask_inputs") or {})
        for rule in rules_in_force(entry.layer):
            given |= rule.given(tensors) if set(rule.reads) <= tensors.keys() else {}
        spec: Any = spec_of(entry.layer)
        given = {name: given[name] for name in spec.inputs if name in given}
        layer = SeenLayer(entry, spec, given)
        if (arguments := arriving.get(entry.path)) is not None:
            queries, keys = layer.lengths = arguments["lengths"]
            if arguments["attention_mask"] is not None:
                layer.outside = ops.convert_to_numpy(lift(arguments["attention_mask"]))
            if (window := adapted(entry.layer).window(arguments)) is not None:
                of_window = ops.convert_to_numpy(make_mask(window, queries, keys))
                layer.outside = layer.outside & of_window
            if given.keys() == spec.inputs.keys():
                layer.paddings = {name: p for name, p in paddings.items() if p.shape[1] == keys}
        found.append(layer)
    return found, problem


def _keep(seen: dict[str, Any], path: str, arguments: Any, probabilities: Any = None) -> None:
    seen[path] = dict(arguments)
    if probabilities is not None:
        seen[path]["lengths"] = tuple(probabilities.shape[-2:])


def unread_inputs(model: Any) -> list[str]:
    """Inputs that neither a layer nor a rule reads."""
    graph = _keras.functional_of(model)
    calls = (call for operation in graph.operations for call in _keras.calls_of(operation))
    read = {id(tensor) for call in calls for tensor in call.input_tensors}
    return [tensor.name for tensor in graph.inputs if id(tensor) not in read]


def _checked(graph: Any, inputs: Any) -> dict[str, np.ndarray]:
    names = [tensor.name for tensor in graph.inputs]
    if not isinstance(inputs, Mapping):
        raise TypeError(
            "`mask_inputs` must be a dict of the model's inputs by name. "
            f"Received: {type(inputs).__name__}."
        )
    if wrong := sorted(set(names) ^ set(inputs)):
        raise ValueError(
            "For a model, `mask_inputs` must hold each of its inputs: "
            f"{names}. Received: {sorted(inputs)}; {wrong[0]!r} is missing or unknown."
        )
    return {name: np.asarray(inputs[name]) for name in names}


def _made_up(graph: Any) -> dict[str, np.ndarray]:
    """Inputs with a padded tail: ids 1, masks true; 0 where padded."""
    tensors = {}
    most = min(_LENGTH, longest_sequence(graph) or _LENGTH)
    for tensor in graph.inputs:
        of_queries = tensor.name.split("_")[0] in _OF_QUERIES
        length = most if of_queries else max(1, most * 2 // 3)
        shape = [2, *(length if size is None else size for size in tensor.shape[1:])]
        value = np.ones(shape, keras.backend.standardize_dtype(tensor.dtype))
        if len(shape) == 2:
            value[:, int(shape[1] * _REAL) :] = 0
        tensors[tensor.name] = value
    return tensors


def _paddings(graph: Any, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What marks padding: inputs of that name, and ids where an embedding masks zero."""
    is_real = {name: x != 0 for name, x in tensors.items() if x.ndim == 2}
    flags = {name: x for name, x in is_real.items() if marks_padding(name)}
    if flags or not any(getattr(x, "mask_zero", False) for x in _keras.layers_of(graph)):
        return flags
    ids = [name for name in is_real if tensors[name].dtype.kind in "iu"]
    return {name: is_real[name] for name in ids if "token_ids" in name or len(tensors) == 1}
