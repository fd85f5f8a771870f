"""`& | ~`: specs made of specs, which answer from the answers of their parts."""

import dataclasses
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from keras_headmask.rules import config, fields, words
from keras_headmask.rules.base import MaskSpec, check_spec, merged_inputs, register_spec
from keras_headmask.rules.protocol import Sampling


class Compound(MaskSpec):
    """A spec made of others: here, what holds for all of them."""

    _decides: bool | None = None  # the `constant` of one part that is that of the whole

    @property
    def constant(self) -> bool | None:
        answers = {child.constant for child in self.children}
        if self._decides in answers:
            return self._decides
        return answers.pop() if len(answers) == 1 else None

    @property
    def reads_query_positions(self) -> bool:
        return any(child.reads_query_positions for child in self.children)

    @property
    def sampling(self) -> Sampling:
        parts = [child.sampling for child in self.children]
        known = [part.distance for part in parts if part.distance is not None]
        return Sampling(distance=max(known) if len(known) == len(parts) else None)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Join(Compound):
    """Two or more specs; compared as a set, shown in the order written."""

    specs: tuple[MaskSpec, ...]
    symbol = ""

    @classmethod
    def join(cls, left: Any, right: Any) -> MaskSpec:
        """The spec `left & right` or `left | right`."""
        for value, code in ((left, f"SPEC {cls.symbol} ..."), (right, f"... {cls.symbol} SPEC")):
            known = (str, bool, type, types.FunctionType, Mapping, list, tuple)
            if isinstance(value, known) or config.shape_of(value) is not None:
                hint = f"{config.shown(value)}.{config.hint_for(value, code)}"
                raise TypeError(f"`{cls.symbol}` joins mask specs. Received: {hint}")
            if not isinstance(value, MaskSpec):
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
    _decides = False

    def in_words(self) -> str:
        return words.joined(self.specs, "; of these only ", without=True)


@register_spec("or")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Join):
    """What at least one of `specs` allows; written `a | b`."""

    symbol = "|"
    _decides = True

    def in_words(self) -> str:
        return words.joined(self.specs, ", plus ", without=False)


@register_spec("not")
@dataclasses.dataclass(frozen=True, repr=False)
class Not(Compound):
    """The exact complement of `spec`; written `~a`."""

    spec: Annotated[MaskSpec, fields.Check(check_spec)]

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (self.spec,)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        (child,) = children
        return ~child

    @property
    def constant(self) -> bool | None:
        return None if self.spec.constant is None else not self.spec.constant

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
