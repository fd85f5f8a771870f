"""float64 in layers; on JAX with `jax_enable_x64`."""

import numpy as np
import pytest
from by_kernel import sixty_four_bits
from contract import gradient, numpy
from keras import ops
from tiled_contract import LONG, attend, operands, tiles

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention import observers

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
