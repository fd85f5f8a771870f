"""A functional model under a rule: its inputs, its class, its file.

The model keeps its class by a subclass made for it, and its graph; its config is that of the stock
model, and the rules, which are applied again when it is loaded.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask import _keras, masks
from keras_headmask.layer import supports_unknown_lengths
from keras_headmask.retrofit import compiled, stock
from keras_headmask.retrofit.binding import Plan, install, uninstall
from keras_headmask.retrofit.layer_rules import (
    LayerRule,
    aligned,
    new_inputs,
    numbered,
    spec_beneath,
)
from keras_headmask.retrofit.selectors import find_attention
from keras_headmask.rules.base import MaskSpec


def masked(model: keras.Model, rules: list[LayerRule]) -> keras.Model:
    """`model` itself, a stock one of ours alone, under `rules`."""
    plan = Plan(model.name, rules)
    model.__dict__.update(_head_masks=plan, _stock=stock.Stock(model))
    if new := new_inputs(model, rules):
        stock.add_inputs(model, new)
    install(plan, model)
    compiled.drop(model)
    object.__setattr__(model, "__class__", _masked_class(type(model)))
    return model


def stock_copy(model: keras.Model) -> keras.Model:
    """A model of its own with the weights of `model` and without the rules of a masked one."""
    return stock.copy_by_config(model, _stock_config(model))


def unhooked(model: keras.Model) -> keras.Model:
    """`model` itself, without the rules it may have."""
    if isinstance(model, HeadMasked):
        uninstall(model._head_masks, model)
        model.__dict__.update(model._stock.graph)
        object.__setattr__(model, "__class__", type(model).__bases__[1])
    return model


def _stock_config(model: keras.Model) -> dict[str, Any]:
    if not isinstance(model, HeadMasked):
        return stock.config_of(model)
    with model._head_masks.running.having(in_config=True):
        return stock.config_of(model._stock.seen_through(model))


if TYPE_CHECKING:  # it stands before a model's own class
    from keras import Model as _Model
else:
    _Model = object


class HeadMasked(_Model):
    """What a masked model does beside its own class: see `apply_head_masks`."""

    _head_masks: Plan
    _stock: stock.Stock

    @property
    def supports_jit(self) -> bool:
        """Whether Keras may compile it by XLA: on TensorFlow only at known lengths."""
        unknown = any(None in tensor.shape[1:] for tensor in self.inputs)
        if unknown and any(rule.restricts for rule in self._head_masks.rules.values()):
            return supports_unknown_lengths(self)
        return vars(self)["supports_jit"]

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        self.__dict__["supports_jit"] = value

    @property
    def mask_specs(self) -> dict[str, MaskSpec]:
        """The spec of each masked attention layer, by the path of the layer."""
        return {rule.entry.path: _in_force(rule, self) for rule in self._head_masks.rules.values()}

    def summary_masks(self, print_fn: Callable[[str], Any] = print) -> None:
        """Print each attention layer: number, path, class, heads, self, cross or unclear, rule.

        The numbers are those by which `layers` names self-attention.
        """
        rows = []
        for number, entry in numbered(find_attention(self)):
            rule, layer = self._head_masks.rules.get(id(entry.layer)), entry.layer
            spec = spec_beneath(layer) if rule is None else _in_force(rule, self)
            heads = f"{getattr(layer, 'num_heads', '?')} heads"
            place = "-" if number is None else str(number)
            rows.append((place, entry.path, type(layer).__name__, heads, entry.kind, repr(spec)))
        for line in aligned(rows):
            print_fn(line)

    def unmasked(self) -> keras.Model:
        """A stock model with the same weights, without the rules of `apply_head_masks`.

        This one stays masked. A rule that a layer, or a masked model inside, has of its own stays.
        """
        return stock_copy(self)

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(keras.backend.is_keras_tensor, keras.tree.flatten(inputs))):  # see `tracing`
            with self._head_masks.running.having(only_shapes=True):
                return super().call(inputs, *args, **kwargs)
        wide: dict[str, Any] = {}
        with self._head_masks.running.having(wide_ids=wide):
            flat = _keras.flat_inputs(self, inputs)
        named = {tensor.name: value for tensor, value in zip(self.inputs, flat, strict=True)}
        named |= wide
        inputs = keras.tree.pack_sequence_as(self.input, flat)
        with self._head_masks.bound(named):
            return super().call(inputs, *args, **kwargs)

    def _convert_inputs_to_tensors(self, flat_inputs: list[Any]) -> list[Any]:
        """As given, before Keras casts: a float is refused, and ids of 64 bits are kept whole."""
        given = {t.name: x for t, x in zip(self.inputs, flat_inputs, strict=True)}
        _refuse_floats(given, self)
        wide_ids = self._head_masks.running.wide_ids
        if wide_ids is None:
            return super()._convert_inputs_to_tensors(flat_inputs)
        for tensor in self.inputs:
            x = given[tensor.name]
            dtype = getattr(x, "dtype", None)
            is_wide = dtype is not None and keras.backend.standardize_dtype(dtype) == "int64"
            if is_wide and tensor.dtype == "int32" and len(x.shape) == len(tensor.shape):
                _refuse_wrapping(tensor.name, x)
                wide_ids[tensor.name] = keras.ops.convert_to_tensor(x)
        return super()._convert_inputs_to_tensors(flat_inputs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        with self._head_masks.running.having(only_shapes=True):
            return super().compute_output_spec(*args, **kwargs)

    def _run_through_graph(self, *args: Any, **kwargs: Any) -> Any:
        running = self._head_masks.running
        if running.binding is None and not running.only_shapes:
            raise RuntimeError(
                f"`clone_model` would drop the rule of the model '{self.name}'. Clone it by "
                "`model.from_config(model.get_config())`, which has new weights and the rule, or "
                "clone `model.unmasked()`."
            )
        return super()._run_through_graph(*args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if str(filepath).endswith((".h5", ".hdf5")):
            raise ValueError(_no_hdf5(self, filepath))  # before a file is opened
        super().save(filepath, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        if _keras.saves_hdf5():
            # `keras.saving.save_model`, or a model around this one: the file is open already.
            raise ValueError(_no_hdf5(self, "an HDF5 file"))
        if _is_part_of_a_preset():
            self.save_to_preset()
        rules = _rules_config(self._head_masks.rules.values())
        return {"model": _stock_config(self), "mask_specs": rules}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Model:
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return masked(model, _rules_from_config(config["mask_specs"], model))

    def __reduce__(self) -> Any:
        _, arguments = super().__reduce__()
        return _keras.unpickle_model, arguments  # a class that pickle finds by its name

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`model.unmasked()` as a preset and apply the rule again after `from_preset`."
        )


def _no_hdf5(model: keras.Model, place: Any) -> str:
    return (
        f"A whole model in HDF5 loses its rule, so the masked model '{model.name}' is not saved "
        f"so. Received: {str(place)!r}. Save it by `model.save('model.keras')`, or its weights by "
        "`model.save_weights('model.weights.h5')`."
    )


def _is_part_of_a_preset() -> bool:
    """Whether a KerasHub task, unmasked itself, is being saved: its models are not told."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "save_to_preset" and module.startswith("keras_hub."):
            return True
        frame = frame.f_back
    return False


