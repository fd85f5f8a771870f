"""Shared by the tiled implementations: heads of one rule and their keys, slices, dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.scopes import Tuning
from keras_headmask.masks import Tensor
from keras_headmask.rules import evaluation
from keras_headmask.rules.algebra import is_local
from keras_headmask.rules.base import MaskSpec, head_groups
from keras_headmask.rules.evaluation import Bound
from keras_headmask.rules.protocol import Sides


class Part(NamedTuple):
    """Heads that are computed together, their rule, and its prepared mask inputs."""

    rule: MaskSpec
    heads: tuple[int, ...]
    bound: Bound
    scale: float
    tuning: Tuning
    dropout: "Dropout | None" = None
    sharing: int = 1  # how many of the heads, side by side, share a key head
    soft_cap: float | None = None  # of the logits

    def groups(self) -> list[tuple[MaskSpec, tuple[int, ...]]]:
        """Each rule that some of the heads obey, with the places of these among them."""
        return head_groups(self.rule, len(self.heads))

    def is_local(self, rule: MaskSpec) -> bool:
        """Whether a query under `rule`, that of some of the heads, sees few keys."""
        reads = tuple(
            (leaf, tuple((name, _is_flag(value)) for name, value in inputs.items()))
            for leaf, inputs in self.bound.leaf_inputs.items()
            if all(isinstance(value, Sides) for value in inputs.values())
        )
        return is_local(rule, reads)


def _is_flag(sides: Sides) -> bool:
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in sides if x is not None]
    return dtypes[:1] == ["bool"]


def by_rule(part: Part) -> list[Part]:
    """Heads with equal rules together; all of them where a slice of heads crosses devices.

    In each part every key head is read by equally many. `part` is of all heads.
    """
    groups = [(part.rule, part.heads)] if evaluation.heads_are_spread() else part.groups()
    parts = []
    for rule, of_rule in groups:
        for heads in split_by_sharing(of_rule, part.sharing):
            sharing = len(heads) // len(key_heads(heads, part.sharing))
            parts.append(part._replace(rule=rule, heads=heads, sharing=sharing))
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


def select_heads(tensor: Tensor, heads: tuple[int, ...], axis: int) -> Tensor:
    """Some heads of `tensor`, sorted; heads that are side by side are not gathered."""
    first, last = heads[0], heads[-1]
    if len(heads) != last - first + 1:
        return ops.take(tensor, list(heads), axis=axis)
    if len(heads) == tensor.shape[axis]:
        return tensor
    return tensor[(slice(None),) * axis + (slice(first, last + 1),)]


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

    Operands: query, key, value, and sinks if there are some.
    """
    groups = by_rule(part)
    sets = [group.heads for group in groups]
    of_keys = [key_heads(heads, part.sharing) for heads in sets]
    pairs = zip(operands[:3], (sets, of_keys, of_keys), strict=True)
    cuts = [cut_into(x, of_tensor, 2) for x, of_tensor in pairs]
    cuts += [[select_heads(sinks, heads, 0) for heads in sets] for sinks in operands[3:]]
    contexts = [compute(*of_group) for of_group in zip(groups, *cuts, strict=True)]
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


# --- Dropout -------------------------------------------------------------------------------------


class Dropout(NamedTuple):
    """Sets a share `rate` of probabilities to 0 and scales the others up.

    `seed` `(2,)` is drawn once for a call of attention, so that what is computed again for the
    gradient drops the same. On PyTorch it is `None` where its own state, which is put back then,
    draws.
    """

    rate: float
    seed: Tensor | None

    def of(self, probabilities: Tensor, part: Part, number: Any = 0) -> Tensor:
        """`probabilities` after the dropout; `number` differs by tensor in a head group."""
        seed = self.seed
        if seed is not None:
            seed = seed + ops.cast(ops.stack([0, part.heads[0] * 2**20 + number]), seed.dtype)
        drawn = _keras.DrawnSeed(seed)
        return keras.random.dropout(probabilities, self.rate, seed=drawn)


def dropout(rate: float, seed: Any) -> Dropout | None:
    """A dropout drawn by `seed`: an int, a `keras.random.SeedGenerator`, or `None` for any."""
    if not rate:
        return None
    if keras.backend.backend() == "torch" and not _keras.is_seeded(seed):
        return Dropout(rate, None)
    dtype = "uint32" if keras.backend.backend() == "jax" else "int32"
    return Dropout(rate, keras.random.randint((2,), 0, 2**30, dtype=dtype, seed=seed))
