"""Tiles on PyTorch: each is one `scaled_dot_product_attention`, the keys it skips apart.

For values that are known, outside of compiled and exported code; what is skipped may depend on
data. The backward pass computes each tile again instead of keeping it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from keras_headmask.attention import gathered, planner
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.planner import Plan
from keras_headmask.attention.torch.steps import Step, steps_of
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.evaluation import allowed_tile, by_head
from keras_headmask.rules.protocol import Bound, Cuts, Sides

# Of entries up to here no logit overflows, nor any product of the backward pass: the kernel adds
# -inf to hidden logits, and inf - inf would not be hidden.
_LARGEST = 1e15


def can_read(bound: Bound, *operands: Tensor) -> bool:
    """Whether tiles are possible here: the values of operands and mask inputs can be read now.

    They cannot while code is compiled or exported, nor inside of `torch.func`.
    """
    sides = [side for value in bound.values for side in _tensors(value) if side is not None]
    tensors = *operands, *sides
    if torch.compiler.is_compiling() or any(x.device.type == "meta" for x in tensors):
        return False
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return not any(map(gathered.is_stand_in, tensors))


def compute(part: Part, query_offset: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk.
    """
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    plan = functools.partial(planner.plan_of, part, queries, keys, query_offset)
    if not batch:
        return gathered.compute(part, plan(), query, key, value)
    steps = steps_of(part, _read(part.bound), batch, queries, keys, query_offset)
    if is_forward_only():
        return _context(part, steps, plan, query, key, value)
    return _Attention.apply(query, key, value, part, steps, plan)


def _tensors(value: Any) -> tuple:
    return value if isinstance(value, Sides) else (value,)


