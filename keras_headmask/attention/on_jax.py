"""What JAX can do with a request on the devices that it has; `False` and `None` on other backends.

Importing this imports no JAX.
"""

from typing import Any

import keras

from keras_headmask.masks import Tensor


def has_loops(shape: tuple) -> bool:
    """Whether the loops of `tiles_jax` are possible for queries of that shape, and fast."""
    # Loops suit a CPU; a step of theirs would gather what several devices hold.
    return _is_one("cpu") and all(isinstance(size, int) for size in shape)


def by_kernel(request: Any) -> Tensor | None:
    """The context by a fused kernel of the device, where one is there and takes the `Request`."""
    if keras.backend.backend() != "jax" or request.rule is None or request.dropout:
        return None
    if request.changes.are_some or request.wants_probabilities:
        return None
    if request.tiled is not None or keras.backend.is_keras_tensor(request.query):
        return None
    rest = request.query_offset, request.scale, request.query, request.key, request.value
    if _is_one("tpu"):
        try:
            from keras_headmask.attention import splash_jax
        except ImportError:  # JAX calls it experimental
            return None
        return splash_jax.by_splash(request.rule, request.bound, *rest)
    from keras_headmask.attention import accelerators_jax

    return accelerators_jax.by_cudnn(request.rule, *rest)


def _is_one(kind: str) -> bool:
    """Whether JAX computes, and on one device of that kind: "cpu", "gpu" or "tpu"."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.default_backend() == kind and jax.device_count() == 1
