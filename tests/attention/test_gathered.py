"""Tiles that are computed together: which stand in one class, and what that costs.

That what they compute is right is held in `test_laws.py`.
"""

import itertools
from unittest import mock

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEW
from tiled_contract import BACKEND, attend, operands, tiles

import keras_headmask as hm
from keras_headmask.attention import gathered, planner
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning, tuned
from keras_headmask.rules import evaluation


@FEW
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_classes_compute_about_as_little_as_any_four(counts):
    """And no more of them than that takes."""

    def computed(widths):
        return sum(min(width for width in widths if width >= count) for count in counts)

    below = sorted(set(counts) - {max(counts)})
    of_any = {
        number: min(computed([*x, max(counts)]) for x in itertools.combinations(below, number - 1))
        for number in range(1, min(4, len(below) + 1) + 1)
    }
    widths = gathered._widths(counts)
    assert widths == sorted(set(widths))
    least = min(of_any.values()) * 1.05
    assert computed(widths) <= least
    assert len(widths) == min(number for number, of in of_any.items() if of <= least)


def test_a_causal_rule_computes_little_more_than_half():
    met = planner.plan(hm.Window(after=0), 4096, 4096, 0, 256, 32).share(4096)
    assert met < plan_of(hm.Window(after=0)).share == 5 / 8
    assert len(plan_of(hm.Window(127, 127)).classes) == 1


def plan_of(rule):
    part = Part(rule, (0,), evaluation.bind(rule, None, 4096, 4096), 1.0, Tuning())
    return gathered.plan_of(part, 4096, 4096, 0)


def test_a_plan_is_of_the_rule_that_is_taken_apart():
    """As PyTorch's compiler hands it over: also fields that are specs, pairs, or nothing."""
    rule = hm.PerHead(
        {0: ~hm.Window(2, None), 3: hm.KeyIn("ids", (1, 2))}, hm.Chunk(4) | hm.Keys(1)
    )
    apart = gathered._taken_apart(rule)
    assert gathered._put_together(apart) == rule


@pytest.mark.skipif(BACKEND == "tensorflow", reason="its loop takes this")
@pytest.mark.parametrize(("most", "is_taken"), [(0.6, False), (0.65, True)])
def test_dense_where_classes_compute_too_much(most, is_taken):
    """A causal rule: 17/32 of the logits are met by tiles, 5/8 are computed in classes."""
    x = np.ones((1, 16, 1, 2), "float32")
    numbers = {"fewest_pairs": 0, "most_computed": most, "wide_tile": 1, "block": 1}
    compute = mock.patch.object(gathered, "compute", side_effect=gathered.compute)
    with tuned(**numbers), compute as called:
        attend([x, x, x], hm.Window(after=0), tiled=None, dropout=0.5, seed=0)
    assert called.called == is_taken


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch shows what is kept for the gradient")
def test_no_probabilities_are_kept_for_the_gradient():
    import torch

    length, held = 64, []
    qkv = [torch.from_numpy(x).requires_grad_() for x in operands(1, length, length, 2)]
    note = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, _as_is)
    with tiles(), note:
        attend(qkv, hm.Window(2, 2), dropout=0.5, seed=0)
    assert sum(held) < length * 2 * 3


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch may draw by its own state")
@pytest.mark.parametrize("seed", [None, 3])
def test_the_gradient_drops_what_was_dropped(seed):
    """Of a sum that is linear in the values, they and their gradient give the sum again."""
    import torch

    *others, value = (torch.from_numpy(x).requires_grad_() for x in operands(2, 23, 23, 2))
    generator = keras.random.SeedGenerator(seed)
    with tiles():
        total = attend((*others, value), hm.Window(2, 2), dropout=0.5, seed=generator).sum()
    (of_value,) = torch.autograd.grad(total, value)
    assert abs(total - (of_value * value).sum()) < 1e-4


@pytest.mark.skipif(BACKEND != "jax", reason="JAX shows its program")
def test_the_program_does_not_grow_with_the_tiles():
    import jax

    def operations(length):
        def total(*qkv):
            attention = hm.dot_product_attention(
                *qkv, mask_spec=hm.Window(2, 2), tiled=True, dropout=0.5, seed=0
            )
            return attention.sum()

        with tiles():
            traced = jax.jit(jax.grad(total, (0, 1, 2))).lower(*operands(1, length, length, 2))
        return traced.as_text().count(" = ")

    # (A few shapes that fit by chance are not reshaped.)
    assert operations(240) <= operations(48) + 5


def _as_is(tensor):
    return tensor
