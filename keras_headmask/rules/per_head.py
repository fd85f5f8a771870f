"""A rule for each head."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from keras_headmask.rules import config, fields, words
from keras_headmask.rules.algebra import Compound
from keras_headmask.rules.base import MaskSpec, check_spec, merged_inputs, register_spec
from keras_headmask.rules.fields import Check, fail
from keras_headmask.rules.positions import Full

_LAST_HEAD = 65535
_NAMED = "Heads are named 3, '1-3' (inclusive), '0,4-7' or (4, 7)."
_PART = r"\s*[0-9]+\s*(-\s*[0-9]+\s*)?"


def _by_number(heads: Any, field: str) -> tuple[tuple[int, MaskSpec], ...]:
    """Each head that a key of `heads` names, with its rule, in rising order."""
    are_pairs = isinstance(heads, tuple) and all(  # as they are kept: for `dataclasses.replace`
        isinstance(pair, tuple) and len(pair) == 2 for pair in heads
    )
    if not isinstance(heads, Mapping) and not are_pairs:
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
    for key, spec in heads if are_pairs else heads.items():
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
class PerHead(Compound):
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
        fields.check_fields(self)
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
        rules = dict(self.heads)
        for run in words.runs(rules):
            for spec, equal in itertools.groupby(run, rules.get):
                heads = list(equal)
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
        if (head := fields.whole_number(key, field)) < 0:
            fail(ValueError, field, f"Heads are counted from 0. Received: head {head}.")
        return [head]
    numbers: list[int] = []
    for part in key.split(","):
        if not re.fullmatch(_PART, part, re.ASCII):
            fail(ValueError, field, named)
        start, _, stop = part.partition("-")
        first, last = int(start), int(stop or start)
        if last < first:
            fail(ValueError, field, f"The range {part!r} of heads runs backwards.")
        if last > _LAST_HEAD:
            fail(ValueError, field, f"Head {last} is beyond any layer's heads.")
        numbers.extend(range(first, last + 1))
    return numbers
