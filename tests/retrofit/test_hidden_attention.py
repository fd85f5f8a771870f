"""Attention out of sight: computed by hand, or in layers that Keras does not track."""

import functools
import types

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras.ops import dot_product_attention as sdpa
from small_models import CHUNK

import keras_headmask as hm

FAR = layers.MultiHeadAttention(2, 4, name="far")


def split(attend, x):
    return attend(x[:, :, None], x[:, :, None], x[:, :, None])[:, :, 0]


def helper(x):
    return split(sdpa, x)


def logged(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)

    return call


def decorated(function):
    """As `logged`, by somebody who forgot `wraps`."""
    return lambda *arguments: function(*arguments)


class Plain(layers.Layer):
    """Mixes positions, by what subclasses say."""

    def call(self, x):
        return x + self.mix(x)

    def compute_output_shape(self, shape):
        return shape


class ByAlias(Plain):
    def mix(self, x):
        return split(sdpa, x)


class ByStatic(Plain):
    @staticmethod
    def mix(x):
        return split(ops.dot_product_attention, x)


class ByClass(Plain):
    @classmethod
    def mix(cls, x):
        return split(ops.nn.dot_product_attention, x)


class ByDecorated(Plain):
    @logged
    def mix(self, x):
        return split(ops.dot_product_attention, x)


class ByDecoratedWithoutAName(Plain):
    @decorated
    def mix(self, x):
        return split(ops.dot_product_attention, x)


class ByNested(Plain):
    def mix(self, x):
        def inner(x):
            return (lambda x: split(ops.dot_product_attention, x))(x)

        return inner(x)


class ByHelper(Plain):
    def mix(self, x):
        return helper(x)


class ByDefault(Plain):
    def mix(self, x, attend=ops.dot_product_attention):
        return split(attend, x)


class ByProperty(Plain):
    @property
    def mix(self):
        return helper


class Ours(Plain):
    def mix(self, x):
        return split(hm.dot_product_attention, x)


class ByAttribute(Plain):
    def __init__(self, mix, **kwargs):
        super().__init__(**kwargs)
        self.mix = mix


class Mixer:
    def mix(self, x):
        return helper(x)


HAND_WRITTEN = {
    "alias": ByAlias,
    "static method": ByStatic,
    "class method": ByClass,
    "decorated": ByDecorated,
    "decorated without wraps": ByDecoratedWithoutAName,
    "nested": ByNested,
    "helper": ByHelper,
    "default": ByDefault,
    "property": ByProperty,
    "ours": Ours,
    "lambda": lambda: ByAttribute(lambda x: split(sdpa, x)),
    "partial": lambda: ByAttribute(functools.partial(split, sdpa)),
    "a method of another object": lambda: ByAttribute(Mixer().mix),
    "a class of operations": lambda: ByAttribute(
        lambda x: split(keras.src.ops.nn.DotProductAttention(), x)
    ),
    "a Lambda layer": lambda: layers.Lambda(lambda x: x + helper(x)),
}


def beside_known(attend):
    x = keras.Input((7, 8))
    return keras.Model(x, attend(layers.MultiHeadAttention(2, 4, name="known")(x, x)))


@pytest.mark.parametrize("how", HAND_WRITTEN)
def test_dot_product_attention_is_found_in_code(how):
    layer = HAND_WRITTEN[how]()
    model = beside_known(layer)
    with pytest.raises(ValueError, match=rf"\({type(layer).__name__}\) .*are out of reach"):
        hm.apply_head_masks(model, CHUNK)
    masked = hm.apply_head_masks(model, CHUNK, layers="known", copy=False)
    assert list(hm.mask_specs(masked)) == ["known"]


def test_code_without_attention_is_left_alone():
    class Harmless(Plain):
        def mix(self, x):
            return decorated(logged(lambda x: ops.softmax(x)))(x)

    for layer in (Harmless(), ByAttribute(Mixer), layers.Lambda(lambda x: ops.tanh(x) * np.pi)):
        if isinstance(layer, ByAttribute):
            layer.mix = keras.activations.softmax
        assert hm.mask_specs(hm.apply_head_masks(beside_known(layer), CHUNK, copy=False))


def by_operations(x):
    weights = ops.softmax(x @ ops.transpose(x, (0, 2, 1)))
    return ops.cast(weights, "float32") @ x


def by_layers(x):
    return layers.Dot((2, 1))([layers.Softmax()(layers.Dot(2)([x, x])), x])


SYMBOLIC = {
    "ours": (lambda x: split(hm.dot_product_attention, x), "Softmax"),
    "ours with a rule": (
        lambda x: split(functools.partial(hm.dot_product_attention, mask_spec=CHUNK), x),
        "Softmax",
    ),
    "of Keras": (lambda x: split(sdpa, x), "DotProductAttention"),
    "operations": (by_operations, "Softmax"),
    "layers": (by_layers, "Softmax"),
    "a nested model": (lambda x: keras.Model(y := keras.Input((7, 8)), helper(y))(x), "DotProduct"),
}


@pytest.mark.parametrize("how", SYMBOLIC)
def test_attention_that_a_graph_spells_out(how):
    attend, named = SYMBOLIC[how]
    model = beside_known(attend)
    with pytest.raises(ValueError, match=rf"\({named}.* are out of reach"):
        hm.apply_head_masks(model, CHUNK)
    assert list(hm.mask_specs(hm.apply_head_masks(model, CHUNK, layers="known"))) == ["known"]


