"""A rule for each head, and which heads share one."""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from keras_headmask.rules import config, words
from keras_headmask.rules.base import Compound, MaskSpec, check_spec, merged_inputs, register_spec
from keras_headmask.rules.fields import RULE, fail, whole_number
from keras_headmask.rules.positions import Full

_FULL = Full()
_LAST_HEAD = 65535
_NAMED = "Heads are named 3, '1-3' (inclusive), '0,4-7' or (4, 7)."
_PART = r"\s*[0-9]+\s*(-\s*[0-9]+\s*)?"


@register_spec("per_head")
@dataclasses.dataclass(frozen=True, repr=False, init=False)
class PerHead(Compound):
    """A rule of its own for some heads, `default` for the rest.

    A `PerHead` inside a spec, another `PerHead` too, is resolved at the same head.

    Args:
        heads: Maps head numbers to specs: an int, an inclusive range `"1-3"`, several `"0,4-7"`, or
            a tuple `(4, 7)`. A head may be named once.
        default: The rule of all other heads.

    Raises:
        TypeError: for rules that are no specs, or keys that name no heads.
        ValueError: for a head that is named twice, or a text that names no heads.

    >>> from keras_headmask import Full, SameSegment, Window
    >>> PerHead({0: SameSegment("sentence_ids"), "1-3": Window(before=2, after=2)})
    PerHead({0: SameSegment('sentence_ids'), '1-3': Window(before=2, after=2)})
    """

    heads: tuple[tuple[int, MaskSpec], ...]
    default: MaskSpec

    def __init__(self, heads: Mapping[Any, MaskSpec], default: MaskSpec = _FULL):
        if not isinstance(heads, Mapping):
            written = f"hm.PerHead({{0: {config.call_of(heads) or '...'}}})"
            if isinstance(heads, (list, tuple)):
                written += ", or of a list: hm.PerHead(dict(enumerate(rules)))"
            fail(
                TypeError,
                "heads",
                "`heads` must map head numbers to specs, such as {0: Window(after=0)}. Received: "
                f"{heads!r}. Give the rule of each head by its number: {written}.",
            )
        rules: dict[int, MaskSpec] = {}
        for key, spec in heads.items():
            check_spec(spec, f"heads.{key}", f"hm.PerHead({{{key!r}: SPEC}})")
            numbers = head_numbers(key)
            if not numbers:
                fail(ValueError, f"heads.{key}", f"{key!r} names no head.")
            for head in numbers:
                if head in rules:
                    fail(ValueError, f"heads.{key}", f"Head {head} has two rules; name it once.")
                rules[head] = spec
        check_spec(default, "default", "hm.PerHead(..., default=SPEC)")
        object.__setattr__(self, "heads", tuple((head, rules[head]) for head in sorted(rules)))
        object.__setattr__(self, "default", default)
        merged_inputs(self.children)

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (*dict.fromkeys(spec for _, spec in self.heads), self.default)

    def children_at(self, head: int) -> tuple[MaskSpec, ...]:
        # Bisection: a dict would be made anew from all heads for each of them.
        place = bisect.bisect_left(self.heads, head, key=lambda named: named[0])
        is_named = place < len(self.heads) and self.heads[place][0] == head
        return (self.heads[place][1] if is_named else self.default,)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        new = dict(zip(self.children, children, strict=True))
        return PerHead({head: new[spec] for head, spec in self.heads}, new[self.default])

    def for_head(self, head: int) -> MaskSpec:
        return self.children_at(head)[0].for_head(head)

    def get_config(self) -> dict[str, Any]:
        heads = {str(key): spec.get_config() for key, spec in self._runs()}
        return {"kind": self.kind, "heads": heads, "default": self.default.get_config()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"heads"}, {"heads", "default"})
        place, heads = config.join_path(path, "heads"), fields["heads"]
        if not isinstance(heads, Mapping):
            raise config.bad_place(place, f"expected an object, head to spec. Received: {heads!r}.")
        rules = {k: config.build(v, config.join_path(place, str(k))) for k, v in heads.items()}
        default = _FULL
        if "default" in fields:
            default = config.build(fields["default"], config.join_path(path, "default"))
        return config.located(lambda: cls(rules, default), path)

    @classmethod
    def json_fields(cls) -> dict[str, dict[str, Any]]:
        heads = {
            "description": 'Head numbers to rules: "0", "1-3" (inclusive), "0,4-7".',
            "type": "object",
            "propertyNames": {"pattern": f"^{_PART}(,{_PART})*$"},
            "additionalProperties": RULE,
        }
        return {"heads": heads, "default": RULE | {"default": _FULL.get_config()}}

    def _runs(self) -> Iterator[tuple[int | str, MaskSpec]]:
        """Neighbouring heads with equal rules under one key, as a person would write them."""
        rules = dict(self.heads)
        for run in words.runs(rules):
            for spec, equal in itertools.groupby(run, rules.__getitem__):
                heads = list(equal)
                yield (heads[0] if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"), spec

    def __repr__(self) -> str:
        heads = ", ".join(f"{key!r}: {spec!r}" for key, spec in self._runs())
        rest = "" if self.default == _FULL else f", default={self.default!r}"
        return f"PerHead({{{heads}}}{rest})"


def head_numbers(key: Any) -> list[int]:
    """The heads a key of `PerHead` names: 3, "1-3", "0,4-7" or (4, 7)."""
    field, received = f"heads.{key}", f"Received: {key!r}."
    if isinstance(key, tuple):
        return [head for part in key for head in head_numbers(part)]
    if not isinstance(key, str):
        if isinstance(key, bool) or not hasattr(type(key), "__index__"):
            fail(TypeError, field, f"{_NAMED} {received}")
        head = whole_number(key, field)
        if head < 0:
            fail(ValueError, field, f"Heads are counted from 0. Received: head {head}.")
        return [head]
    numbers: list[int] = []
    for part in key.split(","):
        if not re.fullmatch(_PART, part, re.ASCII):
            fail(ValueError, field, f"{_NAMED} {received}")
        ends = [int(number) for number in re.findall("[0-9]+", part)]
        first, last = ends[0], ends[-1]
        if last < first:
            fail(ValueError, field, f"The range {part!r} of heads runs backwards.")
        if last > _LAST_HEAD:
            fail(ValueError, field, f"Head {last} is beyond any layer's heads.")
        numbers.extend(range(first, last + 1))
    return numbers
