"""What may attend without the rule is refused until it is named; weights that Keras lacks."""

import functools

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras.ops import dot_product_attention as sdpa
from small_models import CHUNK, of_vectors

import keras_headmask as hm

registered = keras.saving.register_keras_serializable("test_hidden_attention")


def swapped(x):
    return ops.transpose(x, (0, 2, 1))


def by_hand(x):
    return ops.softmax(x @ swapped(x)) @ x


def split(attend, x):
    return attend(x[:, :, None], x[:, :, None], x[:, :, None])[:, :, 0]


@registered
class Plain(layers.Layer):
    """Its name says nothing."""

    def call(self, x):
        return by_hand(x)

    def compute_output_shape(self, shape):
        return shape


@registered
class Around(Plain):
    """Holds attention that is known, and attends beside it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x) + by_hand(x)


@registered
class Calls(layers.MultiHeadAttention):
    """Keras' attention with a `call` of its own, which attends beside the method with the rule."""

    def call(self, query, value, key=None):
        return super().call(query, value, key) + by_hand(value)


class NeedsNumbers(layers.MultiHeadAttention):
    """Attention of its own, which does not run for shapes alone."""

    def call(self, query, value, key=None):
        return query if float(ops.sum(query)) > 0 else value

    def compute_output_spec(self, query, value, key=None):
        return keras.KerasTensor(query.shape, query.dtype)


@registered
class Whole(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.MultiHeadAttention(2, 4, name="inner_self")

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x):
        return self.inner(x, x) + by_hand(x)


registered(by_hand)


def of_one(x):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


def by_layers(x):
    return layers.Dot((2, 1))([layers.Softmax(name="softmax")(layers.Dot(2)([x, x])), x])


def by_activation(x):
    weights = layers.Dense(7, activation="softmax", name="softmax")(x)
    return ops.einsum("bts,bsd->btd", weights, x)


def by_exp(x):
    found = ops.exp(x @ swapped(x))
    return found @ x / ops.sum(found, -1, keepdims=True)


def in_a_nested_model(x):
    inner = keras.Input((7, 8))
    return keras.Model(inner, by_hand(inner), name="nested")(x)


# By what it is: how it goes on from a sequence, and the path that is told.
MAY_ATTEND = {
    "unknown code": (Plain(name="mixer"), "mixer"),
    "around known attention": (Around(name="mixer"), "mixer"),
    "its own call": (lambda x: Calls(2, 4, name="g")(x, x), "g"),
    "a call that needs numbers": (lambda x: NeedsNumbers(2, 4, name="g")(x, x), "g"),
    "a model": (Whole(name="mixer"), "mixer"),
    "a Lambda": (layers.Lambda(by_hand, name="mixer"), "mixer"),
    "an activation": (layers.Activation(by_hand, name="mixer"), "mixer"),
    "a function": (lambda x: ops.vectorized_map(of_one, x), "vectorized_map"),
    "operations": (by_hand, "softmax"),
    "layers": (by_layers, "softmax"),
    "an activation, then a product": (by_activation, "softmax"),
    "exp": (by_exp, "exp"),
    "log_softmax": (lambda x: ops.log_softmax(x @ swapped(x)) @ x, "log_softmax"),
    "a nested model": (in_a_nested_model, "nested/softmax"),
    "Keras' operation": (functools.partial(split, sdpa), "dot_product_attention"),
    "our operation": (functools.partial(split, hm.dot_product_attention), "softmax"),
    "a class of Keras": (lambda x: layers.Attention(name="g")([x, x]), "g"),
}


def after_known(then):
    return of_vectors(lambda x: then(layers.MultiHeadAttention(2, 4, name="known")(x, x)))


@pytest.mark.parametrize("how", MAY_ATTEND)
def test_what_may_attend_is_refused_until_it_is_named(how):
    then, path = MAY_ATTEND[how]
    model = after_known(then)
    for layer in (None, ".*"):
        told = rf"'{path}\S*' \(.*may attend without the rule.*ignore=\['{path}"
        with pytest.raises(ValueError, match=told):
            hm.apply_head_masks(model, CHUNK, layer, copy=False)
    alone = hm.apply_head_masks(model, CHUNK, layers="^known", copy=False)
    assert list(hm.mask_specs(alone)) == ["known"]
    model = after_known(then)
    masked = hm.apply_head_masks(model, CHUNK, ignore=["never", f"^{path}"], copy=False)
    assert hm.mask_specs(masked)["known"] == CHUNK


