"""A rule as whole masks in NumPy, for whatever its inputs hold: what a lint looks at."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_headmask.masks import Mask
from keras_headmask.rules import evaluation, fields, offsets, words
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.examples import length_of

_SHORTEST, _LONGEST = 16, 1024  # positions, where no length is given
MOST_UNKNOWN = 6  # leaves without inputs; all combinations of their answers are tried
_MOST_WORK = 2**24  # pairs x combinations, where the length may be chosen
_MOST_PAIRS = 2**26  # where it is given


class Subject:
    """A rule, the lengths to look at it, and its groups of heads.

    `enough` is a length at which every number of the rule matters, if there is a bearable one: then
    `is_enough`, and what does nothing at that length does nothing at any.
    """

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
        self.offset = offsets.checked_offset(query_offset)
        self.heads = words.enough_heads(spec) if num_heads is None else num_heads
        self.groups = head_groups(spec, self.heads)
        self.given = dict(given or {})
        for name, length in (("queries", queries), ("keys", keys)):
            if length is not None:
                fields.whole_number(length, name, at_least=1)
        padded = None if padding is None else padding.shape[1]
        of_queries, of_keys = (length_of(spec, self.given, side) or padded for side in (0, -1))
        readers = [leaf for leaf in leaves(spec) if leaf.inputs]
        self.unknown = [leaf for leaf in readers if not self.has(leaf)]
        most = int((_MOST_WORK / 2 ** min(len(readers), MOST_UNKNOWN)) ** 0.5)
        distance = spec.sampling.distance
        wanted = _LONGEST if distance is None else 3 * distance + 2
        self.enough = max(_SHORTEST, min(wanted, _LONGEST, most))
        self.is_enough = distance is not None and distance < self.enough
        self.is_chosen = not any((queries, keys, of_queries, of_keys))
        self.queries = queries or of_queries or keys or of_keys or self.enough
        self.keys = keys or of_keys or self.queries
        if self.queries * self.keys > _MOST_PAIRS:
            raise ValueError(
                f"A lint looks at whole masks, and {self.queries} x {self.keys} pairs are more "
                f"than {_MOST_PAIRS}. Pass a smaller number of queries and keys, or shorter "
                "examples: what is wrong with a rule shows there, too."
            )
        self._values: dict[Any, np.ndarray] = {}

    @property
    def self_attention(self) -> bool:
        """Whether query i and key i are one token, as far as is known."""
        same_length = self.queries == self.keys > 1
        return same_length and not self.is_cross and self.offset == 0

    def has(self, leaf: MaskSpec) -> bool:
        return leaf.inputs.keys() <= self.given.keys()

    def answers(
        self, rules: tuple[MaskSpec, ...], heads: tuple[int, ...], with_data: bool = True
    ) -> Iterator[list[np.ndarray]]:
        """The masks of `rules` in `heads`, which obey one, for each state of what is unknown.

        Without data at `enough` x `enough`, and every input is unknown.
        """
        size = (self.queries, self.keys) if with_data else (self.enough, self.enough)
        rules = tuple(rule.for_head(heads[0]) for rule in rules)
        values, unknown = {}, []
        for leaf in dict.fromkeys(leaf for rule in rules for leaf in leaves(rule)):
            if leaf.inputs and not (with_data and self.has(leaf)):
                unknown.append(leaf)
                continue
            if (leaf, size) not in self._values:
                inputs = {name: self.given[name] for name in leaf.inputs}
                mask = evaluation.make_mask(leaf, *size, self.heads, inputs, self.offset)
                self._values[leaf, size] = ops.convert_to_numpy(mask)
            value = self._values[leaf, size]  # (B or 1, H or 1, *size)
            values[leaf] = value if value.shape[1] == 1 else value[:, list(heads)]
        for states in itertools.product((True, False), repeat=len(unknown)):
            values |= {x: np.full((1, 1, *size), s) for x, s in zip(unknown, states, strict=True)}
            yield [
                rule.fold(values.__getitem__, np.logical_and, np.logical_or, np.logical_not)
                for rule in rules
            ]

    def same(
        self, one: MaskSpec, other: MaskSpec, *groups: tuple[int, ...], with_data: bool = True
    ) -> bool:
        """Whether two rules allow each of `groups` of heads the same, as for `answers`."""
        answers = (self.answers((one, other), heads, with_data) for heads in groups)
        return all(bool((a == b).all()) for of_group in answers for a, b in of_group)

    def possible_for(self, rule: MaskSpec, heads: tuple[int, ...]) -> Mask:
        """The pairs that may be allowed, whatever the unknown inputs hold."""
        return functools.reduce(np.logical_or, (mask for (mask,) in self.answers((rule,), heads)))

    @functools.cached_property
    def possible(self) -> Mask:
        """The pairs that may be allowed to each head: `(B, H, T, S)`."""
        parts = [(list(heads), self.possible_for(rule, heads)) for rule, heads in self.groups]
        padded = 1 if self.padding is None else len(self.padding)
        batch = max(padded, *(len(part) for _, part in parts))
        result = np.zeros((batch, self.heads, self.queries, self.keys), bool)
        for heads, part in parts:
            result[:, heads] = part
        return result


def numbers_of(flags: np.ndarray) -> tuple[int, ...]:
    """Where `flags` is true."""
    return tuple(np.flatnonzero(flags).tolist())
