"""A soft cap, biases and sinks as arguments of the function, and in graphs.

`test_laws.py` has what each kernel makes of them.
"""

import changed
import numpy as np
import oracle
import pytest
from contract import gradient, normal
from keras import ops
from laws import BATCH, CHANGES, HEADS, LENGTH
from tiled_contract import (
    LONG,
    SCALE,
    attend,
    close,
    operands,
    tiles,
)

import keras_headmask as hm

LEARNED = hm.relative_position_bias(HEADS, num_buckets=6, max_distance=9)


@pytest.mark.parametrize("tiled", [True, False])
def test_the_function_takes_each_of_them(tiled):
    change, (spec, inputs) = CHANGES["all"], LONG["documents"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
    mask = oracle.mask(spec, BATCH, HEADS, LENGTH, LENGTH, inputs)
    with tiles():
        got = attend(
            qkv,
            spec,
            inputs,
            tiled=tiled,
            bias=change["bias"],
            position_bias=(change["position_bias"], change["table"]),
            logits_soft_cap=change["soft_cap"],
            sinks=change["sinks"],
        )
    tensors, constant = changed.split(change, LENGTH, LENGTH, HEADS)
    close(got, changed.wanted(qkv, mask, SCALE, None, tensors, constant)[0])


# ---------------------------------------------------------------- graphs


@pytest.mark.tensorflow
def test_nothing_is_known_when_the_graph_is_traced():
    """An axis of the bias of a size not known may be 1, or not."""
    import tensorflow as tf

    spec, inputs = LONG["documents"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)

    def loss(*given, tiled=True):
        rest = {"position_bias": hm.alibi(HEADS), "bias": given[3]}
        return ops.sum(ops.square(attend(given[:3], spec, inputs, tiled=tiled, **rest)))

    unknown = [tf.TensorSpec([None, None, HEADS, n]) for n in (3, 3, 2)]

    @tf.function(input_signature=[*unknown, tf.TensorSpec([None] * 4)])
    def gradients(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = loss(*given)
        return tape.gradient(found, given)

    for shape in ((1, 1, 1, LENGTH), (BATCH, HEADS, LENGTH, 1), (1, HEADS, LENGTH, LENGTH)):
        given = [*qkv, normal(*shape)]
        with tiles(4, 6, 3):
            made = gradients(*map(tf.constant, given))
        for one, other in zip(
            made, gradient(lambda *x: loss(*x, tiled=False), *given), strict=True
        ):
            close(one, other)


@pytest.mark.tensorflow
def test_layers_with_one_rule_share_a_function_and_not_their_tensors():
    import tensorflow as tf

    spec, inputs = LONG["documents"]
    qkv = [tf.constant(x) for x in operands(BATCH, LENGTH, LENGTH, HEADS)]
    mask = oracle.mask(spec, BATCH, HEADS, LENGTH, LENGTH, inputs)
    many = [normal(HEADS, seed=seed) for seed in range(2)]

    @tf.function
    def run(*sinks):
        return [attend(qkv, spec, inputs, sinks=x) for x in sinks]

    with tiles(4, 6, 3):
        for got, sinks in zip(run(*map(tf.constant, many)), many, strict=True):
            close(got, changed.wanted(qkv, mask, SCALE, None, {"sinks": sinks})[0])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bias": np.ones((2, 5, 5), "float32")}, ValueError, "`bias` must broadcast to"),
        ({"bias": np.ones((5, 5), "int32")}, TypeError, "`bias` must be floats"),
        ({"position_bias": hm.alibi(2)}, ValueError, "is of 2 heads where the attention has 4"),
        ({"position_bias": LEARNED}, ValueError, "`position_bias` is learned: pass a pair"),
        (
            {"position_bias": (LEARNED, np.ones((4, 6), "float32"))},
            ValueError,
            r"The table of `position_bias` must be floats of shape \(6, 4\)",
        ),
        ({"position_bias": (hm.alibi(4), np.ones(3))}, ValueError, "has no table"),
        ({"logits_soft_cap": -1.0}, ValueError, "`logits_soft_cap` must be above 0"),
        (
            {"logits_soft_cap": 1e-38},
            ValueError,
            "`logits_soft_cap` must be at least 1.175e-38.*Received: 1e-38",
        ),
        ({"sinks": np.ones(3, "float32")}, ValueError, r"`sinks` must be floats of shape \(4,\)"),
    ],
)
def test_what_does_not_fit(given, error, message):
    with pytest.raises(error, match=message):
        hm.dot_product_attention(*operands(1, 5, 5, 4), **given)


def test_a_step_with_a_cache_needs_its_offset():
    with pytest.warns(UserWarning, match="without `query_offset`"):
        hm.dot_product_attention(*operands(1, 1, 5, 4), position_bias=hm.alibi(4))
