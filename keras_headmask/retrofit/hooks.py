"""The hooks by which the layers of a model obey its plan, or refuse to work without it.

They are attributes of the layer objects: classes, weights and configs stay stock's.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import looking
from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
from keras_headmask.retrofit.binding import Binding, Plan, check_not_in_own_function
from keras_headmask.retrofit.layer_rules import LayerRule
from keras_headmask.rules.base import MaskSpec

_HOOK = _keras.COMPUTE_ATTENTION
_CONFIG = "get_config"
_REMAT = _keras.REMATERIALIZED_CALL


def install(plan: Plan, model: keras.Model) -> None:
    """Hook the attention layers of `plan`, and rebind where code may run again for a gradient.

    The hooks are attributes of the layer objects: classes, weights and configs stay stock's.
    """
    for layer in _keras.layers_inside(model):
        if _keras.remat_mode(layer) is not None:
            vars(layer)[_REMAT] = _rebinding(plan, layer)
    for layer in _around(plan, model):
        vars(layer)[_CONFIG] = _guarded_config(plan, layer)
    for rule in plan.rules.values():
        inner = looking.held(rule.layer, _HOOK)
        if rule.replaces:
            if inner is not None:
                inner.plan.replaced.add(id(rule.layer))
                inner = None
            if isinstance(rule.layer, PerHeadMaskedMultiHeadAttention):
                vars(rule.layer)["_restricts"] = False
        vars(rule.layer)[_HOOK] = _hook(plan, rule, inner)


def uninstall(plan: Plan, model: keras.Model) -> None:
    """Take the hooks of `plan` off again."""
    for layer in _keras.layers_inside(model):
        vars(layer).pop(_REMAT, None)
    for layer in _around(plan, model):
        guard = vars(layer).pop(_CONFIG)
        if guard.inner is not None:
            vars(layer)[_CONFIG] = guard.inner
    for rule in plan.rules.values():
        hook = vars(rule.layer).pop(_HOOK)
        if hook.inner is not None:
            vars(rule.layer)[_HOOK] = hook.inner
        if rule.replaces and isinstance(rule.layer, PerHeadMaskedMultiHeadAttention):
            vars(rule.layer)["_restricts"] = True


def _around(plan: Plan, model: keras.Model) -> list[keras.Layer]:
    """The masked attention layers and every layer inside `model` that holds one."""
    return [
        layer
        for layer in _keras.layers_inside(model)
        if any(id(inner) in plan.rules for inner in _keras.layers_of(layer))
    ]


def _guarded_config(plan: Plan, layer: keras.Layer) -> Callable:
    """A `get_config` that lets no file, clone or copy of a masked layer drop its rule."""
    inner = vars(layer).get(_CONFIG)

    def get_config() -> dict[str, Any]:
        if not plan.running.in_config:
            raise RuntimeError(
                f"The layer '{layer.name}' obeys a rule of the model '{plan.model_name}'; saved, "
                "cloned or copied without that model it would lose the rule. To build on the "
                "model, call it: `outputs = masked_model(inputs)`. For layers without the rule use "
                "those of `model.unmasked()`."
            )
        return getattr(type(layer), _CONFIG)(layer) if inner is None else inner()

    get_config.inner = inner
    return get_config


def _rebinding(plan: Plan, layer: keras.Layer) -> Callable:
    """The `rematerialized_call` of a layer whose second run finds what the first one had bound."""
    inner = looking.held(layer, _REMAT) or getattr(type(layer), _REMAT).__get__(layer)

    def rematerialized_call(layer_call: Callable, *args: Any, **kwargs: Any) -> Callable:
        binding = plan.running.binding

        @functools.wraps(layer_call)
        def call_again(*args: Any, **kwargs: Any) -> Any:
            with plan.running.having(binding=binding):
                return layer_call(*args, **kwargs)

        return inner(call_again, *args, **kwargs)

    return rematerialized_call


def spec_beneath(layer: keras.Layer, plan: Plan | None = None) -> MaskSpec | None:
    """The rule that `layer` obeys beside that of `plan`: its own, or of a masked model inside."""
    hook = looking.held(layer, _HOOK)
    if hook is not None and hook.plan is plan:
        hook = hook.inner
    specs = []
    while hook is not None:
        specs.insert(0, hook.rule.spec)
        if hook.rule.replaces:
            break
        hook = hook.inner
    else:
        own = getattr(layer, "mask_spec", None)
        specs[:0] = [] if own is None else [own]
    return functools.reduce(operator.and_, specs) if specs else None


def rules_at_work(layer: keras.Layer) -> Iterator[tuple[LayerRule, Binding]]:
    """The rules of masked models that `layer` obeys in the forward now running in this thread."""
    hook = looking.held(layer, _HOOK)
    while getattr(hook, "rule", None) is not None:
        if hook.plan.running.binding is not None:
            yield hook.rule, hook.plan.running.binding
        hook = hook.inner  # `None` where the rule replaces what was there


def _hook(plan: Plan, rule: LayerRule, inner: Callable | None) -> Callable:
    layer = rule.layer

    def obey(
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        compute = inner
        if inner is None:
            compute = getattr(type(layer), _HOOK).__get__(looking.as_seen(layer))
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "attention_mask": attention_mask,
            "training": training,
            "return_attention_scores": return_attention_scores,
        }
        if use_causal_mask:  # else left out: subclasses of old do not know it
            arguments["use_causal_mask"] = True
        if plan.running.binding is not None:
            return plan.running.binding.attend(rule, compute, arguments)
        if plan.running.only_shapes or _keras.in_symbolic_scope():
            check_not_in_own_function(rule, None)
            return compute(**arguments)
        raise RuntimeError(
            f"The attention layer {rule.entry} obeys a rule of the model '{plan.model_name}' and "
            "ran outside it, where the rule is not known. Call that model, and build on what it "
            "gives: `outputs = masked_model(inputs)`. For its layers without the rule, or parts of "
            "its graph, use those of `model.unmasked()`. For `generate()`, give the rule to the "
            "task, not to its backbone."
        )

    @looking.asks
    @functools.wraps(obey)
    def compute_attention(*args: Any, **kwargs: Any) -> Any:
        return looking.run(layer, _HOOK, obey, *args, **kwargs)

    compute_attention.plan, compute_attention.rule = plan, rule
    compute_attention.inner = inner
    return compute_attention
