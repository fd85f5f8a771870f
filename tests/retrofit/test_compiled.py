"""`copy=False` on a model that something compiled before: nothing goes on without the rule."""

import gc

import keras
import pytest
from contract import numpy
from keras import layers
from small_models import CHUNK, TOKENS, one_layer
from tolerance import assert_close

import keras_headmask as hm


def test_models_built_on_its_tensors_obey_and_run_no_compiled_function_of_old():
    model = one_layer()
    head = keras.Model(model.inputs, layers.Dense(2)(model.output))
    before = head.predict(TOKENS, verbose=0)
    masked = hm.apply_head_masks(model, CHUNK, copy=False)
    assert masked is model
    after = head.predict(TOKENS, verbose=0)
    assert_close(after, numpy(head.layers[-1](masked(TOKENS))), depth=3)
    assert abs(after - before).max() > 1e-3


def test_models_built_on_its_tensors_lack_what_a_rule_reads_and_say_so():
    model = one_layer()
    head = keras.Model(model.inputs, layers.Dense(2)(model.output))
    head.predict(TOKENS, verbose=0)
    masked = hm.apply_head_masks(model, hm.SameSentence(9), copy=False)
    cut = keras.Model(masked.input, masked.get_layer("attention").output)
    assert_close(numpy(cut(TOKENS)), numpy(masked(TOKENS)), depth=3)
    # (Last: on JAX a `predict` that raises leaves its model without weights.)
    with pytest.raises(ValueError, match=r"reads \['token_ids'\], and was called without them"):
        head.predict(TOKENS, verbose=0)


def test_so_do_models_that_hold_it():
    model = one_layer()
    outer = keras.Sequential([model, layers.Dense(2)])
    before = outer.predict(TOKENS, verbose=0)
    hm.apply_head_masks(model, hm.SameSentence(9), copy=False)
    after = outer.predict(TOKENS, verbose=0)
    assert_close(after, numpy(outer.layers[-1](model(TOKENS))), depth=3)
    assert abs(after - before).max() > 1e-3


def test_its_own_functions_are_made_anew():
    model = one_layer()
    without = model.predict(TOKENS, verbose=0)
    masked = hm.apply_head_masks(model, CHUNK, copy=False)
    obeying = masked.predict(TOKENS, verbose=0)
    assert_close(obeying, numpy(masked(TOKENS)), depth=3)
    assert abs(obeying - without).max() > 1e-3


@pytest.mark.tensorflow
@pytest.mark.parametrize("existing", ["error", "replace"])
def test_a_model_that_a_tf_function_has_traced_is_refused(existing):
    import tensorflow as tf

    model = one_layer()
    if existing == "replace":
        model = hm.apply_head_masks(model, hm.Window(1, 1))

    @tf.function
    def old_step(ids):
        return model(ids)

    before = old_step(TOKENS)
    with pytest.raises(ValueError, match=r"no `tf.function` has traced.*'old_step'.*copy=True"):
        hm.apply_head_masks(model, CHUNK, existing=existing, copy=False)
    assert_close(numpy(model(TOKENS)), numpy(before), depth=3)  # as it was
    copied = hm.apply_head_masks(model, CHUNK, existing=existing)
    del old_step
    in_place = hm.apply_head_masks(model, CHUNK, existing=existing, copy=False)
    assert_close(numpy(in_place(TOKENS)), numpy(copied(TOKENS)), depth=3)


@pytest.mark.tensorflow
def test_a_function_that_is_gone_is_no_reason_to_refuse():
    import tensorflow as tf

    model = one_layer()
    step = tf.function(lambda ids: model(ids))
    step(TOKENS)
    step.itself = step  # a cycle, which only a collection frees
    gc.disable()
    del step
    try:
        assert hm.mask_specs(hm.apply_head_masks(model, CHUNK, copy=False))
    finally:
        gc.enable()
