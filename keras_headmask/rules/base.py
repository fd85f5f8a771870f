"""The algebra of mask specs: which keys each query may attend to, as a value.

A spec knows no length, batch or backend. Leaves say something about one pair of positions, by
where they stand (`positions.py`) or by what is read there (`inputs.py`); `& | ~` and
`PerHead` combine them. Nothing here imports Keras.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from keras_headmask.rules import config, words


class InputType(NamedTuple):
    """What a spec expects of one mask input.

    `rank` is 2 for a tensor `(batch, length)`, or `None` for a whole mask of rank 2, 3 or 4.
    `dtype` is the one to declare in `keras.Input`. `sides` says whether the spec looks at the
    query's value, the key's, or both.
    """

    rank: int | None = 2
    dtype: str = "int32"
    sides: frozenset[str] = frozenset({"query", "key"})


class Sides(NamedTuple):
    """One mask input, seen from the queries and from the keys."""

    query: Any
    key: Any


class Tiles(NamedTuple):
    """Tiles of the score matrix: first and last position, rows `(n, 1)`, columns `(1, m)`."""

    query_first: Any
    query_last: Any
    key_first: Any
    key_last: Any


class Span(NamedTuple):
    """The least and the greatest value that a mask input takes in each row or column of tiles."""

    low: Any
    high: Any


class Bounds(NamedTuple):
    """Of each tile: whether some pair may be allowed, and whether every pair surely is."""

    possible: Any
    certain: Any


def unknown(tiles: Tiles) -> Bounds:
    """Nothing is known of any tile: some pairs may be allowed, and some may not."""
    return Bounds(tiles.key_first <= tiles.key_first, tiles.key_first < tiles.key_first)


class MaskSpec:
    """Which keys each query may attend to, apart from any length, batch or backend.

    Specs are immutable, hashable values. Combine them with `&` (and), `|` (or) and `~` (not).
    `True` in the mask they make means: this query may attend to this key.

    To add a kind of your own, write a frozen dataclass that subclasses `MaskSpec`, decorate it
    with `register_spec`, and define `allowed`; override `inputs` and `prepare` if it reads data.
    """

    kind: str = ""

    @property
    def inputs(self) -> dict[str, InputType]:
        """The mask inputs this spec reads, by name."""
        return {}

    def prepare(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Work on whole sequences, done once: `{name: Sides(query, key)}`, each `(batch, length)`.

        Returns a mapping of the same form, which `allowed` then sees tile by tile.
        """
        return inputs

    def allowed(self, query_positions: Any, key_positions: Any, inputs: Mapping[str, Any]) -> Any:
        """Whether each query may attend to each key, for any tile of the score matrix.

        Element-wise: `query_positions` is int32 `(queries, 1)`, `key_positions` int32 `(1, keys)`,
        and each of `inputs` a `Sides` of shapes `(batch, 1, queries, 1)` and `(batch, 1, 1, keys)`.
        Returns a boolean tensor that broadcasts to `(batch, heads, queries, keys)`.
        """
        raise TypeError(f"{type(self).__name__} must define `allowed`.")

    def coverage(self, tiles: Tiles, inputs: Mapping[str, Any]) -> "Bounds":
        """What can be told of whole tiles without looking at their pairs; by default, nothing.

        `tiles` holds the first and last positions of rows and columns of tiles; each of `inputs` is
        a `Sides` of `Span`s, the least and greatest value in each, booleans as 0 and 1. A spec
        whose inputs are not at hand is not asked.
        """
        return unknown(tiles)

    @property
    def children(self) -> tuple["MaskSpec", ...]:
        """The specs this one is made of."""
        return ()

    def for_head(self, head: int) -> "MaskSpec":
        """The rule that head number `head` obeys: this spec without any `PerHead`."""
        return self

    def describe(self, num_heads: int | None = None) -> str:
        """This rule in plain English, a sentence for each group of heads that share a rule.

        Equal specs read alike; heads that see everything come last. `num_heads` names the heads
        that no rule names; without it they are "all other heads".

        >>> from keras_headmask import PerHead, SameSentence, recipes
        >>> print(recipes.causal().describe())
        A token sees itself and every token before it.
        >>> print(PerHead({0: SameSentence(102)}, recipes.padding()).describe(num_heads=12))
        Head 0: a token sees its own sentence (sentences end with token 102). Heads 1 to 11: every \
token that `padding_mask` does not hide.

        Raises:
            ValueError: for a head that this spec names and `num_heads` does not reach, or a
                `num_heads` above 100,000.
        """
        return words.describe(self, num_heads)

    def in_words(self) -> str | None:
        """What a token sees under a spec of one's own, for `describe`: "the tokens of its speaker".

        `None` lets `describe` show the spec's `repr`.
        """
        return None

    def get_config(self) -> dict[str, Any]:
        """This spec as plain JSON values; fields at their default are left out.

        >>> from keras_headmask import Window
        >>> Window(before=255, after=0).get_config()
        {'kind': 'window', 'before': 255, 'after': 0}
        """
        if not config.is_registered(type(self)):
            raise TypeError(
                f"{type(self).__name__} has no kind to be saved under: put "
                "@register_spec('a_name') above the class."
            )
        fields = {
            f.name: config.to_json(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        }
        return {"kind": self.kind, **fields}

    @staticmethod
    def from_config(config_dict: Mapping[str, Any]) -> "MaskSpec":
        """The spec that `config_dict` describes. Errors name the path to the bad place.

        >>> MaskSpec.from_config({"kind": "window", "before": 2, "after": 0})
        Window(before=2, after=0)
        """
        return config.build(config_dict)

    def __repr__(self) -> str:
        """The call that makes this spec: required fields by place, others by name if set."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                shown.append(repr(value))
            elif value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> "MaskSpec":
        """Make a spec of this kind from its JSON fields, which stand at `path`."""
        return config.build_dataclass(cls, fields, path)

    @classmethod
    def json_fields(cls) -> dict[str, dict[str, Any]]:
        """The JSON Schema of each field in `get_config`; by default told by the annotations.

        Needed where `from_fields` is overridden. `{"$ref": "#/$defs/rule"}` is a spec; a field
        whose schema has a `default` may be left out.
        """
        return config.json_fields(cls)

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


def register_spec(kind: str) -> Callable[[type], type]:
    """Class decorator: let a spec of your own join the language under a permanent name.

    The class must be a frozen dataclass that subclasses `MaskSpec`. Its fields are what is saved
    and what is compared: specs with equal fields are one.
    """

    def decorate(cls: type) -> type:
        is_spec = isinstance(cls, type) and issubclass(cls, MaskSpec)
        if not (
            is_spec and "__dataclass_params__" in vars(cls) and cls.__dataclass_params__.frozen
        ):
            raise TypeError(
                "A spec must be a frozen dataclass that subclasses MaskSpec: put "
                f"@dataclass(frozen=True) right under @register_spec({kind!r}). Received: {cls!r}."
            )
        if "kind" in {f.name for f in dataclasses.fields(cls)}:
            raise TypeError(
                f"A field named `kind` would hide the kind {kind!r} of {cls.__name__}. Rename it."
            )
        hidden = [f.name for f in dataclasses.fields(cls) if not f.compare]
        if hidden:
            raise TypeError(
                f"Every field of a spec must compare, since specs that are equal are merged: with "
                f"compare=False on {hidden}, one value of `{hidden[0]}` would replace another. "
                f"Received: {cls.__name__}. Leave `compare` out."
            )
        if cls.__eq__ is object.__eq__ or cls.__eq__ is MaskSpec.__eq__:
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
    """`value`, which must be a spec, with a hint for who passed something near one.

    `call` is what the caller was, with SPEC where the spec stands: "hm.draw(SPEC, ...)".
    """
    if isinstance(value, MaskSpec):
        return value
    hint = _hint(value, call)
    shape = None if isinstance(value, type) else getattr(value, "shape", None)
    shown = repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    config.fail(TypeError, field, f"`{field}` must be a mask spec. Received: {shown}.{hint}")


def _hint(value: Any, call: str = "SPEC") -> str:
    """What to write in place of `value`."""

    def written(spec: str) -> str:
        return call.replace("SPEC", spec)

    if value is None:
        return f" The spec that hides nothing is Full(): {written('hm.Full()')}."
    if isinstance(value, bool):
        return " Write Full() for True and Nothing() for False."
    if (meant := config.call_of(value)) is not None:
        return f" Call it: {written(meant)}."
    if isinstance(value, str):
        return (
            f" {config.names_of_recipes()}: {written('hm.recipes.causal()')}. JSON text becomes a "
            "spec by `MaskSpec.from_config(json.loads(text))`."
        )
    if isinstance(value, Mapping):
        if config.names_heads(value):
            return f" Wrap rules by head in PerHead: {written(f'hm.PerHead({_first(value)})')}."
        return " A config becomes a spec by `MaskSpec.from_config`."
    if isinstance(value, (list, tuple)) and any(isinstance(part, MaskSpec) for part in value):
        return (
            " Combine specs by & or |, or give each head its own by PerHead: "
            f"{written('hm.PerHead({0: a, 1: b})')}."
        )
    if hasattr(type(value), "get_weights"):
        return _hint_for_keras(type(value), written, call)
    return f" A mask tensor enters a spec by MaskInput(name): {written('hm.MaskInput(name)')}."


def _hint_for_keras(cls: type, written: Callable[[str], str], call: str) -> str:
    """What to write in place of a model or a layer; Keras itself is not imported here."""
    if hasattr(cls, "mask_specs"):
        rule = written("model.mask_specs[path]")
        hint = f" The rules of a model are its `model.mask_specs`, by layer: {rule}."
    elif hasattr(cls, "mask_spec"):
        hint = f" The rule of a layer is `layer.mask_spec`: {written('layer.mask_spec')}."
    else:
        hint = " A model gets a rule by hm.apply_head_masks(model, spec)."
    if call.startswith(("hm.plot", "hm.draw")):
        hint += " What a model attends to: hm.plot_attention(model, inputs)."
    return hint


def _first(heads: Mapping[Any, Any]) -> str:
    return f"{{{next(iter(heads))!r}: ...}}"


class _Join(MaskSpec):
    """Two or more specs; compared as a set, shown in the order written."""

    symbol = ""
    specs: tuple[MaskSpec, ...]

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return self.specs

    @property
    def inputs(self) -> dict[str, InputType]:
        return merged_inputs(self.specs)

    def for_head(self, head: int) -> MaskSpec:
        return _joined(type(self), [s.for_head(head) for s in self.specs])

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> MaskSpec:
        config.check_field_names(fields, path, {"specs"}, {"specs"})
        place = config.join_path(path, "specs")
        specs = fields["specs"]
        if not isinstance(specs, (list, tuple)) or not specs:
            raise config.bad_place(place, f"expected a list of specs. Received: {specs!r}.")
        parts = config.from_json(specs, place)
        return config.located(lambda: _joined(cls, parts), path)

    def __eq__(self, other: Any) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return frozenset(self.specs) == frozenset(other.specs)

    def __hash__(self) -> int:
        return hash((self.kind, frozenset(self.specs)))

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(
            f"({s!r})" if isinstance(s, _Join) else repr(s) for s in self.specs
        )


@register_spec("and")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(_Join):
    """What every one of `specs` allows; written `a & b`."""

    specs: Annotated[tuple[MaskSpec, ...], config.Limits(minItems=1)]
    symbol = "&"


@register_spec("or")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(_Join):
    """What at least one of `specs` allows; written `a | b`."""

    specs: Annotated[tuple[MaskSpec, ...], config.Limits(minItems=1)]
    symbol = "|"


@register_spec("not")
@dataclasses.dataclass(frozen=True, repr=False)
class Not(MaskSpec):
    """The exact complement of `spec`; written `~a`."""

    spec: MaskSpec

    def __post_init__(self) -> None:
        check_spec(self.spec, "spec")

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        return (self.spec,)

    @property
    def inputs(self) -> dict[str, InputType]:
        return self.spec.inputs

    def for_head(self, head: int) -> MaskSpec:
        return ~self.spec.for_head(head)

    def __invert__(self) -> MaskSpec:
        return self.spec

    def __repr__(self) -> str:
        return f"~({self.spec!r})" if isinstance(self.spec, _Join) else f"~{self.spec!r}"


def _join(kind: type[_Join], left: Any, right: Any) -> MaskSpec:
    for value in (left, right):
        if isinstance(value, (str, bool, type, types.FunctionType, Mapping, list, tuple)):
            sides = ("SPEC", "...") if value is left else ("...", "SPEC")
            hint = _hint(value, f" {kind.symbol} ".join(sides))
            raise TypeError(f"`{kind.symbol}` joins mask specs. Received: {value!r}.{hint}")
        if not isinstance(value, MaskSpec):
            return NotImplemented
    return _joined(kind, (left, right))


def _joined(kind: type[_Join], specs: Any) -> MaskSpec:
    """Flatten and drop repeats, so that regrouping a rule does not change it."""
    parts = []
    for i, spec in enumerate(specs):
        check_spec(spec, f"specs[{i}]")
        parts.extend(spec.specs if type(spec) is kind else (spec,))
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


def leaves(spec: MaskSpec) -> Iterator[MaskSpec]:
    """Every leaf of `spec`, each equal one once."""
    seen: dict[MaskSpec, None] = {}
    stack = [spec]
    while stack:
        node = stack.pop()
        if node.children:
            stack.extend(node.children)
        else:
            seen.setdefault(node)
    yield from seen


def stored(spec: MaskSpec, field: str, value: Any) -> None:
    """Store a checked value in a frozen spec under construction."""
    object.__setattr__(spec, field, value)
