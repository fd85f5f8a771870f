"""One call of attention, what restricts it, and the parts in which it is computed."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention.scopes import Tuning, is_dense_scope
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import evaluation, graphs
from keras_headmask.rules.algebra import is_local
from keras_headmask.rules.base import MaskSpec, head_groups
from keras_headmask.rules.evaluation import Bound, as_int, as_pair, as_sides
from keras_headmask.rules.leaves import KeyFlag, MaskInput, QueryFlag
from keras_headmask.rules.protocol import Sides, Sizes


class Changes(NamedTuple):
    """Soft cap, bias, sinks. A bias takes all logits, the others are applied in tiles, too."""

    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    bias: Tensor | None = None  # (B or 1, H or 1, T or 1, S or 1)
    sinks: Tensor | None = None  # (H,): logits that join the sum of each row, and have no value

    @property
    def are_some(self) -> bool:
        return any(x is not None for x in self)


NONE = Changes()


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One call of attention, by the function, a layer or a retrofitted layer."""

    query: Tensor  # (B, T, H, D)
    key: Tensor  # (B, S, Hk, D); Hk divides H, and query head h reads key head h // (H / Hk)
    value: Tensor  # (B, S, Hk, Dv)
    rule: MaskSpec | None = None  # everything that restricts, as one spec
    bound: Any = None  # the prepared mask inputs of `rule`: a `Bound`
    _: dataclasses.KW_ONLY
    scale: float  # factor of the logits
    query_offset: Length = 0  # query i stands at position i + `query_offset`, as in `bound`
    dropout: float = 0.0  # share of the probabilities set to 0; 0 at inference
    seed: Any = None  # for `dropout`: an int or a `keras.random.SeedGenerator`
    changes: Changes = NONE  # what changes logits beside the mask
    wants_probabilities: bool = False  # whether the caller reads them
    tiled: bool | None = None  # `None` leaves it to size and rule
    mask: Mask | None = None  # in place of `rule`: all that restricts, boolean, of rank 2 to 4


# --- What restricts it ----------------------------------------------------------------------------

# (Made once: `torch.compile` cannot read how a spec is made.)
_FROM_OUTSIDE: tuple[Any, ...] = (
    MaskInput("(attention_mask)"),
    QueryFlag("(query_mask)"),
    KeyFlag("(value_mask)"),
    KeyFlag("(key_mask)"),
)
_FROM_OUTSIDE[1] & _FROM_OUTSIDE[2]  # (So that it has seen one made, and can join others.)


def all_that_restricts(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    value_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: MaskSpec | None = None,
) -> tuple[MaskSpec | None, dict[str, Any]]:
    """One spec for everything that restricts, and its mask inputs; `None` where nothing does.

    The names of what comes from outside the rule are in brackets, as no rule of JSON would have.
    What comes from outside is ANDed after the rule, so that no `~` or `|` inside reopens it.
    """
    specs, inputs = [spec], dict(mask_inputs or {})
    given = attention_mask, query_mask, value_mask, key_mask
    attention_mask, query_mask, value_mask, key_mask = map(graphs.first_equal, given)
    as_inputs = attention_mask, (query_mask, None), (None, value_mask), (None, key_mask)
    for leaf, mask, as_input in zip(_FROM_OUTSIDE, given, as_inputs, strict=True):
        if mask is not None:
            specs.append(leaf)
            inputs[leaf.input] = as_input
    joined = [x for x in (*specs, window) if x is not None]
    return (functools.reduce(operator.and_, joined) if joined else None), inputs


def bound_to(
    rule: MaskSpec,
    inputs: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Length,
    **known: Any,
) -> tuple[Bound, Tensor]:
    """`evaluation.bind` for operands `(B, L, H, D)`, and the query, which a graph checks.

    What a TensorFlow graph does not know of their sizes is read off a mask input, if one says it:
    then all layers that read it share what is made of it.
    """
    check_operands(query, key, value)
    (batch, queries), keys = masks.sizes(query)[:2], masks.sizes(key)[1]
    known_sizes = Sizes(batch, queries, keys)
    if _is_graph(query):
        known["heads"], checks = query.shape[2], graphs.operand_checks(query, key, value)
        if any(not isinstance(size, int) for size in known_sizes):
            given = known_sizes, rule, inputs, query_offset, query, key
            known_sizes, query = _sizes_from_inputs(*given)
        query = graphs.after(checks, query)
    lengths = known_sizes.queries, known_sizes.keys, query_offset
    return evaluation.bind(rule, inputs, *lengths, batch=known_sizes.batch, **known), query


