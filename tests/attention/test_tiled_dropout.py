"""Attention dropout in tiles: a fair draw, the same in any tiling, found again by the gradient."""

import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from tiled_contract import BACKEND, SCALE, UNSORTED_IDS, attend, close, operands, tiles, weighted
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

RATE = 0.3
RULES = {
    "positions": (hm.PerHead({1: hm.Window(8, 3), 3: hm.Full()}, hm.Window(after=0)), {}),
    "data": (hm.SameSegment("ids") | hm.Window(2, 2), {"ids": UNSORTED_IDS}),
}


def probabilities(qk, spec, inputs, **more):
    """The values are unit vectors, so the context `(B, H, T, S)` is the probabilities."""
    batch, keys, heads, _ = qk[1].shape
    units = np.broadcast_to(
        np.eye(keys, dtype="float32")[None, :, None], (batch, keys, heads, keys)
    )
    return numpy(attend((*qk, units.copy()), spec, inputs, **more)).transpose(0, 2, 1, 3)


def test_a_fair_draw():
    qk = operands(2, 300, 300, 3, size=8)[:2]
    plain = probabilities(qk, hm.Window(40, 40), {})
    dropped = probabilities(qk, hm.Window(40, 40), {}, dropout=RATE, seed=1)
    allowed = plain > 0
    kept = dropped > 0
    assert not (kept & ~allowed).any(), "nothing is opened"
    assert_close(dropped[kept], plain[kept] / (1 - RATE))
    spread = np.sqrt(RATE * (1 - RATE))
    assert abs(kept[allowed].mean() - (1 - RATE)) < 5 * spread / np.sqrt(allowed.sum())
    for axis in range(4):  # no example, head, query or key is favoured: deviations are normal
        others = tuple({0, 1, 2, 3} - {axis})
        count = allowed.sum(others)
        deviation = (kept.sum(others) - (1 - RATE) * count) / (spread * np.sqrt(count))
        assert np.abs(deviation).max() < 5
        assert len(deviation) < 100 or 0.8 < deviation.std() < 1.2
        # Neighbours, and the last with the first, have nothing in common.
        other = np.roll(allowed, 1, axis)
        pairs = allowed & other
        common = np.corrcoef(kept[pairs], np.roll(kept, 1, axis)[pairs])[0, 1]
        assert abs(common) < 5 / np.sqrt(pairs.sum())


def test_an_int_seed_draws_the_same_again_and_another_differs():
    qk = operands(3, 23, 23, 4)[:2]
    spec, inputs = RULES["data"]
    one, again, other = (
        probabilities(qk, spec, inputs, dropout=RATE, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert ((one > 0) != (other > 0)).any()


@pytest.mark.parametrize("name", RULES)
def test_the_draw_does_not_depend_on_the_tiles(name):
    qk = operands(3, 23, 23, 4)[:2]
    spec, inputs = RULES[name]
    drawn = []
    for sizes in ((4, 6, 3), (23, 23, 23), (5, 2, 2)):
        with tiles(*sizes):
            drawn.append(probabilities(qk, spec, inputs, dropout=RATE, seed=5))
    for other in drawn[1:]:
        close(other, drawn[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "loop"])
def test_gradients_are_those_of_the_probabilities_that_were_kept(name, unrolled):
    if not unrolled and BACKEND != "tensorflow":
        pytest.skip("only TensorFlow has a loop of its own")
    q, k, v = operands(3, 23, 23, 4)
    spec, inputs = RULES[name]
    more = {"dropout": RATE, "seed": 3}
    with tiles(4, 6, 3), tuned(most_unrolled=64 if unrolled else 0):
        plain = probabilities((q, k), spec, inputs)
        drawn = probabilities((q, k), spec, inputs, **more)
        factors = np.where(plain > 0, drawn / np.where(plain > 0, plain, 1), 0)

        def tiled(q, k, v):
            return weighted(attend((q, k, v), spec, inputs, **more))

        got = gradient(tiled, q, k, v)

    def definition(q, k, v):
        scores = ops.einsum("bthd,bshd->bhts", q, k) * SCALE
        scores = ops.where(ops.convert_to_tensor(plain > 0), scores, -1e9)
        kept = ops.softmax(scores, axis=-1) * ops.convert_to_tensor(factors.astype("float32"))
        alive = ops.convert_to_tensor((plain > 0).any(-1, keepdims=True).astype("float32"))
        return weighted(ops.einsum("bhts,bshd->bthd", kept * alive, v))

    for of, ours, wanted in zip("qkv", got, gradient(definition, q, k, v), strict=True):
        close(ours, wanted, f"gradient of {of}")


def test_the_layer_drops_in_training_alone_and_anew_each_time(tiny):
    layer = hm.PerHeadMaskedMultiHeadAttention(
        2, 4, mask_spec=hm.Window(2, 2), dropout=0.5, tiled=True
    )
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    plain, first, second = numpy(layer(x)), *(numpy(layer(x, training=True)) for _ in range(2))
    close(layer(x), plain)
    for one, other in ((plain, first), (first, second)):
        assert not np.allclose(one, other)
    many = np.mean([numpy(layer(x, training=True)) for _ in range(200)], 0)
    np.testing.assert_allclose(many, plain, atol=0.35)  # on average nothing changes
