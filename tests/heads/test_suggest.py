"""Suggestions: heads made by rules give those rules back, and shares are those of loops."""

import itertools
import json

import keras
import numpy as np
import pytest
from contract import numpy
from keras import layers
from small_models import TOKENS, one_layer

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


def model_of(heads, layers_=1, causal=False):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
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
    again = hm.apply_head_masks(masked, found.rules, existing="and")
    np.testing.assert_array_equal(numpy(again(IDS)), numpy(masked(IDS)))


def test_kept_and_computed_are_those_of_loops():
    model = model_of(3)
    for weight in model.get_layer("attention_0").weights:  # so that heads differ
        weight.assign(3 * weight)
    found = suggest_rules(model, IDS, keep=0.6, end_ids=END, special_ids=SPECIAL, batch_size=2)
    probabilities = attention_probabilities(model, IDS)["attention_0"]
    for head, spec in enumerate(found.specs["attention_0"]):
        kept, pairs = 0.0, 0
        for text, of_text in zip(IDS, probabilities[:, head], strict=True):
            given = dict.fromkeys(spec.inputs, text[None])
            mask = numpy(hm.make_mask(spec, 24, 24, 1, given))[0, 0]
            for i in range(24):
                for j in range(24):
                    kept += of_text[i, j] * mask[i, j]
                    pairs += int(mask[i, j])
        assert found.kept[0, head] == pytest.approx(kept / IDS.size, abs=1e-5)
        assert found.kept[0, head] >= 0.6 - 1e-4
        assert found.computed[0, head] == pytest.approx(pairs / (3 * 24 * 24))


def test_less_to_keep_is_no_more_to_compute():
    model = model_of(4, 2)
    shares = [suggest_rules(model, IDS, keep=keep).computed for keep in (0.5, 0.8, 0.95, 1.0)]
    for less, more in itertools.pairwise(shares):
        assert (less <= more).all()
    assert (shares[-1] == 1).all()


def test_padding_counts_nowhere():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    model = keras.Model(ids, layers.MultiHeadAttention(3, 4, name="attention")(x, x))
    masked = hm.apply_head_masks(model, hm.PerHead({1: hm.Window(2, 0)}))
    padded = np.pad(IDS, ((0, 0), (0, 5)))
    one, other = (suggest_rules(masked, x, keep=0.9) for x in (IDS, padded))
    assert one.specs == other.specs
    np.testing.assert_allclose(one.kept, other.kept, atol=1e-5)
    np.testing.assert_array_equal(one.computed, other.computed)


def test_a_causal_model_counts_what_looks_back():
    rule = hm.PerHead({0: hm.Window(3, 3) & hm.Window(after=0), 1: hm.Window(4, 0)})
    masked = hm.apply_head_masks(model_of(3, causal=True), rule)
    found = suggest_rules(masked, IDS, keep=1.0)
    assert found.causal == (True,)
    assert found.specs["attention_0"][1:] == (hm.Window(4, 0), hm.Window(after=0))
    assert found.computed[0, 2] == 1
    assert found.computed[0, 1] == (24 * 5 - 10) / (24 * 25 / 2)
    by_rule = hm.apply_head_masks(model_of(2), hm.Window(after=0))
    assert set(suggest_rules(by_rule, IDS, keep=1.0).specs["attention_0"]) == {hm.Window(after=0)}


def test_rules_are_plain_json_by_layer():
    masked = hm.apply_head_masks(model_of(3, 2), {"1": hm.PerHead({"0-1": PREVIOUS})})
    found = suggest_rules(masked, IDS, keep=1.0)
    rules = json.loads(json.dumps(found.to_json()))["rules"]
    assert list(rules) == ["0", "1"]
    assert hm.MaskSpec.from_config(rules["0"]) == hm.Full()
    mask = hm.make_mask(hm.MaskSpec.from_config(rules["1"]), 5, 5, 3)
    np.testing.assert_array_equal(
        numpy(mask), numpy(hm.make_mask(hm.PerHead({"0-1": PREVIOUS}), 5, 5, 3))
    )
    assert "head 0  Full()" in str(found)


# --- By a metric ---------------------------------------------------------------------------------


def limited_heads(model):
    """How many heads see less than everything: a metric that is known beforehand."""
    found = hm.mask_specs(model)
    specs = [spec.for_head(head) for spec in found.values() for head in range(3)]
    return sum(not numpy(hm.make_mask(spec, 24, 24)).all() for spec in specs)


