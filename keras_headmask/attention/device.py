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
    return kind(tensor) == "gpu"


def kind(tensor: Tensor) -> str:
    """The kind of device that computes with `tensor`: "gpu", "tpu", or "cpu" for all others.

    (Of TensorFlow's graphs this is known when they run: `tensorflow/plan.py` asks there.)
    """
    asked_about = _asked_about.get()
    if asked_about is not None or keras.backend.is_keras_tensor(tensor):
        return asked_about or "cpu"
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        return "gpu" if tensor.device.type == "cuda" and torch.version.cuda is not None else "cpu"
    if backend == "jax":
        import jax

        default = jax.config.jax_default_device  # of a `keras.device` scope
        return getattr(default, "platform", default) or jax.default_backend()
    if backend == "tensorflow":
        import tensorflow as tf

        kinds = (x for x in ("gpu", "tpu") if tf.config.list_logical_devices(x.upper()))
        return next(kinds, "cpu")
    return "cpu"
