"""A copy of a model: its config made anew, and all that no config holds."""

import pathlib
import tempfile
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.finding import Found


def copied(model: keras.Model, found: Found) -> keras.Model:
    """A model of its own, with the rules, the weights and the training state of `model`."""
    unregistered: dict[str, type] = {}
    for layer in _keras.layers_of(model):
        cls = getattr(type(layer), "_stock_class", type(layer))
        name = cls.__name__
        is_known = keras.saving.get_registered_name(cls) != name or cls.__module__.startswith(
            ("keras.", "keras_hub.")
        )
        if not is_known and unregistered.setdefault(name, cls) is not cls:
            raise ValueError(
                f"Copying the model '{model.name}' is not possible: its config would confuse two "
                f"classes named '{name}'. Register them under two names, by "
                "keras.saving.register_keras_serializable, or, for a rule, pass copy=False, which "
                "masks the model itself."
            )
    try:
        _check_tracked(found)
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _check_all_there(model, twin)
        _copy_training_state(model, twin)
        _copy_weights(model, twin)
        _copy_other_state(model, twin)
    except Exception as error:  # whatever a layer's own config raises
        raise ValueError(
            f"Copying the model '{model.name}' is not possible: {error} Mend that, or, for a rule, "
            "pass copy=False, which masks the model itself."
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


def _check_tracked(found: Found) -> None:
    if found.untracked:
        raise ValueError(
            f"it uses weights that Keras does not track, so a copy would lack them: "
            f"{found.untracked}. Assign the layers that have them to attributes of those that call "
            "them."
        )


def _check_all_there(source: keras.Model, target: keras.Model) -> None:
    if len(target.weights) < len(source.weights):
        inside = {id(w) for x in _keras.operations(source) for w in getattr(x, "weights", ())}
        tracked = _keras.sublayers(source)
        if missing := [x.name for x in tracked if any(id(w) not in inside for w in x.weights)]:
            raise ValueError(
                f"it holds layers outside of its graph, which no config holds: {missing}."
            )


def _copy_other_state(source: keras.Model, target: keras.Model) -> None:
    """State outside the weights: what layers derive from them, and vocabularies."""
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
