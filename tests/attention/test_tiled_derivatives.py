"""Second derivatives, whole Jacobians and vectorized maps on TensorFlow."""

import keras
import numpy as np
import pytest
from contract import normal
from tiled_contract import at_once

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow's own loops", allow_module_level=True)

import tensorflow as tf

LENGTH = 24
INPUTS = {
    "s": np.arange(LENGTH)[None] // 7,
    "global": np.isin(np.arange(LENGTH), (4, 21))[None],
}
RULES = (
    pytest.param(hm.SameSegment("s") & hm.Window(5, 6), marks=pytest.mark.long),
    hm.SameSegment("s") | hm.QueryFlag("global") | hm.KeyFlag("global"),
)

SOME_DEAD = hm.PerHead({0: hm.Window(3, 0) & ~hm.Chunk(8)}, default=~hm.Full())


def attend(x, rule, tiled):
    read = {name: np.repeat(INPUTS[name], x.shape[0], axis=0) for name in rule.inputs}
    # (`None`: what `each_way` tunes decides.)
    how = {"mask_spec": rule, "mask_inputs": read, "tiled": None if tiled else False}
    return hm.dot_product_attention(x, x, x, **how)


@pytest.fixture(params=["all logits", "tiles"])
def each_way(request):
    few = {"local_tile": 8, "wide_tile": 8, "tensorflow_block": 4, "most_logits": 0}
    with at_once() if request.param == "all logits" else tuned(**few):
        yield


def of_gradients(x, rule, tiled):
    """The gradient of the sum of the squares of a gradient."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(attend(x, rule, tiled) ** 2)
        loss = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return outer.gradient(loss, x)


def jacobian(x, rule, tiled):
    with tf.GradientTape() as tape:
        tape.watch(x)
        context = attend(x, rule, tiled)[:, 3:6, :1, :2]
    return tape.jacobian(context, x)


@pytest.fixture
def numerics_checked():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.parametrize(
    ("rule", "more", "length"),
    [
        (RULES[1], {}, None),
        (SOME_DEAD, {"dropout": 0.3, "seed": 1}, LENGTH),
        pytest.param(SOME_DEAD, {}, None, marks=pytest.mark.long),
        pytest.param(SOME_DEAD, {"sinks": np.zeros(2, "float32")}, None, marks=pytest.mark.long),
    ],
    ids=["data", "dropout", "dead", "sinks"],
)
@pytest.mark.every_day("tiles-data|all logits-dropout")
def test_checked_numerics_raise_for_what_is_wrong_alone(
    each_way, numerics_checked, rule, more, length
):
    read = {name: np.repeat(INPUTS[name], 2, axis=0) for name in rule.inputs}

    @tf.function(input_signature=[tf.TensorSpec([2, length, 2, 4])])
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = hm.dot_product_attention(x, x, x, mask_spec=rule, mask_inputs=read, **more)
        return tape.gradient(context, x)

    x = normal(2, LENGTH, 2, 4)
    assert np.isfinite(gradient(x)).all()
    x[1, 4, 0, 0] = np.inf
    with pytest.raises(tf.errors.InvalidArgumentError, match="Inf"):
        gradient(x)


@pytest.mark.parametrize(
    "more",
    [
        {"sinks": np.zeros(2, "float32")},
        {"bias": np.zeros((1, 1, LENGTH, LENGTH), "float32")},
    ],
    ids=["sinks", "bias"],
)
@pytest.mark.parametrize("tiled", [True, False])
def test_checked_numerics_find_no_fault_beside_sinks_or_a_bias(numerics_checked, more, tiled):
    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = hm.dot_product_attention(
                x, x, x, mask_spec=hm.Window(2, 2), tiled=tiled, **more
            )
        return tape.gradient(context, x)

    assert np.isfinite(gradient(normal(2, LENGTH, 2, 4))).all()


def test_what_was_traced_under_checks_serves_nobody_else(each_way):
    """Its checks would raise for what is hidden, and without them nobody asked for any."""
    rule, x = hm.Window(2, 2), normal(2, LENGTH, 2, 4)
    tf.debugging.enable_check_numerics()
    try:
        tf.function(attend)(tf.constant(x), rule, True)
    finally:
        tf.debugging.disable_check_numerics()
    x[:, 9] = np.inf
    got, wanted = tf.function(attend)(tf.constant(x), rule, True), attend(x, rule, False)
    np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)


def mapped(x, rule, tiled):
    return tf.vectorized_map(lambda example: attend(example[None], rule, tiled), x)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("of", [of_gradients, jacobian, mapped])
@pytest.mark.every_day("all logits.*jacobian|tiles.*mapped-Same")
def test_as_dense(each_way, rule, of):
    x = tf.constant(normal(2, LENGTH, 2, 4, seed=3))
    tiled, dense = tf.function(of)(x, rule, True), of(x, rule, False)
    np.testing.assert_allclose(tiled, dense, rtol=1e-4, atol=1e-3)
