"""A `tf.function` inside a model keeps what it traced first: no rule may hang on it."""

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from small_models import CHUNK, apply
from tolerance import assert_close

import keras_headmask as hm

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow


class Block(layers.Layer):
    """Calls its attention directly, and again in a function."""

    def __init__(self, when="at build", direct=True, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")
        self.function = tf.function(lambda x: self.attention(x, x))
        self.when, self.direct = when, direct

    def build(self, shape):
        self.attention.build(shape, shape)
        if self.when == "at build":
            self.function.get_concrete_function(tf.TensorSpec((None, None, 8), "float32"))

    def call(self, x):
        in_eager_mode = tf.is_tensor(x) and tf.executing_eagerly()
        if self.when == "in eager mode alone" and not in_eager_mode:
            return self.attention(x, x)
        return self.function(x) + (self.attention(x, x) if self.direct else 0.0)

    def compute_output_shape(self, shape):
        return shape


class Loops(Block):
    """In a graph of its own, too, but one that is made anew for each forward."""

    def call(self, x):
        return tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, self.attention(y, y)), (tf.constant(0), x)
        )[1]


def one(block):
    x = keras.Input((None, 8))
    return keras.Model(x, block(x))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("when", ["at build", "in the call"])
def test_a_function_that_calls_attention_is_refused(when, direct):
    model = one(Block(when, direct, name="block"))
    for copy in (True, False):
        with pytest.raises(ValueError, match=r"is called in a `tf.function` inside the model"):
            apply(model, CHUNK, layers="attention", copy=copy)
    model(normal(2, 7, 8))  # and is as it was


def test_a_function_that_shows_only_in_the_forward_is_refused_there():
    given = normal(2, 7, 8)
    model = one(Block("in eager mode alone", direct=False, name="block"))
    by_ids = apply(model, hm.SameSegment("ids"), add_inputs=True)
    with pytest.raises(RuntimeError, match=r"is called in a `tf.function` inside the model"):
        by_ids([given, np.zeros((2, 7), "int32")])
    model = apply(model, CHUNK)
    first = numpy(model(given))
    with pytest.raises(RuntimeError, match="it ran in a function that was compiled before"):
        model(given)
    assert_close(model.predict(given, verbose=0), first, depth=3)  # a graph of the whole model


def test_loops_of_tensorflow_are_none():
    model = apply(one(Loops("never", name="loops")), CHUNK, copy=False)
    given = normal(2, 7, 8)
    assert_close(model.predict(given, verbose=0), numpy(model(given)))
