"""Private names of JAX, and why each is touched."""

from keras_headmask._keras.lookup import find

# The file of `wrapped_fn`, which JAX traces when Keras infers shapes; it moved in Keras 3.16.
FILE_OF_INFERENCE = find("keras.src.backend.compute_output_spec").__code__.co_filename


def traces_function() -> bool:
    """Whether JAX traces a function that may run again, inside of Keras' inference of shapes, too.

    Each trace knows the one around it, and the source of what it traces.
    """
    from jax._src import core

    trace = core.unsafe_get_current_trace()
    while trace is not None:
        if hasattr(trace, "frame"):  # (`vmap` and `grad` by themselves keep nothing)
            source = trace.frame.debug_info.func_src_info or ""
            return not (source.startswith("wrapped_fn ") and FILE_OF_INFERENCE in source)
        trace = getattr(trace, "parent_trace", None)
    return False
