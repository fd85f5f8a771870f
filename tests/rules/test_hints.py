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
def test_a_hint_shows_the_call(near, hint, written):
    for call, shown in CALLED.items():
        with pytest.raises(
            TypeError, match=f"must be a mask spec.*{hint.format(shown.format(written))}"
        ):
            call(near)


@pytest.mark.parametrize("name", ["causal", "padding", "sentences", "streaming"])
def test_a_recipe_by_its_name_alone(name):
    call = rf"hm\.recipes\.{name}\(.*\)"
    with pytest.raises(ValueError, match=rf"Call it: hm\.apply_head_masks\(model, {call}\)\."):
        hm.apply_head_masks(one_layer(), name)
    with pytest.raises(AttributeError, match=rf"has no `{name}`. It is a recipe: {call}\."):
        getattr(hm, name)


READS, IDS = hm.SameSegment("ids"), np.ones((1, 3), "int32")
LAYER = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(0, 0))
MASKED = hm.apply_head_masks(one_layer(), hm.PerHead({0: hm.Window(0, 0)}))
RECIPES = r"The recipes are causal, .*: hm\.apply_head_masks\(model, hm\.recipes\.causal\(\)\)\.$"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hm.apply_head_masks(one_layer(), "foo"), ValueError, rf"JSON, but .*{RECIPES}"),
        (
            lambda: hm.apply_head_masks(one_layer(), '{"kind": '),
            ValueError,
            r"but fails to parse: .*Received: '{\"kind\": '\.$",
        ),
        (lambda: hm.PerHead("causal"), TypeError, r": hm.PerHead\({0: hm.recipes.causal\(\)}\)\.$"),
        (lambda: hm.PerHead(hm.Full), TypeError, r": hm.PerHead\({0: hm.Full\(\)}\)\.$"),
        (lambda: hm.PerHead(hm.Full()), TypeError, r": hm.PerHead\({0: \.\.\.}\)\.$"),
        (lambda: hm.PerHead([READS]), TypeError, r"list: hm.PerHead\(dict\(enumerate\(rules\)\)\)"),
        (
            lambda: hm.plot(MASKED, 3),
            TypeError,
            r"by layer: hm\.plot\(hm.mask_specs\(model\)\[path\], .*hm\.plot_attention\(model, in",
        ),
        (lambda: hm.draw(LAYER, 3), TypeError, r"`layer.mask_spec`: hm\.draw\(layer.mask_spec, "),
        (lambda: hm.lint(LAYER), TypeError, r"`layer\.mask_spec`: hm\.lint\(layer\.mask_spec\)\."),
        (
            lambda: hm.make_mask(one_layer(), 3, 3),
            TypeError,
            r"gets a rule by hm\.apply_head_masks",
        ),
        (
            lambda: hm.MaskSpec.from_config({"0": {"kind": "full"}}),
            ValueError,
            '"kind": "per_head", "heads"',
        ),
        (
            lambda: hm.draw(hm.MaskInput("m"), 3),
            ValueError,
            r"Pass a boolean tensor of shape \(batch or 1, heads or 1",
        ),
        *(
            (
                lambda kind=kind: kind(np.ones((3, 3), bool)),
                TypeError,
                r"the name under which .*ndarray of shape \(3, 3\)\. Give a name here, .*mask_",
            )
            for kind in (hm.MaskInput, hm.SameSegment, hm.KeyFlag)
        ),
        (
            lambda: hm.make_mask(READS, 3, 3, mask_inputs={"idx": IDS}),
            ValueError,
            r"\['ids'\] missing. Received: \['idx'\]",
        ),
        (
            lambda: hm.make_mask(READS, 3, 3, mask_inputs={"ids": IDS, "idx": IDS}),
            ValueError,
            r"does not read\. It reads: .*Did you mean 'ids'",
        ),
    ],
)
def test_what_a_call_says(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
