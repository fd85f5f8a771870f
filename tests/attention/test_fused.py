"""The backend's own attention, and tiles on PyTorch: what they add to the laws (`test_laws.py`)."""

import math

import keras
import numpy as np
import pytest
from contract import numpy
from keras import ops
from tiled_contract import SCALE, attend, close, operands, tiles

import keras_headmask as hm
from keras_headmask.attention import fused

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    pytest.skip("TensorFlow has no such function", allow_module_level=True)

on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch alone")


def test_hidden_keys_have_probability_0_below_any_finite_logit():
    """JAX' own mask is a number, above which such logits are not."""
    query = np.full((1, 2, 1, 1), -1e19, "float32")
    key = np.array([2.6e19, 3e19], "float32").reshape(1, 2, 1, 1)  # logits -2.6e38 and -3e38
    value = np.array([1.0, 7.0], "float32").reshape(1, 2, 1, 1)
    mask = np.eye(2, dtype=bool)[None, None]
    context = fused.attention(*map(ops.convert_to_tensor, (query, key, value, mask)), 1.0)
    np.testing.assert_array_equal(numpy(context).ravel(), [1.0, 7.0])


def test_examples_that_are_mapped():
    qkv = [ops.convert_to_tensor(x)[:, None] for x in operands(3, 9, 9, 2, size=4, value_size=4)]
    rule = hm.Window(2, 2) & ~hm.Queries(3, 5)

    def one(*x):
        return hm.dot_product_attention(*x, mask_spec=rule, scale=SCALE)

    if BACKEND == "jax":
        import jax

        mapped = jax.vmap(one)
    else:
        import torch

        mapped = torch.func.vmap(one)
    close(mapped(*qkv)[:, 0], attend([x[:, 0] for x in qkv], rule, tiled=None))


@on_torch
@pytest.mark.parametrize(
    ("tiled", "more", "most"), [(None, {}, 4 * 64**2), (True, {"dropout": 0.5, "seed": 0}, 64 * 6)]
)
def test_no_probabilities_are_kept_for_the_gradient(tiled, more, most):
    import torch

    held, qkv = [], operands(1, 64, 64, 4, size=8, value_size=8)
    qkv = [torch.from_numpy(x).requires_grad_() for x in qkv]
    note = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x)
    with tiles(), note:
        attend(qkv, hm.Window(2, 2), tiled=tiled, **more)
    assert sum(math.prod(x.shape) for x in held if x.dtype.is_floating_point) < most


@on_torch
def test_the_gradient_drops_what_was_dropped():
    """By PyTorch's own state. A sum linear in the values is they times their gradient."""
    import torch

    *others, value = (torch.from_numpy(x).requires_grad_() for x in operands(2, 23, 23, 2))
    generator = keras.random.SeedGenerator(3)
    with tiles():
        total = attend((*others, value), hm.Window(2, 2), dropout=0.5, seed=generator).sum()
    (of_value,) = torch.autograd.grad(total, value)
    assert abs(total - (of_value * value).sum()) < 1e-4
