"""Arguments that were taken in silence and meant something else."""

import warnings

import keras
import numpy as np
import pytest
from contract import GROUPED, MULTI_HEAD, normal, numpy

import keras_headmask as hm
from keras_headmask import masks

BACKEND = keras.backend.backend()
X, KEYS = normal(4, 2, 2, 3), normal(4, 5, 2, 3)
IDS = np.array([[1, 1, 2, 2, 2]])


# --- One batch ---


def test_mask_inputs_agree_on_the_batch_among_themselves():
    spec, all_three = hm.SameSegment("a") & hm.KeyFlag("b"), np.repeat(IDS, 3, 0)
    with pytest.raises(ValueError, match=r"\['b'\]` has 3 examples where the batch has 1"):
        hm.make_mask(spec, 5, 5, mask_inputs={"a": IDS, "b": all_three})
    with pytest.raises(ValueError, match=r"\['a'\]` has 1 example where the batch has 3"):
        hm.make_mask(hm.SameSegment("a"), 5, 5, mask_inputs={"a": (IDS, all_three)})


def test_tensors_of_other_batches_or_lengths_are_refused(kind):
    layer, x = kind.layer(2, 4, mask_spec=hm.Window(2, 2)), normal(3, 5, 8)
    for given in (
        {"query": x, "value": x[:1]},
        {"query": x[:1], "value": x},
        {"query": x[:2], "value": x},
        {"query": x, "value": x, "key": x[:1]},
        {"query": x, "value": x, "key": normal(3, 7, 8)},
    ):
        with pytest.raises(ValueError, match=r"`value` \(B, S, Hk, Dv\) do not fit. Rec"):
            layer(**given)


# --- Integer masks ---

ADDITIVE = np.array([[0, -10000, 0, -10000, -10000]])


@pytest.mark.parametrize("value", [-10000, 2])
def test_a_mask_of_other_integers_than_0_and_1_is_refused(kind, value):
    mask, x = np.where(ADDITIVE == 0, 0, value), normal(1, 5, 8)
    layer = kind.layer(2, 4)
    for call in (
        lambda: hm.and_masks(mask),
        lambda: hm.dot_product_attention(X, KEYS, KEYS, mask=mask),
        lambda: layer(x, attention_mask=mask),
        lambda: layer(x, query_mask=mask),
        lambda: layer(x, value_mask=mask),
        lambda: layer(x, key_mask=mask),
        lambda: hm.make_mask(hm.MaskInput("m"), 2, 5, mask_inputs={"m": mask}),
        lambda: hm.not_mask(keras.ops.convert_to_tensor(mask)),
    ):
        with pytest.raises(ValueError, match=rf"integer {value}.*from_additive"):
            call()


@pytest.mark.skipif(BACKEND == "torch", reason="values are always known, and refused as above")
def test_an_additive_mask_of_integers_opens_nothing_in_a_graph():
    """Wherever it is given: as it is, as a Keras mask, or as what a rule reads."""
    x, row = keras.Input((5, 8)), keras.Input((5,), dtype="int32")
    whole, scores = keras.Input((5, 5), dtype="int32"), {}
    given = {f"{name}_mask": {f"{name}_mask": row} for name in ("query", "value", "key")}
    given["attention_mask"] = {"attention_mask": whole}
    for spec in (hm.MaskInput("m"), hm.KeyFlag("m"), hm.QueryFlag("m")):
        given[spec] = {"mask_inputs": {"m": whole if spec == hm.MaskInput("m") else row}}
    for where, arguments in given.items():
        layer = MULTI_HEAD.layer(2, 4, mask_spec=where if isinstance(where, hm.MaskSpec) else None)
        scores[repr(where)] = layer(x, return_attention_scores=True, **arguments)[1]
    model = keras.Model([x, row, whole], scores)
    for mask, opens in ((ADDITIVE == 0, True), (ADDITIVE, False)):
        mask = mask.astype("int32")
        found = model.predict([normal(1, 5, 8), mask, np.repeat(mask[None], 5, 1)], verbose=0)
        assert {where: one.any() for where, one in found.items()} == dict.fromkeys(scores, opens)


# --- A cached step without its offset ---

FORGOTTEN = r"positions 0 to 1\. .*`query_offset=3`.*`query_offset=0`"
ON_POSITIONS = [hm.Window(1, 0), hm.Chunk(2), hm.PerHead({0: hm.Queries(1)}), ~hm.Window(1, 1)]


