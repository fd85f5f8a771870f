"""Biases by position: values that say what is added to the logit of a query and a key.

They are made for a tile at a time, from the positions of its queries and keys.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from keras_headmask.masks import Tensor
from keras_headmask.rules.fields import fail, whole_number

_MOST_DISTANCE = 2**20  # so many buckets are looked up in a table


@dataclasses.dataclass(frozen=True)
class PositionBias:
    """A bias that is added to logits, by head and by the positions of query and key.

    Values with equal fields are equal. `get_config` gives JSON with a permanent `kind`.
    """

    num_heads: int
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads", whole_number(self.num_heads, "num_heads", 1))

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """The shape of the table that is learned, `(buckets, heads)`; `None` without one."""
        return None

    def get_config(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PositionBias":
        fields = dict(config)
        kind = fields.pop("kind", getattr(cls, "kind", None))
        if kind not in _KINDS:
            known = ", ".join(map(repr, _KINDS))
            raise ValueError(
                f"A bias by position has a `kind`, one of {known}. Received: {config!r}."
            )
        return _KINDS[kind](**fields)

    def tile_bias(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        heads: Sequence[int],
        table: Tensor | None = None,
        dtype: str = "float32",
    ) -> Tensor:
        """The bias `(1, h, queries, keys)` of some heads; `table` is `(buckets, h)`.

        Of n tiles at once, positions `(n, queries)` and `(n, keys)`, it is `(n, h, queries, keys)`.
        Of a bias that is learned the dtype is that of its table.
        """
        ahead = key_positions[..., None, :] - query_positions[..., :, None]
        return self._by_distance(ahead, heads, table, dtype)

    def _by_distance(self, ahead: Tensor, heads: Sequence[int], table: Any, dtype: str) -> Tensor:
        """`tile_bias` of keys that stand so far ahead of the queries, `(..., queries, keys)`."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="keras_headmask")
@dataclasses.dataclass(frozen=True)
class Alibi(PositionBias):
    """See `alibi`."""

    kind = "alibi"

    @property
    def slopes(self) -> np.ndarray:
        """The slope of each head, `(num_heads,)`."""
        whole = 2 ** int(math.log2(self.num_heads))
        slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
        # Heads beyond a power of two take every other slope of twice as many.
        between = [2.0 ** (-4 * i / whole) for i in range(1, 2 * whole, 2)]
        return np.array([*slopes, *between][: self.num_heads])

    def _by_distance(self, ahead: Tensor, heads: Sequence[int], table: Any, dtype: str) -> Tensor:
        slopes = -self.slopes[list(heads)][None, :, None, None]
        distance = ops.expand_dims(ops.abs(ahead), -3)
        return ops.convert_to_tensor(slopes, dtype) * ops.cast(distance, dtype)


@keras.saving.register_keras_serializable(package="keras_headmask")
@dataclasses.dataclass(frozen=True)
class RelativePositionBias(PositionBias):
    """See `relative_position_bias`."""

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    kind = "relative_position"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bidirectional, bool):
            message = f"`bidirectional` must be True or False. Received: {self.bidirectional!r}."
            fail(TypeError, "bidirectional", message)
        sides = 2 if self.bidirectional else 1
        object.__setattr__(
            self, "num_buckets", whole_number(self.num_buckets, "num_buckets", 2 * sides)
        )
        if self.num_buckets % sides:
            message = (
                "`num_buckets` must be even, half of them for keys ahead of the query. "
                f"Received: {self.num_buckets}."
            )
            fail(ValueError, "num_buckets", message)
        exact = self.num_buckets // sides // 2
        distance = whole_number(self.max_distance, "max_distance", exact + 1)
        if distance > _MOST_DISTANCE:
            message = f"`max_distance` must be at most {_MOST_DISTANCE}. Received: {distance}."
            fail(ValueError, "max_distance", message)
        object.__setattr__(self, "max_distance", distance)

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.num_buckets, self.num_heads

    def buckets(self, ahead: Tensor) -> Tensor:
        """The rows of the table that keys read which stand so far ahead of queries."""
        farthest = self.max_distance  # and all that is farther
        ahead = ops.clip(ahead, -farthest, farthest)
        # (Rows in the dtype of positions: on a GPU TensorFlow has no int32 for all pairs.)
        dtype = keras.backend.standardize_dtype(ahead.dtype)
        return ops.take(ops.convert_to_tensor(_bucket_by_distance(self), dtype), ahead + farthest)

    def _by_distance(self, ahead: Tensor, heads: Sequence[int], table: Any, dtype: str) -> Tensor:
        buckets = self.buckets(ahead)
        if len(buckets.shape) == 2:
            return ops.take(ops.transpose(table), buckets, axis=1)[None]
        return ops.transpose(ops.take(table, buckets, axis=0), (0, 3, 1, 2))


