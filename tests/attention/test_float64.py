"""float64 in layers and in steps of generation; on JAX with `jax_enable_x64`."""

import changed
import numpy as np
import pytest
from by_kernel import sixty_four_bits
from contract import gradient, numpy
from keras import ops
from tiled_contract import LONG, SCALE, attend, operands, tiles

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.attention.logits import Changes
from keras_headmask.generation import one_query

HEADS = 16  # (of fewer heads float32 holds all slopes of ALiBi)
_rng = np.random.default_rng(5)


def near(got, wanted, message=""):
    assert got.dtype == "float64", message
    np.testing.assert_allclose(got, wanted, 1e-12, 1e-12, err_msg=message)


def test_float32_operands_where_there_are_64_bits():
    spec, inputs = LONG["documents"]
    qkv = operands(3, 23, 23, 2)
    with sixty_four_bits(), tiles(4, 6, 3):
        made = [
            gradient(lambda *x, t=t: ops.sum(attend(x, spec, inputs, tiled=t) ** 2), *qkv)
            for t in (True, False)
        ]
    for one, other in zip(*made, strict=True):
        assert one.dtype == "float32"
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_a_step_of_generation_with_a_soft_cap():
    q, k, v = (x.astype("float64") for x in operands(1, 1, 5, 2))
    with sixty_four_bits():
        given = [ops.convert_to_tensor(x) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2))]
        mask = ops.ones((1, 1, 1, 5), "bool")
        got = numpy(one_query.attention(*given, mask, SCALE, Changes(soft_cap=0.5)))
    constant = {"soft_cap": 0.5}
    near(got, changed.wanted((q, k, v), np.ones((1, 2, 1, 5), bool), SCALE, constant=constant)[0])


def test_a_step_of_generation_hides_what_lies_above_allowed_logits():
    query, key = np.full((1, 1, 2, 1), -(2.0**16)), np.full((1, 2, 4, 1), 2.0**17)
    value = np.arange(8.0).reshape(1, 2, 4, 1)
    mask = np.array([[[[True, True, False, False]], [[False, False, False, True]]]])
    given = (ops.convert_to_tensor(x.astype("float32")) for x in (query, key, value))
    got = one_query.attention(*given, ops.convert_to_tensor(mask), 1.0)
    np.testing.assert_allclose(numpy(got).ravel(), [0.5, 7.0])


@pytest.mark.parametrize("tiled", [True, False])
def test_alibi_of_a_layer(tiled):
    """By Keras' hook, too, where the bias is a whole tensor."""
    x = _rng.normal(size=(1, 9, 3))
    with sixty_four_bits(), tiles(4, 6, 3):
        layer = hm.PerHeadMaskedMultiHeadAttention(
            HEADS, 2, position_bias=hm.alibi(HEADS), tiled=tiled, dtype="float64"
        )
        one = numpy(layer(x, use_causal_mask=True))
        with observers.overriding(layer, _keras.COMPUTE_ATTENTION, hooked):
            other = numpy(layer(x, use_causal_mask=True))
    near(one, other)


def hooked(usual, *args, **kwargs):
    return usual(*args, **kwargs)
