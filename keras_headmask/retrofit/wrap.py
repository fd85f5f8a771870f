"""A layer that obeys rules wherever it is called.

The class of an attention layer that gets a rule, and of each layer around it, is replaced by a
subclass made for it, which is a `MaskedLayer` too. The layer keeps its name, its weights and its
arguments, and takes one more: `head_mask_inputs`, the tensors that the rules read. In a functional
model these are edges of the graph. Its config holds that of the stock layer, and the rules.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.attention.tuning import adapt_exports, holding
from keras_headmask.layers.call_checks import supports_unknown_lengths
from keras_headmask.layers.masked import MaskedAttention
from keras_headmask.retrofit.adapters import (
    adapter_of,
    attention,
    holds,
    is_inside,
    offset_of_call,
    taken_offset,
)
from keras_headmask.retrofit.call import (
    Frame,
    current_frame,
    hook,
    in_frame,
    inputs_of,
    missing_inputs,
    opened_frame,
)
from keras_headmask.retrofit.edges import ARGUMENT
from keras_headmask.retrofit.rule import (
    STATE,
    LayerRule,
    State,
    Tensors,
    all_rules,
    attention_inside,
    entries,
    has_rules,
    is_masked,
    rules_config,
    rules_from_config,
    rules_in_force,
    state_of,
    stock_and_rules,
)
from keras_headmask.rules.by_head import restricts

_FILED_AS = "keras_headmask>HeadMaskedLayer"


if TYPE_CHECKING:
    from keras.layers import Layer as _Layer
else:
    _Layer = object


class MaskedLayer(_Layer):
    """Adds rules to the class of a layer, for the attention that the layer is or holds."""

    _stock_class: type

    def __call__(self, *args: Any, head_mask_inputs: Any = None, **kwargs: Any) -> Any:
        symbolic = any(map(keras.backend.is_keras_tensor, keras.tree.flatten((args, kwargs))))
        offset = taken_offset(self, kwargs, symbolic)
        if offset is None:
            offset = offset_of_call(self, args, kwargs, current_frame().offset)
        if head_mask_inputs is None:
            head_mask_inputs = self._own_mask_inputs(*args, **kwargs)
        with opened_frame([self], head_mask_inputs, offset) as frame:
            computes = not symbolic and not _keras.for_shapes_alone()
            if computes and state_of(self).waiting and self.built:
                # This makes the layers that the first call makes.
                super().compute_output_spec(*args, **kwargs)
            attach(self)
            self._check_given()
            outputs = super().__call__(*args, **kwargs)
            attach(self, computes)
            if computes:
                self._check_used(frame)
        if symbolic and head_mask_inputs is not None:
            _keras.add_to_last_call(self, {"head_mask_inputs": head_mask_inputs})
        return outputs

    def stateless_call(
        self, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Keras' own, which `fit` and `predict` call on JAX in place of `__call__`."""
        with opened_frame([self], self._own_mask_inputs(*args, **kwargs), None):
            variables = trainable_variables, non_trainable_variables
            return super().stateless_call(*variables, *args, **kwargs)

    def compute_output_spec(self, *args: Any, head_mask_inputs: Any = None, **kwargs: Any) -> Any:
        return super().compute_output_spec(*args, **kwargs)

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Let what runs again for a gradient find the inputs of the first run."""
        frame = current_frame()

        @functools.wraps(layer_call)
        def call_again(*args: Any, **kwargs: Any) -> Any:
            with in_frame(frame):
                return layer_call(*args, **kwargs)

        return super().rematerialized_call(call_again, *args, **kwargs)

    @property
    def supports_jit(self) -> bool:
        """Whether Keras may compile it by XLA: on TensorFlow, under a rule, at known lengths."""
        calls = _keras.calls_of(self)
        first = [x for call in calls for x in call.input_tensors[:1]]
        has_unknown = any(None in x.shape[1:-1] for x in first)
        if has_unknown and any(map(_is_restricted, attention_inside(self))):
            return supports_unknown_lengths(self)
        return vars(self).get("supports_jit", vars(self).get("_supports_jit", True))

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        self.__dict__["supports_jit"] = value

    @property
    def _default_save_signature(self) -> Any:
        """`None` where TensorFlow, by itself, would trace the layer without its mask inputs."""
        return None if any(self._asks_for()) else super()._default_save_signature

    def _asks_for(self) -> Iterator[tuple[keras.Layer, LayerRule]]:
        """Rules inside whose inputs this layer must be called with, or a layer around it."""
        for layer in attention_inside(self):
            for rule in rules_in_force(layer):
                # (An owner inside is checked when it runs.)
                if rule.reads and rule.restricts and not is_inside(self, rule.owner):
                    yield layer, rule

    def own_input_names(self) -> dict[str, str]:
        """By what rules read: which inputs of its own the graph around a functional model fills.

        They get the same tensors as `head_mask_inputs` in its first call there. Else the file says
        it.
        """
        calls = (call.arguments for call in _keras.calls_of(self))
        call = next((call for call in calls if call.kwargs.get(ARGUMENT)), None)
        if call is None:
            return state_of(self).own_input_names
        known = _keras.taken_by_inputs(self, call.args[0] if call.args else None)
        edges = call.kwargs[ARGUMENT].items()
        return {name: own.name for name, edge in edges for x, own in known if x is edge}

    def _own_mask_inputs(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Tensors | None:
        """The mask inputs of a functional model called alone, as a masked task's backbone."""
        if not isinstance(self, _keras.Functional) or observers.are_rules_off():
            return None
        asking = (r for x, r in self._asks_for() if r.owner is self and inputs_of(r, x) is None)
        names = {name for rule in asking for name in rule.reads}
        if not names:
            return None
        places = self.own_input_names()
        arguments = {own.name: (own, x) for x, own in _keras.taken_by_inputs(self, inputs)}
        if not all(places.get(name) in arguments for name in names):
            return None
        tensors = {}
        for name in names:
            own, x = arguments[places[name]]
            symbolic = keras.backend.is_keras_tensor(x)
            tensors[name] = x if symbolic else keras.ops.convert_to_tensor(x, own.dtype)
        return tensors

    def _check_given(self) -> None:
        if observers.are_rules_off():
            return
        for layer, rule in self._asks_for():
            if inputs_of(rule, layer) is None:
                raise ValueError(missing_inputs(layer.name, rule))

    def _check_used(self, frame: Frame) -> None:
        for layer in attention_inside(self):
            if _is_restricted(layer) and id(layer) not in frame.used:
                raise RuntimeError(
                    f"The rule of the attention layer '{layer.name}' was not used in this call of "
                    f"'{self.name}': either the layer did not run, or it ran in a `tf.function` "
                    "that was traced before, or its class computed attention without "
                    "`_compute_attention`, as KerasHub's do inside vLLM. Leave it out by `layers=`."
                )

    def _is_filed_inside(self, rule: LayerRule) -> bool:
        """Whether the config of a layer inside holds `rule`, since that layer is its owner."""
        return is_inside(self, rule.owner)

    def get_config(self) -> dict[str, Any]:
        rules = to_file(self)
        config: dict[str, Any] = {"layer": stock_config(self, rules)}
        state = state_of(self)
        if state.waiting:
            config |= {"rules": state.waiting, "attention": state.awaited}
        else:
            config |= {"rules": rules_config(rules), "attention": len(attention_inside(self))}
        names = self.own_input_names() if isinstance(self, _keras.Functional) else {}
        return config | ({"own_inputs": names} if names else {})

    def save_to_preset(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "KerasHub loads a preset by the exact class of its config, so the rule would be lost "
            "or the preset not load. Save the masked model by `model.save('model.keras')`; or save "
            "`hm.unmasked(model)` as a preset and apply the rule again after `from_preset`."
        )

    def __reduce__(self) -> Any:
        arguments = super().__reduce__()[1]
        return _keras.files.unpickle_model, arguments  # (pickle cannot find the class by its name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Layer:
        stock = getattr(cls, "_stock_class", None)  # (it may be registered nowhere)
        known = {} if stock is None else {stock.__name__: stock}
        layer, rules = stock_and_rules(config, "layer", "rules", known | dict(custom_objects or {}))
        wait(layer, rules, *entries(config, "attention"))
        state_of(layer).own_input_names = dict(config.get("own_inputs", {}))
        return layer


