"""Leaves of the mask language that ask where a query and a key stand.

`allowed` uses Python's operators alone, so it reads NumPy arrays and the tensors of every backend.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from keras_headmask.rules import config
from keras_headmask.rules.base import Bounds, MaskSpec, Tiles, register_spec, stored, unknown

_Whole = Annotated[int, config.WHOLE_NUMBER]
_NotNegative = Annotated[int, config.NOT_NEGATIVE]
_Positive = Annotated[int, config.POSITIVE]


@register_spec("full")
@dataclasses.dataclass(frozen=True, repr=False)
class Full(MaskSpec):
    """Every query may attend to every key.

    >>> from keras_headmask import draw
    >>> print(draw(Full(), queries=2, keys=3))
    1 1 1
    1 1 1
    """

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return key_positions <= key_positions

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        every = tiles.key_first <= tiles.key_first
        return Bounds(every, every)


@register_spec("nothing")
@dataclasses.dataclass(frozen=True, repr=False)
class Nothing(MaskSpec):
    """No query may attend to any key: the head is switched off and gives 0.

    >>> from keras_headmask import draw
    >>> print(draw(Nothing(), queries=2, keys=3))
    0 0 0
    0 0 0
    """

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return key_positions < key_positions

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        none = tiles.key_first < tiles.key_first
        return Bounds(none, none)


@register_spec("window")
@dataclasses.dataclass(frozen=True, repr=False)
class Window(MaskSpec):
    """Keys from `before` positions behind the query to `after` ahead of it, inclusive.

    `-before <= key - query <= after`. `None` leaves a side open: `Window(after=0)` is the causal
    mask. `step` greater than 1 keeps the distances that are multiples of `step` (dilated; Beltagy
    et al. 2020). A negative number starts the window away from the query: `Window(before=1,
    after=-1)` is the previous position alone.

    Raises `ValueError` for a window that holds no distance: write `Nothing()`.

    >>> from keras_headmask import draw
    >>> print(draw(Window(before=1, after=0), queries=3, keys=4))
    1 0 0 0
    1 1 0 0
    0 1 1 0
    """

    before: _Whole | None = None
    after: _Whole | None = None
    step: _Positive = 1

    def __post_init__(self) -> None:
        for field in ("before", "after"):
            if getattr(self, field) is not None:
                stored(self, field, config.whole_number(getattr(self, field), field))
        stored(self, "step", config.whole_number(self.step, "step", at_least=1))
        bounded = self.before is not None and self.after is not None
        if bounded and self.after // self.step < -(self.before // self.step):
            multiple = f" that is a multiple of {self.step}" if self.step > 1 else ""
            config.fail(
                ValueError,
                "after",
                f"No distance{multiple} lies from {-self.before} to {self.after}. Received: "
                f"before={self.before}, after={self.after}. Write Nothing() for a head that sees "
                "no key.",
            )

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        distance = key_positions - query_positions
        result = distance <= distance
        if self.before is not None:
            result = result & (distance >= -self.before)
        if self.after is not None:
            result = result & (distance <= self.after)
        if self.step > 1:
            result = result & ~(distance % self.step != 0)
        return result

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first - tiles.query_last
        greatest = tiles.key_last - tiles.query_first
        step = self.step
        # A tile holds every distance from least to greatest: is a multiple of `step` among them
        # that lies in the window? Count in steps, from the first (rounded up) to the last.
        first, last = -(-least // step), greatest // step
        possible, certain = first <= last, least <= greatest
        if step > 1:
            certain = ~(least != greatest) & ~(least % step != 0)
        if self.before is not None:
            possible = possible & (last >= -(self.before // step))
            certain = certain & (least >= -self.before)
        if self.after is not None:
            possible = possible & (first <= self.after // step)
            certain = certain & (greatest <= self.after)
        return Bounds(possible, certain)


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


@dataclasses.dataclass(frozen=True, repr=False)
class _Range(MaskSpec):
    start: _NotNegative
    stop: _Positive | None = None

    def __post_init__(self) -> None:
        stored(self, "start", config.whole_number(self.start, "start", at_least=0))
        if self.stop is not None:
            stored(self, "stop", config.whole_number(self.stop, "stop"))
            if self.stop <= self.start:
                config.fail(
                    ValueError,
                    "stop",
                    f"`stop` must be greater than `start`: no position lies in [{self.start}, "
                    f"{self.stop}). Write Nothing() for an empty rule.",
                )

    def _within(self, positions: Any) -> Any:
        inside = positions >= self.start
        return inside if self.stop is None else inside & (positions < self.stop)

    def _bounds(self, first: Any, last: Any) -> Bounds:
        possible, certain = last >= self.start, first >= self.start
        if self.stop is not None:
            possible, certain = possible & (first < self.stop), certain & (last < self.stop)
        return Bounds(possible, certain)


@register_spec("keys")
@dataclasses.dataclass(frozen=True, repr=False)
class Keys(_Range):
    """Key positions in `[start, stop)`; `stop=None` means to the end.

    >>> from keras_headmask import draw
    >>> print(draw(Keys(1, 3), queries=2, keys=4))
    0 1 1 0
    0 1 1 0
    """

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return self._within(key_positions)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        return self._bounds(tiles.key_first, tiles.key_last)


@register_spec("queries")
@dataclasses.dataclass(frozen=True, repr=False)
class Queries(_Range):
    """Query positions in `[start, stop)`: those queries see every key, the others none.

    >>> from keras_headmask import draw
    >>> print(draw(Queries(1), queries=3, keys=2))
    0 0
    1 1
    1 1
    """

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return self._within(query_positions)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        return self._bounds(tiles.query_first, tiles.query_last)


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
