"""One call of attention under the rules of its layer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.attention.attend import Request, all_that_restricts, attend
from keras_headmask.layers.multi_head import PerHeadMaskedMultiHeadAttention, dropout_of
from keras_headmask.retrofit import frames, head_cache
from keras_headmask.retrofit.compiled import check_not_in_own_function
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.rules import evaluation
from keras_headmask.rules.positions import Window

HOOK = _keras.COMPUTE_ATTENTION  # the method whose place the hook of a rule takes on a layer


def attention_arguments(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> dict[str, Any]:
    """The arguments of a call of `_compute_attention`, by name."""
    given = dict(locals())
    if not use_causal_mask:
        del given["use_causal_mask"]  # subclasses written for an older Keras lack it
    return given


def hook(layer: keras.Layer, rules: Callable[[], tuple[LayerRule, ...]]) -> Callable:
    """What stands on an attention layer for `_compute_attention`.

    On the object, not in its class: there Keras would give up its shortcut for causal masks.
    """

    def obey(*args: Any, **kwargs: Any) -> Any:
        arguments = attention_arguments(*args, **kwargs)
        frames.current().used.add(id(layer))
        compute = getattr(type(layer), HOOK).__get__(looking.as_seen(layer))
        if not _keras.in_symbolic_scope():  # which asks for shapes alone
            for rule in rules():
                compute = functools.partial(_under, layer, rule, compute)
            if (run := head_cache.run.get()) is not None:
                held = () if looking.are_rules_off() else rules()
                return run.attend(layer, [x for x in held if x.restricts], compute, **arguments)
        return compute(**arguments)

    @looking.asks
    @functools.wraps(attention_arguments, assigned=())  # whose signature it has
    def compute_attention(*args: Any, **kwargs: Any) -> Any:
        return looking.run(layer, HOOK, obey, *args, **kwargs)

    return compute_attention


def _under(layer: Any, rule: LayerRule, compute: Callable, **arguments: Any) -> Any:
    """Context and probabilities under `rule`; `compute` is what the layer does without it."""
    if not rule.restricts or looking.are_rules_off():
        return compute(**arguments)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if len(query.shape) != 4:
        raise ValueError(
            f"The attention layer '{layer.name}' attends over several axes: a mask spec speaks of "
            "one axis of queries and one of keys. Leave it out by `layers=`."
        )
    frame, lengths = frames.current(), _lengths(layer, query, key)
    sizes = ops.shape(query)[1], ops.shape(key)[1]
    offset = 0 if frame.offset is None else frame.offset
    bound = _bound(layer, rule, frame, lengths, sizes, offset)
    attention_mask = _checked_mask(layer, arguments["attention_mask"], lengths)
    causal = Window(after=0) if arguments.get("use_causal_mask") else None
    if causal is not None and not (isinstance(offset, int) and offset == 0):
        # Keras counts both from 0, wherever the rule sees the queries.
        attention_mask = masks.and_masks(attention_mask, evaluation.make_mask(causal, *sizes))
        causal = None

    def make_mask() -> Any:
        made = None if causal is None else evaluation.make_mask(causal, *sizes)
        of_rule = evaluation.mask_of_all_heads(rule.spec, bound, rule.num_heads)
        return masks.and_masks(of_rule, attention_mask, made)

    wanted = bool(arguments["return_attention_scores"])
    if _is_left_to(layer, compute):
        mask = make_mask()
        merged = {k: v for k, v in arguments.items() if k != "use_causal_mask"}
        context, probabilities = compute(**merged | {"attention_mask": mask})
        return masks.zero_dead_rows(context, mask), probabilities
    outside, inputs = all_that_restricts(
        None, None, **_as_argument(attention_mask, lengths), window=causal
    )
    whole = bound
    if outside is not None and inputs:
        whole = evaluation.bind(outside, inputs, *sizes, offset, bound)
    return attend(
        Request(
            query,
            key,
            value,
            rule.spec if outside is None else rule.spec & outside,
            whole,
            scale=_keras.scale(layer),
            query_offset=offset,
            wants_probabilities=wanted,
            tiled=None if wanted else getattr(layer, "_tiled", None),
            make_mask=make_mask,
            **dropout_of(layer, arguments["training"]),
        )
    )


def _lengths(layer: Any, query: Any, key: Any) -> evaluation.Lengths:
    return evaluation.Lengths(query.shape[0], layer.num_heads, query.shape[1], key.shape[1])


def _bound(
    layer: Any,
    rule: LayerRule,
    frame: frames.Frame,
    lengths: evaluation.Lengths,
    sizes: tuple[Any, Any],
    offset: Any,
) -> Any:
    tensors: Mapping[str, Any] = {}
    if rule.reads:
        found = frames.inputs_of(rule)
        if found is None:
            raise ValueError(missing(layer.name, rule))
        check_not_in_own_function(layer.name, frame.graph)
        tensors = found
    given = rule.given(tensors)
    try:
        evaluation.check_inputs(rule.spec, given, lengths, offset)
    except (TypeError, ValueError) as error:
        raise type(error)(f"In the attention layer '{layer.name}': {error}") from error
    return evaluation.bind(rule.spec, given, *sizes, offset, prepared=rule.prepared(tensors))


def missing(name: str, rule: LayerRule) -> str:
    example = ", ".join(f"{name!r}: ..." for name in rule.reads)
    return (
        f"The attention layer '{name}' obeys a rule that reads {rule.reads}, and was called "
        "without them. Build on tensors of the masked model, which hand them on: "
        "`keras.Model(masked.input, layer(masked.output))`; or call the layer with "
        f"`head_mask_inputs={{{example}}}`. (KerasHub's cache passes the newest token alone. "
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
    """The merged mask by what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": attention_mask[:, 0]}  # padding alone: whole ranges can be skipped
    return {"attention_mask": attention_mask}


def _is_left_to(layer: Any, compute: Callable) -> bool:
    """Whether a class, or a rule beneath, computes attention with code of its own."""
    classes = keras.layers.MultiHeadAttention, PerHeadMaskedMultiHeadAttention
    known = [getattr(cls, HOOK) for cls in classes]
    return bool(
        looking.uses_flash(layer)
        or getattr(compute, "__func__", None) not in known
        or _keras.has_own_softmax(layer)
    )
