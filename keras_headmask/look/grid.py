"""What a drawing shows, made once for text and for figures: panels of cells, and their names."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask.rules import base, evaluation, words
from keras_headmask.rules.algebra import Coverage
from keras_headmask.rules.base import MaskSpec, check_spec, whole_number
from keras_headmask.rules.protocol import Sides

IN_TEXT, IN_PICTURES = 64, 128  # positions that are drawn one by one
_MOST_PAIRS = 2**26


class Panel(NamedTuple):
    """One table of cells, `(rows, columns)`: the `Coverage` of a tile each, or a number.

    Where it is `hidden` a cell is not shown; where it is `crossed` it is wrong.
    """

    title: str
    cells: np.ndarray
    hidden: Any = False
    crossed: Any = False


class Grid(NamedTuple):
    """All that is drawn. A tile of 1 is one pair of positions; tokens name rows and columns.

    `legend` names each `Coverage`, and "hidden" and "crossed" cells. `scale` says what numbers
    are, from 0 to `most`; a `gamma` below 1 spreads the small ones.
    """

    panels: list[Panel]
    caption: Sequence[str] = ()
    rows: list[str] | None = None
    columns: list[str] | None = None
    tile: int = 1
    axes: tuple[str, str] = ("queries", "keys")
    legend: Mapping[Any, str] = {}
    scale: str = ""
    most: float = 1.0
    gamma: float = 1.0


def grid_of(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    tokens: Any = None,
    query_offset: int = 0,
    tile_size: int | None = None,
    called: str = "hm.draw",
) -> Grid:
    """See `draw`. `called` is the function that draws: a picture shows more positions than text."""
    check_spec(spec, "spec", f"{called}(SPEC, ...)")
    names = texts_of(tokens)
    if queries is None and names is None:
        raise ValueError("Give the number of `queries`, or `tokens` to count them by.")
    queries = len(names or ()) if queries is None else queries
    keys = (queries if names is None else len(names)) if keys is None else keys
    whole_number(queries, "queries", at_least=0)
    whole_number(keys, "keys", at_least=0)
    whole_number(query_offset, "query_offset")
    if queries * keys > _MOST_PAIRS:
        raise ValueError(f"Draw fewer positions: {queries} x {keys} pairs are over {_MOST_PAIRS}.")
    tile = tile_of(queries, keys, IN_TEXT if called == "hm.draw" else IN_PICTURES, tile_size)
    rows, columns = labels_of(names, queries, keys, tile, query_offset)
    count = base.enough_heads(spec) if num_heads is None else num_heads
    others = count - 1 if num_heads is None else None
    groups = base.head_groups(spec, count)
    lengths = evaluation.Lengths(None, count, queries, keys)
    evaluation.check_inputs(spec, mask_inputs, lengths, query_offset, f"{called}(spec, ...)")
    bound = evaluation.bind(spec, mask_inputs, queries, keys, query_offset).changed(_first)
    drawn: dict[int, tuple[list[int], np.ndarray]] = {}  # by mask: equal tiles may hide others
    for rule, heads in groups:
        mask = ops.convert_to_numpy(evaluation.mask_of_heads(rule, bound, heads))[0]
        masks = np.broadcast_to(mask, (len(heads), queries, keys))
        for head, allowed in zip(heads, masks, strict=True):
            some, every = (reduced(f, allowed, tile) for f in (np.logical_or, np.logical_and))
            cells = some.astype("int8") + every  # as `Coverage` counts
            drawn.setdefault(hash(allowed.tobytes()), ([], cells))[0].append(head)
    panels = [
        Panel(head_names(sorted(heads), others) if len(drawn) > 1 else "every head", cells)
        for heads, cells in sorted(drawn.values(), key=lambda x: (others in x[0], min(x[0])))
    ]
    panels.sort(key=lambda panel: bool((panel.cells == Coverage.ALL).all()))
    legend = {Coverage.ALL: "may attend", Coverage.SOME: "some pairs may", Coverage.NONE: "hidden"}
    if tile > 1:
        legend[Coverage.NONE] += f" (tiles of {tile} x {tile} positions)"
    else:
        del legend[Coverage.SOME]
    return Grid(panels, base.sentences(spec, num_heads), rows, columns, tile, legend=legend)


def _first(value: Any) -> Any:
    """The first example of a prepared mask input."""
    if isinstance(value, Sides):
        return Sides(*(None if side is None else side[:1] for side in value))
    return value[:1]


def reduced(function: np.ufunc, values: np.ndarray, tile: int) -> np.ndarray:
    """Reduce each tile of `(..., queries, keys)` by `function`, such as `np.maximum`."""
    for axis in (-2, -1):
        values = function.reduceat(values, np.arange(0, values.shape[axis], tile), axis=axis)
    return values


def tile_of(queries: int, keys: int, most: int, tile_size: int | None = None) -> int:
    """Positions to a side of a tile: a power of 2 that leaves `most` / 2 tiles to a side, or 1."""
    if tile_size is not None:
        return whole_number(tile_size, "tile_size", at_least=1)
    longest = max(queries, keys)
    return 1 << ((2 * longest - 1) // most).bit_length() if longest > most else 1


def head_names(heads: Sequence[int], others: int | None = None) -> str:
    """Numbers with neighbours folded: `heads 0, 2-5`. `others` stands for all heads left."""
    if others in heads:
        return "all other heads"
    runs = (f"{x[0]}-{x[-1]}" if len(x) > 1 else f"{x[0]}" for x in words.runs(heads))
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(runs)}"


def labels_of(
    names: list[str] | None, queries: int, keys: int, tile: int, query_offset: int = 0
) -> tuple[list[str] | None, list[str] | None]:
    """The names of rows and of columns, which are tokens of one sequence; tiles have none."""
    if names is None or tile > 1:
        return None, None
    rows = names[query_offset : query_offset + queries] if query_offset >= 0 else []
    if len(names) != keys or len(rows) != queries:
        raise ValueError(
            "`tokens` must hold a label for each key, and queries are among the keys. Received "
            f"{len(names)} for {keys} keys, {len(rows)} of them for {queries} queries."
        )
    return rows, names


def texts_of(tokens: Any) -> list[str] | None:
    """Labels as they are shown; long ones are cut in the middle, since many begin alike."""
    if tokens is None:
        return None
    if isinstance(tokens, (str, bytes)):
        raise TypeError("`tokens` must be a list of labels, such as text.split().")
    texts = [x.decode(errors="replace") if isinstance(x, bytes) else str(x) for x in tokens]
    texts = [text if text.isprintable() else repr(text)[1:-1] for text in texts]
    return [text if len(text) <= 16 else f"{text[:11]}…{text[-4:]}" for text in texts]
