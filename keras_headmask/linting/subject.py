"""A rule as whole masks in NumPy, for whatever its inputs hold: what a lint looks at."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.rules import config, evaluation, words
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.heads import head_groups

_SHORTEST, _LONGEST = 16, 1024  # positions, where no length is given
MOST_UNKNOWN = 6  # leaves without inputs; all combinations of their answers are tried
_MOST_WORK = 2**24  # pairs x combinations, where the length may be chosen
_MOST_PAIRS = 2**26  # where it is given


class Subject:
    """A rule, the lengths to look at it, and its groups of heads."""

    def __init__(
        self,
        spec: MaskSpec,
        num_heads: int | None,
        queries: int | None = None,
        keys: int | None = None,
        given: Mapping[str, Any] | None = None,
        query_offset: int = 0,
        padding: np.ndarray | None = None,
        is_cross: bool = False,
    ):
        self.spec, self.padding, self.is_cross = spec, padding, is_cross
        self.offset = evaluation.checked_offset(query_offset)
        self.heads = words.enough_heads(spec)
        if num_heads is not None:
            self.heads = config.number_of_heads(num_heads)
        self.groups = head_groups(spec, self.heads)
        self.given = dict(given or {})
        padded = None if padding is None else padding.shape[1]
        side = {s: _length(spec, self.given, s) or padded for s in ("query", "key")}
        for name, length in (("queries", queries), ("keys", keys)):
            if length is not None:
                config.whole_number(length, name, at_least=1)
        self.reach = spec.reach
        self.unknown = [leaf for leaf in leaves(spec) if leaf.inputs and not self.has(leaf)]
        self.chosen = queries is None and keys is None and not any(side.values())
        self.room = self._room()
        self.queries = queries or side["query"] or keys or side["key"] or self.room
        self.keys = keys or side["key"] or (self.room if self.chosen else self.queries)
        if self.queries * self.keys > _MOST_PAIRS:
            raise ValueError(
                f"A lint looks at whole masks, and {self.queries} x {self.keys} pairs are more "
                f"than {_MOST_PAIRS}. Pass a smaller number of queries and keys, or shorter "
                "examples: what is wrong with a rule shows there, too."
            )
        self._values: dict[Any, np.ndarray] = {}

    def _room(self) -> int:
        """A length at which every number of the rule matters, if there is a bearable one."""
        unknown = sum(bool(leaf.inputs) for leaf in leaves(self.spec))
        most = int((_MOST_WORK / 2 ** min(unknown, MOST_UNKNOWN)) ** 0.5)
        wanted = _LONGEST if self.reach is None else 3 * self.reach + 2
        return max(_SHORTEST, min(wanted, _LONGEST, most))

    @property
    def self_attention(self) -> bool:
        """Whether query i and key i are one token, as far as is known."""
        return (
            not self.is_cross
            and self.queries == self.keys
            and self.offset == 0
            and self.queries > 1
        )

    @property
    def has_room(self) -> bool:
        """Whether a rule's parts that do nothing at `room` do nothing at any length."""
        return self.reach is not None and self.reach < self.room

    def without_data(self) -> "Subject":
        """The same lengths, where the inputs may hold anything."""
        return Subject(self.spec, self.heads, self.queries, self.keys, is_cross=self.is_cross)

    def has(self, leaf: MaskSpec) -> bool:
        return leaf.inputs.keys() <= self.given.keys()

    def value(self, leaf: MaskSpec, queries: int, keys: int) -> np.ndarray:
        """What `leaf` allows, `(B or 1, H or 1, queries, keys)`."""
        key = (leaf, queries, keys)
        if key not in self._values:
            given = {name: self.given[name] for name in leaf.inputs}
            mask = evaluation.make_mask(leaf, queries, keys, self.heads, given, self.offset)
            self._values[key] = ops.convert_to_numpy(mask)
        return self._values[key]

    def answers(
        self,
        rule: MaskSpec,
        heads: tuple[int, ...],
        with_data: bool = True,
        among: MaskSpec | None = None,
    ) -> Callable[..., Iterator[np.ndarray]]:
        """A function that gives the masks of parts of `rule`, one for each state of the unknown.

        Without data at `room` x `room`. States are in one order for parts of the same `among`.
        """
        size = (self.queries, self.keys) if with_data else (self.room, self.room)
        every = list(leaves(rule)) + ([] if among is None else list(leaves(among)))
        every = list(dict.fromkeys(every))
        unknown = [x for x in every if x.inputs and not (with_data and self.has(x))]
        known = {leaf: self._cut(leaf, heads, size) for leaf in every if leaf not in unknown}

        def masks_of(part: MaskSpec) -> Iterator[np.ndarray]:
            shape, part = (1, 1, *size), part.for_head(heads[0])
            for states in itertools.product((True, False), repeat=len(unknown)):
                tried = {leaf: np.full(shape, s) for leaf, s in zip(unknown, states, strict=True)}
                values = known | tried
                yield part.fold(values.__getitem__, np.logical_and, np.logical_or, np.logical_not)

        return masks_of

    def _cut(self, leaf: MaskSpec, heads: tuple[int, ...], size: tuple[int, int]) -> np.ndarray:
        value = self.value(leaf, *size)
        return value if value.shape[1] == 1 else value[:, list(heads)]

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """What may be allowed, for whatever the unknown inputs hold: `(B, H, T, S)`."""
        parts = []
        for rule, heads in self.groups:
            part = functools.reduce(np.logical_or, self.answers(rule, heads)(rule))
            parts.append((heads, part))
        batch = max(part.shape[0] for _, part in parts)
        if self.padding is not None:
            batch = max(batch, self.padding.shape[0])
        result = np.zeros((batch, self.heads, self.queries, self.keys), bool)
        for heads, part in parts:
            result[:, list(heads)] = part
        return result


def marks_padding(name: str) -> bool:
    """Whether a mask input is called as what is true at real tokens.

    KerasHub's names are `padding_mask`, `decoder_padding_mask` and so on, Hugging Face's is
    `attention_mask`. PyTorch's `key_padding_mask` is true at padding, so its name says nothing.
    """
    is_padding = "padding_mask" in name and "key_padding_mask" not in name
    return is_padding or name == "attention_mask"


def sides_of(value: Any) -> tuple:
    pair = evaluation.as_pair(value)
    return (value,) if pair is None else pair


def as_numpy(value: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(value) if hasattr(value, "shape") else value)


def key_side(value: Any, dtype: str | None = "bool") -> np.ndarray | None:
    """The key side of a mask input, if it is `(batch, length)`."""
    side = sides_of(value)[-1]
    if side is None:
        return None
    side = as_numpy(side)
    return (side if dtype is None else side.astype(dtype)) if side.ndim == 2 else None


def _length(spec: MaskSpec, given: Mapping[str, Any], side: str) -> int | None:
    """How many queries or keys the inputs speak of."""
    for name, value in given.items():
        sides = sides_of(value)
        of = sides[0 if side == "query" else -1]
        if of is not None:
            shape = masks.as_tensor(of).shape
            if spec.inputs[name].rank is None:
                size = shape[-2 if side == "query" else -1]
                if size != 1:
                    return size
            elif len(shape) == 2:
                return shape[1]
    return None
