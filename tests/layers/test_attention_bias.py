"""`attention_bias` of our layers: outputs, probabilities, files, what looks and a second rule."""

import keras
import pytest
from contract import by_hand, normal, numpy, random_biases
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned
from keras_headmask.retrofit.find import Found
from keras_headmask.retrofit.observe import watched

HEADS, LENGTH = 4, 11
RULE = hm.PerHead({1: hm.Chunk(4)}, hm.Window(3, 2))
X, BIAS = normal(2, LENGTH, 8), normal(HEADS, 1, LENGTH, seed=3)


def by_formula(layer, bias, rule=RULE):
    mask = mask_by_loops(rule, len(X), HEADS, LENGTH, LENGTH)
    return by_hand(layer, X, mask=mask, bias=bias)


@pytest.mark.parametrize("tiled", [None, True])
def test_outputs_and_probabilities(kind, tiled):
    layer = kind.built(HEADS, mask_spec=RULE, tiled=tiled)
    wanted, probabilities = by_formula(layer, BIAS)
    with tuned(**ALWAYS, local_tile=3, block=2):
        assert_close(numpy(layer(X, attention_bias=BIAS)), wanted, depth=3)
    output, made = layer(X, attention_bias=BIAS, return_attention_scores=True)
    assert_close(numpy(output), wanted, depth=3)
    assert_close(numpy(made), probabilities, depth=3)
    free = kind.built(HEADS, tiled=tiled)
    wanted = by_formula(free, BIAS, hm.Full())[0]
    assert_close(numpy(free(X, attention_bias=BIAS)), wanted, depth=3)


def test_in_a_file_for_who_looks_and_under_a_second_rule(kind, tmp_path):
    """The last two go by the hook of Keras."""
    x, bias = keras.Input((None, 8), name="x"), keras.Input((1, 1, None), name="bias")
    layer = kind.layer(HEADS, 4, mask_spec=RULE)
    model = keras.Model({"x": x, "bias": bias}, {"y": layer(x, attention_bias=bias)})
    random_biases(layer)
    data = {"x": X, "bias": normal(2, 1, 1, LENGTH)}
    wanted, probabilities = by_formula(layer, data["bias"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(numpy(loaded(data)["y"]), wanted, depth=3)
    with watched(Found(model).known) as seen:
        assert_close(numpy(model(data)["y"]), wanted, depth=3)
    assert_close(numpy(seen[0].probabilities), probabilities, depth=3)
    both = hm.apply_head_masks(model, hm.Window(1, 9), existing="and")
    wanted, _ = by_formula(layer, data["bias"], RULE & hm.Window(1, 9))
    assert_close(numpy(both(data)["y"]), wanted, depth=3)
