"""The algebra of mask specs: which keys each query may attend to, as a value.

A spec knows no length, batch or backend. Leaves say something about one pair of positions, by
where they stand (`positions.py`) or by what is read there (`inputs.py`); `& | ~` and
`PerHead` combine them. Nothing here imports Keras.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from keras_headmask.rules import config, fields, words
from keras_headmask.rules.protocol import InputType, Protocol

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type)


class MaskSpec(Protocol):
    """Which keys each query may attend to, apart from any length, batch or backend.

    Specs are immutable, hashable values. Combine them with `&` (and), `|` (or) and `~` (not).
    `True` in the mask they make means: this query may attend to this key.

    To add a kind of your own, write a frozen dataclass that subclasses `MaskSpec`, decorate it
    with `register_spec`, and define `allowed`; override `inputs` and `prepare` if it reads data.
    Every other member has an answer that is right for any spec; better answers make it faster.
    """

    def __post_init__(self) -> None:
        fields.check_fields(self)

    @property
    def children(self) -> tuple["MaskSpec", ...]:
        """The specs this one is made of."""
        return ()

    def children_at(self, head: int) -> tuple["MaskSpec", ...]:
        """Those of `children` that concern head number `head`."""
        return self.children

    def with_children(self, children: Collection["MaskSpec"]) -> "MaskSpec":
        """The same node, made of `children`."""
        return self

    def for_head(self, head: int) -> "MaskSpec":
        """The rule that head number `head` obeys: this spec without any `PerHead`."""
        return self.with_children([child.for_head(head) for child in self.children])

    def fold(
        self,
        leaf: Callable[["MaskSpec"], T],
        both: Callable[[T, T], T],
        either: Callable[[T, T], T],
        neither: Callable[[T], T],
    ) -> T:
        """`leaf` of every leaf, joined by `both` for `&` and `either` for `|`; `neither` for `~`.

        For a spec without `PerHead`.
        """
        if isinstance(self, Not):
            return neither(self.spec.fold(leaf, both, either, neither))
        if isinstance(self, Join):
            parts = [spec.fold(leaf, both, either, neither) for spec in self.specs]
            return functools.reduce(both if isinstance(self, And) else either, parts)
        return leaf(self)

    def describe(self, num_heads: int | None = None) -> str:
        """This rule in plain English, a sentence for each group of heads that share a rule.

        Equal specs read alike; heads that see everything come last.

        Args:
            num_heads: The number of heads; it names the heads that no rule names, which are "all
                other heads" without it.

        Returns:
            The sentences, in one line.

        Raises:
            ValueError: for a head that this spec names and `num_heads` does not reach, or a
                `num_heads` above 100,000.

        >>> from keras_headmask import PerHead, SameSentence, recipes
        >>> print(recipes.causal().describe())
        A token sees itself and every token before it.
        >>> print(PerHead({0: SameSentence(102)}, recipes.padding()).describe(num_heads=12))
        Head 0: a token sees its own sentence (sentences end with token 102). Heads 1 to 11: every \
