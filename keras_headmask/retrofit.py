"""A mask for every head of a model people already have."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.models.functional import Functional  # Keras publishes no name for it

from keras_headmask import binding
from keras_headmask.binding import LayerRule, Plan
from keras_headmask.per_head import check_heads
from keras_headmask.selectors import AttentionLayer, Found, find_attention, specs_by_layer
from keras_headmask.specs import InputType, MaskSpec, merged_inputs

# What a functional graph is made of; swapped as one when an input is added.
_GRAPH = (
    "_inputs_struct",
    "_inputs",
    "_outputs_struct",
    "_outputs",
    "_nodes",
    "_nodes_by_depth",
    "_operations",
    "_operations_by_depth",
)
_WAYS = ("error", "and", "replace")


def apply_head_masks(
    model: keras.Model,
    mask_spec: MaskSpec | Mapping[Any, Any] | str,
    layers: Any = None,
    existing: str = "error",
    copy: bool = True,
) -> keras.Model:
    """`model` with a mask for every head of its attention layers; same weights, names and outputs.

    The rule is evaluated once per forward, for all layers, and ANDed with whatever masks the model
    has of its own. It is saved and loaded with the model (`import keras_headmask` before loading).
    The class stays the model's: a masked `GPT2CausalLM` is one, and generates under the rule.

    What the rule reads is taken from the model's inputs by name; a name that the model has not
    becomes a new `keras.Input`, integer or boolean `(batch, length)`, at the end of a list of
    inputs or under its name in a dict of them. (`MaskInput`: `(batch, heads, queries, keys)`.) In
    cross-attention, a rule that reads `x` on both sides takes the inputs `decoder_x` and
    `encoder_x` if the model has them, and else gets `query_x` and `key_x`.

    Args:
        model: A functional or Sequential model that holds `keras.layers.MultiHeadAttention`, a
            subclass that computes by `_compute_attention`, or `PerHeadMaskedMultiHeadAttention`, in
            nested layers and models too. A Sequential model comes back as a functional one.
        mask_spec: A `MaskSpec`, its config (a dict, or JSON text), or a mapping from selectors of
            layers to specs: `{"0-1": a, 2: b}`.
        layers: Which attention layers: `None` for all self-attention; a number, counted over
            self-attention in forward order; an inclusive range `"0-3"`; a regex on layer paths,
            such as `"decoder.*cross"`, the one way to name cross-attention; a tuple or list of
            those.
        existing: What to do where a layer has a rule already: `"error"`, `"and"` or `"replace"`.
        copy: Whether to leave `model` as it is and return a copy, not compiled. With `False` the
            weights stay in place and `model` is used up: what it was is now the result.

    Returns:
        A model with `mask_specs` (the spec of each masked layer, by path), `summary_masks()`, and
        `unmasked()`, which gives a stock model with the same weights.

    Raises:
        TypeError: for a model without a graph, or a spec or selector that is none.
        ValueError: for a selector that names no layer, an attention class whose masks cannot be
            reached, a layer with two rules, or a head that `mask_spec` names and a layer lacks.
        RuntimeError: from the result, when a masked layer runs outside it, or does not use its
            rule.

    >>> import numpy as np
    >>> from keras_headmask import PerHead, SameSentence
    >>> ids = keras.Input((None,), dtype="int32", name="token_ids")
    >>> x = keras.layers.Embedding(10, 8)(ids)
    >>> model = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, PerHead({0: SameSentence(9)}))
    >>> masked.summary_masks()
    0  attention  MultiHeadAttention  2 heads  self  PerHead({0: SameSentence((9,))})
    >>> masked(np.array([[5, 9, 6, 9]])).shape == (1, 4, 8)
    True
    """
    _check_model(model)
    if existing not in _WAYS:
        raise ValueError(f"`existing` must be one of {_WAYS}. Received: {existing!r}.")
    if isinstance(mask_spec, str):
        mask_spec = json.loads(mask_spec)
    found = find_attention(model)
    specs = specs_by_layer(mask_spec, layers, found)
    rules = _with_existing(_own_rules(model, found), specs, found, existing)
    _check_heads(rules, found)
    model = _stock_copy(model) if copy else _unhooked(_moved(model))
    if isinstance(model, keras.Sequential):
        model = keras.Model(model.inputs, model.outputs, name=model.name)
    return _masked(model, rules)


Rules = dict[int, tuple[MaskSpec, bool]]  # by layer: the spec, and whether the layer's own is off


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a functional or Sequential Keras model. Received: {model!r}. A layer "
            "takes a rule by `PerHeadMaskedMultiHeadAttention(..., mask_spec=...)`."
        )
    if isinstance(model, keras.Sequential):
        if not model.built or not model._functional:
            raise ValueError(
                f"The Sequential model '{model.name}' has no graph yet: start it with a "
                "keras.Input, or call its `build`, before it gets a rule."
            )
    elif not isinstance(model, Functional):
        raise TypeError(
            f"`{type(model).__name__}` is a subclassed model without a graph: a rule could not be "
            "saved with it. Use PerHeadMaskedMultiHeadAttention in its code, or apply the rule to "
            "a functional model inside it."
        )


def _own_rules(model: keras.Model, found: Found) -> Rules:
    """The rules that `model` has from an earlier `apply_head_masks`."""
    if not isinstance(model, _HeadMasked):
        return {}
    rules = model._head_masks.rules
    return {
        i: (rules[id(entry.layer)].spec, rules[id(entry.layer)].replaces)
        for i, entry in enumerate(found.known)
        if id(entry.layer) in rules
    }


def _with_existing(own: Rules, specs: Mapping[int, MaskSpec], found: Found, existing: str) -> Rules:
    rules = dict(own)
    for i, spec in specs.items():
        layer = found.known[i].layer
        earlier, was_replaced = own.get(i, (None, False))
        beneath = None  # a rule of the layer's own, or of a masked model inside this one
        if i not in own:
            beneath = binding.hooked_spec(layer)
            beneath = getattr(layer, "mask_spec", None) if beneath is None else beneath
        if existing == "error" and (earlier is not None or beneath is not None):
            raise ValueError(
                f"The attention layer {found.known[i]} has a rule already: "
                f"{beneath if earlier is None else earlier!r}. Pass existing='and' to keep both, "
                "or existing='replace'."
            )
        if existing == "and" and earlier is not None:
            spec = earlier & spec
        rules[i] = spec, was_replaced or (existing == "replace" and beneath is not None)
    return dict(sorted(rules.items()))


def _check_heads(rules: Rules, found: Found) -> None:
    for i, (spec, _) in rules.items():
        spec.get_config()  # a spec that could not be saved is told here
        try:
            check_heads(spec, found.known[i].layer._num_heads)
        except ValueError as error:
            raise ValueError(f"In the attention layer {found.known[i]}: {error}") from error


# --- Making the masked model ---------------------------------------------------------------------


def _masked(model: keras.Model, rules: Rules) -> keras.Model:
    """`model` itself, a stock one of ours alone, under `rules`."""
    found = find_attention(model)
    available = {tensor.name: tensor for tensor in model.inputs}
    chosen = [(found.known[i], spec, replaces) for i, (spec, replaces) in rules.items()]
    layer_rules = [
        LayerRule(entry, spec, _sources(entry, spec, available), replaces)
        for entry, spec, replaces in chosen
    ]
    stock_graph = {name: vars(model)[name] for name in _GRAPH}
    new = _new_inputs(layer_rules, available)
    if new:
        vars(model).update(_graph_with(model, new))
    plan = Plan(model.name, layer_rules)
    binding.install(plan, model)
    for name in ("train_function", "test_function", "predict_function", "generate_function"):
        if getattr(model, name, None) is not None:
            vars(model)[name] = None  # compiled without the rule
    vars(model).update(
        _head_masks=plan, _stock_graph=_Untracked(stock_graph), _mask_rules=_Untracked(rules)
    )
    if keras.backend.backend() == "tensorflow" and any(r.restricts for r in layer_rules):
        # XLA cannot slice by data: under `jit_compile="auto"` a graph is the faster way.
        vars(model)["supports_jit"] = False
    object.__setattr__(model, "__class__", _masked_class(type(model)))
    return model


class _Untracked:
    """Hides a value from Keras and TensorFlow, which would save what they find in attributes."""

    def __init__(self, value: Any):
        self.value = value


def _sources(
    entry: AttentionLayer, spec: MaskSpec, available: Mapping[str, Any]
) -> dict[str, str | tuple[str | None, str | None]]:
    """Which inputs of the model each name of `spec` is read from."""
    sources: dict[str, Any] = {}
    for name, kind in spec.inputs.items():
        if not entry.is_cross or kind.rank is None:
            sources[name] = name
        elif kind.sides == {"query"}:
            sources[name] = (name, None)
        elif kind.sides == {"key"}:
            sources[name] = (None, name)
        else:
            pairs = (f"decoder_{name}", f"encoder_{name}"), (f"query_{name}", f"key_{name}")
            sources[name] = pairs[0] if set(pairs[0]) <= set(available) else pairs[1]
    return sources


def _new_inputs(rules: list[LayerRule], available: Mapping[str, Any]) -> dict[str, Any]:
    """A `keras.Input` for each name that the model lacks; what it has is checked."""
    kinds: dict[str, InputType] = {}
    heads: dict[str, int] = {}
    merged_inputs(tuple(rule.spec for rule in rules))  # one name read in two ways is told here
    for rule in rules:
        for name, source in rule.sources.items():
            kind = rule.spec.inputs[name]
            for place in (source,) if isinstance(source, str) else source:
                if place is not None:
                    known = kinds.get(place, kind)
                    dtype = known.dtype if known.dtype == kind.dtype else "int32"
                    kinds[place] = kind._replace(dtype=dtype)
                    heads[place] = rule.heads
    new = {}
    for name, kind in sorted(kinds.items()):
        if name not in available:
            shape = (None,) if kind.rank is not None else (heads[name], None, None)
            new[name] = keras.Input(shape, dtype=kind.dtype, name=name)
            continue
        tensor = available[name]
        if kind.rank is not None and len(tensor.shape) != 2:
            raise ValueError(
                f"The mask spec reads {name!r} as one value per position, (batch, length), but the "
                f"model's input of that name has shape {tuple(tensor.shape)}. Give the mask input "
                "another name."
            )
        if "float" in tensor.dtype:
            raise TypeError(
                f"The mask spec reads the model's input {name!r}, which has dtype {tensor.dtype}: "
                "ids must be integers or booleans, since floats get rounded. Give the mask input "
                "another name."
            )
    return new


def _graph_with(model: keras.Model, new: Mapping[str, Any]) -> dict[str, Any]:
    """The graph of `model` with further inputs, which no layer reads."""
    inputs = model._inputs_struct
    if isinstance(inputs, dict):
        inputs = {**inputs, **new}
    else:
        first = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        inputs = type(first)([*first, *new.values()])
    graph = keras.Model(inputs, model._outputs_struct)
    return {name: vars(graph)[name] for name in _GRAPH}


# --- The masked model ----------------------------------------------------------------------------


class _HeadMasked:
    """What a masked model does beside its own class: see `apply_head_masks`."""

    _head_masks: Plan

    @property
    def mask_specs(self) -> dict[str, MaskSpec]:
        """The spec of each masked attention layer, by the path of the layer."""
        return {rule.entry.path: rule.spec for rule in self._head_masks.rules.values()}

    def summary_masks(self, print_fn: Callable[[str], Any] = print) -> None:
        """Print each attention layer: number, path, class, heads, self or cross, rule.

        The numbers are those by which `layers` names self-attention.
        """
        found = find_attention(self)
        number, rows = 0, []
        for entry in (*found.known, *found.unknown):
            rule = self._head_masks.rules.get(id(entry.layer))
            counted = not entry.is_cross and entry in found.known
            rows.append(
                (
                    str(number) if counted else "-",
                    entry.path,
                    type(entry.layer).__name__,
                    f"{getattr(entry.layer, '_num_heads', '?')} heads",
                    "cross" if entry.is_cross else "self",
                    repr(getattr(entry.layer, "mask_spec", None) if rule is None else rule.spec),
                )
            )
            number += counted
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_fn("  ".join(cells).rstrip())

    def unmasked(self) -> keras.Model:
        """A stock model with the same weights, which knows no rule. (This one stays masked.)"""
        return _stock_copy(self)

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        flat = self._standardize_inputs(inputs)
        named = {tensor.name: value for tensor, value in zip(self._inputs, flat, strict=True)}
        inputs = keras.tree.pack_sequence_as(self._inputs_struct, flat)
        with self._head_masks.bound(named):
            return super().call(inputs, *args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        with self._head_masks.shapes():
            return super().compute_output_spec(*args, **kwargs)

    def _run_through_graph(self, *args: Any, **kwargs: Any) -> Any:
        if self._head_masks.current is None and not self._head_masks.only_shapes:
            raise RuntimeError(
                f"`clone_model` would drop the rule of the model '{self.name}'. Clone it by "
                "`model.from_config(model.get_config())`, which has new weights and the rule, or "
                "clone `model.unmasked()`."
            )
        return super()._run_through_graph(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"model": _stock_config(self), "mask_specs": _rules_config(self._mask_rules.value)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Model:
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return _masked(model, _rules_from_config(config["mask_specs"], find_attention(model)))

    def __reduce__(self) -> Any:
        _, arguments = super().__reduce__()
        return Functional._unpickle_model, arguments  # a class that pickle finds by its name

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`model.unmasked()` as a preset and apply the rule again after `from_preset`."
        )


class _HeadMaskedGenerator(_HeadMasked):
    """A masked model that decodes token by token, with a cache of earlier keys and values."""

    def call_with_cache(
        self, token_ids: Any, cache: Any, cache_update_index: Any, *args: Any, **kwargs: Any
    ) -> Any:
        names = self._head_masks.reads_inputs
        if names:
            raise NotImplementedError(
                f"The rule of the model '{self.name}' reads {names}, and generation with a cache "
                "has the newest token alone, not the inputs of the earlier ones. Rules on "
                "positions (Window, Chunk, Keys, Queries, RandomBlocks) hold in generation; for "
                "this rule call the model on the whole sequence."
            )
        with self._head_masks.bound({}, cache_update_index):
            return super().call_with_cache(token_ids, cache, cache_update_index, *args, **kwargs)


class _HeadMaskedTranslator(_HeadMasked):
    """A masked model whose task runs encoder and decoder by hand to generate."""

    def generate_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"`{type(self).__name__}` generates by running its encoder and its decoder on their "
            "own, where the rule is not bound. Rules hold in its forward and in training, and in "
            "`generate()` of decoders alone, such as GPT2CausalLM."
        )


_classes: dict[type, type] = {}


def _masked_class(cls: type) -> type:
    """`cls` under a rule. One for each class; all are filed under one name and load alike."""
    if cls not in _classes:
        mixin = _HeadMasked
        if hasattr(cls, "call_with_cache"):
            mixin = _HeadMaskedGenerator
        elif hasattr(cls, "generate_step"):
            mixin = _HeadMaskedTranslator
        # The name stays stock's: Keras files weights under it.
        body = {"__module__": __name__, "__qualname__": f"HeadMasked[{cls.__name__}]"}
        _classes[cls] = type(cls)(cls.__name__, (mixin, cls), body)
        keras.saving.register_keras_serializable("keras_headmask", "HeadMaskedModel")(_classes[cls])
    return _classes[cls]


# --- Copies and configs --------------------------------------------------------------------------


@contextlib.contextmanager
def _as_stock(model: keras.Model) -> Iterator[None]:
    """Let `model` be of its stock class, with its stock graph, for a while."""
    cls = type(model)
    masked_graph = {name: vars(model)[name] for name in _GRAPH}
    vars(model).update(model._stock_graph.value)
    object.__setattr__(model, "__class__", cls.__bases__[1])
    try:
        yield
    finally:
        object.__setattr__(model, "__class__", cls)
        vars(model).update(masked_graph)


def _stock_config(model: keras.Model) -> dict[str, Any]:
    if isinstance(model, _HeadMasked):
        with _as_stock(model):
            return _stock_config(model)
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    return config


def _stock_copy(model: keras.Model) -> keras.Model:
    """A model of its own with the weights of `model` and without the rules of a masked one."""
    config = _stock_config(model)
    classes = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    unregistered = {
        name: cls
        for name, cls in classes.items()
        if keras.saving.get_registered_name(cls) == name
        and not cls.__module__.startswith(("keras.", "keras_hub."))
    }
    try:
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _copy_weights(model, twin)
    except Exception as error:  # whatever a layer's own config raises
        raise ValueError(
            f"The model '{model.name}' cannot be copied: {error} Make its layers serializable, or "
            "pass copy=False, which uses the model up."
        ) from error
    return twin


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    if [w.shape for w in target.weights] == [w.shape for w in source.weights]:
        for new, weight in zip(target.weights, source.weights, strict=True):
            new.assign(keras.ops.copy(weight.value))  # JAX and torch would share the memory
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)


def _moved(model: keras.Model) -> keras.Model:
    """The same model as another object; `model` keeps nothing but an error that says so."""
    cls = type(model)
    moved = cls.__new__(cls)
    wrappers = {name for name, value in vars(moved).items() if callable(value)}  # of the object
    vars(moved).update({k: v for k, v in vars(model).items() if k not in wrappers})
    vars(model).clear()
    object.__setattr__(model, "__class__", type(cls.__name__, (_UsedUp, cls), {}))
    return moved


class _UsedUp:
    """What is left of a model after `apply_head_masks(model, ..., copy=False)`."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(_USED_UP)

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError(_USED_UP)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_USED_UP)

    def __repr__(self) -> str:
        return "<a model that was used up by apply_head_masks(model, ..., copy=False)>"


