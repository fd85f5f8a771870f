"""A soft cap, a bias and sinks as arguments of the function, and in graphs.

`test_laws.py` has what each kernel makes of them.
"""

import changed
import numpy as np
import oracle
import pytest
from contract import normal
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


@pytest.mark.parametrize(("name", "tiled"), [("cap and sinks", True), ("all", None)])
def test_the_function_takes_each_of_them(name, tiled):
    change, (spec, inputs) = CHANGES[name], LONG["documents"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
    mask = oracle.mask(spec, BATCH, HEADS, LENGTH, LENGTH, inputs)
    with tiles():
        got = attend(
            qkv,
            spec,
            inputs,
            tiled=tiled,
            bias=change.get("bias"),
            logits_soft_cap=change["soft_cap"],
            sinks=change["sinks"],
        )
    tensors, constant = changed.split(change)
    close(got, changed.wanted(qkv, mask, SCALE, None, tensors, constant)[0])


# ---------------------------------------------------------------- graphs


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
        (
            {"bias": np.ones((5, 5), "float32"), "mask_spec": hm.Window(1, 1), "tiled": True},
            ValueError,
            "`tiled=True` is not possible here: returned probabilities, a bias and .* all logits",
        ),
        ({"logits_soft_cap": "2"}, TypeError, "`logits_soft_cap` must be a number"),
        *(
            ({"logits_soft_cap": cap}, ValueError, "must be at least 1.175e-38.* and finite")
            for cap in (-1.0, 0, 1e-38, np.inf)
        ),
        ({"sinks": np.ones(3, "float32")}, ValueError, r"`sinks` must be floats of shape \(4,\)"),
    ],
)
def test_what_does_not_fit(given, error, message):
    with pytest.raises(error, match=message):
        hm.dot_product_attention(*operands(1, 5, 5, 4), **given)
