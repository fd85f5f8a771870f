"""Shared by the tiled implementations: heads of one rule and their keys, slices, dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask.attention.logits import NONE, Changes, select_heads
from keras_headmask.attention.tuning import Tuning
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.places import pairs_at
from keras_headmask.rules.protocol import Bound, Places


class Part(NamedTuple):
    """Heads that are computed together, their rule, and its prepared mask inputs."""

    rule: MaskSpec
    heads: tuple[int, ...]
    bound: Bound
    scale: float
    tuning: Tuning
    dropout: "Dropout | None" = None
    sharing: int = 1  # how many of the heads, side by side, share a key head
    changes: Changes = NONE  # of the logits of these heads; its tensors are operands

    def groups(self) -> list[tuple[MaskSpec, tuple[int, ...]]]:
        """Each rule that some of the heads obey, with the places of these among them."""
        return head_groups(self.rule, len(self.heads))

    @property
    def tile(self) -> int:
        """How many queries make a tile."""
        return self.tuning.local_tile if self.rule.tiling.is_local else self.tuning.wide_tile

    def positions_at(self, places: Places) -> tuple[Tensor, Tensor]:
        """Positions of the queries `(n, queries)` and keys `(n, keys)` of several tiles."""
        queries = places.take(self.bound.query_positions, places.queries)
        keys = places.take(self.bound.key_positions, places.keys)
        return queries[:, 0, :, 0], keys[:, 0, 0]


def by_rule(part: Part) -> list[Part]:
    """Heads with equal rules together; all of them where a slice of heads crosses devices.

    In each part every key head is read by equally many. `part` is of all heads.
    """
    groups = [(part.rule, part.heads)] if evaluation.heads_are_spread() else part.groups()
    parts = []
    for rule, of_rule in groups:
        for heads in split_by_sharing(of_rule, part.sharing):
            sharing = len(heads) // len(key_heads(heads, part.sharing))
            drawn = part.dropout
            if drawn is not None:
                drawn = drawn._replace(rows=select_heads(drawn.rows, heads, axis=1))
            parts.append(part._replace(rule=rule, heads=heads, sharing=sharing, dropout=drawn))
    return parts


def mean(part: Part, of_group: Callable[[Part], float]) -> float:
    """The mean over all heads of a number that each head group has."""
    return sum(len(x.heads) * of_group(x) for x in by_rule(part)) / max(len(part.heads), 1)


def sharing_of(query: Tensor, key: Tensor) -> int:
    """How many query heads share a key head; both tensors are `(B, L, heads, size)`."""
    heads, of_keys = query.shape[2], key.shape[2]
    return 1 if heads == of_keys or None in (heads, of_keys) else heads // of_keys


def key_heads(heads: tuple[int, ...], sharing: int) -> tuple[int, ...]:
    """The key heads that query `heads` read, where `sharing` query heads read each."""
    return tuple(dict.fromkeys(head // sharing for head in heads))


def split_by_sharing(heads: tuple[int, ...], sharing: int) -> list[tuple[int, ...]]:
    """`heads`, sorted, in sets: in each, every key head is read by equally many."""
    readers: dict[int, list[int]] = {}
    for head in heads:
        readers.setdefault(head // sharing, []).append(head)
    sets: dict[int, list[int]] = {}
    for of_key in readers.values():
        sets.setdefault(len(of_key), []).extend(of_key)
    return [tuple(heads) for heads in sets.values()]


# Grouped queries: the query heads of one key head are folded into the axis of rows, so keys need no
# repeat, and their gradient sums over these heads.


def folded(rows: Tensor, sharing: int) -> Tensor:
    """`(B, H, L, size)` as `(B, H / sharing, sharing * L, size)`."""
    if sharing == 1:
        return rows
    batch, heads, length, size = ops.shape(rows)
    return ops.reshape(rows, (batch, heads // sharing, sharing * length, size))


def unfolded(rows: Tensor, sharing: int) -> Tensor:
    """The inverse of `folded`."""
    if sharing == 1:
        return rows
    batch, heads, length, size = ops.shape(rows)
    return ops.reshape(rows, (batch, heads * sharing, length // sharing, size))


# By one split and one concatenation each, since their gradients are the same; the gradients of
# slices would be whole tensors, one for each set, and their sum.


def cut_into(tensor: Tensor, sets: list[tuple[int, ...]], axis: int) -> list[Tensor]:
    """The heads of `tensor` in each of `sets`, which are sorted; a head may be in several."""
    heads = range(tensor.shape[axis])
    if len(sets) == 1 or sorted(head for of_set in sets for head in of_set) != list(heads):
        return [select_heads(tensor, of_set, axis) for of_set in sets]
    owner = {head: number for number, of_set in enumerate(sets) for head in of_set}
    edges = [head for head in heads[1:] if owner[head] != owner[head - 1]]
    pieces: list[list[Tensor]] = [[] for _ in sets]
    for first, piece in zip([0, *edges], _split(tensor, edges, axis), strict=True):
        pieces[owner[first]].append(piece)
    return [x[0] if len(x) == 1 else ops.concatenate(x, axis) for x in pieces]


def by_group(compute: Callable[..., Tensor], part: Part, *operands: Tensor) -> Tensor:
    """The context of all heads, by `compute(group, *operands)` of each head group, in order.

    Operands: query, key, value, tensors of `part.changes`.
    """
    groups = by_rule(part)
    sets = [group.heads for group in groups]
    of_keys = [key_heads(heads, part.sharing) for heads in sets]
    pairs = zip(operands[:3], (sets, of_keys, of_keys), strict=True)
    cuts = [cut_into(x, of_tensor, 2) for x, of_tensor in pairs]
    changes = part.changes.with_tensors(operands[3:])
    tensors = [changes.of_heads(heads).tensors for heads in sets]
    contexts = [
        compute(group, *of_group, *more)
        for group, *of_group, more in zip(groups, *cuts, tensors, strict=True)
    ]
    return joined(contexts, sets, 2)


def joined(tensors: list[Tensor], sets: list[tuple[int, ...]], axis: int) -> Tensor:
    """One tensor of all heads, of those with the heads of each of `sets`."""
    if len(tensors) == 1:
        return tensors[0]
    pieces: dict[int, Tensor] = {}  # runs of heads side by side, by the first
    for tensor, heads in zip(tensors, sets, strict=True):
        starts = [i for i, head in enumerate(heads) if i == 0 or head != heads[i - 1] + 1]
        runs = _split(tensor, starts[1:], axis)
        pieces |= {heads[i]: run for i, run in zip(starts, runs, strict=True)}
    return ops.concatenate([pieces[first] for first in sorted(pieces)], axis)


def _split(tensor: Tensor, edges: list[int], axis: int) -> list[Tensor]:
    """`tensor` cut before each of `edges`."""
    if not edges:
        return [tensor]
    stops = [*edges, tensor.shape[axis]]
    sizes = [stop - start for start, stop in zip([0, *edges], stops, strict=True)]
    if keras.backend.backend() == "torch":  # `torch.compile` cannot read Keras' split
        return list(tensor.split(sizes, axis))
    if keras.backend.backend() == "tensorflow":  # where Keras' takes 24 nodes
        import tensorflow as tf

        return tf.split(tensor, sizes, axis)
    return ops.split(tensor, edges, axis)


# --- Dropout that does not depend on the tiles ---------------------------------------------------

# Whether a probability is dropped is a hash of the seed, the example, the head, the query and the
# key, so that the backward pass finds it again in any tile, in any order.
# Odd numbers whose products mix well (Wellons 2018, "prospecting for hash functions": lowbias32).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


class Dropout(NamedTuple):
    """Sets a share `rate` of probabilities to 0 and scales the others up.

    `rows` is a number for each example, head and query, `(B, H, T)`; `columns` one for each key,
    `(S,)`.
    """

    rate: float
    rows: Tensor
    columns: Tensor

    def of(self, probabilities: Tensor) -> Tensor:
        """`probabilities` `(B, H, T, S)` after the dropout."""
        rows, dtype = self.rows[..., None], probabilities.dtype
        return probabilities * self._factors(rows, self.columns, dtype)

    def factors_at(self, dtype: Any, places: Places) -> Tensor:
        """The factors of several tiles, `(n, H, queries, keys)`: 0, or 1 / (1 - rate)."""
        rows = pairs_at(self.rows[..., None], places)
        return self._factors(rows, places.take(self.columns, places.keys), dtype)

    def _factors(self, rows: Tensor, columns: Tensor, dtype: Any) -> Tensor:
        number = _mixed(_bits(rows) + _bits(columns), is_compared=True)
        share = int(self.rate * 2**32)  # (of uint32 as many lie below it, of int32 below the other)
        kept = number + 2**31 >= share if _is_unsigned(number) else number >= share - 2**31
        scale = ops.cast(1 / (1 - self.rate), dtype)
        return ops.where(kept, scale, ops.zeros_like(scale))


def dropout(rate: float, seed: object, batch: Length, heads: int, bound: Bound) -> Dropout:
    """A dropout drawn by `seed`: an int, a `keras.random.SeedGenerator`, or `None` for any."""
    drawn = keras.random.randint((2,), -(2**31), 2**31 - 1, dtype="int32", seed=seed)
    positions = (ops.cast(x, "int32") for x in (bound.query_positions, bound.key_positions))
    place = drawn, ops.arange(batch, dtype="int32"), *positions
    if keras.backend.backend() != "tensorflow":
        return Dropout(rate, *_numbers(heads, *place))
    from keras_headmask.attention.tensorflow.graph import for_equal_shapes

    return Dropout(rate, *for_equal_shapes(_numbers, heads)(*place))  # its 100 nodes once


def _numbers(
    heads: int, drawn: Tensor, examples: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows and columns of a `Dropout`."""
    of_head = ops.arange(heads, dtype="int32")[None, :, None]
    rows, columns = _bits(drawn[0]), _bits(drawn[1])
    for number in (examples[:, None, None], of_head, queries):
        rows = _mixed(rows + _bits(number))
    return _bits(rows, "int32"), _bits(_mixed(columns + _bits(keys)), "int32")


