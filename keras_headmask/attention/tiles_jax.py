"""Tiles on JAX, compiled: a loop over tiles of queries, in each a loop over the keys it may see.

The sizes of a compiled program are fixed, but not how often its loops run: what is skipped may
depend on data. Each tile meets its blocks of keys one by one, so that no logits but those of one
block exist (online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022). The
backward pass computes them again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_headmask.attention import dense, finite
from keras_headmask.attention.parts import Part, folded, unfolded
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules import coverage
from keras_headmask.rules.base import leaves
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import Bound, Cuts, Sides, Span

_DEAD = 1e30  # the log-sum of a row that sees nothing: exp(logit - _DEAD) is 0


class _Plan(NamedTuple):
    """What is known when a program is made; `names` are those of the leaves and their inputs."""

    part: Part
    names: tuple
    query_offset: int


def attend(part: Part, query_offset: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. All sizes are known.
    """
    plan, given = _planned(part, query_offset)
    # (The scale may be traced, which `_attend` cannot read from outside.)
    return _attend(plan, given, query * part.scale, key, value)


def _planned(part: Part, query_offset: int) -> tuple[_Plan, list]:
    """With the mask inputs, in the order of the plan's names."""
    bound, read = part.bound, leaves(part.rule)
    inputs = {leaf: values for leaf, values in bound.leaf_inputs.items() if leaf in read}
    names = tuple((leaf, tuple(values)) for leaf, values in inputs.items())
    nothing: Any = None
    plan = _Plan(part._replace(bound=nothing, scale=1.0), names, query_offset)
    return plan, [list(values.values()) for values in inputs.values()]


