"""The values that a spec and those who ask it hand one another: inputs, tiles, answers."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Tensor: TypeAlias = Any  # as in masks.py, which imports Keras


class InputType(NamedTuple):
    """What a spec expects of one mask input.

    Args:
        rank: 2 for a tensor `(batch, length)`, `None` for a whole mask of rank 2, 3 or 4.
        dtype: The one to declare in `keras.Input`.
        sides: Whose value the spec reads: "query", "key" or both.
    """

    rank: int | None = 2
    dtype: str = "int32"
    sides: frozenset[str] = frozenset({"query", "key"})


class Sides(NamedTuple):
    """One mask input, seen from the queries and from the keys.

    Args:
        query: The value at each query.
        key: The value at each key.
    """

    query: Any
    key: Any


class Bound(NamedTuple):
    """A spec's mask inputs, prepared for the whole sequences, and the positions they lie at."""

    query_positions: Tensor
    key_positions: Tensor
    leaf_inputs: dict[Any, dict[str, Any]]  # by the leaf that reads them


def _whole(tensor: Tensor, axis: int) -> Tensor:
    return tensor


class Cuts(NamedTuple):
    """How to cut a tile out: functions of a tensor and its axis of queries, keys or examples."""

    queries: Callable[[Tensor, int], Tensor] = _whole
    keys: Callable[[Tensor, int], Tensor] = _whole
    batch: Callable[[Tensor, int], Tensor] = _whole


WHOLE = Cuts()


class Tiles(NamedTuple):
    """Tiles of the mask: n rows and m columns of them.

    Args:
        query_first: The first query position of each row, `(n, 1)`.
        query_last: The last one.
        key_first: The first key position of each column, `(1, m)`.
        key_last: The last one.
    """

    query_first: Tensor
    query_last: Tensor
    key_first: Tensor
    key_last: Tensor


class Span(NamedTuple):
    """The values that a mask input takes in each row or column of tiles.

    Args:
        low: The least of them.
        high: The greatest.
    """

    low: Tensor
    high: Tensor


class Bounds(NamedTuple):
    """What is known of each tile.

    Args:
        possible: Whether some pair may be allowed.
        certain: Whether every pair surely is.
    """

    possible: Tensor
    certain: Tensor


class OpenSide(NamedTuple):
    """A side of the query that a spec may have left open by mistake.

    Args:
        side: "before" or "after".
        closed: The spec without that side.
        meant: Specs that may have been meant.
    """

    side: str
    closed: Any
    meant: tuple[Any, ...]


class Words(NamedTuple):
    """What a token sees, as a phrase: "itself", "the first 4 tokens"; and what kind of phrase.

    `condition` is set where the rule asks something of the query alone: "if its own `x` is set".
    `compound` phrases are bracketed inside another. `hidden` is what a complement leaves out.
    """

    phrase: str
    condition: str = ""
    compound: bool = False
    hidden: str = ""

    @property
    def inner(self) -> str:
        """The phrase inside another."""
        return f"({self.phrase})" if self.compound else self.phrase

    @property
    def those(self) -> str:
        """The phrase after "only", "not" or "all but"."""
        rest = self.inner.removeprefix("every token ")
        return self.inner if rest == self.inner else f"the tokens {rest}"
