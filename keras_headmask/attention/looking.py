"""What a caller changes of a model while it looks at it: an export, a lint, a picture, a trace.

It holds in the caller's own context alone: other threads may run the same model meanwhile, and get
what they always get. Where our own code runs, it asks here; on a method of another class a door
stands while anyone looks, which lets all other callers pass. (A thread that a model starts by
itself does not inherit the context, and so is not looked at.)
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from keras_headmask import _keras

# Each is called with what it stands for, and then with the arguments.
_Overrides = Mapping[tuple[int, str], tuple[Callable, ...]]
_overrides: ContextVar[_Overrides] = ContextVar("overrides", default=MappingProxyType({}))
_rules_off: ContextVar[bool] = ContextVar("rules_off", default=False)
_wanted_scores: ContextVar[frozenset[int]] = ContextVar("wanted_scores", default=frozenset())
_operations: ContextVar[Callable[[], None] | None] = ContextVar("operations", default=None)
_LOCK = threading.Lock()  # of putting doors up and taking them down


@contextlib.contextmanager
def overriding(holder: Any, name: str, override: Callable) -> Iterator[None]:
    """Let `override(usual, ...)` be called for `holder.name(...)`, `usual` being that method."""
    now, key = _overrides.get(), _key(holder, name)
    token = _overrides.set({**now, key: (*now.get(key, ()), override)})
    try:
        with _door(holder, name):
            yield
    finally:
        _overrides.reset(token)


@contextlib.contextmanager
def rules_off() -> Iterator[None]:
    """Let models run as if each of their rules were `Full()`."""
    token = _rules_off.set(True)
    try:
        yield
    finally:
        _rules_off.reset(token)


def are_rules_off() -> bool:
    return _rules_off.get()


@contextlib.contextmanager
def scores_wanted(layer: Any) -> Iterator[None]:
    """Let attention `layer` compute without a flash kernel, which returns no scores."""
    token = _wanted_scores.set(_wanted_scores.get() | {id(layer)})
    try:
        yield
    finally:
        _wanted_scores.reset(token)


@contextlib.contextmanager
def operations_seen(see: Callable[[], None] | None) -> Iterator[None]:
    """Call `see` when `dot_product_attention` computes; `None` ends that inside."""
    token = _operations.set(see)
    try:
        yield
    finally:
        _operations.reset(token)


def operation_runs() -> None:
    """Called when Keras' `dot_product_attention` computes, or ours."""
    see = _operations.get()
    if see is not None:
        see()


_keras.before_dot_product_attention(operation_runs)


def uses_flash(layer: Any) -> bool:
    return _keras.flash(layer) and id(layer) not in _wanted_scores.get()


def as_seen(layer: Any) -> Any:
    """`layer`; where its scores are wanted, another object of the same parts without flash."""
    if not _keras.flash(layer) or uses_flash(layer):
        return layer
    seen = object.__new__(type(layer))
    vars(seen).update(vars(layer) | {_keras.FLASH: False})
    return seen


# --- For what is looked at -----------------------------------------------------------------------


def run(holder: Any, name: str, usual: Callable, *args: Any, **kwargs: Any) -> Any:
    """`usual(...)`, or what stands for `holder.name` in this context."""
    now, key = _overrides.get(), _key(holder, name)
    if key not in now:
        return usual(*args, **kwargs)
    for override in now[key]:
        usual = functools.partial(override, usual)
    # Inside, it is as usual again: what asks here twice is overridden once.
    token = _overrides.set({k: v for k, v in now.items() if k != key})
    try:
        return usual(*args, **kwargs)
    finally:
        _overrides.reset(token)


def is_overridden(holder: Any, name: str) -> bool:
    return _key(holder, name) in _overrides.get()


def asks(function: Callable) -> Callable:
    """Mark a method that calls `run` by itself, and so needs no door."""
    function.asks = True
    return function


def held(holder: Any, name: str) -> Any:
    """What the object itself holds under `name`, whoever looks; `None` where its class has it."""
    own = vars(holder).get(name)
    return own.held if isinstance(own, _Door) else own


def attributes(holder: Any) -> dict[str, Any]:
    """What the object itself holds, as `held` has it, also while other threads look."""
    found = vars(holder).copy()
    doors = {name: door for name, door in found.items() if isinstance(door, _Door)}
    found |= {name: door.held for name, door in doors.items()}
    return {k: v for k, v in found.items() if k not in doors or v is not None}


def _key(holder: Any, name: str) -> tuple[int, str]:
    return id(holder), name


class _Door:
    """Stands on an object for its method; who does not look passes."""

    def __init__(self, holder: Any, name: str):
        self.holder, self.name, self.looks = holder, name, 0
        self.held = vars(holder).get(name)
        self.__wrapped__ = getattr(holder, name)  # its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        usual = self.held
        if usual is None:
            usual = getattr(type(self.holder), self.name).__get__(as_seen(self.holder))
        return run(self.holder, self.name, usual, *args, **kwargs)


@contextlib.contextmanager
def _door(holder: Any, name: str) -> Iterator[None]:
    """One door for all who look at once, gone with the last of them.

    It is put among the attributes past the trackers of Keras and TensorFlow.
    """
    with _LOCK:
        door = vars(holder).get(name)
        if not isinstance(door, _Door):
            if getattr(getattr(holder, name), "asks", False):
                door = None
            else:
                door = vars(holder)[name] = _Door(holder, name)
        if door is not None:
            door.looks += 1
    try:
        yield
    finally:
        with _LOCK:
            if door is not None:
                door.looks -= 1
                if not door.looks and vars(holder).get(name) is door:
                    _take_down(door)


def _take_down(door: _Door) -> None:
    if door.held is None:
        del vars(door.holder)[door.name]
    else:
        vars(door.holder)[door.name] = door.held
