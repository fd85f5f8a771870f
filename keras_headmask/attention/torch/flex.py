"""FlexAttention on PyTorch, whose kernel is written for the rule: compiled code on a CPU, and CUDA.

Which blocks the kernel visits is what `coverage` says of them, computed in the graph: a few
operations on numbers of blocks, so data may decide, and nothing is of size queries x keys.
"""

import functools
import platform
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from keras_headmask.attention import half_precision, nonfinite, planner
from keras_headmask.attention.biases import Alibi
from keras_headmask.attention.gathered import is_stand_in
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.planner import Arrays, across
from keras_headmask.attention.request import Request
from keras_headmask.attention.torch.compiled import can_compile, is_trained, one_compiled
from keras_headmask.attention.torch.repair import shaded, sound
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import checked_answer
from keras_headmask.rules.protocol import Bound, Sides

# What PyTorch's kernel needs, which it has for a CPU of this kind alone.
_HAS_KERNEL = platform.system() != "Darwin" and "AVX" in torch.backends.cpu.get_cpu_capability()
_DTYPES = [{dtype} for dtype in half_precision.HALF]  # (it multiplies float32 slowly)
_LEAST_SIZE = 16  # of a head, on CUDA


def why_not_on_cpu(request: Request) -> str | None:
    """Why it does not come into question on a CPU, in words.

    It has no gradient there. Where the one query of a step meets its keys, there is nothing to
    gain, nor where whole masks are read, of which all blocks would be.
    """
    operands = request.query, request.key, request.value
    is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if (
        is_compiled
        and not is_trained(*operands)
        and _HAS_KERNEL
        and isinstance(request.scale, (int, float))
        and _reads_sides_alone(request.bound)
        and all(x.device.type == "cpu" and x.dtype != torch.float64 for x in operands)
        and request.query.shape[0] > 0
        and request.query.shape[1] > 1
    ):
        return None
    return "it is for code compiled for inference on a CPU, of several queries, without whole masks"


def why_not_on_gpu(request: Request) -> str | None:
    """Why FlexAttention does not take `request` on a GPU, where it also trains; `None`: it does."""
    operands, changes = (request.query, request.key, request.value), request.changes
    if request.dropout:
        return "it has no dropout"
    if changes.bias is not None or changes.table is not None:
        return "gradients of a bias, or of its table, would be summed pair by pair"
    if {str(x.dtype).removeprefix("torch.") for x in operands} not in _DTYPES:
        return "operands are not all of one half precision"
    if min(request.query.shape[3], request.value.shape[3]) < _LEAST_SIZE:
        return f"heads are smaller than {_LEAST_SIZE}"
    if not isinstance(request.scale, (int, float)):
        return "the scale is a tensor"
    if not _reads_sides_alone(request.bound):
        return "a whole mask is read, of which nothing is known by blocks"
    if not request.query.shape[0]:
        return "there is no example"
    if torch.compiler.is_exporting() or any(map(is_stand_in, operands)):
        return "code is exported, or mapped"
    if request.query.is_cuda and not can_compile(request.query.device):
        return "it needs Triton, and a GPU of compute capability 8.0 or more"
    return None


def _reads_sides_alone(bound: Bound) -> bool:
    return all(isinstance(value, Sides) for value in bound.values)


def run(request: Request, part: Part) -> Tensor:
    """The context of all heads, on a GPU."""
    changes = request.changes
    part = part._replace(changes=changes.without_tensors())
    operands = request.query, request.key, request.value, *changes.tensors
    return one_compiled(compute)(part, request.query_offset, *operands)


