"""Jacobians, vectorized maps, forward mode and checked numerics on TensorFlow.

`test_laws.py` has gradients, and gradients of gradients.
"""

import contextlib

import keras
import numpy as np
import pytest
from contract import normal
from tiled_contract import at_once, tiles

import keras_headmask as hm
from keras_headmask.attention.scopes import tuned

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

pytestmark = pytest.mark.tensorflow

LENGTH = 24
INPUTS = {
    "s": np.arange(LENGTH)[None] // 7,
    "global": np.isin(np.arange(LENGTH), (4, 21))[None],
}
READS = hm.SameSegment("s") | hm.QueryFlag("global") | hm.KeyFlag("global")
SOME_DEAD = hm.PerHead({0: hm.Window(3, 0) & ~hm.Chunk(8)}, default=~hm.Full())
BY_POSITION = hm.PerHead({0: hm.Window(3, 0) & ~hm.Chunk(8)}, default=hm.Window(5, 5))


def attend(x, rule, tiled, **more):
    read = {name: np.repeat(INPUTS[name], x.shape[0], axis=0) for name in rule.inputs}
    # (`None`: what `each_choice` tunes decides.)
    more |= {"mask_spec": rule, "mask_inputs": read, "tiled": None if tiled else False}
    return hm.dot_product_attention(x, x, x, **more)


def small_tiles():
    return tuned(local_tile=8, wide_tile=8, block=4, most_logits=0)


# --- Derivatives ----------------------------------------------------------------------------------


def jacobian(x, rule, tiled):
    with tf.GradientTape() as tape:
        tape.watch(x)
        context = attend(x, rule, tiled)[:, 3:5, :1, :1]
    return tape.jacobian(context, x)


@pytest.mark.parametrize(
    ("scope", "rule"),
    [(at_once, BY_POSITION), pytest.param(small_tiles, READS, marks=pytest.mark.long)],
)
def test_a_jacobian_in_a_graph_is_that_of_dense_attention(scope, rule):
    x = tf.constant(normal(2, LENGTH, 2, 4, seed=3))
    run = tf.function(lambda x: jacobian(x, rule, True), autograph=False)
    with scope():
        np.testing.assert_allclose(run(x), jacobian(x, rule, False), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.long)])
def test_forward_mode_is_a_quotient_of_differences(tiled, in_graph):
    """Found as a bug: it asked for the gradient of a private operation."""

    def forward_mode(x):
        with tf.autodiff.ForwardAccumulator(x, tf.cos(x)) as accumulator:
            context = attend(x, BY_POSITION, tiled)
        return accumulator.jvp(context)

    x, step = tf.constant(normal(2, LENGTH, 2, 4, seed=3)), tf.constant(1e-2)
    run = tf.function(forward_mode) if in_graph else forward_mode
    with tiles():
        got = run(x)
    ahead, behind = (attend(x + sign * step * tf.cos(x), BY_POSITION, False) for sign in (1, -1))
    np.testing.assert_allclose(got, (ahead - behind) / (2 * step), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tiled", [None, False])
def test_two_maps_of_one_graph_read_the_ids_of_each_example(tiled):
    """Found as bugs: the second took all ids for those of example 0, a loop raised, and dense
    attention had a `tf.cond`, whose gradient no map can convert.
    """

    def of_one(given):
        x, ids = (one[None] for one in given)
        rest = {"mask_spec": hm.SameSentence(9), "mask_inputs": {"token_ids": ids}, "tiled": tiled}
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = hm.dot_product_attention(x, x, x, **rest)
        return tf.stack([context[0], tape.gradient(context, x)[0]])

    x, ids = tf.constant(normal(3, 7, 2, 4)), tf.constant(np.eye(3, 7, dtype="int32") * 9)
    of_any_size = [tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for x in (x, ids)]
    each = of_one, of_one, tf.function(of_one)
    maps = tf.function(lambda *x: [tf.vectorized_map(one, x) for one in each], of_any_size)
    wanted = tf.stack([of_one(given) for given in zip(x, ids, strict=True)])
    for found in maps(x, ids):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_map_refuses_tiles():
    def of_one(x):
        return hm.dot_product_attention(*[x[None]] * 3, mask_spec=BY_POSITION, tiled=True)

    with pytest.raises(ValueError, match=r"`tf.vectorized_map` maps no loop .* Leave `tiled` out"):
        tf.vectorized_map(of_one, normal(2, 8, 2, 4))


# --- Checked numerics -----------------------------------------------------------------------------


@contextlib.contextmanager
def checked():
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize(
    ("scope", "rule", "more", "length"),
    [
        (small_tiles, READS, {}, None),
        (small_tiles, SOME_DEAD, {"sinks": np.zeros(2, "float32")}, None),
        (at_once, SOME_DEAD, {"dropout": 0.3, "seed": 1}, LENGTH),
    ],
)
def test_checked_numerics_raise_for_what_is_wrong_alone(scope, rule, more, length):
    read = {name: np.repeat(INPUTS[name], 2, axis=0) for name in rule.inputs}

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = hm.dot_product_attention(x, x, x, mask_spec=rule, mask_inputs=read, **more)
        return tape.gradient(context, x)

    gradient = tf.function(gradient, [tf.TensorSpec([2, length, 2, 4])], autograph=False)
    x = normal(2, LENGTH, 2, 4)
    with scope(), checked():
        assert np.isfinite(gradient(x)).all()
        x[1, 4, 0, 0] = np.inf
        with pytest.raises(tf.errors.InvalidArgumentError, match="Inf"):
            gradient(x)


@pytest.mark.parametrize("scope", [at_once, small_tiles])
def test_what_was_traced_under_checks_serves_nobody_else(scope):
    """Its checks would raise where nobody asked for any."""
    rule, x = hm.Window(2, 2), normal(2, LENGTH, 2, 4)
    with scope(), checked():
        tf.function(attend)(tf.constant(x), rule, True)
    x[:, 9] = np.inf
    with scope():
        assert np.isnan(tf.function(attend)(tf.constant(x), rule, True)[:, 9]).all()
