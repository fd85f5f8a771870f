"""The stock model inside a masked one: its graph, its config, and copies of it."""

import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import looking
from keras_headmask.retrofit.reachable import untracked_layers


def add_inputs(model: keras.Model, new: Mapping[str, Any]) -> None:
    """Give the graph of `model` further inputs, which no layer reads."""
    inputs = model.input
    if isinstance(inputs, dict):
        inputs = {**inputs, **new}
    else:
        first = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        inputs = type(first)([*first, *new.values()])
    graph = keras.Model(inputs, model.output)
    vars(model).update(graph_of(graph))


def graph_of(model: keras.Model) -> dict[str, Any]:
    return {name: vars(model)[name] for name in _keras.GRAPH}


class Stock:
    """A model as it was before it was masked, in an object of its own that shares all its parts.

    So that the stock config can be made while another thread runs the masked model.
    """

    def __init__(self, model: keras.Model):
        self.graph = graph_of(model)
        self._model, self._own = empty(type(model))  # one for all times: files know it by its id

    def seen_through(self, model: keras.Model) -> keras.Model:
        """The stock model, with the parts that the masked `model` has now."""
        own = self._own | {"get_config"}  # the masked one's, where a masked model holds it
        parts = {k: v for k, v in looking.attributes(model).items() if k not in own}
        vars(self._model).update(parts | self.graph)
        return self._model


def config_of(model: keras.Model) -> dict[str, Any]:
    """The config of a stock `model`, as Keras files it."""
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    return config


def copy_by_config(model: keras.Model, config: Mapping[str, Any]) -> keras.Model:
    """A model of its own, made from `config`, with weights and training state of `model`."""
    unregistered: dict[str, type] = {}
    for cls in map(type, _keras.layers_of(model)):
        name = cls.__name__
        is_known = keras.saving.get_registered_name(cls) != name or cls.__module__.startswith(
            ("keras.", "keras_hub.")
        )
        if not is_known and unregistered.setdefault(name, cls) is not cls:
            raise ValueError(
                f"The model '{model.name}' cannot be copied: its config would confuse two classes "
                f"named '{name}'. Register them by keras.saving.register_keras_serializable under "
                "two names, or pass copy=False, which uses the model up."
            )
    try:
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _check_all_there(model, twin)
        _copy_training_state(model, twin)
        _copy_weights(model, twin)
        _copy_other_state(model, twin)
    except Exception as error:  # whatever a layer's own config raises
        raise ValueError(
            f"The model '{model.name}' cannot be copied: {error} Make its layers serializable, or "
            "pass copy=False, which uses the model up."
        ) from error
    return twin


def _copy_training_state(source: keras.Model, target: keras.Model) -> None:
    """Adapters, what is rematerialised, and which layers are frozen: no config holds them."""
    layers, twins = (_keras.layers_inside(model) for model in (source, target))
    if list(map(type, layers)) != list(map(type, twins)):
        return
    target.trainable = source.trainable
    pairs = list(zip(layers, twins, strict=True))
    for layer, twin in pairs:
        if getattr(layer, "lora_enabled", False) and not getattr(twin, "lora_enabled", False):
            twin.enable_lora(layer.lora_rank, lora_alpha=layer.lora_alpha)
    for layer, twin in [(source, target), *pairs]:  # the RematScope of when it was built
        _keras.set_remat_mode(twin, _keras.remat_mode(layer))
    for layer, twin in pairs:  # from the outside in, as setting it reaches all inside
        if twin.trainable != layer.trainable:
            twin.trainable = layer.trainable


def _check_all_there(source: keras.Model, target: keras.Model) -> None:
    if lost := [path for path, layer in untracked_layers(source) if layer.weights]:
        raise ValueError(
            f"it holds layers where Keras does not track them, whose weights a copy would not "
            f"have: {lost}. Assign them to attributes of the layers that call them."
        )
    if len(target.weights) < len(source.weights):
        inside = {id(w) for x in source.operations for w in getattr(x, "weights", ())}
        tracked = _keras.sublayers(source)
        if missing := [x.name for x in tracked if any(id(w) not in inside for w in x.weights)]:
            raise ValueError(
                f"it holds layers outside of its graph, which no config holds: {missing}."
            )


def _copy_other_state(source: keras.Model, target: keras.Model) -> None:
    """What layers derive from their weights, and vocabularies, which are none."""
    for layer, twin in zip(_keras.layers_of(source), _keras.layers_of(target), strict=False):
        if type(layer) is not type(twin):
            continue
        if hasattr(layer, "finalize_state"):  # a Normalization, say, that was adapted
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            twin.load_own_variables({k: keras.ops.convert_to_numpy(v) for k, v in store.items()})
        if hasattr(layer, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                if any(pathlib.Path(folder).iterdir()):
                    twin.load_assets(folder)


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    if [w.shape for w in target.weights] == [w.shape for w in source.weights]:
        for new, weight in zip(target.weights, source.weights, strict=True):
            new.assign(keras.ops.copy(weight.value))  # JAX and torch would share the memory
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)


# --- A model moved to another object --------------------------------------------------------------


def moved(model: keras.Model) -> keras.Model:
    """The same model as another object; `model` keeps nothing but an error that says so."""
    cls = type(model)
    new, own = empty(cls)
    parts = looking.attributes(model).items()
    vars(new).update({k: v for k, v in parts if k not in own})
    vars(model).clear()
    object.__setattr__(model, "__class__", type(cls.__name__, (_UsedUp, cls), {}))
    return new


def empty(cls: Any) -> tuple[keras.Model, set[str]]:
    """A model without parts, and the names of the attributes that belong to the object itself."""
    new = cls.__new__(cls)
    return new, {name for name, value in vars(new).items() if callable(value)}  # Keras' wrappers


class _UsedUp:
    """What is left of a model after `apply_head_masks(model, ..., copy=False)`."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if (
            name == _keras.CLEAR_LOSSES
        ):  # an error here would leave a call of the model around open:
            return lambda: None  # Keras would take all later calls for parts of it
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
