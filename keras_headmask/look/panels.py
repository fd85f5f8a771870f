"""Panels of a drawn rule: heads with equal masks once, long sequences as tiles."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from keras import ops, tree

from keras_headmask.rules import evaluation, fields, offsets, words
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.coverage import Coverage, coverage
from keras_headmask.rules.protocol import Cuts, cut_out

_LONGEST = {"hm.draw": 64, "hm.plot": 128}  # positions that are drawn one by one
_MOST_PAIRS = 2**22  # that are evaluated at once
_MOST_PAIRS_OF_A_TILE = 2**26
_MOST_PAIRS_IN_ALL = 2**30
_MOST_CELLS = 2**25
_MOST_POSITIONS = 2**24

Labels: TypeAlias = tuple[list[str] | None, list[str] | None]  # of queries, of keys


class Panel(NamedTuple):
    """A mask, and the heads that obey it. `cells`: `Coverage` of each tile, `(rows, columns)`.

    Or the probabilities of a head, in each tile the largest.
    """

    heads: tuple[int, ...]
    cells: np.ndarray


class Panels(NamedTuple):
    """All that is drawn. A tile of `(1, 1)` is one pair of positions.

    Query i stands at position i + `query_offset`. One head stands for all. `others` is the head
    that stands for all that no panel names, where the number of heads is not known.
    """

    panels: list[Panel]
    num_heads: int
    tile: tuple[int, int]
    labels: Labels
    query_offset: int
    others: int | None = None


def panels_of(
    spec: MaskSpec,
    queries: int | None = None,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
    example: int = 0,
    tokens: Any = None,
    tile_size: int | None = None,
    called: str = "hm.draw",
) -> Panels:
    """See `draw`. `called` is the function that draws: a picture shows more positions than text."""
    check_spec(spec, "spec", f"{called}(SPEC, ...)")
    query_offset = offsets.checked_offset(query_offset)
    if not isinstance(query_offset, int):
        raise TypeError("`query_offset` of a drawing must be an int, not a tensor.")
    of_queries, of_keys = _sides(tokens)
    if queries is None:
        if of_queries is None:
            raise ValueError("Give the number of `queries`, or `tokens` to count them by.")
        queries = len(of_queries)
    if keys is None:
        keys = queries if of_keys is None else len(of_keys)
    for name, length in (("queries", queries), ("keys", keys)):
        if fields.whole_number(length, name, at_least=0) > _MOST_POSITIONS:
            raise ValueError(
                f"`{name}` of a drawing must be at most {_MOST_POSITIONS}. Received: {length}."
            )
    tile = tile_of(queries, keys, tile_size, called)
    labels = labels_of(tokens, queries, keys, tile, query_offset)
    num_heads = words.enough_heads(spec) if num_heads is None else num_heads
    groups = head_groups(spec, num_heads)
    lengths = evaluation.Lengths(None, num_heads, queries, keys)
    evaluation.check_inputs(spec, mask_inputs, lengths, query_offset, f"{called}(spec, ...)")
    bound = evaluation.bind(spec, mask_inputs, queries, keys, query_offset)
    values = tree.flatten(bound.values)
    batch = max((int(value.shape[0]) for value in values if value is not None), default=1)
    if batch != 1:  # else it serves every example
        check_example(example, batch)
    count = -(-queries // tile[0]) * -(-keys // tile[1]) * num_heads
    if count > _MOST_CELLS:
        raise ValueError(
            f"A drawing has at most {_MOST_CELLS} signs; {num_heads} heads of {queries} x {keys} "
            f"positions in tiles of {tile[0]} x {tile[1]} have {count}. Draw fewer positions or "
            "heads, or larger tiles."
        )
    if tile == (1, 1):  # every pair is looked at
        known = [np.full((queries, keys), Coverage.SOME, np.int8) for _ in groups]
    else:
        known = [coverage(rule, queries, keys, *tile, query_offset) for rule, _ in groups]
    unclear, of_a_tile = sum((cells == Coverage.SOME).sum() for cells in known), tile[0] * tile[1]
    if unclear * of_a_tile > _MOST_PAIRS_IN_ALL or (unclear and of_a_tile > _MOST_PAIRS_OF_A_TILE):
        raise ValueError(
            f"{unclear} tiles of {tile[0]} x {tile[1]} pairs of positions are too many to look "
            "into. Draw fewer positions, or pass a smaller `tile_size`."
        )
    folded: dict[Any, tuple[list[int], np.ndarray]] = {}
    for (rule, heads), of_rule in zip(groups, known, strict=True):
        drawn, seen = _cells(rule, heads, bound, tile, example, of_rule)
        for head, cells, pairs in zip(heads, drawn, seen, strict=True):
            # Masks that differ may look alike as tiles.
            key = cells.tobytes(), None if tile == (1, 1) else (rule, pairs)
            folded.setdefault(key, ([], cells))[0].append(head)
    panels = [Panel(tuple(sorted(heads)), cells) for heads, cells in folded.values()]
    free = {head for rule, heads in groups if words.sees_everything(rule) for head in heads}
    panels.sort(key=lambda panel: (not free.isdisjoint(panel.heads), panel.heads))
    return Panels(panels, num_heads, tile, labels, query_offset)


def _cells(
    rule: MaskSpec,
    heads: tuple[int, ...],
    bound: evaluation.Bound,
    tile: tuple[int, int],
    example: int,
    known: np.ndarray,
) -> tuple[np.ndarray, list[int]]:
    """`Coverage` of each tile for each of `heads`: `known`, but exact where that is SOME.

    Also a hash for each head of its own part of a whole mask; 0 where the heads share one.
    """
    cells, seen = np.repeat(known[None], len(heads), axis=0), [0] * len(heads)
    side = max(1, math.isqrt(_MOST_PAIRS // (tile[0] * tile[1])))  # of a square of tiles
    for place in itertools.product(*(range(0, size, side) for size in known.shape)):
        square = tuple(slice(start, start + side) for start in place)
        if not (known[square] == Coverage.SOME).any():
            continue
        rows, columns = (slice(x.start * n, x.stop * n) for x, n in zip(square, tile, strict=True))
        cuts = Cuts(*map(cut_out, (rows, columns, slice(example, example + 1))))
        allowed = ops.convert_to_numpy(evaluation.allowed_tile(rule, bound, heads, cuts))[0]
        shape = bound.query_positions[rows].shape[0], bound.key_positions[columns].shape[0]
        allowed = np.broadcast_to(allowed, (len(allowed), *shape))
        some, every = (reduced(f, allowed, tile) for f in (np.logical_or, np.logical_and))
        cells[:, *square] = some.astype(np.int8) + every  # as `Coverage` counts
        if len(allowed) > 1:
            seen = [hash((s, x.tobytes())) for s, x in zip(seen, allowed, strict=True)]
    return cells, seen


def reduced(function: np.ufunc, values: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Reduce each tile of `(..., queries, keys)` by `function`, such as `np.maximum`."""
    for axis, size in zip((-2, -1), tile, strict=True):
        values = function.reduceat(values, np.arange(0, values.shape[axis], size), axis=axis)
    return values


