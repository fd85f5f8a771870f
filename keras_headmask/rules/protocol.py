"""What a spec is asked: by evaluation, by tiling, by `lint`, by made-up samples, and in words.

Each question is a member of `Protocol` with a sound default, so that a new leaf is right before it
is fast. Leaves answer for themselves; `& | ~ PerHead` answer from the answers of their parts.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from keras_headmask.rules import words


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


class OpenSide(NamedTuple):
    """A side of the query, "before" or "after", that a spec may have left open by mistake.

    `closed` is the spec without that side; `meant` are specs that may have been meant.
    """

    side: str
    closed: Any
    meant: tuple[Any, ...]


def unknown(tiles: Tiles) -> Bounds:
    """Nothing is known of any tile: some pairs may be allowed, and some may not."""
    return Bounds(tiles.key_first <= tiles.key_first, tiles.key_first < tiles.key_first)


class Protocol:
    """The questions, each with the answer that is right for any spec."""

    # --- what it means ---

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
        called where the inputs of the spec are not at hand.
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