def test_heads_that_lost_most_are_opened_until_the_metric_is_near():
    model = model_of(3, 2)
    cheap = suggest_rules(model, IDS, keep=0.5)
    assert (cheap.computed < 1).all()  # all six heads
    found = suggest_rules(model, IDS, keep=0.5, metric=limited_heads, tolerance=2, better="lower")
    assert found.metrics == (0, 6, 5, 4, 3, 2)
    opened = np.argwhere((cheap.computed < 1) & (found.computed == 1))
    assert len(opened) == 4
    assert cheap.kept[found.computed == 1].max() <= cheap.kept[found.computed < 1].min()
    assert "5 models were tried, the last 2" in str(found)


def test_padding_is_as_in_a_model_under_a_rule():
    """Stock attention gives padding a mean of values, and attention under a rule zeros."""

    def of_padding(tried):
        return abs(numpy(tried(TOKENS))[0, -1]).max()

    model = one_layer()
    under_a_rule = of_padding(hm.apply_head_masks(model, hm.PerHead({0: hm.Window(0, 0)})))
    found = suggest_rules(model, TOKENS, keep=0.5, metric=of_padding)
    assert found.metrics == (pytest.approx(under_a_rule, rel=1e-5),) * 2
    assert of_padding(model) != pytest.approx(under_a_rule, rel=1e-2)


def test_a_head_of_a_causal_layer_is_opened_to_what_is_behind():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(60, 8)(ids)
    x += layers.MultiHeadAttention(2, 4, name="causal")(x, x, use_causal_mask=True)
    model = keras.Model(ids, x + layers.MultiHeadAttention(2, 4, name="open")(x, x))
    values = itertools.chain([1], itertools.repeat(0))
    found = suggest_rules(model, IDS, keep=0.5, metric=lambda tried: next(values))
    assert found.causal == (True, False)
    assert found.specs == {"causal": (hm.Window(after=0),) * 2, "open": (hm.Full(),) * 2}
    assert (found.computed == 1).all()
    for head in ((2, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=rf"There is no head {head[1]} of layer {head[0]}"):
            found.opened([head])


def test_where_nothing_helps_all_heads_are_open():
    model = model_of(2)
    metrics = iter([1, 0, 0])
    found = suggest_rules(model, IDS, keep=0.5, metric=lambda tried: next(metrics))
    assert found.metrics == (1, 0, 0)
    assert (found.computed == 1).all()
    assert found.rules == {"0": hm.Full().get_config()}


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


def test_copies_that_a_metric_gets_are_compiled_as_the_model_is():
    model = model_of(2)
    model.compile("sgd", lambda true, made: (true - made) ** 2)
    true = numpy(model(IDS)) + 1

    def loss(tried):
        assert tried is not model
        return tried.evaluate(IDS, true, verbose=0)

    found = suggest_rules(model, IDS, keep=0.5, metric=loss, better="lower", tolerance=1e9)
    assert found.metrics[0] == pytest.approx(1, rel=1e-5)
    assert len(found.metrics) == 2


@pytest.mark.tensorflow
def test_a_picture():
    pytest.importorskip("matplotlib")
    found = suggest_rules(model_of(2, 2), IDS)
    (image,) = found.plot().axes[0].images
    np.testing.assert_array_equal(np.array(image.get_array()), found.computed)


@pytest.mark.parametrize(
    ("inputs", "more", "error", "match"),
    [
        (IDS, {"keep": 0}, ValueError, "above 0"),
        (IDS, {"keep": 1.5}, ValueError, "keep"),
        (IDS, {"sinks": 0}, ValueError, "sinks"),
        (IDS, {"better": "more"}, ValueError, "`better` must be"),
        (IDS, {"metric": "accuracy"}, TypeError, "`metric` must be a function"),
        (IDS, {"tolerance": -0.1}, ValueError, "`tolerance` must be finite and from 0 on"),
        (IDS, {"metric": lambda model: None}, ValueError, "one finite number"),
        (np.ones((2, 5), "int32"), {}, ValueError, "All token ids are equal"),
        (IDS[:0], {}, ValueError, "texts"),
        (IDS[:, :1], {}, ValueError, "at least 2 tokens"),
        (IDS, {"end_ids": 99_999}, ValueError, "`end_ids` must stand in the texts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused(inputs, more, error, match):
    with pytest.raises(error, match=match):
        suggest_rules(model_of(2), inputs, **more)
