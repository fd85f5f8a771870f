"""Settings of the context in which attention runs: tile sizes, thresholds, gradients or none."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
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

    Keras traces the model three times for it. And let that to ONNX, OpenVINO and LiteRT run in
    `dense_scope`.
    """
    dense = dict.fromkeys(("export_onnx", "export_openvino", "export_litert"), dense_scope)
    _keras.patches.around_exports({"export_saved_model": forward_only, **dense})
