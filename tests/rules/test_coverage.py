"""Coverage of tiles: exact for leaves, never in contradiction to the dense mask for any rule."""

import numpy as np
import oracle
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from strategies import (
    MANY,
    id_sets,
    mask_inputs,
    positional_leaves,
)

import keras_headmask as hm
from keras_headmask.rules.base import leaves
from keras_headmask.rules.coverage import bounds, coverage, tile_grid
from keras_headmask.rules.protocol import Sides, Span


@st.composite
def grids(draw):
    """`(queries, keys, tile_queries, tile_keys, query_offset)`, often ragged."""
    return (
        draw(st.integers(1, 13)),
        draw(st.integers(1, 17)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        draw(st.integers(-4, 9)),
    )


def tiles_of(mask, tile_queries, tile_keys):
    """`(row, column, tile)` of every tile of a dense mask."""
    for row, i in enumerate(range(0, mask.shape[0], tile_queries)):
        for column, j in enumerate(range(0, mask.shape[1], tile_keys)):
            yield row, column, mask[i : i + tile_queries, j : j + tile_keys]


def truth(spec, grid):
    """The `Coverage` of each tile, counted in the dense mask."""
    queries, keys, tile_queries, tile_keys, offset = grid
    mask = oracle.mask(spec, 1, 1, queries, keys, query_offset=offset)[0, 0]
    counted = {
        (row, column): int(tile.any()) + int(tile.all())
        for row, column, tile in tiles_of(mask, tile_queries, tile_keys)
    }
    rows, columns = (-(-queries // tile_queries), -(-keys // tile_keys))
    return np.array([[counted[i, j] for j in range(columns)] for i in range(rows)])


@MANY
@given(positional_leaves, grids())
def test_leaves_are_exact(leaf, grid):
    np.testing.assert_array_equal(coverage(leaf, *grid), truth(leaf, grid))


@MANY
@given(positional_leaves, positional_leaves, grids())
def test_and_is_min_or_is_max_not_is_2_minus(a, b, grid):
    of_a, of_b = truth(a, grid), truth(b, grid)
    np.testing.assert_array_equal(coverage(~a, *grid), 2 - of_a)
    np.testing.assert_array_equal(coverage(a & b, *grid), np.minimum(of_a, of_b))
    np.testing.assert_array_equal(coverage(a | b, *grid), np.maximum(of_a, of_b))
    np.testing.assert_array_equal(coverage(~(a & b), *grid), 2 - np.minimum(of_a, of_b))


# ---------------------------------------------------------------- rules that read data


def spans_of(leaf, inputs, tile_queries, tile_keys):
    """The least and greatest value per row and column of tiles, in NumPy."""

    def span(values, tile, axis):
        if values is None:
            return None
        values = numpy(values).astype("int64")
        blocks = [values[:, i : i + tile] for i in range(0, values.shape[1], tile)]
        low, high = (
            np.stack([getattr(block, name)(axis=1) for block in blocks], 1)
            for name in ("min", "max")
        )
        return Span(np.expand_dims(low, axis), np.expand_dims(high, axis))

    sides = {
        name: Sides(*(ops.convert_to_tensor(side) for side in inputs[name])) for name in leaf.inputs
    }
    return {
        name: Sides(span(query, tile_queries, 2), span(key, tile_keys, 1))
        for name, (query, key) in leaf.prepare(sides).items()
    }


reading = st.one_of(
    st.just(hm.SameSegment("ids")),
    st.builds(hm.SameSentence, id_sets, st.just("ids")),
    st.builds(hm.KeyFlag, st.sampled_from(["flags", "ids"])),
    st.builds(hm.QueryFlag, st.sampled_from(["flags", "ids"])),
    st.builds(hm.KeyIn, st.just("ids"), id_sets),
    st.builds(hm.QueryIn, st.just("ids"), id_sets),
)


def bounds_and_truth(spec, inputs, batch, grid):
    """For each example `(possible, certain, mask)`."""
    queries, keys, tile_queries, tile_keys, offset = grid
    spans = {
        leaf: spans_of(leaf, inputs, tile_queries, tile_keys)
        for leaf in leaves(spec)
        if leaf.inputs and all(kind.rank == 2 for kind in leaf.inputs.values())
    }
    both = bounds(spec, tile_grid(*grid), spans)
    shape = (batch, -(-queries // tile_queries), -(-keys // tile_keys))
    possible, certain = (np.broadcast_to(x, shape) for x in both)
    mask = oracle.mask(spec, batch, 1, queries, keys, inputs, offset)[:, 0]
    return zip(possible, certain, mask, strict=True)


@MANY
@given(st.data(), reading, grids())
def test_spans_of_flags_are_exact_and_of_sorted_ids_too(data, leaf, grid):
    """Sorted ids make an interval of each span, so that overlap is a meeting up to gaps in it."""
    queries, keys, tile_queries, tile_keys, _ = grid
    inputs = data.draw(mask_inputs(leaf, 2, queries, keys))
    is_ids = isinstance(leaf, hm.SameSegment | hm.SameSentence)
    for possible, certain, mask in bounds_and_truth(leaf, inputs, 2, grid):
        for row, column, tile in tiles_of(mask, tile_queries, tile_keys):
            assert certain[row, column] == tile.all()
            if not is_ids:
                assert possible[row, column] == tile.any()