def _is_restricted(layer: keras.Layer) -> bool:
    return any(rule.restricts for rule in rules_in_force(layer))


# --- Layers become masked, and stock again --------------------------------------------------------


def mask(layer: Any, kind: type = MaskedLayer) -> None:
    """Make the class of `layer` one that is also a `kind`; it has no rule yet."""
    if is_masked(layer):
        return
    _change_keras()
    vars(layer)[STATE] = State()
    object.__setattr__(layer, "__class__", _class_of(type(layer), kind))
    if (adapter := adapter_of(layer)) is not None:
        vars(layer)[adapter.hook] = hook(layer)


@functools.cache
def _change_keras() -> None:
    """Change what Keras does with masked layers, once there is one."""
    _keras.patches.after_cloning(_check_cloned)
    adapt_exports()


def _check_cloned(operation: Any, clone: Any) -> None:
    """Raise if a `clone_function` makes a stock layer of a masked one."""
    if not is_masked(operation) or not has_rules(operation):
        return
    layers = _keras.layers_of(clone) if isinstance(clone, keras.Layer) else []
    if not any(is_masked(x) for x in layers):
        raise ValueError(
            f"The layer '{operation.name}' of the model to clone obeys a rule, and "
            f"`clone_function` made a stock layer ({type(clone).__name__}) of it, which would not. "
            "Return `layer.__class__.from_config(layer.get_config())` for it, or clone "
            "`hm.unmasked(model)`, and give the clone its rule by `hm.apply_head_masks`."
        )


