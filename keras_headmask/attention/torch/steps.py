"""Which queries meet which keys, decided by NumPy before a loop runs, by positions and by data.

What TensorFlow decides in its graph is decided here where the mask inputs can be read: by what
`coverage` says of the least and greatest value of each in a tile. Runs of keys are exact where the
sequences are short enough to look at each key.
"""

import itertools
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.planner import NUMPY, TOGETHER, LeafInputs, bounds_of, flags_of
from keras_headmask.rules import coverage

_MOST_CELLS = 2**17  # tiles x blocks of keys x examples to look at: less than a millisecond
_FEWEST_PAIRS = 2**20  # of one example, all its heads, for it to have steps of its own
_FAR = 2**40  # beyond any position

Run: TypeAlias = tuple[int, int]  # from the first position up to the last, which is not in it


class Step(NamedTuple):
    """Some queries of some examples, and the keys that they may see.

    `rows` is a run of queries, or positions in any order. `others` are keys beside the runs. With
    `needs_mask` some pair may be hidden.
    """

    examples: Run
    rows: Run | tuple[int, ...]
    is_run: bool
    runs: tuple[Run, ...]
    others: tuple[int, ...] = ()
    needs_mask: bool = True

    @property
    def keys(self) -> int:
        """How many keys it looks at."""
        return sum(stop - start for start, stop in self.runs) + len(self.others)


def steps_of(
    part: Part, inputs: LeafInputs, batch: int, queries: int, keys: int, query_offset: int
) -> list[Step]:
    """The steps that together compute `part`. Queries that no step has see nothing.

    A query may stand in several steps; what the last of them gives counts.
    """
    examples = batch
    if len(part.heads) * queries * keys < _FEWEST_PAIRS or not _differ(inputs):
        examples = 1
    flags = flags_of(part.rule, inputs, part.tuning, lambda x: x.sum(1).max(initial=0))
    has_few = any(flags.leaves.values())
    block, tiles = 1, -(-queries // part.tile)
    while block < keys and examples * tiles * -(-keys // block) > _MOST_CELLS:
        block *= 2
    arrays = TOGETHER if examples == 1 else NUMPY
    sizes = (queries, keys), (part.tile, block)
    bounds = bounds_of(part.rule, inputs, *sizes, query_offset, arrays, flags.leaves)
    shape = examples, tiles, -(-keys // block)
    possible, certain = (np.broadcast_to(x, shape) for x in bounds)
    looked_at = _looked_at(possible, block, part.tuning.block)
    runs = coverage.runs(looked_at.reshape(-1, shape[2]), block, keys)
    needs_mask = (looked_at & ~certain).any(2) | has_few
    rows = [(start, min(start + part.tile, queries)) for start in range(0, queries, part.tile)]
    columns = _flagged(flags.by_side.get("key"), examples)
    of_flagged = _flagged(flags.by_side.get("query"), examples)
    by_example: list[tuple] = []  # each step but for its examples
    for example in range(examples):
        of_tiles = runs[example * tiles : (example + 1) * tiles]
        of_rows = zip(rows, map(tuple, of_tiles), needs_mask[example].tolist(), strict=True)
        of_this = _steps(of_rows, columns[example])
        if flagged := tuple(of_flagged[example].tolist()):
            of_this.append((flagged, False, ((0, keys),), (), True))
        by_example.append(tuple(of_this))
    if examples == 1:
        return [Step((0, batch), *step) for step in by_example[0]]
    steps, first = [], 0
    for equal, group in itertools.groupby(by_example):  # neighbours that look at the same
        stop = first + len(list(group))
        steps += [Step((first, stop), *step) for step in equal]
        first = stop
    return steps


def _differ(inputs: LeafInputs) -> bool:
    """Whether some mask input differs between examples."""
    sides = [side for of_leaf in inputs.values() for sides in of_leaf.values() for side in sides]
    return any((side[1:] != side[:1]).any() for side in sides if side is not None)


def _flagged(flags: np.ndarray | None, examples: int) -> list[np.ndarray]:
    """The flagged positions of each example; where one stands for all, of any of them."""
    if flags is None:
        return [np.zeros(0, np.int64)] * examples
    if examples == 1 or len(flags) == 1:
        return [np.flatnonzero(flags.any(0))] * examples
    return list(map(np.flatnonzero, flags))


def _looked_at(possible: np.ndarray, block: int, gap: int) -> np.ndarray:
    """The blocks that each tile of each example looks at: gaps of fewer than `gap` keys, too."""
    if not (possible[..., 1:] & ~possible[..., :-1]).any():
        return possible
    number = np.arange(possible.shape[2])
    last = np.maximum.accumulate(np.where(possible, number, -_FAR), 2)
    coming = np.where(possible, number, _FAR)[..., ::-1]
    following = np.minimum.accumulate(coming, 2)[..., ::-1]
    return possible | ((following - last - 1) * block < gap)


def _steps(tiles: Any, flagged: np.ndarray) -> list[tuple]:
    """The steps of one example. Neighbouring tiles that see all of the same keys are one."""
    steps: list[tuple] = []
    for rows, runs, needs_mask in tiles:
        others: tuple[int, ...] = ()
        if flagged.size:
            inside = [(flagged >= start) & (flagged < stop) for start, stop in runs]
            apart = flagged[~np.logical_or.reduce(inside)] if inside else flagged
            others = tuple(apart.tolist())
        if not runs and not others:
            continue
        step = (rows, True, runs, others, needs_mask)
        before = steps[-1] if steps else None
        if before and before[0][1] == rows[0] and not needs_mask and before[1:] == step[1:]:
            steps[-1] = ((before[0][0], rows[1]), *step[1:])
        else:
            steps.append(step)
    return steps