def compute(part: Part, query_offset: int, *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk, and their rule may differ from head to head. `operands`: these, and the
    sinks, if there are some.
    """
    query, key, value, *sinks = operands
    sizes, trains = (query.shape[1], key.shape[1], query.device), is_trained(*operands)
    visited = block_mask(part, query_offset, *sizes, trains)
    bad = None
    if trains:
        query, key, value, bad_rows, bad_keys = sound(query, key, value, trains)
        bad = bad_rows | _see(part, visited, query, bad_keys)
    else:
        query, key, value = nonfinite.nan_at_nonfinite(query, key, value)
    result = flex_attention(
        *(_in_memory(x.transpose(1, 2)) for x in (query, key, value)),
        score_mod=_score_mod(part, query_offset, query.device),
        block_mask=visited,
        scale=part.scale,
        enable_gqa=part.sharing != 1,
        return_aux=AuxRequest(lse=True) if sinks else None,
    )
    context = (result[0] if sinks else result).transpose(1, 2)
    if sinks:
        log_sum = result[1].lse.transpose(1, 2)
        context = context * torch.sigmoid(log_sum - sinks[0])[..., None].to(context.dtype)
    return context if bad is None else shaded(context, query, bad)


@torch.no_grad()
def _see(part: Part, visited: BlockMask, query: Tensor, marked: Mask) -> Mask:
    """Which queries `(B, T, H)` see a key that is `marked`, `(B, S, Hk)`.

    By attention of zeros, whose probabilities are equal: a NaN that entered the kernel itself would
    be in the gradient of keys that its row does not see.
    """
    size = _LEAST_SIZE
    rows = query.new_zeros((*query.shape[:3], size)).transpose(1, 2)
    keys = query.new_zeros((*marked.shape, size)).transpose(1, 2)
    values = marked.to(query.dtype)[..., None].expand(*marked.shape, size).transpose(1, 2)
    ones = flex_attention(
        *map(_in_memory, (rows, keys, values)),
        block_mask=visited,
        enable_gqa=part.sharing != 1,
    )
    return ones[..., 0].transpose(1, 2) > 0


def _score_mod(part: Part, query_offset: int, where: Any) -> Any:
    """FlexAttention's `score_mod` for soft cap and ALiBi; `None` if there is neither."""
    soft_cap, position_bias = part.changes.soft_cap, part.changes.position_bias
    slopes = None
    if position_bias is not None:
        assert isinstance(position_bias, Alibi)  # (others have a table)
        slopes = torch.tensor(position_bias.slopes, dtype=torch.float32, device=where)
    is_cpu = where.type == "cpu"
    if not (is_cpu or soft_cap is not None or slopes is not None):
        return None

    def changed(logit: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if soft_cap is not None:
            logit = soft_cap * torch.tanh(logit / soft_cap)
        if slopes is not None:
            logit = logit - slopes[h] * (q + query_offset - k).abs()
        if is_cpu:
            # That kernel overlooks a NaN when it looks for a row's largest logit; inf - inf is
            # NaN, too.
            logit = torch.where(torch.isnan(logit), float("inf"), logit)
        return logit

    return changed


def block_mask(
    part: Part,
    query_offset: int,
    queries: int,
    keys: int,
    where: Any = None,
    trains: bool = False,
) -> BlockMask:
    """The blocks that some pair is allowed in, and which of them need no mask.

    With an axis of heads where their rules differ.
    """
    on_gpu = where is not None and where.type == "cuda"
    block = part.tuning.wide_block if on_gpu else part.tuning.block
    groups, size = part.groups(), (block, block)
    rest = part.bound.leaf_inputs, (queries, keys), size, query_offset, _arrays(where)
    bounds = [planner.bounds_of(rule, *rest) for rule, _ in groups]
    numbered = {head: number for number, (_, heads) in enumerate(groups) for head in heads}
    group_of = [numbered[head] for head in range(len(part.heads))]

    def stacked_groups(of_groups: tuple[Mask, ...]) -> Mask:
        """`(B or 1, H or 1, tiles, blocks)` of what is known of each group."""
        stacked = torch.stack(torch.broadcast_tensors(*of_groups), 1)
        if len(groups) == 1:
            return stacked
        return stacked[:, torch.tensor(group_of, device=where)]

    possible, certain = map(stacked_groups, zip(*bounds, strict=True))
    return BlockMask.from_kv_blocks(
        *_ordered(possible & ~certain),
        *_ordered(certain),
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(part, query_offset),
        seq_lengths=(queries, keys),
        compute_q_blocks=trains,
    )


def _in_memory(tensor: Tensor) -> Tensor:
    """`tensor` written to memory in the order of its axes.

    The kernel reads rows that lie far apart much slower, and takes no captured tensor that is not
    computed yet. (Unless strides are named, the compiler writes none, or another order.)
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
    return _in_memory(side.to(torch.int32) if is_flag else side), is_flag
