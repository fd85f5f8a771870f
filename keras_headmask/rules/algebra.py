"""Specs made of specs, which answer from the answers of their parts: `& | ~` and `PerHead`.

So how much of each tile of the mask a rule allows follows from its leaves, without a look at pairs.
A tile of which nothing is allowed need not be computed; one of which all is needs no mask. A spec
that says nothing of tiles is taken to allow some pairs of each, which is always sound.
"""

import dataclasses
import enum
import functools
import itertools
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np

from keras_headmask.rules import config, words
from keras_headmask.rules.base import (
    Check,
    MaskSpec,
    check_fields,
    check_spec,
    fail,
    leaves,
    merged_inputs,
    register_spec,
    whole_number,
)
from keras_headmask.rules.leaves import Full
from keras_headmask.rules.protocol import Bounds, Sides, Span, Tiles

_PARTS, _PART = 64, 2**14  # tiles, and positions in each, of which `is_local` asks
_LAST_HEAD = 65535
_NAMED = "Heads are named 3, '1-3' (inclusive), '0,4-7' or (4, 7)."
_KEY = r"\s*[0-9]+\s*(-\s*[0-9]+\s*)?"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Join(MaskSpec):
    """Two or more specs; compared as a set, shown in the order written."""

    specs: tuple[MaskSpec, ...]
    symbol = ""

    @classmethod
    def join(cls, left: Any, right: Any) -> MaskSpec:
        """The spec `left & right` or `left | right`."""
        for value, code in ((left, f"SPEC {cls.symbol} ..."), (right, f"... {cls.symbol} SPEC")):
            if isinstance(value, MaskSpec):
                continue
            known = (str, bool, type, types.FunctionType, Mapping, list, tuple)
            if isinstance(value, known) or config.shape_of(value) is not None:
                hint = f"{config.shown(value)}.{config.hint_for(value, code)}"
                raise TypeError(f"`{cls.symbol}` joins mask specs. Received: {hint}")
            return NotImplemented
        return cls.of((left, right))

    @classmethod
    def of(cls, specs: Iterable[MaskSpec]) -> MaskSpec:
        """Flatten and drop repeats, so that regrouping a rule does not change it."""
        parts: list[MaskSpec] = []
        for i, spec in enumerate(specs):
            check_spec(spec, f"specs[{i}]")
            parts.extend(spec.children if type(spec) is cls else (spec,))
        unique = tuple(dict.fromkeys(parts))
        merged_inputs(unique)  # parts that read one input in two forms are refused here
        return cls(unique) if len(unique) > 1 else unique[0]

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return self.specs

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        return self.of(children)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"specs"}, {"specs"})
        place, specs = config.join_path(path, "specs"), fields["specs"]
        if not isinstance(specs, (list, tuple)) or not specs:
            raise config.bad_place(place, f"expected a list of specs. Received: {specs!r}.")
        parts = config.from_json(specs, place)
        return config.located(lambda: cls.of(parts), path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Join) or type(other) is not type(self):
            return NotImplemented
        return frozenset(self.specs) == frozenset(other.specs)

    def __hash__(self) -> int:
        return hash((self.kind, frozenset(self.specs)))

    def __repr__(self) -> str:
        parts = (f"({s!r})" if isinstance(s, Join) else repr(s) for s in self.specs)
        return f" {self.symbol} ".join(parts)


@register_spec("and")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(Join):
    """What every one of `specs` allows; written `a & b`."""

    symbol = "&"

    def in_words(self) -> str:
        return words.joined(self.specs, "; of these only ")


@register_spec("or")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Join):
    """What at least one of `specs` allows; written `a | b`."""

    symbol = "|"

    def in_words(self) -> str:
        return words.joined(self.specs, ", plus ")


