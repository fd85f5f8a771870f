"""Coverage of tiles: exact for leaves, so that what the laws find right is skipped, too."""

import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import MANY, mask_inputs, positional_leaves, reading_leaves

import keras_headmask as hm
from keras_headmask.attention import planner
from keras_headmask.rules import evaluation
from keras_headmask.rules.algebra import is_local
from keras_headmask.rules.protocol import Sides


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


def truth(mask, grid):
    """The `Coverage` of each tile, counted in the dense mask `(queries, keys)`."""
    queries, keys, rows, columns, _ = grid
    tiles = [
        [mask[i : i + rows, j : j + columns] for j in range(0, keys, columns)]
        for i in range(0, queries, rows)
    ]
    return np.array([[int(tile.any()) + int(tile.all()) for tile in row] for row in tiles])


def coverage(rule, queries, keys, rows, columns, offset):
    given = {}, (queries, keys), (rows, columns), offset, planner.NUMPY
    shape = 1, -(-queries // rows), -(-keys // columns)
    return sum(np.broadcast_to(x, shape)[0].astype(int) for x in planner.bounds_of(rule, *given))


def of_positions(spec, grid):
    queries, keys, *_, offset = grid
    return truth(oracle.mask(spec, 1, 1, queries, keys, query_offset=offset)[0, 0], grid)


@MANY
@given(positional_leaves, positional_leaves, grids())
@example(hm.Window(before=1), hm.Window(after=1), (3, 3, 3, 1, 0))  # one pair beyond each edge
def test_leaves_are_exact_and_is_min_or_is_max_not_is_2_minus(a, b, grid):
    of_a, of_b = of_positions(a, grid), of_positions(b, grid)
    np.testing.assert_array_equal(coverage(a, *grid), of_a)
    np.testing.assert_array_equal(coverage(~a, *grid), 2 - of_a)
    np.testing.assert_array_equal(coverage(a & b, *grid), np.minimum(of_a, of_b))
    np.testing.assert_array_equal(coverage(a | b, *grid), np.maximum(of_a, of_b))
    np.testing.assert_array_equal(coverage(~(a & b), *grid), 2 - np.minimum(of_a, of_b))


@MANY
@given(st.data(), reading_leaves.filter(lambda leaf: leaf.kind != "mask_input"), grids())
def test_spans_of_flags_are_exact_and_what_is_certain_of_ids_too(data, leaf, grid):
    """Ids between the least and the greatest of a tile may be none of its own."""
    queries, keys, *tile, _ = grid
    inputs = data.draw(mask_inputs(leaf, 2, queries, keys))
    bound = evaluation.bind(leaf, inputs, queries, keys)
    arrays = {
        name: Sides(*(None if x is None else numpy(x) for x in sides))
        for name, sides in bound.leaf_inputs[leaf].items()
    }
    given = {leaf: arrays}, (queries, keys), tuple(tile), 0, planner.NUMPY
    masks = oracle.mask(leaf, 2, 1, queries, keys, inputs)[:, 0]
    exact = np.stack([truth(mask, grid) for mask in masks])
    possible, certain = (np.broadcast_to(x, exact.shape) for x in planner.bounds_of(leaf, *given))
    np.testing.assert_array_equal(certain, exact == 2)
    if isinstance(leaf, hm.SameSegment | hm.SameSentence):
        assert possible[exact > 0].all()
    else:
        np.testing.assert_array_equal(possible, exact > 0)


READS = (
    (hm.SameSegment("ids"), (("ids", False),)),
    (hm.KeyFlag("flags"), (("flags", True),)),
)
LOCAL = {
    hm.Window(255, 255): True,
    hm.Window(after=0): False,
    ~hm.Window(4, 4): False,
    hm.Chunk(64) | hm.Keys(0, 4): True,
    hm.Window(4, 4) | hm.Keys(4): False,
    hm.SameSegment("ids"): True,
    ~hm.SameSegment("ids"): False,
    hm.KeyFlag("flags"): False,  # padding
    hm.KeyFlag("flags") & hm.SameSegment("ids"): True,
    hm.KeyFlag("flags") | hm.Window(4, 4): True,  # global tokens
    ~hm.KeyFlag("flags") | hm.Window(4, 4): False,
    hm.SameSegment("of no known values"): False,
}


@pytest.mark.parametrize("rule", LOCAL, ids=repr)
def test_a_rule_is_local_if_a_query_sees_few_keys_at_any_length(rule):
    assert is_local(rule, READS) == LOCAL[rule]
