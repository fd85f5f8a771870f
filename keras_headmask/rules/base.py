"""A mask spec: which keys each query may attend to, as a value.

A spec knows no length, batch or backend. Leaves say something about one pair of positions, by
where they stand or by what is read there (`leaves.py`); `& | ~` and `PerHead` combine them
(`algebra.py`). Each question to a spec is a member with a default that is right for any spec, so
that a new leaf is right before it is fast. Nothing here imports Keras.
"""

import dataclasses
import functools
import math
import numbers
import operator
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from keras_headmask.rules import config, words
from keras_headmask.rules.protocol import (
    Bounds,
    InputType,
    Sides,
    Tensor,
    Tiles,
)

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type)
_LARGEST = 2**31 - 1
_MOST_HEADS = 100_000  # they are visited one by one


class MaskSpec:
    """Which keys each query may attend to, apart from any length, batch or backend.

    Specs are immutable, hashable values. Combine them with `&` (and), `|` (or) and `~` (not).
    `True` in the mask they make means: this query may attend to this key. A spec checks its fields
    when it is made: a value of another type is a `TypeError`, one out of range a `ValueError`.

    To add a kind of your own, write a frozen dataclass that subclasses `MaskSpec`, decorate it
    with `register_spec`, and define `allowed`; override `inputs` and `prepare` if it reads data.
    Every other member has an answer that is right for any spec. `coverage` makes it faster.
    """

    kind: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    # --- what it means ---
    @property
    def inputs(self) -> dict[str, InputType]:
        """The mask inputs this spec reads, by name."""
        return merged_inputs(self.children)

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        """Work on whole sequences, done once, before `allowed` is called tile by tile.

        Args:
            inputs: `{name: Sides(query, key)}`, each `(batch, length)`, or `None` for a side that
                was not passed; a whole mask has rank 4.

        Returns:
            A mapping of the same form, which `allowed` then gets. By default `inputs`.
        """
        return inputs

    def allowed(
        self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """Whether each query may attend to each key, for any tile of the mask.

        It must be element-wise.

        Args:
            query_positions: `(queries, 1)`; of n tiles at once `(n, 1, queries, 1)`. Integers, on
                TensorFlow of 64 bits, else of 32.
            key_positions: `(1, keys)`, or `(n, 1, 1, keys)`.
            inputs: By name, a `Sides` of shapes `(batch, 1, queries, 1)` and `(batch, 1, 1, keys)`;
                of n tiles at once n stands for the batch.

        Returns:
            A boolean tensor of rank 2 or 4 that broadcasts to `(batch, heads, queries, keys)`.

        Raises:
            TypeError: for a class that does not define it.
        """
        raise TypeError(f"{type(self).__name__} must define `allowed`.")

    @property
    def reads_query_positions(self) -> bool:
        """Whether a query at another position may see other keys. By default if it reads no input.

        Attention warns where such a rule meets fewer queries than keys without a `query_offset`.
        """
        return not self.inputs

    @property
    def counts(self) -> bool:
        """Whether `prepare` counts from the start, so that ids without their start mislead it.

        By default if the class defines `prepare`.
        """
        return type(self).prepare is not MaskSpec.prepare

    # --- what it is made of ---
    @property
    def children(self) -> tuple["MaskSpec", ...]:
        """The specs this one is made of."""
        return ()

    def with_children(self, children: Collection["MaskSpec"]) -> "MaskSpec":
        """The same node with other children.

        Args:
            children: A spec in place of each one in `self.children`.

        Returns:
            A spec of this kind.
        """
        return self

    def for_head(self, head: int) -> "MaskSpec":
        """The rule that one head obeys: this spec without any `PerHead`.

        Args:
            head: The number of the head, from 0.
        """
        parts = [child.for_head(head) for child in self.children]
        is_same = all(part is child for part, child in zip(parts, self.children, strict=True))
        return self if is_same else self.with_children(parts)

    def fold(
        self,
        leaf: Callable[["MaskSpec"], T],
        both: Callable[[T, T], T],
        either: Callable[[T, T], T],
        neither: Callable[[T], T],
    ) -> T:
        """The answer of a spec without `PerHead`, made of the answers of its leaves.

        Args:
            leaf: Answers for a leaf.
            both: Joins two answers for `&`.
            either: Joins two answers for `|`.
            neither: Negates an answer, for `~`.
        """
        if self.kind not in ("and", "or", "not"):
            return leaf(self)
        parts = [part.fold(leaf, both, either, neither) for part in self.children]
        if self.kind == "not":
            return neither(*parts)
        return functools.reduce(both if self.kind == "and" else either, parts)

    # --- how tiles follow it ---
    def coverage(self, tiles: Tiles, inputs: Mapping[str, Any]) -> Bounds:
        """The bounds of whole tiles, known without looking at their pairs; by default, nothing.

        It is not called where the values of the inputs are not known.

        Args:
            tiles: The first and last positions of rows and columns of tiles.
            inputs: By name, a `Sides` of `Span`s, the least and greatest value in each row or
                column; booleans as 0 and 1.
        """
        every = tiles.key_first <= tiles.key_first
        return Bounds(every, ~every)

    # --- words ---
    def in_words(self) -> str | None:
        """The keys that a token sees, as a phrase for `describe`: "the tokens of its speaker".

        Returns:
            A phrase. With `None`, the default, `describe` shows the spec's `repr`.
        """
        return None

    def describe(self, num_heads: int | None = None) -> str:
        """This rule in plain English, a sentence for each group of heads that share a rule.

        Heads that see everything come last.

        Args:
            num_heads: The number of heads; it names the heads that no rule names, which are "all
                other heads" without it.

        Returns:
            The sentences, in one line.

        Raises:
            ValueError: for a head that this spec names and `num_heads` does not reach, or a
                `num_heads` above 100,000.

        >>> from keras_headmask import PerHead, SameSentence, recipes
        >>> print(PerHead({0: SameSentence(102)}, recipes.padding()).describe(num_heads=12))
        Head 0: a token sees its own sentence (sentences end with token 102). Heads 1 to 11: every \
token that `padding_mask` does not hide.
        """
        return " ".join(sentences(self, num_heads))

    def __repr__(self) -> str:
        """The call that makes this spec: required fields by place, others by name if set."""
        arguments = [
            repr(value) if field.default is dataclasses.MISSING else f"{field.name}={value!r}"
            for field, value in self._set_fields()
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"

    # --- JSON ---
    def _set_fields(self) -> list[tuple[dataclasses.Field, Any]]:
        """The fields that are not at their default, with their values."""
        known: Any = dataclasses.fields(self)  # type: ignore[arg-type]  # each kind is a dataclass
        pairs = [(field, getattr(self, field.name)) for field in known]
        return [(f, v) for f, v in pairs if f.default is dataclasses.MISSING or v != f.default]

    def get_config(self) -> dict[str, Any]:
        """The config of this spec, plain JSON values; fields at their default are left out.

        Raises:
            TypeError: for a class that is not registered, or a field that JSON cannot hold.

        >>> from keras_headmask import Window
        >>> Window(before=255, after=0).get_config()
        {'kind': 'window', 'before': 255, 'after': 0}
        """
        if not config.is_registered(type(self)):
            raise TypeError(
                f"{type(self).__name__} has no kind to be saved under: put "
                "@register_spec('a_name') above the class."
            )
        return {"kind": self.kind} | {f.name: config.to_json(v) for f, v in self._set_fields()}

    @staticmethod
    def from_config(config_dict: Mapping[str, Any]) -> Any:
        """The spec that a config describes.

        Args:
            config_dict: What `get_config` gives, or the JSON of a file, as a dict.

        Raises:
            ValueError: for a bad config, with the path to the bad place.

        >>> from keras_headmask import MaskSpec
        >>> MaskSpec.from_config({"kind": "window", "before": 2, "after": 0})
        Window(before=2, after=0)
        """
        return config.build(config_dict)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> Any:
        """The spec of this kind with these JSON fields.

        Args:
            fields: The config without its `kind`.
            path: Where it stands in a larger config, for errors.

        Raises:
            ValueError: for a field that is missing, unknown or not valid.
        """
        return config.build_dataclass(cls, fields, path)

    # --- & | ~ ---
    __array_ufunc__ = None  # NumPy's operators leave `array & spec` to the spec, as a whole

    def __and__(self, other: Any) -> "MaskSpec":
        return config.KINDS["and"].join(self, other)

    def __or__(self, other: Any) -> "MaskSpec":
        return config.KINDS["or"].join(self, other)

    def __rand__(self, other: Any) -> "MaskSpec":  # a spec on the left never comes here
        return config.KINDS["and"].join(other, self)

    def __ror__(self, other: Any) -> "MaskSpec":
        return config.KINDS["or"].join(other, self)

    def __invert__(self) -> "MaskSpec":
        return config.KINDS["not"](self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask spec has no truth value. Combine specs with & | ~ (not `and`, `or`, `not`), "
            "and test for a missing spec with `is None`."
        )


def check_spec(value: Any, field: str, call: str = "SPEC") -> MaskSpec:
    """`value`, which must be a spec; errors show it in `call`, code such as "hm.draw(SPEC)"."""
    if isinstance(value, MaskSpec):
        return value
    hint = f"{config.shown(value)}.{config.hint_for(value, call)}"
    fail(TypeError, field, f"`{field}` must be a mask spec. Received: {hint}")


def merged_inputs(specs: Iterable[MaskSpec]) -> dict[str, InputType]:
    """The inputs of several specs together; one name means one tensor."""
    merged: dict[str, InputType] = {}
    for name, new in (item for spec in specs for item in spec.inputs.items()):
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
    inner = [leaf for child in spec.children for leaf in leaves(child)]
    return list(dict.fromkeys(inner)) if spec.children else [spec]


def register_spec(kind: str) -> Callable[[_Class], _Class]:
    """Class decorator: let a spec of your own join the language under a permanent name.

    The class must be a frozen dataclass that subclasses `MaskSpec`. Its fields are what is saved
    and what is compared: specs with equal fields are one. In a test of your own, let
    `hm.testing.check_spec` try it: a spec that answers differently for a tile than for the
    whole mask gives wrong numbers, and no error.

    Args:
        kind: The name under which the spec is saved, an identifier.

    Returns:
        The decorator, which returns its class.

    Raises:
        TypeError: for another kind of class, a field that hides a member of `MaskSpec`, a field
            with `compare=False`, or `eq=False` without an `__eq__`.
        ValueError: for a name that another class has, or that is not an identifier.
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


# --- The rule of each head ------------------------------------------------------------------------


def named_heads(spec: Any) -> Iterator[int]:
    """Every head that `spec` numbers, in any `PerHead` of it."""
    if spec.kind == "per_head":
        yield from (head for head, _ in spec.heads)
    for child in spec.children:
        yield from named_heads(child)


def check_heads(spec: MaskSpec, num_heads: int, num_key_heads: int | None = None) -> None:
    """Every head that `spec` names must exist, also one whose rule equals the default.

    `num_key_heads`: of keys and values, where query heads share them.
    """
    if whole_number(num_heads, "num_heads", at_least=1) > _MOST_HEADS:
        raise ValueError(
            f"`num_heads` must be at most {_MOST_HEADS}. Received: {num_heads}. Pass the number of "
            "heads of the attention layer."
        )
    exist, hint = f"there are {num_heads} heads, numbered 0 to {num_heads - 1}", ""
    if num_heads == 1:
        exist, hint = "there is one head, numbered 0", " Pass `num_heads=` if there are more."
    elif num_key_heads not in (None, num_heads):
        exist = f"there are {num_heads} query heads, numbered 0 to {num_heads - 1}"
        hint = f" A rule names query heads; {num_key_heads} of keys and values serve them."
    for head in named_heads(spec):
        if head >= num_heads:
            raise ValueError(
                f"The mask spec names head {head}, but {exist}. Received: {spec!r}.{hint}"
            )


def head_groups(spec: MaskSpec, num_heads: int) -> list[tuple[MaskSpec, tuple[int, ...]]]:
    """Each rule that some head obeys, free of `PerHead`, with the heads that obey it."""
    check_heads(spec, num_heads)
    groups: dict[MaskSpec, list[int]] = {}
    for head in range(num_heads):
        groups.setdefault(spec.for_head(head), []).append(head)
    return [(rule, tuple(heads)) for rule, heads in groups.items()]


def restricts(spec: MaskSpec, num_heads: int) -> bool:
    """Whether some head obeys another rule than `Full`."""
    return any(rule.kind != "full" for rule, _ in head_groups(spec, num_heads))


def enough_heads(spec: MaskSpec) -> int:
    """So many that each head `spec` numbers is among them, and one that stands for the rest."""
    return max(named_heads(spec), default=-1) + 2


def sentences(spec: MaskSpec, num_heads: int | None = None) -> list[str]:
    """A sentence for each group of heads that obey one rule; those that see everything last.

    Without `num_heads` one head stands for all that `spec` does not name.
    """
    heads = enough_heads(spec) if num_heads is None else num_heads
    others = heads - 1 if num_heads is None else None
    groups = head_groups(spec, heads)
    groups.sort(key=lambda group: (others in group[1], group[0].kind == "full"))
    seen = [words.phrase(rule) for rule, _ in groups]
    if len(groups) == 1:
        return [f"A token sees {seen[0]}."]
    titles = ["All other heads" if others in of else words.heads_in_words(of) for _, of in groups]
    seen[0] = f"a token sees {seen[0]}"
    return [f"{title}: {said}." for title, said in zip(titles, seen, strict=True)]


# --- Checks of fields, called by constructors -----------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """In the `Annotated` type of a field: a function of the value and the name of the field.

    The function raises for a bad value, and returns the value to store.
    """

    function: Callable[[Any, str], Any]


# By class, (field, check, whether None passes). (`torch.compile` reads a dict, and no
# `functools.cache`.)
_checks: dict[type, list[tuple[str, Callable[[Any, str], Any], bool]]] = {}


def check_fields(spec: Any) -> None:
    """Check each field of a spec under construction that has a `Check`, or a `Check` or None."""
    if type(spec) not in _checks:
        _checks[type(spec)] = _checks_of(type(spec))
    for name, check, is_option in _checks[type(spec)]:
        value = getattr(spec, name)
        if value is not None or not is_option:
            object.__setattr__(spec, name, check(value, name))


def _checks_of(cls: Any) -> list[tuple[str, Callable[[Any, str], Any], bool]]:
    checks = []
    for field in dataclasses.fields(cls):
        for option in (field.type, *typing.get_args(field.type)):
            found = [x for x in getattr(option, "__metadata__", ()) if isinstance(x, Check)]
            checks += [(field.name, x.function, option is not field.type) for x in found]
    return checks


def fail(error: type[Exception], field: str, message: str) -> NoReturn:
    """Raise `error`, remembering the field so that a JSON error can name its path."""
    exception: Any = error(message)
    exception.field = field
    raise exception


def whole_number(value: Any, field: str, at_least: int | None = None) -> int:
    """`value` as an int of 32 bits, since it meets int32 positions and ids.

    bool is refused, since True == 1 would make two specs equal.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        fail(TypeError, field, f"`{field}` must be a whole number. Received: {value!r}.")
    if at_least is not None and number < at_least:
        fail(ValueError, field, f"`{field}` must be at least {at_least}. Received: {number}.")
    if abs(number) > _LARGEST:
        limits = f"between -{_LARGEST} and {_LARGEST} (32 bits)"
        fail(ValueError, field, f"`{field}` must lie {limits}. Received: {number}.")
    return number


def not_negative(value: Any, field: str, most: float = math.inf) -> float:
    """`value` as a finite number from 0 to `most`."""
    is_open = most == math.inf
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        to = "on" if is_open else f"to {most}"
        fail(TypeError, field, f"`{field}` must be a number from 0 {to}. Received: {value!r}.")
    if not 0 <= float(value) <= most or math.isinf(value):
        limits = "be finite and from 0 on" if is_open else f"lie between 0 and {most}"
        fail(ValueError, field, f"`{field}` must {limits}. Received: {value!r}.")
    return float(value)


def input_name(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        what = "the name under which the tensor is passed, such as 'sentence_ids'"
        received = f"{value!r}."
        shape = None if isinstance(value, type) else getattr(value, "shape", None)
        if shape is not None:
            received = f"{type(value).__name__} of shape {tuple(shape)}. Give a name here, "
            received += "and pass the tensor in the call: mask_inputs={'sentence_ids': tensor}."
        fail(TypeError, field, f"`{field}` is {what}. Received: {received}")
    return value


def id_tuple(value: Any, field: str) -> tuple[int, ...]:
    """One id, or several, as a sorted tuple without repeats."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's
    if hasattr(type(value), "__index__"):
        value = (value,)
    if isinstance(value, (str, bytes, dict)) or not hasattr(type(value), "__iter__"):
        fail(TypeError, field, f"`{field}` must be ids, such as (102,). Received: {value!r}.")
    ids = tuple(sorted({whole_number(v, field) for v in value}))
    if not ids:
        fail(ValueError, field, f"`{field}` must hold at least one id. Received none.")
    return ids


def _whole(**limits: Any) -> Check:
    return Check(functools.partial(whole_number, **limits))


Whole = Annotated[int, _whole()]
NotNegative = Annotated[int, _whole(at_least=0)]
Positive = Annotated[int, _whole(at_least=1)]
Name = Annotated[str, Check(input_name)]
Ids = Annotated[int | Sequence[int], Check(id_tuple)]  # kept as a tuple
