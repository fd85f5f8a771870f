"""A model computing in another precision for a while, its weights as they are."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import keras

from keras_headmask import _keras

PRECISIONS = ("float16", "bfloat16")
# How far rounding may move outputs, as `interface.distance` measures it.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}


def tolerance_of(model: keras.Model, precision: str | None) -> float:
    """The tolerance of the coarsest dtype that layers compute in."""
    dtypes = {precision or "float32", *(layer.compute_dtype for layer in _keras.layers_of(model))}
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


@contextlib.contextmanager
def computing_in(model: keras.Model, precision: str | None) -> Iterator[None]:
    """Let layers compute in half `precision`, and those that end in a softmax in float32.

    Attention under a rule, and stock attention without dropout, have their softmax in float32 in
    any precision. Layers with integer weights or of float64 stay as they are, and so do those of
    float32 in a model of mixed precision.

    With `"float32"`, layers of half precision compute in it, so that little is rounding. It holds
    for this caller alone: other threads run the model as it is.
    """
    layers = _keras.layers_of(model) if precision is not None else []
    half = {layer for layer in layers if layer.compute_dtype in PRECISIONS}
    kept = {"float64", "float32"} if half else {"float64"}
    policies: dict[keras.Layer, keras.DTypePolicy] = {}
    for layer in layers:
        if layer.compute_dtype in kept or layer.quantization_mode is not None:
            continue
        if precision == "float32":
            if layer in half:
                policies[layer] = _ComputingInFloat32(layer.dtype_policy.name)
        else:
            ends_in_softmax = getattr(layer, "activation", None) is keras.activations.softmax
            is_softmax = isinstance(layer, keras.layers.Softmax) or ends_in_softmax
            policies[layer] = keras.DTypePolicy("float32" if is_softmax else f"mixed_{precision}")
    token = _chosen.set({**_chosen.get(), **{id(x): policy for x, policy in policies.items()}})
    with _LOCK:
        for layer in policies:
            if type(layer.dtype_policy) is not _OfTheCaller:
                _keras.set_policy(layer, _OfTheCaller(layer))
            layer.dtype_policy.exports += 1
    try:
        yield
    finally:
        _chosen.reset(token)
        with _LOCK:
            for layer in policies:
                layer.dtype_policy.exports -= 1
                if not layer.dtype_policy.exports:
                    _keras.set_policy(layer, layer.dtype_policy.own)


class _ComputingInFloat32(keras.DTypePolicy):
    """A policy with its variables as they are, so that half-precision weights are cast."""

    compute_dtype = "float32"


class _OfTheCaller(keras.DTypePolicy):
    """Stands for a layer's policy: the export has another one, other threads the layer's own."""

    def __init__(self, layer: keras.Layer):
        self.own, self.exports, self.layer_id = layer.dtype_policy, 0, id(layer)

    def __getattribute__(self, name: str) -> Any:
        here = object.__getattribute__(self, "__dict__")
        if name in here:
            return here[name]
        return getattr(_chosen.get().get(here["layer_id"], here["own"]), name)

    def __getitem__(self, path: str) -> keras.DTypePolicy:  # a map of policies has it
        return self.__getitem__(path)


_chosen: ContextVar[Mapping[int, keras.DTypePolicy]] = ContextVar(
    "policies", default=MappingProxyType({})
)
_LOCK = threading.Lock()