@functools.partial(jax.jit, static_argnums=0)  # one program for all equal layers
def _attend(plan: _Plan, given: list, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _results(plan, given, query, key, value)[0]


# Mask inputs are operands: a custom gradient cannot read what is traced outside of it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _results(plan: _Plan, given: list, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """The context, and the log of each row's sum of exponentials, `(B, T, H)`."""
    return _forward(plan, given, *operands)


def _results_kept(plan: _Plan, given: list, *operands: Tensor) -> tuple:
    results = _results(plan, given, *operands)  # so that gradients of gradients know it, too
    return results, (given, operands, results)


def _results_backward(plan: _Plan, kept: tuple, upstream: tuple) -> tuple:
    given, operands, results = kept  # (nothing but the backward pass reads the sums)
    return None, *_gradients(plan, given, *operands, upstream[0], *results)


_results.defvjp(_results_kept, _results_backward)


def _forward(plan: _Plan, given: list, *operands: Tensor) -> tuple[Tensor, Tensor]:
    steps = _Steps.of(plan, given, *operands[:2])
    queries, keys, values = steps.prepared(*finite.marked(*operands))
    sharing, dtype = plan.part.sharing, _dtype_of_sums(operands[0])
    of_rows = (*queries.shape[1:2], steps.tile)

    def of_tile(step: _Step) -> tuple:
        rows = step.rows(queries)
        examples = rows.shape[0]

        def of_block(number: Tensor, state: tuple) -> tuple:
            largest, total, context = state
            visit = step.block(number)
            logits = _of_pairs(rows, visit.cut(keys), sharing)
            if visit.allowed is not None:
                logits = jnp.where(visit.allowed, logits, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(logits, axis=-1, keepdims=True))
            base = jnp.where(jnp.isneginf(new), 0, new)  # of a row that has seen nothing yet
            shares, before = jnp.exp(logits - base), jnp.exp(largest - base)
            total = total * before + jnp.sum(shares, axis=-1, keepdims=True)
            return new, total, context * before + _weighted(shares, visit.cut(values), sharing)

        nothing = (
            jnp.full((examples, *of_rows, 1), -jnp.inf, dtype),
            jnp.zeros((examples, *of_rows, 1), dtype),
            jnp.zeros((examples, *of_rows, values.shape[3]), dtype),
        )
        largest, total, context = lax.fori_loop(0, step.count, of_block, nothing)
        is_dead = total == 0
        log_sum = jnp.where(jnp.isfinite(largest), largest + jnp.log(total), _DEAD)
        context = jnp.where(is_dead, 0, context / jnp.where(is_dead, 1, total))
        return context.astype(operands[2].dtype), log_sum

    contexts, sums = lax.map(lambda i: of_tile(steps.step(i)), jnp.arange(steps.number))
    return steps.joined(contexts), steps.joined(sums)[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    plan: _Plan,
    given: list,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    context: Tensor,
    log_sum: Tensor,
) -> tuple:
    """Those of the queries, keys and values."""
    steps, sharing = _Steps.of(plan, given, query, key), plan.part.sharing
    delta = jnp.sum(upstream * context, axis=-1, keepdims=True)
    sound = finite.zeroed(query, key, value)
    queries, keys, values = steps.prepared(*sound)
    of_rows = [steps.rows_first(x) for x in (upstream, delta, log_sum[..., None])]
    dtype = _dtype_of_sums(query)

    def of_tile(sums: tuple, step_number: Tensor) -> tuple:
        step = steps.step(step_number)
        rows, d_context, of_delta, of_sum = map(step.rows, (queries, *of_rows))

        def of_block(number: Tensor, state: tuple) -> tuple:
            d_rows, d_keys, d_values = state
            visit = step.block(number)
            block_keys, block_values = visit.cut(keys), visit.cut(values)
            probabilities = jnp.exp(_of_pairs(rows, block_keys, sharing) - of_sum)
            if visit.allowed is not None:
                probabilities = jnp.where(visit.allowed, probabilities, 0)
            d_logits = probabilities * (_of_pairs(d_context, block_values, sharing) - of_delta)
            # A hidden value may let its gradient overflow.
            d_logits = jnp.where(probabilities == 0, 0, d_logits)
            return (
                d_rows + _weighted(d_logits, block_keys, sharing),
                visit.added(d_keys, _for_keys(d_logits, rows, sharing)),
                visit.added(d_values, _for_keys(probabilities, d_context, sharing)),
            )

        state = jnp.zeros(rows.shape, dtype), *sums
        d_rows, *sums = lax.fori_loop(0, step.count, of_block, state)
        return tuple(sums), d_rows

    nothing = tuple(jnp.zeros(x.shape, dtype) for x in (keys, values))
    (d_keys, d_values), d_rows = lax.scan(of_tile, nothing, jnp.arange(steps.number))
    of_keys = (_heads_first(x)[:, : key.shape[1]] for x in (d_keys, d_values))
    made = steps.joined(d_rows), *of_keys
    return tuple(x.astype(of.dtype) for x, of in zip(made, sound, strict=True))


def _gradients_kept(plan: _Plan, given: list, *operands: Tensor) -> tuple:
    return _gradients(plan, given, *operands), (given, operands)


def _gradients_backward(plan: _Plan, kept: tuple, upstream: tuple) -> tuple:
    """Gradients of gradients, seldom needed: those of the definition."""
    given, (*operands, context, log_sum) = kept
    part, (query, key) = plan.part, operands[:2]
    bound = _bound(plan, given, query.shape[1], key.shape[1])
    mask = allowed_tile(part.rule, bound, part.heads)

    def first(query: Tensor, key: Tensor, value: Tensor, d_context: Tensor) -> tuple:
        def definition(*operands: Tensor) -> Tensor:
            query, key, value = operands
            return dense.attend(query, key, value, mask, 1.0)[0]

        return jax.vjp(definition, query, key, value)[1](d_context)

    # The context and the sums are made of the operands, whose gradients hold theirs.
    return None, *jax.vjp(first, *operands)[1](upstream), *map(jnp.zeros_like, (context, log_sum))


_gradients.defvjp(_gradients_kept, _gradients_backward)


# --- Which keys ----------------------------------------------------------------------------------


class _Visit(NamedTuple):
    """One block of keys. `allowed`: `(b, h, tile, block)`; `None`: all pairs."""

    cut: Callable[[Tensor], Tensor]  # of `(B, Hk, S, size)`, the step's examples of this block
    added: Callable[[Tensor, Tensor], Tensor]  # a tensor like that, and what is added to the block
    allowed: Mask | None


class _Step(NamedTuple):
    """One tile of queries, of one example or of all: how many blocks of keys it looks at."""

    rows: Callable[[Tensor], Tensor]
    count: Tensor
    block: Callable[[Tensor], _Visit]


class _Steps(NamedTuple):
    """All of them: each example by itself where what is skipped differs between them.

    `counts` `(E, tiles)`: how many blocks each tile looks at, the first so many of `order`
    `(E, tiles, blocks)`. E is 1 or the number of examples.
    """

    part: Part
    bound: Bound
    queries: int
    keys: int
    tile: int
    size: int  # of a block
    counts: Tensor
    order: Tensor

    @classmethod
    def of(cls, plan: _Plan, given: list, query: Tensor, key: Tensor) -> "_Steps":
        part, (queries, keys) = plan.part, (query.shape[1], key.shape[1])
        tile, size = min(part.tile, queries), min(part.tuning.jax_block, keys)
        bound = _bound(plan, given, queries, keys)
        grid = coverage.tile_grid(queries, keys, tile, size, plan.query_offset)
        spans = {
            leaf: {
                name: Sides(_span(sides.query, tile, 2), _span(sides.key, size, 1))
                for name, sides in inputs.items()
            }
            for leaf, inputs in bound.leaf_inputs.items()
            if all(isinstance(value, Sides) for value in inputs.values())
        }
        possible, _ = coverage.bounds(part.rule, grid, spans)
        # (By NumPy where positions alone decide.)
        own: Any = np if isinstance(possible, np.ndarray) else jnp
        examples = possible.shape[0] if possible.ndim == 3 else 1
        shape = examples, len(grid.query_first), grid.key_first.shape[1]
        possible = own.broadcast_to(possible, shape)
        order = own.argsort(~possible, axis=-1, stable=True).astype("int32")
        counts = possible.sum(-1).astype("int32")
        rest = -queries % tile, -keys % size
        longer = _lengthened(bound, *rest)
        return cls(part, longer, queries, keys, tile, size, jnp.asarray(counts), jnp.asarray(order))

    @property
    def number(self) -> int:
        return self.counts.shape[0] * self.counts.shape[1]

    def rows_first(self, rows: Tensor) -> Tensor:
        """`(B, T, H, size)` as `(B, H, tiles * tile, size)`, 0 in the rows that are added."""
        return _filled(_heads_first(rows), self.tile)

    def prepared(self, query: Tensor, *of_keys: Tensor) -> list[Tensor]:
        """All heads first, in whole tiles and blocks."""
        return [self.rows_first(query), *(_filled(_heads_first(x), self.size) for x in of_keys)]

    def joined(self, results: Tensor) -> Tensor:
        """The results of all steps, `(steps, b, H, tile, size)`, as `(B, T, H, size)`."""
        examples, tiles = self.counts.shape
        results = results.reshape(examples, tiles, *results.shape[1:])
        results = results.transpose(0, 2, 1, 4, 3, 5)  # (E, b, tiles, tile, H, size)
        return results.reshape(-1, tiles * self.tile, *results.shape[4:])[:, : self.queries]

    def step(self, number: Tensor) -> _Step:
        examples, tiles = self.counts.shape
        example, place = number // tiles, number % tiles

        def of_batch(tensor: Tensor, axis: int = 0) -> Tensor:
            if examples == 1 or tensor.shape[axis] == 1:
                return tensor
            return lax.dynamic_slice_in_dim(tensor, example, 1, axis)

        def rows(tensor: Tensor, axis: int = 2) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, place * self.tile, self.tile, axis)

        def block(number: Tensor) -> _Visit:
            start = self.order[example, place, number] * self.size

            def cut(tensor: Tensor, axis: int = 2) -> Tensor:
                return lax.dynamic_slice_in_dim(tensor, start, self.size, axis)

            def added(tensor: Tensor, more: Tensor) -> Tensor:
                at = (example if examples > 1 else 0, 0, start, 0)
                there = lax.dynamic_slice(tensor, at, more.shape)
                return lax.dynamic_update_slice(tensor, there + more, at)

            allowed = None
            if not self.part.rule.constant:
                cuts = Cuts(rows, cut, of_batch)
                allowed = allowed_tile(self.part.rule, self.bound, self.part.heads, cuts)
            if self.keys % self.size:
                inside = start + jnp.arange(self.size) < self.keys
                allowed = inside if allowed is None else allowed & inside
            return _Visit(lambda tensor: cut(of_batch(tensor)), added, allowed)

        return _Step(lambda tensor: rows(of_batch(tensor)), self.counts[example, place], block)


