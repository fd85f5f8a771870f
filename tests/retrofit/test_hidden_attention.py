"""Attention out of sight: computed by hand, or in layers that Keras does not track."""

import functools
import sys
import types

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras.ops import dot_product_attention as sdpa
from small_models import CHUNK

import keras_headmask as hm
from keras_headmask.retrofit import reachable

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
    with pytest.raises(ValueError, match=rf"\({type(layer).__name__}\) .*cannot be reached"):
        hm.apply_head_masks(model, CHUNK)
    masked = hm.apply_head_masks(model, CHUNK, layers="known", copy=False)
    assert list(masked.mask_specs) == ["known"]


def test_code_without_attention_is_left_alone():
    class Harmless(Plain):
        def mix(self, x):
            return decorated(logged(lambda x: ops.softmax(x)))(x)

    for layer in (Harmless(), ByAttribute(Mixer), layers.Lambda(lambda x: ops.tanh(x) * np.pi)):
        if isinstance(layer, ByAttribute):
            layer.mix = keras.activations.softmax
        assert hm.apply_head_masks(beside_known(layer), CHUNK, copy=False).mask_specs


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
    with pytest.raises(ValueError, match=rf"\({named}.* cannot be reached"):
        hm.apply_head_masks(model, CHUNK)
    assert list(hm.apply_head_masks(model, CHUNK, layers="known").mask_specs) == ["known"]


def test_a_softmax_of_other_things_is_no_attention():
    def experts(x):
        gates = ops.softmax(layers.Dense(3)(x))  # (batch, length, experts)
        return ops.einsum("ble,bld->bld", gates, x)

    assert hm.apply_head_masks(beside_known(experts), CHUNK).mask_specs


# --- Layers that Keras does not track -------------------------------------------------------------


class Holder:
    def __init__(self, layer):
        self.layer = layer

    def attend(self, x):
        return self.layer(x, x)


WAYS = {
    "namespace": lambda layer: types.SimpleNamespace(inner=layer),
    "partial": lambda layer: functools.partial(layer),
    "bound method": lambda layer: layer.__call__,
    "closure": lambda layer: lambda x: layer(x, x),
    "object": lambda layer: [Holder({"a": layer})],
    "method of an object": lambda layer: Holder(layer).attend,
}


@keras.saving.register_keras_serializable("test_hidden_attention")
class Block(layers.Layer):
    """Holds one attention layer in an attribute, and a further layer in one of `WAYS`."""

    def __init__(self, way, inner="attention", **kwargs):
        super().__init__(**kwargs)
        self.way = way
        made = layers.MultiHeadAttention(2, 4) if inner == "attention" else layers.Dense(8)
        made.build(*([(None, 7, 8)] * (2 if inner == "attention" else 1)))
        self.held = WAYS[way](made)
        self.seen = layers.MultiHeadAttention(2, 4, name="seen")
        self.inner = inner

    def build(self, shape):
        self.seen.build(shape, shape)

    def call(self, x):
        return self.seen(x, x)

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
    held = r"'block\.held.*\(MultiHeadAttention\) is held where Keras does not track it.*Assign it"
    for copy in (True, False):
        with pytest.raises(ValueError, match=held):
            hm.apply_head_masks(model, CHUNK, copy=copy)
    with pytest.raises(ValueError, match=r"(?s)cannot be copied: .*block\.held.*Assign them"):
        hm.apply_head_masks(model, CHUNK, layers="seen")
    masked = hm.apply_head_masks(model, CHUNK, layers="seen", copy=False)
    assert list(masked.mask_specs) == ["block/seen"]
    with pytest.raises(ValueError, match=r"(?s)cannot be copied: .*block\.held"):
        masked.unmasked()


def test_attention_of_a_module_and_of_a_lambda_layer():
    near = layers.MultiHeadAttention(2, 4, name="near")
    for attend, name in ((lambda x: near(x, x), "near"), (lambda x: FAR(x, x), "FAR")):
        model = beside_known(layers.Lambda(attend, name="hides"))
        with pytest.raises(ValueError, match=rf"'hides\.function -> {name}' .*does not track"):
            hm.apply_head_masks(model, CHUNK, copy=False)


def test_a_copy_has_the_weights_of_all_layers_or_is_refused():
    """A layer without attention would get new random weights as quietly."""
    model = one_block("namespace", "dense")
    with pytest.raises(ValueError, match=r"(?s)cannot be copied: .*'block\.held\.inner'"):
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
    assert len(masked.mask_specs) == 1


def sequential(*inner):
    return keras.Sequential([keras.Input((7, 8)), *inner])


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("attends", [True, False])
def test_the_graph_inside_a_sequential_model_is_not_taken_for_hidden(copy, attends):
    part = SelfAttends() if attends else layers.Dense(8)
    nested = sequential(sequential(part), layers.Dense(8))
    model = beside_known(nested)
    masked = hm.apply_head_masks(model, CHUNK, copy=copy)
    assert len(masked.mask_specs) == 1 + attends
    assert numpy(masked(normal(2, 7, 8))).shape == (2, 7, 8)
    assert len(hm.apply_head_masks(sequential(SelfAttends()), CHUNK, copy=copy).mask_specs) == 1


