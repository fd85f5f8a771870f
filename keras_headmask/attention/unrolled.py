"""Tiles where lengths are known: a Python loop over tiles of queries, on every backend.

Each tile meets the runs of keys that the positions alone allow; what a rule reads from data is
masked, not skipped. The backward pass computes each tile again instead of keeping it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask._keras import custom_gradient
from keras_headmask.attention import nonfinite, precision
from keras_headmask.attention.blocks import Plan
from keras_headmask.attention.gradients import GradientsOfChanges
from keras_headmask.attention.head_groups import Part, cut, folded, unfolded
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import tile_of_heads
from keras_headmask.rules.protocol import WHOLE, Cuts


def compute(
    part: Part, plan: Plan, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor
) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `changes` are the tensors of `part.changes`.
    """
    backend = keras.backend.backend()
    if is_forward_only() or _differentiates_itself(query, key, value, *changes):
        return forward(part, plan, *nonfinite.marked(query, key, value), *changes)

    own_gradient = custom_gradient if backend == "tensorflow" else ops.custom_gradient

    @own_gradient
    def attention(*operands: Tensor) -> tuple[Tensor, Callable]:
        marked = nonfinite.marked(*operands[:3])
        context = forward(part, plan, *marked, *operands[3:])
        # On torch, a result that its own gradient keeps would never be freed.
        kept = (context, *marked) if backend == "tensorflow" else None

        def backward(*arguments: Tensor, upstream: Tensor | None = None) -> tuple:
            # TensorFlow passes the gradient alone, torch the operands too.
            upstream = arguments[0] if upstream is None else upstream
            return gradient(part, plan, kept, *operands, upstream)

        return context, backward

    return attention(query, key, value, *changes)


def _differentiates_itself(*operands: Tensor) -> bool:
    """Whether JAX or `torch.func` runs this, whose gradient is that of what stands in `forward`.

    (`torch.func` refuses our own.)
    """
    if keras.backend.backend() != "torch":
        return keras.backend.backend() == "jax"
    import torch

    if torch.compiler.is_compiling() or operands[0].device.type == "meta":
        return False
    return any(map(is_stand_in, operands))


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor of PyTorch's has no memory, as those inside of `torch.func`."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def forward(
    part: Part, plan: Plan, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor
) -> Tensor:
    queries = _split(_heads_first(query) * part.scale, plan.tile)
    keys, values = (_split(_heads_first(x), plan.block) for x in (key, value))
    groups = part.groups()

    def attended(number: int, changes: list[Tensor], queries: Tensor, *blocks: Tensor) -> Tensor:
        half = len(blocks) // 2
        tile = _Tile.of(part, groups, plan, number, queries, blocks[:half], changes)
        probabilities = part.dropped(tile.probabilities, tile.cuts)
        return tile.alive_or_0(_weighted(probabilities, _joined(blocks[half:]), part))

    contexts = []
    for number, rows in enumerate(queries):
        blocks = [of[i] for of in (keys, values) for i in plan.blocks(number)]
        of_tile: Callable = functools.partial(attended, number)
        # JAX' custom gradients cannot read what is traced outside of them, as mask inputs are;
        # `remat`, which computes again what a gradient needs, can.
        of_tile = keras.remat(of_tile) if keras.backend.backend() == "jax" else of_tile
        contexts.append(of_tile(list(changes), rows, *blocks))
    return _heads_first(ops.concatenate(contexts, axis=2))


