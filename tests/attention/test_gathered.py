"""Tiles that are computed together: what is kept, and dropped, for the gradient.

That what they compute is right is held in `test_laws.py`.
"""

import keras
import pytest
from tiled_contract import BACKEND, attend, operands, tiles

import keras_headmask as hm
from keras_headmask.attention import gathered


def test_a_plan_is_of_the_rule_that_is_taken_apart():
    """As PyTorch's compiler hands it over: also fields that are specs, pairs, or nothing."""
    rule = hm.PerHead(
        {0: ~hm.Window(2, None), 3: hm.KeyIn("ids", (1, 2))}, hm.Chunk(4) | hm.Keys(1)
    )
    apart = gathered._taken_apart(rule)
    assert gathered._put_together(apart) == rule


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


def _as_is(tensor):
    return tensor
