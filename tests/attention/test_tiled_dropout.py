"""Attention dropout in tiles: a fair draw, and anew in each step of a layer."""

import numpy as np
import pytest
from contract import numpy
from tiled_contract import attend, close, operands
from tolerance import assert_close

import keras_headmask as hm

RATE = 0.3


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


@pytest.mark.every_day("by tiles")
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
