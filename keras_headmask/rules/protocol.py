"""What a spec is asked: by evaluation, by tiling, by `lint`, by samples, in words and as JSON.

Each question is a member of `Protocol` with a sound default, so that a new leaf is right before it
is fast. Leaves answer for themselves; `& | ~ PerHead` answer from the answers of their parts.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from keras_headmask.rules import config, words

Tensor: TypeAlias = Any  # as in masks.py, which imports Keras


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
    """Tiles of the mask: first and last position, of rows `(n, 1)` and of columns `(1, m)`."""

    query_first: Tensor
    query_last: Tensor
    key_first: Tensor
    key_last: Tensor


class Span(NamedTuple):
    """The least and the greatest value that a mask input takes in each row or column of tiles."""

    low: Tensor
    high: Tensor


class Bounds(NamedTuple):
    """Of each tile: whether some pair may be allowed, and whether every pair surely is."""

    possible: Tensor
    certain: Tensor


class OpenSide(NamedTuple):
    """A side of the query, "before" or "after", that a spec may have left open by mistake.

    `closed` is the spec without that side; `meant` are specs that may have been meant.
    """

    side: str
    closed: "Protocol"
    meant: tuple["Protocol", ...]


def unknown(tiles: Tiles) -> Bounds:
    """Nothing is known of any tile: some pairs may be allowed, and some may not."""
    return Bounds(tiles.key_first <= tiles.key_first, tiles.key_first < tiles.key_first)


class Protocol:
    """The questions, each with the answer that is right for any spec."""

    kind: str = ""

    # --- what it means ---
    @property
    def inputs(self) -> dict[str, InputType]:
        """The mask inputs this spec reads, by name."""
        return {}

    def prepare(self, inputs: Mapping[str, Sides]) -> Mapping[str, Sides]:
        """Work on whole sequences, done once: `{name: Sides(query, key)}`, each `(batch, length)`.

        Returns a mapping of the same form, which `allowed` then sees tile by tile.
        """
        return inputs

    def allowed(
        self, query_positions: Tensor, key_positions: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """Whether each query may attend to each key, for any tile of the mask.

        Element-wise: `query_positions` is int32 `(queries, 1)`, `key_positions` int32 `(1, keys)`,
        and each of `inputs` a `Sides` of shapes `(batch, 1, queries, 1)` and `(batch, 1, 1, keys)`.
        Returns a boolean tensor that broadcasts to `(batch, heads, queries, keys)`.
        """
        raise TypeError(f"{type(self).__name__} must define `allowed`.")

    @property
    def constant(self) -> bool | None:
        """`True` if every pair is allowed whatever the data, `False` if none is, else `None`."""
        return None

    @property
    def reads_query_positions(self) -> bool:
        """Whether a query at another position may see other keys. By default if it reads no input.

        Attention warns where such a rule meets fewer queries than keys without a `query_offset`.
        """
        return self.constant is None and not self.inputs

    # --- how tiles follow it ---
    def coverage(self, tiles: Tiles, inputs: Mapping[str, Any]) -> Bounds:
        """What is known of whole tiles without looking at their pairs; by default, nothing.

        `tiles` holds the first and last positions of rows and columns of tiles; each of `inputs` is
        a `Sides` of `Span`s, the least and greatest value in each, booleans as 0 and 1. It is not
        called where the values of the inputs are not known.
        """
        return unknown(tiles)

    @property
    def is_local(self) -> bool:
        """Whether a query sees few keys however long the sequence is. Smaller tiles follow it."""
        return False

    @property
    def opens(self) -> str | None:
        """The side whose flags it is: "key" or "query"; by default `None`.

        With "key" (or "query") the spec reads one mask input, `prepare` gives that side as booleans
        and `allowed` returns them: a flagged key is seen by every query, a flagged query sees every
        key. Where few are flagged, those columns and rows are computed apart from the tiles.
        """
        return None

    @property
    def is_sparse(self) -> bool:
        """Whether it opens few rows, columns or blocks: `|` of a local spec and it stays local.

        By default for flags, since those are expected to be few.
        """
        return self.opens is not None

    def may_leave_gaps(self, taken_out: Collection["Protocol"] = ()) -> bool:
        """Whether the keys of a query are best taken as two runs rather than one.

        `taken_out` are the flags whose rows and columns are computed apart.
        """
        return False

    # --- what `lint` looks for ---
    @property
    def reach(self) -> int | None:
        """The greatest distance or position at which what it allows may change; `None` if unknown.

        `lint` looks at masks of about three times that length. By default 0 for a spec that reads
        inputs, since `lint` then tries all that it may say, and unknown for others.
        """
        return 0 if self.inputs else None

    def closes(self, side: str) -> bool:
        """Whether it keeps a query from seeing every token on `side`, "before" or "after"."""
        return False

    @property
    def open_side(self) -> OpenSide | None:
        """The side that it leaves open though it bounds the other, perhaps by mistake."""
        return None

    @property
    def ids_of_interest(self) -> tuple[int, ...]:
        """The ids that it looks for: made-up samples hold them, and `lint` misses them."""
        return ()

    @property
    def reads_segments(self) -> bool:
        """Whether its ids number the parts of a sequence: made-up samples then hold runs of ids."""
        return False

    # --- words ---
    def in_words(self) -> "str | words.Words | None":
        """What a token sees under this spec, for `describe`: "the tokens of its speaker".

        `None` lets `describe` show the spec's `repr`.
        """
        return None

    def __repr__(self) -> str:
        """The call that makes this spec: required fields by place, others by name if set."""
        shown = [
            repr(value) if field.default is dataclasses.MISSING else f"{field.name}={value!r}"
            for field, value in self._set_fields()
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    # --- JSON ---
    def _set_fields(self) -> list[tuple[dataclasses.Field, Any]]:
        """The fields that are not at their default, with their values."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]  # each kind is a dataclass
        pairs = [(field, getattr(self, field.name)) for field in fields]
        return [(f, v) for f, v in pairs if f.default is dataclasses.MISSING or v != f.default]

    def get_config(self) -> dict[str, Any]:
        """This spec as plain JSON values; fields at their default are left out.

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
        """The spec that `config_dict` describes.

        Raises:
            ValueError: for a bad config, with the path to the bad place.

        >>> from keras_headmask import MaskSpec
        >>> MaskSpec.from_config({"kind": "window", "before": 2, "after": 0})
        Window(before=2, after=0)
        """
        return config.build(config_dict)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: str = "") -> Any:
        """Make a spec of this kind from its JSON fields, which stand at `path`."""
        return config.build_dataclass(cls, fields, path)

    @classmethod
    def json_fields(cls) -> dict[str, dict[str, Any]]:
        """The JSON Schema of each field in `get_config`; by default from the annotations.

        Needed where `from_fields` is overridden. `{"$ref": "#/$defs/rule"}` is a spec; a field
        whose schema has a `default` may be left out.
        """
        from keras_headmask.rules import json_schema  # seldom needed

        return json_schema.of_fields(cls)
