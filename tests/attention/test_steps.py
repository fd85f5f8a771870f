"""The steps of a loop outside of graphs: what they look at holds every pair that is allowed."""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from strategies import FEW, cases
from tiled_contract import LONG, SCALE, sizes, tiles

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.torch import steps
from keras_headmask.attention.tuning import current_tuning, tuned
from keras_headmask.rules import evaluation
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.protocol import Sides

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is no part of the package
share_of_steps = importlib.import_module("benchmarks.kernels").share_of_steps


def parts_of(spec, inputs, batch, heads, queries, keys, offset=0):
    """The parts of a call with their steps."""
    for rule, members in head_groups(spec, heads):
        read = {name: inputs[name] for name in rule.inputs}
        bound = evaluation.bind(rule, read, queries, keys, offset)
        part = Part(rule, members, bound, SCALE, current_tuning())
        arrays = {
            leaf: {
                name: Sides(*(None if x is None else ops.convert_to_numpy(x) for x in sides))
                for name, sides in of_leaf.items()
            }
            for leaf, of_leaf in bound.leaf_inputs.items()
            if all(isinstance(sides, Sides) for sides in of_leaf.values())
        }
        yield part, steps.steps_of(part, arrays, batch, queries, keys, offset)


def positions(step):
    """The queries and keys of a step."""
    rows = np.arange(*step.rows) if step.is_run else np.array(step.rows)
    return rows, np.concatenate([*(np.arange(*run) for run in step.runs), step.others]).astype(int)


def check(spec, inputs, batch, heads, queries, keys, offset=0):
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    shares = []
    for part, found in parts_of(spec, inputs, batch, heads, queries, keys, offset):
        allowed = mask[:, list(part.heads)]
        computed = np.zeros((batch, queries, keys), bool)
        for step in found:
            rows, columns = positions(step)
            examples = slice(*step.examples)
            assert len(set(columns.tolist())) == len(columns) == step.keys, "no key twice"
            computed[examples, rows] = False  # the last step of a row counts
            for example in range(*step.examples):
                computed[example, rows[:, None], columns] = True
            if not step.needs_mask:
                assert allowed[examples][:, :, rows[:, None], columns].all()
        assert not (allowed & ~computed[:, None]).any()
        shares.append(share_of_steps(found, batch, queries, keys))
    return shares


@pytest.mark.parametrize("own_steps", [0, 2**20], ids=["each example", "all examples"])
@pytest.mark.parametrize("cells", [1, 40, 10**6])
@FEW
@given(cases(), sizes)
def test_any_rule_is_looked_at_whole(monkeypatch_module, own_steps, cells, case, tile_sizes):
    monkeypatch_module.setattr(steps, "_FEWEST_PAIRS", own_steps)
    monkeypatch_module.setattr(steps, "_MOST_CELLS", cells)
    spec, inputs, *rest = case
    with tiles(*tile_sizes):
        check(spec, inputs, *rest)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("own_steps", [0, 2**20])
def test_longer_sequences(monkeypatch, name, own_steps):
    monkeypatch.setattr(steps, "_FEWEST_PAIRS", own_steps)
    spec, inputs = LONG[name]
    with tiles():
        check(spec, inputs, 3, 4, 23, 23)


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
        ((_, found),) = parts_of(spec, inputs, 1, 16, LENGTH, LENGTH)
    assert 0 < share_of_steps(found, 1, LENGTH, LENGTH) < most


def test_padding_is_cut_off_to_the_key_and_needs_no_mask():
    pad = np.arange(LENGTH)[None] < np.array([[1024], [700], [700], [333]])
    ((_, found),) = parts_of(hm.KeyFlag("pad"), {"pad": pad}, 4, 16, LENGTH, LENGTH)
    assert [(s.examples, s.rows, s.runs, s.needs_mask) for s in found] == [
        ((0, 1), (0, LENGTH), ((0, 1024),), False),
        ((1, 3), (0, LENGTH), ((0, 700),), False),
        ((3, 4), (0, LENGTH), ((0, 333),), False),
    ]


def test_short_examples_share_their_steps():
    """A step costs more than the few pairs that it would save."""
    pad = np.arange(64)[None] < np.arange(1, 65)[:, None]
    ((_, found),) = parts_of(hm.KeyFlag("pad"), {"pad": pad}, 64, 4, 64, 64)
    assert [step.examples for step in found] == [(0, 64)]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_gaps_are_closed_if_they_are_short(row, block, gap):
    possible = np.array(row)[None, None]
    keys = len(row) * block
    ((runs,),) = steps._runs(possible, block, keys, gap)
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


def test_numpy_agrees_with_the_mask_of_the_backend():
    """The oracle of this file and the package's own mask are of one rule."""
    spec, inputs = LONG["flags both ways"]
    made = numpy(hm.make_mask(spec, 23, 23, num_heads=4, mask_inputs=inputs))
    wanted = oracle.mask(spec, 3, 4, 23, 23, inputs)
    np.testing.assert_array_equal(np.broadcast_to(made, wanted.shape), wanted)
