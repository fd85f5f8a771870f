"""Gathered key blocks: a few batched products in place of a loop, on any backend, at static sizes.

The positions alone decide which key blocks a tile of queries meets; pairs that data hides are
masked, not skipped. Tiles that meet about equally many blocks form a class. Each class gathers its
keys and computes one product, one softmax and one product. The gradient is the backend's own.
"""

import functools
import itertools
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import planner
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.logits import capped, hidden_logit, with_sinks
from keras_headmask.attention.tuning import constant_when_compiled
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import by_head, mask_at
from keras_headmask.rules.protocol import Places

_MOST_CLASSES = 4  # each is compiled by itself; more of them compute little less
_LITTLE = 0.05  # share of logits, for which one class more is not worth it


class Class(NamedTuple):
    """Tiles of queries that are computed together.

    `blocks` lists the key blocks that each tile meets, the last one repeated up to the width of the
    class; `met` counts them without repeats. With `needs_mask` some pair may be hidden.
    """

    tiles: list[int]
    blocks: list[list[int]]
    met: list[int]
    needs_mask: bool

    @property
    def width(self) -> int:
        return len(self.blocks[0])


class Plan(NamedTuple):
    """The classes of all tiles, and the share of all logits that they compute."""

    tile: int
    block: int
    classes: list[Class]
    share: float


def plan_of(part: Part, queries: int, keys: int, query_offset: int) -> Plan:
    """The plan of heads that obey one rule, or of all where heads are spread over devices."""
    tile, block = part.tile, part.tuning.block
    sizes = queries, keys, query_offset, tile, block, len(part.heads)
    classes, share = _planned(_taken_apart(part.rule), *sizes)
    # (To PyTorch's compiler a number in a constant is one once it is asked for.)
    made = [
        Class([*map(int, tiles)], [[*map(int, x)] for x in blocks], [*map(int, met)], needs_mask)
        for tiles, blocks, met, needs_mask in classes
    ]
    return Plan(tile, block, made, share)


@constant_when_compiled  # (PyTorch's compiler reads no NumPy, and no tuple with names.)
def _planned(rule: Any, queries: int, keys: int, *sizes: int) -> tuple[list[tuple], float]:
    made = planner.plan(_put_together(rule), queries, keys, *sizes)
    classes = _classes_of(made)
    seen = sum(len(each.tiles) * min(each.width * made.block, keys) for each in classes)
    return [tuple(each) for each in classes], seen / max(keys * len(made.runs), 1)


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


def _classes_of(plan: planner.Plan) -> list[Class]:
    of_tiles = [
        [i for start, stop in runs for i in range(start // plan.block, -(-stop // plan.block))]
        for runs in plan.runs
    ]
    classes = []
    for below, width in itertools.pairwise([0, *_widths([len(blocks) for blocks in of_tiles])]):
        tiles = [i for i, blocks in enumerate(of_tiles) if below < len(blocks) <= width]
        met = [len(of_tiles[i]) for i in tiles]
        blocks = [of_tiles[i] + of_tiles[i][-1:] * (width - len(of_tiles[i])) for i in tiles]
        needs_mask = not all(plan.needs_no_mask[i] for i in tiles)
        classes.append(Class(tiles, blocks, met, needs_mask))
    return classes


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
    part: Part, plan: Plan, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor
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
    plan: Plan,
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
    # Examples and tiles are one axis in products, and two where only examples differ.
    together, apart = (batch * count,), (batch, count)
    rows = folded(_heads_first(_taken(query, each.tiles, 1), together), part.sharing)
    keys, values = (
        _heads_first(_joined(_taken(x, each.blocks, 1)), together) for x in (key, value)
    )
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


class _At(NamedTuple):
    """Positions of the queries `(n, tile)` and keys `(n, width * block)` of a class.

    Positions beyond the end are clipped. `are_there` `(n, 1, width * block)` is false for such keys
    and for repeated blocks; `None`: no key is clipped or repeated.
    """

    queries: Tensor
    keys: Tensor
    are_there: Mask | None

    @classmethod
    def of(cls, plan: Plan, each: Class, lengths: tuple[int, int]) -> "_At":
        tiles, blocks, met = (ops.convert_to_tensor(x, "int32") for x in each[:3])
        number = ops.arange(each.width * plan.block, dtype="int32")
        queries = tiles[:, None] * plan.tile + ops.arange(plan.tile, dtype="int32")
        keys = blocks[:, :, None] * plan.block + ops.arange(plan.block, dtype="int32")
        keys = ops.reshape(keys, (len(each.tiles), each.width * plan.block))
        last = (max(map(max, each.blocks)) + 1) * plan.block
        are_there = None
        if last > lengths[1] or min(each.met) < each.width:
            are_there = ops.logical_and(number < met[:, None] * plan.block, keys < lengths[1])
            are_there = are_there[:, None]
        queries, keys = ops.minimum(queries, lengths[0] - 1), ops.minimum(keys, lengths[1] - 1)
        return cls(queries, keys, are_there)


def _allowed(
    part: Part, plan: Plan, each: Class, lengths: tuple[int, int], batch: Length
) -> Mask | None:
    """Which pairs of a class are there and allowed, broadcastable to `(B, n, H, tile, keys)`.

    `None`: all. Nothing is cut or joined along the axis of heads, which may be spread over devices.
    """
    at = _At.of(plan, each, lengths)
    are_there = None if at.are_there is None else at.are_there[:, None]
    if not each.needs_mask:
        return are_there

    def leaf_mask(leaf: MaskSpec) -> Mask:
        apart = (batch if leaf.inputs else 1, at.queries.shape[0])
        together = (apart[0] * apart[1],)

        def taken_of_each(places: Tensor, *size: int) -> Tensor:
            return ops.reshape(ops.broadcast_to(places, (*apart, *size)), (*together, *size))

        examples = taken_of_each(ops.arange(apart[0], dtype="int32")[:, None])[:, None, None, None]
        queries, keys = (taken_of_each(x, x.shape[1]) for x in at[:2])
        both = queries[:, None, :, None], keys[:, None, None]
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
