"""Keras' grouped-query attention in a model that exists, under a rule."""

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras_versions import needs
from tolerance import assert_close

import keras_headmask as hm

RULE = hm.PerHead({0: hm.Window(1, 0), 1: hm.SameSentence(9), 3: hm.Nothing()})
IDS = np.array([[1, 9, 2, 3, 9, 4], [5, 6, 7, 9, 8, 9]], "int32")


def model_with(layer, **call):
    """Ids, an embedding, the layer."""
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(10, 12)(ids)
    model = keras.Model(ids, layer(x, x, **call))
    for number, weight in enumerate(model.weights):
        weight.assign(normal(*weight.shape, seed=number))
    return model


def stock(**more):
    return keras.layers.GroupQueryAttention(3, 4, 2, name="attention", **more)


def ours(rule, **call):
    """The same model, made with our layer."""
    layer = hm.PerHeadMaskedGroupedQueryAttention(3, 4, 2, mask_spec=rule, name="attention")
    return model_with(layer, **call)


def with_ids(rule):
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    layer = hm.PerHeadMaskedGroupedQueryAttention(3, 4, 2, mask_spec=rule, name="attention")
    x = keras.layers.Embedding(10, 12)(ids)
    model = keras.Model(ids, layer(x, x, mask_inputs={"token_ids": ids}))
    for number, weight in enumerate(model.weights):
        weight.assign(normal(*weight.shape, seed=number))
    return model


@pytest.mark.parametrize("causal", [False, True])
def test_full_is_stock(causal):
    model = model_with(stock(), use_causal_mask=causal)
    full = hm.apply_head_masks(model, hm.Full())
    np.testing.assert_array_equal(numpy(full(IDS)), numpy(model(IDS)))


def test_it_obeys_as_our_layer_does():
    masked = hm.apply_head_masks(model_with(stock()), RULE)
    assert_close(numpy(masked(IDS)), numpy(with_ids(RULE)(IDS)))
    assert abs(numpy(masked(IDS)) - numpy(model_with(stock())(IDS))).max() > 1e-2


@needs("sliding_window")
def test_the_causal_flag_and_its_own_window_stay():
    model = model_with(stock(sliding_window=2), use_causal_mask=True)
    masked = hm.apply_head_masks(model, RULE)
    both = RULE & hm.Window(1, 1) & hm.recipes.causal()
    assert_close(numpy(masked(IDS)), numpy(with_ids(both)(IDS)))


def test_probabilities_are_those_of_query_heads():
    ids = keras.Input((6,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(10, 12)(ids)
    model = keras.Model(ids, stock()(x, x, return_attention_scores=True))
    masked = hm.apply_head_masks(model, RULE)
    _, probabilities = masked(IDS)
    allowed = numpy(hm.make_mask(RULE, 6, 6, num_heads=4, mask_inputs={"token_ids": IDS}))
    assert probabilities.shape == (2, 4, 6, 6)
    assert numpy(probabilities)[~allowed].max() == 0
    assert_close(numpy(probabilities).sum(-1), allowed.any(-1).astype("float32"))


def test_it_is_saved_copied_and_unmasked(tmp_path):
    model = model_with(stock())
    masked = hm.apply_head_masks(model, RULE)
    assert list(hm.mask_specs(masked).values()) == [RULE]
    masked.save(tmp_path / "masked.keras")
    for again in (
        keras.saving.load_model(tmp_path / "masked.keras"),
        hm.apply_head_masks(model, RULE, copy=False),
    ):
        np.testing.assert_array_equal(numpy(again(IDS)), numpy(masked(IDS)))
    plain = hm.unmasked(masked)
    assert type(plain.get_layer("attention")) is keras.layers.GroupQueryAttention
    np.testing.assert_array_equal(numpy(plain(IDS)), numpy(model_with(stock())(IDS)))


def test_a_rule_beside_the_own_rule_of_our_layer():
    causal = hm.recipes.causal()
    with pytest.raises(ValueError, match="has a rule already"):
        hm.apply_head_masks(ours(causal), RULE)
    both = hm.apply_head_masks(ours(causal), RULE, existing="and")
    assert_close(numpy(both(IDS)), numpy(with_ids(RULE & causal)(IDS)))
    other = hm.apply_head_masks(ours(causal), RULE, existing="replace")
    assert_close(numpy(other(IDS)), numpy(with_ids(RULE)(IDS)))


def test_a_head_that_no_query_has_is_refused():
    message = "names head 12, but there are 4 query heads, numbered 0 to 3.* 2 of keys and values"
    with pytest.raises(ValueError, match=message):
        hm.apply_head_masks(model_with(stock()), hm.PerHead({12: hm.Nothing()}))
    with pytest.raises(ValueError, match=message):
        ours(hm.PerHead({12: hm.Nothing()}))