_KINDS: dict[Any, type[PositionBias]] = {cls.kind: cls for cls in (Alibi, RelativePositionBias)}


@functools.lru_cache(maxsize=32)
def _bucket_by_distance(bias: RelativePositionBias) -> np.ndarray:
    """The bucket of a key that stands from `-max_distance` to `max_distance` ahead, in order."""
    of_side = bias.num_buckets // (2 if bias.bidirectional else 1)
    exact = of_side // 2
    span = math.log(bias.max_distance / exact)

    def bucket_of(distance: int) -> int:
        if distance < exact:
            return distance
        # (A distance at the edge of a bucket belongs to the farther one, however logs round.)
        steps = math.log(distance / exact) / span * (of_side - exact)
        return min(exact + int(steps + 1e-9), of_side - 1)

    behind = [bucket_of(distance) for distance in range(bias.max_distance, -1, -1)]
    ahead = behind[-2::-1] if bias.bidirectional else [0] * bias.max_distance
    first_ahead = of_side if bias.bidirectional else 0
    return np.array([*behind, *(bucket + first_ahead for bucket in ahead)], "int32")


def alibi(num_heads: int) -> Alibi:
    """A bias that falls with the distance: `-slope * |key position - query position|`.

    The slopes of the heads are a geometric sequence, 1/2 to 1/256 for 8 heads; nothing is learned.
    In a causal model the rows of probabilities are those of the other usual form, `slope * key
    position`.

    Args:
        num_heads: Number of heads of the query, H; it need not be a power of two.

    Returns:
        A value: equal to every other for as many heads, written to config as JSON.

    Source: Press et al. 2021, Train Short, Test Long (arXiv:2108.12409), and the authors' slopes
    where the number of heads is no power of two.

    >>> print(alibi(4).slopes)
    [0.25       0.0625     0.015625   0.00390625]
    """
    return Alibi(num_heads)


def relative_position_bias(
    num_heads: int,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> RelativePositionBias:
    """T5's learned bias: one number for each head and each bucket of distances.

    Near keys have a bucket for each distance, farther ones share buckets that widen as powers up to
    `max_distance`, and all beyond are in the last. The table `(num_buckets, num_heads)` is learned:
    a weight of the layer, or a tensor in `dot_product_attention`.

    Args:
        num_heads: Number of heads of the query, H.
        num_buckets: Rows of the table.
        max_distance: Distance in positions from which on all keys share a bucket.
        bidirectional: Whether keys ahead have buckets of their own, half of them (an encoder); else
            keys ahead are in the bucket of the query itself (a decoder).

    Returns:
        A value: equal to every other of equal arguments, written to config as JSON.

    Raises:
        TypeError: for a number that is not whole.
        ValueError: for fewer than one bucket beyond the exact ones, an odd `num_buckets` in
            both directions, or a `max_distance` that no bucket reaches.

    Source: Raffel et al. 2019, T5 (arXiv:1910.10683), section 2.1.

    >>> relative_position_bias(8, num_buckets=16)  # doctest: +ELLIPSIS
    RelativePositionBias(num_heads=8, num_buckets=16, max_distance=128, bidirectional=True)
    """
    return RelativePositionBias(num_heads, num_buckets, max_distance, bidirectional)