def _read(bound: Bound) -> dict:
    """The ids and flags of each leaf as NumPy arrays; a leaf with a whole mask is left out."""

    def array(side: Tensor | None) -> np.ndarray | None:
        return None if side is None else side.detach().cpu().numpy()

    return {
        leaf: {name: Sides(*map(array, sides)) for name, sides in inputs.items()}
        for leaf, inputs in bound.leaf_inputs.items()
        if all(isinstance(value, Sides) for value in inputs.values())
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, part, steps, plan = arguments
        ctx.save_for_backward(query, key, value)
        ctx.rest = part, steps, plan
        return _context(part, steps, plan, query, key, value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        operands, (part, steps, plan) = ctx.saved_tensors, ctx.rest
        # A gradient that is differentiated in its turn is made of operations that can be.
        if torch.is_grad_enabled() or not _are_moderate(*operands, upstream):
            gradients = _gradients_of_operations(part, plan(), *operands, upstream)
        else:
            gradients = _gradients(part, steps, *operands, upstream)
        return *gradients, None, None, None


# --- The passes ----------------------------------------------------------------------------------


def _context(
    part: Part, steps: list[Step], plan: Callable, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    if _are_moderate(query, key, value):
        return _forward(part, steps, query, key, value)
    # Rows that see nothing large are those of 0 in its place, to the bit.
    large = [~(x.abs() <= _LARGEST).all(-1, keepdim=True) for x in (query, key, value)]
    of_key = large[1] | large[2]
    small = (
        torch.where(bad, 0.0, x)
        for bad, x in zip((large[0], of_key, of_key), (query, key, value), strict=True)
    )
    context = _forward(part, steps, *small)
    seen = large[0] | _see(part, steps, query, of_key)
    if not seen.any():
        return context
    return torch.where(seen, gathered.compute(part, plan(), query, key, value), context)


def _forward(part: Part, steps: list[Step], *operands: Tensor) -> Tensor:
    query, key, value = map(_heads_first, operands)
    batch, heads, queries, _ = query.shape
    context = query.new_zeros((batch, queries, heads, value.shape[3]))
    for step in steps:
        rows, *of_keys = _rows(step, query), *(_keys(step, x) for x in (key, value))
        attended = _attended(part, step, rows, *of_keys)
        _write(step, _heads_first(context), attended)
    return context


def _gradients(part: Part, steps: list[Step], *tensors: Tensor) -> tuple:
    *operands, upstream = map(_heads_first, tensors)
    # (Zeros as the operands lie in memory: `(B, L, H, D)`.)
    sums = [torch.zeros_like(x, dtype=_sum_dtype(x)) for x in tensors[:3]]
    d_query, d_key, d_value = map(_heads_first, sums)
    of_runs = upstream
    if not all(step.is_run for step in steps):
        of_runs = _without_flagged(steps, upstream)
    for step in steps:
        tile = _rows(step, operands[0]), *(_keys(step, x) for x in operands[1:])
        leaves = [x.detach().requires_grad_() for x in tile]
        with torch.enable_grad():
            attended = _attended(part, step, *leaves)
        d_context = _rows(step, of_runs if step.is_run else upstream)
        d_tile = torch.autograd.grad(attended, leaves, d_context)
        _add_rows(step, d_query, d_tile[0])
        _add_keys(step, d_key, d_tile[1])
        _add_keys(step, d_value, d_tile[2])
    return tuple(x.to(of.dtype) for x, of in zip(sums, tensors, strict=False))


def _gradients_of_operations(part: Part, plan: Plan, *tensors: Tensor) -> tuple:
    """The gradients by differentiable operations, for second derivatives."""
    *operands, upstream = tensors
    again = torch.is_grad_enabled()
    leaves = [x if again and x.requires_grad else x.detach().requires_grad_() for x in operands]
    with torch.enable_grad():
        context = gathered.compute(part, plan, *leaves)
    return torch.autograd.grad(context, leaves, upstream, create_graph=again)


def _attended(part: Part, step: Step, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The context `(b, H, t, Dv)` of some rows `(b, H, t, D)`, fully masked ones exactly 0."""
    sharing, allowed, is_alive = part.sharing, None, None
    if step.needs_mask:
        allowed = _allowed(part, step)
        alive = allowed.any(-1, keepdim=True)
        if allowed.is_cuda or not alive.all():  # (not to wait for a GPU)
            # They see everything at first: some kernels make NaN of a row that sees nothing.
            allowed, is_alive = allowed | ~alive, alive
        allowed = allowed.expand(*allowed.shape[:2], rows.shape[2], keys.shape[2])
        if sharing != 1:
            allowed = allowed.expand(-1, rows.shape[1], -1, -1)
    context = scaled_dot_product_attention(
        folded(rows, sharing),
        keys,
        values,
        attn_mask=None if allowed is None else folded(allowed, sharing),
        scale=part.scale,
    )
    context = unfolded(context, sharing)
    return context if is_alive is None else torch.where(is_alive, context, 0.0)


def _allowed(part: Part, step: Step) -> Mask:
    first, stop = step.examples
    cuts = Cuts(
        lambda x, axis: _taken(x, axis, step.rows, step.is_run),
        lambda x, axis: _keys_along(step, x, axis),
        lambda x, axis: x if x.shape[0] == 1 else x[first:stop],
    )
    groups, heads = part.groups(), part.heads
    allowed = [allowed_tile(rule, part.bound, heads, cuts) for rule, _ in groups]
    return by_head(groups, len(heads), allowed)


def _see(part: Part, steps: list[Step], query: Tensor, marked: Mask) -> Mask:
    """Which rows `(B, T, H, 1)` may see a key that is `marked`, `(B, S, Hk, 1)`."""
    batch, queries, heads, _ = query.shape
    sees = torch.zeros((batch, queries, heads, 1), dtype=torch.bool, device=query.device)
    of_heads = _heads_first(marked).repeat_interleave(part.sharing, 1)
    for step in steps:
        columns = _keys(step, of_heads).transpose(2, 3)
        if step.needs_mask:
            columns = columns & _allowed(part, step)
        _write(step, _heads_first(sees), columns.any(-1, keepdim=True))
    return sees


@torch.no_grad()
def _are_moderate(*tensors: Tensor) -> bool:
    """Whether every entry is finite and small enough, by a bound that is quick to find."""
    norms = [torch.linalg.vector_norm(x, dtype=_sum_dtype(x)) for x in tensors]
    return bool(torch.stack([x.double() for x in norms]).max() <= _LARGEST)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


# --- Cutting, and putting together ---------------------------------------------------------------


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, D)` to `(B, H, L, D)`, and back: a view."""
    return tensor.transpose(1, 2)


def _taken(tensor: Tensor, axis: int, where: tuple, is_run: bool = False) -> Tensor:
    if is_run:
        return tensor.narrow(axis, where[0], where[1] - where[0])
    return tensor.index_select(axis, _places(where, tensor))


def _places(where: tuple, beside: Tensor) -> Tensor:
    return torch.tensor(where, dtype=torch.int64, device=beside.device)


def _rows(step: Step, tensor: Tensor) -> Tensor:
    """The rows of a step, cut out of `(B, H, T, D)`."""
    first, stop = step.examples
    return _taken(tensor[first:stop], 2, step.rows, step.is_run)


def _keys(step: Step, tensor: Tensor) -> Tensor:
    """The keys of a step, cut out of `(B, Hk, S, D)`; a view if they are one run."""
    first, stop = step.examples
    return _keys_along(step, tensor[first:stop], 2)


def _keys_along(step: Step, tensor: Tensor, axis: int) -> Tensor:
    pieces = [_taken(tensor, axis, run, True) for run in step.runs]
    if step.others:
        pieces.append(_taken(tensor, axis, step.others))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def _write(step: Step, whole: Tensor, rows: Tensor) -> None:
    whole = whole[slice(*step.examples)]
    if step.is_run:
        _taken(whole, 2, step.rows, True).copy_(rows)
    else:
        whole[:, :, _places(step.rows, whole)] = rows


def _add_rows(step: Step, whole: Tensor, rows: Tensor) -> None:
    whole = whole[slice(*step.examples)]
    if step.is_run:
        _taken(whole, 2, step.rows, True).add_(rows)
    else:
        whole.index_add_(2, _places(step.rows, whole), rows.to(whole.dtype))


def _add_keys(step: Step, whole: Tensor, of_tile: Tensor) -> None:
    whole, place = whole[slice(*step.examples)], 0
    for start, stop in step.runs:
        _taken(whole, 2, (start, stop), True).add_(of_tile[:, :, place : place + stop - start])
        place += stop - start
    if step.others:
        whole.index_add_(2, _places(step.others, whole), of_tile[:, :, place:].to(whole.dtype))


def _without_flagged(steps: list[Step], upstream: Tensor) -> Tensor:
    """0 for rows that a later step has computed anew."""
    upstream = upstream.clone()
    for step in steps:
        if not step.is_run:
            of_step = upstream[slice(*step.examples)]
            of_step.index_fill_(2, _places(step.rows, of_step), 0.0)
    return upstream
