"""The steps of a loop outside of graphs: what they skip, and which they share.

That they look at every pair that is allowed is held in `test_laws.py`.
"""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from tiled_contract import SCALE

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.torch import steps
from keras_headmask.attention.tuning import current_tuning, tuned
from keras_headmask.rules import coverage, evaluation
from keras_headmask.rules.protocol import Sides

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is no part of the package
share_of_steps = importlib.import_module("benchmarks.kernels").share_of_steps


def steps_of(spec, inputs, batch, heads, length):
    bound = evaluation.bind(spec, inputs, length, length)
    part = Part(spec, tuple(range(heads)), bound, SCALE, current_tuning())
    arrays = {
        leaf: {
            name: Sides(*(None if x is None else ops.convert_to_numpy(x) for x in sides))
            for name, sides in of_leaf.items()
        }
        for leaf, of_leaf in bound.leaf_inputs.items()
    }
    return steps.steps_of(part, arrays, batch, length, length, 0)


# What is left to compute where the data say it.
LENGTH = 1024
DOCUMENTS = np.repeat(np.arange(16), 64)[None].astype("int32")
FLAGS = np.isin(np.arange(LENGTH), np.random.default_rng(0).choice(LENGTH, 16, False))[None]
SKIPPED = {
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": DOCUMENTS}, 0.13),
    "padding": (hm.KeyFlag("pad"), {"pad": np.arange(LENGTH)[None] < 100}, 0.1),
    "scattered flags": (hm.recipes.longformer(16, "f"), {"f": FLAGS}, 0.2),
    "window": (hm.Window(31, 31), {}, 0.19),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_data_show_what_to_skip(name):
    spec, inputs, most = SKIPPED[name]
    with tuned(local_tile=128):
        found = steps_of(spec, inputs, 1, 16, LENGTH)
    assert 0 < share_of_steps(found, 1, LENGTH, LENGTH) < most


def test_padding_is_cut_off_to_the_key_and_needs_no_mask():
    pad = np.arange(LENGTH)[None] < np.array([[1024], [700], [700], [333]])
    found = steps_of(hm.KeyFlag("pad"), {"pad": pad}, 4, 16, LENGTH)
    assert [(s.examples, s.rows, s.runs, s.needs_mask) for s in found] == [
        ((0, 1), (0, LENGTH), ((0, 1024),), False),
        ((1, 3), (0, LENGTH), ((0, 700),), False),
        ((3, 4), (0, LENGTH), ((0, 333),), False),
    ]


def test_short_examples_share_their_steps():
    """A step costs more than the few pairs that it would save."""
    pad = np.arange(64)[None] < np.arange(1, 65)[:, None]
    found = steps_of(hm.KeyFlag("pad"), {"pad": pad}, 64, 4, 64)
    assert [step.examples for step in found] == [(0, 64)]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_gaps_are_closed_if_they_are_short(row, block, gap):
    possible = np.array(row)[None, None]
    keys = len(row) * block
    looked_at = steps._looked_at(possible, block, gap)
    (runs,) = coverage.runs(looked_at[0], block, keys)
    seen = {position for run in runs for position in range(*run)}
    wanted = {i * block + j for i, here in enumerate(row) if here for j in range(block)}
    assert wanted <= seen
    for (_, stop), (start, _) in itertools.pairwise(runs):
        assert start - stop >= gap
    # What is added lies in a gap between two that are possible, and is short.
    for position in seen - wanted:
        before = max(x for x in wanted if x < position)
        after = min(x for x in wanted if x > position)
        assert after - before - 1 < gap
