"""Checks of one spec: each of its answers against its whole mask.

Attention asks a kind for tiles of any size, and skips what `coverage` calls empty: a kind that
breaks one of these laws gives wrong numbers, and no error.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask.masks import Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.coverage import tile_grid
from keras_headmask.rules.protocol import Bound, Cuts, Places, Sides, Span, cut_out

_ELEMENT_WISE = (
    "Each pair must follow from its `query_positions`, `key_positions` and `inputs` alone: nothing "
    "counts from the corner of a tile, as `np.tril` does, or sums over keys. What needs whole "
    "sequences belongs in `prepare`."
)
_TOGETHER = 3  # tiles, and as many queries and keys in each
_SOUND = (
    "`possible` must be True where any pair is allowed, `certain` only where every one is. In "
    "doubt, say True and False."
)


class Broken(NamedTuple):
    """A law that a spec breaks: how it shows, and what to do."""

    message: str
    way_out: str


class _Trial(NamedTuple):
    """A leaf and its whole mask, `(B or 1, H or 1, T, S)`."""

    leaf: MaskSpec
    bound: Bound
    heads: tuple[int, ...]
    offset: int
    whole: np.ndarray

    def says(self, member: str, problem: str) -> str:
        return f"`{type(self.leaf).__name__}.{member}` {problem}"


def broken_in_json(spec: MaskSpec) -> Iterator[Broken]:
    """How `spec` fails to come back from its JSON."""
    try:
        again = MaskSpec.from_config(json.loads(json.dumps(spec.get_config())))
        problem = "" if again == spec else f"comes back as {again!r}"
        if not problem and hash(again) != hash(spec):
            problem = "comes back equal, but with another hash"
    except Exception as error:  # of the kind's own code
        problem = f"does not come back: {error}"
    if problem:
        way_out = "`get_config` must hold every field as a JSON value, and `from_fields` read it."
        yield Broken(f"{spec!r}, saved as JSON and loaded, {problem}.", way_out)


def broken_in_masks(
    leaf: MaskSpec,
    queries: int,
    keys: int,
    num_heads: int,
    mask_inputs: Mapping[str, Any],
    query_offset: int,
) -> Iterator[Broken]:
    """The laws that a leaf breaks. Lengths and inputs must have been checked.

    `mask_inputs` may hold more than the leaf reads.
    """
    bound = evaluation.bind(leaf, mask_inputs, queries, keys, query_offset)
    heads = tuple(range(num_heads))
    whole = ops.convert_to_numpy(evaluation.allowed_tile(leaf, bound, heads))
    whole = np.broadcast_to(whole, (*whole.shape[:2], queries, keys))
    trial = _Trial(leaf, bound, heads, query_offset, whole)
    yield from _broken_promises(trial)
    quarter, third = ([-(-size // n) for size in (queries, keys)] for n in (4, 3))
    sizes = ((quarter[0], third[1]), (third[0], quarter[1]))
    yield from _broken_pieces(trial, sizes)
    yield from _broken_together(trial)
    for tile in ((1, 1), (5, 7), *sizes):
        yield from _broken_coverage(trial, *tile)


def _broken_promises(trial: _Trial) -> Iterator[Broken]:
    leaf, whole = trial.leaf, trial.whole
    if leaf.constant is not None and (whole != leaf.constant).any():
        problem = f"is {leaf.constant}, but the mask is not so everywhere."
        yield Broken(trial.says("constant", problem), "Leave it out.")
    opens = leaf.tiling.opens
    if opens and (whole != whole.take([0], {"key": 2, "query": 3}[opens])).any():
        problem = f"has opens={opens!r}, but a {opens} is open to some and not to all."
        yield Broken(trial.says("tiling", problem), "Leave `opens` out.")


def _broken_pieces(trial: _Trial, tiles: Iterable[tuple[int, int]]) -> Iterator[Broken]:
    """The first piece of the mask for which `allowed`, asked for it alone, says something else.

    Pieces are examples, and tiles of some sizes.
    """
    batch, _, queries, keys = trial.whole.shape
    pieces = [
        (f"example {i}", slice(i, i + 1), slice(0, queries), slice(0, keys)) for i in range(batch)
    ]
    for size in tiles:
        for i, j in np.ndindex(-(-queries // size[0]), -(-keys // size[1])):
            rows, columns = _part(i, size[0], queries), _part(j, size[1], keys)
            pieces.append((_tile(rows, columns), slice(0, batch), rows, columns))
    for name, examples, rows, columns in pieces:
        expected, where = trial.whole[examples, :, rows, columns], f"for {name} alone"
        cuts = Cuts(*map(cut_out, (rows, columns, examples)))
        try:
            piece = evaluation.allowed_tile(trial.leaf, trial.bound, trial.heads, cuts)
            wrong = ops.convert_to_numpy(piece) != expected
        except Exception as error:  # of the kind's own code
            yield Broken(trial.says("allowed", f"fails {where}: {error}"), _ELEMENT_WISE)
            return
        if wrong.any():
            is_allowed = expected[tuple(np.argwhere(np.broadcast_to(wrong, expected.shape))[0])]
            problem = f"is not element-wise: {where} it {'forbids' if is_allowed else 'allows'} "
            problem += f"{_first(wrong, rows.start, columns.start)}, but not in the whole mask."
            yield Broken(trial.says("allowed", problem), _ELEMENT_WISE)
            return


def _broken_together(trial: _Trial) -> Iterator[Broken]:
    """Whether `allowed` says something else of several tiles at once."""
    batch, _, queries, keys = trial.whole.shape
    number = np.arange(_TOGETHER, dtype="int32")
    examples = (number % batch)[:, None, None, None]
    rows, columns = (
        (number[:, None] * length // _TOGETHER + number[None]) % length
        for length in (queries, keys)
    )
    of_tiles = rows[:, None, :, None], columns[:, None, None]
    in_all = examples * queries + of_tiles[0], examples * keys + of_tiles[1]
    arrays = map(ops.convert_to_tensor, (examples, *of_tiles, *in_all))
    example, row, column, in_rows, in_columns = arrays
    take = functools.partial(ops.take, axis=0)
    places = Places(example, row, column, in_rows, in_columns, take)
    expected = trial.whole[examples, :, of_tiles[0], of_tiles[1]][:, 0].transpose(0, 3, 1, 2)
    where = f"for {_TOGETHER} tiles at once"
    try:
        answer = evaluation.mask_at(trial.leaf, trial.bound, trial.heads, places)
        if (ops.convert_to_numpy(answer) != expected).any():
            yield Broken(trial.says("allowed", f"gives another mask {where}."), _ELEMENT_WISE)
    except Exception as error:  # of the kind's own code
        yield Broken(trial.says("allowed", f"fails {where}: {error}"), _ELEMENT_WISE)


def _broken_coverage(trial: _Trial, tile_queries: int, tile_keys: int) -> Iterator[Broken]:
    """The first tile of which `coverage` says something wrong."""
    whole, read = trial.whole, trial.bound.leaf_inputs.get(trial.leaf, {})
    if not all(isinstance(value, Sides) for value in read.values()):
        return  # attention does not call `coverage` for whole masks
    queries, keys = whole.shape[2:]
    rows, columns = np.arange(0, queries, tile_queries), np.arange(0, keys, tile_keys)
    spans = {
        name: Sides(_span(query, rows, 2), _span(key, columns, 1))
        for name, (query, key) in read.items()
    }
    every, some = (
        of.reduceat(of.reduceat(whole, rows, axis=2), columns, axis=3)
        for of in (np.logical_and, np.logical_or)
    )
    tiles = tile_grid(queries, keys, tile_queries, tile_keys, trial.offset)
    try:
        possible, certain = (np.asarray(x) for x in trial.leaf.coverage(tiles, spans))
    except Exception as error:  # of the kind's own code
        way_out = "It must return two arrays of booleans, `possible` and `certain`, for all tiles."
        yield Broken(trial.says("coverage", f"fails: {error}."), way_out)
        return
    too_little = some.any(1) & ~possible
    too_much = ~every.all(1) & possible & certain
    for wrong, claimed, fact in ((too_little, "no", "is"), (too_much, "every", "is not")):
        if wrong.any():
            i, j = np.argwhere(wrong)[0][-2:]
            where = _tile(_part(i, tile_queries, queries), _part(j, tile_keys, keys))
            problem = f"says that {claimed} pair of {where} is allowed, but one {fact}."
            yield Broken(trial.says("coverage", problem), _SOUND)
            return


def _span(values: Tensor | None, starts: np.ndarray, new_axis: int) -> Span | None:
    """The least and greatest value of each tile, `(B, n, 1)` or `(B, 1, n)`; booleans as 0, 1."""
    if values is None:
        return None
    numbers = ops.convert_to_numpy(values)
    numbers = numbers.astype("int32") if numbers.dtype == bool else numbers
    low, high = (of.reduceat(numbers, starts, axis=1) for of in (np.minimum, np.maximum))
    return Span(np.expand_dims(low, new_axis), np.expand_dims(high, new_axis))


def _part(number: int, size: int, length: int) -> slice:
    return slice(number * size, min((number + 1) * size, length))


def _tile(rows: slice, columns: slice) -> str:
    return f"queries {rows.start} to {rows.stop - 1} and keys {columns.start} to {columns.stop - 1}"


def _first(wrong: np.ndarray, row: int = 0, column: int = 0) -> str:
    """The first pair of `wrong`, a part of the mask that begins at `row` and `column`."""
    i, j = np.argwhere(wrong)[0][-2:]
    return f"query {i + row} to see key {j + column}"