def gradient(part: Part, plan: Plan, kept: tuple | None, *operands: Tensor) -> tuple:
    """The gradients of the operands, given these and that of the context.

    `kept`, if not `None`, is the context and the operands it was made of. Logits of the very same
    tensors as in the forward pass need not be computed again where both passes are one graph.
    """
    query, key, value, *changes, upstream = operands
    upstream = ops.cast(upstream, query.dtype)  # (`torch.autocast` makes half of the context)
    of_changes = GradientsOfChanges(part, plan, changes, key.shape[1])
    delta: Any = None
    if kept is None:
        query, key, value = nonfinite.without_bad(query, key, value)
    else:
        context, marked_query, marked_key, value = kept
        delta = _split(_heads_first(ops.sum(upstream * context, axis=-1, keepdims=True)), plan.tile)
        query, key = nonfinite.without_bad(query, key)
    queries, upstream = _heads_first(query) * part.scale, _heads_first(upstream)
    keys, values = (_split(_heads_first(x), plan.block) for x in (key, value))
    marked_queries, marked_keys = queries, keys
    if kept is not None:
        marked_queries = _heads_first(marked_query) * part.scale
        marked_keys = _split(_heads_first(marked_key), plan.block)
    groups = part.groups()
    d_queries = []
    # What each tile adds to each block.
    d_keys: list[list[Tensor]] = [[] for _ in keys]
    d_values: list[list[Tensor]] = [[] for _ in values]
    rows = (_split(x, plan.tile) for x in (marked_queries, queries, upstream))
    for number, (marked_rows, queries, d_context) in enumerate(zip(*rows, strict=True)):
        blocks = plan.blocks(number)
        tile_blocks = [marked_keys[i] for i in blocks]
        tile = _Tile.of(part, groups, plan, number, marked_rows, tile_blocks, changes)
        tile_keys = tile.keys if kept is None else _joined([keys[i] for i in blocks])
        d_context = tile.alive_or_0(d_context)  # fully masked rows add nothing below
        # A row whose logits overflow is NaN, which hidden keys must not get.
        tile = tile._replace(probabilities=tile.allowed_or_0(tile.probabilities))
        tile_values = _joined([values[i] for i in blocks])
        d_probabilities = _of_pairs(d_context, tile_values, part)
        d_probabilities = part.dropped(d_probabilities, tile.cuts)
        if delta is None:  # a hidden value may let its gradient overflow
            d_probabilities = tile.allowed_or_0(d_probabilities)
            of_tile = ops.sum(tile.probabilities * d_probabilities, axis=-1, keepdims=True)
        else:
            of_tile = delta[number]
        d_logits = tile.allowed_or_0(tile.probabilities * (d_probabilities - of_tile))
        if changes:
            of_rows = None if tile.of_keys is None else (tile.of_keys - 1) * of_tile
            of_sinks = None if of_rows is None else tile.alive_or_0(of_rows)
            of_changes.add(number, tile.cuts, d_logits, of_sinks)
        if tile.slope is not None:
            d_logits = tile.allowed_or_0(d_logits * tile.slope)
        d_queries.append(_weighted(d_logits, tile_keys, part) * part.scale)
        d_tile_keys = _for_keys(d_logits, queries, part)
        kept_probabilities = part.dropped(tile.probabilities, tile.cuts)
        d_tile_values = _for_keys(kept_probabilities, d_context, part)
        for of_blocks, d_tile in ((d_keys, d_tile_keys), (d_values, d_tile_values)):
            for block, d_block in zip(blocks, _split(d_tile, plan.block), strict=True):
                of_blocks[block].append(d_block)

    def summed(of_blocks: list[list[Tensor]], blocks: list[Tensor]) -> Tensor:
        sums = [
            functools.reduce(operator.add, gradients) if gradients else ops.zeros_like(block)
            for gradients, block in zip(of_blocks, blocks, strict=True)
        ]
        return _heads_first(ops.concatenate(sums, axis=2))

    d_query = _heads_first(ops.concatenate(d_queries, axis=2))
    return d_query, summed(d_keys, keys), summed(d_values, values), *of_changes.summed()


