"""Scopes in which attention runs: tile sizes, thresholds, exports, and who observes it.

Each holds in the context of its caller alone: another thread runs as usual. (A thread that a model
starts by itself does not inherit the context, so it is not observed.)
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import keras

from keras_headmask import _keras
from keras_headmask.rules.evaluation import narrow

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable)
_LOCK = threading.Lock()


class Held(Generic[T]):
    """A `ContextVar` that `torch.compile` can read while no context holds a value of its own.

    While one does, in any thread, it splits the graph there, and with `fullgraph=True` it raises.
    """

    def __init__(self, name: str, default: T) -> None:
        self.default, self.holders = default, 0
        self.variable: ContextVar[T] = ContextVar(name, default=default)

    def get(self) -> T:
        is_free = self.holders == 0 and keras.backend.backend() == "torch"
        return self.default if is_free and is_compiling() else self.variable.get()

    def set(self, value: T) -> Token[T]:
        with _LOCK:
            self.holders += 1
        return self.variable.set(value)

    def reset(self, token: Token[T]) -> None:
        try:
            self.variable.reset(token)
        finally:
            with _LOCK:
                self.holders -= 1


def is_compiling() -> bool:
    """Whether PyTorch's compiler reads this."""
    import torch

    return torch.compiler.is_compiling()


def constant_when_compiled(function: Function) -> Function:
    """Let PyTorch's compiler run `function` of constants, and take the result for a constant."""
    if keras.backend.backend() != "torch":
        return function
    import torch

    return torch.compiler.assume_constant_result(function)


@contextlib.contextmanager
def holding(variable: ContextVar[T] | Held[T], value: T) -> Iterator[T]:
    """Give `variable` that value inside, and the one of before after it."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Numbers that decide how attention is computed, never what it gives.

    Measured on a CPU. Pairs are queries x keys of one head. Each `fewest_...` and `most_...` is
    inclusive.
    """

    # With fewer, one dense product is faster than any tiles.
    fewest_pairs: int = 2**16
    # Most logits of a batch to compute in one product on TensorFlow; a 16th of it where each query
    # sees few keys.
    most_logits: int = 2**23
    most_computed: float = 0.5  # share of all logits, for tiles that are gathered to be worth it
    # Small tiles follow a narrow rule closely, large ones multiply faster.
    local_tile: int = 128  # queries
    wide_tile: int = 256
    block: int = 32  # keys that are kept or skipped together
    most_logits_of_a_step: int = 2**20  # of TensorFlow's loop: 4 MB of float32
    # Most flagged keys (queries) of an example that are computed apart from its tiles: each would
    # open a block (a tile) by itself. And one in how many positions at most.
    most_flagged: int = 256
    one_flagged_in: int = 8


_tuning: Held[Tuning] = Held("tuning", Tuning())
_functions_of_export: Held[dict | None] = Held("functions of an export", None)


def current_tuning() -> Tuning:
    return _tuning.get()


def tuned(**changes: Any) -> AbstractContextManager[Tuning]:
    """Let attention that is run or traced inside use other numbers."""
    return holding(_tuning, dataclasses.replace(_tuning.get(), **changes))


def forward_only() -> AbstractContextManager[dict | None]:
    """Trace the forward pass of an export, without custom gradients.

    A SavedModel would have to hold those, most of its graph, or warn on loading that they are gone.
    What is traced inside, one signature or several, shares functions.
    """
    functions = _functions_of_export.get()
    return holding(_functions_of_export, {} if functions is None else functions)


def is_forward_only() -> bool:
    return _functions_of_export.get() is not None


def functions_of_export() -> dict | None:
    """The functions that one export shares; `None` outside of an export."""
    return _functions_of_export.get()


_in_dense_scope: Held[bool] = Held("dense", False)


@contextlib.contextmanager
def dense_scope() -> Iterator[None]:
    """Let attention that is run or traced inside compute all logits, whatever its `tiled` says.

    Tiles are a loop whose sizes the data decide, which ONNX Runtime, OpenVINO and LiteRT do not
    run. `model.export` to one of these formats is in this scope by itself; other converters need
    it, and OpenVINO for a SavedModel. What was traced before stays as it is.

    Returns:
        A context manager.

    >>> import numpy as np
    >>> from keras_headmask import Window, dot_product_attention
    >>> x = np.ones((1, 512, 2, 4), "float32")
    >>> with dense_scope():
    ...     context = dot_product_attention(x, x, x, mask_spec=Window(2, 2))
    >>> context.shape == (1, 512, 2, 4)
    True
    """
    with holding(_in_dense_scope, True), holding(narrow, True):
        yield


def is_dense_scope() -> bool:
    return _in_dense_scope.get()


@functools.cache
def adapt_exports() -> None:
    """From now on, let `model.export` to a SavedModel hold the forward pass alone.

    Keras traces the model three times for it. Let that to other formats run in `dense_scope`.
    """
    formats = "export_onnx", "export_openvino", "export_litert"
    dense = dict.fromkeys(formats, lambda _: dense_scope())
    forward = {"export_saved_model": lambda _: forward_only()}
    _keras.run_in_scopes("keras.src.export", forward | dense)


# --- Who observes attention: an export, a lint, a picture or a trace replaces some methods --------

# Our own code asks here what to run; a method of another class is wrapped while somebody looks.
# Each is called with what it stands for, and then with the arguments.
_Overrides = Mapping[tuple[int, str], tuple[Callable, ...]]
_overrides: Held[_Overrides] = Held("overrides", MappingProxyType({}))
_rules_off: Held[bool] = Held("rules_off", False)
_wanted_probabilities: Held[frozenset[int]] = Held("wanted", frozenset())
_LOOKS_LOCK = threading.Lock()  # of adding wrappers and removing them


@contextlib.contextmanager
def overriding(holder: Any, name: str, override: Callable) -> Iterator[None]:
    """Let `override(usual, ...)` be called for `holder.name(...)`, `usual` being that method.

    One wrapper serves all who look at once, and goes with the last of them. It is put among the
    attributes past the trackers of Keras and TensorFlow.
    """
    now, key, attributes = _overrides.get(), (id(holder), name), vars(holder)
    with _LOOKS_LOCK:
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
        with _LOOKS_LOCK:
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
