"""Tiles at their edges: empty, of size 1, not finite, differentiated twice."""

import dataclasses

import keras
import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from tiled_contract import (
    BACKEND,
    UNSORTED_IDS,
    attend,
    both_gradients,
    close,
    operands,
)
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.rules.protocol import Bounds


@hm.register_spec("test_tiled_surely_flagged")
@dataclasses.dataclass(frozen=True)
class SurelyFlagged(hm.MaskSpec):
    """Of its tiles it tells by data which are certain, and by positions which are possible."""

    @property
    def inputs(self):
        return {"f": hm.InputType(sides=frozenset({"key"}))}

    def allowed(self, query_positions, key_positions, inputs):
        return inputs["f"].key > 0

    def coverage(self, tiles, inputs):
        return Bounds(tiles.key_first <= tiles.key_first, inputs["f"].key.low > 0)


def test_what_is_certain_may_differ_between_examples(tiny):
    qkv = operands(2, 23, 23, 2)
    flags = np.ones((2, 23), "int32")
    flags[1, :9] = 0
    inputs = {"f": flags}
    spec = hm.PerHead({0: SurelyFlagged()}, default=hm.Full()) & hm.Window(after=12)
    close(attend(qkv, spec, inputs), attend(qkv, spec, inputs, tiled=False))


@pytest.mark.tensorflow
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 5, 5)])
@pytest.mark.parametrize("reads", [True, False], ids=["data", "positions"])
def test_lengths_and_batches_that_turn_out_to_be_0(tiny, sizes, reads):
    import tensorflow as tf

    batch, queries, keys = sizes
    spec = hm.SameSegment("ids") if reads else hm.Window(2, 2)
    ids = tuple(np.zeros((batch, n), "int32") for n in (queries, keys)) if reads else None

    @tf.function(input_signature=[tf.TensorSpec((None, None, 2, 3))] * 3)
    def run(q, k, v):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            context = attend((q, k, v), spec, {"ids": ids} if reads else None)
        return context, tape.gradient(context, [q, k, v])

    qkv = operands(batch, queries, keys, 2, value_size=3)
    context, gradients = run(*qkv)
    assert context.shape == (batch, queries, 2, 3)
    assert np.isfinite(context).all()
    for got, of in zip(gradients, qkv, strict=True):
        assert got.shape == of.shape
        assert np.isfinite(got).all()


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


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("reads", [True, False], ids=["data", "positions"])
def test_whatever_a_hidden_key_is(tiny, bad, reads):
    q, k, v = operands(2, 23, 23, 2)
    hidden = np.arange(23) >= 15
    spec = hm.Window(9, 9) & (hm.KeyFlag("seen") if reads else hm.Keys(0, 15))
    inputs = {"seen": np.tile(~hidden, (2, 1))} if reads else None
    wanted = numpy(attend((q, k, v), spec, inputs))
    spoilt = k.copy()
    spoilt[:, hidden] = bad
    np.testing.assert_array_equal(numpy(attend((q, spoilt, v), spec, inputs)), wanted)


@pytest.mark.parametrize("reads", [True, False], ids=["data", "positions"])
def test_gradients_of_gradients(tiny, reads):
    """A gradient penalty, as dense attention has it."""
    spec = hm.SameSegment("ids") if reads else hm.Window(2, 2)
    inputs = {"ids": UNSORTED_IDS[:1, :9]} if reads else None
    qkv = operands(1, 9, 9, 2)

    def first(q, k, v, tiled):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch([q, k, v])
                value = ops.sum(attend((q, k, v), spec, inputs, tiled=tiled) ** 3)
            return tape.gradient(value, [q, k, v])
        if BACKEND == "jax":
            import jax

            def value(*x):
                return ops.sum(attend(x, spec, inputs, tiled=tiled) ** 3)

            return jax.grad(value, argnums=(0, 1, 2))(q, k, v)
        import torch

        value = ops.sum(attend((q, k, v), spec, inputs, tiled=tiled) ** 3)
        return torch.autograd.grad(value, [q, k, v], create_graph=True)

    def penalty(tiled):
        return lambda q, k, v: sum(ops.sum(g**2) for g in first(q, k, v, tiled))

    for got, wanted in zip(
        gradient(penalty(True), *qkv), gradient(penalty(False), *qkv), strict=True
    ):
        assert_close(got, wanted, depth=256)  # gradients of gradients of cubes


@pytest.mark.tensorflow
def test_gradients_of_large_scores_keep_their_digits():
    q, k, v = operands(1, 300, 300, 2, size=16)
    ids = {"ids": np.zeros((1, 300), "int32")}
    for name, got, wanted in both_gradients((q * 30, k, v), hm.SameSegment("ids"), ids):
        assert_close(got, wanted, message=name, depth=3)
