"""The leaves of a rule: what asks where a query and a key stand, and what reads mask inputs.

`allowed` uses Python's operators alone, so it reads NumPy arrays and the tensors of every backend.
(`==` between symbolic Keras tensors compares objects; hence `~(a != b)`.)
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

from keras_headmask.rules import words
from keras_headmask.rules.base import (
    Ids,
    MaskSpec,
    Name,
    NotNegative,
    Positive,
    Whole,
    check_fields,
    fail,
    register_spec,
)
from keras_headmask.rules.protocol import Bounds, InputType, Sides, Tensor, Tiles

FARTHEST = 3 * 2**29  # beyond any distance, as `MOST_OFFSET` bounds it; a key moved by it is int32


# --- Positions ------------------------------------------------------------------------------------


class _Constant(MaskSpec):
    reads_query_positions = False

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        return Bounds(*[self.allowed(tiles.query_first, tiles.key_first, inputs)] * 2)


@register_spec("full")
@dataclasses.dataclass(frozen=True, repr=False)
class Full(_Constant):
    """Every query may attend to every key.

    >>> from keras_headmask import draw
    >>> print(draw(Full(), queries=2, keys=3))
    1 1 1
    1 1 1
    """

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        return key_positions <= key_positions

    def in_words(self) -> str:
        return "every token"


@register_spec("nothing")
@dataclasses.dataclass(frozen=True, repr=False)
class Nothing(_Constant):
    """No query may attend to any key: the head is switched off and gives 0.

    >>> from keras_headmask import draw
    >>> print(draw(Nothing(), queries=2, keys=3))
    0 0 0
    0 0 0
    """

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        return key_positions < key_positions

    def in_words(self) -> str:
        return "nothing"


@register_spec("window")
@dataclasses.dataclass(frozen=True, repr=False)
class Window(MaskSpec):
    """Keys from `before` positions behind the query to `after` ahead of it, inclusive.

    `-before <= key - query <= after`. `Window(after=0)` is the causal mask. A negative number
    starts the window away from the query: `Window(before=1, after=-1)` is the previous position
    alone.

    Args:
        before: Positions behind the query; `None` leaves that side open.
        after: Positions ahead of it; likewise.
        step: Above 1, only distances that are multiples of it (dilated; Beltagy et al. 2020).

    Raises:
        ValueError: for a window that holds no distance: write `Nothing()`.

    >>> from keras_headmask import draw
    >>> print(draw(Window(before=1, after=0), queries=3, keys=4))
    1 0 0 0
    1 1 0 0
    0 1 1 0
    """

    before: Whole | None = None
    after: Whole | None = None
    step: Positive = 1

    def __post_init__(self) -> None:
        check_fields(self)
        before, after, step = self.before, self.after, self.step
        if before is not None and after is not None and after // step < -(before // step):
            multiple = f" that is a multiple of {step}" if step > 1 else ""
            fail(
                ValueError,
                "after",
                f"No distance{multiple} lies from {-before} to {after}. Received: before={before}, "
                f"after={after}. Write Nothing() for a head that sees no key.",
            )

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        # Each side is moved for itself, and then they are compared, once: an operation on all pairs
        # costs more, and TensorFlow compares pairs with a number five times slower.
        results = []
        if self.before is not None:
            results.append(key_positions + min(self.before, FARTHEST) >= query_positions)
        if self.after is not None:
            results.append(key_positions - max(self.after, -FARTHEST) <= query_positions)
        if self.step > 1:
            results.append(~(key_positions % self.step != query_positions % self.step))
        return functools.reduce(operator.and_, results or [key_positions <= key_positions])

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first - tiles.query_last
        greatest = tiles.key_last - tiles.query_first
        # A tile holds every distance from least to greatest: is a multiple of `step` among them
        # that lies in the window? Count in steps, from the first (rounded up) to the last.
        step = self.step
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

    def in_words(self) -> str:
        before, after = self.before, self.after
        if before is not None and before < 0:
            text = f"{_places(-before, after)} after it"
        elif after is not None and after < 0:
            text = f"{_places(-after, before)} before it"
        elif before is not None and before == after:
            each = words.counted(before, "token")
            text = f"itself and {each} on each side" if before else "itself alone"
        else:
            sides = ((before, "before"), (after, "after"))
            sides_in_words = [
                f"{words.counted(n, 'token')} {where} it" for n, where in sides if n != 0
            ]
            parts = ["itself", *sides_in_words]
            if None in (before, after) and len(parts) > 2:  # the open side is easily overlooked
                parts.insert(0, parts.pop(1 if before is None else 2))
            text = words.listed(parts, "and")
        if self.step > 1:
            text += f", of these only those at a distance that is a multiple of {self.step}"
        return text


def _places(first: int, last: int | None) -> str:
    """The positions at these distances from the query, in one direction."""
    if last is None:
        return f"every token {first} or more places"
    if first == last:
        return f"the token {words.counted(first, 'place')}"
    return f"the tokens {first} to {last} places"


@register_spec("chunk")
@dataclasses.dataclass(frozen=True, repr=False)
class Chunk(MaskSpec):
    """Keys in the same block of `size` positions as the query, or in neighbouring blocks.

    Args:
        size: Positions in a block.
        before: Further blocks that are open behind the query's own.
        after: Further blocks that are open ahead of it.

    >>> from keras_headmask import draw
    >>> print(draw(Chunk(2), queries=4))
    1 1 0 0
    1 1 0 0
    0 0 1 1
    0 0 1 1
    """

    size: Positive
    before: NotNegative = 0
    after: NotNegative = 0

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        query, key = query_positions // self.size, key_positions // self.size
        # (As in `Window`: pairs are compared, and not subtracted first.)
        return (key + min(self.before, FARTHEST) >= query) & (key - self.after <= query)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        least = tiles.key_first // self.size - tiles.query_last // self.size
        greatest = tiles.key_last // self.size - tiles.query_first // self.size
        return Bounds(
            (greatest >= -self.before) & (least <= self.after),
            (least >= -self.before) & (greatest <= self.after),
        )

    def in_words(self) -> str:
        sides = [(self.before, "before it"), (self.after, "after it")]
        if self.before == self.after:
            sides = [(self.before, "on each side")]
        more = [f"{words.counted(count, 'block')} {where}" for count, where in sides if count]
        return words.listed([f"its own block of {words.counted(self.size, 'token')}", *more], "and")


@dataclasses.dataclass(frozen=True, repr=False)
class _Range(MaskSpec):
    start: NotNegative
    stop: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stop is not None and self.stop <= self.start:
            problem = f"no position lies in [{self.start}, {self.stop})"
            message = f"`stop` must be greater than `start`: {problem}. Write Nothing() for that."
            fail(ValueError, "stop", message)

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        positions = query_positions if self.reads_query_positions else key_positions
        inside = positions >= self.start
        return inside if self.stop is None else inside & (positions < self.stop)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        first, last = tiles[:2] if self.reads_query_positions else tiles[2:]
        possible, certain = last >= self.start, first >= self.start
        if self.stop is not None:
            possible, certain = possible & (first < self.stop), certain & (last < self.stop)
        return Bounds(possible, certain)


@register_spec("keys")
@dataclasses.dataclass(frozen=True, repr=False)
class Keys(_Range):
    """Key positions in `[start, stop)`; `stop=None` means to the end.

    Args:
        start: The first position, from 0.
        stop: The position after the last one.

    Raises:
        ValueError: for a `stop` that is not greater than `start`.

    >>> from keras_headmask import draw
    >>> print(draw(Keys(1, 3), queries=2, keys=4))
    0 1 1 0
    0 1 1 0
    """

    reads_query_positions = False

    def in_words(self) -> str:
        if self.stop is None:
            return f"every token from position {self.start} on"
        count = self.stop - self.start
        if self.start == 0:
            return "the first token" if count == 1 else f"the first {count} tokens"
        if count == 1:
            return f"the token at position {self.start}"
        return f"the tokens at positions {self.start} to {self.stop - 1}"


@register_spec("queries")
@dataclasses.dataclass(frozen=True, repr=False)
class Queries(_Range):
    """Query positions in `[start, stop)`: those queries see every key, the others none.

    Args:
        start: The first position, from 0.
        stop: The position after the last one; `None` means to the end.

    Raises:
        ValueError: for a `stop` that is not greater than `start`.

    >>> from keras_headmask import draw
    >>> print(draw(Queries(1), queries=3, keys=2))
    0 0
    1 1
    1 1
    """

    def in_words(self) -> str:
        if self.stop is None:
            where = f"position {self.start} or later"
        elif self.stop == self.start + 1:
            where = f"position {self.start}"
        else:
            where = f"positions {self.start} to {self.stop - 1}"
        return f"every token, if it stands at {where}"


# --- Mask inputs ----------------------------------------------------------------------------------


class _Reader(MaskSpec):
    """Reads the mask input named `input`: its ids, or what `_read` makes of them."""

    input: str
    counts = False

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType()}

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        query, key = inputs[self.input]
        of_query = None if query is None else self._read(query)
        of_key = of_query if key is query else None if key is None else self._read(key)
        return {self.input: Sides(of_query, of_key)}

    def _read(self, values: Tensor) -> Tensor:
        return _as_ids(values)


class _Ids(_Reader):
    """Query and key carry the same id, given or counted; a negative id matches nothing."""

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        query, key = inputs[self.input]
        return ~(query != key) & (query >= 0)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        query, key = inputs[self.input]
        meet = (query.high >= key.low) & (key.high >= query.low)
        one_id = ~(query.low != query.high) & ~(key.low != key.high) & ~(query.low != key.low)
        return Bounds(meet & (query.high >= 0) & (key.high >= 0), one_id & (query.low >= 0))


@register_spec("same_segment")
@dataclasses.dataclass(frozen=True, repr=False)
class SameSegment(_Ids):
    """Query and key carry the same id in the mask input named `input`, `(batch, length)`.

    Any integer is a segment, 0 too; a negative id matches nothing, not even itself. Padding is the
    padding mask's business. (JAX keeps 32 bits of an id unless its 64-bit mode is on.)

    Args:
        input: The name of the mask input.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(SameSegment("doc"), 4, mask_inputs={"doc": np.array([[7, 7, 0, -1]])}))
    1 1 0 0
    1 1 0 0
    0 0 1 0
    0 0 0 0
    """

    input: Name

    def in_words(self) -> str:
        return f"the tokens with its own id in `{self.input}`"


@register_spec("same_sentence")
@dataclasses.dataclass(frozen=True, repr=False)
class SameSentence(_Ids):
    """Query and key stand in the same sentence, counted from the token ids.

    A run of end tokens makes one-token sentences; what follows the last end token (a [SEP],
    padding) is the next sentence.

    Args:
        end_ids: The id, or several, of tokens that end a sentence and belong to it.
        input: The name of the mask input with the token ids, `(batch, length)`.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> tokens = np.array([[5, 9, 4, 6, 9]])  # 9 is the full stop
    >>> print(draw(SameSentence(9), 5, mask_inputs={"token_ids": tokens}))
    1 1 0 0 0
    1 1 0 0 0
    0 0 1 1 1
    0 0 1 1 1
    0 0 1 1 1
    """

    end_ids: Ids
    input: Name = "token_ids"
    counts = True

    def _read(self, values: Tensor) -> Tensor:
        from keras import ops

        ends = ops.cast(_is_one_of(values, ids_of(self)), "int32")
        return ops.cumsum(ends, axis=1) - ends  # the end token still belongs to its sentence

    def in_words(self) -> str:
        where = "" if self.input == "token_ids" else f" in `{self.input}`"
        ends = words.listed(ids_of(self), "or")
        return f"its own sentence (sentences{where} end with token {ends})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Side(_Reader):
    """A flag of each key, or of each query: whether it is set, or its id is one of `ids`."""

    input: Name
    _side = "key"

    @property
    def inputs(self) -> dict[str, InputType]:
        dtype = "int32" if hasattr(self, "ids") else "bool"
        return {self.input: InputType(dtype=dtype, sides=frozenset({self._side}))}

    def _read(self, values: Tensor) -> Tensor:
        from keras_headmask import masks

        ids = ids_of(self)
        return _is_one_of(values, ids) if ids else masks.as_flags(values)

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        return getattr(inputs[self.input], self._side)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        flags = getattr(inputs[self.input], self._side)
        return Bounds(flags.high > 0, flags.low > 0)

    def in_words(self) -> str:
        condition = f"`{self.input}` is {words.listed(ids_of(self) or ['set'], 'or')}"
        return f"every token{', if its own' if self._side == 'query' else ' whose'} {condition}"


@register_spec("key_flag")
@dataclasses.dataclass(frozen=True, repr=False)
class KeyFlag(_Side):
    """Keys whose flag is true (above 0) in the mask input named `input`, `(batch, length)`.

    Args:
        input: The name of the mask input.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> padding_mask = np.array([[1, 1, 0]])
    >>> print(draw(KeyFlag("padding_mask"), 2, 3, mask_inputs={"padding_mask": padding_mask}))
    1 1 0
    1 1 0
    """

    def in_words(self) -> str:
        if self.input == "padding_mask":  # the name that recipes.padding and KerasHub give it
            return "every token that `padding_mask` does not hide"
        return _Side.in_words(self)


@register_spec("query_flag")
@dataclasses.dataclass(frozen=True, repr=False)
class QueryFlag(_Side):
    """Queries whose flag is true (above 0) see every key, the others none.

    Args:
        input: The name of the mask input with the flags, `(batch, length)`.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(QueryFlag("is_global"), 2, mask_inputs={"is_global": np.array([[0, 1]])}))
    0 0
    1 1
    """

    _side = "query"


@register_spec("key_in")
@dataclasses.dataclass(frozen=True, repr=False)
class KeyIn(_Side):
    """Keys whose id is one of `ids`: a [SEP] that all may see; `~KeyIn(...)`: no punctuation.

    Args:
        input: The name of the mask input with the ids, `(batch, length)`.
        ids: One id or several.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> token_ids = np.array([[5, 102, 7]])
    >>> print(draw(KeyIn("token_ids", 102), 2, 3, mask_inputs={"token_ids": token_ids}))
    0 1 0
    0 1 0
    """

    ids: Ids


@register_spec("query_in")
@dataclasses.dataclass(frozen=True, repr=False)
class QueryIn(_Side):
    """Queries whose id is one of `ids` see every key, the others none.

    Args:
        input: The name of the mask input with the ids, `(batch, length)`.
        ids: One id or several.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(QueryIn("token_ids", 101), 2, mask_inputs={"token_ids": np.array([[101, 7]])}))
    1 1
    0 0
    """

    ids: Ids
    _side = "query"


@register_spec("mask_input")
@dataclasses.dataclass(frozen=True, repr=False)
class MaskInput(MaskSpec):
    """A whole mask passed by name: `(T, S)`, `(B, T, S)` or `(B or 1, H or 1, T, S)`.

    Boolean or integer, `True` means allowed. A mask with a head axis is read at each head's own
    number, inside `PerHead` too.

    Args:
        input: The name of the mask.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(MaskInput("m"), 2, mask_inputs={"m": np.array([[1, 0], [1, 1]])}))
    1 0
    1 1
    """

    input: Name

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType(rank=None, dtype="bool")}

    def allowed(self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping) -> Tensor:
        return inputs[self.input]

    def in_words(self) -> str:
        return f"what the mask `{self.input}` allows"


def _as_ids(ids: Tensor) -> Tensor:
    """Ids as signed integers wide enough to hold them, so that a negative id stays negative."""
    import keras

    name = keras.backend.standardize_dtype(ids.dtype)
    return keras.ops.cast(ids, "int64" if name in ("int64", "uint32", "uint64") else "int32")


def _is_one_of(ids: Tensor, wanted: list[int]) -> Tensor:
    ids = _as_ids(ids)
    return functools.reduce(operator.or_, (~(ids != number) for number in wanted))


def ids_of(leaf: MaskSpec) -> list[int]:
    """The ids that a leaf looks for: its fields that are tuples of numbers."""
    fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]  # type: ignore[arg-type]
    return [x for ids in fields if isinstance(ids, tuple) for x in ids if isinstance(x, int)]


def marks_padding(name: str) -> bool:
    """Whether a mask input has a name that says it is true at real tokens.

    KerasHub's names are `padding_mask`, `decoder_padding_mask` and so on, Hugging Face's is
    `attention_mask`. PyTorch's `key_padding_mask` is true at padding, so its name says nothing.
    """
    is_padding = "padding_mask" in name and "key_padding_mask" not in name
    return is_padding or name == "attention_mask"


def padding_inputs(inputs: Mapping[str, Any]) -> list[str]:
    """The names of `inputs` that are true at real tokens: of `(batch, length)`, and named so."""
    return [name for name, x in inputs.items() if len(x.shape) == 2 and marks_padding(name)]
