"""The tiled way where lengths are known: a Python loop over tiles of queries, on every backend.

Each tile meets the runs of keys that the positions alone allow; what a rule reads from data is
masked, not skipped. Gradients are the backend's own: keys and values are split into blocks once and
each tile joins the blocks it needs, since the gradient of a slice would be as long as the sequence.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask import coverage
from keras_headmask.evaluation import Bound, Cuts, allowed_tile
from keras_headmask.specs import MaskSpec

_BLOCK = 64  # keys that are kept or skipped together
_HIDDEN = -1e9  # in place of a hidden score, so that none is too large to be hidden


class Plan(NamedTuple):
    """For each tile of queries the runs of keys to look at, and whether they need no mask."""

    tile: int
    block: int
    runs: list[list[tuple[int, int]]]
    needs_no_mask: list[bool]

    def share(self, keys: int) -> float:
        """The share of the score matrix that is computed."""
        seen = sum(stop - start for runs in self.runs for start, stop in runs)
        return seen / max(keys * len(self.runs), 1)


def plan(rule: MaskSpec, queries: int, keys: int, tile: int, query_offset: int) -> Plan:
    block = _BLOCK
    tiles = coverage.tile_grid(queries, keys, tile, block, query_offset)
    possible, certain = coverage.bounds(rule, tiles)
    shape = (tiles.query_first.shape[0], tiles.key_first.shape[1])
    possible, certain = (np.broadcast_to(x, shape) for x in (possible, certain))
    needs_no_mask = (certain == possible).all(1) & possible.any(1)
    # A tile that may see nothing looks at the first keys, all masked: gradients are 0, not lost.
    runs = [found or [(0, min(block, keys))] for found in coverage.runs(possible, block, keys)]
    return Plan(tile, block, runs, needs_no_mask.tolist())


def attend(
    rule: MaskSpec,
    heads: tuple[int, ...],
    bound: Bound,
    plan: Plan,
    query: Any,
    key: Any,
    value: Any,
) -> Any:
    """The context `(B, H, T, Dv)` for `query` `(B, H, T, D)`, already scaled, `key` and `value`."""
    tiles = _split(query, plan.tile)
    keys, values = _split(key, plan.block), _split(value, plan.block)
    parts = []
    for number, (tile, runs) in enumerate(zip(tiles, plan.runs, strict=True)):
        start, stop = number * plan.tile, number * plan.tile + tile.shape[2]
        # Not `matmul`, which Keras computes in float32 on torch, float64 or not.
        scores = ops.einsum("bhtd,bhsd->bhts", tile, _join_blocks(keys, runs, plan.block))
        alive = None
        if not plan.needs_no_mask[number]:
            cuts = Cuts(
                lambda x, axis, a=start, b=stop: x[(slice(None),) * axis + (slice(a, b),)],
                lambda x, axis, runs=runs: _join(x, axis, runs),
                lambda x, axis: x,
            )
            allowed = allowed_tile(rule, bound, heads, cuts)
            scores = ops.where(allowed, scores, ops.cast(_HIDDEN, scores.dtype))
            alive = ops.any(allowed, axis=-1, keepdims=True)
        probabilities = ops.softmax(scores, axis=-1)
        context = ops.einsum(
            "bhts,bhsd->bhtd", probabilities, _join_blocks(values, runs, plan.block)
        )
        if alive is not None:
            context = ops.where(alive, context, ops.zeros_like(context))
        parts.append(context)
    return ops.concatenate(parts, axis=2)


def _split(tensor: Any, size: int) -> list:
    """`tensor` cut along its axis of positions, every `size`."""
    edges = list(range(size, tensor.shape[2], size))
    return ops.split(tensor, edges, axis=2) if edges else [tensor]


def _join_blocks(blocks: list, runs: list[tuple[int, int]], size: int) -> Any:
    needed = [block for start, stop in runs for block in blocks[start // size : -(-stop // size)]]
    return needed[0] if len(needed) == 1 else ops.concatenate(needed, axis=2)


def _join(tensor: Any, axis: int, runs: list[tuple[int, int]]) -> Any:
    pieces = [tensor[(slice(None),) * axis + (slice(a, b),)] for a, b in runs]
    return pieces[0] if len(pieces) == 1 else ops.concatenate(pieces, axis=axis)