attention = layers.MultiHeadAttention(2, 4)  # as an attribute of `SelfAttends` is named
attention.build((None, 7, 8), (None, 7, 8))


@pytest.mark.parametrize("copy", [True, False])
def test_an_attribute_is_no_global_of_its_name(copy):
    x = keras.Input((7, 8))
    masked = hm.apply_head_masks(keras.Model(x, SelfAttends()(x)), CHUNK, copy=copy)
    assert len(masked.mask_specs) == 1


def test_a_flag_named_after_an_operation_is_no_attention():
    class Flagged(Plain):
        use_dot_product_attention = False

        def __init__(self):
            super().__init__()
            self.dot_product_attention_is_fast = True

        def mix(self, x):
            flags = self.use_dot_product_attention, self.dot_product_attention_is_fast
            return x * float(all(flags))

    assert hm.apply_head_masks(beside_known(Flagged()), CHUNK, copy=False).mask_specs


class ByMethodOfAnother(Plain):
    def mix(self, x):
        return self.parts.scaled_dot_product_attention(x)


def test_an_operation_called_as_a_method_is_found():
    layer = ByMethodOfAnother()
    layer.parts = types.SimpleNamespace(scaled_dot_product_attention=lambda x: x)
    with pytest.raises(ValueError, match=r"\(ByMethodOfAnother\) .*cannot be reached"):
        hm.apply_head_masks(beside_known(layer), CHUNK)


class Dotted(Plain):
    def mix(self, x):
        return ours.sub.attend(x)


class ImportsFrom(Plain):
    def mix(self, x):
        from ours.sub import attend

        return attend(x)


class ImportsAs(Plain):
    def mix(self, x):
        import ours.sub as near

        def inner():
            return near.attend(x)

        return inner()


class ImportsDotted(Plain):
    def mix(self, x):
        import ours.sub

        return ours.sub.attend(x)


class ClosesOver(Plain):
    def __init__(self):
        super().__init__()
        near = ours.sub
        self.mix = lambda x: near.attend(x)


ours = types.ModuleType("ours")
ours.sub = types.ModuleType("ours.sub")
vars(ours.sub)["helper"] = helper
exec("def attend(x):\n    return helper(x)", vars(ours.sub))


@pytest.mark.parametrize("cls", [Dotted, ImportsFrom, ImportsAs, ImportsDotted, ClosesOver])
def test_functions_of_modules_are_followed(cls, monkeypatch):
    monkeypatch.setitem(sys.modules, "ours", ours)
    monkeypatch.setitem(sys.modules, "ours.sub", ours.sub)
    with pytest.raises(ValueError, match=rf"\({cls.__name__}\) .*cannot be reached"):
        hm.apply_head_masks(beside_known(cls()), CHUNK)


teacher = keras.Sequential([keras.Input((7, 8)), layers.Dense(8)])


@keras.saving.register_keras_serializable("test_hidden_attention")
class Student(Plain):
    rate = 1.0

    def init_from_teacher(self):
        self.rate = float(teacher.layers[0].get_weights()[0].mean())

    def mix(self, x):
        return x * self.rate


@pytest.mark.parametrize("copy", [True, False])
def test_a_model_without_attention_that_a_method_names_is_left_alone(copy):
    assert hm.apply_head_masks(beside_known(Student()), CHUNK, copy=copy).mask_specs


def test_what_data_holds_counts_also_where_code_names_it():
    student = Student(name="student")
    student.parts = types.SimpleNamespace(near=teacher)
    with pytest.raises(ValueError, match=r"(?s)cannot be copied: .*'student\.parts\.near'"):
        hm.apply_head_masks(beside_known(student), CHUNK)


@pytest.mark.parametrize("copy", [True, False])
def test_a_model_around_a_layer_is_not_taken_for_hidden(copy):
    student = Student()
    model = beside_known(student)
    outer = keras.Model(model.inputs, layers.Dense(2)(model.outputs[0]))
    student.parts = types.SimpleNamespace(outer=lambda: outer)
    assert hm.apply_head_masks(model, CHUNK, copy=copy).mask_specs


def test_only_the_start_of_a_long_table_is_looked_at():
    looked_at = []

    class Word(str):
        __slots__ = ()

        def __repr__(self):
            looked_at.append(self)
            return super().__repr__()

    layer = Plain()
    words = [Word(i) for i in range(10_001)]
    layer.tables = types.SimpleNamespace(words=words, entries={w: object() for w in words})
    layer.tables.attends = [helper, *words]
    assert "helper" in reachable.names_in_code(layer)
    assert len(looked_at) == 1_000
