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
from keras_headmask.retrofit.survey import Survey

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


def of_graphs(x):
    scores = layers.Dense(1)(x) + layers.Permute((2, 1))(layers.Dense(1)(x))
    return ops.matmul(ops.softmax(scores), x)


def by_sums_of_products(x):
    scores = ops.sum(layers.Dense(4)(x)[:, :, None] * layers.Dense(4)(x)[:, None], axis=-1)
    return ops.einsum("bts,bsd->btd", ops.softmax(scores / 2.0), x)


def out_of_sight(x):
    scores = layers.Lambda(lambda y: ops.matmul(y, ops.transpose(y, (0, 2, 1))))(layers.Dense(8)(x))
    return ops.matmul(ops.softmax(scores), x)


SYMBOLIC = {
    "ours": (lambda x: split(hm.dot_product_attention, x), "Softmax"),
    "ours with a rule": (
        lambda x: split(functools.partial(hm.dot_product_attention, mask_spec=CHUNK), x),
        "Softmax",
    ),
    "of Keras": (lambda x: split(sdpa, x), "DotProductAttention"),
    "operations": (by_operations, "Softmax"),
    "layers": (by_layers, "Softmax"),
    "exp, divided later": (lambda x: by_exp_divided_later(x), "Exp"),
    "log_softmax": (lambda x: by_log_softmax(x), "LogSoftmax"),
    "additive": (lambda x: by_sums(x, layers.Dense(1)), "Softmax"),
    "of graphs": (of_graphs, "Softmax"),
    "sums of products": (by_sums_of_products, "Softmax"),
    "einsum": (lambda x: by_einsum(layers.Dense(8)(x)), "Softmax"),
    "logits out of sight": (out_of_sight, "Softmax"),
    "a nested model": (lambda x: keras.Model(y := keras.Input((7, 8)), helper(y))(x), "DotProduct"),
}


@pytest.mark.parametrize("how", SYMBOLIC)
def test_attention_that_a_graph_spells_out(how):
    attend, named = SYMBOLIC[how]
    model = beside_known(attend)
    with pytest.raises(ValueError, match=rf"\({named}.* are out of reach"):
        hm.apply_head_masks(model, CHUNK)
    is_copied = how != "logits out of sight"  # (Keras makes no second Lambda of this one)
    masked = hm.apply_head_masks(model, CHUNK, layers="known", copy=is_copied)
    assert list(hm.mask_specs(masked)) == ["known"]


def test_an_exp_of_an_input_is_no_attention():
    x = keras.Input((64, 64))  # a spectrum, say
    y = ops.matmul(ops.exp(x), np.ones((64, 8), "float32"))
    y = layers.MultiHeadAttention(2, 4, name="known")(y, y)
    assert list(hm.mask_specs(hm.apply_head_masks(keras.Model(x, y), CHUNK))) == ["known"]


# --- Spelled out in the code of a layer -----------------------------------------------------------


class Parts(Plain):
    """Mixes positions by a function of a sequence and of layers; its name says nothing."""

    def __init__(self, mix, *parts):
        super().__init__(name="mixer")
        self.mixes, self.parts = mix, list(parts)

    def mix(self, x):
        return self.mixes(x, *self.parts)


def swapped(x):
    return ops.transpose(x, (0, 2, 1))


def by_einsum(x):
    logits = ops.einsum("btd,bsd->bts", x, x)
    return ops.einsum("bts,bsd->btd", ops.softmax(logits), x)


def by_activation(x):
    return keras.activations.softmax(x @ swapped(x)) @ x


def by_parts(x, softmax, dropout):
    return dropout(softmax(x @ swapped(x))) @ x


def by_heads(x, query, output):
    batch, length = ops.shape(x)[:2]
    y = ops.transpose(ops.reshape(query(x), (batch, length, 2, 4)), (0, 2, 1, 3))
    weights = ops.softmax(y @ ops.transpose(y, (0, 1, 3, 2)) / 2.0)
    return output(ops.reshape(ops.transpose(weights @ y, (0, 2, 1, 3)), (batch, length, 8)))


def by_sums(x, dense):
    logits = dense(ops.tanh(x[:, :, None] + x[:, None]))
    return ops.softmax(ops.squeeze(logits, -1)) @ x


def by_exp(x):
    found = ops.exp(x @ swapped(x))
    return found / ops.sum(found, -1, keepdims=True) @ x


def by_exp_divided_later(x):
    found = ops.exp(x @ swapped(x))
    return found @ x / ops.sum(found, -1, keepdims=True)


def by_exp_times_reciprocal(x):
    found = ops.exp(x @ swapped(x))
    return found * ops.reciprocal(ops.sum(found, -1, keepdims=True)) @ x


def by_logsumexp(x):
    logits = x @ swapped(x)
    return ops.exp(logits - ops.logsumexp(logits, -1, keepdims=True)) @ x


def by_log_softmax(x):
    return ops.exp(ops.log_softmax(x @ swapped(x))) @ x


def by_the_backend(x):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x)(x)
    return (x @ x.mT).softmax(-1) @ x


