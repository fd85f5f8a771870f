"""A rule for each head, and which heads share one."""

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from keras_headmask.rules import config, words
from keras_headmask.rules.base import (
    Compound,
    MaskSpec,
    check_spec,
    merged_inputs,
    register_spec,
)
from keras_headmask.rules.positions import Full

_FULL = Full()
_LAST_HEAD = 65535


@register_spec("per_head")
@dataclasses.dataclass(frozen=True, repr=False, init=False)
class PerHead(Compound):
    """A rule of its own for some heads, `default` for the rest.

    `heads` maps head numbers to specs: an int, an inclusive range `"1-3"`, several `"0,4-7"`, or a
    tuple `(4, 7)`. A head may be named once. A `PerHead` inside a spec, another `PerHead` too, is
    resolved at the same head.

    >>> from keras_headmask import Full, SameSegment, Window
    >>> PerHead({0: SameSegment("sentence_ids"), "1-3": Window(before=2, after=2)})
    PerHead({0: SameSegment('sentence_ids'), '1-3': Window(before=2, after=2)})
    """

    heads: tuple[tuple[int, MaskSpec], ...]
    default: MaskSpec

    def __init__(self, heads: Mapping[Any, MaskSpec], default: MaskSpec = _FULL):
        if not isinstance(heads, Mapping):
            config.fail(
                TypeError,
                "heads",
                "`heads` must map head numbers to specs, such as {0: Window(after=0)}. "
                f"Received: {heads!r}.{_hint(heads)}",
            )
        rules: dict[int, MaskSpec] = {}
        for key, spec in heads.items():
            check_spec(spec, f"heads.{key}", f"hm.PerHead({{{key!r}: SPEC}})")
            numbers = head_numbers(key)
            if not numbers:
                config.fail(ValueError, f"heads.{key}", f"{key!r} names no head.")
            for head in numbers:
                if head in rules:
                    config.fail(
                        ValueError, f"heads.{key}", f"Head {head} has two rules; name it once."
                    )
                rules[head] = spec
        object.__setattr__(self, "heads", tuple(sorted(rules.items(), key=lambda kv: kv[0])))
        object.__setattr__(
            self, "default", check_spec(default, "default", "hm.PerHead(..., default=SPEC)")
        )
        merged_inputs(self.children)

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (*dict.fromkeys(spec for _, spec in self.heads), self.default)

    def children_at(self, head: int) -> tuple[MaskSpec, ...]:
        # Looked up by halves: a dict for each of many heads would be made from all of them.
        place = bisect.bisect_left(self.heads, head, key=lambda named: named[0])
        is_named = place < len(self.heads) and self.heads[place][0] == head
        return (self.heads[place][1] if is_named else self.default,)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        new = dict(zip(self.children, children, strict=True))
        return PerHead({head: new[spec] for head, spec in self.heads}, new[self.default])

    def for_head(self, head: int) -> MaskSpec:
        return self.children_at(head)[0].for_head(head)

    def get_config(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "heads": {str(key): spec.get_config() for key, spec in self._runs()},
            "default": self.default.get_config(),
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"heads"}, {"heads", "default"})
        place = config.join_path(path, "heads")
        heads = fields["heads"]
        if not isinstance(heads, Mapping):
            raise config.bad_place(place, f"expected an object, head to spec. Received: {heads!r}.")
        rules = {k: config.build(v, config.join_path(place, str(k))) for k, v in heads.items()}
        rest = {}
        if "default" in fields:
            place = config.join_path(path, "default")
            rest["default"] = config.build(fields["default"], place)
        return config.located(lambda: cls(rules, **rest), path)

    @classmethod
    def json_fields(cls) -> dict[str, dict[str, Any]]:
        number = r"\s*[0-9]+\s*(-\s*[0-9]+\s*)?"
        heads = {
            "description": 'Head numbers to rules: "0", "1-3" (inclusive), "0,4-7".',
            "type": "object",
            "propertyNames": {"pattern": f"^{number}(,{number})*$"},
            "additionalProperties": config.RULE,
        }
        return {"heads": heads, "default": config.RULE | {"default": _FULL.get_config()}}

    def _runs(self) -> Iterator[tuple[int | str, MaskSpec]]:
        """Neighbouring heads with equal rules under one key, as a person would write them."""
        rules = dict(self.heads)
        for run in words.runs(list(rules)):
            for spec, equal in itertools.groupby(run, rules.get):
                heads = list(equal)
                one = len(heads) == 1
                yield (heads[0] if one else f"{heads[0]}-{heads[-1]}"), spec

    def __repr__(self) -> str:
        heads = ", ".join(f"{key!r}: {spec!r}" for key, spec in self._runs())
        rest = "" if self.default == _FULL else f", default={self.default!r}"
        return f"PerHead({{{heads}}}{rest})"


def _hint(heads: Any) -> str:
    """What to write for rules that come without the numbers of their heads."""
    rule = config.call_of(heads) or "..."
    hint = f" Give the rule of each head by its number: hm.PerHead({{0: {rule}}})"
    if isinstance(heads, (list, tuple)):
        hint += ", or of a list: hm.PerHead(dict(enumerate(rules)))"
    return f"{hint}."


def head_numbers(key: Any) -> list[int]:
    """The heads a key of `PerHead` names: 3, "1-3", "0,4-7" or (4, 7)."""
    field = f"heads.{key}"
    if isinstance(key, tuple):
        return [head for part in key for head in head_numbers(part)]
    if isinstance(key, str):
        numbers = []
        for part in key.split(","):
            first, dash, last = (text.strip() for text in part.partition("-"))
            ends = (first, last) if dash else (first,)
            if not all(text.isascii() and text.isdecimal() for text in ends):
                config.fail(
                    ValueError,
                    field,
                    f"Heads are named 3, '1-3' (inclusive), '0,4-7' or (4, 7). Received: {key!r}.",
                )
            stop = int(last if dash else first)
            if stop < int(first):
                config.fail(ValueError, field, f"The range {part!r} of heads runs backwards.")
            if stop > _LAST_HEAD:
                config.fail(ValueError, field, f"Head {stop} is beyond any layer's heads.")
            numbers.extend(range(int(first), stop + 1))
        return numbers
    if isinstance(key, bool) or not hasattr(type(key), "__index__"):
        config.fail(
            TypeError,
            field,
            f"Heads are named 3, '1-3' (inclusive), '0,4-7' or (4, 7). Received: {key!r}.",
        )
    head = config.whole_number(key, field)
    if head < 0:
        config.fail(ValueError, field, f"Heads are counted from 0. Received: head {head}.")
    return [head]
