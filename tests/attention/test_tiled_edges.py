"""Tiles at their edges: what is empty, of size 1, an explicit mask, large logits."""

import keras
import numpy as np
import pytest
from tiled_contract import (
    attend,
    both_gradients,
    close,
    operands,
)
from tolerance import assert_close

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


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (0, 0)])
def test_no_query(queries, keys):
    for spec in (hm.Window(1, 1), hm.Full()):
        got = attend(operands(2, queries, keys, 2), spec)
        assert tuple(got.shape) == (2, queries, 2, 2)


def test_no_example_and_no_key():
    for spec in (hm.Window(1, 1), hm.Full()):
        assert tuple(attend(operands(0, 5, 5, 2), spec).shape) == (0, 5, 2, 2)
        qkv = operands(2, 5, 0, 2)
        close(attend(qkv, spec), attend(qkv, spec, tiled=False))


def test_an_explicit_mask_is_cut_too(tiny):
    rng = np.random.default_rng(0)
    qkv = operands(2, 9, 11, 3)
    spec = hm.PerHead({1: hm.Window(2, 2)}, hm.Keys(1))
    for shape in ((9, 11), (2, 9, 11), (2, 3, 9, 11), (1, 3, 9, 11), (2, 1, 1, 11), (2, 3, 9, 1)):
        mask = rng.random(shape) < 0.6
        for rule in (spec, None):
            got = attend(qkv, rule, mask=mask)
            close(got, attend(qkv, rule, mask=mask, tiled=False), str(shape))


@pytest.mark.tensorflow
def test_gradients_of_large_scores_keep_their_digits():
    q, k, v = operands(1, 300, 300, 2, size=16)
    ids = {"ids": np.zeros((1, 300), "int32")}
    for name, got, wanted in both_gradients((q * 30, k, v), hm.SameSegment("ids"), ids):
        assert_close(got, wanted, message=name, depth=3)
