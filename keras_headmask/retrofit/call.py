"""One call of attention under the rules of its layer.

A masked layer that is called puts its `head_mask_inputs` into a frame, where the attention inside
finds them. A frame belongs to one call in one thread, so a model may run in many threads at once.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import observers
from keras_headmask.attention.choose import attend
from keras_headmask.attention.request import Request, all_that_restricts, bound_to
from keras_headmask.attention.tuning import holding
from keras_headmask.layers.call_checks import is_zero
from keras_headmask.retrofit.adapters import Attention, adapted, errors_naming, holds
from keras_headmask.retrofit.rule import LayerRule, Tensors, rules_in_force
from keras_headmask.retrofit.stale import (
    check_not_in_own_function,
    graph_being_built,
    in_own_function,
)
from keras_headmask.rules import evaluation, offsets
from keras_headmask.rules.base import MaskSpec

Arguments = dict[str, Any]  # of a call of the hook, by the names of Keras' own class


class Frame(NamedTuple):
    """The state of a running call of a masked layer."""

    inputs: tuple[tuple[keras.Layer, Tensors], ...]  # each with the layer called; outermost first
    offset: Any  # the position of the first query in a cache; `None` without a cache
    graph: Any  # TensorFlow's, in which the inputs were given
    used: set[int]  # the attention layers that have run


_frame: ContextVar[Frame | None] = ContextVar("frame", default=None)


def current_frame() -> Frame:
    return _frame.get() or Frame((), None, graph_being_built(), set())


def in_frame(frame: Frame) -> AbstractContextManager[Any]:
    """Run in `frame`, which another call opened."""
    return holding(_frame, frame)


@contextlib.contextmanager
def opened_frame(
    layers: Iterable[keras.Layer], inputs: Tensors | None, offset: Any
) -> Iterator[Frame]:
    """Open a frame with `inputs` for `layers`. It also holds what the frame around it holds.

    An offset that the frame around it has is kept.
    """
    before = current_frame()
    held, graph = before.inputs, before.graph
    if inputs is not None:
        held = (*held, *((layer, inputs) for layer in layers))
        graph = graph_being_built()
    frame = Frame(held, offset if before.offset is None else before.offset, graph, set())
    with in_frame(frame):
        yield frame
    before.used.update(frame.used)


def inputs_of(rule: LayerRule, attention: Any = None) -> Tensors | None:
    """The tensors that `rule` reads in this call: those that its owner was called with.

    If the owner was not called: those of another layer that holds the same `attention` and not the
    owner. Those of a layer around the owner may belong to another sequence.
    """
    by_layer = current_frame().inputs[::-1]
    candidates = [tensors for layer, tensors in by_layer if layer is rule.owner]
    if not candidates and attention is not None:
        candidates = [
            tensors
            for layer, tensors in by_layer
            if holds(layer, attention) and not holds(layer, rule.owner)
        ]
    return next((tensors for tensors in candidates if set(rule.reads) <= tensors.keys()), None)


def hook(layer: keras.Layer) -> Callable:
    """A function that replaces `_compute_attention` of `layer`, and applies its rules.

    It is set on the object: if the class had it, Keras would give up its shortcut for causal masks.
    """
    name = adapted(layer).hook

    def obey(*args: Any, **kwargs: Any) -> Any:
        adapter = adapted(layer)
        arguments = adapter.arguments(*args, **kwargs)
        current_frame().used.add(id(layer))
        rules = [rule for rule in rules_in_force(layer) if rule.restricts]
        rules = [] if rules and observers.are_rules_off() else rules
        in_force = [rule for rule in rules if _has_tensors(layer, rule)]
        compute: Callable = functools.partial(without_rules, adapter)
        if in_force:
            attended = _under if adapter.softmax is None else _by_softmax
            compute = functools.partial(attended, adapter, in_force)
        context, probabilities = compute(arguments)
        return (context, probabilities) if adapter.gives_pair(arguments) else context

    @observers.asks
    def compute_attention(*args: Any, **kwargs: Any) -> Any:
        return observers.run(layer, name, obey, *args, **kwargs)

    return compute_attention


def _has_tensors(layer: Any, rule: LayerRule) -> bool:
    """Whether the inputs of `rule` are tensors of the backend, not symbolic ones of Keras.

    They are symbolic while a graph is made and Keras infers shapes. Without values the rule is left
    out: shapes do not depend on it. A function compiled meanwhile would stay without the rule.
    """
    tensors = [current_frame().offset, *(inputs_of(rule, layer) or {}).values()]
    if not any(map(keras.backend.is_keras_tensor, tensors)):
        return True
    if not _keras.for_shapes_alone():
        raise RuntimeError(in_own_function(layer.name))
    return False


def without_rules(adapter: Attention, arguments: Arguments) -> tuple[Any, Any]:
    """Context and probabilities as the class itself computes them."""
    brings_both = adapter.returns_pair or adapter.has_own_code
    if arguments["return_attention_scores"] and not brings_both:
        attended = _under if adapter.softmax is None else _by_softmax
        return attended(adapter, [], arguments)
    seen = observers.as_seen(adapter.layer)
    return adapter.called(getattr(type(seen), adapter.hook).__get__(seen), arguments)


def _under(adapter: Attention, rules: list[LayerRule], arguments: Arguments) -> tuple[Any, Any]:
    """Context and probabilities under `rules`: none, one, or those of several nested models."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if rules and len(query.shape) != 4:
        raise ValueError(
            f"The attention layer '{adapter.layer.name}' attends over several axes: a mask spec "
            "speaks of one axis of queries and one of keys. Leave it out by `layers=`."
        )
    lengths = evaluation.Lengths(query.shape[0], adapter.num_heads, query.shape[1], key.shape[1])
    given = _offset(arguments)
    for rule in rules:
        if given is None and not rule.is_cross:  # may warn
            offsets.checked_or_default_offset(None, rule.spec, lengths.queries, lengths.keys)
    offset = 0 if given is None else given
    mask, window = _masks_of_class(adapter, arguments, lengths, offset)
    spec: MaskSpec | None = None
    inputs: dict[str, Any] = {}
    prepared: dict[MaskSpec, Any] = {}
    for rule in rules:
        of_rule, known = _checked_inputs(adapter.layer, rule, lengths, offset)
        if inputs.keys() & of_rule.keys():  # nested models may each have `token_ids`, of two texts
            apart, query = bound_to(rule.spec, of_rule, query, key, value, offset, prepared=known)
            whole = evaluation.mask_of_all_heads(rule.spec, apart, adapter.num_heads)
            mask = masks.and_masks(mask, whole)
        else:
            spec = rule.spec if spec is None else spec & rule.spec
            inputs, prepared = inputs | of_rule, prepared | known
    of_mask = _as_argument(mask, lengths)
    joined, inputs = all_that_restricts(spec, inputs, **of_mask, window=window)
    bound: Any = None
    if joined is not None:
        bound, query = bound_to(joined, inputs, query, key, value, offset, prepared=prepared)
    if adapter.has_own_code:
        assert joined is not None
        mask = evaluation.mask_of_all_heads(joined, bound, adapter.num_heads)
        merged = {k: v for k, v in arguments.items() if k != "use_causal_mask"}
        merged |= {"query": query, "attention_mask": mask}
        context, probabilities = without_rules(adapter, merged)
        return adapter.without_dead_rows(context, mask), probabilities
    wanted, bias = bool(arguments["return_attention_scores"]), arguments.get("attention_bias")
    return attend(
        Request(
            query,
            key,
            value,
            joined,
            bound,
            scale=adapter.scale,
            query_offset=offset,
            changes=adapter.changes._replace(bias=bias),
            wants_probabilities=wanted,
            tiled=None if wanted or bias is not None else getattr(adapter.layer, "_tiled", None),
            **adapter.dropout(arguments["training"]),
        )
    )


