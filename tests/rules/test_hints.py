"""What stands near a spec, where a spec is expected: the error shows what to write, and where."""

import re

import numpy as np
import pytest
from small_models import one_layer

import keras_headmask as hm

X = np.ones((1, 3, 2, 4), "float32")
pytestmark = pytest.mark.tensorflow  # the same on every backend

CALLED = {  # what is called with a rule, and how an error writes it
    lambda rule: hm.make_mask(rule, 3, 3): r"hm\.make_mask\({}, queries, keys\)",
    lambda rule: hm.draw(rule, 3): r"hm\.draw\({}, \.\.\.\)",
    lambda rule: hm.plot(rule, 3): r"hm\.plot\({}, \.\.\.\)",
    lambda rule: hm.lint(rule): r"hm\.lint\({}\)",
    lambda rule: hm.dot_product_attention(
        X, X, X, mask_spec=rule
    ): r"hm\.dot_product_attention\(query, key, value, mask_spec={}\)",
    lambda rule: hm.PerHeadMaskedMultiHeadAttention(
        2, 4, mask_spec=rule
    ): r"PerHeadMaskedMultiHeadAttention\(\.\.\., mask_spec={}\)",
    lambda rule: hm.PerHead({0: rule}): r"hm\.PerHead\(\{{0: {}\}}\)",
    lambda rule: hm.PerHead({}, default=rule): r"hm\.PerHead\(\.\.\., default={}\)",
}
NEAR = [
    ({0: hm.Full()}, r"Wrap rules by head in PerHead: {}\.", r"hm\.PerHead\(\{0: \.\.\.\}\)"),
    ({"1-3": hm.Full()}, r"in PerHead: {}\.", r"hm\.PerHead\(\{'1-3': \.\.\.\}\)"),
    (
        [hm.Full()],
        r"Combine specs by & or \|, .* by PerHead: {}\.",
        r"hm\.PerHead\(\{0: a, 1: b\}\)",
    ),
    ("causal", r"Call it: {}\.", r"hm\.recipes\.causal\(\)"),
    ("prefix_lm", r"Call it: {}\.", r"hm\.recipes\.prefix_lm\(length\)"),
    ("window", r"Call it: {}\.", r"hm\.Window\(before=8, after=8\)"),
    (hm.Window, r"Call it: {}\.", r"hm\.Window\(before=8, after=8\)"),
    ("none such", r"The recipes are causal, .*: {}\. JSON text", r"hm\.recipes\.causal\(\)"),
    (hm.Full, r"Call it: {}\.", r"hm\.Full\(\)"),
    (hm.SameSegment, r"Call it: {}\.", r"hm\.SameSegment\(input\)"),
    (hm.recipes.causal, r"Call it: {}\.", r"hm\.recipes\.causal\(\)"),
    (lambda i, j: i >= j, r"`allowed` of a class under @hm.register_spec.*: {}\.", r"TheClass\(\)"),
    (np.ones((3, 3)), r"by MaskInput\(name\): {}\.", r"hm\.MaskInput\(name\)"),
]


