"""Hooks into Keras for saving, loading and exporting our layers.

Loading must lose no weights in silence.
"""

import functools
from collections.abc import Mapping
from typing import Any

from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.scopes import adapt_exports
from keras_headmask.masks import Tensor
from keras_headmask.rules.base import MaskSpec


@functools.cache
def change_keras(ours: str, stock: str) -> None:
    """Change what Keras does with layers of the class `ours`, once there is one.

    A list of layers is filed by class name: under one name, these and Keras' share their files.
    """
    _keras.file_weights_under(ours, stock)
    adapt_exports()


def with_stand_ins(spec: MaskSpec | None, mask_inputs: Any, query: Tensor, value: Tensor) -> Any:
    """`mask_inputs`, with zeros for those that a loading Keras leaves out of a model's call.

    A file holds no shapes of nested arguments. An error would be swallowed, and the layers that
    come after this one would keep fresh weights.
    """
    is_mapping = mask_inputs is None or isinstance(mask_inputs, Mapping)
    if spec is None or not is_mapping or len(query.shape) != 3:
        return mask_inputs  # the checks say what is wrong
    sides = tuple(ops.cast(ops.zeros_like(x[..., 0]), "int32") for x in (query, value))
    missing = {
        name: sides if kind.rank is not None else sides[0][:1, :1]
        for name, kind in spec.inputs.items()
    }
    inputs = {k: v for k, v in (mask_inputs or {}).items() if v is not None}
    return missing | inputs or mask_inputs


def check_is_built(layer: Any, store: Any) -> None:
    """Raise where a file holds weights for a layer that Keras could not build.

    Keras passes over its projections in silence. It asks again by a path that no file has.
    """
    if layer.built:
        return
    if _keras.has_query_in_file(layer, store):
        layer._missed_weights = True
    if layer._missed_weights:
        raise ValueError(
            f"The layer '{layer.name}' was not built, so the weights that the file holds for it "
            "would be lost. Keras could not run the `call` of the model that holds it: pass "
            "all tensors in the first argument, a dict or a list, or define "
            "`build_from_config`. To load weights into a model that code builds, call it on data "
            "first."
        )
