"""Rules as text, to look at."""

from collections.abc import Mapping
from typing import Any

from keras_headmask.look.grid import Grid, grid_of
from keras_headmask.rules.base import MaskSpec

_WIDEST = 100  # characters; wider headings stand on end
_SIGNS = "0+1"  # by `Coverage`


def draw(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    tokens: Any = None,
    query_offset: int = 0,
    tile_size: int | None = None,
) -> str:
    """The mask that `spec` makes, a row for each query: 1 = may attend, 0 = hidden.

    Heads with equal masks are drawn once, heads that see everything last. Sequences of more than 64
    positions are drawn as tiles, without tokens: 1 = every pair of the tile may attend, + = some
    pairs, 0 = none. Of a batch the first example is drawn.

    Args:
        spec: A `MaskSpec`.
        queries: Number of queries; as many as `tokens` by default.
        keys: Number of keys; as many as `tokens`, or as queries, by default.
        num_heads: Number of heads; by default the heads that `spec` names, and all others.
        mask_inputs: The tensors `spec` reads, by name.
        tokens: A label for each position.
        query_offset: Query i stands at position i + `query_offset`.
        tile_size: Positions to a side of a tile; 1 draws every position. By default a power of 2.

    Returns:
        The drawing, in lines.

    Raises:
        TypeError: if `spec` is not a spec, `tokens` are one text, or a mask input holds floats.
        ValueError: if sizes, tokens or mask inputs do not fit, or there are over 2^26 pairs.

    >>> from keras_headmask import PerHead, SameSentence, Window
    >>> print(draw(PerHead({0: Window(before=0, after=0)}), queries=2, num_heads=4))
    head 0:
    1 0
    0 1
    heads 1-3:
    1 1
    1 1
    >>> ids = {"token_ids": [[5, 9, 4, 9]]}
    >>> print(draw(SameSentence(9), mask_inputs=ids, tokens=["yes", ".", "no", "."]))
        yes . no .
    yes   1 1  0 0
    .     1 1  0 0
    no    0 0  1 1
    .     0 0  1 1
    """
    return text_of(
        grid_of(spec, queries, keys, num_heads, mask_inputs, tokens, query_offset, tile_size)
    )


def text_of(grid: Grid) -> str:
    """A table of signs for each panel."""
    lines = []
    if grid.tile > 1:
        lines.append(f"tiles of {grid.tile} x {grid.tile} positions: 1 all, + some, 0 none")
    for panel in grid.panels:
        lines += [f"{panel.title}:"] if len(grid.panels) > 1 else []
        table, heading = [[_SIGNS[x] for x in row] for row in panel.cells], 0
        if grid.columns is not None:
            widths = [max(1, len(name)) for name in grid.columns]
            if sum(widths) + len(widths) <= _WIDEST:
                table, heading = [grid.columns, *table], 1
                table = [[x.rjust(n) for x, n in zip(row, widths, strict=True)] for row in table]
            else:  # letters beneath each other
                heading = max(widths)
                table[:0] = map(list, zip(*(x.rjust(heading) for x in grid.columns), strict=True))
        names = [""] * heading + (grid.rows or [""] * len(panel.cells))
        width = max(map(len, names), default=0) + (grid.rows is not None)
        cells = (" ".join(row) for row in table)
        lines += [(x.ljust(width) + y).rstrip() for x, y in zip(names, cells, strict=True)]
    return "\n".join(lines)
