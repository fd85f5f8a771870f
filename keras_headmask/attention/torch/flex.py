"""Tiles on PyTorch in compiled code, forward alone: FlexAttention, its kernel written for the rule.

Which blocks the kernel visits is what `coverage` says of them, computed in the graph: a few
operations on numbers of blocks, so data may decide, and nothing is of size queries x keys.
"""

import platform
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from keras_headmask.attention import nonfinite
from keras_headmask.attention.blocks import Arrays, across, bounds_of
from keras_headmask.attention.head_groups import Part
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import checked_answer
from keras_headmask.rules.protocol import Bound, Sides

# What PyTorch's kernel needs, which it has for a CPU of this kind alone.
_HAS_KERNEL = platform.system() != "Darwin" and "AVX" in torch.backends.cpu.get_cpu_capability()


def is_possible(bound: Bound, scale: Any, *operands: Tensor) -> bool:
    """Whether code is being compiled that FlexAttention can be a part of.

    It has no gradient on a CPU. Where the one query of a step meets its keys, there is nothing to
    gain, nor where whole masks are read, of which all blocks would be.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return False
    of_leaves = [value for inputs in bound.leaf_inputs.values() for value in inputs.values()]
    return (
        _HAS_KERNEL
        and isinstance(scale, (int, float))
        and all(isinstance(value, Sides) for value in of_leaves)
        and all(x.device.type == "cpu" and x.dtype != torch.float64 for x in operands)
        and operands[0].shape[0] > 0
        and operands[0].shape[1] > 1
    )


def compute(part: Part, query_offset: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk.
    """
    blocks = block_mask(part, query_offset, query.shape[1], key.shape[1], query.device)
    operands = [_in_memory(x.transpose(1, 2)) for x in nonfinite.marked(query, key, value)]
    rest = {"scale": part.scale, "enable_gqa": part.sharing != 1}
    context = flex_attention(*operands, score_mod=_nan_as_inf, block_mask=blocks, **rest)
    return context.transpose(1, 2)


def _nan_as_inf(logit: Tensor, *_: Tensor) -> Tensor:
    """The kernel overlooks a NaN when it looks for a row's largest logit; inf - inf is NaN, too."""
    return torch.where(torch.isnan(logit), float("inf"), logit)


def block_mask(
    part: Part, query_offset: int, queries: int, keys: int, device: Any = None
) -> BlockMask:
    """The blocks that some pair is allowed in, and which of them need no mask."""
    size = (part.tuning.flex_block,) * 2
    rest = (queries, keys), size, query_offset, _arrays(device)
    bounds = bounds_of(part.rule, part.bound.leaf_inputs, *rest)
    possible, certain = (x[:, None] for x in bounds)
    of_some, of_all = _ordered(possible & ~certain), _ordered(certain)
    return BlockMask.from_kv_blocks(
        *of_some,
        *of_all,
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(part, query_offset),
        seq_lengths=(queries, keys),
        compute_q_blocks=False,
    )


def _in_memory(tensor: Tensor) -> Tensor:
    """The same numbers, written where the kernel reads them, in the order of the axes.

    It reads rows far apart much slower, and takes no captured tensor that is still to be computed.
    (The compiler writes none, or in another order, unless strides are named.)
    """
    size, strides = tensor.shape, [1]
    for number in reversed(size[1:]):  # (Not `stride()`, which fails where lengths vary.)
        strides.insert(0, strides[0] * number)
    return tensor.contiguous().as_strided(size, strides)


# --- Which blocks --------------------------------------------------------------------------------


def _arrays(device: Any) -> Arrays:
    return Arrays(
        starts=lambda length, size: torch.arange(0, length, size, dtype=torch.int32, device=device),
        at_most=lambda tensor, most: torch.clamp(tensor, max=most),
        extremes=_extremes,
        as_numbers=lambda mask: mask.to(torch.int32),
    )


def _extremes(values: Tensor, size: int, axis: int) -> tuple[Tensor, Tensor]:
    batch, length = values.shape
    whole = length // size * size
    blocks = values[:, :whole].reshape(batch, whole // size, size)
    low, high = blocks.amin(2), blocks.amax(2)
    if whole < length:
        rest = values[:, whole:]
        low = torch.cat([low, rest.amin(1, keepdim=True)], 1)
        high = torch.cat([high, rest.amax(1, keepdim=True)], 1)
    return across(low, axis), across(high, axis)


def _ordered(blocks: Mask) -> tuple[Tensor, Tensor]:
    """How many blocks `(B, 1, tiles, blocks)` of each tile are set, and these first, in order."""
    count = blocks.shape[3]
    place = blocks.cumsum(3) - 1
    number = torch.arange(count, dtype=torch.int32, device=blocks.device).expand(blocks.shape)
    # (Those that are not set are written one place past the last.)
    order = torch.zeros((*blocks.shape[:3], count + 1), dtype=torch.int32, device=blocks.device)
    order = order.scatter(3, torch.where(blocks, place, count), number)
    return blocks.sum(3, dtype=torch.int32), order[..., :count].contiguous()


# --- Which pairs ---------------------------------------------------------------------------------


def _mask_mod(part: Part, query_offset: int) -> Any:
    """Whether one pair of a query and a key is allowed, as FlexAttention calls it."""

    read = {
        leaf: {
            name: Sides(*(None if side is None else _in_memory(side) for side in sides))
            for name, sides in inputs.items()
        }
        for leaf, inputs in part.bound.leaf_inputs.items()
    }

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Mask:
        def at(values: Tensor | None, position: Tensor) -> Tensor | None:
            if values is None:
                return None
            return values[0 if values.shape[0] == 1 else b, 0 if values.shape[1] == 1 else position]

        def of_leaf(leaf: MaskSpec) -> Mask:
            inputs = {
                name: Sides(at(query, q), at(key, k))
                for name, (query, key) in read.get(leaf, {}).items()
            }
            result = leaf.allowed(query_position, key_position, inputs)
            return checked_answer(leaf, result)

        query_position = (q + query_offset).to(torch.int32)
        key_position = k.to(torch.int32)
        return part.rule.fold(of_leaf, torch.logical_and, torch.logical_or, torch.logical_not)

    return allowed
