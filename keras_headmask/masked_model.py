"""A functional model under a rule: its inputs, its class, its file.

The model keeps its class by a subclass made for it, and its graph; its config is that of the stock
model, and the rules, which are applied again when it is loaded.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.models.functional import Functional  # Keras publishes no name for it
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES  # nor for this

from keras_headmask import binding
from keras_headmask.binding import LayerRule, Plan
from keras_headmask.selectors import AttentionLayer, Found, find_attention
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
Rules = dict[int, tuple[MaskSpec, bool]]  # by layer: the spec, and whether the layer's own is off


def masked(model: keras.Model, rules: Rules) -> keras.Model:
    """`model` itself, a stock one of ours alone, under `rules`."""
    layer_rules, available = _layer_rules(model, rules, find_attention(model))
    stock_graph = {name: vars(model)[name] for name in _GRAPH}
    new = _new_inputs(layer_rules, available)
    if new:
        vars(model).update(_graph_with(model, new))
    plan = Plan(model.name, layer_rules)
    binding.install(plan, model)
    for name in ("train_function", "test_function", "predict_function", "generate_function"):
        if getattr(model, name, None) is not None:
            vars(model)[name] = None  # compiled without the rule
    vars(model).update(_head_masks=plan, _stock_graph=_Untracked(stock_graph))
    if keras.backend.backend() == "tensorflow" and any(r.restricts for r in layer_rules):
        # XLA cannot slice by data: under `jit_compile="auto"` a graph is the faster way.
        vars(model)["supports_jit"] = False
    object.__setattr__(model, "__class__", _masked_class(type(model)))
    return model


def _layer_rules(
    model: keras.Model, rules: Rules, found: Found
) -> tuple[list[LayerRule], dict[str, Any]]:
    """The rules with their layers and sources, and the inputs that the model has, by name."""
    available = {tensor.name: tensor for tensor in model.inputs}
    chosen = [(found.known[i], spec, replaces) for i, (spec, replaces) in rules.items()]
    layer_rules = [
        LayerRule(entry, spec, _sources(entry, spec, available), replaces)
        for entry, spec, replaces in chosen
    ]
    return layer_rules, available


def check_inputs(model: keras.Model, rules: Rules, found: Found) -> None:
    """Raise for what the inputs of `model` cannot give its rules."""
    layer_rules, available = _layer_rules(model, rules, found)
    inputs = model._inputs_struct if isinstance(model, Functional) else None
    if isinstance(inputs, dict):
        read = {name for rule in layer_rules for name in rule.spec.inputs}
        other = {key: t.name for key, t in inputs.items() if hasattr(t, "name") and t.name != key}
        if wrong := sorted(k for k, name in other.items() if k in read or name in read):
            raise ValueError(
                f"The model takes its input {wrong[0]!r} under that key, but the tensor is named "
                f"{other[wrong[0]]!r}: which of them the rule means cannot be told. Give "
                "keras.Input the name of its key."
            )
    new = _new_inputs(layer_rules, available)
    taken = {layer.name for layer in getattr(model, "layers", ())}
    if clash := sorted(taken & set(new)):
        raise ValueError(
            f"The rule reads {clash[0]!r}, which the model has no input of, and one cannot be "
            "added: a layer of the model has that name. Give the mask input another name."
        )


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
        if entry.kind == "self" or kind.rank is None:
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


class HeadMasked:
    """What a masked model does beside its own class: see `apply_head_masks`."""

    _head_masks: Plan

    @property
    def mask_specs(self) -> dict[str, MaskSpec]:
        """The spec of each masked attention layer, by the path of the layer."""
        return {rule.entry.path: _in_force(rule, self) for rule in self._head_masks.rules.values()}

    def summary_masks(self, print_fn: Callable[[str], Any] = print) -> None:
        """Print each attention layer: number, path, class, heads, self, cross or unclear, rule.

        The numbers are those by which `layers` names self-attention.
        """
        found = find_attention(self)
        number, rows = 0, []
        for entry in (*found.known, *found.unknown):
            rule = self._head_masks.rules.get(id(entry.layer))
            counted = entry.kind == "self" and entry in found.known
            rows.append(
                (
                    str(number) if counted else "-",
                    entry.path,
                    type(entry.layer).__name__,
                    f"{getattr(entry.layer, '_num_heads', '?')} heads",
                    entry.kind,
                    repr(
                        binding.spec_beneath(entry.layer) if rule is None else _in_force(rule, self)
                    ),
                )
            )
            number += counted
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_fn("  ".join(cells).rstrip())

    def unmasked(self) -> keras.Model:
        """A stock model with the same weights, without the rules of `apply_head_masks`.

        This one stays masked. A rule that a layer, or a masked model inside, has of its own stays.
        """
        return stock_copy(self)

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(keras.backend.is_keras_tensor, keras.tree.flatten(inputs))):  # see `tracing`
            with self._head_masks.shapes():
                return super().call(inputs, *args, **kwargs)
        _refuse_floats(inputs, self)
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
        rules = {rule.entry.place: rule for rule in self._head_masks.rules.values()}
        return {"model": _stock_config(self), "mask_specs": _rules_config(rules)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Model:
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return masked(model, _rules_from_config(config["mask_specs"], find_attention(model)))

    def __reduce__(self) -> Any:
        _, arguments = super().__reduce__()
        return Functional._unpickle_model, arguments  # a class that pickle finds by its name

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`model.unmasked()` as a preset and apply the rule again after `from_preset`."
        )


def _in_force(rule: LayerRule, model: HeadMasked) -> MaskSpec:
    """All that restricts a layer: the rule, and what it has of its own unless that is replaced."""
    beneath = None if rule.replaces else binding.spec_beneath(rule.layer, model._head_masks)
    return rule.spec if beneath is None else beneath & rule.spec


def _refuse_floats(inputs: Any, model: Any) -> None:
    """Keras would cast them: an additive mask would be inverted, and ids rounded."""
    if isinstance(inputs, Mapping):
        given = inputs
    elif isinstance(inputs, (list, tuple)):
        given = {t.name: x for t, x in zip(model._inputs, inputs, strict=False)}
    else:
        given = {model._inputs[0].name: inputs}
    for rule in model._head_masks.rules.values():
        for source in rule.sources.values():
            for place in (source,) if isinstance(source, str) else source:
                dtype = getattr(given.get(place), "dtype", None)
                if dtype is not None and "float" in keras.backend.standardize_dtype(dtype):
                    raise TypeError(
                        f"The input {place!r}, which the mask spec of '{rule.entry.path}' reads, "
                        "must be integer or boolean, since floats get rounded and an additive mask "
                        f"read as booleans is inverted. Received dtype {dtype}. An additive mask "
                        "becomes booleans by `from_additive`."
                    )


class _HeadMaskedGenerator(HeadMasked):
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


class _HeadMaskedTranslator(HeadMasked):
    """A masked model whose task runs encoder and decoder by hand to generate."""

    def generate_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"`{type(self).__name__}` generates by running its encoder and its decoder on their "
            "own, where the rule is not bound. Rules hold in its forward and in training, and in "
            "`generate()` of decoders alone, such as GPT2CausalLM."
        )


_FILED_AS = "keras_headmask>HeadMaskedModel"
_classes: dict[type, type] = {}


def _masked_class(cls: type) -> type:
    """`cls` under a rule. One for each class; all are filed under one name and load alike."""
    if cls not in _classes:
        mixin = HeadMasked
        if hasattr(cls, "call_with_cache"):
            mixin = _HeadMaskedGenerator
        elif hasattr(cls, "generate_step"):
            mixin = _HeadMaskedTranslator
        # The name stays stock's: Keras files weights under it.
        body = {"__module__": __name__, "__qualname__": f"HeadMasked[{cls.__name__}]"}
        _classes[cls] = type(cls)(cls.__name__, (mixin, cls), body)
        # By name alone: KerasHub would take a class among the custom objects for one of its own.
        GLOBAL_CUSTOM_NAMES[_classes[cls]] = _FILED_AS
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
    if isinstance(model, HeadMasked):
        with model._head_masks.config(), _as_stock(model):
            return _stock_config(model)
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    return config


def stock_copy(model: keras.Model) -> keras.Model:
    """A model of its own with the weights of `model` and without the rules of a masked one."""
    config = _stock_config(model)
    unregistered: dict[str, type] = {}
    for cls in map(type, model._flatten_layers()):
        name = cls.__name__
        is_known = keras.saving.get_registered_name(cls) != name or cls.__module__.startswith(
            ("keras.", "keras_hub.")
        )
        if not is_known and unregistered.setdefault(name, cls) is not cls:
            raise ValueError(
                f"The model '{model.name}' cannot be copied: it holds two classes named "
                f"'{name}', which its config does not tell apart. Register them by "
                "keras.saving.register_keras_serializable under two names, or pass copy=False, "
                "which uses the model up."
            )
    try:
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _copy_training_state(model, twin)
        _copy_weights(model, twin)
    except Exception as error:  # whatever a layer's own config raises
        raise ValueError(
            f"The model '{model.name}' cannot be copied: {error} Make its layers serializable, or "
            "pass copy=False, which uses the model up."
        ) from error
    return twin


def _copy_training_state(source: keras.Model, target: keras.Model) -> None:
    """Adapters, and which layers are frozen: configs hold neither."""
    layers, twins = (list(model._flatten_layers())[1:] for model in (source, target))
    if list(map(type, layers)) != list(map(type, twins)):
        return
    target.trainable = source.trainable
    pairs = list(zip(layers, twins, strict=True))
    for layer, twin in pairs:
        if getattr(layer, "lora_enabled", False) and not getattr(twin, "lora_enabled", False):
            twin.enable_lora(layer.lora_rank, lora_alpha=layer.lora_alpha)
    for layer, twin in pairs:  # from the outside in, as setting it reaches all inside
        if twin.trainable != layer.trainable:
            twin.trainable = layer.trainable


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    if [w.shape for w in target.weights] == [w.shape for w in source.weights]:
        for new, weight in zip(target.weights, source.weights, strict=True):
            new.assign(keras.ops.copy(weight.value))  # JAX and torch would share the memory
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)


def unhooked(model: keras.Model) -> keras.Model:
    """`model` itself, without the rules it may have."""
    if isinstance(model, HeadMasked):
        binding.uninstall(model._head_masks, model)
        vars(model).update(model._stock_graph.value)
        vars(model)["supports_jit"] = True
        object.__setattr__(model, "__class__", type(model).__bases__[1])
    return model


def _rules_config(rules: Mapping[int, LayerRule]) -> list[dict[str, Any]]:
    """JSON: each rule with the places of its layers."""
    layers: dict[tuple[MaskSpec, bool], list[int]] = {}
    for place, rule in sorted(rules.items()):
        layers.setdefault((rule.spec, rule.replaces), []).append(place)
    return [
        {"layers": places, "spec": spec.get_config()} | ({"replaces": True} if replaces else {})
        for (spec, replaces), places in layers.items()
    ]


def _rules_from_config(config: Any, found: Found) -> Rules:
    numbers = {entry.place: i for i, entry in enumerate(found.known)}
    rules: Rules = {}
    for part in config:
        for place in part["layers"]:
            if place not in numbers:
                raise ValueError(
                    f"The saved rules name attention layer {place}, but the model has "
                    f"{len(found.known)}. Was it saved with another version of its code?"
                )
            spec = MaskSpec.from_config(part["spec"])
            rules[numbers[place]] = spec, part.get("replaces", False)
    return dict(sorted(rules.items()))


# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(HeadMasked)
