"""A subclass of one of our layers that computes attention by code of its own."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.layers import trial
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.by_head import head_groups


def check_obeys(layer: Any, ours: type, spec: MaskSpec, is_for_good: bool) -> None:
    """Raise if the class of a layer was seen not to obey the mask of its rule.

    `ours` is our class, of which that may be a subclass. `is_for_good`: it is not tried again.
    """
    name = _keras.COMPUTE_ATTENTION
    if getattr(type(layer), name) is getattr(ours, name):
        if not _keras.has_own_softmax(layer):
            return
        name = _keras.MASKED_SOFTMAX
    if layer._is_tried or _has_no_numbers():
        return
    stand_in = observers.standing_in(layer, {_keras.FLASH: False})

    def compute(query: Any, key: Any, value: Any, mask: Any, training: bool) -> Any:
        return stand_in._attend_all_heads([query, key, value], mask, training, False)[0]

    size = layer.head_dim if _keras.is_grouped(layer) else layer.key_dim
    with _eagerly():
        trial.check_obeys(
            compute,
            layer.num_heads,
            (size, getattr(layer, "value_dim", size)),
            layer.compute_dtype,
            len(head_groups(spec, layer.num_heads)) > 1,
            f"The attention layer '{layer.name}', of class {type(layer).__name__} with its own "
            f"`{name}`,",
        )
    layer._is_tried = is_for_good


def _eagerly() -> AbstractContextManager[Any]:
    """Compute at once what runs inside, also where a function is traced."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.init_scope()
    if keras.backend.backend() == "jax":
        import jax

        return jax.ensure_compile_time_eval()
    return contextlib.nullcontext()


def _has_no_numbers() -> bool:
    """Whether PyTorch compiles, or Keras infers shapes on it: a later call will try the code."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling() or ops.zeros(()).device.type == "meta"