token that `padding_mask` does not hide.
        """
        return " ".join(words.sentences(self, num_heads))

    def __and__(self, other: "MaskSpec") -> "MaskSpec":
        return _join(And, self, other)

    def __or__(self, other: "MaskSpec") -> "MaskSpec":
        return _join(Or, self, other)

    def __rand__(self, other: Any) -> "MaskSpec":  # a spec on the left never comes here
        return _join(And, other, self)

    def __ror__(self, other: Any) -> "MaskSpec":
        return _join(Or, other, self)

    def __invert__(self) -> "MaskSpec":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask spec has no truth value. Combine specs with & | ~ (not `and`, `or`, `not`), "
            "and test for a missing spec with `is None`."
        )


def register_spec(kind: str) -> Callable[[_Class], _Class]:
    """Class decorator: let a spec of your own join the language under a permanent name.

    The class must be a frozen dataclass that subclasses `MaskSpec`. Its fields are what is saved
    and what is compared: specs with equal fields are one.

    Args:
        kind: The name under which the spec is saved, an identifier.

    Returns:
        The decorator, which returns its class.

    Raises:
        TypeError: for another kind of class, a field that hides a member of `MaskSpec`, a field
            with `compare=False`, or `eq=False` without an `__eq__`.
        ValueError: for a name that another class has, or that is no identifier.
    """

    def decorate(cls: Any) -> Any:
        is_spec = isinstance(cls, type) and issubclass(cls, MaskSpec)
        params = vars(cls).get("__dataclass_params__") if is_spec else None
        if params is None or not params.frozen:
            raise TypeError(
                "A spec must be a frozen dataclass that subclasses MaskSpec: put "
                f"@dataclass(frozen=True) right under @register_spec({kind!r}). Received: {cls!r}."
            )
        if taken := sorted({f.name for f in dataclasses.fields(cls)} & set(dir(MaskSpec))):
            raise TypeError(
                f"A field named `{taken[0]}` would hide the `{taken[0]}` that every spec has. "
                f"Rename it in {cls.__name__}."
            )
        if hidden := [f.name for f in dataclasses.fields(cls) if not f.compare]:
            raise TypeError(
                f"Every field of a spec must compare, since specs that are equal are merged: with "
                f"compare=False on {hidden}, one value of `{hidden[0]}` would replace another. "
                f"Received: {cls.__name__}. Leave `compare` out."
            )
        if cls.__eq__ is object.__eq__:
            raise TypeError(
                "Specs are values: those with equal fields must be equal, or a saved rule would "
                f"not equal itself. {cls.__name__} has eq=False and no `__eq__`: leave eq=False "
                "out."
            )
        config.register(kind, cls)
        cls.kind = kind
        return cls

    return decorate


def check_spec(value: Any, field: str, call: str = "SPEC") -> MaskSpec:
    """`value`, which must be a spec, with a hint for a value that resembles one.

    `call` is the code of the caller, with SPEC in place of the spec: "hm.draw(SPEC, ...)".
    """
    if isinstance(value, MaskSpec):
        return value
    shape = None if isinstance(value, type) else getattr(value, "shape", None)
    shown = repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    hint = config.hint_for(value, call)
    fields.fail(TypeError, field, f"`{field}` must be a mask spec. Received: {shown}.{hint}")


class Compound(MaskSpec):
    """A spec made of others, which answers from their answers: here, what holds for all of them."""

    _joint = staticmethod(all)  # all parts must say yes, or any
    _decides: bool | None = None  # the `constant` of one part that is that of the whole

    @property
    def inputs(self) -> dict[str, InputType]:
        return merged_inputs(self.children)

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
    def is_local(self) -> bool:
        return self._joint(child.is_local for child in self.children)

    @property
    def is_sparse(self) -> bool:
        return self._joint(child.is_sparse for child in self.children)

    def may_leave_gaps(self, taken_out: Collection[Protocol] = ()) -> bool:
        return any(child.may_leave_gaps(taken_out) for child in self.children)

    @property
    def reach(self) -> int | None:
        known = [child.reach for child in self.children if child.reach is not None]
        return max(known) if len(known) == len(self.children) else None

    def closes(self, side: str) -> bool:
        return self._joint(child.closes(side) for child in self.children)


_SCHEMA = {"type": "array", "items": fields.RULE, "minItems": 1}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Join(Compound):
    """Two or more specs; compared as a set, shown in the order written."""

    specs: Annotated[tuple[MaskSpec, ...], fields.Limits(_SCHEMA)]
    symbol = ""

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return self.specs

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        return _joined(type(self), children)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"specs"}, {"specs"})
        place, specs = config.join_path(path, "specs"), fields["specs"]
        if not isinstance(specs, (list, tuple)) or not specs:
            raise config.bad_place(place, f"expected a list of specs. Received: {specs!r}.")
        parts = config.from_json(specs, place)
        return config.located(lambda: _joined(cls, parts), path)

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
    _joint = staticmethod(any)
    _decides = False

    def in_words(self) -> words.Words:
        return words.of_and(self.specs)


@register_spec("or")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Join):
    """What at least one of `specs` allows; written `a | b`."""

    symbol = "|"
    _decides = True

    @property
    def is_local(self) -> bool:
        parts = [spec for spec in self.specs if spec.constant is not False and not spec.is_sparse]
        return bool(parts) and all(spec.is_local for spec in parts)

    def may_leave_gaps(self, taken_out: Collection[Protocol] = ()) -> bool:
        several = sum(spec not in taken_out for spec in self.specs) > 1
        return several or super().may_leave_gaps(taken_out)

    def in_words(self) -> words.Words:
        return words.of_or(self.specs)


@register_spec("not")
@dataclasses.dataclass(frozen=True, repr=False)
class Not(Compound):
    """The exact complement of `spec`; written `~a`."""

    spec: MaskSpec
    is_local = is_sparse = False

    def __post_init__(self) -> None:
        check_spec(self.spec, "spec")

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (self.spec,)

    def with_children(self, children: Collection[MaskSpec]) -> MaskSpec:
        (child,) = children
        return ~child

    @property
    def constant(self) -> bool | None:
        return None if self.spec.constant is None else not self.spec.constant

    def may_leave_gaps(self, taken_out: Collection[Protocol] = ()) -> bool:
        return True

    def closes(self, side: str) -> bool:
        return False

    def in_words(self) -> words.Words:
        return words.of_not(self.spec)

    def __invert__(self) -> MaskSpec:
        return self.spec

    def __repr__(self) -> str:
        return f"~({self.spec!r})" if isinstance(self.spec, Join) else f"~{self.spec!r}"


def _join(kind: type[Join], left: Any, right: Any) -> MaskSpec:
    for value in (left, right):
        if isinstance(value, (str, bool, type, types.FunctionType, Mapping, list, tuple)):
            sides = ("SPEC", "...") if value is left else ("...", "SPEC")
            hint = config.hint_for(value, f" {kind.symbol} ".join(sides))
            raise TypeError(f"`{kind.symbol}` joins mask specs. Received: {value!r}.{hint}")
        if not isinstance(value, MaskSpec):
            return NotImplemented
    return _joined(kind, (left, right))


def _joined(kind: Any, specs: Iterable[MaskSpec]) -> MaskSpec:
    """Flatten and drop repeats, so that regrouping a rule does not change it."""
    parts: list[MaskSpec] = []
    for i, spec in enumerate(specs):
        check_spec(spec, f"specs[{i}]")
        parts.extend(spec.children if type(spec) is kind else (spec,))
    unique = tuple(dict.fromkeys(parts))
    merged_inputs(unique)  # parts that read one input in two ways are refused here
    return kind(unique) if len(unique) > 1 else unique[0]


def merged_inputs(specs: tuple[MaskSpec, ...]) -> dict[str, InputType]:
    """The inputs of several specs together; one name means one tensor."""
    merged: dict[str, InputType] = {}
    for spec in specs:
        for name, new in spec.inputs.items():
            old = merged.setdefault(name, new)
            if old.rank != new.rank:
                raise ValueError(
                    f"The mask input {name!r} is read both as a whole mask and as one value per "
                    "position. Give the two tensors two names."
                )
            dtype = old.dtype if old.dtype == new.dtype else "int32"  # integers serve as flags too
            merged[name] = InputType(old.rank, dtype, old.sides | new.sides)
    return merged


def leaves(spec: MaskSpec) -> list[MaskSpec]:
    """Every leaf of `spec`, each equal one once."""
    if not spec.children:
        return [spec]
    return list(dict.fromkeys(leaf for child in spec.children for leaf in leaves(child)))


def joins(spec: MaskSpec, head: int | None = None) -> Iterator[Join]:
    """Every `&` and `|` of `spec` as written, or those that concern `head`."""
    if isinstance(spec, Join):
        yield spec
    for child in spec.children if head is None else spec.children_at(head):
        yield from joins(child, head)


def leaves_under_or(spec: MaskSpec, is_under: bool = False) -> list[MaskSpec]:
    """The leaves that stand under `|` and under no `~`: each may be what alone allows a pair."""
    if isinstance(spec, Join):
        is_under = is_under or isinstance(spec, Or)
        return [leaf for part in spec.specs for leaf in leaves_under_or(part, is_under)]
    return [spec] if is_under else []