@register_spec("not")
@dataclasses.dataclass(frozen=True, repr=False)
class Not(MaskSpec):
    """The exact complement of `spec`; written `~a`."""

    spec: Annotated[MaskSpec, Check(check_spec)]

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (self.spec,)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        (child,) = children
        return ~child

    def in_words(self) -> str:
        return f"all but {words.joined([self.spec], '')}"

    def __invert__(self) -> MaskSpec:
        return self.spec

    def __repr__(self) -> str:
        return f"~({self.spec!r})" if isinstance(self.spec, Join) else f"~{self.spec!r}"


def leaves_under_or(spec: MaskSpec, is_under: bool = False) -> list[MaskSpec]:
    """The leaves that stand under `|` and under no `~`: each may be what alone allows a pair."""
    if spec.kind in ("and", "or"):
        is_under = is_under or spec.kind == "or"
        return [leaf for part in spec.children for leaf in leaves_under_or(part, is_under)]
    return [spec] if is_under and not spec.children else []


# --- A rule for each head ------------------------------------------------------------------------


def _by_number(heads: Any, field: str) -> tuple[tuple[int, MaskSpec], ...]:
    """Each head that a key of `heads` names, with its rule, in rising order."""
    if not isinstance(heads, Mapping):
        written = f"hm.PerHead({{0: {config.call_of(heads) or '...'}}})"
        if isinstance(heads, (list, tuple)):
            written += ", or of a list: hm.PerHead(dict(enumerate(rules)))"
        fail(
            TypeError,
            field,
            f"`{field}` must map head numbers to specs, such as {{0: Window(after=0)}}. Received: "
            f"{heads!r}. Give the rule of each head by its number: {written}.",
        )
    rules: dict[int, MaskSpec] = {}
    for key, spec in heads.items():
        place = f"{field}.{key}"
        check_spec(spec, place, f"hm.PerHead({{{key!r}: SPEC}})")
        if not (numbers := head_numbers(key)):
            fail(ValueError, place, f"{key!r} names no head.")
        for head in numbers:
            if head in rules:
                fail(ValueError, place, f"Head {head} has two rules; name it once.")
            rules[head] = spec
    return tuple(sorted(rules.items(), key=lambda named: named[0]))


_default = functools.partial(check_spec, call="hm.PerHead(..., default=SPEC)")


