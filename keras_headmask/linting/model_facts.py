"""What a lint must know of a model under rules: its layers, and the masks that reach them."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.linting.subject import marks_padding
from keras_headmask.masks import Mask, lift
from keras_headmask.retrofit.finding import AttentionLayer, find_attention, longest_sequence
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.retrofit.masked_layer import rules_in_force, spec_of
from keras_headmask.retrofit.observing import called, scores_seen
from keras_headmask.rules.base import MaskSpec

# Made-up inputs: those of queries are longer, so that cross-attention shows as such.
_OF_QUERIES, _LENGTH, _REAL = ("query", "decoder"), 24, 0.75


class MaskedLayer:
    """An attention layer, its rule, and one forward: lengths, mask inputs, other masks, padding.

    `arriving` are the arguments of its attention. `outside` is the mask that reaches the layer
    beside its rule, `(B, 1 or H, T, S)` or True. (A layer that was built with the rule has ANDed it
    to that already.)
    """

    def __init__(
        self,
        entry: AttentionLayer,
        spec: MaskSpec,
        given: Mapping[str, Any] | None,
        arriving: Mapping[str, Any] | None,
        paddings: Mapping[str, np.ndarray],
    ):
        self.path, self.spec, self.heads = entry.path, spec, entry.layer.num_heads
        self.is_cross, self.given = entry.kind == "cross", given or {}
        self.lengths: tuple[int, int] | None = None
        self.outside: Mask = True
        self.paddings: dict[str, np.ndarray] = {}
        if arriving is not None:
            queries, keys = self.lengths = tuple(arriving[x].shape[1] for x in ("query", "key"))
            if arriving["attention_mask"] is not None:
                self.outside = ops.convert_to_numpy(lift(arriving["attention_mask"])).astype(bool)
            if arriving.get("use_causal_mask"):
                self.outside = self.outside & np.tri(queries, keys, dtype=bool)[None, None]
            if given is not None:
                self.paddings = {n: p for n, p in paddings.items() if p.shape[1] == keys}

    @property
    def key(self) -> Any:
        """Equal for layers of which the same is found."""
        outside = None if self.outside is True else (self.outside.shape, self.outside.tobytes())
        given = tuple(map(id, keras.tree.flatten(self.given)))
        return self.spec, self.heads, self.is_cross, given, self.lengths, outside


def has_rules(model: Any) -> bool:
    """Whether a model with a graph holds rules: by `apply_head_masks`, or in layers of its own."""
    has_graph = isinstance(_keras.functional_of(model), _keras.Functional)
    return has_graph and bool(_rules(model) or _own(model))


def _rules(model: Any) -> list[tuple[AttentionLayer, LayerRule]]:
    """The layers that have a rule by `apply_head_masks`, and the last of their rules."""
    known = find_attention(model).known
    return [(x, rules[-1]) for x in known if (rules := rules_in_force(x.layer))]


def _own(model: Any) -> list[AttentionLayer]:
    """The layers that were built with a rule, and have no other by `apply_head_masks`."""
    known = find_attention(model).known
    free = (x for x in known if not rules_in_force(x.layer))
    return [x for x in free if getattr(x.layer, "_restricts", False)]


def layers_of(model: Any, inputs: Mapping[str, Any] | None) -> tuple[list[MaskedLayer], str]:
    """The masked layers of `model`, seen in one forward; and why they were not seen, if so."""
    problem, graph, rules, own = "", _keras.functional_of(model), _rules(model), _own(model)
    tensors = _made_up(graph) if inputs is None else _checked(graph, inputs)
    given: dict[int, Mapping[str, Any]] = {}  # the arguments of each layer's call, by its id
    arriving: dict[int, Mapping[str, Any]] = {}  # those of its attention
    try:
        # Eagerly, so that the masks are arrays.
        with contextlib.ExitStack() as stack:
            for layer in [entry.layer for entry, _ in rules] + [entry.layer for entry in own]:
                keep = functools.partial(_keep, arriving, id(layer))
                stack.enter_context(scores_seen(layer, keep))
                stack.enter_context(called(layer, functools.partial(_keep, given, id(layer))))
            flat = [tensors[tensor.name] for tensor in graph.inputs]
            graph(keras.tree.pack_sequence_as(graph.input, flat), training=False)
    except Exception as error:  # of a layer that takes no such made-up inputs
        if inputs is not None:
            raise
        problem, arriving = str(error).strip().split("\n")[0], {}
    paddings, found = _paddings(graph, tensors), []
    for entry, rule in rules:
        spec = spec_of(entry.layer)
        if spec is not None:
            is_whole = spec.inputs.keys() <= rule.sources.keys()
            values = rule.given(tensors) if is_whole and set(rule.reads) <= tensors.keys() else None
            seen = arriving.get(id(entry.layer))
            found.append(MaskedLayer(entry, spec, values, seen, paddings))
    for entry in own:
        key, spec = id(entry.layer), entry.layer.mask_spec
        values = given.get(key, {}).get("mask_inputs") or {}
        found.append(MaskedLayer(entry, spec, values, arriving.get(key), paddings))
    return found, problem


def _keep(seen: dict[int, Any], layer: int, arguments: Any, _probabilities: Any = None) -> None:
    seen[layer] = arguments


def unread_inputs(model: Any) -> list[str]:
    """Inputs that neither a layer nor a rule reads."""
    graph = _keras.functional_of(model)
    read = {
        id(tensor)
        for operation in graph.operations
        for node in _keras.calls_of(operation)
        for tensor in node.input_tensors
    }
    return [t.name for t in graph.inputs if id(t) not in read]


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
    of_positions = {name: x for name, x in tensors.items() if x.ndim == 2}
    flags = {name: x != 0 for name, x in of_positions.items() if marks_padding(name)}
    if flags or not any(getattr(x, "mask_zero", False) for x in _keras.layers_of(graph)):
        return flags
    ids = {name: x for name, x in of_positions.items() if x.dtype.kind in "iu"}
    return {n: x != 0 for n, x in ids.items() if "token_ids" in n or len(tensors) == 1}
