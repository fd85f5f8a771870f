"""How much of each tile of the mask a rule allows, found without looking at its pairs.

A tile of which nothing is allowed need not be computed; one of which all is needs no mask. A spec
that says nothing of tiles is taken to allow some pairs of each, which is always sound.
"""

import enum
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bounds, Tiles


class Coverage(enum.IntEnum):
    """How much of a tile is allowed. `&` is min, `|` is max, `~` is 2 - c."""

    NONE = 0
    SOME = 1
    ALL = 2


def bounds(rule: MaskSpec, tiles: Tiles, spans: Mapping[MaskSpec, Any] | None = None) -> Bounds:
    """Bounds of what `rule` (no `PerHead`) allows in each tile, for NumPy arrays and tensors.

    `spans` holds the spans of the mask inputs for the leaves that read them; a leaf without
    a span may allow some pair of every tile.
    """

    known = spans or {}

    def leaf_bounds(leaf: MaskSpec) -> Bounds:
        if leaf.inputs and leaf not in known:
            return MaskSpec.coverage(leaf, tiles, {})
        return leaf.coverage(tiles, known.get(leaf, {}))

    return rule.fold(
        leaf_bounds,
        both=lambda a, b: Bounds(a.possible & b.possible, a.certain & b.certain),
        either=lambda a, b: Bounds(a.possible | b.possible, a.certain | b.certain),
        neither=lambda a: Bounds(~a.certain, ~a.possible),
    )


def _starts(length: Any, size: int) -> Any:
    return np.arange(0, length, size)


def tile_grid(
    queries: Any,
    keys: Any,
    tile_queries: int,
    tile_keys: int,
    query_offset: Any = 0,
    starts: Callable[[Any, int], Any] = _starts,
    at_most: Callable[[Any, Any], Any] = np.minimum,
) -> Tiles:
    """The tiles of a mask of `queries` x `keys`; the last of a row or column may be cut.

    `starts(length, size)` gives every `size`th position, and `at_most` the lesser of two: by NumPy,
    or by a backend for lengths that are tensors.
    """
    rows, columns = starts(queries, tile_queries), starts(keys, tile_keys)
    return Tiles(
        (rows + query_offset)[:, None],
        (at_most(rows + tile_queries, queries) - 1 + query_offset)[:, None],
        columns[None],
        at_most(columns + tile_keys, keys)[None] - 1,
    )


def coverage(
    rule: MaskSpec,
    queries: int,
    keys: int,
    tile_queries: int,
    tile_keys: int,
    query_offset: int = 0,
) -> np.ndarray:
    """`Coverage` of every tile, `(ceil(queries / tile_queries), ceil(keys / tile_keys))`."""
    tiles = tile_grid(queries, keys, tile_queries, tile_keys, query_offset)
    possible, certain = bounds(rule, tiles)
    shape = (len(tiles.query_first), tiles.key_first.shape[1])
    return np.broadcast_to(possible.astype(np.int8) + (possible & certain), shape)


def runs(possible: np.ndarray, tile_keys: int, keys: int) -> list[list[tuple[int, int]]]:
    """For each row of tiles the runs of keys, `[start, stop)`, that may be allowed."""
    padded = np.zeros((possible.shape[0], possible.shape[1] + 2), bool)
    padded[:, 1:-1] = possible
    rows, edges = np.nonzero(padded[:, 1:] != padded[:, :-1])
    edges = np.minimum(edges * tile_keys, keys).tolist()
    # (Not `np.split`, which `torch.compile` cannot read.)
    of_row = np.searchsorted(rows, np.arange(possible.shape[0] + 1)).tolist()
    per_row = [edges[first:stop] for first, stop in itertools.pairwise(of_row)]
    return [list(zip(e[::2], e[1::2], strict=True)) for e in per_row]
