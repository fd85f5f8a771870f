"""Leaves that read mask inputs: ids, flags and whole masks; and which inputs mark padding.

`allowed` uses Python's operators alone, so it reads NumPy arrays and the tensors of every backend.
(`==` between symbolic Keras tensors compares objects; hence `~(a != b)`.)
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_headmask.rules import words
from keras_headmask.rules.base import Ids, MaskSpec, Name, register_spec
from keras_headmask.rules.protocol import Bounds, InputType, Sides, Tensor, Tiles


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


def as_pair(value: Any) -> tuple[Tensor, ...] | None:
    """`(query_side, key_side)` if `value` is a pair; a saved model's is a list of tensors."""
    if isinstance(value, list) and len(value) == 2:
        return tuple(value) if all(v is None or hasattr(v, "shape") for v in value) else None
    return value if isinstance(value, tuple) else None


def sides_of(value: Any) -> list[np.ndarray | None]:
    """A mask input in NumPy: one tensor, or its sides of the queries and of the keys."""
    from keras import ops

    pair = as_pair(value)
    sides = (value,) if pair is None else pair
    tensors = (ops.convert_to_numpy(side) if hasattr(side, "shape") else side for side in sides)
    return [None if side is None else np.asarray(side) for side in tensors]


def key_side(value: Any) -> np.ndarray | None:
    """The key side of a mask input, if it is `(batch, length)`."""
    side = sides_of(value)[-1]
    return None if side is None or side.ndim != 2 else side


def length_of(spec: MaskSpec, mask_inputs: Mapping[str, Any], side: int) -> int | None:
    """How many queries (side 0) or keys (side -1) the examples that `spec` reads speak of."""
    for name, kind in spec.inputs.items():
        tensor = sides_of(mask_inputs[name])[side] if name in mask_inputs else None
        if tensor is not None and (kind.rank is None or tensor.ndim == 2):
            size = tensor.shape[-2 - side if kind.rank is None else 1]
            if size > 1 or kind.rank is not None:
                return size
    return None


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
