"""The backend's own attention, given the mask: what it adds to the laws (`test_laws.py`)."""

import math

import keras
import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from tiled_contract import SCALE, attend, close, operands, weighted

import keras_headmask as hm
from keras_headmask.attention import fused
from keras_headmask.attention.request import Request

if keras.backend.backend() == "tensorflow":
    pytest.skip("TensorFlow has no such function", allow_module_level=True)

DEAD = hm.Window(2, 2) & ~hm.Queries(3, 5)


def request(size=8, value_size=8, dtypes=("float32",) * 3, **more):
    sizes = (size, size, value_size)
    given = [ops.zeros((1, 4, 2, n), dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    return Request(*given, **{"scale": 1.0} | more)


def test_what_it_takes():
    assert fused.takes(request())
    assert fused.takes(request(dtypes=("bfloat16",) * 3))
    assert fused.takes(request(value_size=4)) == (keras.backend.backend() == "torch")
    assert not fused.takes(request(dropout=0.1))
    assert not fused.takes(request(scale=ops.ones(())))
    assert not fused.takes(request(dtypes=("float32", "float32", "bfloat16")))
    assert not fused.takes(request(size=0))


def test_hidden_keys_have_probability_0_below_any_finite_logit():
    """JAX' own mask is a number, above which such logits are not."""
    query = np.full((1, 2, 1, 1), -1e19, "float32")
    key = np.array([2.6e19, 3e19], "float32").reshape(1, 2, 1, 1)  # logits -2.6e38 and -3e38
    value = np.array([1.0, 7.0], "float32").reshape(1, 2, 1, 1)
    context = fused.attention(
        *map(ops.convert_to_tensor, (query, key, value)),
        ops.convert_to_tensor(np.array([[[[True, False], [False, True]]]])),
        1.0,
    )
    np.testing.assert_array_equal(numpy(context).ravel(), [1.0, 7.0])


def test_rows_that_see_nothing_are_0_and_so_are_their_gradients():
    qkv = operands(2, 9, 9, 2, size=4, value_size=4)
    got = numpy(attend(qkv, DEAD, tiled=None))
    assert (got[:, 3:5] == 0).all()
    made = gradient(lambda *x: weighted(attend(x, DEAD, tiled=None)), *qkv)
    assert (made[0][:, 3:5] == 0).all()
    nothing = gradient(lambda *x: weighted(attend(x, hm.Nothing(), tiled=None)), *qkv)
    assert all((x == 0).all() for x in nothing)


def test_grouped_queries_of_half_precision():
    qkv = operands(2, 9, 9, 4, size=8, value_size=8, key_heads=2)
    halves = [ops.cast(x, "bfloat16") for x in qkv]
    got = attend(halves, DEAD, tiled=None)
    assert keras.backend.standardize_dtype(got.dtype) == "bfloat16"
    wanted = numpy(attend([ops.cast(x, "float32") for x in halves], DEAD, tiled=None))
    np.testing.assert_allclose(numpy(ops.cast(got, "float32")), wanted, atol=0.03)


def test_examples_that_are_mapped():
    qkv = [ops.convert_to_tensor(x)[:, None] for x in operands(3, 9, 9, 2, size=4, value_size=4)]

    def one(*x):
        return hm.dot_product_attention(*x, mask_spec=DEAD, scale=SCALE)

    if keras.backend.backend() == "jax":
        import jax

        mapped = jax.vmap(one)
    else:
        import torch

        mapped = torch.func.vmap(one)
    close(mapped(*qkv)[:, 0], attend([x[:, 0] for x in qkv], DEAD, tiled=None))


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch shows what is kept")
def test_no_logits_are_kept_for_the_gradient():
    import torch

    length, held = 64, []
    qkv = operands(1, length, length, 4, size=8, value_size=8)
    qkv = [torch.from_numpy(x).requires_grad_() for x in qkv]
    note = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x)
    with note:
        attend(qkv, hm.Window(after=0), tiled=None)
    assert sum(math.prod(x.shape) for x in held if x.dtype.is_floating_point) < 4 * length**2
