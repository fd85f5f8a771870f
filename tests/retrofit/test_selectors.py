"""Which layers a selector names, and what is told of them."""

import re

import keras
import numpy as np
import pytest
from contract import by_hand, normal, numpy
from keras import layers
from keras_versions import takes_unread_inputs
from oracle import mask as mask_by_loops
from small_models import CHUNK, PARTS, of_vectors
from tolerance import assert_close

import keras_headmask as hm


@pytest.fixture(scope="module")
def decoder():
    """Two self-attentions and, between them, attention to another sequence."""
    q = keras.Input((7, 8), name="q")
    v = keras.Input((5, 8), name="v")
    x = layers.MultiHeadAttention(4, 3, name="first")(q, q)
    x = layers.MultiHeadAttention(4, 3, name="looks_over")(x, value=v)
    x = layers.MultiHeadAttention(4, 3, name="last")(x, x)
    return keras.Model([q, v], x, name="decoder")


@pytest.mark.parametrize(
    ("selector", "paths"),
    [
        (None, ["first", "last"]),
        (1, ["last"]),
        (np.int64(0), ["first"]),
        ("1", ["last"]),
        ("0-1", ["first", "last"]),
        ("0,1", ["first", "last"]),
        ((0, "las"), ["first", "last"]),
        ([0, "0-1"], ["first", "last"]),
        ("looks", ["looks_over"]),
        ("^(first|looks_over)$", ["first", "looks_over"]),
    ],
)
def test_selectors(decoder, selector, paths):
    assert list(hm.mask_specs(hm.apply_head_masks(decoder, CHUNK, layers=selector))) == paths


@pytest.mark.parametrize(
    ("selector", "error", "told"),
    [
        (2, ValueError, r"no self-attention layer 2: the model has 2"),
        (-1, ValueError, r"no self-attention layer -1"),
        ("1-2", ValueError, r"no self-attention layer 2"),
        ("1-0", ValueError, r"runs backwards"),
        ("\u0663", ValueError, "No attention layer's path matches"),
        ("second", ValueError, r"No attention layer's path matches 'second'. Paths: 'first'"),
        ("(", ValueError, r"`layers` is not a regex"),
        ((), ValueError, r"\(\) names no layer"),
        (True, TypeError, r"Layers are named by .* Received: True"),
        (0.0, TypeError, r"Layers are named by .* Received: 0.0"),
    ],
)
def test_selectors_that_name_nothing(decoder, selector, error, told):
    with pytest.raises(error, match=told):
        hm.apply_head_masks(decoder, CHUNK, layers=selector)


def test_rules_by_layer(decoder):
    a, b = hm.Window(1, 1), hm.PerHead({3: CHUNK})
    masked = hm.apply_head_masks(decoder, {"0": a, "looks": b.get_config(), ("1",): b})
    assert hm.mask_specs(masked) == {"first": a, "looks_over": b, "last": b}
    with pytest.raises(ValueError, match=r"'last' \(MultiHeadAttention\) has two rules"):
        hm.apply_head_masks(decoder, {"0-1": a, "1": b})
    with pytest.raises(ValueError, match="say the same twice"):
        hm.apply_head_masks(decoder, {"0": a}, layers=0)
    with pytest.raises(ValueError, match="empty mapping"):
        hm.apply_head_masks(decoder, {})
    with pytest.raises(TypeError, match="must be a mask spec"):
        hm.apply_head_masks(decoder, np.ones((7, 7), bool))
    with pytest.raises(ValueError, match=r"In the attention layer 'first'.*names head 4"):
        hm.apply_head_masks(decoder, hm.PerHead({4: a}))
    assert set(hm.mask_specs(hm.apply_head_masks(decoder, a.get_config())).values()) == {a}


@pytest.mark.parametrize("key", [0, np.int64(0), (0,), ("first", 0), range(1)])
def test_a_number_as_a_key_may_mean_a_head(decoder, key):
    with pytest.raises(ValueError, match=r'may mean a layer or a head.*"0-3": .*PerHead'):
        hm.apply_head_masks(decoder, {key: CHUNK})


@pytest.mark.parametrize(
    "sides", [("query", "key"), pytest.param(("decoder", "encoder"), marks=takes_unread_inputs)]
)
def test_cross_attention_reads_a_pair(decoder, sides):
    """Of new inputs, or of those that the model has, as KerasHub's encoders with decoders."""
    rule, names = hm.SameSegment("ids") & hm.KeyFlag("open"), [f"{side}_ids" for side in sides]
    own = [keras.Input((None,), dtype="int32", name=x) for x in names if sides[0] == "decoder"]
    model = keras.Model([*decoder.inputs, *own], decoder.output)
    masked = hm.apply_head_masks(model, rule, layers="looks", add_inputs=True)
    assert {x.name for x in masked.inputs} == {"q", "v", "open", *names}
    given = {"q": normal(2, 7, 8), "v": normal(2, 5, 8, seed=1)}
    ids = {names[0]: PARTS, names[1]: PARTS[:, 1:6], "open": np.array([[1, 1, 0, 1, 1]] * 2)}
    got = numpy(masked(given | ids))
    first, over, last = (decoder.get_layer(name) for name in ("first", "looks_over", "last"))
    x = by_hand(first, given["q"])[0]
    pairs = {"ids": (PARTS, PARTS[:, 1:6]), "open": (None, ids["open"])}
    x = by_hand(over, x, given["v"], mask=mask_by_loops(rule, 2, 4, 7, 5, pairs))[0]
    assert_close(got, by_hand(last, x)[0], depth=6)


def test_layers_of_one_name_are_told_apart():
    @keras.saving.register_keras_serializable("test_selectors")
    class Twins(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.twins = [layers.MultiHeadAttention(4, 3, name="twin") for _ in range(2)]

        def build(self, shape):
            for layer in self.twins:
                layer.build(shape, shape)

        def call(self, x):
            return self.twins[1](y := self.twins[0](x, x), y)

    model = of_vectors(lambda x: Twins(name="pair")(x))
    masked = hm.apply_head_masks(model, {"0": CHUNK, "1": hm.Full()})
    assert hm.mask_specs(masked) == {"pair/twin": CHUNK, "pair/twin#2": hm.Full()}


def test_layers_with_equal_rules_are_one_row():
    outputs = x = keras.Input((7, 8))
    for i in range(12):
        outputs = layers.MultiHeadAttention(4, 3, name=f"layer_{i}")(outputs, outputs)
    memory = keras.Input((5, 8))
    outputs = layers.MultiHeadAttention(2, 3, name="layer_12")(outputs, memory)
    outputs = layers.MultiHeadAttention(4, 3, name="head")(outputs, outputs)
    rules = {"0-3": CHUNK, "5": CHUNK, "6": hm.Full()}
    lines = []
    masked = hm.apply_head_masks(keras.Model([x, memory], outputs), rules)
    hm.summary_masks(masked, lines.append)
    name = "MultiHeadAttention"
    assert [re.split("  +", line) for line in lines] == [
        ["0 to 3 and 5", "layer* (5 layers)", name, "4 heads", "self", "Chunk(3)"],
        ["4 and 7 to 11", "layer* (6 layers)", name, "4 heads", "self", "None"],
        ["6", "layer_6", name, "4 heads", "self", "Full()"],
        ["-", "layer_12", name, "2 heads", "cross", "None"],
        ["12", "head", name, "4 heads", "self", "None"],
    ]
