"""Which blocks of keys each tile of queries meets in JAX' loop, and what is allowed there."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.logits import Changes
from keras_headmask.attention.planner import NUMPY, across, bounds_of
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import leaves
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import Bound, Cuts, Sides, put_together, taken_apart

_LEAST_SEEN = 0.75  # of the blocks in runs of one length, those that a tile may see


class Program(NamedTuple):
    """The static part of a JAX program; `names` lists the leaves and their inputs."""

    part: Part
    names: tuple
    query_offset: int


def planned(part: Part, query_offset: int) -> tuple[Program, list]:
    """With the mask inputs, in the order of the program's names."""
    bound, read = part.bound, leaves(part.rule)
    inputs = {leaf: values for leaf, values in bound.leaf_inputs.items() if leaf in read}
    names, values = taken_apart(inputs)
    nothing: Any = None
    program = Program(part._replace(bound=nothing, scale=1.0), names, query_offset)
    return program, values


class KeyBlock(NamedTuple):
    """One block of keys. `allowed`: `(b, h, tile, block)`; `None`: all pairs."""

    cut: Callable[[Tensor], Tensor]  # of prepared keys, the step's part of this block
    added: Callable[[Tensor, Tensor], Tensor]  # a tensor like that, and what is added to the block
    allowed: Mask | None
    cuts: Cuts
    corner: tuple[Tensor, ...]  # the first example, query and key of it


class QueryTile(NamedTuple):
    """One tile of queries, and how many blocks of keys it looks at."""

    rows: Callable[[Tensor], Tensor]
    count: Any  # a tensor, or an int that is known when the program is made
    block: Callable[[Tensor], KeyBlock]


class Steps(NamedTuple):
    """All tiles of queries, and the blocks of keys that each looks at.

    Either blocks are small: each example has steps of its own where what is skipped differs between
    them. Or each tile has one long block, the run of keys that it may see: then examples and heads
    are one axis, of which a step has a part, so that what it holds stays in the processor's cache.
    `starts` `(E, tiles, blocks)`: of each example or part, or of all (E = 1), the first key of each
    block. A tile looks at the first `counts` `(E, tiles)` of them; `None`: at its only one.
    """

    part: Part
    bound: Bound
    batch: int
    queries: int
    keys: int
    tile: int
    size: int  # of a block
    more: int  # keys that fill the last block up
    parts: int  # examples, or parts of examples and heads: the first axis of operands
    counts: Tensor | None
    starts: Tensor

    @classmethod
    def of(cls, program: Program, inputs: list, query: Tensor, key: Tensor) -> "Steps":
        part, (batch, queries, heads, _), keys = program.part, query.shape, key.shape[1]
        tile, size = min(part.tile, queries), min(part.tuning.wide_block, keys)
        bound = bound_of(program, inputs, queries, keys)
        of_grid = (queries, keys), (tile, size), program.query_offset, ARRAYS
        possible, _ = bounds_of(part.rule, bound.leaf_inputs, *of_grid)
        run = _one_run(part, bound, possible, tile, size, batch * heads // part.sharing)
        if run is not None:
            (size, starts), counts, more = run, None, 0
        else:  # (by NumPy where positions alone decide)
            arrays: Any = np if isinstance(possible, np.ndarray) else jnp
            order = arrays.argsort(~possible, axis=-1, stable=True).astype("int32")
            counts, starts = jnp.asarray(possible.sum(-1), "int32"), jnp.asarray(order * size)
            more = -keys % size
        parts = batch if run is None else len(starts)
        bound = _lengthened(bound, -queries % tile, more)
        return cls(part, bound, batch, queries, keys, tile, size, more, parts, counts, starts)

    @property
    def number(self) -> int:
        return self.starts.shape[0] * self.starts.shape[1]

    def changes(self, tensors: list) -> Changes:
        """Those of the part with their tensors, the bias in whole tiles and blocks."""
        changes = self.part.changes.with_tensors(tensors)
        longer = _longer(_longer(changes.bias, 2, -self.queries % self.tile), 3, self.more)
        return changes._replace(bias=longer)

    def rows_first(self, rows: Tensor) -> Tensor:
        """`(B, T, H, size)` as `(parts, B * H / parts, tiles * tile, size)`, new rows 0."""
        return self._in_parts(rows, -self.queries % self.tile)

    def prepared(self, query: Tensor, *of_keys: Tensor) -> list[Tensor]:
        """All heads first, in whole tiles and blocks."""
        return [self.rows_first(query), *(self._in_parts(x, self.more) for x in of_keys)]

    def _in_parts(self, rows: Tensor, more: int) -> Tensor:
        rows = jnp.pad(_heads_first(rows), [(0, 0), (0, 0), (0, more), (0, 0)])
        return rows.reshape(self.parts, -1, *rows.shape[2:])

    def joined(self, results: Tensor) -> Tensor:
        """The results of all steps, `(steps, b, heads, tile, size)`, as `(B, T, H, size)`."""
        results = results.reshape(*self.starts.shape[:2], *results.shape[1:])
        results = results.transpose(0, 2, 3, 1, 4, 5)  # (E, b, heads, tiles, tile, size)
        rows = results.reshape(self.batch, -1, results.shape[3] * self.tile, results.shape[5])
        return _heads_first(rows)[:, : self.queries]

    def joined_keys(self, rows: Tensor) -> Tensor:
        """`(parts, B * heads / parts, blocks * size, D)` as `(B, S, heads, D)`."""
        rows = rows.reshape(self.batch, -1, *rows.shape[2:])
        return _heads_first(rows)[:, : self.keys]

    def step(self, number: Tensor) -> QueryTile:
        parts, tiles, _ = self.starts.shape
        part, place = number // tiles if parts > 1 else 0, number % tiles

        def in_part(tensor: Tensor, axis: int = 0) -> Tensor:
            if parts == 1 or tensor.shape[axis] == 1:
                return tensor
            return lax.dynamic_slice_in_dim(tensor, part, 1, axis)

        def rows(tensor: Tensor, axis: int = 2) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, place * self.tile, self.tile, axis)

        def block(number: Any) -> KeyBlock:
            start = self.starts[part, place, number]

            def cut(tensor: Tensor, axis: int = 2) -> Tensor:
                return lax.dynamic_slice_in_dim(tensor, start, self.size, axis)

            def added(tensor: Tensor, more: Tensor) -> Tensor:
                at = places((part, 0, start, 0))
                there = lax.dynamic_slice(tensor, at, more.shape)
                return lax.dynamic_update_slice(tensor, there + more, at)

            allowed, cuts = None, Cuts(rows, cut, in_part)
            if not self.part.rule.constant:
                allowed = allowed_tile(self.part.rule, self.bound, self.part.heads, cuts)
            if self.more:
                inside = start + jnp.arange(self.size) < self.keys
                allowed = inside if allowed is None else allowed & inside
            corner = part, place * self.tile, start
            return KeyBlock(lambda tensor: cut(in_part(tensor)), added, allowed, cuts, corner)

        count = 1 if self.counts is None else self.counts[part, place]
        return QueryTile(lambda tensor: rows(in_part(tensor)), count, block)


