"""`copy=False` on a model that Keras compiled before: nothing goes on without the rule."""

import keras
import pytest
from contract import numpy
from keras import layers
from small_models import CHUNK, TOKENS, one_layer
from tolerance import assert_close

import keras_headmask as hm


@pytest.mark.parametrize("rule", [CHUNK, hm.SameSentence(9)], ids=["positions", "ids"])
def test_the_model_and_those_that_hold_it_run_no_function_of_old(rule):
    model = one_layer()
    outer = keras.Sequential([model, layers.Dense(2)])
    before = [x.predict(TOKENS, verbose=0) for x in (model, outer)]
    masked = hm.apply_head_masks(model, rule, copy=False)
    assert masked is model
    wanted = numpy(model(TOKENS)), numpy(outer.layers[-1](model(TOKENS)))
    for one, old, new in zip((model, outer), before, wanted, strict=True):
        got = one.predict(TOKENS, verbose=0)
        assert_close(got, new, depth=3)
        assert abs(got - old).max() > 1e-3


def test_models_built_on_its_tensors_before_are_refused():
    model = one_layer()
    head = keras.Model(model.inputs, layers.Dense(2)(model.output))
    head.predict(TOKENS, verbose=0)
    hm.apply_head_masks(model, CHUNK, copy=False)
    with pytest.raises(ValueError, match=r"called outside of the masked model 'small'.*Mask last"):
        head.predict(TOKENS, verbose=0)
