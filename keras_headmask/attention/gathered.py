"""Gathered key blocks: a few batched products in place of a loop, on any backend, at static sizes.

The positions alone decide which key blocks a tile of queries meets; pairs that data hides are
masked, not skipped. Tiles that meet about equally many blocks form a class. Each class gathers its
keys and computes one product, one softmax and one product. The gradient is the backend's own.
"""

import functools
import itertools
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import planner
from keras_headmask.attention.dense import capped, hidden_logit, with_sinks
from keras_headmask.attention.request import Part, folded, unfolded
from keras_headmask.attention.scopes import constant_when_compiled
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules.algebra import is_local
from keras_headmask.rules.base import MaskSpec, head_groups
from keras_headmask.rules.evaluation import by_head, mask_at
from keras_headmask.rules.protocol import Places

_MOST_CLASSES = 4  # each is compiled by itself; more of them compute little less
_LITTLE = 0.05  # share of logits, for which one class more is not worth it


class Class(NamedTuple):
    """Tiles of queries that are computed together.

    `blocks` lists the key blocks that each tile meets, then -1 up to the width of the class. With
    `needs_mask` some pair may be hidden.
    """

    tiles: list[int]
    blocks: list[list[int]]
    needs_mask: bool


class PositionPlan(NamedTuple):
    """The classes of all tiles, and the share of all blocks that they meet."""

    tile: int
    block: int
    classes: list[Class]
    share: float


def plan_of(part: Part, queries: int, keys: int, query_offset: int) -> PositionPlan:
    """The plan by positions; a pair that any of the heads of `part` may see is computed."""
    tuning = part.tuning
    of_tiles = tuning.local_tile, tuning.wide_tile, tuning.block, len(part.heads)
    tile, classes, share = _planned(_taken_apart(part.rule), queries, keys, query_offset, *of_tiles)
    # (To PyTorch's compiler a number in a constant is one once it is asked for.)
    made = [
        Class([*map(int, tiles)], [[*map(int, x)] for x in blocks], needs_mask)
        for tiles, blocks, needs_mask in classes
    ]
    return PositionPlan(int(tile), tuning.block, made, share)