def _bound(plan: _Plan, given: list, queries: int, keys: int) -> Bound:
    inputs = {
        leaf: dict(zip(of_leaf, values, strict=True))
        for (leaf, of_leaf), values in zip(plan.names, given, strict=True)
    }
    query_positions = jnp.arange(queries, dtype="int32") + plan.query_offset
    return Bound(query_positions, jnp.arange(keys, dtype="int32"), inputs)


def _lengthened(bound: Bound, queries: int, keys: int) -> Bound:
    """`bound` of so many queries and keys more, so that no tile and no block is cut short."""

    def longer(value: Tensor | Sides) -> Tensor | Sides:
        if isinstance(value, Sides):
            return Sides(_longer(value.query, 1, queries), _longer(value.key, 1, keys))
        return _longer(_longer(value, 2, queries), 3, keys)

    return Bound(
        _longer(bound.query_positions, 0, queries),
        _longer(bound.key_positions, 0, keys),
        {
            leaf: {name: longer(value) for name, value in values.items()}
            for leaf, values in bound.leaf_inputs.items()
        },
    )


def _longer(tensor: Tensor | None, axis: int, more: int) -> Tensor | None:
    """With the last entry along `axis` repeated; a size of 1 serves all as it is."""
    if tensor is None or not more or tensor.shape[axis] == 1:
        return tensor
    return jnp.pad(tensor, [(0, more if i == axis else 0) for i in range(tensor.ndim)], "edge")


def _filled(rows: Tensor, size: int) -> Tensor:
    """`(B, H, L, D)` with zeros up to a multiple of `size` positions."""
    return jnp.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % size), (0, 0)])


def _span(values: Tensor | None, size: int, axis: int) -> Span | None:
    """Of `(B, L)` the least and greatest of every `size` values, `(B, n, 1)` or `(B, 1, n)`."""
    if values is None:
        return None
    values = values.astype("int32") if values.dtype == bool else values
    if values.shape[1] == 1:
        return Span(values[..., None], values[..., None])
    longer: Any = _longer(values, 1, -values.shape[1] % size)
    blocks = longer.reshape(values.shape[0], -1, size)
    return Span(*(jnp.expand_dims(x, axis) for x in (blocks.min(2), blocks.max(2))))


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


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, size)` to `(B, H, L, size)`, and back."""
    return jnp.transpose(tensor, (0, 2, 1, 3))
