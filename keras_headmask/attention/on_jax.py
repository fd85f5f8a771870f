"""Whether JAX' loops suit the devices that it has. Importing this imports no JAX."""

import keras


def has_loops(shape: tuple) -> bool:
    """Whether the loops of `tiles_jax` are possible for queries of that shape, and fast."""
    if keras.backend.backend() != "jax" or not all(isinstance(size, int) for size in shape):
        return False
    import jax

    # Loops suit a CPU; a step of theirs would gather what several devices hold.
    return jax.default_backend() == "cpu" and jax.device_count() == 1