@pytest.mark.parametrize(("near", "hint", "written"), NEAR, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("call", CALLED, ids=CALLED.values())
def test_a_hint_shows_the_call(call, near, hint, written):
    wanted = CALLED[call].format(written)
    with pytest.raises(TypeError, match=f"must be a mask spec.*{hint.format(wanted)}"):
        call(near)


@pytest.mark.parametrize(
    "near", [[hm.Full()], hm.Full, hm.recipes.causal], ids=["list", "class", "function"]
)
def test_a_hint_shows_apply_head_masks(near):
    with pytest.raises(
        TypeError, match=r"must be a mask spec.*: hm\.apply_head_masks\(model, hm\."
    ):
        hm.apply_head_masks(one_layer(), near)


@pytest.mark.parametrize("name", ["causal", "padding", "sentences", "streaming"])
def test_a_recipe_by_its_name_alone(name):
    call = rf"hm\.recipes\.{name}\(.*\)"
    with pytest.raises(ValueError, match=rf"Call it: hm\.apply_head_masks\(model, {call}\)\."):
        hm.apply_head_masks(one_layer(), name)
    with pytest.raises(AttributeError, match=rf"has no `{name}`. It is a recipe: {call}\."):
        getattr(hm, name)


@pytest.mark.parametrize("name", ["caused", "Causal", "foo"])
def test_a_name_that_is_no_recipe(name):
    assert not hasattr(hm, name)
    recipes = r"The recipes are causal, .*: hm\.apply_head_masks\(model, hm\.recipes\.causal\(\)\)"
    with pytest.raises(ValueError, match=rf"JSON, but .*Received: '{name}'\. {recipes}\.$"):
        hm.apply_head_masks(one_layer(), name)


def test_broken_json_is_no_name_of_a_recipe():
    with pytest.raises(ValueError, match=r"but fails to parse: .*Received: '{\"kind\": '\.$"):
        hm.apply_head_masks(one_layer(), '{"kind": ')


@pytest.mark.parametrize(
    ("heads", "written"),
    [
        ("causal", "hm.PerHead({0: hm.recipes.causal()})."),
        (hm.Full, "hm.PerHead({0: hm.Full()})."),
        (hm.recipes.causal, "hm.PerHead({0: hm.recipes.causal()})."),
        ("foo", "hm.PerHead({0: ...})."),
        (hm.Full(), "hm.PerHead({0: ...})."),
        ([hm.Full()], "hm.PerHead({0: ...}), or of a list: hm.PerHead(dict(enumerate(rules)))."),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_rules_without_the_number_of_a_head(heads, written):
    message = rf"must map head numbers to specs.*Received: .*: {re.escape(written)}$"
    with pytest.raises(TypeError, match=message):
        hm.PerHead(heads)


CALLS_OF_KERAS = {
    "hm.plot({}, ...)": hm.plot,
    "hm.draw({}, ...)": hm.draw,
    "hm.make_mask({}, queries, keys)": lambda value: hm.make_mask(value, 3, 3),
}


@pytest.mark.parametrize("call", CALLS_OF_KERAS)
def test_a_model_or_a_layer_in_place_of_a_rule(call):
    masked = hm.apply_head_masks(one_layer(), hm.PerHead({0: hm.Window(0, 0)}))
    of_rules = re.escape(f"by layer: {call.format('hm.mask_specs(model)[path]')}.")
    attention = "" if "make_mask" in call else r".* hm\.plot_attention\(model, inputs\)"
    with pytest.raises(TypeError, match=f"must be a mask spec.*{of_rules}{attention}"):
        CALLS_OF_KERAS[call](masked)
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(0, 0))
    of_rule = re.escape(f"`layer.mask_spec`: {call.format('layer.mask_spec')}.")
    with pytest.raises(TypeError, match=f"must be a mask spec.*{of_rule}{attention}"):
        CALLS_OF_KERAS[call](layer)
    for plain in one_layer(), masked.layers[-1]:
        with pytest.raises(
            TypeError, match=rf"gets a rule by hm\.apply_head_masks\(model.*{attention}"
        ):
            CALLS_OF_KERAS[call](plain)


def test_a_layer_is_linted_by_its_rule():
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(0, 0))
    with pytest.raises(TypeError, match=r"`layer\.mask_spec`: hm\.lint\(layer\.mask_spec\)\."):
        hm.lint(layer)


def test_rules_by_head_in_json():
    with pytest.raises(ValueError, match='"kind": "per_head", "heads"'):
        hm.MaskSpec.from_config({"0": {"kind": "full"}})


READS = hm.SameSegment("ids")
READERS = {
    "hm.make_mask(spec, queries, keys, mask_inputs={'ids': ...})": lambda: hm.make_mask(
        READS, 3, 3
    ),
    "hm.draw(spec, mask_inputs={'ids': ...})": lambda: hm.draw(READS, 3),
    "hm.plot(spec, mask_inputs={'ids': ...})": lambda: hm.plot(READS, 3),
    "hm.dot_product_attention(query, key, value, mask_inputs={'ids': ...})": (
        lambda: hm.dot_product_attention(X, X, X, mask_spec=READS)
    ),
    "layer(x, mask_inputs={'ids': ...}). keras.Sequential": (
        lambda: hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=READS)(X[0])
    ),
}


