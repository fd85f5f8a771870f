"""What a survey says of a model beside its attention: inputs, padding, mixing, lost masks."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_headmask as hm
from keras_headmask.attention.lost_masks import padding_inputs
from keras_headmask.retrofit.made_up import made_up, plain
from keras_headmask.retrofit.survey import Survey

pytestmark = pytest.mark.tensorflow  # a graph says the same on every backend


def encoder(*, mask_zero=True, between=None, then=None):
    """Of ids and a mask that nothing reads; `between` stands before attention, `then` behind it."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    real = keras.Input((None,), dtype="bool", name="attention_mask")
    x = layers.Embedding(12, 8, mask_zero=mask_zero)(ids)
    x = x if between is None else between(x)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    return keras.Model([ids, real], x if then is None else then(x))


class Opaque(layers.Layer):
    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def test_inputs_and_which_of_them_name_padding():
    survey = Survey(encoder())
    assert list(survey.inputs) == ["token_ids", "attention_mask"]
    assert survey.padding_inputs == padding_inputs(survey.inputs) == ["attention_mask"]
    assert survey.zero_padded_inputs == ["token_ids"]
    assert survey.unread_inputs == ["attention_mask"]
    assert Survey(encoder(mask_zero=False)).zero_padded_inputs == []


def test_an_embedding_in_a_model_inside_is_found():
    inner = keras.Input((None,), dtype="int32")
    embed = keras.Model(inner, layers.Embedding(7, 4, mask_zero=True)(inner))
    words, numbers = (keras.Input((None,), dtype="int32", name=name) for name in ("words", "n"))
    model = keras.Model([words, numbers], [embed(words), layers.Embedding(5, 4)(numbers)])
    survey = Survey(model)
    assert survey.zero_padded_inputs == ["words"]
    assert [layer.input_dim for layer in survey.embeddings_of("words")] == [7]
    arrays = made_up(survey, [hm.KeyIn("n", (3, 99))], batch=4, length=64)
    assert arrays["words"].max() == 6
    assert 3 in arrays["n"]
    assert arrays["n"].max() < 5
    assert plain(survey)["words"][:, -1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("then", "mixing"),
    [
        (layers.Dense(3), []),
        (layers.LayerNormalization(), []),
        (layers.Softmax(axis=1), [False]),
        (lambda x: ops.roll(x, 1, 1), [False]),
        (Opaque(layers.Dense(3)), [False]),
        (layers.Conv1D(3, 3), [True]),
        (Opaque(layers.GRU(3)), [True]),
        (layers.GlobalAveragePooling1D(), [True]),
    ],
)
def test_what_mixes_positions_for_certain_or_perhaps(then, mixing):
    seen = Survey(encoder(mask_zero=False, then=then)).mixing
    assert [one.is_certain for one in seen] == mixing
    for one in seen:
        assert ("may mix" in str(one)) == (not one.is_certain)


def test_lost_masks_name_the_layer_and_the_operation():
    assert Survey(encoder()).lost_masks == []
    ((entry, lost),) = Survey(encoder(between=lambda x: x + 1.0)).lost_masks
    assert (entry.path, lost.ids) == ("attention", "token_ids")
    assert type(lost.operation).__name__ == "Add"


def test_rules_by_path():
    survey = Survey(hm.apply_head_masks(encoder(), hm.Window(1, 1)))
    assert survey.rules == {"attention": hm.Window(1, 1)}
    assert survey.is_restricted
    free = Survey(hm.apply_head_masks(encoder(), hm.Full()))
    assert (list(free.rules), free.is_restricted) == (["attention"], False)


def test_a_survey_wants_a_model():
    with pytest.raises(TypeError, match="`model` must be a Keras model"):
        Survey(np.zeros(3))