def _bits(number: Tensor, dtype: str = "uint32") -> Tensor:
    """On TensorFlow these 32 bits as uint32, which it computes on a GPU, and int32 on the host."""
    if keras.backend.backend() != "tensorflow":
        return number
    import tensorflow as tf

    return tf.bitcast(number, dtype)


def _mixed(number: Tensor, is_compared: bool = False) -> Tensor:
    """A permutation of the 32-bit integers after which neighbours have nothing in common.

    Of a number that is only compared the lower half, which the last step mixes, says nothing.
    """
    for bits, factor in ((16, _FIRST), (15, _SECOND), *([] if is_compared else [(16, None)])):
        number = ops.bitwise_xor(number, _shifted(number, bits))
        if factor is not None:
            number = number * (factor if _is_unsigned(number) else _signed(factor))
    return number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shifted right, zeros shifted in."""
    if not _is_unsigned(number):
        return ops.bitwise_and(ops.right_shift(number, bits), 2 ** (32 - bits) - 1)
    return ops.right_shift(number, ops.convert_to_tensor(bits, "uint32"))


def _is_unsigned(number: Tensor) -> bool:
    return keras.backend.standardize_dtype(number.dtype) == "uint32"


def _signed(number: int) -> int:
    """The int32 of the same bits."""
    return (number + 2**31) % 2**32 - 2**31
