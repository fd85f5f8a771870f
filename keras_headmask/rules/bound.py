"""The values that evaluation works on: sizes, prepared mask inputs, and how to cut a tile out."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """The sizes of the score matrix; `None` where a size is not known yet."""

    batch: int | None
    heads: int
    queries: int | None
    keys: int | None


class Bound(NamedTuple):
    """A spec's mask inputs, prepared for the whole sequences, and the positions they lie at."""

    query_positions: Any
    key_positions: Any
    leaf_inputs: dict[Any, dict[str, Any]]  # by the leaf that reads them


class Cuts(NamedTuple):
    """How to cut a tile out: functions of a tensor and its axis of queries, keys or examples."""

    queries: Callable[[Any, int], Any]
    keys: Callable[[Any, int], Any]
    batch: Callable[[Any, int], Any]


def _whole(tensor: Any, axis: int) -> Any:
    return tensor


WHOLE = Cuts(_whole, _whole, _whole)
