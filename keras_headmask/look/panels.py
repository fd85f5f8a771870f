"""What is drawn of a rule: heads with equal masks once, long sequences as tiles."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask.rules import config, evaluation, words
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.coverage import Coverage, coverage
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.protocol import Sides

_MOST_PAIRS = 2**22  # that are evaluated at once
_MOST_PAIRS_OF_A_TILE = 2**26
_MOST_PAIRS_IN_ALL = 2**30
_MOST_CELLS = 2**25
_MOST_POSITIONS = 2**24


class Panel(NamedTuple):
    """A mask, and the heads that obey it. `cells`: `Coverage` of each tile, `(rows, columns)`."""

    heads: tuple[int, ...]
    cells: np.ndarray


class Panels(NamedTuple):
    """All that is drawn. A tile of `(1, 1)` is one pair of positions; `labels` are `None` or texts.

    Query i stands at position i + `query_offset`. One head stands for all. `others` is the head
    that stands for all that no panel names, where the number of heads is not known.
    """

    panels: list[Panel]
    num_heads: int
    tile: tuple[int, int]
    labels: tuple[list[str] | None, list[str] | None]
    query_offset: int
    others: int | None = None


def panels_of(
    spec: MaskSpec,
    queries: int | None,
    keys: int | None,
    num_heads: int | None,
    mask_inputs: Mapping[str, Any] | None,
    query_offset: int,
    example: int,
    tokens: Any,
    tile_size: int | None,
    longest: int,
    called: str = "hm.draw",
) -> Panels:
    """See `draw`. Sequences above `longest` positions become tiles, unless `tile_size` says how.

    `called` is the function that draws, for hints.
    """
    check_spec(spec, "spec", f"{called}(SPEC, ...)")
    query_offset = evaluation.checked_offset(query_offset)
    if not isinstance(query_offset, int):
        raise TypeError("`query_offset` of a drawing must be an int, not a tensor.")
    sides = _sides(tokens)
    if queries is None and sides[0] is None:
        raise ValueError("Give the number of `queries`, or `tokens` to count them by.")
    queries = len(sides[0]) if queries is None else queries
    if keys is None:
        keys = len(sides[1]) if sides[1] is not None else queries
    for name, length in (("queries", queries), ("keys", keys)):
        if config.whole_number(length, name, at_least=0) > _MOST_POSITIONS:
            raise ValueError(
                f"`{name}` of a drawing must be at most {_MOST_POSITIONS}. Received: {length}."
            )
    labels = labels_of(tokens, queries, keys, query_offset)
    num_heads = words.enough_heads(spec) if num_heads is None else num_heads
    groups = head_groups(spec, num_heads)
    lengths = evaluation.Lengths(None, num_heads, queries, keys)
    evaluation.check_inputs(spec, mask_inputs, lengths, query_offset, f"{called}(spec, ...)")
    bound = evaluation.bind(spec, mask_inputs, queries, keys, query_offset)
    check_example(example, _batch_size(bound))
    tile = tile_of(queries, keys, tile_size, longest)
    count = -(-queries // tile[0]) * -(-keys // tile[1]) * num_heads
    if count > _MOST_CELLS:
        raise ValueError(
            f"A drawing has at most {_MOST_CELLS} signs; {num_heads} heads of {queries} x {keys} "
            f"positions in tiles of {tile[0]} x {tile[1]} have {count}. Draw fewer positions or "
            "heads, or larger tiles."
        )
    pairs, of_a_tile = 0, tile[0] * tile[1]
    folded: dict[Any, list[int]] = {}
    cells: dict[Any, np.ndarray] = {}
    for rule, heads in groups:
        known, unclear = _known(rule, (queries, keys), tile, query_offset)
        sizes = [(r.stop - r.start) * (c.stop - c.start) for r, c in unclear]
        pairs += sum(sizes) * of_a_tile
        if pairs > _MOST_PAIRS_IN_ALL:
            raise ValueError(
                f"More than {_MOST_PAIRS_IN_ALL} pairs of positions would have to be looked into "
                f"for {queries} queries and {keys} keys. Draw fewer positions."
            )
        drawn, whole = _cells(rule, heads, bound, (queries, keys), tile, example, known, unclear)
        for head, drawing, digest in zip(heads, drawn, whole, strict=True):
            # Masks that differ may look alike as tiles.
            key = drawing.tobytes(), None if tile == (1, 1) else (rule, digest)
            folded.setdefault(key, []).append(head)
            cells[key] = drawing
    panels = [Panel(tuple(sorted(heads)), cells[key]) for key, heads in folded.items()]
    free = {head for rule, heads in groups if words.sees_everything(rule) for head in heads}
    panels.sort(key=lambda panel: (not free.isdisjoint(panel.heads), panel.heads))
    return Panels(panels, num_heads, tile, labels, query_offset)


def _known(
    rule: MaskSpec, lengths: tuple[int, int], tile: tuple[int, int], query_offset: int
) -> tuple[np.ndarray, list[tuple[slice, slice]]]:
    """`Coverage` of each tile, as far as the rule says it, and the rectangles to look into."""
    if tile == (1, 1):
        known = np.full(lengths, Coverage.SOME, np.int8)
    else:
        known = coverage(rule, *lengths, *tile, query_offset).astype(np.int8)
    return known, list(_unclear(known == Coverage.SOME, tile))


def _cells(
    rule: MaskSpec,
    heads: tuple[int, ...],
    bound: evaluation.Bound,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    example: int,
    known: np.ndarray,
    unclear: list[tuple[slice, slice]],
) -> tuple[np.ndarray, list[bytes]]:
    """`Coverage` of each tile for each of `heads`, and a digest of what was evaluated for it.

    Tiles of which the rule allows all or nothing are not looked into; all others are, exactly.
    """
    cells = np.repeat(known[None], len(heads), axis=0)
    digests = [hashlib.sha256() for _ in heads]
    for rows, columns in unclear:
        places = tuple(
            slice(part.start * size, min(part.stop * size, length))
            for part, size, length in zip((rows, columns), tile, lengths, strict=True)
        )
        cuts = evaluation.Cuts(_cut(places[0]), _cut(places[1]), _cut(slice(example, example + 1)))
        allowed = ops.convert_to_numpy(evaluation.allowed_tile(rule, bound, heads, cuts))
        shape = (allowed.shape[1], *(place.stop - place.start for place in places))
        allowed = np.broadcast_to(allowed[0], shape)
        cells[:, rows, columns] = summarised(allowed, tile)
        if len(allowed) > 1:  # a whole mask that was handed in, with a part for each head
            for digest, mask in zip(digests, allowed, strict=True):
                digest.update(np.packbits(mask).tobytes())
    return cells, [digest.digest() for digest in digests]


def _unclear(unclear: np.ndarray, tile: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Rectangles of tiles that hold all of the unclear ones, not too many pairs in each."""
    if unclear.any() and tile[0] * tile[1] > _MOST_PAIRS_OF_A_TILE:
        raise ValueError(
            f"Tiles of {tile[0]} x {tile[1]} positions are too large to look into. Draw fewer "
            "positions, or pass a smaller `tile_size`."
        )
    count, width = unclear.shape
    step = max(1, _MOST_PAIRS // max(1, tile[0] * tile[1] * width))
    wide = max(1, _MOST_PAIRS // max(1, tile[0] * tile[1]))
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        of_rows = np.flatnonzero(unclear[rows].any(axis=0))
        while of_rows.size:
            stop = min(int(of_rows[0]) + wide, int(of_rows[-1]) + 1)
            yield rows, slice(int(of_rows[0]), stop)
            of_rows = of_rows[of_rows >= stop]


def summarised(allowed: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """`Coverage` of the tiles of a boolean mask `(..., queries, keys)`."""
    every = np.asarray(allowed, bool)
    some = every
    for axis, size in zip((-2, -1), tile, strict=True):
        starts = np.arange(0, every.shape[axis], size)
        some = np.logical_or.reduceat(some, starts, axis=axis)
        every = np.logical_and.reduceat(every, starts, axis=axis)
    return some.astype(np.int8) + every


def _cut(place: slice) -> Any:
    """Cut `place` out of an axis; one of size 1 serves every place."""

    def cut(tensor: Any, axis: int) -> Any:
        if tensor.shape[axis] == 1:
            return tensor
        return tensor[(*(slice(None),) * axis, place)]

    return cut


def _batch_size(bound: evaluation.Bound) -> int:
    values = [value for inputs in bound.leaf_inputs.values() for value in inputs.values()]
    tensors = [x for v in values for x in (v if isinstance(v, Sides) else (v,)) if x is not None]
    sizes = {int(tensor.shape[0]) for tensor in tensors} - {1}
    return sizes.pop() if sizes else 1


def check_example(example: int, batch: int) -> None:
    """Raise unless the batch holds number `example`; what has one example serves for all."""
    if batch != 1 and not 0 <= example < batch:
        raise ValueError(
            f"`example` must be at least 0 and below the batch size {batch}. Received: {example}."
        )


def tile_of(queries: int, keys: int, tile_size: int | None, longest: int) -> tuple[int, int]:
    """The size of tiles, in positions of queries and of keys: powers of 2 unless it is said.

    What is longer than `longest` positions becomes at most half as many tiles.
    """
    if tile_size is not None:
        return (config.whole_number(tile_size, "tile_size", at_least=1),) * 2
    sizes = [1, 1]
    for side, length in enumerate((queries, keys)):
        while length > longest and length * 2 > longest * sizes[side]:
            sizes[side] *= 2
    return sizes[0], sizes[1]


# --- Names ---------------------------------------------------------------------------------------


def head_names(heads: Sequence[int], others: int | None = None) -> str:
    """Head numbers with neighbours folded: `heads 0, 2-5`. `others` is as in `Panels`."""
    if others in heads:
        return "all other heads"
    ends = (dict.fromkeys((run[0], run[-1])) for run in words.runs(heads))
    text = ", ".join("-".join(map(str, of_run)) for of_run in ends)
    return f"head{'s' if len(heads) > 1 else ''} {text}"


def labels_of(
    tokens: Any, queries: int, keys: int, query_offset: int = 0
) -> tuple[list[str] | None, list[str] | None]:
    """The labels of queries and keys, out of one sequence of tokens for both or a pair."""
    query, key = _sides(tokens)
    is_shared = query is not None and query is key
    if is_shared and len(query) == keys and 0 <= query_offset <= keys - queries:
        query = query[query_offset : query_offset + queries]
    for name, labels, length in (("queries", query, queries), ("keys", key, keys)):
        if labels is not None and len(labels) != length:
            raise ValueError(
                f"`tokens` must hold a label for each position: {len(labels)} for {length} {name}. "
                "Where queries and keys are different sequences, pass a pair (query_tokens, "
                "key_tokens)."
            )
    return query, key


def _sides(tokens: Any) -> tuple[list[str] | None, list[str] | None]:
    if tokens is None:
        return None, None
    is_pair = isinstance(tokens, tuple) and len(tokens) == 2
    if is_pair and not any(isinstance(side, (str, bytes, int)) for side in tokens):
        query, key = (None if side is None else _texts(side) for side in tokens)
        return query, key
    labels = _texts(tokens)
    return labels, labels


def _texts(tokens: Any) -> list[str]:
    try:
        tokens = None if isinstance(tokens, (str, bytes, Mapping)) else list(tokens)
    except TypeError:
        tokens = None
    if tokens is None or any(getattr(token, "ndim", 0) for token in tokens):
        raise TypeError(
            "`tokens` must be a list of labels, one for each position of one example, or a pair of "
            "lists (query_tokens, key_tokens): tokenizer.tokenize(text), or text.split()."
        )
    texts = [t.decode(errors="replace") if isinstance(t, bytes) else str(t) for t in tokens]
    return [text if text.isprintable() else repr(text)[1:-1] for text in texts]


def shortened(label: str, length: int) -> str:
    """`label` in at most `length` characters: both ends of it, since many share their beginning."""
    return label if len(label) <= length else f"{label[: length - 5]}…{label[-4:]}"
