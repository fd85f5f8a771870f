"""A masked model as an object of Keras: copied, used up, saved, loaded, exported, trained."""

import json

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from small_models import CHUNK, TOKENS, Block, apply, leak, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm

BACKEND = keras.backend.backend()
BY_SENTENCE = hm.PerHead({0: hm.SameSentence(9)})


# --- Copies ---------------------------------------------------------------------------------------


def test_a_copy_leaves_the_model_as_it_was():
    stock = one_layer()
    before, weights = numpy(stock(TOKENS)), stock.get_weights()
    masked = hm.apply_head_masks(stock, CHUNK)
    assert [w.path for w in masked.weights] == [w.path for w in stock.weights]
    masked.compile("sgd", "mse")
    masked.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
    assert max(abs(a - b).max() for a, b in zip(masked.get_weights(), weights, strict=True)) > 0
    np.testing.assert_array_equal(numpy(stock(TOKENS)), before)


@pytest.mark.parametrize("rule", [CHUNK, BY_SENTENCE], ids=["positions", "inputs"])
def test_without_a_copy_the_model_itself_is_masked(rule):
    stock = one_layer()
    kernel = stock.get_layer("attention").query_dense.kernel
    expected = numpy(hm.apply_head_masks(stock, rule)(TOKENS))
    masked = hm.apply_head_masks(stock, rule, copy=False)
    assert masked is stock
    assert stock.get_layer("attention").query_dense.kernel is kernel
    np.testing.assert_array_equal(numpy(stock(TOKENS)), expected)
    np.testing.assert_array_equal(stock.get_weights()[1], numpy(kernel))


def test_a_copy_of_a_masked_model_has_its_state():
    """A rule that reads inputs adds layers, which stand in another place in the copy."""
    x = keras.Input((None, 8))
    y = layers.Normalization(name="normal")(Block(name="first")(Block(name="second")(x)))
    stock = keras.Model(x, y)
    stock.get_layer("normal").adapt(normal(4, 7, 8, seed=1))
    stock.get_layer("second").attention.query_dense.trainable = False
    masked = apply(stock, hm.PerHead({0: hm.SameSegment("ids")}), add_inputs=True)
    again = hm.unmasked(masked)
    assert not again.get_layer("second").attention.query_dense.trainable
    assert again.get_layer("first").attention.query_dense.trainable
    given = normal(2, 7, 8)
    np.testing.assert_allclose(numpy(again(given)), numpy(stock(given)), rtol=0, atol=1e-5)


def test_a_model_that_cannot_be_copied():
    class Secret(layers.Layer):
        def __init__(self, secret):
            super().__init__()

        def call(self, x):
            return x

        def get_config(self):
            return {}

    x = keras.Input((7, 8))
    model = keras.Model(x, Secret(3)(layers.MultiHeadAttention(4, 3)(x, x)))
    with pytest.raises(ValueError, match=r"(?s)Copying .* is not possible: .*copy=False"):
        apply(model, CHUNK)
    assert apply(model, CHUNK, copy=False)(normal(2, 7, 8)).shape == (2, 7, 8)

    block = Block(name="block")  # whose inner layer stands in the graph, too: a config parts them
    y = block(x)
    model = keras.Model(x, [y, block.attention(y, y)])
    with pytest.raises(ValueError, match=r"(?s)Copying .* is not possible: .*copy=False"):
        apply(model, CHUNK)


# --- Files ----------------------------------------------------------------------------------------


