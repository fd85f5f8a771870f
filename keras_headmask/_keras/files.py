"""Private names of Keras that its files depend on, and why each is touched."""

import types
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask._keras.lookup import find

saving_lib = find("keras.src.saving.saving_lib")
KerasSaveable = find("keras.src.saving.keras_saveable.KerasSaveable")
GLOBAL_CUSTOM_NAMES = find("keras.src.saving.object_registration.GLOBAL_CUSTOM_NAMES")
REGISTERED_OBJS_TO_NAMES = find("keras.src.api_export.REGISTERED_OBJS_TO_NAMES")
global_state = find("keras.src.backend.common.global_state")


def file_under(cls: type, name: str) -> None:
    """Save objects of `cls` under `name`, without registering the class for that name."""
    GLOBAL_CUSTOM_NAMES[cls] = name


def file_as(cls: type, stock: type) -> None:
    """Save objects of `cls` as those of `stock`."""
    for names in (GLOBAL_CUSTOM_NAMES, REGISTERED_OBJS_TO_NAMES):
        if stock in names:
            names[cls] = names[stock]


def in_hdf5() -> bool:
    """Whether a whole model is being saved in HDF5, whose reader finds classes by name alone."""
    return bool(global_state.get_global_attribute("use_legacy_config", False))


def file_weights_under(name: str, other: str) -> None:
    """File weights of the class called `name` as those of `other`: a layer has no say in that."""

    def to_snake_case(class_name: str) -> str:
        return usual(other if class_name == name else class_name)

    usual = saving_lib.naming.to_snake_case
    names = vars(saving_lib.naming) | {"to_snake_case": to_snake_case}
    saving_lib.naming = types.SimpleNamespace(**names)


def query_in_files(layer: Any) -> str:
    """The part of an attention layer as which its file holds the projection of the query."""
    return "_query_dense" if isinstance(layer, keras.layers.GroupQueryAttention) else "query_dense"


def has_in_file(store: Any, part: str) -> bool:
    """Whether the file that a layer's weights are read from holds that `part` of the layer."""
    path = f"{getattr(store, '_h5_entry_path', None) or ''}/{part}"
    if path.startswith("/"):
        return False  # not from a file
    return store.has_path(path) if hasattr(store, "has_path") else path in store.h5_file  # < 3.15


def layers_in_file(layer: Any) -> dict[str, keras.Layer]:
    """The layer (key "") and all layers inside, by their paths in a weights file, parents first.

    Paths are made of attributes, so they do not change when a layer is made later or gets another
    name. They also reach what Keras does not track, as the preprocessor of KerasHub's tasks on
    PyTorch.
    """
    layers: dict[str, keras.Layer] = {}
    seen: dict[int, Any] = {}  # by id; they are kept, so that no id is used again

    def parts(whole: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(whole, KerasSaveable):
            yield from saving_lib._walk_saveable(whole)
            return
        used: dict[str, int] = {}
        for part in whole.values() if isinstance(whole, dict) else whole:
            if isinstance(part, (KerasSaveable, list, tuple, dict)):
                name = saving_lib.naming.to_snake_case(type(part).__name__)
                number = used[name] = used.get(name, -1) + 1
                yield f"{name}_{number}" if number else name, part

    def look(part: Any, path: str) -> None:
        if not isinstance(part, (KerasSaveable, list, tuple, dict)) or id(part) in seen:
            return
        seen[id(part)] = part
        if isinstance(part, keras.Layer):
            layers[path] = part
        for name, inner in parts(part):
            look(inner, f"{path}/{name}" if path else name)

    look(layer, "")
    return layers


# What pickle calls to make a model of the bytes of its file; our classes have no name to find.
unpickle_model = find("keras.src.models.functional.Functional")._unpickle_model