def test_a_subclassed_model_is_named_by_its_name():
    for model in (Whole(name="whole"), Whole(name="whole")):
        model(normal(2, 7, 8))
    with pytest.raises(ValueError, match=r"'whole' \(Whole\) may attend without .*\['whole'\]"):
        hm.apply_head_masks(model, CHUNK)
    masked = hm.apply_head_masks(model, CHUNK, ignore="^whole$", copy=False)
    assert hm.mask_specs(masked) == {"inner_self": CHUNK}


def test_a_layer_may_have_the_name_of_its_model():
    model = of_vectors(lambda x: layers.MultiHeadAttention(2, 4, name="same")(x, x), name="same")
    assert hm.mask_specs(hm.apply_head_masks(model, CHUNK)) == {"same": CHUNK}


class Trainer(keras.Model):
    """A functional model of a class whose code trains it; Keras knows no name of it."""

    def train_step(self, data):
        return {}


def known(x):
    """Of Keras' layers and functions alone; a softmax, but no product; a product, but none."""
    y = keras.Sequential([layers.Dense(8, activation=keras.activations.gelu)])(x)
    y = ops.matmul(ops.exp(y), np.ones((8, 8), "float32"))  # no product of two tensors
    return layers.Dense(3, activation="softmax")(y)


def test_code_of_keras_is_known():
    x = keras.Input((7, 8))
    y = layers.MultiHeadAttention(2, 4, name="known")(x, x)
    masked = hm.apply_head_masks(Trainer(x, known(y)), CHUNK)
    assert list(hm.mask_specs(masked)) == ["known"]


# --- Layers that Keras does not track -------------------------------------------------------------


@registered
class Block(layers.Layer):
    """Holds one attention layer in an attribute, and runs another by a function that holds it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        made = layers.MultiHeadAttention(2, 4, name="attention")
        made.build((None, 7, 8), (None, 7, 8))
        self.run = lambda *x: made(*x)
        self.seen = layers.MultiHeadAttention(2, 4, name="seen")

    def build(self, shape):
        self.seen.build(shape, shape)

    def call(self, x):
        return self.seen(x, x) + self.run(x, x)

    def compute_output_shape(self, shape):
        return shape


def test_a_copy_has_the_weights_of_all_layers_or_is_refused():
    model = of_vectors(lambda x: Block(name="block")(x))
    with pytest.raises(ValueError, match=r"'block' \(Block\) may attend without the rule"):
        hm.apply_head_masks(model, CHUNK, copy=False)
    with pytest.raises(ValueError, match=r"(?s)Copying .* not possible: .*attention.*Assign the"):
        hm.apply_head_masks(model, CHUNK, ignore="^block$")
    masked = hm.apply_head_masks(model, CHUNK, ignore="^block$", copy=False)
    assert list(hm.mask_specs(masked)) == ["block/seen"]
    with pytest.raises(ValueError, match=r"(?s)Copying .* is not possible: .*attention"):
        hm.unmasked(masked)


def sequential(*inner):
    return keras.Sequential([keras.Input((7, 8)), *inner])


@pytest.mark.parametrize("copy", [True, False])
def test_the_graph_inside_a_sequential_model_is_not_taken_for_hidden(copy):
    model = after_known(sequential(sequential(Around(name="part")), layers.Dense(8)))
    masked = hm.apply_head_masks(model, CHUNK, ignore="part$", copy=copy)
    assert len(hm.mask_specs(masked)) == 2
    assert numpy(masked(normal(2, 7, 8))).shape == (2, 7, 8)
    again = hm.apply_head_masks(sequential(Around(name="part")), CHUNK, ignore="part$", copy=copy)
    assert len(hm.mask_specs(again)) == 1
