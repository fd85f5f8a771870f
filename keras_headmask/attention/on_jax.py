"""What JAX can do with a request on the devices that it has; `False` and `None` on other backends.

Importing this imports no JAX.
"""

from typing import Any

import keras

from keras_headmask.masks import Tensor


def has_loops(shape: tuple) -> bool:
    """Whether the loops of `tiles_jax` are possible for queries of that shape, and fast."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    # Loops suit a CPU; a step of theirs would gather what several devices hold.
    is_one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    return is_one_cpu and all(isinstance(size, int) for size in shape)


def by_cudnn(request: Any) -> Tensor | None:
    """The context by cuDNN, where that is there and takes the `Request`."""
    if keras.backend.backend() != "jax" or request.rule is None or request.dropout:
        return None
    if request.changes.are_some or request.wants_probabilities:
        return None
    if request.tiled is not None or keras.backend.is_keras_tensor(request.query):
        return None
    from keras_headmask.attention import accelerators_jax

    operands = request.query, request.key, request.value
    return accelerators_jax.by_cudnn(request.rule, request.query_offset, request.scale, *operands)
