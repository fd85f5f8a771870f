"""One call of attention under the rules of its layer.

A masked layer that is called puts its `head_mask_inputs` into a frame, where the attention inside
finds them. A frame belongs to one call in one thread, so a model may run in many threads at once.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import observers
from keras_headmask.attention.choose import attend
from keras_headmask.attention.request import Request, all_that_restricts, bound_to
from keras_headmask.attention.tuning import holding
from keras_headmask.layers import changing
from keras_headmask.retrofit.adapters import Attention, adapted, holds
from keras_headmask.retrofit.compiled import (
    check_not_in_own_function,
    graph_being_built,
    in_own_function,
)
from keras_headmask.retrofit.rule import LayerRule, Tensors
from keras_headmask.rules import evaluation, offsets
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bound

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


@contextlib.contextmanager
def in_frame(frame: Frame) -> Iterator[None]:
    """Run in `frame`, which another call opened."""
    token = _frame.set(frame)
    try:
        yield
    finally:
        _frame.reset(token)


@contextlib.contextmanager
def opened_frame(
    layers: Iterable[keras.Layer], inputs: Tensors | None, offset: Any
) -> Iterator[Frame]:
    """Open a frame with `inputs` for `layers`. It also holds what the frame around it holds.

    An offset that the frame around it has is kept.
    """
    outer = _frame.get()
    before = outer or Frame((), None, graph_being_built(), set())
    held, graph = before.inputs, before.graph
    if inputs is not None:
        held = (*held, *((layer, inputs) for layer in layers))
        graph = graph_being_built()
    frame = Frame(held, offset if before.offset is None else before.offset, graph, set())
    with in_frame(frame):
        yield frame
    if outer is not None:
        outer.used.update(frame.used)


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


class Cache(Protocol):
    """Keeps the keys and values of earlier tokens, in place of the cache of the layers' classes."""

    def called(self, layer: Any, call: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the call of a masked layer."""

    def context(
        self, adapter: Attention, rules: list[LayerRule], usual: Callable, arguments: Arguments
    ) -> tuple[Any, Any]:
        """Context and probabilities of a call of the hook, which `usual(arguments)` computes."""


_cache: ContextVar[Cache | None] = ContextVar("cache", default=None)


def current_cache() -> Cache | None:
    return _cache.get()


def with_cache(cache: Cache) -> AbstractContextManager[Any]:
    """Let masked layers that are called inside keep their keys in `cache`."""
    return holding(_cache, cache)


def hook(layer: keras.Layer, rules: Callable[[], tuple[LayerRule, ...]]) -> Callable:
    """A function that replaces `_compute_attention` of `layer`, and applies the rules.

    It is set on the object: if the class had it, Keras would give up its shortcut for causal masks.
    """
    name = adapted(layer).hook

    def obey(*args: Any, **kwargs: Any) -> Any:
        adapter = adapted(layer)
        arguments = adapter.arguments(*args, **kwargs)
        current_frame().used.add(id(layer))
        restrict = [rule for rule in rules() if rule.restricts and not observers.are_rules_off()]
        in_force = [rule for rule in restrict if _has_tensors(layer, rule)]
        compute: Callable = functools.partial(without_rules, adapter)
        if in_force:
            under = _under if adapter.softmax is None else _by_softmax
            compute = functools.partial(under, adapter, in_force)
        cache = current_cache()
        if cache is not None:
            compute = functools.partial(cache.context, adapter, in_force, compute)
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
        if adapter.softmax is not None:
            return _by_softmax(adapter, [], arguments)
        beside = _Beside.of(adapter, arguments, _offset(arguments, 0), _sizes(arguments))
        return _attended(adapter, arguments, beside)
    seen = observers.as_seen(adapter.layer)
    return adapter.called(getattr(type(seen), adapter.hook).__get__(seen), arguments)


def _under(adapter: Attention, rules: list[LayerRule], arguments: Arguments) -> tuple[Any, Any]:
    """Context and probabilities under `rules`: one, or one of each of several nested models."""
    frame = current_frame()
    if len(arguments["query"].shape) != 4:
        raise ValueError(
            f"The attention layer '{adapter.layer.name}' attends over several axes: a mask spec "
            "speaks of one axis of queries and one of keys. Leave it out by `layers=`."
        )
    offset = _offset(arguments)
    lengths = _lengths(adapter, arguments)
    for rule in rules:
        if offset is None and not rule.is_cross:
            offsets.checked_or_default_offset(
                None, rule.spec, lengths.queries, lengths.keys
            )  # may warn
    offset = 0 if offset is None else offset
    bounds: list[Bound] = []
    for rule in rules:
        bound, query = _bound(adapter.layer, rule, frame, lengths, arguments, offset)
        bounds, arguments = [*bounds, bound], arguments | {"query": query}
    spec, bound, apart = _joined([rule.spec for rule in rules], bounds)
    beside, heads = _Beside.of(adapter, arguments, offset, bound.sizes), adapter.num_heads
    for other, of_other in apart:
        of_rule = evaluation.mask_of_all_heads(other, of_other, heads)
        beside = beside._replace(mask=masks.and_masks(beside.mask, of_rule))

    def make_mask() -> Any:
        whole = evaluation.mask_of_all_heads(spec, bound, heads)
        whole = masks.and_masks(whole, beside.mask)
        if beside.window is not None:
            of_window = evaluation.mask_of_all_heads(beside.window, bound, heads)
            whole = masks.and_masks(whole, of_window)
        return whole

    if adapter.has_own_code:
        mask = make_mask()
        merged = {k: v for k, v in arguments.items() if k != "use_causal_mask"}
        context, probabilities = without_rules(adapter, merged | {"attention_mask": mask})
        return adapter.without_dead_rows(context, mask), probabilities
    return _attended(adapter, arguments, beside, spec, bound, make_mask)


def _joined(
    specs: list[MaskSpec], bounds: list[Bound]
) -> tuple[MaskSpec, Bound, list[tuple[MaskSpec, Bound]]]:
    """The specs as one spec, and apart those that read an input whose name it has already.

    Models inside one another may each have an input `token_ids`, say, of other values.
    """
    (spec, *others), (bound, *of_others), apart = specs, bounds, []
    for other, of_other in zip(others, of_others, strict=True):
        if spec.inputs.keys() & other.inputs.keys():
            apart.append((other, of_other))
        else:
            spec = spec & other
            bound = bound._replace(leaf_inputs=bound.leaf_inputs | of_other.leaf_inputs)
    return spec, bound, apart


def _by_softmax(
    adapter: Attention, rules: list[LayerRule], arguments: Arguments
) -> tuple[Any, Any]:
    """Output and probabilities of a layer whose `call` is the hook, and takes a softmax.

    The code of its class runs, on a copy of the layer whose softmax also hides what rules hide.
    """
    assert adapter.softmax is not None
    frame, offset, results = current_frame(), _offset(arguments, 0), []
    usual = getattr(adapter.layer, adapter.softmax)

    def softmax(logits: Any, mask: Any = None) -> Any:
        mask = None if mask is None else masks.as_bool(mask)
        lengths = evaluation.Lengths(*logits.shape)
        for rule in rules:
            batch, _, queries, keys = masks.sizes(logits)
            inputs, known = _checked_inputs(adapter.layer, rule, frame, lengths, offset)
            bound = evaluation.bind(rule.spec, inputs, queries, keys, offset, batch=batch, **known)
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


class _Beside(NamedTuple):
    """Restrictions of one call beside the rules: a mask, and a rule on positions."""

    mask: Any
    window: MaskSpec | None
    offset: Any  # of the first query
    sizes: tuple[Any, Any, Any]  # of the batch, the queries and the keys

    @classmethod
    def of(cls, adapter: Attention, arguments: Arguments, offset: Any, sizes: Any) -> "_Beside":
        lengths, window = _lengths(adapter, arguments), adapter.window(arguments)
        mask = _checked_mask(adapter.layer, arguments["attention_mask"], lengths)
        if arguments.get("use_causal_mask") and not (isinstance(offset, int) and offset == 0):
            # In Keras' causal mask queries and keys both start at 0, also where there is an offset.
            assert window is not None
            causal = evaluation.make_mask(window, *sizes[1:])
            mask, window = masks.and_masks(mask, causal), None
        return cls(mask, window, offset, sizes)


def _attended(
    adapter: Attention,
    arguments: Arguments,
    beside: _Beside,
    spec: MaskSpec | None = None,
    bound: Any = None,
    make_mask: Callable | None = None,
) -> tuple[Any, Any]:
    """Context and probabilities by our own attention, under `spec` and `beside`."""
    of_mask = _as_argument(beside.mask, _lengths(adapter, arguments))
    outside, inputs = all_that_restricts(None, None, **of_mask, window=beside.window)
    if outside is not None and (inputs or bound is None):
        bound = evaluation.bind(
            outside, inputs, *beside.sizes[1:], beside.offset, bound, batch=beside.sizes[0]
        )
    rules = [x for x in (spec, outside) if x is not None]
    wanted = bool(arguments["return_attention_scores"])
    return attend(
        Request(
            arguments["query"],
            arguments["key"],
            arguments["value"],
            functools.reduce(operator.and_, rules) if rules else None,
            bound,
            scale=adapter.scale,
            query_offset=beside.offset,
            changes=changing.now(adapter.layer, adapter.changes),
            wants_probabilities=wanted,
            tiled=None if wanted else getattr(adapter.layer, "_tiled", None),
            make_mask=make_mask,
            **adapter.dropout(arguments["training"]),
        )
    )


def _offset(arguments: Arguments, default: Any = None) -> Any:
    """The position of the first query, if the call gives it."""
    offset = current_frame().offset
    if offset is None:
        offset = arguments.get("cache_update_index")
    return default if offset is None else offset


def _sizes(arguments: Arguments) -> tuple[Any, Any, Any]:
    """Sizes of batch, queries and keys. (Once for each call: it is several operations.)"""
    batch, queries = masks.sizes(arguments["query"])[:2]
    return batch, queries, masks.sizes(arguments["key"])[1]


def _lengths(adapter: Attention, arguments: Arguments) -> evaluation.Lengths:
    query, key = arguments["query"], arguments["key"]
    return evaluation.Lengths(query.shape[0], adapter.num_heads, query.shape[1], key.shape[1])


def _bound(
    layer: Any,
    rule: LayerRule,
    frame: Frame,
    lengths: evaluation.Lengths,
    arguments: Arguments,
    offset: Any,
) -> tuple[Bound, Any]:
    """The prepared inputs of `rule`, and the query, which a graph checks."""
    inputs, known = _checked_inputs(layer, rule, frame, lengths, offset)
    return bound_to(rule.spec, inputs, arguments["query"], arguments["key"], offset, **known)


def _checked_inputs(
    layer: Any, rule: LayerRule, frame: Frame, lengths: evaluation.Lengths, offset: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mask inputs of `rule`, checked, and what is prepared of them."""
    tensors: Mapping[str, Any] = {}
    if rule.reads:
        frame_inputs = inputs_of(rule, layer)
        if frame_inputs is None:
            raise ValueError(missing_inputs(layer.name, rule))
        check_not_in_own_function(layer.name, frame.graph)
        tensors = frame_inputs
    inputs = rule.inputs_from(tensors)
    try:
        evaluation.check_inputs(rule.spec, inputs, lengths, offset)
    except (TypeError, ValueError) as error:
        raise type(error)(f"In the attention layer '{layer.name}': {error}") from error
    return inputs, {"prepared": rule.prepared(tensors)}


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


def _checked_mask(layer: Any, mask: Any, lengths: evaluation.Lengths) -> Any:
    """The merged mask that a layer hands to `_compute_attention`, as booleans."""
    if mask is None:
        return None
    try:
        mask = masks.as_bool(mask, "attention_mask")
        masks.check_shape(mask, "attention_mask", *lengths)
    except (TypeError, ValueError) as error:
        raise type(error)(f"In the attention layer '{layer.name}': {error}") from error
    return mask


def _as_argument(attention_mask: Any, lengths: evaluation.Lengths) -> dict[str, Any]:
    """The merged mask under the name of the argument that says what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": ops.squeeze(attention_mask, 1)}  # padding: whole ranges can be skipped
    return {"attention_mask": attention_mask}
