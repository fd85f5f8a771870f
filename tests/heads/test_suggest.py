"""Suggestions: heads made by rules give those rules back, and shares are those of loops."""

import json

import keras
import numpy as np
import pytest
from contract import numpy
from keras import layers

import keras_headmask as hm
from keras_headmask.heads.reading import attention_probabilities
from keras_headmask.heads.suggest import suggest_rules

END, SPECIAL = 9, (5, 4)
IDS = np.random.default_rng(0).integers(1, 12, (3, 24)).astype("int32")
IDS[:, 0] = SPECIAL[0]
PREVIOUS = hm.Window(1, 0) & ~hm.Window(0, 0)
SENTENCE = hm.SameSentence(END)
FAMILY = [
    *(hm.Nothing(), hm.Window(0, 0), PREVIOUS, hm.Full(), SENTENCE),
    hm.recipes.sentences(END, SPECIAL),
    *(hm.Window(2, 0), hm.Window(4, 4), hm.Keys(0, 1) | hm.Window(4, 4)),
]


def model_of(heads, layers_=1, causal=False, mask_zero=False):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=mask_zero)(ids)
    for i in range(layers_):
        attention = layers.MultiHeadAttention(heads, 4, name=f"attention_{i}")
        x = layers.Add()([x, attention(x, x, use_causal_mask=causal)])
    return keras.Model(ids, x)


def test_heads_made_by_rules_give_them_back():
    """All heads look at all that they may: so nothing smaller keeps it all."""
    rule = hm.PerHead(dict(enumerate(FAMILY)))
    masked = hm.apply_head_masks(model_of(len(FAMILY), 2), rule)
    found = suggest_rules(masked, IDS, keep=1.0, end_ids=END, special_ids=SPECIAL)
    for specs in found.specs.values():
        assert list(specs) == FAMILY
    rules = json.loads(json.dumps(found.rules))
    assert list(rules) == ["^attention_0$", "^attention_1$"]
    again = hm.apply_head_masks(masked, rules, existing="and")
    np.testing.assert_array_equal(numpy(again(IDS)), numpy(masked(IDS)))


def test_kept_and_computed_are_those_of_loops_where_padding_does_not_count():
    model, padded = model_of(3, mask_zero=True), np.pad(IDS, ((0, 0), (0, 5)))
    for weight in model.get_layer("attention_0").weights:  # so that heads differ
        weight.assign(3 * weight)
    how = {"keep": 0.6, "end_ids": END, "special_ids": SPECIAL}
    found = suggest_rules(model, padded, batch_size=2, **how)
    assert found.specs == suggest_rules(model, IDS, **how).specs
    probabilities = attention_probabilities(model, IDS)["attention_0"]
    for head, spec in enumerate(found.specs["attention_0"]):
        kept, pairs = 0.0, 0
        for text, of_text in zip(IDS, probabilities[:, head], strict=True):
            given = dict.fromkeys(spec.inputs, text[None])
            mask = numpy(hm.make_mask(spec, 24, 24, 1, given))[0, 0]
            for i, j in np.ndindex(24, 24):
                kept += of_text[i, j] * mask[i, j]
                pairs += int(mask[i, j])
        assert found.kept[0, head] == pytest.approx(kept / IDS.size, abs=1e-5)
        assert found.kept[0, head] >= 0.6 - 1e-4
        assert found.computed[0, head] == pytest.approx(pairs / (3 * 24 * 24))
    assert found.computed.max() < 1


def test_a_causal_model_counts_what_looks_back():
    rule = hm.PerHead({0: hm.Window(3, 3) & hm.Window(after=0), 1: hm.Window(4, 0)})
    masked = hm.apply_head_masks(model_of(3, causal=True), rule)
    found = suggest_rules(masked, IDS, keep=1.0)
    assert found.causal == (True,)
    assert found.specs["attention_0"][1:] == (hm.Window(4, 0), hm.Window(after=0))
    assert found.computed[0, 2] == 1
    assert found.computed[0, 1] == (24 * 5 - 10) / (24 * 25 / 2)
    by_rule = hm.apply_head_masks(model_of(2), hm.Window(after=0))
    (rule,) = suggest_rules(by_rule, IDS, keep=1.0).rules.values()
    assert hm.MaskSpec.from_config(rule) == hm.Window(after=0)  # of both heads


def test_a_layer_that_runs_twice_has_one_rule():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(60, 8)(ids)
    attention = keras.layers.MultiHeadAttention(2, 4, name="twice")
    x += attention(x, x)
    model = keras.Model(ids, x + attention(x, x))
    masked = hm.apply_head_masks(model, hm.PerHead({0: hm.Window(1, 1)}))
    found = suggest_rules(masked, IDS, keep=1.0)
    assert found.specs == {"twice": (hm.Window(1, 1), hm.Full())}
    assert hm.mask_specs(hm.apply_head_masks(model, found.rules)).keys() == {"twice"}


@pytest.mark.parametrize(("keep", "message"), [(0, "above 0"), (1.5, "lie between 0 and 1")])
def test_a_share_that_cannot_be_kept_is_refused(keep, message):
    with pytest.raises(ValueError, match=f"`keep` must (be )?{message}"):
        suggest_rules(model_of(2), IDS, keep=keep)
