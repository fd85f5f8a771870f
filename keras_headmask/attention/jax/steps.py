"""Which blocks of keys each tile of queries meets in JAX' loops, and what is allowed there."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_headmask.attention.blocks import NUMPY, across, bounds_of
from keras_headmask.attention.head_groups import Part
from keras_headmask.masks import Mask, Tensor
from keras_headmask.rules.base import leaves
from keras_headmask.rules.evaluation import allowed_tile
from keras_headmask.rules.protocol import Bound, Cuts, Sides, put_together, taken_apart


class Program(NamedTuple):
    """What is known when a program is made; `names` are those of the leaves and their inputs."""

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

    cut: Callable[[Tensor], Tensor]  # of `(B, Hk, S, size)`, the step's examples of this block
    added: Callable[[Tensor, Tensor], Tensor]  # a tensor like that, and what is added to the block
    allowed: Mask | None
    cuts: Cuts
    corner: tuple[Tensor, ...]  # the first example, query and key of it


class QueryTile(NamedTuple):
    """One tile of queries, of one example or of all: how many blocks of keys it looks at."""

    rows: Callable[[Tensor], Tensor]
    count: Any  # a tensor, or an int that is known when the program is made
    block: Callable[[Tensor], KeyBlock]


class Steps(NamedTuple):
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
    def of(cls, program: Program, given: list, query: Tensor, key: Tensor) -> "Steps":
        part, (queries, keys) = program.part, (query.shape[1], key.shape[1])
        tile, size = min(part.tile, queries), min(part.tuning.jax_block, keys)
        bound = bound_of(program, given, queries, keys)
        lengths, sizes = (queries, keys), (tile, size)
        offset = program.query_offset
        possible, _ = bounds_of(part.rule, bound.leaf_inputs, lengths, sizes, offset, ARRAYS)
        # (By NumPy where positions alone decide.)
        own: Any = np if isinstance(possible, np.ndarray) else jnp
        order = own.argsort(~possible, axis=-1, stable=True).astype("int32")
        counts = possible.sum(-1).astype("int32")
        rest = -queries % tile, -keys % size
        longer = lengthened(bound, *rest)
        return cls(part, longer, queries, keys, tile, size, jnp.asarray(counts), jnp.asarray(order))

    @property
    def number(self) -> int:
        return self.counts.shape[0] * self.counts.shape[1]

    def lengthened(self, bias: Tensor) -> Tensor:
        """`(.., .., T or 1, S or 1)`, in whole tiles and blocks."""
        rest = -self.queries % self.tile, -self.keys % self.size
        return _longer(_longer(bias, 2, rest[0]), 3, rest[1])

    def rows_first(self, rows: Tensor) -> Tensor:
        """`(B, T, H, size)` as `(B, H, tiles * tile, size)`, 0 in the rows that are added."""
        return filled(heads_first(rows), self.tile)

    def prepared(self, query: Tensor, *of_keys: Tensor) -> list[Tensor]:
        """All heads first, in whole tiles and blocks."""
        return [self.rows_first(query), *(filled(heads_first(x), self.size) for x in of_keys)]

    def joined(self, results: Tensor) -> Tensor:
        """The results of all steps, `(steps, b, H, tile, size)`, as `(B, T, H, size)`."""
        examples, tiles = self.counts.shape
        results = results.reshape(examples, tiles, *results.shape[1:])
        results = results.transpose(0, 2, 1, 4, 3, 5)  # (E, b, tiles, tile, H, size)
        return results.reshape(-1, tiles * self.tile, *results.shape[4:])[:, : self.queries]

    def joined_keys(self, rows: Tensor) -> Tensor:
        """`(B, heads, blocks * size, D)` as `(B, S, heads, D)`."""
        return heads_first(rows)[:, : self.keys]

    def step(self, number: Tensor) -> QueryTile:
        examples, tiles = self.counts.shape
        example, place = number // tiles, number % tiles

        def of_batch(tensor: Tensor, axis: int = 0) -> Tensor:
            if examples == 1 or tensor.shape[axis] == 1:
                return tensor
            return lax.dynamic_slice_in_dim(tensor, example, 1, axis)

        def rows(tensor: Tensor, axis: int = 2) -> Tensor:
            return lax.dynamic_slice_in_dim(tensor, place * self.tile, self.tile, axis)

        def block(number: Tensor) -> KeyBlock:
            start = self.order[example, place, number] * self.size

            def cut(tensor: Tensor, axis: int = 2) -> Tensor:
                return lax.dynamic_slice_in_dim(tensor, start, self.size, axis)

            def added(tensor: Tensor, more: Tensor) -> Tensor:
                at = places((example if examples > 1 else 0, 0, start, 0))
                there = lax.dynamic_slice(tensor, at, more.shape)
                return lax.dynamic_update_slice(tensor, there + more, at)

            allowed, cuts = None, Cuts(rows, cut, of_batch)
            if not self.part.rule.constant:
                allowed = allowed_tile(self.part.rule, self.bound, self.part.heads, cuts)
            if self.keys % self.size:
                inside = start + jnp.arange(self.size) < self.keys
                allowed = inside if allowed is None else allowed & inside
            corner = (example if examples > 1 else 0, place * self.tile, start)
            return KeyBlock(lambda tensor: cut(of_batch(tensor)), added, allowed, cuts, corner)

        return QueryTile(lambda tensor: rows(of_batch(tensor)), self.counts[example, place], block)


def bound_of(program: Program, given: list, queries: int, keys: int) -> Bound:
    query_positions = jnp.arange(queries, dtype="int32") + program.query_offset
    key_positions = jnp.arange(keys, dtype="int32")
    return Bound(query_positions, key_positions, put_together(program.names, given))


def lengthened(bound: Bound, queries: int, keys: int) -> Bound:
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


def filled(rows: Tensor, size: int) -> Tensor:
    """`(B, H, L, D)` with zeros up to a multiple of `size` positions."""
    return jnp.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % size), (0, 0)])


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


def heads_first(tensor: Tensor) -> Tensor:
    """`(B, L, H, size)` to `(B, H, L, size)`, and back."""
    return jnp.transpose(tensor, (0, 2, 1, 3))