def _one_run(
    part: Part, bound: Bound, possible: Mask, tile: int, block: int, key_heads: int
) -> tuple[int, Tensor] | None:
    """One long block for each tile, under a rule on positions; as many heads as fit in a cache.

    Its size, and where it starts, `(parts, tiles, 1)`; `key_heads` counts those of all examples.
    `None` if blocks of one length would hold much that is hidden, or too much at once.
    """
    if part.rule.inputs or part.changes.are_some or len(part.groups()) > 1:
        return None
    if not isinstance(possible, np.ndarray):  # by a user's `coverage`, of JAX' arrays
        return None
    (rows,) = possible
    first, last = rows.argmax(1), rows.shape[1] - 1 - rows[:, ::-1].argmax(1)
    longest = int(np.where(rows.any(1), last - first + 1, 0).max())
    if rows.sum() <= _LEAST_SEEN * longest * len(rows):
        return None
    keys = bound.key_positions.shape[0]
    size = min(longest * block, keys)
    most = part.tuning.most_logits_of_a_step // 2 // (part.sharing * tile * size)
    if most == 0 or not _is_one_mask(part, bound):
        return None
    together = max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n <= most)
    starts = np.minimum(first * block, keys - size).astype("int32")
    shape = key_heads // together, len(starts), 1
    return size, jnp.asarray(np.broadcast_to(starts[:, None], shape))


def _is_one_mask(part: Part, bound: Bound) -> bool:
    """Whether the mask is one for all heads and examples; that of a user's leaf need not be."""
    if part.rule.constant:
        return True
    return jax.eval_shape(lambda: allowed_tile(part.rule, bound, part.heads)).shape[:2] == (1, 1)


def bound_of(program: Program, inputs: list, queries: int, keys: int) -> Bound:
    query_positions = jnp.arange(queries, dtype="int32") + program.query_offset
    key_positions = jnp.arange(keys, dtype="int32")
    return Bound(query_positions, key_positions, put_together(program.names, inputs))


def _lengthened(bound: Bound, queries: int, keys: int) -> Bound:
    """`bound` of so many queries and keys more, so that no tile and no block is cut short."""

    def longer(value: Tensor | Sides) -> Tensor | Sides:
        if isinstance(value, Sides):
            return Sides(_longer(value.query, 1, queries), _longer(value.key, 1, keys))
        return _longer(_longer(value, 2, queries), 3, keys)

    return bound.changed(longer)._replace(
        query_positions=_longer(bound.query_positions, 0, queries),
        key_positions=_longer(bound.key_positions, 0, keys),
    )


def _longer(tensor: Tensor | None, axis: int, more: int) -> Tensor | None:
    """With the last entry along `axis` repeated; a size of 1 serves all as it is."""
    if tensor is None or not more or tensor.shape[axis] == 1:
        return tensor
    return jnp.pad(tensor, [(0, more if i == axis else 0) for i in range(tensor.ndim)], "edge")


def _extremes(values: Tensor, size: int, axis: int) -> tuple[Tensor, Tensor]:
    if values.shape[1] == 1:
        return across(values, axis), across(values, axis)
    longer: Any = _longer(values, 1, -values.shape[1] % size)
    blocks = longer.reshape(values.shape[0], -1, size)
    return across(blocks.min(2), axis), across(blocks.max(2), axis)


ARRAYS = NUMPY._replace(
    extremes=_extremes,
    as_numbers=lambda mask: mask.astype("int32"),
)


def places(numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    """Where a slice of several axes starts: of one dtype, as JAX asks for."""
    return tuple(jnp.asarray(number, "int32") for number in numbers)


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, size)` to `(B, H, L, size)`, and back."""
    return jnp.transpose(tensor, (0, 2, 1, 3))