SPELLED_OUT = {
    "operations": lambda: Parts(by_operations),
    "einsum": lambda: Parts(by_einsum),
    "activation": lambda: Parts(by_activation),
    "layers": lambda: Parts(by_parts, layers.Softmax(), layers.Dropout(0.1)),
    "an activation layer": lambda: Parts(by_parts, layers.Activation("softmax"), layers.Identity()),
    "heads": lambda: Parts(by_heads, layers.Dense(8), layers.Dense(8)),
    "additive": lambda: Parts(by_sums, layers.Dense(1)),
    "exp": lambda: Parts(by_exp),
    "exp, divided later": lambda: Parts(by_exp_divided_later),
    "exp times reciprocal": lambda: Parts(by_exp_times_reciprocal),
    "logsumexp": lambda: Parts(by_logsumexp),
    "log_softmax": lambda: Parts(by_log_softmax),
    "the backend": lambda: Parts(by_the_backend),
    "a layer inside": lambda: Parts(lambda x, inner: inner(x), Parts(by_operations)),
    "a Lambda layer": lambda: layers.Lambda(by_operations, name="mixer"),
}


def of_length(length, attend):
    x = keras.Input((length, 8))
    return keras.Model(x, attend(layers.MultiHeadAttention(2, 4, name="known")(x, x)))


@pytest.mark.parametrize("how", SPELLED_OUT)
def test_attention_that_the_code_of_a_layer_spells_out(how):
    for length in (7, None):
        model = of_length(length, SPELLED_OUT[how]())
        with pytest.raises(ValueError, match=r"'mixer' \(\w+\) .*are out of reach"):
            hm.apply_head_masks(model, CHUNK)
        lines = []
        hm.summary_masks(model, lines.append)
        assert "mixer" in lines[1]
    masked = hm.apply_head_masks(model, CHUNK, layers="known", copy=False)
    assert list(hm.mask_specs(masked)) == ["known"]


def experts(x, gate, *inner):
    of_each = ops.stack([layer(x) for layer in inner], 2)
    return ops.einsum("bte,bted->btd", ops.softmax(gate(x)), of_each)


def noisy_experts(x, gate, noise):
    return ops.einsum("bte,btd->btd", ops.softmax((gate(x) + 0.1 * noise(x)) / 2.0), x)


def pooled(x, dense):
    return ops.softmax(swapped(dense(x))) @ x


def pooled_by_the_mean(x):
    return ops.softmax(ops.mean(x, axis=1, keepdims=True) @ swapped(x)) @ x


def squeezed(x, dense):
    return x * ops.softmax(dense(ops.mean(x, 1, keepdims=True)))


def of_features(x, query, key):
    """Linear attention: its products are over features."""
    return ops.softmax(query(x)) @ (swapped(ops.softmax(key(x), axis=1)) @ x)


def routed(x, dense):
    batch, length = ops.shape(x)[:2]
    given = ops.reshape(dense(x), (batch, length, 3, 4))
    agreed = ops.zeros_like(given[..., 0])
    for _ in range(2):
        capsules = ops.einsum("bio,biod->bod", ops.softmax(agreed), given)
        agreed = agreed + ops.einsum("biod,bod->bio", given, capsules)
    return x + ops.mean(capsules)


OF_OTHER_THINGS = {  # functions, and the sizes of the layers that they are given
    "experts": (experts, 3, 8, 8, 8),
    "as many experts as positions": (experts, 7, *[8] * 7),
    "noisy experts": (noisy_experts, 7, 7),
    "pooling": (pooled, 1),
    "pooling by several": (pooled, 4),
    "pooling by the mean": (pooled_by_the_mean,),
    "squeeze and excite": (squeezed, 8),
    "linear": (of_features, 8, 8),
    "capsules": (routed, 12),
    "exp of numbers": (lambda x: x + ops.exp(x) @ ops.ones((8, 8)),),
}
IN_SIGHT = {
    "attention of Keras": lambda: layers.MultiHeadAttention(2, 4),
    "our own": lambda: hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=CHUNK),
}


@pytest.mark.parametrize("what", OF_OTHER_THINGS)
@pytest.mark.parametrize("length", [7, None])
def test_a_softmax_of_other_things_is_no_attention(what, length):
    """In the code of a layer, and in a graph."""
    mix, *sizes = OF_OTHER_THINGS[what]
    parts = [layers.Dense(size) for size in sizes]
    assert not Survey(of_length(length, Parts(mix, *parts))).unknown
    if what != "capsules" or length:  # (a graph cannot reshape by a length that it lacks)
        assert not Survey(of_length(length, lambda x: mix(x, *parts))).unknown


@pytest.mark.parametrize("what", IN_SIGHT)
@pytest.mark.parametrize("length", [7, None])
def test_attention_in_sight_inside_of_a_layer_is_not_told_as_its_own(what, length):
    around = Parts(lambda x, inner: inner(x, x), IN_SIGHT[what]())
    assert not Survey(of_length(length, around)).unknown


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


class Maps(layers.Layer):
    """Attends, and then fails inside of TensorFlow's `map_fn` on request."""

    fails = False

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)

    def call(self, x):
        import tensorflow as tf

        def double(row):
            if self.fails:
                raise ValueError("These sizes are not for it.")
            return 2 * row

        return tf.map_fn(double, self.attention(x, x))


@pytest.mark.tensorflow
def test_code_that_fails_while_it_is_read_leaves_nothing_to_the_process():
    """`tf.map_fn` gives the process a caching device meanwhile, under which `RematScope` raises."""
    import tensorflow as tf

    x = keras.Input((6, 8), batch_size=2)
    layer = Maps()
    model = keras.Model(x, layer(x))
    before, layer.fails = tf.compat.v1.get_variable_scope().caching_device, True
    hm.apply_head_masks(model, CHUNK, copy=False)
    assert tf.compat.v1.get_variable_scope().caching_device is before
    layer.fails = False
    assert np.isfinite(numpy(model(normal(2, 6, 8)))).all()
