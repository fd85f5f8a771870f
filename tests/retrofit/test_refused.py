"""What `apply_head_masks` refuses, before it changes anything: one row for each error."""

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from keras_versions import takes_unread_inputs
from small_models import CHUNK, TOKENS, Block, apply, of_vectors, one_layer

import keras_headmask as hm

IDS, LATE = hm.SameSegment("ids"), hm.PerHead({12: hm.Nothing()})


def on_vectors(*attention):
    x = y = keras.Input((7, 8), name="vectors")
    for layer in attention:
        y = layer(y, y)
    return keras.Model(x, y)


def of_heads(*heads):
    return on_vectors(*(layers.MultiHeadAttention(count, 4) for count in heads))


def with_an_unread_input():
    x, scores = keras.Input((7, 8), name="vectors"), keras.Input((7,), name="scores")
    return keras.Model([x, scores], layers.MultiHeadAttention(4, 3)(x, x) * 1.0)


def under_another_key():
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(12, 8)(ids)
    return keras.Model({"token_ids": ids}, layers.MultiHeadAttention(2, 4)(x, x))


def of_two_classes():
    def scale(by):
        class Scale(layers.Layer):
            def call(self, x):
                return x * by

        return Scale()

    return of_vectors(lambda x: scale(3)(scale(2)(layers.MultiHeadAttention(2, 4)(x, x))))


class Secret(layers.Layer):
    """Its config does not make it."""

    def __init__(self, secret):
        super().__init__()

    def call(self, x):
        return x

    def get_config(self):
        return {}


def with_a_secret():
    return of_vectors(lambda x: Secret(3)(layers.MultiHeadAttention(4, 3)(x, x)))


def in_two_places():
    """A block, and the layer inside it: a config parts them."""
    block, x = Block(name="block"), keras.Input((7, 8))
    y = block(x)
    return keras.Model(x, [y, block.attention(y, y)])


def of_values():
    """Its class makes the graph anew, with other values."""

    @keras.saving.register_keras_serializable("test_refused")
    class Draws(keras.Model):
        def __init__(self, **kwargs):
            x = keras.Input((7, 8))
            y = layers.MultiHeadAttention(2, 4)(x, x)
            super().__init__(x, keras.ops.multiply(y, keras.random.uniform((8,))), **kwargs)

        def get_config(self):
            return {}

    inner, x = Draws(), keras.Input((7, 8))
    return keras.Model(x, inner(x))


def with_a_layer_outside():
    model = one_layer()
    model.head = layers.Dense(3)
    model.head.build((None, 8))
    return model


COPIED = r"(?s)Copying .* is not possible: .*{}.*copy=False"
# By what is wrong: what is called, and what its error says.
REFUSED = {
    "a head": (lambda: apply(one_layer(), LATE), "names head 12"),
    "JSON text": (lambda: apply(one_layer(), '{"kind": "full"}'), r"json\.loads\(text\)"),
    "no layer": (lambda: apply(one_layer(), CHUNK, layers=""), "names no layer"),
    "existing": (lambda: apply(one_layer(), CHUNK, existing="or"), "`existing` must be one of"),
    "ignore": (
        lambda: hm.apply_head_masks(one_layer(), CHUNK, ignore=3),
        "`ignore` must be a regex on layer paths or a list of them. Received: 3",
    ),
    "a list to ignore": (
        lambda: hm.apply_head_masks(one_layer(), CHUNK, ignore=[None]),
        r"`ignore` must be a regex .*Received: \[None\]",
    ),
    "a regex to ignore": (
        lambda: hm.apply_head_masks(one_layer(), CHUNK, ignore="("),
        r"`ignore` is not a regex: '\('",
    ),
    "a model in place of the rule": (
        lambda: hm.apply_head_masks(hm.Full(), one_layer()),
        r"the model comes first, `hm.apply_head_masks\(model, rule",
    ),
    "a Sequential without a graph": (
        lambda: apply(keras.Sequential([layers.Dense(3)]), CHUNK),
        r"has no graph yet: start it with a keras.Input",
    ),
    "several axes": (lambda: on_several_axes(), "attends over several axes"),
    "the name of a layer": (
        lambda: apply(one_layer(), hm.SameSegment("embedding"), copy=False),
        "Give the mask input another name",
    ),
    "another key": (
        lambda: apply(under_another_key(), hm.SameSentence(9)),
        r"'token_ids' under that key, but .* named 'ids'",
    ),
    "ids of vectors": (
        lambda: apply(of_heads(4), hm.SameSegment("vectors")),
        "'vectors' as one value per position.*another name",
    ),
    "one name of two kinds": (
        lambda: hm.apply_head_masks(of_heads(4, 4), {"0": IDS, "1": hm.MaskInput("ids")}),
        "'ids' is read both",
    ),
    "a whole mask for several numbers of heads": (
        lambda: apply(of_heads(2, 4), hm.MaskInput("mask"), add_inputs=True),
        "'mask' is read by layers of 2 and of 4 heads",
    ),
    "two classes of one name": (
        lambda: apply(of_two_classes(), CHUNK),
        "its config would confuse two classes named 'Scale'",
    ),
    "no config": (lambda: apply(with_a_secret(), CHUNK), COPIED.format("")),
    "a layer in two places": (lambda: apply(in_two_places(), CHUNK), COPIED.format("")),
    "a layer outside of the graph": (
        lambda: apply(with_a_layer_outside(), CHUNK),
        COPIED.format("without the layer 'head'"),
    ),
    "values in a graph": (
        lambda: apply(of_values(), CHUNK),
        COPIED.format("the graph of 'draws' has values that no config holds"),
    ),
}


def on_several_axes():
    x = keras.Input((4, 4, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x))
    hm.apply_head_masks(model, CHUNK)(normal(1, 4, 4, 8))


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, words = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize("make", [of_two_classes, with_a_secret, in_two_places])
def test_what_cannot_be_copied_obeys_in_place(make):
    masked = apply(make(), CHUNK, copy=False)
    given = normal(2, 7, 8)
    changed = given.copy()
    changed[:, 5] += 1.0
    first, second = (keras.tree.flatten(masked(x))[0] for x in (given, changed))
    assert abs(numpy(first) - numpy(second))[:, :3].max() == 0


@takes_unread_inputs
def test_floats_are_no_ids_and_other_lengths_are_told():
    model = with_an_unread_input()
    with pytest.raises(TypeError, match=r"'scores', which has dtype float32.*another name"):
        apply(model, hm.SameSegment("scores"))
    masked = apply(model, IDS, add_inputs=True)
    with pytest.raises(ValueError, match=r"In the attention layer .*has length 5.*has 7"):
        masked([normal(2, 7, 8), normal(2, 7), np.zeros((2, 5), "int32")])


def test_a_refused_rule_leaves_the_model_alone():
    model = one_layer()
    before = numpy(model(TOKENS))
    for rule in (hm.SameSegment("embedding"), LATE):
        with pytest.raises(ValueError, match=r"Give the mask input another name|head 12"):
            apply(model, rule, copy=False)
    np.testing.assert_array_equal(numpy(model(TOKENS)), before)


@pytest.mark.parametrize(
    "ask",
    [hm.mask_specs, hm.summary_masks, hm.unmasked, lambda x: hm.apply_head_masks(x, CHUNK)],
)
def test_only_keras_models_have_rules(ask):
    with pytest.raises(TypeError, match=r"`model` must be a Keras model\. Received: 'model.keras'"):
        ask("model.keras")
