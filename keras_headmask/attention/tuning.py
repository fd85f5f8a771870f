"""How attention is computed in a context: the sizes of tiles, thresholds, gradients or none."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Numbers that decide how attention is computed, never what it gives. Measured on a CPU.

    Pairs are queries x keys of one head. Each `fewest_...` and `most_...` is inclusive.
    """

    # Which implementation.
    fewest_pairs: int = 2**16  # with fewer, one dense product is faster than any loop
    most_pairs_by_head: int = 2**16  # up to these, all logits of a head stay in the cache
    most_computed: float = 0.5  # share of all logits, for tiles in a Python loop to be worth it
    most_unrolled: int = 32  # tiles; each adds nodes to the graph, and time to trace it
    # Small tiles follow a narrow rule closely, large ones multiply faster.
    local_tile: int = 128  # queries
    wide_tile: int = 256
    python_block: int = 64  # keys that are kept or skipped together
    tensorflow_block: int = 32  # the same, in TensorFlow's loop
    # Flagged positions that TensorFlow's loop looks at by themselves, apart from all tiles.
    most_flagged: int = 256  # in an example; more are treated as any others
    one_flagged_in: int = 8  # positions; where more are flagged they are treated as any others
    most_logits_of_a_step: int = 2**20  # head by head: 4 MB


_DEFAULT = Tuning()
_current: ContextVar[Tuning] = ContextVar("tuning", default=_DEFAULT)


def current_tuning() -> Tuning:
    """The numbers that hold in this context."""
    return _current.get()


@contextlib.contextmanager
def tuned(**changes: Any) -> Iterator[Tuning]:
    """Let attention that is run or traced inside use other numbers."""
    tuning = dataclasses.replace(_current.get(), **changes)
    token = _current.set(tuning)
    try:
        yield tuning
    finally:
        _current.reset(token)


_is_forward_only: ContextVar[bool] = ContextVar("forward_only", default=False)


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Trace the forward pass without gradients of our own.

    A SavedModel would have to hold those, most of its graph, or warn on loading that they are gone.
    """
    token = _is_forward_only.set(True)
    try:
        yield
    finally:
        _is_forward_only.reset(token)


def is_forward_only() -> bool:
    """Whether no gradient is wanted of what is traced in this context."""
    return _is_forward_only.get()
