"""TensorFlow at lengths that show when the graph runs: the choice, and what is made of gradients.

Few logits are computed at once, short sequences head by head, the others by tiles; the choice and
its gradient are one.
"""

import numpy as np
import pytest
from contract import normal, numpy
from tiled_contract import (
    at_once,
    attend,
    heads_alone,
    tiles,
)

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

pytestmark = pytest.mark.tensorflow
CHOICES = {"at once": (at_once, None), "head by head": (heads_alone, True), "tiles": (tiles, True)}


RULE = hm.PerHead({0: hm.Window(3, 0) & ~hm.Chunk(8)}, default=hm.Window(5, 5))


def second_derivative(x, tiled, rule=RULE, **rest):
    import tensorflow as tf

    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(attend((x, x, x), rule, tiled=tiled, **rest) ** 2)
        loss = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return outer.gradient(loss, x)


def jacobian(x, tiled):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        context = attend((x, x, x), RULE, tiled=tiled)[:, 3:6, :1, :2]
    return tape.jacobian(context, x)


def mapped(x, tiled):
    import tensorflow as tf

    return tf.vectorized_map(lambda e: attend((e[None],) * 3, RULE, tiled=tiled), x)


def mapped_gradients(x, tiled):
    """Found as a bug: dense attention had a `tf.cond`, whose gradient no map can convert."""
    import tensorflow as tf

    def gradient(example):
        with tf.GradientTape() as tape:
            tape.watch(example)
            loss = tf.reduce_sum(attend((example[None],) * 3, RULE, tiled=tiled) ** 2)
        return tape.gradient(loss, example)

    return tf.vectorized_map(gradient, x)


def forward_mode(x, tiled):
    """Found as a bug: it asked for the gradient of a private operation."""
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, tf.cos(x)) as accumulator:
        context = attend((x, x, x), RULE, tiled=tiled)
    return accumulator.jvp(context)


@pytest.mark.parametrize(
    ("of", "tiled"), [(mapped_gradients, False), (forward_mode, False), (forward_mode, True)]
)
def test_what_is_made_of_gradients_outside_of_graphs(of, tiled):
    import tensorflow as tf

    x = tf.constant(normal(2, 24, 2, 4, seed=3))
    with tiles(), tuned(most_unrolled=0):
        got = of(x, tiled)
    if of is forward_mode:
        step = tf.constant(1e-2)
        ahead, behind = (
            attend((x + sign * step * tf.cos(x),) * 3, RULE, tiled=False) for sign in (1, -1)
        )
        wanted = (ahead - behind) / (2 * step)
    else:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(attend((x,) * 3, RULE, tiled=False) ** 2)
        wanted = tape.gradient(loss, x)
    np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("of", "choice"),
    [
        # (Minutes, and 3 GB, to trace; `test_second_derivatives_under_dropout` has one head group.)
        *((second_derivative, choice) for choice in CHOICES),
        *((mapped, choice) for choice in CHOICES),
        *((jacobian, choice) for choice in CHOICES),
        *((forward_mode, choice) for choice in CHOICES),
    ],
)
@pytest.mark.long  # (to trace one takes 14 s or more; `test_tiled_derivatives` has two every day)
def test_what_is_made_of_gradients(of, choice):
    import tensorflow as tf

    how, tiled = CHOICES[choice]
    x = tf.constant(normal(2, 24, 2, 4, seed=3))
    with how():
        call = tf.function(lambda x: of(x, tiled))
        got = call.get_concrete_function(tf.TensorSpec([None, None, 2, 4]))(x)
    np.testing.assert_allclose(got, of(x, False), rtol=1e-4, atol=1e-3)


@pytest.mark.long  # (half a minute to trace)
def test_second_derivatives_under_dropout():
    import tensorflow as tf

    def derivative(x, tiled=None):
        return second_derivative(x, tiled, hm.Window(3, 0), dropout=0.3, seed=5)

    x = tf.constant(normal(1, 8, 2, 4, seed=3))
    of_any_length = tf.function(derivative, autograph=False)
    got = of_any_length.get_concrete_function(tf.TensorSpec([None, None, 2, 4]))(x)
    np.testing.assert_allclose(got, derivative(x, tiled=True), rtol=1e-4, atol=1e-3)


@pytest.fixture
def which(monkeypatch):
    """Which is chosen for a spec and lengths, of two heads."""
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import by_length, graph, head_by_head, loop

    def giving(number):
        passes = lambda q, k, v: [tf.ones_like(q) * number], lambda *given: given[:3]
        return lambda part: graph.Passes(*passes)

    monkeypatch.setattr(loop, "at_once", giving(1))
    monkeypatch.setattr(head_by_head, "passes", giving(2))
    monkeypatch.setattr(by_length, "_of_groups", giving(3))

    def chosen(spec, queries, keys):
        def run(q, k, flags):
            return attend((q, k, k), spec, {"pad": flags} if spec.inputs else None, tiled=None)

        operand = tf.TensorSpec([None, None, 2, 3])
        of_flags = tf.TensorSpec([None, None], "bool")
        traced = tf.function(run).get_concrete_function(operand, operand, of_flags)
        of_keys = tf.zeros([1, keys, 2, 3]), tf.ones([1, keys], "bool")
        got = numpy(traced(tf.zeros([1, queries, 2, 3]), *of_keys))
        assert got.min() == got.max()
        return {1: "at once", 2: "head by head", 3: "tiles"}[got.max()]

    return chosen


GROUPS = hm.PerHead({0: hm.Window(3, 3)})  # each of them has a loop of its own
RANDOM = hm.RandomBlocks(32, 0.5, 0)  # tiles would look at nearly all keys


PAD = hm.KeyFlag("pad")


@pytest.mark.parametrize(
    ("spec", "logits"),
    [
        (hm.Window(3, 3), 2**19),
        (PAD, 2**19),
        (GROUPS, 2**22),
        (GROUPS & PAD, 2**22),
        (RANDOM, 2**23),
        (RANDOM & PAD, 2**23),
    ],
)
def test_up_to_how_many_logits_all_are_computed_at_once(which, spec, logits):
    assert which(spec, 1, logits // 2) == "at once"
    assert which(spec, 1, logits // 2 + 1) == "tiles"


def test_short_sequences_of_a_large_batch_go_head_by_head(which):
    with tuned(most_logits_at_once=2):
        assert which(hm.Window(3, 3), 256, 256) == "head by head"
        assert which(hm.Window(3, 3), 256, 257) == "tiles"


@pytest.mark.parametrize("queries", [2**14, 2**15, 2**16])
def test_lengths_whose_product_32_bits_do_not_hold(which, queries):
    assert which(hm.Window(3, 3), queries, 2**16) == "tiles"
