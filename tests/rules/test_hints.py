"""What stands near a spec, where a spec is expected: the error shows what to write, and where."""

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
    (
        [hm.Full()],
        r"Combine specs by & or \|, .* by PerHead: {}\.",
        r"hm\.PerHead\(\{0: a, 1: b\}\)",
    ),
    ("causal", r"Call it: {}\.", r"hm\.recipes\.causal\(\)"),
    (hm.Window, r"Call it: {}\.", r"hm\.Window\(before=8, after=8\)"),
    ("none such", r"The recipes are causal, .*: {}\. JSON text", r"hm\.recipes\.causal\(\)"),
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
    with pytest.raises(TypeError, match=rf"Call it: hm\.apply_head_masks\(model, {call}\)\."):
        hm.apply_head_masks(one_layer(), name)
    with pytest.raises(AttributeError, match=rf"has no `{name}`. It is a recipe: {call}\."):
        getattr(hm, name)


READS, IDS = hm.SameSegment("ids"), np.ones((1, 3), "int32")


@pytest.mark.parametrize("spec", [READS, hm.MaskInput("ids")], ids=repr)
def test_ragged_ids_name_their_input(spec):
    import tensorflow as tf

    for rows in ([[1, 2, 3], [4]], [IDS[0], [4]], tf.ragged.constant([[1, 2, 3], [4]])):
        with pytest.raises(TypeError, match=r"`mask_inputs\['ids'\]` must be .*equally long.*Pad"):
            hm.make_mask(spec, 3, 3, mask_inputs={"ids": rows})
    hm.make_mask(spec, 3, 3, mask_inputs={"ids": [[1, 1, 1]] if spec is READS else [[1] * 3] * 3})
