"""Leaves that read mask inputs: ids, flags and whole masks.

`allowed` uses Python's operators alone, so it reads NumPy arrays and the tensors of every backend.
(`==` between symbolic Keras tensors compares objects; hence `~(a != b)`.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from keras_headmask.rules import config, words
from keras_headmask.rules.base import MaskSpec, register_spec, stored
from keras_headmask.rules.protocol import Bounds, InputType, Sides, Tiles

_Whole = Annotated[int, config.WHOLE_NUMBER]
_Name = Annotated[str, config.NAME]
_IdTuple = Annotated[_Whole | tuple[_Whole, ...], config.Limits(minItems=1)]  # kept as a tuple


@dataclasses.dataclass(frozen=True, repr=False)
class _Ids(MaskSpec):
    """Query and key carry the same id, given or counted; a negative id matches nothing."""

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        query, key = inputs[self.input]
        return ~(query != key) & (query >= 0)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        query, key = inputs[self.input]
        meet = (query.high >= key.low) & (key.high >= query.low)
        one_id = ~(query.low != query.high) & ~(key.low != key.high) & ~(query.low != key.low)
        return Bounds(meet & (query.high >= 0) & (key.high >= 0), one_id & (query.low >= 0))

    is_local = True


@register_spec("same_segment")
@dataclasses.dataclass(frozen=True, repr=False)
class SameSegment(_Ids):
    """Query and key carry the same id in the mask input named `input`, `(batch, length)`.

    Any integer is a segment, 0 too; a negative id matches nothing, not even itself. Padding is the
    padding mask's business. (JAX holds 32 bits of an id, unless told to hold 64.)

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(SameSegment("doc"), 4, mask_inputs={"doc": np.array([[7, 7, 0, -1]])}))
    1 1 0 0
    1 1 0 0
    0 0 1 0
    0 0 0 0
    """

    input: _Name

    def __post_init__(self) -> None:
        config.input_name(self.input)

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType()}

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        return {self.input: _each(_as_ids, inputs[self.input])}

    reads_segments = True

    def in_words(self) -> str:
        return f"the tokens with its own id in `{self.input}`"


@register_spec("same_sentence")
@dataclasses.dataclass(frozen=True, repr=False)
class SameSentence(_Ids):
    """Query and key stand in the same sentence, counted from the token ids.

    A token whose id is one of `end_ids` ends its sentence and belongs to it. A run of end tokens
    makes one-token sentences; what follows the last end token (a [SEP], padding) is the next
    sentence. `end_ids` is one id or several. `input` names the token ids, `(batch, length)`.

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

    end_ids: _IdTuple
    input: _Name = "token_ids"

    def __post_init__(self) -> None:
        stored(self, "end_ids", config.id_tuple(self.end_ids, "end_ids"))
        config.input_name(self.input)

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType()}

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        from keras import ops

        def sentence_numbers(ids: Any) -> Any:
            ends = ops.cast(_is_one_of(ids, self.end_ids), "int32")
            return ops.cumsum(ends, axis=1) - ends  # the end token still belongs to its sentence

        return {self.input: _each(sentence_numbers, inputs[self.input])}

    @property
    def ids_of_interest(self) -> tuple[int, ...]:
        return self.end_ids

    def in_words(self) -> str:
        where = "" if self.input == "token_ids" else f" in `{self.input}`"
        ends = f"sentences{where} end with token {words.ids_in_words(self.end_ids)}"
        return f"its own sentence ({ends})"


class _Side(MaskSpec):
    """A flag of each key, or of each query; `prepare` makes it of what is read."""

    _dtype = "int32"

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType(dtype=self._dtype, sides=frozenset({self.opens}))}

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return getattr(inputs[self.input], self.opens)

    def coverage(self, tiles: Tiles, inputs: Mapping) -> Bounds:
        flags = getattr(inputs[self.input], self.opens)
        return Bounds(flags.high > 0, flags.low > 0)


@dataclasses.dataclass(frozen=True, repr=False)
class _Flag(_Side):
    input: _Name
    _dtype = "bool"

    def __post_init__(self) -> None:
        config.input_name(self.input)

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        from keras import ops

        return {self.input: _each(lambda flags: ops.cast(flags, "bool"), inputs[self.input])}


