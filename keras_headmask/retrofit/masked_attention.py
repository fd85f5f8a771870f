"""Layers of a masked model: attention that computes under rules, and the layers around it.

Each is an object of a class made for its own, a `Part` beside its stock class. It keeps its name,
its weights and its arguments. It gives its config to the masked model alone: elsewhere, in a file
or a clone, the rule would be lost.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import scopes
from keras_headmask.attention.kernels import attend
from keras_headmask.attention.request import (
    Request,
    all_that_restricts,
    bound_to,
    dropout_of,
)
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.retrofit.adapters import Attention, adapted, errors_naming, offset_of_call
from keras_headmask.retrofit.frame import (
    ALONE,
    STATE,
    LayerRule,
    current_frame,
    in_frame,
    is_filing,
    is_masked,
    moved,
    rules_of,
    tensors_for,
    tensors_of,
)
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec, restricts

if TYPE_CHECKING:
    from keras.layers import Layer as _Layer
else:
    _Layer = object


class Remats(_Layer):
    """Lets what a RematScope runs again, for a gradient, find the frame of the first run."""

    _stock_class: type  # of which this class was made

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()

        @functools.wraps(layer_call)
        def call_again(*args: Any, **kwargs: Any) -> Any:
            with in_frame(frame):
                return layer_call(*args, **kwargs)

        return super().rematerialized_call(call_again, *args, **kwargs)

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`hm.unmasked(model)` as a preset and apply the rule again after `from_preset`."
        )


class Part(Remats):
    """A layer of a masked model that is attention under a rule, or holds it."""

    _default_save_signature: Any = None  # (TensorFlow would trace a model inside by itself)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with moved(offset_of_call(self, args, kwargs, current_frame().offset)):
            return super().__call__(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        state = vars(self)[STATE]
        owners = [state.owner, *(rule.owner for rule in rules_of(self))]
        if lost := [owner for owner in owners if not is_filing(owner)]:
            what = f"The config of the layer '{self.name}' was asked for outside"
            raise ValueError(ALONE.format(what=what, model=lost[0].name))
        return super().get_config()


class PartState:
    """What a part knows beside its stock class; Keras does not track it."""

    def __init__(self, owner: keras.Model):
        self.owner = owner  # the model that masked it
        self.rules: tuple[LayerRule, ...] = ()  # of attention alone


_made: dict[tuple[type, type], type] = {}


def become(layer: Any, kind: Any, filed_as: str | None = None) -> None:
    """Make `layer` also a `kind`; its class keeps its name, under which files have its weights."""
    stock: Any = type(layer)
    if (stock, kind) not in _made:
        # Where the package is missing, Keras must not find a stock class for a masked model.
        module = stock.__module__ if filed_as is None else "keras_headmask"
        body = {"__module__": module, "__qualname__": stock.__qualname__, "_stock_class": stock}
        _made[stock, kind] = made = type(stock)(stock.__name__, (kind, stock), body)
        # (Not registered: KerasHub would take a class among the custom objects for one of its own.)
        if filed_as is None:
            _keras.file_as(made, stock)
        else:
            _keras.file_under(made, filed_as)
    object.__setattr__(layer, "__class__", _made[stock, kind])


def become_part(layer: Any, owner: keras.Model, kind: type = Part) -> None:
    """Make `layer` a part of the masked model `owner`, unless it is part of a model inside."""
    if not is_masked(layer):
        vars(layer)[STATE] = PartState(owner)
        become(layer, kind)


def become_stock(layer: Any) -> None:
    """Give `layer` its stock class again, without its rules."""
    if not is_masked(layer):
        return
    object.__setattr__(layer, "__class__", layer._stock_class)
    if getattr(vars(layer).pop(STATE), "rules", ()):
        del vars(layer)[adapted(layer).hook]
        if isinstance(layer, MaskedAttention):
            own = layer.mask_spec
            layer.__dict__["_restricts"] = own is not None and restricts(own, layer.num_heads)


def obey(layer: Any, rule: LayerRule) -> None:
    """Let attention `layer`, a part, obey `rule`; an earlier rule of the same model goes."""
    # On the object: if the class had it, Keras would give up its shortcut for causal masks.
    vars(layer)[adapted(layer).hook] = hook(layer)
    state = vars(layer)[STATE]
    state.rules = (*(x for x in state.rules if x.owner is not rule.owner), rule)
    if rule.replaces:
        layer.__dict__["_restricts"] = False  # of a layer of ours


# --- A call ---------------------------------------------------------------------------------------

Arguments = dict[str, Any]  # of a call of the hook, by the names of Keras' own class


def hook(layer: Any) -> Callable:
    """A function that replaces `_compute_attention` of `layer`, and applies its rules."""
    name = adapted(layer).hook

    def compute(*args: Any, **kwargs: Any) -> Any:
        adapter = adapted(layer)
        arguments = adapter.arguments(*args, **kwargs)
        current_frame().used.add(id(layer))
        given = () if scopes.are_rules_off() else rules_of(layer)
        rules = [x for x in given if x.restricts and tensors_for(x, layer) is not None]
        if rules:
            attended = _under if adapter.softmax is None else _by_softmax
            context, probabilities = attended(adapter, rules, arguments)
        else:
            context, probabilities = without_rules(adapter, arguments)
        return (context, probabilities) if adapter.gives_pair(arguments) else context

    @scopes.asks
    def compute_attention(*args: Any, **kwargs: Any) -> Any:
        return scopes.run(layer, name, compute, *args, **kwargs)

    return compute_attention


def without_rules(adapter: Attention, arguments: Arguments) -> tuple[Any, Any]:
    """Context and probabilities as the class itself computes them."""
    brings_both = adapter.returns_pair or adapter.has_own_code
    if arguments["return_attention_scores"] and not brings_both:
        attended = _under if adapter.softmax is None else _by_softmax
        return attended(adapter, [], arguments)
    seen = scopes.as_seen(adapter.layer)
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
            evaluation.checked_or_default_offset(None, rule.spec, lengths.queries, lengths.keys)
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
            **dropout_of(adapter.dropout_layer, arguments["training"]),
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

    seen = scopes.standing_in(adapter.layer, {adapter.softmax: softmax})
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
    if arguments.get("use_causal_mask") and evaluation.as_int(offset) != 0:
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
    tensors = tensors_of(rule) or {}
    inputs = rule.inputs_from(tensors)
    with errors_naming(layer):
        evaluation.check_inputs(rule.spec, inputs, lengths, offset)
    return inputs, rule.prepared(tensors)


def _as_argument(attention_mask: Any, lengths: evaluation.Lengths) -> dict[str, Any]:
    """The merged mask under the name of the argument that says what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": ops.squeeze(attention_mask, 1)}  # padding: whole ranges can be skipped
    return {"attention_mask": attention_mask}
