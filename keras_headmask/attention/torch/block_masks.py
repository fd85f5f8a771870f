"""The blocks of FlexAttention's `BlockMask` for a rule: what `hm.flex_block_mask` gives.

Which blocks the kernel visits is what `coverage` says of them: a few operations on numbers of
blocks, so data may decide, and nothing is of size queries x keys.
"""

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from keras_headmask.attention import planner
from keras_headmask.attention.planner import Arrays, across
from keras_headmask.attention.request import Part
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import checked_answer
from keras_headmask.rules.protocol import Sides


def block_mask(
    part: Part,
    query_offset: int,
    queries: int,
    keys: int,
    where: Any,
) -> BlockMask:
    """The blocks that some pair is allowed in, and which of them need no mask.

    With an axis of heads where their rules differ.
    """
    groups, size = part.groups(), (part.tuning.block,) * 2
    rest = part.bound.leaf_inputs, (queries, keys), size, query_offset, _arrays(where)
    bounds = [planner.bounds_of(rule, *rest) for rule, _ in groups]
    numbered = {head: number for number, (_, heads) in enumerate(groups) for head in heads}
    group_of = [numbered[head] for head in range(len(part.heads))]

    every = torch.zeros([-(-n // part.tuning.block) for n in (queries, keys)], device=where)

    def stacked_groups(of_groups: tuple[Mask, ...]) -> Mask:
        """`(B or 1, H or 1, tiles, blocks)` of what is known of each group."""
        stacked = torch.stack(torch.broadcast_tensors(*of_groups, every[None])[:-1], 1)
        if len(groups) == 1:
            return stacked
        return stacked[:, torch.tensor(group_of, device=where)]

    possible, certain = map(stacked_groups, zip(*bounds, strict=True))
    certain = certain & possible
    return BlockMask.from_kv_blocks(
        *_ordered(possible & ~certain),
        *_ordered(certain),
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(part, query_offset),
        seq_lengths=(queries, keys),
    )


# --- Which blocks --------------------------------------------------------------------------------


def _arrays(device: Any) -> Arrays:
    def starts(length: int, size: int, axis: int) -> Tensor:
        numbers = torch.arange(0, length, size, dtype=torch.int32, device=device)
        return numbers.unsqueeze(1 - axis)

    return Arrays(starts, lambda tensor, most: torch.clamp(tensor, max=most), _extremes)


def _extremes(values: Tensor, size: int, axis: int) -> tuple[Tensor, Tensor]:
    if values.dtype == torch.bool:
        values = values.to(torch.int32)
    length = values.shape[1]
    count = -(-length // size)
    # (The last value once more as often as the last block is short: no case apart to compile.)
    places = torch.arange(count * size, device=values.device).clamp(max=length - 1)
    blocks = values[:, places].reshape(values.shape[0], count, size)
    return across(blocks.amin(2), axis), across(blocks.amax(2), axis)


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
    groups = part.groups()
    captured = part.bound.changed(lambda sides: Sides(*map(_captured, sides))).leaf_inputs

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Mask:
        def at(side: tuple[Tensor, bool] | None, position: Tensor) -> Tensor | None:
            if side is None:
                return None
            values, is_flag = side
            of_example = values[0 if values.shape[0] == 1 else b]
            value = of_example[0 if values.shape[1] == 1 else position]
            return value != 0 if is_flag else value

        def leaf_mask(leaf: MaskSpec) -> Mask:
            inputs = {
                name: Sides(at(query, q), at(key, k))
                for name, (query, key) in captured.get(leaf, {}).items()
            }
            result = leaf.allowed(query_position, key_position, inputs)
            return checked_answer(leaf, result)

        query_position = (q + query_offset).to(torch.int32)
        key_position = k.to(torch.int32)
        answers = [
            rule.fold(leaf_mask, torch.logical_and, torch.logical_or, torch.logical_not)
            for rule, _ in groups
        ]
        answer = answers[0]
        for (_, heads), of_group in zip(groups[1:], answers[1:], strict=True):
            answer = torch.where(_is_one_of(h, heads), of_group, answer)
        return answer

    return allowed


def _is_one_of(head: Tensor, heads: tuple[int, ...]) -> Mask:
    """By comparisons with ends of runs: the kernel reads nothing for it."""
    starts = [x for x in heads if x - 1 not in heads]
    stops = [x for x in heads if x + 1 not in heads]
    of_runs = [(head >= a) & (head <= b) for a, b in zip(starts, stops, strict=True)]
    return functools.reduce(torch.logical_or, of_runs)


def _captured(side: Tensor | None) -> tuple[Tensor, bool] | None:
    """A mask input as the kernel reads it, and whether it is of flags: booleans are read slowly."""
    if side is None:
        return None
    is_flag = side.dtype == torch.bool
    return (side.to(torch.int32) if is_flag else side).contiguous(), is_flag