def _by_softmax(
    adapter: Attention, rules: list[LayerRule], arguments: Arguments
) -> tuple[Any, Any]:
    """Output and probabilities of a layer whose `call` is the hook, and takes a softmax.

    The code of its class runs, on a copy of the layer whose softmax also hides what rules hide.
    """
    assert adapter.softmax is not None
    given, results = _offset(arguments), []
    offset = 0 if given is None else given
    usual = getattr(adapter.layer, adapter.softmax)

    def softmax(logits: Any, mask: Any = None) -> Any:
        mask = None if mask is None else masks.as_bool(mask)
        lengths = evaluation.Lengths(*logits.shape)
        for rule in rules:
            batch, _, queries, keys = masks.sizes(logits)
            inputs, known = _checked_inputs(adapter.layer, rule, lengths, offset)
            sizes = queries, keys, offset
            bound = evaluation.bind(rule.spec, inputs, *sizes, prepared=known, batch=batch)
            of_rule = evaluation.mask_of_all_heads(rule.spec, bound, rule.num_heads)
            mask = masks.and_masks(mask, of_rule)
        probabilities = usual(logits, mask)
        if rules:  # for fully masked rows
            probabilities = ops.where(mask, probabilities, ops.zeros_like(probabilities))
        results.append(probabilities)
        return probabilities

    seen = observers.standing_in(adapter.layer, {adapter.softmax: softmax})
    context, _ = adapter.called(getattr(type(seen), adapter.hook).__get__(seen), arguments)
    return context, results[-1]