def test_a_softmax_of_other_things_is_no_attention():
    def experts(x):
        gates = ops.softmax(layers.Dense(3)(x))  # (batch, length, experts)
        return ops.einsum("ble,bld->bld", gates, x)

    assert hm.mask_specs(hm.apply_head_masks(beside_known(experts), CHUNK))


# --- Layers that Keras does not track -------------------------------------------------------------


class Holder:
    def __init__(self, layer):
        self.layer = layer

    def run(self, *x):
        return self.layer(*x)


def in_a_space(space, *x):
    return space.run(*x)


WAYS = {
    "namespace": lambda layer: functools.partial(in_a_space, types.SimpleNamespace(run=layer)),
    "partial": lambda layer: functools.partial(layer),
    "bound method": lambda layer: layer.__call__,
    "closure": lambda layer: lambda *x: layer(*x),
    "object": lambda layer: {"a": Holder(layer)}["a"].run,
}


@keras.saving.register_keras_serializable("test_hidden_attention")
class Block(layers.Layer):
    """Holds one attention layer in an attribute, and runs a further layer by one of `WAYS`."""

    def __init__(self, way, inner="attention", **kwargs):
        super().__init__(**kwargs)
        self.way = way
        self.count = 2 if inner == "attention" else 1
        made = layers.MultiHeadAttention(2, 4) if inner == "attention" else layers.Dense(8)
        made.build(*([(None, 7, 8)] * self.count))
        self.held = (WAYS[way](made),)
        self.seen = layers.MultiHeadAttention(2, 4, name="seen")
        self.inner = inner

    def build(self, shape):
        self.seen.build(shape, shape)

    def call(self, x):
        return self.seen(x, x) + self.held[0](*[x] * self.count)

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return super().get_config() | {"way": self.way, "inner": self.inner}


@keras.saving.register_keras_serializable("test_hidden_attention")
class SelfAttends(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x)

    def compute_output_shape(self, shape):
        return shape


def one_block(*arguments):
    x = keras.Input((7, 8))
    return keras.Model(x, Block(*arguments, name="block")(x))


@pytest.mark.parametrize("way", WAYS)
def test_attention_that_keras_does_not_track(way):
    model = one_block(way)
    held = r"'block' \(Block\) attends with weights that Keras does not track .*attention.*Assign"
    for copy in (True, False):
        with pytest.raises(ValueError, match=held):
            hm.apply_head_masks(model, CHUNK, copy=copy)
    with pytest.raises(ValueError, match=r"(?s)Copying .* not possible: .*attention.*Assign the"):
        hm.apply_head_masks(model, CHUNK, layers="seen")
    masked = hm.apply_head_masks(model, CHUNK, layers="seen", copy=False)
    assert list(hm.mask_specs(masked)) == ["block/seen"]
    with pytest.raises(ValueError, match=r"(?s)Copying .* is not possible: .*attention"):
        hm.unmasked(masked)


def test_attention_of_a_module_and_of_a_lambda_layer():
    near = layers.MultiHeadAttention(2, 4, dropout=0.1, name="near_attention")
    for attend in (lambda x: near(x, x), lambda x: FAR(x, x)):
        model = beside_known(layers.Lambda(attend, name="hides"))
        with pytest.raises(ValueError, match=r"'hides' \(Lambda\) attends with weights that"):
            hm.apply_head_masks(model, CHUNK, copy=False)


def test_a_copy_has_the_weights_of_all_layers_or_is_refused():
    """A layer without attention would get new random weights as quietly."""
    model = one_block("namespace", "dense")
    with pytest.raises(ValueError, match=r"(?s)Copying .* is not possible: .*dense.*/kernel"):
        hm.apply_head_masks(model, CHUNK)
    masked = hm.apply_head_masks(model, CHUNK, copy=False)
    assert numpy(masked(normal(2, 7, 8))).shape == (2, 7, 8)


def test_layers_that_keras_tracks_are_not_taken_for_hidden():
    class Tracks(layers.Layer):
        def __init__(self):
            super().__init__()
            self.listed = [layers.MultiHeadAttention(2, 4, name="listed")]
            self.named = {"a": self.listed[0]}
            self.attend = lambda x: self.listed[0](x, x)
            self.parts = types.SimpleNamespace(same=self.listed[0], me=self)

        def call(self, x):
            return self.attend(x)

    x = keras.Input((7, 8))
    masked = hm.apply_head_masks(keras.Model(x, Tracks()(x)), CHUNK, copy=False)
    assert len(hm.mask_specs(masked)) == 1


def sequential(*inner):
    return keras.Sequential([keras.Input((7, 8)), *inner])


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("attends", [True, False])
def test_the_graph_inside_a_sequential_model_is_not_taken_for_hidden(copy, attends):
    part = SelfAttends() if attends else layers.Dense(8)
    nested = sequential(sequential(part), layers.Dense(8))
    model = beside_known(nested)
    masked = hm.apply_head_masks(model, CHUNK, copy=copy)
    assert len(hm.mask_specs(masked)) == 1 + attends
    assert numpy(masked(normal(2, 7, 8))).shape == (2, 7, 8)
    again = hm.apply_head_masks(sequential(SelfAttends()), CHUNK, copy=copy)
    assert len(hm.mask_specs(again)) == 1