def unmask(layer: Any) -> None:
    """Give `layer` its stock class again."""
    if is_masked(layer):
        object.__setattr__(layer, "__class__", layer._stock_class)
        for name in _own(layer):
            layer.__dict__.pop(name, None)
        if isinstance(layer, MaskedAttention):
            own = layer.mask_spec
            layer.__dict__["_restricts"] = own is not None and restricts(own, layer.num_heads)


def _own(layer: Any) -> set[str]:
    """The attributes that are not the stock layer's."""
    adapter = adapter_of(layer)
    return {STATE} if adapter is None else {STATE, adapter.hook}


def add_rule(root: keras.Layer, layer: Any, rule: LayerRule) -> None:
    """Make attention `layer` inside `root` obey `rule`; an earlier rule of the same owner goes."""
    for around in _keras.layers_of(root):  # `root` is one of them
        if holds(around, layer):
            mask(around)
    state = state_of(layer)
    kept = [x for x in state.rules if x.owner is not rule.owner]
    outer = (i for i, x in enumerate(kept) if is_inside(x.owner, rule.owner))
    kept.insert(next(outer, len(kept)), rule)  # the innermost first, as files have them
    state.rules = tuple(kept)
    if rule.replaces and isinstance(layer, MaskedAttention):
        layer.__dict__["_restricts"] = False


_classes: dict[tuple[type, type], type] = {}


def _class_of(cls: type, kind: type) -> type:
    """The class that is `cls` and `kind`. All of them are filed under the name of `kind`."""
    if (cls, kind) not in _classes:
        # The name stays the one of `cls`: Keras files weights under it.
        body = {
            "__module__": "keras_headmask",  # Keras prints it where the import is missing
            "__qualname__": f"{kind.__name__}[{cls.__name__}]",
            "_stock_class": cls,
        }
        _classes[cls, kind] = type(cls)(cls.__name__, (kind, cls), body)
        # Not registered: KerasHub would take a class among the custom objects for one of its own.
        _keras.files.file_under(_classes[cls, kind], _keras.files.filed_name(kind))
    return _classes[cls, kind]


# --- Files ---------------------------------------------------------------------------------------

_filed: ContextVar[frozenset[int]] = ContextVar("filed", default=frozenset())


def to_file(layer: Any) -> list[tuple[int, LayerRule]]:
    """Rules for the config of `layer`, with numbers of attention layers, but those filed inside."""
    return [
        (place, rule)
        for place, inner in enumerate(attention_inside(layer))
        for rule in all_rules(inner)
        if id(rule) not in _filed.get() and not layer._is_filed_inside(rule)
    ]


def stock_config(layer: Any, rules: list[tuple[int, LayerRule]]) -> dict[str, Any]:
    """The config of the stock layer, as Keras files it; layers inside do not file `rules` again."""
    state = state_of(layer)
    if state.stock is None:
        state.stock = object.__new__(layer._stock_class)
    own = _own(layer)
    vars(state.stock).update({k: v for k, v in observers.attributes(layer).items() if k not in own})
    with holding(_filed, _filed.get() | {id(rule) for _, rule in rules}):
        config = keras.saving.serialize_keras_object(state.stock)
    config.pop("compile_config", None)
    return config


def wait(layer: keras.Layer, rules: list[dict[str, Any]], count: int) -> None:
    """Let `layer` obey saved rules as soon as it has made `count` attention layers."""
    mask(layer)
    state_of(layer).waiting, state_of(layer).awaited = list(rules), count
    build = layer.build

    @functools.wraps(build)
    def build_and_attach(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        attach(layer)

    if rules and not layer.built:
        vars(layer)["build"] = build_and_attach  # (Keras sets its own wrapper in this place)
    attach(layer)


def attach(layer: Any, computed: bool = False) -> None:
    """Give saved rules to the attention inside `layer`, if all of it is made."""
    state = state_of(layer)
    if not state.waiting:
        return
    layers = attention(layer)
    if len(layers) < state.awaited and not computed:
        return  # (Their numbers are not known yet: a layer that comes before may still be made.)
    if len(layers) != state.awaited:
        raise ValueError(
            f"The saved rules of '{layer.name}' number {state.awaited} attention layers, and it "
            f"has {len(layers)}. Was it saved with another version of its code?"
        )
    rules = list(rules_from_config(state.waiting, layers, layer.name))
    state.waiting = []
    for one, rule in rules:
        add_rule(layer, one, dataclasses.replace(rule, owner=layer))
    if computed:
        raise RuntimeError(
            f"The layer '{layer.name}' made its attention while it ran, so its rule did not hold. "
            "Make attention in `__init__` or `build`."
        )


keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(MaskedLayer)