def _is_graph(query: Tensor) -> bool:
    """Whether a TensorFlow graph is traced that runs where `checks` are obeyed."""
    if keras.backend.backend() != "tensorflow" or keras.backend.is_keras_tensor(query):
        return False
    import tensorflow as tf

    return not (tf.executing_eagerly() or _keras.in_xla() or is_dense_scope())


def _sizes_from_inputs(
    sizes: Sizes,
    rule: MaskSpec,
    inputs: Mapping[str, Any],
    query_offset: Length,
    query: Tensor,
    key: Tensor,
) -> tuple[Sizes, Tensor]:
    """See `graphs.sizes_from_input`."""
    kinds = {
        name: kind
        for name, kind in rule.inputs.items()
        if kind.rank is not None and not graphs.is_outside(name)
    }
    if not kinds:
        return sizes, query
    name = max(kinds, key=lambda name: len(kinds[name].sides))  # the first that says both lengths
    has_offset = as_int(query_offset) != 0
    is_cut, mask_input = has_offset and as_pair(inputs[name]) is None, as_sides(inputs[name])
    is_self = _keras.are_as_long(query, key)
    return graphs.sizes_from_input(
        sizes, name, mask_input, kinds[name].sides, is_cut, is_self, query
    )


# --- As callers give it ---------------------------------------------------------------------------


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise where known sizes of operands `(B, L, H, D)` do not fit; the key heads may be fewer."""
    # (Pair by pair: in a set, PyTorch's compiler would take each length for a constant.)
    pairs = (0, query, key), (0, key, value), (0, query, value), (1, key, value), (2, key, value)
    if not all(_agree(x.shape[axis], y.shape[axis]) for axis, x, y in (*pairs, (3, query, key))):
        operands = {"query": query, "key": key, "value": value}
        received = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
        raise ValueError(f"{graphs.OPERANDS} Received: {received}.")


def _agree(size: int | None, other: int | None) -> bool:
    return None in (size, other) or size == other


def checked_bias(bias: Any, name: str, *lengths: int | None) -> Tensor | None:
    """`bias` as a tensor of rank 4, if its dtype and static shape fit `lengths`, (B, H, T, S)."""
    if bias is None:
        return None
    bias = masks.as_tensor(bias)
    dtype, shape = keras.backend.standardize_dtype(bias.dtype), tuple(bias.shape)
    if "float" not in dtype:
        raise TypeError(
            f"`{name}` must be floats, which are added to the logits. Received dtype {dtype}. What "
            "a query may attend to is a mask."
        )
    rank = len(shape)
    sizes = lengths[4 - rank :] if rank <= 4 else ()
    if rank > 4 or not all(map(masks.fits, shape, sizes)):
        raise ValueError(
            f"`{name}` must broadcast to (batch, heads, queries, keys) = {lengths}; a rank below 4 "
            f"lacks the first axes. Received: shape {shape}."
        )
    return ops.expand_dims(bias, tuple(range(4 - rank))) if rank < 4 else bias


def checked_tiled(tiled: Any) -> bool | None:
    if tiled is None or isinstance(tiled, bool):
        return tiled
    raise TypeError(f"`tiled` must be True, False or None. Received: {tiled!r}.")


# --- The parts in which it is computed ------------------------------------------------------------


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
        for heads in _split_by_sharing(of_rule, part.sharing):
            sharing = len(heads) // len(_key_heads(heads, part.sharing))
            parts.append(part._replace(rule=rule, heads=heads, sharing=sharing))
    return parts


def _split_by_sharing(heads: tuple[int, ...], sharing: int) -> list[tuple[int, ...]]:
    """`heads`, sorted, in sets: in each, every key head is read by equally many."""
    readers: dict[int, list[int]] = {}
    for head in heads:
        readers.setdefault(head // sharing, []).append(head)
    sets: dict[int, list[int]] = {}
    for of_key in readers.values():
        sets.setdefault(len(of_key), []).extend(of_key)
    return [tuple(heads) for heads in sets.values()]


def _key_heads(heads: tuple[int, ...], sharing: int) -> tuple[int, ...]:
    """The key heads that query `heads` read, where `sharing` query heads read each."""
    return tuple(dict.fromkeys(head // sharing for head in heads))


def mean_over_heads(part: Part, of_group: Callable[[Part], float]) -> float:
    """The mean over all heads of a number that each head group has."""
    return sum(len(x.heads) * of_group(x) for x in by_rule(part)) / max(len(part.heads), 1)


def by_group(compute: Callable[..., Tensor], part: Part, *operands: Tensor) -> Tensor:
    """The context of all heads, by `compute(group, *operands)` of each head group, in order.

    Operands: query, key, value, and sinks if there are some.
    """
    groups = by_rule(part)
    sets = [group.heads for group in groups]
    of_keys = [_key_heads(heads, part.sharing) for heads in sets]
    pairs = zip(operands[:3], (sets, of_keys, of_keys), strict=True)
    cuts = [_cut_into(x, of_tensor, 2) for x, of_tensor in pairs]
    cuts += [[_select_heads(sinks, heads, 0) for heads in sets] for sinks in operands[3:]]
    contexts = [compute(*of_group) for of_group in zip(groups, *cuts, strict=True)]
    return _joined(contexts, sets, 2)


# One split cuts heads apart, and one concatenation joins them: each is the gradient of the other.
# The gradients of slices would be whole tensors, one for each set, and their sum.


def _cut_into(tensor: Tensor, sets: list[tuple[int, ...]], axis: int) -> list[Tensor]:
    """The heads of `tensor` in each of `sets`, which are sorted; a head may be in several."""
    heads = range(tensor.shape[axis])
    if len(sets) == 1 or sorted(head for of_set in sets for head in of_set) != list(heads):
        return [_select_heads(tensor, of_set, axis) for of_set in sets]
    owner = {head: number for number, of_set in enumerate(sets) for head in of_set}
    edges = [head for head in heads[1:] if owner[head] != owner[head - 1]]
    pieces: list[list[Tensor]] = [[] for _ in sets]
    for first, piece in zip([0, *edges], _split(tensor, edges, axis), strict=True):
        pieces[owner[first]].append(piece)
    return [x[0] if len(x) == 1 else ops.concatenate(x, axis) for x in pieces]


def _select_heads(tensor: Tensor, heads: tuple[int, ...], axis: int) -> Tensor:
    """Some heads of `tensor`, sorted; heads that are side by side are not gathered."""
    first, last = heads[0], heads[-1]
    if len(heads) != last - first + 1:
        return ops.take(tensor, list(heads), axis=axis)
    if len(heads) == tensor.shape[axis]:
        return tensor
    return tensor[(slice(None),) * axis + (slice(first, last + 1),)]


def _joined(tensors: list[Tensor], sets: list[tuple[int, ...]], axis: int) -> Tensor:
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


# Grouped queries: the query heads of one key head are folded into the axis of rows, so keys need no
# repeat, and their gradient sums over these heads.


def sharing_of(query: Tensor, key: Tensor) -> int:
    """How many query heads share a key head; both tensors are `(B, L, heads, size)`."""
    heads, of_keys = query.shape[2], key.shape[2]
    return 1 if heads == of_keys or None in (heads, of_keys) else heads // of_keys


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


# --- Dropout --------------------------------------------------------------------------------------


def dropout_of(layer: Any, training: bool | None) -> dict[str, Any]:
    """The fields of a `Request` for a layer of dropout, or `None`; none outside of training."""
    if layer is None or not (layer.rate > 0 and training):
        return {}
    return {"dropout": layer.rate, "seed": layer.seed_generator}


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


def drawn_dropout(rate: float, seed: Any) -> Dropout | None:
    """A dropout drawn by `seed`: an int, a `keras.random.SeedGenerator`, or `None` for any."""
    if not rate:
        return None
    if keras.backend.backend() == "torch" and not _keras.is_seeded(seed):
        return Dropout(rate, None)
    dtype = "uint32" if keras.backend.backend() == "jax" else "int32"
    return Dropout(rate, keras.random.randint((2,), 0, 2**30, dtype=dtype, seed=seed))