def test_weight_files_of_stock_and_masked_are_the_same(tmp_path):
    stock = stack(2)
    masked = apply(stack(2), hm.SameSegment("parts"), add_inputs=True)
    stock.save_weights(tmp_path / "stock.weights.h5")
    masked.load_weights(tmp_path / "stock.weights.h5")
    for a, b in zip(masked.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    masked.set_weights([w + 1 for w in masked.get_weights()])
    masked.save_weights(tmp_path / "masked.weights.h5")
    stock.load_weights(tmp_path / "masked.weights.h5")
    for a, b in zip(masked.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# By what is changed in the config of a masked model, and in its only rule.
EDITED = {
    "no rules": ({"rules": []}, {}, r"no rule in 'rules', .* without its mask\. Received: \[\]"),
    "rules of null": ({"rules": None}, {}, r"no rule in 'rules', .* Received: None"),
    "no layers": ({}, {"layers": []}, r"'stack', which has 1, numbered from 0\. Received: \[\]"),
    "a layer too far": ({}, {"layers": [7]}, r"'stack', which has 1, .* Received: \[7\]"),
    "a layer from the end": ({}, {"layers": [-1]}, r"'stack', which has 1, .* \[-1\]"),
    "half a layer": ({}, {"layers": [0.0]}, r"'stack', which has 1, .* \[0\.0\]"),
    "a head too far": ({}, {"spec": hm.PerHead({9: CHUNK}).get_config()}, "names head 9, but"),
    "no key for rules": (
        {"rules": ...},
        {},
        r"lacks \['rules'\], which format 1 of keras_headmask",
    ),
    "no number": ({"attention": ...}, {}, r"lacks \['attention'\], which format 1"),
    "no inputs": ({"inputs": ...}, {}, r"lacks \['inputs'\], which format 1"),
    "no key for layers": ({}, {"layers": ...}, r"lacks \['layers'\], which format 1"),
}


def edited(config, changes):
    for key, value in changes.items():
        config[key] = value
        if value is ...:
            del config[key]


@pytest.mark.parametrize("case", EDITED)
def test_an_edited_file_never_loads_without_its_rule(case):
    config = json.loads(apply(stack(1), CHUNK).to_json())
    of_model, of_rule, message = EDITED[case]
    edited(config["config"]["rules"][0], of_rule)
    edited(config["config"], of_model)
    with pytest.raises(ValueError, match=message):
        keras.models.model_from_json(json.dumps(config))


# --- Training in other ways -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype_policy", ["mixed_bfloat16", "float64"], indirect=True)
def test_other_dtypes(dtype_policy, tmp_path):
    stock = one_layer()
    full = hm.apply_head_masks(stock, hm.Full())
    np.testing.assert_array_equal(numpy(full(TOKENS)), numpy(stock(TOKENS)))
    # In bfloat16, 256 and 257 are one number; as ids they must stay two.
    masked = hm.apply_head_masks(stock, hm.SameSegment("parts"), add_inputs=True)
    parts = np.array([[256, 256, 256, 257, 257, 257, 257]] * 2, "int32")
    assert leak(masked, {"parts": parts}) == 0 < leak(stock)
    masked.compile("sgd", "mse")
    history = masked.fit([TOKENS, parts], np.ones((2, 7, 8), "float32"), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    masked.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    given = [TOKENS, parts]
    np.testing.assert_array_equal(numpy(again(given)), numpy(masked(given)))


def test_compiled_by_xla():
    masked = hm.apply_head_masks(one_layer(), BY_SENTENCE)
    weights = masked.get_weights()
    trained = []
    for jit_compile in (True, False):
        masked.set_weights(weights)
        if BACKEND == "torch" and jit_compile:
            continue  # torch.compile is another matter, and slow to start
        how = {"jit_compile": jit_compile, "run_eagerly": not jit_compile}
        masked.compile(keras.optimizers.SGD(0.1), "mse", **how)
        masked.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
        trained.append(masked.get_weights())
    for a, b in zip(trained[0], trained[-1], strict=True):
        assert_close(a, b, depth=3)


@pytest.mark.parametrize(("where", "copy"), [("block", True), ("attention", False)])
def test_rematerialised_layers_find_the_rule_again(where, copy):
    """Gradients are those of plain training: the second run has the same rule."""

    def trained(remat):
        keras.utils.set_random_seed(5)
        mode = ("full" if where == "block" else "list_of_layers") if remat else None
        with keras.RematScope(mode=mode, layer_names=["inner"]):
            block = Block(layers.MultiHeadAttention(4, 3, name="inner"), name="block")
            ids = keras.Input((7,), dtype="int32", name="token_ids")
            x = block(layers.Embedding(12, 8)(ids))
        model = apply(
            keras.Model(ids, x), hm.PerHead({0: hm.SameSentence(9)}, default=CHUNK), copy=copy
        )
        for layer in (model.get_layer("block"), model.get_layer("block").attention):
            assert getattr(layer._remat_mode, "mode", None) == mode  # in a copy, too
        model.compile(
            keras.optimizers.SGD(0.1), "mse", run_eagerly=BACKEND == "tensorflow", jit_compile=False
        )
        model.fit(TOKENS, np.ones((2, 7, 8), "float32"), epochs=2, verbose=0)
        return model.get_weights()

    for plain, again in zip(trained(False), trained(True), strict=True):
        assert_close(again, plain)
