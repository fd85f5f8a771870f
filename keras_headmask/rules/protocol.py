"""The values that go into the members of a spec and come out: inputs, tiles, answers."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Tensor: TypeAlias = Any  # as in masks.py, which imports Keras


BOTH = frozenset({"query", "key"})


class InputType(NamedTuple):
    """The rank, dtype and sides of one mask input.

    Args:
        rank: 2 for a tensor `(batch, length)`, `None` for a whole mask of rank 2, 3 or 4.
        dtype: The one to declare in `keras.Input`.
        sides: Whose value the spec reads: "query", "key" or both.
    """

    rank: int | None = 2
    dtype: str = "int32"
    sides: frozenset[str] = BOTH


class Sides(NamedTuple):
    """One mask input, seen from the queries and from the keys.

    Args:
        query: The value at each query.
        key: The value at each key.
    """

    query: Any
    key: Any


class Sizes(NamedTuple):
    """The sizes of attention, each an int or a scalar tensor; `None` if no one gave the batch."""

    batch: Any
    queries: Any
    keys: Any


class Places(NamedTuple):
    """n tiles that are looked at together: where their queries and keys stand.

    Args:
        examples: The number of the example of each, `(n, 1, 1, 1)`.
        queries: The places of its queries in the whole sequence, `(n, 1, queries, 1)`.
        keys: Those of its keys, `(n, 1, 1, keys)`, in any order.
        rows: Those of its queries where the sequences of all examples are one.
        columns: Those of its keys.
        take: What a tensor `(L, ...)` holds at places of any shape.
        by_example: Whether the tiles of each example stand together, as many for each.
    """

    examples: Tensor
    queries: Tensor
    keys: Tensor
    rows: Tensor
    columns: Tensor
    take: Callable[[Tensor, Tensor], Tensor]
    by_example: bool = False


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
    """Bounds of the mask in each tile.

    Args:
        possible: Whether some pair may be allowed.
        certain: Whether every pair surely is.
    """

    possible: Tensor
    certain: Tensor