def decoded(spec, **more):
    return hm.dot_product_attention(X, KEYS, KEYS, mask_spec=spec, **more)


def by_layer(spec, kind=MULTI_HEAD, **more):
    layer, x = kind.layer(2, 4, mask_spec=spec), normal(4, 5, 8)
    return layer(x[:, :2], x, **more)


def causal(_, **more):
    return by_layer(hm.Full(), GROUPED, use_causal_mask=True, **more)


@pytest.mark.parametrize("call", [decoded, by_layer, causal])
@pytest.mark.parametrize("spec", ON_POSITIONS, ids=repr)
def test_fewer_queries_than_keys_and_no_offset_warns(call, spec):
    with pytest.warns(UserWarning, match=FORGOTTEN):
        unsaid = call(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if call is decoded:
            np.testing.assert_array_equal(numpy(unsaid), numpy(call(spec, query_offset=0)))
        call(spec, query_offset=0)
        call(spec, query_offset=3)


@pytest.mark.parametrize("spec", [None, hm.Full(), hm.Keys(1), hm.MaskInput("m")], ids=repr)
def test_what_does_not_read_the_positions_of_queries_does_not_warn(spec):
    given = {"mask_inputs": {"m": np.ones((2, 5), "bool")}} if spec == hm.MaskInput("m") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        decoded(spec, **given)
        by_layer(spec, **given)


# --- XLA ---


@pytest.mark.tensorflow
@pytest.mark.parametrize("is_retrofitted", [False, True])
def test_why_there_is_no_xla_where_lengths_are_unknown(is_retrofitted):
    x, rule = keras.Input((None, 8)), hm.Window(2, 0)
    if is_retrofitted:
        stock = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
        model = hm.apply_head_masks(stock, rule)
    else:
        model = keras.Model(x, GROUPED.layer(2, 4, mask_spec=rule)(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.compile("sgd", "mse")
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="not compiled by XLA.*lengths are not known.*keras.Input"):
        model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile is False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.compile("sgd", "mse", jit_compile=True)
    assert not any("lengths are not known" in str(w.message) for w in said), "said once"


# --- What belongs elsewhere ---


RULE, PLACED = hm.Window(1, 1), r"Pass the rule when .*\(\.\.\., mask_spec="
BY_NAME = r"must be a tensor.*a dict of \['ids'\].*by name: layer\(x, mask_inputs=\{'ids': \.\.\.\}"
EMBED = r"must be embeddings.*Embed ids first.*`mask_inputs`"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer, x: layer(x, RULE), PLACED),
        (lambda layer, x: layer(x, mask_spec=RULE), PLACED),
        (lambda layer, _: layer(keras.Input((5, 8)), mask_spec=RULE.get_config()), PLACED),
        (lambda layer, x: type(layer)(2, 4, 2, RULE), "takes no rule. Pass the rule by name: "),
        (lambda layer, x: layer(IDS), EMBED),
        (lambda layer, x: layer(keras.Input((None,), dtype="int32")), EMBED),
        (lambda layer, x: layer(query=IDS, value=IDS), EMBED),
        (lambda layer, x: layer(x, {"ids": IDS}), f"`value` {BY_NAME}"),
        (lambda layer, x: layer(x, x, {"ids": IDS}), f"`key` {BY_NAME}"),
        (lambda layer, x: layer(x, attention_mask={"ids": IDS}), f"`attention_mask` {BY_NAME}"),
    ],
)
def test_what_stands_in_the_wrong_place(kind, call, message):
    with pytest.raises(TypeError, match=message):
        call(kind.layer(2, 4, mask_spec=hm.SameSegment("ids")), normal(1, 5, 8))


# --- Masks of rank 3 ---


def by_layers(mask, batch=1):
    return MULTI_HEAD.layer(2, 4)(normal(batch, 5, 8), attention_mask=mask)


def test_a_mask_for_each_example_or_each_head_warns_once():
    masks._warn_of_heads.cache_clear()
    mask = np.tril(np.ones((2, 5, 5), bool))
    with pytest.warns(UserWarning, match=r"as many heads as examples.*mask\[None\].*mask\[:, None"):
        by_layers(mask, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_layers(mask, 2)
        masks._warn_of_heads.cache_clear()
        for other, batch in ((mask[:, None], 2), (mask[None], 2), (mask[:1], 2), (mask[:1], 1)):
            by_layers(other, batch)
        by_layers(np.ones((3, 5, 5), bool), 3)
