"""TensorFlow's tiles at the ends: of the widest, a step holds one; of no key, the answer is 0."""

import pytest
from contract import numpy

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow


def test_a_step_of_wide_tiles_holds_one():
    """Found as a bug: 64 heads x 256 queries x 131,072 keys are 0 logits or fewer in 32 bits."""
    from keras_headmask.attention.tensorflow.plan import planned

    length = 2**17
    bound = evaluation.bind(hm.Window(after=0), None, length, length, batch=1)
    part = Part(hm.Window(after=0), tuple(range(64)), bound, 1.0, Tuning())
    assert planned(part).in_step == 1


@pytest.mark.parametrize("spec", [hm.Window(1, 1), hm.Keys(0, 1) | hm.Window(1, 1)], ids=str)
def test_tiles_of_no_key_are_0(spec):
    """At lengths that the graph does not know: one run of keys, and two."""
    import tensorflow as tf

    def run(q, k, v):
        return hm.dot_product_attention(q, k, v, mask_spec=spec, tiled=True)

    operand = tf.TensorSpec((None, None, 2, 3))
    traced = tf.function(run, input_signature=[operand] * 3, autograph=False)
    keys = tf.zeros((1, 0, 2, 3))
    assert not numpy(traced(tf.ones((1, 5, 2, 3)), keys, keys)).any()
