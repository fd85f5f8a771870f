"""Tiles on JAX, compiled: a loop over tiles of queries, in each a loop over the keys it may see.

The sizes of a compiled program are fixed, but not how often its loops run: what is skipped may
depend on data. Each tile meets its blocks of keys one by one, so that no logits but those of one
block exist (online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022); under
rules on positions a tile may have one run of keys in their place (`runs`). The backward pass
computes the logits again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_headmask.attention import dense, nonfinite
from keras_headmask.attention.head_groups import Part, folded, unfolded
from keras_headmask.attention.jax.logits import ChangesOfBlocks, as_bias
from keras_headmask.attention.jax.runs import Runs
from keras_headmask.attention.jax.steps import Program, QueryTile, Steps, bound_of, planned
from keras_headmask.masks import Tensor
from keras_headmask.rules.evaluation import allowed_tile

_DEAD = 1e30  # the largest logit of a row that sees nothing: exp(logit - _DEAD) is 0


def compute(
    part: Part, query_offset: int, query: Tensor, key: Tensor, value: Tensor, *changes: Tensor
) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `changes` are the tensors of `part.changes`. All sizes are known.
    """
    program, given = planned(part, query_offset)
    # (The scale may be traced, which `_attend` cannot read from outside.)
    return _attend(program, given, list(changes), query * part.scale, key, value)


@functools.partial(jax.jit, static_argnums=0)  # one program for all equal layers
def _attend(program: Program, given: list, changes: list, *operands: Tensor) -> Tensor:
    return _results(program, given, changes, *operands)[0]


# Mask inputs are operands: a custom gradient cannot read what is traced outside of it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _results(
    program: Program, given: list, changes: list, *operands: Tensor
) -> tuple[Tensor, Tensor]:
    """The context, and of each row the largest logit and the log of the sum, `(B, T, H, 2)`.

    The sum is that of the exponentials of logits less the largest. (One number for both would round
    the sum away beside large logits.)
    """
    return _forward(program, given, changes, *operands)


def _results_kept(program: Program, given: list, changes: list, *operands: Tensor) -> tuple:
    # (So that gradients of gradients know it, too.)
    results = _results(program, given, changes, *operands)
    return results, (given, changes, operands, results)


def _results_backward(program: Program, kept: tuple, upstream: tuple) -> tuple:
    given, changes, operands, results = kept  # (nothing but the backward pass reads the sums)
    return None, *_gradients(program, given, changes, *operands, upstream[0], *results)


_results.defvjp(_results_kept, _results_backward)


def _steps(program: Program, given: list, query: Tensor, key: Tensor) -> Steps | Runs:
    return Runs.of(program, query, key) or Steps.of(program, given, query, key)


def _over(step: QueryTile, of_block: Callable, state: tuple) -> tuple:
    """`state` after all blocks of keys of one tile."""
    if isinstance(step.count, int):  # one block, as known when the program is made
        return of_block(0, state)
    return lax.fori_loop(0, step.count, of_block, state)