class _Tile(NamedTuple):
    """The queries of one tile with the keys they may see, and their probabilities.

    `alive`: which queries see something, `None` where all do; the probabilities of the others mean
    nothing. `allowed` is `None` where no pair is hidden. `slope` is the soft cap's derivative,
    `of_keys` what a sink leaves of each row; `None` without.
    """

    cuts: Cuts
    keys: Tensor
    probabilities: Tensor
    alive: Mask | None
    allowed: Mask | None
    slope: Tensor | None = None
    of_keys: Tensor | None = None

    @classmethod
    def of(
        cls,
        part: Part,
        groups: list[tuple[MaskSpec, tuple[int, ...]]],
        plan: Plan,
        number: int,
        queries: Tensor,
        blocks: Sequence[Tensor],
        tensors: Sequence[Tensor] = (),
    ) -> "_Tile":
        start, runs = number * plan.tile, plan.runs[number]
        stop = start + queries.shape[2]
        cuts = Cuts(
            lambda x, axis: cut(x, axis, start, stop),
            lambda x, axis: _joined([cut(x, axis, a, b) for a, b in runs], axis),
            WHOLE.batch,
        )
        keys = _joined(blocks)
        differentiates_itself = _differentiates_itself(queries, keys, *tensors)
        if differentiates_itself:  # marks must not be a part of what is multiplied
            marks = nonfinite.marks(folded(queries, part.sharing), keys, heads_first=True)
            zeroed_queries, zeroed_keys = nonfinite.zeroed(queries, keys)
            logits = _of_pairs(zeroed_queries, zeroed_keys, part)
            logits = logits + unfolded(marks, part.sharing)
        else:
            logits = _of_pairs(queries, keys, part)
        changes, positions = part.changes.with_tensors(tensors), part.bound[:2]
        capped = differentiates_itself and changes.soft_cap is not None
        alive = allowed = None
        if not plan.needs_no_mask[number]:
            allowed = tile_of_heads(groups, part.bound, part.heads, cuts)
        if capped and allowed is not None:  # where a hidden logit is NaN, so is its derivative
            logits = ops.where(allowed, logits, ops.zeros_like(logits))
        logits, slope = changes.of_logits(logits, part.heads, positions, cuts)
        allowed = changes.allowed(allowed, cuts)
        if allowed is not None:
            alive = ops.any(allowed, axis=-1, keepdims=True)
            hidden = ops.cast(nonfinite.hidden_logit(logits.dtype), logits.dtype)
            logits = ops.where(allowed, logits, ops.where(alive, hidden, ops.zeros_like(hidden)))
        probabilities, of_keys = ops.softmax(logits, axis=-1), None
        if changes.sinks is not None:
            log_sum = ops.logsumexp(logits, axis=-1, keepdims=True)
            of_keys, _ = changes.share_of_keys(log_sum)
            probabilities = probabilities * of_keys
        tile = cls(cuts, keys, probabilities, alive, allowed, slope, of_keys)
        if differentiates_itself:
            tile = tile._replace(probabilities=tile.allowed_or_0(tile.probabilities))
        return tile

    def allowed_or_0(self, pairs: Tensor) -> Tensor:
        return pairs if self.allowed is None else ops.where(self.allowed, pairs, 0.0)

    def alive_or_0(self, rows: Tensor) -> Tensor:
        return rows if self.alive is None else ops.where(self.alive, rows, ops.zeros_like(rows))


# Not `matmul`, which Keras computes in float32 on torch, float64 or not.


def _of_pairs(queries: Tensor, keys: Tensor, part: Part) -> Tensor:
    """The products of queries and keys, or of what belongs to these: `(B, H, T, S)`."""
    rows = folded(queries, part.sharing)
    made = precision.product("bhtd,bhsd->bhts", rows, keys, part.half)
    return unfolded(made, part.sharing)


def _weighted(pairs: Tensor, values: Tensor, part: Part) -> Tensor:
    """Sums of values (or keys), by numbers for each pair: `(B, H, T, size)`."""
    rows = folded(pairs, part.sharing)
    made = precision.product("bhts,bhsd->bhtd", rows, values, part.half)
    return unfolded(made, part.sharing)


def _for_keys(pairs: Tensor, queries: Tensor, part: Part) -> Tensor:
    """Sums of queries, and over the heads that share a key: `(B, Hk, S, size)`."""
    of_pairs, rows = (folded(x, part.sharing) for x in (pairs, queries))
    return precision.product("bhts,bhtd->bhsd", of_pairs, rows, part.half)


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, D)` to `(B, H, L, D)`, and back."""
    return ops.transpose(tensor, (0, 2, 1, 3))


def _split(tensor: Tensor, size: int) -> list[Tensor]:
    """`tensor` cut along its axis of positions, every `size`."""
    edges = list(range(size, tensor.shape[2], size))
    if not edges:
        return [tensor]
    if keras.backend.backend() == "torch":  # views; and `torch.compile` cannot read Keras' split
        return [tensor[:, :, a : a + size] for a in (0, *edges)]
    return ops.split(tensor, edges, axis=2)


def _joined(blocks: Sequence[Tensor], axis: int = 2) -> Tensor:
    return blocks[0] if len(blocks) == 1 else ops.concatenate(blocks, axis=axis)