_USED_UP = (
    "This model was used up by `apply_head_masks(model, ..., copy=False)`: its weights live on in "
    "the model that was returned. Use that one, or `unmasked()` of it; or mask a copy, by "
    "`copy=True`."
)


def _unhooked(model: keras.Model) -> keras.Model:
    """`model` itself, without the rules it may have."""
    if isinstance(model, _HeadMasked):
        binding.uninstall(model._head_masks, model)
        vars(model).update(model._stock_graph.value)
        vars(model).pop("supports_jit", None)
        object.__setattr__(model, "__class__", type(model).__bases__[1])
    return model


def _rules_config(rules: Rules) -> list[dict[str, Any]]:
    """JSON: each rule with the numbers of its layers, counted over all attention layers."""
    layers: dict[tuple[MaskSpec, bool], list[int]] = {}
    for i, rule in rules.items():
        layers.setdefault(rule, []).append(i)
    return [
        {"layers": numbers, "spec": spec.get_config()} | ({"replaces": True} if replaces else {})
        for (spec, replaces), numbers in layers.items()
    ]


def _rules_from_config(config: Any, found: Found) -> Rules:
    rules: Rules = {}
    for place in config:
        for i in place["layers"]:
            if i >= len(found.known):
                raise ValueError(
                    f"The saved rules name attention layer {i}, but the model has "
                    f"{len(found.known)}. Was it saved with another version of its code?"
                )
            rules[i] = MaskSpec.from_config(place["spec"]), place.get("replaces", False)
    return dict(sorted(rules.items()))


# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable("keras_headmask", "HeadMaskedModel")(_HeadMasked)