def check_example(example: int, batch: int) -> None:
    """Raise unless the batch holds number `example`."""
    if not 0 <= example < batch:
        raise ValueError(
            f"`example` must be at least 0 and below the batch size {batch}. Received: {example}."
        )


def tile_of(queries: int, keys: int, tile_size: int | None, called: str) -> tuple[int, int]:
    """The size of tiles, in positions of queries and of keys: powers of 2 unless it is given.

    A side of too many positions becomes at most half as many tiles as are drawn one by one.
    """
    if tile_size is not None:
        return (fields.whole_number(tile_size, "tile_size", at_least=1),) * 2
    longest = _LONGEST[called]
    # The next power of 2 from 2 * n / longest on.
    high, wide = (1 << ((2 * n - 1) // longest).bit_length() for n in (queries, keys))
    return high if queries > longest else 1, wide if keys > longest else 1


# --- Names ---------------------------------------------------------------------------------------


def head_names(heads: Sequence[int], others: int | None = None) -> str:
    """Head numbers with neighbours folded: `heads 0, 2-5`. `others` is as in `Panels`."""
    if others in heads:
        return "all other heads"
    ends = (dict.fromkeys((run[0], run[-1])) for run in words.runs(heads))
    text = ", ".join("-".join(map(str, of_run)) for of_run in ends)
    return f"head{'s' if len(heads) > 1 else ''} {text}"


def labels_of(
    tokens: Any, queries: int, keys: int, tile: tuple[int, int], query_offset: int = 0
) -> Labels:
    """The labels of queries and keys, out of one sequence of tokens for both or a pair.

    Tiles have none. Long ones are shortened in the middle, since many begin alike.
    """
    query, key = _sides(tokens)
    is_shared = query is not None and query is key and len(query) == keys
    if query is not None and is_shared and 0 <= query_offset <= keys - queries:
        query = query[query_offset : query_offset + queries]
    for name, labels, length in (("queries", query, queries), ("keys", key, keys)):
        if labels is not None and len(labels) != length:
            raise ValueError(
                f"`tokens` must hold a label for each position: {len(labels)} for {length} {name}. "
                "Where queries and keys are different sequences, pass a pair (query_tokens, "
                "key_tokens)."
            )
    return query if tile[0] == 1 else None, key if tile[1] == 1 else None


def _sides(tokens: Any) -> Labels:
    is_pair = isinstance(tokens, tuple) and len(tokens) == 2
    if is_pair and not any(isinstance(side, (str, bytes, int)) for side in tokens):
        return _texts(tokens[0]), _texts(tokens[1])
    labels = _texts(tokens)
    return labels, labels


def _texts(tokens: Any) -> list[str] | None:
    if tokens is None:
        return None
    is_list = np.iterable(tokens) and not isinstance(tokens, (str, bytes, Mapping))
    labels = list(tokens) if is_list else []
    if not is_list or any(getattr(label, "ndim", 0) for label in labels):
        raise TypeError(
            "`tokens` must be a list of labels, one for each position of one example, or a pair of "
            "lists (query_tokens, key_tokens): tokenizer.tokenize(text), or text.split()."
        )
    texts = [x.decode(errors="replace") if isinstance(x, bytes) else str(x) for x in labels]
    texts = [text if text.isprintable() else repr(text)[1:-1] for text in texts]
    return [text if len(text) <= 16 else f"{text[:11]}…{text[-4:]}" for text in texts]
