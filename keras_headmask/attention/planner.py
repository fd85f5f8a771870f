"""The planner of all kernels: which key blocks a tile of queries meets, by positions and data.

Queries are cut into tiles and keys into blocks. For each tile and block, `coverage` says whether
some pair may be allowed and whether all are. It reads the positions, and the least and greatest
value of each mask input there. Only this module calls it, with the same code for NumPy and every
backend: `gathered.py` knows lengths and positions alone; `tensorflow/plan.py` and
`torch/block_masks.py` look at data, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import algebra
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import Bounds, Sides, Span

# The mask inputs of each leaf that reads some: `Sides`, `(B or 1, L or 1)`, or a whole mask.
LeafInputs: TypeAlias = Mapping[MaskSpec, Mapping[str, Any]]


class Arrays(NamedTuple):
    """The functions of one array library that the planner needs beside operators and slices.

    Args:
        starts: `(length, size, axis)`: every `size`th position below `length`, `(n, 1)` on the axis
            of queries (0) and `(1, n)` on that of keys (1).
        at_most: The element-wise minimum.
        extremes: `(values, size, axis)`: the least and the greatest of every `size` values of
            `(B, L)`, or of booleans as integers, each put on its axis by `across`.
    """

    starts: Callable[[Length, int, int], Tensor]
    at_most: Callable[[Tensor, Length], Tensor]
    extremes: Callable[[Tensor, int, int], Sequence[Tensor]]


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
    flagged: Mapping[MaskSpec, tuple[str, Mask]] | None = None,
) -> Bounds:
    """Bounds of what `rule` (no `PerHead`) allows, broadcastable to `(B, tiles, blocks)`.

    `lengths` counts queries and keys, `sizes` a tile and a block. A leaf that reads a whole mask
    may allow a pair anywhere. For a leaf in `flagged`, flags of that side are taken for the
    opposite where the mask is true: what they open is looked at apart.
    """

    def span(leaf: MaskSpec, name: str, side: str, values: Tensor | None) -> Span | None:
        if values is None or (name in leaf.inputs and side not in leaf.inputs[name].sides):
            return None
        if flagged and leaf in flagged and flagged[leaf][0] == side:
            values = values != flagged[leaf][1]
        axis = 0 if side == "query" else 1
        return Span(*arrays.extremes(values, sizes[axis], axis))

    read = {leaf: leaf_inputs[leaf] for leaf in leaves(rule) if leaf in leaf_inputs}
    spans = {
        leaf: {
            name: Sides(span(leaf, name, "query", sides.query), span(leaf, name, "key", sides.key))
            for name, sides in inputs.items()
        }
        for leaf, inputs in read.items()
        if all(isinstance(value, Sides) for value in inputs.values())
    }
    tiles = algebra.tile_grid(*lengths, *sizes, query_offset, arrays.starts, arrays.at_most)
    return algebra.bounds(rule, tiles, spans)


# --- By NumPy, before anything runs --------------------------------------------------------------


def _extremes(values: np.ndarray, size: int, axis: int) -> list[np.ndarray]:
    if values.dtype == bool:
        values = values.astype(np.int32)
    starts = np.arange(0, values.shape[1], size)
    return [across(of.reduceat(values, starts, axis=1), axis) for of in (np.minimum, np.maximum)]


NUMPY = Arrays(algebra.starts, np.minimum, _extremes)
