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
from keras_headmask.linting.subject import marks_padding
from keras_headmask.masks import lift
from keras_headmask.retrofit.finding import AttentionLayer, find_attention, longest_sequence
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.retrofit.masked_layer import rules_in_force
from keras_headmask.retrofit.observing import called, scores_seen
from keras_headmask.retrofit.report import spec_of
from keras_headmask.rules.base import MaskSpec

# Made-up inputs: those of queries are longer, so that cross-attention shows as such.
_OF_QUERIES, _LENGTH, _REAL = ("query", "decoder"), 24, 0.75


@dataclasses.dataclass(frozen=True)
class MaskedLayer:
    """An attention layer, its rule, and one forward: lengths, mask inputs, other masks, padding.

    `outside` is the mask that reaches the layer beside its rule, `(B, 1 or H, T, S)` or True. (A
    layer that was built with the rule has ANDed it to that already.)
    """

    path: str
    spec: MaskSpec
    heads: int
    sources: tuple
    is_cross: bool
    given: Mapping[str, Any]
    lengths: tuple[int, int] | None
    outside: Any
    paddings: Mapping[str, np.ndarray]

    @property
    def outside_key(self) -> Any:
        outside = None if self.outside is True else (self.outside.shape, self.outside.tobytes())
        return self.lengths, outside, self.is_cross


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
    arriving: dict[int, Any] = {}
    handed: dict[int, dict[str, Any]] = {}

    def keep(layer: int, arguments: Mapping[str, Any], _scores: Any) -> None:
        arriving[layer] = arguments

    def remember(layer: int, arguments: Mapping[str, Any]) -> None:
        handed[layer] = dict(arguments.get("mask_inputs") or {})

    try:
        # Eagerly, so that the masks are arrays.
        with contextlib.ExitStack() as stack:
            for entry in [entry for entry, _ in rules] + own:
                layer, key = entry.layer, id(entry.layer)
                stack.enter_context(scores_seen(layer, functools.partial(keep, key)))
                stack.enter_context(called(layer, functools.partial(remember, key)))
            flat = [tensors[tensor.name] for tensor in graph.inputs]
            graph(keras.tree.pack_sequence_as(graph.input, flat), training=False)
    except Exception as error:  # of a layer that takes no such made-up inputs
        if inputs is not None:
            raise
        problem, arriving = str(error).strip().split("\n")[0], {}
    found: list[tuple] = []
    for entry, rule in rules:
        spec = spec_of(entry.layer)
        is_whole = spec is not None and spec.inputs.keys() <= rule.sources.keys()
        given = rule.given(tensors) if is_whole and set(rule.reads) <= tensors.keys() else None
        found.append((entry, spec, tuple(sorted(rule.sources.items())), given))
    for entry in own:
        spec = entry.layer.mask_spec
        # Which inputs it reads is known by its call alone, so each such layer is looked at.
        sources = (entry.path,) if spec.inputs else ()
        found.append((entry, spec, sources, handed.get(id(entry.layer), {})))
    paddings = _paddings(graph, tensors)
    return [_layer(*one, arriving.get(id(one[0].layer)), paddings) for one in found], problem


def _layer(
    entry: AttentionLayer,
    spec: MaskSpec,
    sources: tuple,
    given: Mapping[str, Any] | None,
    seen: Mapping[str, Any] | None,
    paddings: Mapping[str, np.ndarray],
) -> MaskedLayer:
    lengths, outside, fitting = None, True, {}
    if seen is not None:
        lengths = seen["query"].shape[1], seen["key"].shape[1]
        if seen["attention_mask"] is not None:
            outside = ops.convert_to_numpy(lift(seen["attention_mask"])).astype(bool)
        if seen.get("use_causal_mask"):
            outside = outside & np.tril(np.ones((1, 1, *lengths), bool))
        fitting = {n: p for n, p in paddings.items() if p.shape[1] == lengths[1]}
    heads, is_cross = entry.layer.num_heads, entry.kind == "cross"
    fitting = {} if given is None else fitting
    given = given or {}
    return MaskedLayer(entry.path, spec, heads, sources, is_cross, given, lengths, outside, fitting)


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


def _checked(model: Any, inputs: Any) -> dict[str, Any]:
    names = [tensor.name for tensor in model.inputs]
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


def _made_up(model: Any) -> dict[str, np.ndarray]:
    """Inputs with a padded tail: ids 1, masks true; 0 where padded."""
    tensors = {}
    most = min(_LENGTH, longest_sequence(model) or _LENGTH)
    for tensor in model.inputs:
        of_queries = tensor.name.split("_")[0] in _OF_QUERIES
        length = most if of_queries else max(1, most * 2 // 3)
        shape = [2, *(length if size is None else size for size in tensor.shape[1:])]
        value = np.ones(shape, keras.backend.standardize_dtype(tensor.dtype))
        if len(shape) == 2:
            value[:, int(shape[1] * _REAL) :] = 0
        tensors[tensor.name] = value
    return tensors


def _paddings(model: Any, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What marks padding: inputs of that name, and ids where an embedding masks zero."""
    flags = {n: x != 0 for n, x in tensors.items() if marks_padding(n) and x.ndim == 2}
    masks_zero = any(getattr(x, "mask_zero", False) for x in _keras.layers_of(model))
    ids = {
        name: x != 0
        for name, x in tensors.items()
        if x.ndim == 2 and x.dtype.kind in "iu" and ("token_ids" in name or len(tensors) == 1)
    }
    return flags or (ids if masks_zero else {})
