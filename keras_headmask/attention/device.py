"""Which device attention is computed on: that of the operands, or one that somebody asks about."""

from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_headmask.attention.tuning import Held, holding
from keras_headmask.masks import Tensor

_asked_about: Held[str | None] = Held("device", None)


def assuming(device: str | None) -> AbstractContextManager[Any]:
    """Choose as for "gpu" or "cpu"; `None` changes nothing. What is chosen need not run here."""
    return holding(_asked_about, device or _asked_about.get())


def is_gpu(tensor: Tensor) -> bool:
    """Whether what is done with `tensor` is done on a GPU.

    (Of TensorFlow's graphs this is known when they run: `tensorflow/plan.py` asks there.)
    """
    device = _asked_about.get()
    if device is not None:
        return device == "gpu"
    backend = keras.backend.backend()
    if keras.backend.is_keras_tensor(tensor):
        return False
    if backend == "torch":
        import torch

        return tensor.device.type == "cuda" and torch.version.cuda is not None
    if backend == "jax":
        import jax

        default = jax.config.jax_default_device  # of a `keras.device` scope
        return (getattr(default, "platform", default) or jax.default_backend()) == "gpu"
    if backend == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_logical_devices("GPU"))
    return False
