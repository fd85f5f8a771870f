"""Tiles at their edges: what is empty, of size 1, an explicit mask, large logits."""

import keras
import numpy as np
import pytest
from tiled_contract import (
    attend,
    close,
    operands,
)

import keras_headmask as hm


@pytest.mark.tensorflow
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (1, 1, 9, 9), (2, 1, 1, 9), (2, 4, 9, 9)])
def test_a_head_axis_that_turns_out_to_be_1(tiny, shape, tiled):
    import tensorflow as tf

    qkv = operands(2, 9, 9, 4)
    mask = np.random.default_rng(0).random(shape) < 0.6

    @tf.function(input_signature=[tf.TensorSpec([None] * 4, tf.bool)])
    def run(mask):
        return attend(qkv, hm.Window(3, 3), mask=mask, tiled=tiled)

    close(run(mask), attend(qkv, hm.Window(3, 3), mask=mask, tiled=False))


@pytest.mark.parametrize("name", ["query_mask", "value_mask", "key_mask"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_keras_mask_of_length_1_serves_all_positions(tiny, name, batch):
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    mask = np.array([[True], [False]])[-batch:]
    outs = []
    for tiled in (True, False):
        keras.utils.set_random_seed(0)
        layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(2, 2), tiled=tiled)
        outs.append(layer(x, **{name: mask}))
    close(*outs)
