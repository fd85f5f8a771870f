"""The planner of all kernels: which key blocks a tile of queries meets, by positions and data.

Queries are cut into tiles and keys into blocks. For each tile and block, `coverage` says whether
some pair may be allowed and whether all are. It reads the positions, and the least and greatest
value of each mask input there. Only this module calls it, with the same code for NumPy and every
backend: `gathered.py` knows lengths and positions alone; `tensorflow/plan.py` and
`torch/block_masks.py` look at data, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from keras_headmask import masks
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import coverage
from keras_headmask.rules.algebra import leaves_under_or
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import Bounds, Sides, Span

_MOST_FLAGGED = 256  # of an example; where there are more, each tile is long
# So many positions may be flagged to be looked at by themselves, apart from all tiles.
_ONE_FLAGGED_IN = 8

# The mask inputs of each leaf that reads some: `Sides`, `(B or 1, L or 1)`, or a whole mask.
LeafInputs: TypeAlias = Mapping[MaskSpec, Mapping[str, Any]]


class Arrays(NamedTuple):
    """The functions of one array library that the planner needs beside operators and slices.

    Args:
        starts: `(length, size)`: every `size`th position below `length`, `(n,)`.
        at_most: The element-wise minimum.
        extremes: `(values, size, axis)`: the least and the greatest of every `size` values of
            `(B, L)`, each put on the axis of queries (0) or keys (1) by `across`.
        as_numbers: Booleans as integers.
    """

    starts: Callable[[Length, int], Tensor]
    at_most: Callable[[Tensor, Length], Tensor]
    extremes: Callable[[Tensor, int, int], Sequence[Tensor]]
    as_numbers: Callable[[Mask], Tensor]


def across(values: Tensor, axis: int) -> Tensor:
    """`(B, n)` of the tiles (axis 0) or blocks (1) as `(B, n, 1)` or `(B, 1, n)`."""
    return values[:, :, None] if axis == 0 else values[:, None]


# --- What the rule says --------------------------------------------------------------------------


def bounds_of(
    rule: MaskSpec,
    leaf_inputs: LeafInputs,
    lengths: tuple[Length, Length],
    sizes: tuple[int, int],
    query_offset: Length,
    arrays: Arrays,
    taken_out: Mapping[MaskSpec, Mask] | None = None,
) -> Bounds:
    """Bounds of what `rule` (no `PerHead`) allows in each block, `(B or 1, tiles, blocks)`.

    `lengths` counts queries and keys, `sizes` a tile and a block. A leaf that reads a whole mask
    may allow a pair anywhere. Where `taken_out` is true for a leaf, none of its flags count.
    """
    out = taken_out or {}

    def span(leaf: MaskSpec, values: Tensor | None, axis: int) -> Span | None:
        if values is None:
            return None
        if keras.backend.standardize_dtype(values.dtype) == "bool":
            values = arrays.as_numbers(values)
        low, high = arrays.extremes(values, sizes[axis], axis)
        if leaf in out:
            high = high * arrays.as_numbers(~out[leaf])
        return Span(low, high)

    spans = {
        leaf: {
            name: Sides(span(leaf, sides.query, 0), span(leaf, sides.key, 1))
            for name, sides in inputs.items()
        }
        for leaf, inputs in leaf_inputs.items()
        if all(isinstance(value, Sides) for value in inputs.values())
    }
    tiles = coverage.tile_grid(*lengths, *sizes, query_offset, arrays.starts, arrays.at_most)
    # (A mask is widened by one that is false: sizes would be more nodes of a graph.)
    nowhere = (tiles.query_first != tiles.query_first) & (tiles.key_first != tiles.key_first)
    possible, certain = (x | nowhere[None] for x in coverage.bounds(rule, tiles, spans))
    return Bounds(possible, certain & possible)


class Flags(NamedTuple):
    """Flagged positions (Longformer's global tokens) that are looked at apart from all tiles.

    Each would open a block, or a tile, by itself. `leaves`: those that read them, and whether the
    flags of each are few enough to be taken out. `by_side`, "query" or "key": where flags are that
    are taken out, `(B or 1, L)`.
    """

    leaves: dict[MaskSpec, Mask]
    by_side: dict[str, Mask]


def flags_of(rule: MaskSpec, leaf_inputs: LeafInputs, most_set: Callable[[Mask], Tensor]) -> Flags:
    """The leaves that open whole columns or rows where they are true, and where they are.

    A pair that such a leaf alone allows, because it stands under `|` and under no `~`, has its key
    (query) among the flagged. `most_set` gives the most flags of an example.
    """
    leaves: dict[MaskSpec, Mask] = {}
    by_side: dict[str, Mask] = {}
    # (A rule that allows all is not masked, so none of its keys may be looked at twice.)
    for leaf in () if rule.constant else dict.fromkeys(leaves_under_or(rule)):
        side = leaf.tiling.opens
        if side is None:
            continue
        read = [getattr(sides, side) for sides in leaf_inputs.get(leaf, {}).values()]
        if [keras.backend.standardize_dtype(flags.dtype) for flags in read] != ["bool"]:
            continue  # it is not what `opens` promises: treated as any other leaf
        (flags,) = read
        count = most_set(flags)
        length = masks.sizes(flags)[1]
        few = (count <= _MOST_FLAGGED) & (count * _ONE_FLAGGED_IN <= length)
        leaves[leaf], flags = few, flags & few
        by_side[side] = by_side[side] | flags if side in by_side else flags
    return Flags(leaves, by_side)


# --- By NumPy, before anything runs --------------------------------------------------------------


def _extremes(values: np.ndarray, size: int, axis: int) -> list[np.ndarray]:
    starts = np.arange(0, values.shape[1], size)
    return [across(of.reduceat(values, starts, axis=1), axis) for of in (np.minimum, np.maximum)]


NUMPY = Arrays(
    starts=lambda length, size: np.arange(0, length, size),
    at_most=np.minimum,
    extremes=_extremes,
    as_numbers=lambda mask: np.asarray(mask).astype(np.int32),
)
