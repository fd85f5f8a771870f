"""A model computing in another precision for a while, its weights as they are."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import keras

from keras_headmask import _keras

PRECISIONS = ("float16", "bfloat16")


def checked_precision(precision: str | None) -> None:
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(
            f"`precision` must be one of {PRECISIONS}, or None for that of the model. "
            f"Received: {precision!r}."
        )


@contextlib.contextmanager
def computing_in(model: keras.Model, precision: str | None) -> Iterator[None]:
    """Let layers compute in `precision`, and those that end in a softmax in float32.

    Attention under a rule, and stock attention without dropout, have their softmax in float32 in
    any precision. As they are stay layers that compute with integer weights or in float64, and, in
    a model of mixed precision, those that were given float32.
    """
    own = {"float64"} | ({"float32"} if computes_in_half(model) else set())

    def policy(layer: keras.Layer) -> keras.DTypePolicy | None:
        if layer.compute_dtype in own:
            return None
        ends_in_softmax = getattr(layer, "activation", None) is keras.activations.softmax
        is_softmax = isinstance(layer, keras.layers.Softmax) or ends_in_softmax
        return keras.DTypePolicy("float32" if is_softmax else f"mixed_{precision}")

    with _policies(model, policy if precision is not None else lambda layer: None):
        yield


@contextlib.contextmanager
def computing_in_float32(model: keras.Model) -> Iterator[None]:
    """Let layers of half precision compute in float32, so that little is rounding."""

    def policy(layer: keras.Layer) -> keras.DTypePolicy | None:
        half = layer.compute_dtype in PRECISIONS
        return _ComputingInFloat32(layer.dtype_policy.name) if half else None

    with _policies(model, policy):
        yield


def computes_in_half(model: keras.Model) -> bool:
    return any(layer.compute_dtype in PRECISIONS for layer in _keras.layers_of(model))


class _ComputingInFloat32(keras.DTypePolicy):
    """A policy with its variables as they are, so that half-precision weights are cast."""

    compute_dtype = "float32"


class _OfTheCaller(keras.DTypePolicy):
    """Stands on a layer for its policy: who exports has another, all others what they had."""

    def __init__(self, layer: keras.Layer):
        self.own, self.exports, self._layer = layer.dtype_policy, 0, id(layer)

    @property
    def now(self) -> keras.DTypePolicy:
        return _chosen.get().get(self._layer, self.own)

    @property
    def __class__(self) -> type:  # so that it is filed, and asked what it is, as that policy
        return type(self.now)

    @property
    def compute_dtype(self) -> str:
        return self.now.compute_dtype

    def get_config(self) -> dict[str, Any]:
        return self.now.get_config()

    def __getattr__(self, name: str) -> Any:  # what the base class reads
        return getattr(self.now, name)

    def __getitem__(self, path: str) -> Any:  # of a map of policies
        return self.now[path]


_chosen: ContextVar[Mapping[int, keras.DTypePolicy]] = ContextVar(
    "policies", default=MappingProxyType({})
)
_LOCK = threading.Lock()


@contextlib.contextmanager
def _policies(model: keras.Model, choose: Callable) -> Iterator[None]:
    """Policies for this caller alone: other threads run the model as it is."""
    policies = {
        layer: policy
        for layer in _keras.layers_of(model)
        if layer.quantization_mode is None and (policy := choose(layer)) is not None
    }
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
