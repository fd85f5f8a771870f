"""Tiles on JAX, compiled: a loop over tiles of queries, in each a loop over the keys it may see.

The sizes of a compiled program are fixed, but not how often its loops run: what is skipped may
depend on data. Each tile meets its blocks of keys one by one, so that no logits but those of one
block exist (online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022); under
rules on positions a tile may have one long block. The backward pass computes the logits again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_headmask.attention import dense, nonfinite
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.jax.key_blocks import (
    KeyBlock,
    Program,
    QueryTile,
    Steps,
    bound_of,
    places,
    planned,
)
from keras_headmask.attention.logits import Changes
from keras_headmask.masks import Tensor
from keras_headmask.rules.evaluation import allowed_tile

_DEAD = 1e30  # the largest logit of a row that sees nothing: exp(logit - _DEAD) is 0


def compute(
    part: Part, query_offset: int, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor
) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `changes` are the tensors of `part.changes`. All sizes are known.
    """
    program, inputs = planned(part, query_offset)
    # (The scale may be traced, which `_attend` cannot read from outside.)
    return _attend(program, inputs, list(changes), query * part.scale, key, value)


@functools.partial(jax.jit, static_argnums=0)  # one program for all equal layers
def _attend(program: Program, inputs: list, changes: list, *operands: Tensor) -> Tensor:
    return _results(program, inputs, changes, *operands)[0]


def _over(step: QueryTile, attend_block: Callable, state: tuple) -> tuple:
    """`state` after all blocks of keys of one tile."""
    if isinstance(step.count, int):  # one block, as known when the program is made
        return attend_block(0, state)
    return lax.fori_loop(0, step.count, attend_block, state)


# Mask inputs are operands: a custom gradient cannot read what is traced outside of it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _results(
    program: Program, inputs: list, tensors: list, *operands: Tensor
) -> tuple[Tensor, Tensor]:
    """The context, and of each row the largest logit and the log of the sum, `(B, T, H, 2)`.

    The sum is that of the exponentials of logits less the largest. (One number for both would round
    the sum away beside large logits.)
    """
    part, steps = program.part, Steps.of(program, inputs, *operands[:2])
    changes, positions = steps.changes(tensors), steps.bound[:2]
    queries, keys, values = steps.prepared(*nonfinite.nan_at_nonfinite(*operands))
    sharing, dtype = part.sharing, _dtype_of_sums(operands[0])

    def attend_tile(step: QueryTile) -> tuple:
        rows = step.rows(queries)
        of_rows = rows.shape[:3]

        def attend_block(number: Tensor, state: tuple) -> tuple:
            largest, total, context = state
            visit = step.block(number)
            logits = _row_products(rows, visit.cut(keys), sharing)
            logits = changes.apply(logits, part.heads, positions, visit.cuts)
            allowed = changes.allowed(visit.allowed, visit.cuts)
            if allowed is not None:
                logits = jnp.where(allowed, logits, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(logits, axis=-1, keepdims=True))
            base = jnp.where(jnp.isneginf(new), 0, new)  # of a row that has seen nothing yet
            shares, before = jnp.exp(logits - base), jnp.exp(largest - base)
            total = total * before + jnp.sum(shares, axis=-1, keepdims=True)
            return new, total, context * before + _weighted(shares, visit.cut(values), sharing)

        nothing = (
            jnp.full((*of_rows, 1), -jnp.inf, dtype),
            jnp.zeros((*of_rows, 1), dtype),
            jnp.zeros((*of_rows, values.shape[3]), dtype),
        )
        largest, total, context = _over(step, attend_block, nothing)
        is_dead = total == 0
        context = jnp.where(is_dead, 0, context / jnp.where(is_dead, 1, total))
        log_sum = jnp.log(total)
        if changes.sinks is not None:
            share, log_sum = changes.share_of_keys(log_sum, largest)
            context = jnp.where(is_dead, 0, context * share)
        # (Those of a row of NaN stay NaN.)
        sums = jnp.where(is_dead, _DEAD, jnp.concatenate([largest, log_sum], axis=-1))
        return context.astype(operands[2].dtype), sums

    contexts, sums = lax.map(lambda i: attend_tile(steps.step(i)), jnp.arange(steps.number))
    return steps.joined(contexts), steps.joined(sums)