def _in_force(rule: LayerRule, model: HeadMasked) -> MaskSpec:
    """All that restricts a layer: the rule, and what it has of its own unless that is replaced."""
    beneath = None if rule.replaces else spec_beneath(rule.layer, model._head_masks)
    return rule.spec if beneath is None else beneath & rule.spec


def _refuse_floats(given: Mapping[str, Any], model: Any) -> None:
    """Keras would cast them: an additive mask would be inverted, and ids rounded."""
    for rule in model._head_masks.rules.values():
        for source in rule.sources.values():
            for place in (source,) if isinstance(source, str) else source:
                value = given.get(place)
                if masks.has_shape_alone(value):
                    continue  # a float may stand in for ids: see `masks.as_mask_input`
                dtype = getattr(value, "dtype", None)
                if dtype is not None and "float" in keras.backend.standardize_dtype(dtype):
                    raise TypeError(
                        f"The input {place!r}, which the mask spec of '{rule.entry.path}' reads, "
                        "must be integer or boolean, since floats get rounded and an additive mask "
                        f"read as booleans is inverted. Received dtype {dtype}. An additive mask "
                        "becomes booleans by `from_additive`."
                    )


def _refuse_wrapping(name: str, ids: Any) -> None:
    """JAX cuts 64 bits to 32 by default, and two ids may become one."""
    if keras.backend.backend() == "jax" and isinstance(ids, np.ndarray) and ids.size:
        limits = np.iinfo("int32")
        if ids.min() < limits.min or ids.max() > limits.max:
            raise ValueError(
                f"The input {name!r} holds {ids.max()}, which does not fit in the 32 bits of JAX' "
                "integers. Number the ids from 0: np.unique(ids, return_inverse=True)[1]."
            )