@register_spec("per_head")
@dataclasses.dataclass(frozen=True, repr=False)
class PerHead(MaskSpec):
    """A rule of its own for some heads, `default` for the rest.

    A `PerHead` inside a spec, another `PerHead` too, is resolved at the same head. One that is
    the rule of some heads and names none of them would never apply: it is refused.

    Args:
        heads: Maps head numbers to specs: an int, an inclusive range `"1-3"`, several `"0,4-7"`, or
            a tuple `(4, 7)`. A head may be named once.
        default: The rule of all other heads.

    Raises:
        TypeError: for a rule that is not a spec, or a key of another type.
        ValueError: for a head that is named twice, a key that names no head, or a `PerHead` that
            is the rule of heads which it does not name.

    >>> from keras_headmask import Full, SameSegment, Window
    >>> PerHead({0: SameSegment("sentence_ids"), "1-3": Window(before=2, after=2)})
    PerHead({0: SameSegment('sentence_ids'), '1-3': Window(before=2, after=2)})
    """

    heads: Annotated[Mapping[Any, MaskSpec], Check(_by_number)]  # kept as sorted pairs
    default: Annotated[MaskSpec, Check(_default)] = Full()  # noqa: RUF009 (it is a value)

    def __post_init__(self) -> None:
        check_fields(self)
        merged_inputs(self.children)  # heads that read one input in two forms are refused here
        heads_of: dict[MaskSpec, list[int]] = {}
        for head, spec in self.heads:
            heads_of.setdefault(spec, []).append(head)
        for spec, numbers in heads_of.items():
            _check_nested(spec, numbers)

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (*dict.fromkeys(spec for _, spec in self.heads), self.default)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        new = dict(zip(self.children, children, strict=True))
        return PerHead({head: new[spec] for head, spec in self.heads}, new[self.default])

    def for_head(self, head: int) -> MaskSpec:
        return dict(self.heads).get(head, self.default).for_head(head)

    def get_config(self) -> dict[str, Any]:
        heads = {str(key): spec.get_config() for key, spec in self._runs()}
        return {"kind": self.kind, "heads": heads, "default": self.default.get_config()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"heads"}, {"heads", "default"})
        place, heads = config.join_path(path, "heads"), fields["heads"]
        if not isinstance(heads, Mapping):
            raise config.bad_place(place, f"expected an object, head to spec. Received: {heads!r}.")
        arguments: dict[str, Any] = {
            "heads": {k: config.build(v, f"{place}.{k}") for k, v in heads.items()}
        }
        if "default" in fields:
            arguments["default"] = config.build(
                fields["default"], config.join_path(path, "default")
            )
        return config.located(lambda: cls(**arguments), path)

    def _runs(self) -> Iterator[tuple[int | str, Any]]:
        """Neighbouring heads with equal rules under one key, as a person would write them."""
        numbered = enumerate(self.heads)
        for (spec, _), run in itertools.groupby(numbered, lambda x: (x[1][1], x[1][0] - x[0])):
            heads = [head for _, (head, _) in run]
            yield (heads[0] if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"), spec

    def __repr__(self) -> str:
        heads = ", ".join(f"{key!r}: {spec!r}" for key, spec in self._runs())
        rest = "" if self.default == Full() else f", default={self.default!r}"
        return f"PerHead({{{heads}}}{rest})"


def _check_nested(spec: MaskSpec, heads: list[int]) -> None:
    """Raise for a `PerHead` in `spec` that names none of the heads it is given to."""
    if isinstance(spec, PerHead) and spec.heads:
        pairs: Any = spec.heads
        named = [head for head, _ in pairs]
        if not set(named) & set(heads):
            outer, inner = (words.heads_in_words(x) for x in (heads, named))
            meant = f"hm.PerHead({{{heads[0]}: {pairs[0][1]!r}}})"
            fail(
                ValueError,
                f"heads.{heads[0]}",
                "A PerHead inside another is resolved at the same head, so it must name a head "
                f"that it is given to. Received: for {outer.lower()}, a PerHead that names only "
                f"{inner.lower()}. Give {outer.lower()} the rule itself, as in {meant}, or name "
                "all heads in one PerHead.",
            )
    for child in spec.children:
        _check_nested(child, heads)


def head_numbers(key: Any) -> list[int]:
    """The heads a key of `PerHead` names: 3, "1-3", "0,4-7" or (4, 7)."""
    if isinstance(key, tuple):
        return [head for part in key for head in head_numbers(part)]
    field, named = f"heads.{key}", f"{_NAMED} Received: {key!r}."
    if not isinstance(key, str):
        if isinstance(key, bool) or not hasattr(type(key), "__index__"):
            fail(TypeError, field, named)
        if (head := whole_number(key, field)) < 0:
            fail(ValueError, field, f"Heads are counted from 0. Received: head {head}.")
        return [head]
    numbers: list[int] = []
    for part in key.split(","):
        if not re.fullmatch(_KEY, part, re.ASCII):
            fail(ValueError, field, named)
        start, _, stop = part.partition("-")
        first, last = int(start), int(stop or start)
        if last < first:
            fail(ValueError, field, f"The range {part!r} of heads runs backwards.")
        if last > _LAST_HEAD:
            fail(ValueError, field, f"Head {last} is beyond any layer's heads.")
        numbers.extend(range(first, last + 1))
    return numbers


# --- Tiles of the mask ----------------------------------------------------------------------------


class Coverage(enum.IntEnum):
    """How much of a tile is allowed. `&` is min, `|` is max, `~` is 2 - c."""

    NONE = 0
    SOME = 1
    ALL = 2


def bounds(rule: MaskSpec, tiles: Tiles, spans: Mapping[MaskSpec, Any]) -> Bounds:
    """Bounds of what `rule` (no `PerHead`) allows in each tile, for NumPy arrays and tensors.

    `spans` holds the spans of the mask inputs for the leaves that read them; a leaf without
    a span may allow some pair of every tile.
    """

    def leaf_bounds(leaf: MaskSpec) -> Bounds:
        if leaf.inputs and leaf not in spans:
            return MaskSpec.coverage(leaf, tiles, {})
        answers = leaf.coverage(tiles, spans.get(leaf, {}))
        return Bounds(*(_as_array(answer, tiles) for answer in answers))

    return rule.fold(
        leaf_bounds,
        both=lambda a, b: Bounds(a.possible & b.possible, a.certain & b.certain),
        either=lambda a, b: Bounds(a.possible | b.possible, a.certain | b.certain),
        neither=lambda a: Bounds(~a.certain, ~a.possible),
    )


def _as_array(answer: Any, tiles: Tiles) -> Any:
    """A plain `True` or `False` of all tiles as an array: Python's `~True` is -2, which is true."""
    if not isinstance(answer, bool):
        return answer
    return tiles.key_first <= tiles.key_last if answer else tiles.key_first > tiles.key_last


def farthest(spec: MaskSpec) -> int | None:
    """The greatest distance or position at which what `spec` allows may change, by its fields.

    `None` if a leaf has none to say so. (What inputs decide, they decide at any distance.)
    """
    found = [0]
    for leaf in leaves(spec):
        fields = {} if leaf.inputs else dataclasses.asdict(leaf)  # type: ignore[call-overload]
        numbers = {name: abs(x) for name, x in fields.items() if isinstance(x, int)}
        if not numbers and leaf.reads_query_positions:
            return None
        size = numbers.pop("size", 1)  # of a block, which the other fields of `Chunk` count
        found.append(size * max([1, *numbers.values()]))
    return max(found)


@functools.lru_cache(1024)
def is_local(rule: MaskSpec, reads: tuple) -> bool:
    """Whether a query sees few keys (an eighth) however long the sequence is.

    `reads` lists, for each leaf whose inputs are known, their names and whether they are flags. It
    asks `coverage` of a long sequence that is made up, whose ids rise slowly. Flags are known
    nowhere, but those that open whole columns or rows are few, as in Longformer.
    """
    number = np.arange(_PARTS) * _PART
    rare = leaves_under_or(rule)

    def sides(low: np.ndarray, high: np.ndarray) -> Sides:
        on_axes = [(x[None, :, None], x[None, None]) for x in (low, high)]
        return Sides(*(Span(*of_axis) for of_axis in zip(*on_axes, strict=True)))

    spans = {
        leaf: {
            name: sides(0 * number, 0 * number + (leaf not in rare))
            if is_flag
            else sides(number, number + _PART - 1)
            for name, is_flag in names
        }
        for leaf, names in reads
    }
    length = _PARTS * _PART
    possible, _ = bounds(rule, tile_grid(length, length, _PART, _PART), spans)
    return bool(np.broadcast_to(possible, (1, _PARTS, _PARTS)).mean() <= 1 / 8)


def starts(length: int, size: int, axis: int) -> np.ndarray:
    return np.expand_dims(np.arange(0, length, size), 1 - axis)


def tile_grid(
    queries: Any,
    keys: Any,
    tile_queries: int,
    tile_keys: int,
    query_offset: Any = 0,
    starts: Callable[[Any, int, int], Any] = starts,
    at_most: Callable[[Any, Any], Any] = np.minimum,
) -> Tiles:
    """The tiles of a mask of `queries` x `keys`; the last of a row or column may be cut.

    `starts(length, size, axis)` gives every `size`th position, on its axis, and `at_most` the
    lesser of two: by NumPy, or by a backend for lengths that are tensors.
    """
    rows, columns = starts(queries, tile_queries, 0), starts(keys, tile_keys, 1)
    return Tiles(
        rows + query_offset,
        at_most(rows + tile_queries, queries) - 1 + query_offset,
        columns,
        at_most(columns + tile_keys, keys) - 1,
    )