@constant_when_compiled  # (PyTorch's compiler reads no NumPy, and no tuple with names.)
def _planned(
    apart: Any, queries: int, keys: int, offset: int, local: int, wide: int, block: int, heads: int
) -> tuple[int, list[tuple], float]:
    rules = [rule for rule, _ in head_groups(_put_together(apart), heads)]
    tile = local if all(is_local(rule, ()) for rule in rules) else wide
    rest = (queries, keys), (tile, block), offset, planner.NUMPY
    possible, certain = zip(*[planner.bounds_of(rule, {}, *rest) for rule in rules], strict=True)
    shape = 1, -(-queries // tile), -(-keys // block)
    is_met = functools.reduce(np.logical_or, possible, np.zeros(shape, bool))[0]
    is_all = functools.reduce(np.logical_and, certain, np.ones(shape, bool))[0]
    # A tile that may see nothing meets the first keys, all masked: gradients are 0, not lost.
    is_met[:, :1] |= ~is_met.any(1, keepdims=True)
    needs_mask, counts = (is_met & ~is_all).any(1), is_met.sum(1)
    blocks = np.argsort(~is_met, 1, kind="stable")
    blocks = np.where(np.arange(blocks.shape[1]) < counts[:, None], blocks, -1)
    classes = []
    for below, width in itertools.pairwise([0, *_widths(counts.tolist())]):
        (tiles,) = np.nonzero((below < counts) & (counts <= width))
        of_tiles = tiles.tolist(), blocks[tiles, :width].tolist(), bool(needs_mask[tiles].any())
        classes.append(of_tiles)
    return tile, classes, float(is_met.sum() / max(is_met.size, 1))


def _taken_apart(value: Any) -> Any:
    """A spec as tuples of its class and its fields, which the compiler can hand over."""
    if isinstance(value, MaskSpec):
        fields: Any = type(value).__dataclass_fields__  # type: ignore[attr-defined]
        return type(value), *[(name, _taken_apart(getattr(value, name))) for name in fields]
    return tuple([_taken_apart(x) for x in value]) if isinstance(value, tuple) else value


def _put_together(value: Any) -> Any:
    """The inverse of `_taken_apart`."""
    if not isinstance(value, tuple):
        return value
    if not (value and isinstance(value[0], type) and issubclass(value[0], MaskSpec)):
        return tuple(map(_put_together, value))
    spec = object.__new__(value[0])
    for name, field in value[1:]:
        object.__setattr__(spec, name, _put_together(field))
    return spec


def _widths(counts: list[int]) -> list[int]:
    """The widths of the classes, rising: as few classes as compute at most 5% more logits."""
    sizes = sorted(set(counts))
    below = [0, *itertools.accumulate(counts.count(size) for size in sizes)]
    # Dynamic programming over sizes: for the tiles up to each size, the least number of blocks to
    # compute with 1, 2, ... classes, and the widths of these classes.
    best = [(0, ()), *((size * n, (size,)) for size, n in zip(sizes, below[1:], strict=True))]
    best_by_count = [best[-1]]
    for _ in range(_MOST_CLASSES - 1):
        best[1:] = [
            min((best[j][0] + size * (below[i] - below[j]), (*best[j][1], size)) for j in range(i))
            for i, size in enumerate(sizes, 1)
        ]
        best_by_count.append(best[-1])
    enough = best_by_count[-1][0] * (1 + _LITTLE)
    return list(next(widths for computed, widths in best_by_count if computed <= enough))


def compute(
    part: Part, plan: PositionPlan, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor
) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk.
    """
    lengths = query.shape[1], key.shape[1]
    of_keys = (_split(x, 1, plan.block) for x in (key, value))
    operands = [_split(query * part.scale, 1, plan.tile), *of_keys, *sinks]
    classes, contexts, is_again = plan.classes, [], _is_computed_again(query, key, value)
    for each in classes:
        run = functools.partial(_attended, part, plan, each, lengths)
        run = keras.remat(run) if is_again else run
        contexts.append(run(operands))
    order = [i for each in classes for i in each.tiles]
    context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=1)
    context = _taken(context, [order.index(i) for i in range(len(order))], 1)
    batch, tiles, heads, _, size = masks.sizes(context)
    context = ops.reshape(
        ops.transpose(context, (0, 1, 3, 2, 4)), (batch, tiles * plan.tile, heads, size)
    )
    return context if tiles * plan.tile == lengths[0] else context[:, : lengths[0]]


def _is_computed_again(*operands: Tensor) -> bool:
    """Whether the backward pass computes probabilities again instead of keeping them."""
    if keras.backend.backend() != "torch":
        return keras.backend.backend() == "jax"
    import torch

    # (Compiled code decides by itself what it keeps.)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return not any(map(_is_stand_in, operands))


def _is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor of PyTorch's has no memory, as those inside of `torch.func`."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def _attended(
    part: Part,
    plan: PositionPlan,
    each: Class,
    lengths: tuple[int, int],
    operands: list[Tensor],
) -> Tensor:
    """The context of a class, `(B, n, H, tile, Dv)`.

    The queries are cut into tiles, `(B, tiles, tile, H, D)`, keys and values into blocks; sinks may
    follow.
    """
    query, key, value, *sinks = operands
    batch, count = masks.sizes(query)[0], len(each.tiles)
    blocks = [[max(number, 0) for number in of_tile] for of_tile in each.blocks]
    # Examples and tiles are one axis in products, and two where only examples differ.
    together, apart = (batch * count,), (batch, count)
    rows = folded(_heads_first(_taken(query, each.tiles, 1), together), part.sharing)
    keys, values = (_heads_first(_joined(_taken(x, blocks, 1)), together) for x in (key, value))
    logits = unfolded(ops.einsum("bhtd,bhsd->bhts", rows, keys), part.sharing)
    logits = capped(_reshaped(logits, apart), part.soft_cap)
    allowed = _allowed(part, plan, each, lengths, batch)
    if allowed is not None:
        dtype = keras.backend.standardize_dtype(logits.dtype)
        logits = ops.where(allowed, logits, ops.cast(hidden_logit(dtype), dtype))
    if sinks:
        of_heads = ops.reshape(sinks[0], (-1, 1, 1))
        probabilities = ops.softmax(with_sinks(logits, of_heads), axis=-1)[..., :-1]
    else:
        probabilities = ops.softmax(logits, axis=-1)
    if part.dropout is not None:
        probabilities = part.dropout.of(probabilities, part, each.tiles[0])
    probabilities = folded(_reshaped(probabilities, together, 2), part.sharing)
    context = ops.einsum("bhts,bhsd->bhtd", probabilities, values)
    context = _reshaped(unfolded(context, part.sharing), apart)
    if allowed is None:
        return context
    alive = ops.any(allowed, axis=-1, keepdims=True)
    return ops.where(alive, context, ops.zeros_like(context))


def _allowed(
    part: Part, plan: PositionPlan, each: Class, lengths: tuple[int, int], batch: Length
) -> Mask | None:
    """Which pairs of a class are there and allowed, broadcastable to `(B, n, H, tile, keys)`.

    `None`: all. Nothing is cut or joined along the axis of heads, which may be spread over devices.
    """
    count, blocks = len(each.tiles), ops.convert_to_tensor(each.blocks, "int32")
    queries = ops.convert_to_tensor(each.tiles, "int32")[:, None] * plan.tile
    queries = ops.minimum(queries + ops.arange(plan.tile, dtype="int32"), lengths[0] - 1)
    keys = blocks[:, :, None] * plan.block + ops.arange(plan.block, dtype="int32")
    keys, are_there = ops.reshape(keys, (count, -1)), None
    if min(map(min, each.blocks)) < 0 or (max(map(max, each.blocks)) + 1) * plan.block > lengths[1]:
        are_there = ops.logical_and(keys >= 0, keys < lengths[1])[:, None, None]
    if not each.needs_mask:
        return are_there
    keys = ops.clip(keys, 0, lengths[1] - 1)

    def leaf_mask(leaf: MaskSpec) -> Mask:
        apart = (batch if leaf.inputs else 1, count)
        together = (apart[0] * apart[1],)

        def taken_of_each(places: Tensor, *size: int) -> Tensor:
            return ops.reshape(ops.broadcast_to(places, (*apart, *size)), (*together, *size))

        examples = taken_of_each(ops.arange(apart[0], dtype="int32")[:, None])[:, None, None, None]
        of_queries, of_keys = (taken_of_each(x, x.shape[1]) for x in (queries, keys))
        both = of_queries[:, None, :, None], of_keys[:, None, None]
        # (By example nothing is read where the sequences of all are one.)
        places = Places(examples, *both, *both, _taken, by_example=batch != 0)
        answer = mask_at(leaf, part.bound, part.heads, places)
        return answer[None] if answer.shape[0] == 1 else _reshaped(answer, apart)

    def rule_mask(rule: MaskSpec) -> Mask:
        return rule.fold(leaf_mask, ops.logical_and, ops.logical_or, ops.logical_not)

    groups = part.groups()
    allowed = by_head(groups, len(part.heads), [rule_mask(rule) for rule, _ in groups])
    return allowed if are_there is None else ops.logical_and(allowed, are_there)


# --- Cutting, and putting together ---------------------------------------------------------------


def _split(tensor: Tensor, axis: int, size: int) -> Tensor:
    """An axis cut into pieces of that size, the last filled up by zeros: two axes."""
    length, sizes = tensor.shape[axis], masks.sizes(tensor)
    count = -(-length // size)
    if (
        count * size != length
    ):  # (Not `ops.pad`: it names an object, which PyTorch's compiler sees.)
        rest = ops.zeros((*sizes[:axis], count * size - length, *sizes[axis + 1 :]), tensor.dtype)
        tensor = ops.concatenate([tensor, rest], axis)
    return ops.reshape(tensor, (*sizes[:axis], count, size, *sizes[axis + 1 :]))


def _taken(tensor: Tensor, numbers: Any, axis: int = 0) -> Tensor:
    """`ops.take` at `numbers`, which are lists or a tensor."""
    if isinstance(numbers, list):
        if numbers == list(range(tensor.shape[axis])):
            return tensor
        numbers = ops.convert_to_tensor(numbers, "int32")
    if keras.backend.backend() == "jax":  # where Keras' `take` looks for numbers beyond the end
        return tensor[(slice(None),) * axis + (numbers,)]
    return ops.take(tensor, numbers, axis=axis)


def _joined(blocks: Tensor) -> Tensor:
    """`(B, n, width, block, H, D)` with the blocks of a tile as one axis."""
    batch, count, width, block, *rest = masks.sizes(blocks)
    return ops.reshape(blocks, (batch, count, width * block, *rest))


def _heads_first(tensor: Tensor, first: tuple) -> Tensor:
    """`(B, n, L, H, D)` as `(B * n, H, L, D)`."""
    return _reshaped(ops.transpose(tensor, (0, 1, 3, 2, 4)), first, 2)


def _reshaped(tensor: Tensor, first: tuple, replaced: int = 1) -> Tensor:
    """With the first axes as other ones."""
    return ops.reshape(tensor, (*first, *masks.sizes(tensor)[replaced:]))