def _results_kept(program: Program, inputs: list, changes: list, *operands: Tensor) -> tuple:
    # (So that gradients of gradients know it, too.)
    results = _results(program, inputs, changes, *operands)
    return results, (inputs, changes, operands, results)


def _results_backward(program: Program, kept: tuple, upstream: tuple) -> tuple:
    inputs, changes, operands, results = kept  # (nothing but the backward pass reads the sums)
    return None, *_gradients(program, inputs, changes, *operands, upstream[0], *results)


_results.defvjp(_results_kept, _results_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(program: Program, inputs: list, tensors: list, *operands: Tensor) -> tuple:
    """Gradients of the tensors that change logits, and of queries, keys and values.

    `operands`: these three, the gradient of the context, and what `_results` gave.
    """
    query, key, value, upstream, context, row_sums = operands
    part, steps = program.part, Steps.of(program, inputs, query, key)
    sharing, changes = part.sharing, steps.changes(tensors)
    delta = jnp.sum(upstream * context, axis=-1, keepdims=True)
    sound = nonfinite.replace_nonfinite(query, key, value)
    queries, keys, values = steps.prepared(*sound)
    of_rows = [steps.rows_first(x) for x in (upstream, delta, row_sums)]
    is_added = steps.rows_first(jnp.ones_like(delta)) == 0  # rows that a bias could make infinite
    of_rows[2] = jnp.where(is_added, _DEAD, of_rows[2])
    dtype = _dtype_of_sums(query)

    def attend_tile(sums: tuple, step_number: Tensor) -> tuple:
        step = steps.step(step_number)
        rows, d_context, of_delta, of_sum = map(step.rows, (queries, *of_rows))

        def attend_block(number: Tensor, state: tuple) -> tuple:
            d_rows, d_keys, d_values, of_changes = state
            visit = step.block(number)
            block_keys, block_values = visit.cut(keys), visit.cut(values)
            products = _row_products(rows, block_keys, sharing)
            allowed = changes.allowed(visit.allowed, visit.cuts)
            logits = changes.apply(products, part.heads, steps.bound[:2], visit.cuts)
            probabilities = jnp.exp(logits - of_sum[..., :1] - of_sum[..., 1:])
            if allowed is not None:
                probabilities = jnp.where(allowed, probabilities, 0)
            d_changed = probabilities * (_row_products(d_context, block_values, sharing) - of_delta)
            # A hidden value may let its gradient overflow, and a hidden key that of a soft cap.
            d_changed = jnp.where(probabilities == 0, 0, d_changed)
            d_products, of_changes = _through_changes(
                changes, steps, visit, products, d_changed, of_changes
            )
            d_products = jnp.where(probabilities == 0, 0, d_products)
            return (
                d_rows + _weighted(d_products, block_keys, sharing),
                visit.added(d_keys, _for_keys(d_products, rows, sharing)),
                visit.added(d_values, _for_keys(probabilities, d_context, sharing)),
                of_changes,
            )

        state = jnp.zeros(rows.shape, dtype), *sums
        d_rows, *more = _over(step, attend_block, state)
        return tuple(more), d_rows

    of_tensors = [jnp.zeros_like(x) for x in (changes.bias, changes.table) if x is not None]
    nothing = (*(jnp.zeros(x.shape, dtype) for x in (keys, values)), of_tensors)
    (d_keys, d_values, of_tensors), d_rows = lax.scan(
        attend_tile, nothing, jnp.arange(steps.number)
    )
    if changes.sinks is not None:
        of_sink = jnp.exp(changes.sinks - row_sums[..., 0] - row_sums[..., 1])
        of_tensors = [*of_tensors, -jnp.sum(of_sink * delta[..., 0], axis=(0, 1))]
    pairs = zip(of_tensors, tensors, strict=True)  # (a bias was lengthened)
    of_tensors = [x[tuple(map(slice, like.shape))].astype(like.dtype) for x, like in pairs]
    of_operands = steps.joined(d_rows), *map(steps.joined_keys, (d_keys, d_values))
    pairs = zip(of_operands, sound, strict=True)
    return of_tensors, *(x.astype(like.dtype) for x, like in pairs)


def _through_changes(
    changes: Changes,
    steps: Steps,
    visit: KeyBlock,
    products: Tensor,
    d_changed: Tensor,
    sums: list,
) -> tuple[Tensor, list]:
    """The gradient of the `products` of a block, by that of the logits that are made of them.

    And `sums`, the gradients of the bias and of the table, with what this block adds.
    """
    if not changes.are_some:
        return d_changed, sums
    positions = visit.cuts.queries(steps.bound[0], 0), visit.cuts.keys(steps.bound[1], 0)
    tile = None if changes.bias is None else changes.bias_of_tile(visit.cuts)

    def changed(products: Tensor, bias: Tensor | None, table: Tensor | None) -> Tensor:
        here = changes._replace(bias=bias, table=table)
        return here.apply(products, steps.part.heads, positions)

    d_products, d_tile, d_table = jax.vjp(changed, products, tile, changes.table)[1](d_changed)
    before, after = list(sums), []
    if changes.bias is not None:
        total, (example, query, key) = before.pop(0), visit.corner
        corner = zip(total.shape, (example, 0, query, key), strict=True)
        at = places(0 if size == 1 else x for size, x in corner)
        there = lax.dynamic_slice(total, at, d_tile.shape)
        after.append(lax.dynamic_update_slice(total, there + d_tile, at))
    if changes.table is not None:
        after.append(before.pop(0) + d_table)
    return d_products, after


def _gradients_kept(program: Program, inputs: list, tensors: list, *operands: Tensor) -> tuple:
    return _gradients(program, inputs, tensors, *operands), (inputs, tensors, operands)


def _gradients_backward(program: Program, kept: tuple, upstream: tuple) -> tuple:
    """Gradients of gradients, seldom needed: those of the definition."""
    inputs, tensors, (*operands, context, row_sums) = kept
    part, (query, key) = program.part, operands[:2]
    bound = bound_of(program, inputs, query.shape[1], key.shape[1])
    mask = allowed_tile(part.rule, bound, part.heads)

    def first(tensors: list, query: Tensor, key: Tensor, value: Tensor, d_context: Tensor) -> tuple:
        def definition(tensors: list, *operands: Tensor) -> Tensor:
            query, key, value = operands
            changes, positions = part.changes.with_tensors(tensors), bound[:2]
            return dense.attention(
                query, key, value, mask, 1.0, changes, positions, heads=part.heads
            )[0]

        return jax.vjp(definition, tensors, query, key, value)[1](d_context)

    # The context and the sums are made of the operands, whose gradients hold theirs.
    nothing = map(jnp.zeros_like, (context, row_sums))
    return None, *jax.vjp(first, tensors, *operands)[1](upstream), *nothing


_gradients.defvjp(_gradients_kept, _gradients_backward)


# --- Products ------------------------------------------------------------------------------------


def _dtype_of_sums(tensor: Tensor) -> Any:
    return jnp.promote_types(tensor.dtype, "float32")


def _product(equation: str, one: Tensor, other: Tensor) -> Tensor:
    dtype = _dtype_of_sums(other)
    return jnp.einsum(equation, one.astype(other.dtype), other, preferred_element_type=dtype)


def _row_products(rows: Tensor, keys: Tensor, sharing: int) -> Tensor:
    """The products of rows and keys, or of what belongs to these: `(B, H, T, S)`."""
    return unfolded(_product("bhtd,bhsd->bhts", folded(rows, sharing), keys), sharing)


def _weighted(pairs: Tensor, values: Tensor, sharing: int) -> Tensor:
    """Sums of values (or keys), by numbers for each pair: `(B, H, T, size)`."""
    return unfolded(_product("bhts,bhsd->bhtd", folded(pairs, sharing), values), sharing)


def _for_keys(pairs: Tensor, rows: Tensor, sharing: int) -> Tensor:
    """Sums of rows, and over the heads that share a key: `(B, Hk, S, size)`."""
    return _product("bhts,bhtd->bhsd", folded(pairs, sharing), folded(rows, sharing))