def _masks_of_class(
    adapter: Attention, arguments: Arguments, lengths: evaluation.Lengths, offset: Any
) -> tuple[Any, MaskSpec | None]:
    """What restricts a call beside the rules: a mask, and a rule on positions."""
    mask, window = arguments["attention_mask"], adapter.window(arguments)
    if mask is not None:
        with errors_naming(adapter.layer):
            mask = masks.as_bool(mask, "attention_mask")
            masks.check_shape(mask, "attention_mask", *lengths)
    if arguments.get("use_causal_mask") and not is_zero(offset):
        # In Keras' causal mask queries and keys both start at 0, also where there is an offset.
        assert window is not None
        queries, keys = (masks.sizes(arguments[name])[1] for name in ("query", "key"))
        mask, window = masks.and_masks(mask, evaluation.make_mask(window, queries, keys)), None
    return mask, window


def _offset(arguments: Arguments) -> Any:
    """The position of the first query, if the call gives it."""
    offset = current_frame().offset
    return arguments.get("cache_update_index") if offset is None else offset


def _checked_inputs(
    layer: Any, rule: LayerRule, lengths: evaluation.Lengths, offset: Any
) -> tuple[dict[str, Any], dict[MaskSpec, Any]]:
    """The mask inputs of `rule`, checked, and what is prepared of them."""
    tensors: Mapping[str, Any] = {}
    if rule.reads:
        frame_inputs = inputs_of(rule, layer)
        if frame_inputs is None:
            raise ValueError(missing_inputs(layer.name, rule))
        check_not_in_own_function(layer.name, current_frame().graph)
        tensors = frame_inputs
    inputs = rule.inputs_from(tensors)
    with errors_naming(layer):
        evaluation.check_inputs(rule.spec, inputs, lengths, offset)
    return inputs, rule.prepared(tensors)


def missing_inputs(name: str, rule: LayerRule) -> str:
    example = ", ".join(f"{name!r}: ..." for name in rule.reads)
    return (
        f"The attention layer '{name}' obeys a rule that reads {rule.reads}, and was called "
        "without them. Build on tensors of the masked model, which hand them on: "
        "`keras.Model(masked.input, layer(masked.output))`; or call the layer with "
        f"`head_mask_inputs={{{example}}}`. The backbone of a masked task works alone if all that "
        "the rule reads are its own inputs; else give the rule to the backbone first, and build "
        "the task on it. (KerasHub's cache passes the newest token alone. "
        "Generation with a cache by `generate()` keeps what rules read, for a causal language "
        "model that has the rule itself; else rules on positions work: Window, Chunk, Keys.)"
    )


def _as_argument(attention_mask: Any, lengths: evaluation.Lengths) -> dict[str, Any]:
    """The merged mask under the name of the argument that says what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": ops.squeeze(attention_mask, 1)}  # padding: whole ranges can be skipped
    return {"attention_mask": attention_mask}