class _HeadMaskedGenerator(HeadMasked):
    """A masked model that decodes token by token, with a cache of earlier keys and values."""

    def call_with_cache(
        self, token_ids: Any, cache: Any, cache_update_index: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _refuse_rules_that_read_inputs(self)
        with self._head_masks.bound({}, cache_update_index):
            return super().call_with_cache(token_ids, cache, cache_update_index, *args, **kwargs)


class _HeadMaskedTranslator(HeadMasked):
    """A masked model that encodes once, and then decodes token by token with two caches."""

    def generate_step(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_rules_that_read_inputs(self)
        with self._head_masks.in_parts():
            return super().generate_step(*args, **kwargs)

    def call_encoder(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_rules_that_read_inputs(self)
        with self._head_masks.bound({}, whole=False):
            return super().call_encoder(*args, **kwargs)

    def call_decoder_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_rules_that_read_inputs(self)
        given = inspect.signature(super().call_decoder_with_cache).bind(*args, **kwargs).arguments
        # The place of the first query, which looks at whole sequences: its own, and the encoder's.
        offset = given.get("self_attention_cache_update_index")
        if offset is None:
            raise ValueError(
                f"The rule of the model '{self.name}' needs the place of the first token: pass "
                "`self_attention_cache_update_index`."
            )
        with self._head_masks.bound({}, offset, whole=False):
            return super().call_decoder_with_cache(*args, **kwargs)


class _HeadMaskedByHand(HeadMasked):
    """A masked model whose task generates with code of its own, in which no rule is bound."""

    def generate_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"`{type(self).__name__}` generates with code of its own, where the rule is not bound. "
            "Rules hold in its forward and in training, and in `generate()` of tasks with "
            "`call_with_cache`, such as GPT2CausalLM, or with `call_encoder` and "
            "`call_decoder_with_cache`, such as BartSeq2SeqLM."
        )


def _refuse_rules_that_read_inputs(model: HeadMasked) -> None:
    if names := model._head_masks.reads_inputs:
        raise NotImplementedError(
            f"The rule of the model '{model.name}' reads {names}, and generation with a cache has "
            "the newest token alone, not the inputs of the earlier ones. Rules on positions "
            "(Window, Chunk, Keys, Queries, RandomBlocks) hold in generation; for this rule call "
            "the model on the whole sequence."
        )


_FILED_AS = "keras_headmask>HeadMaskedModel"
_classes: dict[type, type] = {}


def _masked_class(cls: type) -> type:
    """`cls` under a rule. One for each class; all are filed under one name and load alike."""
    if cls not in _classes:
        mixin = HeadMasked
        if hasattr(cls, "call_with_cache"):
            mixin = _HeadMaskedGenerator
        elif hasattr(cls, "call_encoder") and hasattr(cls, "call_decoder_with_cache"):
            mixin = _HeadMaskedTranslator
        elif hasattr(cls, "generate_step"):
            mixin = _HeadMaskedByHand
        # The name stays the one of `cls`: Keras files weights under it.
        body = {"__module__": __name__, "__qualname__": f"HeadMasked[{cls.__name__}]"}
        _classes[cls] = type(cls)(cls.__name__, (mixin, cls), body)
        # By name alone: KerasHub would take a class among the custom objects for one of its own.
        _keras.file_under(_classes[cls], _FILED_AS)
    return _classes[cls]


# --- Rules in files ------------------------------------------------------------------------------


def _rules_config(rules: Iterable[LayerRule]) -> list[dict[str, Any]]:
    """JSON: each rule with the places of its layers, and the inputs of the model that it reads."""
    parts: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for rule in sorted(rules, key=lambda rule: rule.entry.place):
        part: dict[str, Any] = {"spec": rule.spec.get_config()}
        if rule.sources:
            part["inputs"] = dict(rule.sources)
        if rule.replaces:
            part["replaces"] = True
        _, places = parts.setdefault(json.dumps(part, sort_keys=True), (part, []))
        places.append(rule.entry.place)
    return [{"layers": places} | part for part, places in parts.values()]


def _rules_from_config(config: Any, model: keras.Model) -> list[LayerRule]:
    known = find_attention(model).known
    by_place = {entry.place: entry for entry in known}
    rules: dict[int, LayerRule] = {}
    for part in config:
        inputs = part.get("inputs", {}).items()
        sources = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in inputs}
        for place in part["layers"]:
            if place not in by_place:
                raise ValueError(
                    f"The saved rules name attention layer {place}, but the model has "
                    f"{len(known)}. Was it saved with another version of its code?"
                )
            spec = MaskSpec.from_config(part["spec"])
            replaces = part.get("replaces", False)
            rules[place] = LayerRule(by_place[place], spec, sources, replaces)
    return [rules[entry.place] for entry in known if entry.place in rules]


# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(HeadMasked)
