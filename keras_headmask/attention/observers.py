"""Observe a model for a while: an export, a lint, a picture or a trace replaces some methods.

A replacement holds in the context of its caller alone: another thread that runs the same model runs
the method as usual. Our own code asks here what to run; a method of another class is wrapped while
somebody observes it. (A thread that a model starts by itself does not inherit the context, so it is
not observed.)
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention.tuning import Held, holding

# Each is called with what it stands for, and then with the arguments.
_Overrides = Mapping[tuple[int, str], tuple[Callable, ...]]
_overrides: Held[_Overrides] = Held("overrides", MappingProxyType({}))
_rules_off: Held[bool] = Held("rules_off", False)
_wanted_probabilities: Held[frozenset[int]] = Held("wanted", frozenset())
_LOCK = threading.Lock()  # of adding wrappers and removing them


@contextlib.contextmanager
def overriding(holder: Any, name: str, override: Callable) -> Iterator[None]:
    """Let `override(usual, ...)` be called for `holder.name(...)`, `usual` being that method.

    One wrapper serves all who look at once, and goes with the last of them. It is put among the
    attributes past the trackers of Keras and TensorFlow.
    """
    now, key, attributes = _overrides.get(), (id(holder), name), vars(holder)
    with _LOCK:
        wrapper = attributes.get(name)
        if not isinstance(wrapper, _Wrapper):
            wrapper = None
            if not getattr(getattr(holder, name), "asks", False):
                wrapper = attributes[name] = _Wrapper(holder, name)
        if wrapper is not None:
            wrapper.looks += 1
    try:
        with holding(_overrides, {**now, key: (*now.get(key, ()), override)}):
            yield
    finally:
        with _LOCK:
            if wrapper is not None:
                wrapper.looks -= 1
                if not wrapper.looks and attributes.get(name) is wrapper:
                    if wrapper.held is None:
                        del attributes[name]
                    else:  # (at once: other threads may run it)
                        attributes[name] = wrapper.held


def rules_off() -> AbstractContextManager[bool]:
    """Let models run as if each of their rules were `Full()`."""
    return holding(_rules_off, True)


def are_rules_off() -> bool:
    """Whether `rules_off` holds. Raises in a function that would keep what it traces now."""
    if _rules_off.get() and _keras.traces_function():
        raise RuntimeError(
            "The model runs attention in a `tf.function` of its own, so it cannot run once without "
            "its rules, to be compared: that function would stay without them. Run attention "
            "outside of it."
        )
    return _rules_off.get()


def probabilities_wanted(layer: Any) -> AbstractContextManager[frozenset[int]]:
    """Let attention `layer` compute without a flash kernel, which returns no probabilities."""
    return holding(_wanted_probabilities, _wanted_probabilities.get() | {id(layer)})


def uses_flash(layer: Any) -> bool:
    return _keras.flash(layer) and id(layer) not in _wanted_probabilities.get()


def as_seen(layer: Any) -> Any:
    """`layer`; if its probabilities are wanted, another object of the same parts without flash."""
    if not _keras.flash(layer) or uses_flash(layer):
        return layer
    return standing_in(layer, {_keras.FLASH: False})


def standing_in(layer: Any, parts: Mapping[str, Any]) -> Any:
    """Another object of the parts of `layer`, and of `parts` in place of its own."""
    seen = object.__new__(type(layer))
    vars(seen).update(vars(layer) | parts)
    return seen


# --- For what is looked at -----------------------------------------------------------------------


def run(holder: Any, name: str, usual: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """`usual(...)`, or what stands for `holder.name` in this context."""
    now, key = _overrides.get(), (id(holder), name)
    if key not in now:
        return usual(*args, **kwargs)
    for override in now[key]:
        usual = functools.partial(override, usual)
    # Inside, it is as usual again: what asks here twice is overridden once.
    with holding(_overrides, {k: v for k, v in now.items() if k != key}):
        return usual(*args, **kwargs)


def is_overridden(holder: Any, name: str) -> bool:
    return (id(holder), name) in _overrides.get()


def asks(function: Callable) -> Callable:
    """Mark a method that calls `run` by itself, and so needs no wrapper."""
    vars(function)["asks"] = True
    return function


def asking(method: Callable) -> Callable:
    """Let a method be replaced, by `run`, while a context of `overriding` is open."""

    @asks
    @functools.wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, method.__name__, functools.partial(method, self), *args, **kwargs)

    return ask


def attributes(holder: Any) -> dict[str, Any]:
    """All attributes of the object itself, without our wrappers, while other threads may wrap."""
    current = vars(holder).copy()
    inner = {name: x.held for name, x in current.items() if isinstance(x, _Wrapper)}
    return {k: v for k, v in (current | inner).items() if k not in inner or v is not None}


class _Wrapper:
    """Stands on an object for its method, and runs that as usual for those who do not look."""

    def __init__(self, holder: Any, name: str):
        self.holder, self.name, self.looks = holder, name, 0
        self.held = vars(holder).get(name)
        self.__wrapped__ = getattr(holder, name)  # its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        usual = self.held
        if usual is None:
            usual = getattr(type(self.holder), self.name).__get__(as_seen(self.holder))
        return run(self.holder, self.name, usual, *args, **kwargs)


def without_gradients() -> AbstractContextManager[Any]:
    """Keep nothing for gradients, which PyTorch does by default."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