@register_spec("key_flag")
@dataclasses.dataclass(frozen=True, repr=False)
class KeyFlag(_Flag):
    """Keys whose flag is true (not 0) in the mask input named `input`, `(batch, length)`.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> padding_mask = np.array([[1, 1, 0]])
    >>> print(draw(KeyFlag("padding_mask"), 2, 3, mask_inputs={"padding_mask": padding_mask}))
    1 1 0
    1 1 0
    """

    opens = "key"

    def in_words(self) -> str:
        if self.input == "padding_mask":  # the name that recipes.padding and KerasHub give it
            return "every token that `padding_mask` does not hide"
        return f"every token whose `{self.input}` is set"


@register_spec("query_flag")
@dataclasses.dataclass(frozen=True, repr=False)
class QueryFlag(_Flag):
    """Queries whose flag is true (not 0) see every key, the others none.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(QueryFlag("is_global"), 2, mask_inputs={"is_global": np.array([[0, 1]])}))
    0 0
    1 1
    """

    opens = "query"

    def in_words(self) -> words.Words:
        return words.of_the_query(f"if its own `{self.input}` is set")


@dataclasses.dataclass(frozen=True, repr=False)
class _In(_Side):
    input: _Name
    ids: _IdTuple

    def __post_init__(self) -> None:
        config.input_name(self.input)
        stored(self, "ids", config.id_tuple(self.ids, "ids"))

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        return {self.input: _each(lambda ids: _is_one_of(ids, self.ids), inputs[self.input])}

    @property
    def ids_of_interest(self) -> tuple[int, ...]:
        return self.ids


@register_spec("key_in")
@dataclasses.dataclass(frozen=True, repr=False)
class KeyIn(_In):
    """Keys whose id is one of `ids`: a [SEP] that all may see; `~KeyIn(...)`: no punctuation.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> token_ids = np.array([[5, 102, 7]])
    >>> print(draw(KeyIn("token_ids", 102), 2, 3, mask_inputs={"token_ids": token_ids}))
    0 1 0
    0 1 0
    """

    opens = "key"

    def in_words(self) -> str:
        return f"every token whose `{self.input}` is {words.ids_in_words(self.ids)}"


@register_spec("query_in")
@dataclasses.dataclass(frozen=True, repr=False)
class QueryIn(_In):
    """Queries whose id is one of `ids` see every key, the others none.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(QueryIn("token_ids", 101), 2, mask_inputs={"token_ids": np.array([[101, 7]])}))
    1 1
    0 0
    """

    opens = "query"

    def in_words(self) -> words.Words:
        ids = words.ids_in_words(self.ids)
        return words.of_the_query(f"if its own `{self.input}` is {ids}")


@register_spec("mask_input")
@dataclasses.dataclass(frozen=True, repr=False)
class MaskInput(MaskSpec):
    """A whole mask handed in by name: `(T, S)`, `(B, T, S)` or `(B or 1, H or 1, T, S)`.

    Boolean or integer, `True` means allowed. A mask with a head axis is read at each head's own
    number, inside `PerHead` too.

    >>> from keras_headmask import draw
    >>> import numpy as np
    >>> print(draw(MaskInput("m"), 2, mask_inputs={"m": np.array([[1, 0], [1, 1]])}))
    1 0
    1 1
    """

    input: _Name

    def __post_init__(self) -> None:
        config.input_name(self.input)

    @property
    def inputs(self) -> dict[str, InputType]:
        return {self.input: InputType(rank=None, dtype="bool")}

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping) -> Any:
        return inputs[self.input]

    def in_words(self) -> str:
        return f"what the mask `{self.input}` allows"


def _each(function: Any, sides: Sides) -> Sides:
    """Apply `function` to both sides, once if they are the same tensor."""
    query = None if sides.query is None else function(sides.query)
    if sides.key is sides.query:
        return Sides(query, query)
    return Sides(query, None if sides.key is None else function(sides.key))


def _as_ids(ids: Any) -> Any:
    """Ids as signed integers wide enough to hold them, so that a negative id stays negative."""
    import keras

    name = keras.backend.standardize_dtype(ids.dtype)
    return keras.ops.cast(ids, "int64" if name in ("int64", "uint32", "uint64") else "int32")


def _is_one_of(ids: Any, wanted: tuple[int, ...]) -> Any:
    ids = _as_ids(ids)
    found = ids != ids
    for number in wanted:
        found = found | ~(ids != number)
    return found
