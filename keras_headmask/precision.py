"""A model computing in half precision for a while, its weights as they are."""

import contextlib
from collections.abc import Iterator

import keras

PRECISIONS = ("float16", "bfloat16")


def checked_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"`precision` must be one of {PRECISIONS}, or None for that of the model. "
            f"Received: {precision!r}."
        )


@contextlib.contextmanager
def computing_in(model: keras.Model, precision: str | None) -> Iterator[None]:
    """Let every layer compute in `precision`, and those that end in a softmax in float32.

    Attention under a rule, and stock attention without dropout, have their softmax in float32 in
    any precision. Layers that compute with integer weights stay as they are.
    """
    before = []
    try:
        for layer in model._flatten_layers() if precision is not None else ():
            if layer.quantization_mode is not None:
                continue
            before.append((layer, layer._dtype_policy))
            ends_in_softmax = getattr(layer, "activation", None) is keras.activations.softmax
            is_softmax = isinstance(layer, keras.layers.Softmax) or ends_in_softmax
            name = "float32" if is_softmax else f"mixed_{precision}"
            layer._dtype_policy = keras.DTypePolicy(name)
        yield
    finally:
        for layer, policy in reversed(before):
            layer._dtype_policy = policy