def _forward(
    program: Program, given: list, tensors: list, *operands: Tensor
) -> tuple[Tensor, Tensor]:
    steps = _steps(program, given, *operands[:2])
    changes = ChangesOfBlocks.of(program.part, tensors, steps)
    queries, keys, values = steps.prepared(*nonfinite.marked(*operands))
    sharing, dtype = program.part.sharing, _dtype_of_sums(operands[0])

    def of_tile(step: QueryTile) -> tuple:
        rows = step.rows(queries)
        of_rows = rows.shape[:3]

        def of_block(number: Tensor, state: tuple) -> tuple:
            largest, total, context = state
            visit = step.block(number)
            logits = changes.of_logits(_of_pairs(rows, visit.cut(keys), sharing), visit)
            allowed = changes.allowed(visit)
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
        largest, total, context = _over(step, of_block, nothing)
        is_dead = total == 0
        context = jnp.where(is_dead, 0, context / jnp.where(is_dead, 1, total))
        log_sum = jnp.log(total)
        if changes.changes.sinks is not None:
            share, log_sum = changes.changes.share_of_keys(log_sum, largest)
            context = jnp.where(is_dead, 0, context * share)
        # (Those of a row of NaN stay NaN.)
        sums = jnp.where(is_dead, _DEAD, jnp.concatenate([largest, log_sum], axis=-1))
        return context.astype(operands[2].dtype), sums

    contexts, sums = lax.map(lambda i: of_tile(steps.step(i)), jnp.arange(steps.number))
    return steps.joined(contexts), steps.joined(sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    program: Program,
    given: list,
    tensors: list,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    context: Tensor,
    row_sums: Tensor,
) -> tuple:
    """Those of the tensors that change logits, and of the queries, keys and values."""
    steps, sharing = _steps(program, given, query, key), program.part.sharing
    changes = ChangesOfBlocks.of(program.part, tensors, steps)
    delta = jnp.sum(upstream * context, axis=-1, keepdims=True)
    sound = nonfinite.zeroed(query, key, value)
    queries, keys, values = steps.prepared(*sound)
    of_rows = [steps.rows_first(x) for x in (upstream, delta, row_sums)]
    is_added = steps.rows_first(jnp.ones_like(delta)) == 0  # rows that a bias could make infinite
    of_rows[2] = jnp.where(is_added, _DEAD, of_rows[2])
    dtype = _dtype_of_sums(query)

    def of_tile(sums: tuple, step_number: Tensor) -> tuple:
        step = steps.step(step_number)
        rows, d_context, of_delta, of_sum = map(step.rows, (queries, *of_rows))

        def of_block(number: Tensor, state: tuple) -> tuple:
            d_rows, d_keys, d_values, of_changes = state
            visit = step.block(number)
            block_keys, block_values = visit.cut(keys), visit.cut(values)
            logits, allowed = _of_pairs(rows, block_keys, sharing), changes.allowed(visit)
            logits_less_largest = changes.of_logits(logits, visit) - of_sum[..., :1]
            probabilities = jnp.exp(logits_less_largest - of_sum[..., 1:])
            if allowed is not None:
                probabilities = jnp.where(allowed, probabilities, 0)
            d_changed = probabilities * (_of_pairs(d_context, block_values, sharing) - of_delta)
            # A hidden value may let its gradient overflow, and a hidden key that of a soft cap.
            d_changed = jnp.where(probabilities == 0, 0, d_changed)
            d_logits, of_changes = changes.pulled(logits, d_changed, visit, of_changes)
            d_logits = jnp.where(probabilities == 0, 0, d_logits)
            return (
                d_rows + _weighted(d_logits, block_keys, sharing),
                visit.added(d_keys, _for_keys(d_logits, rows, sharing)),
                visit.added(d_values, _for_keys(probabilities, d_context, sharing)),
                of_changes,
            )

        state = jnp.zeros(rows.shape, dtype), *sums
        d_rows, *more = _over(step, of_block, state)
        return tuple(more), d_rows

    nothing = (*(jnp.zeros(x.shape, dtype) for x in (keys, values)), changes.nothing_yet())
    (d_keys, d_values, sums), d_rows = lax.scan(of_tile, nothing, jnp.arange(steps.number))
    made = steps.joined(d_rows), *map(steps.joined_keys, (d_keys, d_values))
    of_sinks, sinks = None, changes.changes.sinks
    if sinks is not None:
        of_sink = jnp.exp(sinks - row_sums[..., 0] - row_sums[..., 1])
        of_sinks = -jnp.sum(of_sink * delta[..., 0], axis=(0, 1))
    of_tensors = changes.gradients(sums, of_sinks, tensors)
    return of_tensors, *(x.astype(of.dtype) for x, of in zip(made, sound, strict=True))


def _gradients_kept(program: Program, given: list, tensors: list, *operands: Tensor) -> tuple:
    return _gradients(program, given, tensors, *operands), (given, tensors, operands)


def _gradients_backward(program: Program, kept: tuple, upstream: tuple) -> tuple:
    """Gradients of gradients, seldom needed: those of the definition."""
    given, tensors, (*operands, context, row_sums) = kept
    part, (query, key) = program.part, operands[:2]
    bound = bound_of(program, given, query.shape[1], key.shape[1])
    mask = allowed_tile(part.rule, bound, part.heads)

    def first(tensors: list, query: Tensor, key: Tensor, value: Tensor, d_context: Tensor) -> tuple:
        def definition(tensors: list, *operands: Tensor) -> Tensor:
            query, key, value = operands
            changes = as_bias(part, part.changes.with_tensors(tensors), bound, str(query.dtype))
            return dense.attention(query, key, value, mask, 1.0, changes)[0]

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


def _of_pairs(rows: Tensor, keys: Tensor, sharing: int) -> Tensor:
    """The products of rows and keys, or of what belongs to these: `(B, H, T, S)`."""
    return unfolded(_product("bhtd,bhsd->bhts", folded(rows, sharing), keys), sharing)


def _weighted(pairs: Tensor, values: Tensor, sharing: int) -> Tensor:
    """Sums of values (or keys), by numbers for each pair: `(B, H, T, size)`."""
    return unfolded(_product("bhts,bhsd->bhtd", folded(pairs, sharing), values), sharing)


def _for_keys(pairs: Tensor, rows: Tensor, sharing: int) -> Tensor:
    """Sums of rows, and over the heads that share a key: `(B, Hk, S, size)`."""
    return _product("bhts,bhtd->bhsd", folded(pairs, sharing), folded(rows, sharing))
