"""A rule bound for one forward of a model.

The model's `call` prepares what the rules read and binds it; inside, each attention layer finds the
binding when it computes. No binding, no attention: a layer that runs outside its model is an error,
and so is a rule that no layer used.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import looking
from keras_headmask.attention.attend import Request, all_that_restricts, attend
from keras_headmask.layer import PerHeadMaskedMultiHeadAttention, dropout_of
from keras_headmask.retrofit.compiled import check_not_in_own_function, graph_being_built
from keras_headmask.retrofit.layer_rules import HOOK, LayerRule, attention_arguments
from keras_headmask.rules import evaluation
from keras_headmask.rules.positions import Window


class Plan:
    """The rules of one model. Holds what is bound while the model runs, for each thread."""

    def __init__(self, model_name: str, rules: list[LayerRule]):
        self.model_name = model_name
        self.rules = {id(rule.layer): rule for rule in rules}
        self.replaced: set[int] = set()  # layers that an outer model's rule took over
        self.running = _Running()

    @property
    def reads_inputs(self) -> list[str]:
        return sorted({name for rule in self.rules.values() for name in rule.spec.inputs})

    @contextlib.contextmanager
    def bound(
        self, tensors: Mapping[str, Any], query_offset: Any = 0, whole: bool = True
    ) -> Iterator[None]:
        """Evaluate what the rules read and keep it for the layers; then see that they used it.

        With `whole=False` it is a part of a forward, in which not all layers run: see `in_parts`.
        """
        binding = Binding(self, tensors, query_offset)
        with self.running.having(binding=binding):
            yield
        if whole:
            self._check_used(binding.used)
        else:
            self.running.used_in_parts |= binding.used

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """A forward of several `bound`, at whose end all rules must have been used."""
        with self.running.having(used_in_parts=set()):
            yield
            self._check_used(self.running.used_in_parts)

    def _check_used(self, used: Set[int]) -> None:
        unused = [r for i, r in self.rules.items() if i not in used | self.replaced]
        if unused and not _keras.in_symbolic_scope():
            raise RuntimeError(
                f"The rule of the attention layer {unused[0].entry} was not used in this forward "
                f"of the model '{self.model_name}': either the layer did not run, or its class "
                "computes attention without `_compute_attention`. Leave it out by `layers=`."
            )


class _Running(threading.local):
    """What a model is doing, in each thread: one may save it while others call it."""

    binding: "Binding | None" = None  # None outside the model
    used_in_parts: Set[int] = frozenset()  # the layers that parts of a forward ran so far
    only_shapes = False  # whether it runs for the shapes of its outputs alone, without a rule
    wide_ids: dict[str, Any] | None = None  # inputs of 64 bits, by name, which the model casts
    in_config = False  # whether its own config is made, which holds the rules beside its layers

    @contextlib.contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Set these in this thread for a while."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class Binding:
    """The rules of a plan for one forward: the mask inputs, and what was made of them so far."""

    def __init__(self, plan: Plan, tensors: Mapping[str, Any], query_offset: Any):
        self.plan, self.tensors, self.query_offset = plan, tensors, query_offset
        self.used: set[int] = set()
        self._graph = graph_being_built()
        self._bounds: dict[Any, evaluation.Bound] = {}
        self._masks: dict[Any, Any] = {}
        for rule in plan.rules.values():
            self._prepare(rule)

    def _prepare(self, rule: LayerRule) -> None:
        """Bind a rule that reads ids before any layer runs: so all share it, in any scope.

        (A tensor made inside a rematerialised layer may not leave it.)
        """
        key = _key(rule)
        kinds = rule.spec.inputs
        names = [name for name in kinds if kinds[name].rank is not None]
        if not _is_obeyed(rule) or not names or key in self._bounds:
            return
        given = rule.given(self.tensors)
        lengths = dict.fromkeys(("query", "key"))
        for name in names:
            pair = evaluation.as_pair(given[name]) or (given[name], given[name])
            for side, tensor in zip(lengths, pair, strict=True):
                if tensor is not None and lengths[side] is None:
                    lengths[side] = ops.shape(tensor)[1]
        if None in lengths.values():
            return  # of a cross-attention that reads one side: known when the layer runs
        self._bounds[key] = evaluation.bind(rule.spec, given, *lengths.values())

    def attend(self, rule: LayerRule, compute: Callable, arguments: Mapping[str, Any]) -> Any:
        """Context and scores of one layer under its rule; `compute` is what it would do without."""
        check_not_in_own_function(rule.entry, self._graph)
        self.used.add(id(rule.layer))
        if not _is_obeyed(rule):
            return compute(**arguments)
        query, key, value = (arguments[name] for name in ("query", "key", "value"))
        if len(query.shape) != 4:
            raise ValueError(
                f"The attention layer {rule.entry} attends over several axes: a mask spec speaks "
                "of one axis of queries and one of keys. Leave it out by `layers=`."
            )
        lengths = evaluation.Lengths(query.shape[0], rule.heads, query.shape[1], key.shape[1])
        bound = self._bound(rule, query, key, lengths)
        attention_mask = _checked_mask(rule, arguments["attention_mask"], lengths)
        causal = Window(after=0) if arguments.get("use_causal_mask") else None
        sizes = ops.shape(query)[1], ops.shape(key)[1]
        offset = self.query_offset
        if causal is not None and not (isinstance(offset, int) and offset == 0):
            # Keras counts both from 0, wherever the rule sees the queries.
            attention_mask = masks.and_masks(attention_mask, evaluation.make_mask(causal, *sizes))
            causal = None

        def make_mask() -> Any:
            made = None if causal is None else evaluation.make_mask(causal, *sizes)
            return masks.and_masks(self._mask(rule, bound, lengths, query), attention_mask, made)

        wanted = bool(arguments["return_attention_scores"])
        if _is_left_to(rule, compute):
            mask = make_mask()
            merged = {k: v for k, v in arguments.items() if k != "use_causal_mask"}
            context, scores = compute(**merged | {"attention_mask": mask})
            return masks.zero_dead_rows(context, mask), scores
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
                scale=_keras.scale(rule.layer),
                query_offset=offset,
                wants_probabilities=wanted,
                tiled=None if wanted else getattr(rule.layer, "_tiled", None),
                make_mask=make_mask,
                **dropout_of(rule.layer, arguments["training"]),
            )
        )

    def _bound(self, rule: LayerRule, query: Any, key: Any, lengths: evaluation.Lengths) -> Any:
        given = rule.given(self.tensors)
        try:
            evaluation.check_inputs(rule.spec, given, lengths, self.query_offset)
        except (TypeError, ValueError) as error:
            raise type(error)(f"In the attention layer {rule.entry}: {error}") from error
        bound = self._bounds.get(_key(rule))
        if bound is None:
            sizes = ops.shape(query)[1], ops.shape(key)[1]
            bound = evaluation.bind(rule.spec, given, *sizes, self.query_offset)
        return bound

    def _mask(
        self, rule: LayerRule, bound: evaluation.Bound, lengths: evaluation.Lengths, query: Any
    ) -> Any:
        """The mask of the rule, made once for all layers that share it where that can be."""
        scope = _scope(query)
        sizes = None if _key(rule) in self._bounds else (lengths.queries, lengths.keys)
        key = (_key(rule), rule.heads, sizes, scope)
        if scope is None or (sizes is not None and None in sizes):
            return evaluation.mask_of_all_heads(rule.spec, bound, rule.heads)
        if key not in self._masks:
            self._masks[key] = evaluation.mask_of_all_heads(rule.spec, bound, rule.heads)
        return self._masks[key]


def _is_obeyed(rule: LayerRule) -> bool:
    return rule.restricts and not looking.are_rules_off()


def _key(rule: LayerRule) -> Any:
    """Equal for layers that can share what is made of a rule."""
    return rule.spec, tuple(sorted(rule.sources.items(), key=lambda item: item[0]))


def _scope(tensor: Any) -> Any:
    """Where a tensor made now may be used again: a graph of TensorFlow's, or anywhere.

    `None` inside a trace of JAX's, which has no name for it; XLA merges equal masks there.
    """
    if keras.backend.backend() == "jax":
        import jax

        return None if isinstance(tensor, jax.core.Tracer) else "eager"
    return graph_being_built() or "eager"


def _checked_mask(rule: LayerRule, mask: Any, lengths: evaluation.Lengths) -> Any:
    """The merged mask that a layer hands to `_compute_attention`, as booleans."""
    if mask is None:
        return None
    try:
        mask = masks.as_bool(mask, "attention_mask")
        masks.check_shape(mask, "attention_mask", *lengths)
    except (TypeError, ValueError) as error:
        raise type(error)(f"In the attention layer {rule.entry}: {error}") from error
    return mask


def _as_argument(attention_mask: Any, lengths: evaluation.Lengths) -> dict[str, Any]:
    """The merged mask by what it restricts."""
    if attention_mask is None:
        return {}
    shape = tuple(attention_mask.shape)
    if len(shape) == 3 and shape[1] == 1 and lengths.queries != 1:
        return {"key_mask": attention_mask[:, 0]}  # padding alone: whole ranges can be skipped
    return {"attention_mask": attention_mask}


def _is_left_to(rule: LayerRule, compute: Callable) -> bool:
    """Whether a class, or a rule bound before, computes attention with code of its own."""
    classes = keras.layers.MultiHeadAttention, PerHeadMaskedMultiHeadAttention
    known = [getattr(cls, _keras.COMPUTE_ATTENTION) for cls in classes]
    return bool(
        looking.uses_flash(rule.layer)
        or getattr(compute, "__func__", None) not in known
        or _keras.has_own_softmax(rule.layer)
    )


# --- The hooks ------------------------------------------------------------------------------------

_CONFIG = "get_config"
_REMAT = "rematerialized_call"


def install(plan: Plan, model: Any) -> None:
    """Hook the attention layers of `plan`, and rebind where code may run again for a gradient.

    The hooks are attributes of the layer objects: classes, weights and configs stay Keras' own.
    """
    for layer in _keras.layers_inside(model):
        if _keras.remat_mode(layer) is not None:
            layer.__dict__[_REMAT] = _rebinding(plan, layer)
    for layer in _around(plan, model):
        layer.__dict__[_CONFIG] = _guarded_config(plan, layer)
    for rule in plan.rules.values():
        inner = looking.held(rule.layer, HOOK)
        if rule.replaces:
            if inner is not None:
                inner.plan.replaced.add(id(rule.layer))
                inner = None
            if isinstance(rule.layer, PerHeadMaskedMultiHeadAttention):
                rule.layer.__dict__["_restricts"] = False
        rule.layer.__dict__[HOOK] = _hook(plan, rule, inner)


def uninstall(plan: Plan, model: keras.Model) -> None:
    """Take the hooks of `plan` off again."""
    for layer in _keras.layers_inside(model):
        vars(layer).pop(_REMAT, None)
    for layer in _around(plan, model):
        guard = vars(layer).pop(_CONFIG)
        if guard.inner is not None:
            layer.__dict__[_CONFIG] = guard.inner
    for rule in plan.rules.values():
        hook = vars(rule.layer).pop(HOOK)
        if hook.inner is not None:
            rule.layer.__dict__[HOOK] = hook.inner
        if rule.replaces and isinstance(rule.layer, PerHeadMaskedMultiHeadAttention):
            rule.layer.__dict__["_restricts"] = True


def _around(plan: Plan, model: keras.Model) -> list[keras.Layer]:
    """The masked attention layers and every layer inside `model` that holds one."""
    return [
        layer
        for layer in _keras.layers_inside(model)
        if any(id(inner) in plan.rules for inner in _keras.layers_of(layer))
    ]


def _guarded_config(plan: Plan, layer: keras.Layer) -> Any:
    """A `get_config` that lets no file, clone or copy of a masked layer drop its rule."""
    inner = vars(layer).get(_CONFIG)

    def guarded() -> dict[str, Any]:
        if not plan.running.in_config:
            raise RuntimeError(
                f"The layer '{layer.name}' obeys a rule of the model '{plan.model_name}', which it "
                "would lose if it was saved, cloned or copied alone. To build on the model, call "
                "it: `outputs = masked_model(inputs)`. For layers without the rule use those of "
                "`model.unmasked()`."
            )
        return getattr(type(layer), _CONFIG)(layer) if inner is None else inner()

    get_config: Any = guarded
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


def _hook(plan: Plan, rule: LayerRule, inner: Callable | None) -> Any:
    layer = rule.layer

    def obey(*args: Any, **kwargs: Any) -> Any:
        compute: Any = inner
        if inner is None:
            compute = getattr(type(layer), HOOK).__get__(looking.as_seen(layer))
        arguments = attention_arguments(*args, **kwargs)
        if plan.running.binding is not None:
            return plan.running.binding.attend(rule, compute, arguments)
        if plan.running.only_shapes or _keras.in_symbolic_scope():
            check_not_in_own_function(rule.entry, None)
            return compute(**arguments)
        raise RuntimeError(
            f"The attention layer {rule.entry} obeys a rule of the model '{plan.model_name}' and "
            "ran outside it. Call that model, and build on its outputs: `outputs = "
            "masked_model(inputs)`. For layers without the rule use those of `model.unmasked()`. "
            "For `generate()`, give the rule to the task, not to its backbone."
        )

    @looking.asks
    @functools.wraps(attention_arguments, assigned=())  # whose signature it has
    def attention(*args: Any, **kwargs: Any) -> Any:
        return looking.run(layer, HOOK, obey, *args, **kwargs)

    compute_attention: Any = attention
    compute_attention.plan, compute_attention.rule = plan, rule
    compute_attention.inner = inner
    return compute_attention
