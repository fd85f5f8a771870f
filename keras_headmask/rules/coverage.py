"""How much of each tile of the mask a rule allows, found without looking at its pairs.

A tile of which nothing is allowed need not be computed; one of which all is needs no mask. A spec
that says nothing of tiles is taken to allow some pairs of each, which is always sound.
"""

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_headmask.rules.algebra import leaves_under_or
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bounds, Sides, Span, Tiles

_PARTS, _PART = 64, 2**14  # tiles, and positions in each, of which `is_local` asks


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


@functools.lru_cache(1024)
def is_local(rule: MaskSpec, reads: tuple) -> bool:
    """Whether a query sees few keys (an eighth) however long the sequence is.

    `reads` lists, for each leaf whose inputs are known, their names and whether they are flags. It
    asks `coverage` of a long sequence that is made up, whose ids rise slowly. Flags are known
    nowhere, but those that open whole columns or rows are few, as in Longformer.
    """
    number = np.arange(_PARTS) * _PART
    rare = leaves_under_or(rule)

    def sides(low: np.ndarray, high: np.ndarray) -> Sides:
        on_axes = [(x[None, :, None], x[None, None]) for x in (low, high)]
        return Sides(*(Span(*of_axis) for of_axis in zip(*on_axes, strict=True)))

    spans = {
        leaf: {
            name: sides(0 * number, 0 * number + (leaf not in rare))
            if is_flag
            else sides(number, number + _PART - 1)
            for name, is_flag in names
        }
        for leaf, names in reads
    }
    length = _PARTS * _PART
    possible, _ = bounds(rule, tile_grid(length, length, _PART, _PART), spans)
    return bool(np.broadcast_to(possible, (1, _PARTS, _PARTS)).mean() <= 1 / 8)


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