@pytest.mark.parametrize("written", READERS)
def test_missing_mask_inputs_name_the_call(written):
    with pytest.raises(ValueError, match=re.escape(written)) as raised:
        READERS[written]()
    assert ("Sequential" in str(raised.value)) == ("Sequential" in written)


def test_a_missing_whole_mask_is_described_as_one():
    with pytest.raises(
        ValueError, match=r"Pass a boolean tensor of shape \(batch or 1, heads or 1"
    ):
        hm.draw(hm.MaskInput("m"), 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hm.Window(befor=2), "Window has no field `befor`. Did you mean 'before'? Its"),
        (lambda: hm.Window(x=2), "Window has no field `x`. Its fields: before, after, step."),
        (lambda: hm.Full(x=2), "Full has no field `x`. Its fields: none."),
        (lambda: hm.PerHead({}, defaul=hm.Full()), "PerHead has no field `defaul`. Did you mean"),
    ],
)
def test_unknown_fields_list_the_known_ones(make, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("kind", [hm.MaskInput, hm.SameSegment, hm.KeyFlag])
def test_a_tensor_where_its_name_is_expected(kind):
    way_out = r"ndarray of shape \(3, 3\)\. Give a name here, .*mask_inputs=\{'sentence_ids'"
    with pytest.raises(TypeError, match=f"the name under which the tensor is passed.*{way_out}"):
        kind(np.ones((3, 3), bool))


IDS = np.ones((1, 3), "int32")


def test_names_of_mask_inputs_that_are_misspelled():
    with pytest.raises(ValueError, match=r"missing.*The mask spec reads 'ids', not 'idx'"):
        hm.make_mask(READS, 3, 3, mask_inputs={"idx": IDS})
    with pytest.raises(ValueError, match=r"does not read\. It reads: .*Did you mean 'ids'"):
        hm.make_mask(READS, 3, 3, mask_inputs={"ids": IDS, "idx": IDS})


@pytest.mark.parametrize("spec", [READS, hm.MaskInput("ids")], ids=repr)
def test_ragged_ids_name_their_input(spec):
    import tensorflow as tf

    for rows in ([[1, 2, 3], [4]], [IDS[0], [4]], tf.ragged.constant([[1, 2, 3], [4]])):
        with pytest.raises(TypeError, match=r"`mask_inputs\['ids'\]` must be .*equally long.*Pad"):
            hm.make_mask(spec, 3, 3, mask_inputs={"ids": rows})
    hm.make_mask(spec, 3, 3, mask_inputs={"ids": [[1, 1, 1]] if spec is READS else [[1] * 3] * 3})


def test_a_padding_mask_in_place_of_a_mask_of_pairs():
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4)
    x, mask = np.ones((2, 3, 4), "float32"), np.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"needs an axis of queries. Pass it as `query_mask=`.*\["):
        layer(x, attention_mask=mask)
    layer(x, attention_mask=mask[:, None])
    layer(x, query_mask=mask)
    with pytest.raises(ValueError, match=r"axis of queries. Add the axis: mask\[:, None\]"):
        hm.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], mask=mask)


def test_one_is_singular():
    one = (
        r"names head 3, but there is one head, numbered 0\. .* Pass `num_heads=` if there are more"
    )
    with pytest.raises(ValueError, match=one):
        hm.make_mask(hm.PerHead({3: hm.Full()}), 3, 3)
    pair = (IDS, np.ones((2, 3), "int32"))
    with pytest.raises(ValueError, match="has 1 example where the batch has 2"):
        hm.make_mask(READS, 3, 3, mask_inputs={"ids": pair})
    with pytest.warns(UserWarning, match="the call has 1 of them for 3 keys"):
        hm.dot_product_attention(X[:, :1], X, X, mask_spec=hm.Window(1, 0))
