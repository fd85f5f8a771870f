"""Rules as text, to look at."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_headmask.look import panels
from keras_headmask.rules.base import MaskSpec

_WIDEST = 100  # characters; wider headings stand on end
SIGNS = np.array(["0", "+", "1"])  # by `Coverage`


def draw(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
    example: int = 0,
    tokens: Any = None,
    tile_size: int | None = None,
) -> str:
    """The mask that `spec` makes, a row for each query: 1 = may attend, 0 = hidden.

    Sequences of more than 64 positions are drawn as tiles, without tokens: 1 = every pair of the
    tile may attend, + = some pairs, 0 = none.

    Args:
        spec: A `MaskSpec`.
        queries: Number of queries; as many as `tokens` by default.
        keys: Number of keys; as many as `tokens`, or as queries, by default.
        num_heads: Number of heads. Heads with equal masks are drawn once, under their numbers,
            heads that see everything last. By default one head for a rule that all heads share,
            else one more than `spec` names, so that the last stands for the rest.
        mask_inputs: The tensors `spec` reads, by name.
        query_offset: Query i stands at position i + `query_offset`.
        example: Which example of the batch to draw.
        tokens: A label for each position, or a pair of lists `(query_tokens, key_tokens)`.
        tile_size: Positions to a side of a tile; 1 draws every position. By default a power of 2.

    Returns:
        The drawing, in lines.

    Raises:
        TypeError: if `spec` is not a spec, `tokens` are not labels, or a mask input holds floats.
        ValueError: if lengths, tokens or mask inputs do not fit, `spec` names a head >=
            `num_heads`, `example` is >= the batch size, or the drawing has more than 2^24
            positions to a side, 2^25 signs, or 2^30 pairs to look into.

    >>> from keras_headmask import PerHead, SameSentence, Window
    >>> print(draw(PerHead({0: Window(before=0, after=0)}), queries=2, num_heads=4))
    head 0:
    1 0
    0 1
    heads 1-3:
    1 1
    1 1
    >>> token_ids = [[5, 9, 4, 9]]
    >>> tokens = ["yes", ".", "no", "."]
    >>> print(draw(SameSentence(9), mask_inputs={"token_ids": token_ids}, tokens=tokens))
        yes . no .
    yes   1 1  0 0
    .     1 1  0 0
    no    0 0  1 1
    .     0 0  1 1
    """
    drawn = panels.panels_of(
        spec, queries, keys, num_heads, mask_inputs, query_offset, example, tokens, tile_size
    )
    return text_of(drawn)


def text_of(drawn: panels.Panels) -> str:
    """A table of signs for each panel."""
    lines = []
    if drawn.tile != (1, 1):
        lines.append("tiles of {} x {} positions: 1 all, + some, 0 none".format(*drawn.tile))
    rows, columns = drawn.labels
    for panel in drawn.panels:
        if len(drawn.panels) > 1:
            lines.append(f"{panels.head_names(panel.heads, drawn.others)}:")
        table, heading = SIGNS[panel.cells].tolist(), 0  # lines of the heading
        if columns is not None:
            widths = [max(1, len(name)) for name in columns]
            if sum(widths) + len(widths) <= _WIDEST:
                table, heading = [columns, *table], 1
                table = [[x.rjust(n) for x, n in zip(row, widths, strict=True)] for row in table]
            else:  # letters beneath each other
                heading = max(widths)
                table[:0] = zip(*(name.rjust(heading) for name in columns), strict=True)
        names = [""] * len(table) if rows is None else [""] * heading + rows
        width = max(map(len, names), default=0) + (rows is not None)
        cells = (" ".join(row) for row in table)
        lines += [(x.ljust(width) + y).rstrip() for x, y in zip(names, cells, strict=True)]
    return "\n".join(lines)
