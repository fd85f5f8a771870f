"""Copies of models: by their config, with weights, and with the state that no config holds."""

import pathlib
import tempfile
from typing import Any

import keras

from keras_headmask import _keras

Pairs = list[tuple[Any, Any]]  # each layer with its twin in the copy; the model itself, too


def copied(model: keras.Model, untracked: list[str]) -> tuple[Any, Pairs]:
    """A copy of `model` with its rules, weights and training state, and its layers with theirs.

    `untracked`: weights that it reads and Keras does not track.
    """
    unregistered: dict[str, type] = {}
    for layer in _keras.layers_of(model):
        cls = _class_in_config(layer)
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
        if untracked:
            raise ValueError(
                f"it uses weights that Keras does not track, so a copy would lack them: "
                f"{untracked}. Assign the layers that have them to attributes of those "
                "that call them."
            )
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        twin = keras.saving.deserialize_keras_object(
            config, custom_objects=unregistered, safe_mode=False
        )
        _check_all_there(model, twin)
        pairs = _in_pairs(model, twin)
        _copy_training_state(pairs)
        _copy_weights(model, twin)
        _copy_other_state(pairs)
        _keras.copy_values(model, twin)
    except Exception as error:  # (the config of a layer may raise anything)
        raise ValueError(
            f"Copying the model '{model.name}' is not possible: {error} Fix that, or, for a rule, "
            "pass copy=False, which masks the model itself."
        ) from error
    return twin, pairs


def _class_in_config(layer: Any) -> type:
    """The class that a config names: layers of masked models have classes made for each."""
    return getattr(type(layer), "_stock_class", type(layer))


def _in_pairs(source: keras.Model, target: keras.Model) -> Pairs:
    """The layers of both by the paths that files have, each before the layers inside it.

    A layer without state may lack a twin: KerasHub's preprocessors make some at their first text.
    """
    twins = _keras.files.layers_in_file(target)
    pairs = []
    for path, layer in _keras.files.layers_in_file(source).items():
        twin = twins.get(path)
        if _class_in_config(twin) is _class_in_config(layer):
            pairs.append((layer, twin))
        elif layer.weights or hasattr(layer, "save_assets"):
            raise ValueError(
                f"its config makes a model without the layer {path!r} ({type(layer).__name__}), "
                "whose state would be lost."
            )
    return pairs


def _copy_training_state(pairs: Pairs) -> None:
    """Adapters, what is rematerialised, and which layers are frozen: no config holds them."""
    for layer, twin in pairs:
        if getattr(twin, "compiled", False):
            _keras.uncompile(twin, layer)
        if getattr(layer, "lora_enabled", False) and not getattr(twin, "lora_enabled", False):
            twin.enable_lora(layer.lora_rank, lora_alpha=layer.lora_alpha)
        _keras.set_remat_mode(twin, _keras.remat_mode(layer))  # the RematScope of when it was built
    for layer, twin in pairs:  # from the outside in, since setting it sets all layers inside
        if twin.trainable != layer.trainable:
            twin.trainable = layer.trainable


def _check_all_there(source: keras.Model, target: keras.Model) -> None:
    if len(target.weights) < len(source.weights):
        inside = {id(w) for x in _keras.operations(source) for w in getattr(x, "weights", ())}
        tracked = _keras.sublayers(source)
        if missing := [x.name for x in tracked if any(id(w) not in inside for w in x.weights)]:
            raise ValueError(
                f"it holds layers outside of its graph, which no config holds: {missing}."
            )


def _copy_other_state(pairs: Pairs) -> None:
    """State outside the weights: what layers derive from them, and vocabularies."""
    for layer, twin in pairs:
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
            new.trainable = weight.trainable  # LoRA freezes the kernel alone, not its layer
        return
    with tempfile.TemporaryDirectory() as folder:  # LoRA's, say, which files merge into the kernels
        file = str(pathlib.Path(folder) / "model.weights.h5")
        source.save_weights(file)
        target.load_weights(file)
