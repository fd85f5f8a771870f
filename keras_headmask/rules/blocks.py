"""Leaves that divide positions into blocks of one size: neighbouring blocks, random blocks.

`allowed` uses Python's operators alone, so it reads NumPy arrays and the tensors of every backend.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from keras_headmask.rules import config, words
from keras_headmask.rules.base import MaskSpec, register_spec, stored
from keras_headmask.rules.protocol import Bounds, Tiles, unknown

_NotNegative = Annotated[int, config.NOT_NEGATIVE]
_Positive = Annotated[int, config.POSITIVE]


@register_spec("chunk")
@dataclasses.dataclass(frozen=True, repr=False)
class Chunk(MaskSpec):
    """Keys in the same block of `size` positions as the query, or in neighbouring blocks.

    `before` and `after` count the further blocks that are open behind and ahead.

    >>> from keras_headmask import draw
    >>> print(draw(Chunk(2), queries=4))
    1 1 0 0
    1 1 0 0
    0 0 1 1
    0 0 1 1
    """

    size: _Positive
    before: _NotNegative = 0
    after: _NotNegative = 0

    def __post_init__(self) -> None:
        stored(self, "size", config.whole_number(self.size, "size", at_least=1))
        stored(self, "before", config.whole_number(self.before, "before", at_least=0))
        stored(self, "after", config.whole_number(self.after, "after", at_least=0))

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        distance = key_positions // self.size - query_positions // self.size
        return (distance >= -self.before) & (distance <= self.after)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first // self.size - tiles.query_last // self.size
        greatest = tiles.key_last // self.size - tiles.query_first // self.size
        return Bounds(
            (greatest >= -self.before) & (least <= self.after),
            (least >= -self.before) & (greatest <= self.after),
        )

    is_local = True

    @property
    def reach(self) -> int:
        return self.size * max(1, self.before, self.after)

    def closes(self, side: str) -> bool:
        return True

    def in_words(self) -> str:
        own = f"its own block of {words.tokens(self.size)}"
        if self.before == self.after:
            more = f" and {words.blocks(self.before)} on each side" if self.before else ""
            return own + more
        sides = [
            f"{words.blocks(count)} {where} it"
            for count, where in ((self.before, "before"), (self.after, "after"))
            if count
        ]
        return words.listed([own, *sides], "and")


@register_spec("random_blocks")
@dataclasses.dataclass(frozen=True, repr=False)
class RandomBlocks(MaskSpec):
    """BigBird's random blocks (Zaheer et al. 2020), the same in every process and backend.

    A pair (query block, key block) of `size` positions each is open where an integer hash of
    `(seed, query block, key block)` falls under `density`, from 0 to 1; so a block does not change
    with the sequence length. Heads differ by seeds given through `PerHead`.

    >>> from keras_headmask import draw
    >>> print(draw(RandomBlocks(2, 0.5, seed=2), 6))
    1 1 0 0 1 1
    1 1 0 0 1 1
    0 0 1 1 1 1
    0 0 1 1 1 1
    0 0 0 0 0 0
    0 0 0 0 0 0
    """

    size: _Positive
    density: Annotated[float, config.Limits(minimum=0, maximum=1)]
    seed: Annotated[int, config.Limits(minimum=0)]

    def __post_init__(self) -> None:
        stored(self, "size", config.whole_number(self.size, "size", at_least=1))
        stored(self, "density", config.fraction(self.density, "density"))
        stored(self, "seed", config.whole_number(self.seed, "seed", at_least=0, any_size=True))

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return self.is_open(query_positions // self.size, key_positions // self.size)

    def is_open(self, query_blocks: Any, key_blocks: Any) -> Any:
        """Whether each pair of blocks is open; element-wise on block numbers."""
        value = _scramble(_scramble(self.seed % _PRIME) + self.seed // _PRIME % _PRIME)
        value = _scramble(_scramble(query_blocks % _PRIME + value))
        value = _scramble(_scramble(key_blocks % _PRIME + value))
        return value < round(self.density * _PRIME)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        if not isinstance(tiles.query_first, np.ndarray):
            return unknown(tiles)
        first = [tiles.query_first[:, 0] // self.size, tiles.key_first[0] // self.size]
        stop = [tiles.query_last[:, 0] // self.size + 1, tiles.key_last[0] // self.size + 1]
        base = [int(blocks.min(initial=0)) for blocks in first]  # an offset may be negative
        rows, columns = (int(s.max(initial=b)) - b for s, b in zip(stop, base, strict=True))
        if rows * columns > _MOST_BLOCKS:
            return unknown(tiles)
        blocks = (np.arange(n) + b for n, b in zip((rows, columns), base, strict=True))
        is_open = self.is_open(*np.ix_(*blocks))
        first, stop = ([x - b for x, b in zip(xs, base, strict=True)] for xs in (first, stop))
        corner = np.zeros((rows + 1, columns + 1), np.int32)  # open blocks above and to the left
        corner[1:, 1:] = is_open.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
        count = (
            corner[np.ix_(stop[0], stop[1])]
            - corner[np.ix_(first[0], stop[1])]
            - corner[np.ix_(stop[0], first[1])]
            + corner[np.ix_(*first)]
        )
        of = (stop[0] - first[0])[:, None] * (stop[1] - first[1])[None]
        return Bounds(count > 0, count == of)

    @property
    def is_sparse(self) -> bool:
        return self.density <= 0.5

    @property
    def reach(self) -> int:
        # With few blocks, none may be open.
        return int(self.size * min(8 / max(self.density, 1e-9) ** 0.5, 10**6))

    def in_words(self) -> str:
        drawn = f"each open with probability {self.density!r}, seed {self.seed}"
        return f"random blocks of {words.tokens(self.size)} ({drawn})"


# The largest prime whose square fits int32, the one integer type that all backends share. Cubing
# permutes the residues, since 3 does not divide _PRIME - 1; a few rounds of "add, cube" are the
# MiMC cipher (Albrecht et al. 2016), small.
_PRIME = 46337
_MOST_BLOCKS = 2**24  # more are not counted one by one, 64 MiB of them, to plan what to skip
_ROUND_CONSTANTS = (31607, 12289, 40503)


def _scramble(value: Any) -> Any:
    for constant in _ROUND_CONSTANTS:
        value = (value + constant) % _PRIME
        value = value * value % _PRIME * value % _PRIME
    return value
