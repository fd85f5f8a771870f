"""Which attention of a model is self-attention and in which order it runs, by how it is called."""

import json
import threading

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

import keras_headmask as hm
from keras_headmask.retrofit import tracing
from keras_headmask.retrofit.selectors import find_attention

registered = keras.saving.register_keras_serializable("test_tracing")
CHUNK = hm.Chunk(3)


def attention(name=None):
    return layers.MultiHeadAttention(2, 4, name=name)


class Composite(layers.Layer):
    """Attention layers that no name tells apart; `names` in the order of the attributes."""

    names = ()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for name in self.names:
            setattr(self, name, attention(name))
        self.norm = layers.LayerNormalization()

    def build(self, x_shape):
        for name in self.names:
            getattr(self, name).build((None, None, 8), (None, None, 8))
        self.norm.build((None, None, 8))

    def compute_output_shape(self, x_shape):
        return x_shape


class OfTwo(Composite):
    def build(self, x_shape, memory_shape):
        super().build(x_shape)

    def compute_output_shape(self, x_shape, memory_shape):
        return x_shape


@registered
class Decoder(OfTwo):
    """Calls `b` on its own sequence first, then `a` on the memory."""

    names = "a", "b"

    def call(self, x, memory):
        x = self.norm(x + self.b(x, x))
        return self.norm(x + self.a(x, memory))


@registered
class Opaque(Decoder):
    """In functions of the backend's own, which take no symbolic tensors."""

    def call(self, x, memory):
        if keras.backend.is_keras_tensor(x):
            raise TypeError("a function of the backend's own")
        moved = x + 1.0
        x = self.norm(x + self.b(moved, x, key=moved))
        return self.norm(x + self.a(x, memory))


@registered
class Twins(Composite):
    """Self-attention in the ways in which people write it, and the size of its input known."""

    names = "plain", "as_in_detr", "norm_twice", "nested_mask"

    def call(self, x):
        batch, length = ops.shape(x)[:2]
        x = x + self.plain(x, x, attention_mask=ops.ones((batch, length, length), "bool"))
        x = x + self.as_in_detr(x + 1.0, x, key=x + 1.0)
        x = x + self.norm_twice(self.norm(x), self.norm(x))
        _, scores = self.nested_mask(x * 2.0, x, return_attention_scores=True)
        return x + ops.sum(scores[:, 0], -1)[..., None]


@registered
class Latents(Composite):
    """Queries that are weights look at the input twice, and at themselves."""

    names = "second", "first", "among"

    def build(self, shape):
        super().build(shape)
        self.latents = self.add_weight(shape=(8, 8), name="latents")

    def call(self, x):
        latents = ops.broadcast_to(self.latents, (ops.shape(x)[0], 8, 8))
        latents = latents + self.among(latents, latents)
        latents = ops.add(latents, self.first(latents, x))  # JAX takes no symbolic tensor in a sum
        return latents + self.second(latents, x)

    def compute_output_shape(self, shape):
        return (shape[0], 8, 8)


@registered
class Around(OfTwo):
    """A composite layer inside another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = Decoder(name="inside")

    def build(self, x_shape, memory_shape):
        self.inside.build(x_shape, memory_shape)

    def call(self, x, memory):
        return self.inside(memory=memory * 1.0, x=x) * 1.0


def two_inputs(*blocks):
    x, memory = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="memory")
    y = x
    for block in blocks:
        y = block(y, memory)
    return keras.Model([x, memory], y, name="model")


def one_input(*blocks):
    x = y = keras.Input((None, 8), name="x")
    for block in blocks:
        y = block(y)
    return keras.Model(x, y)


def kinds(model):
    return [(entry.path, entry.kind) for entry in find_attention(model).known]


def test_an_unnamed_cross_attention_gets_no_rule_of_self_attention():
    model = two_inputs(Decoder(name="one"), Decoder(name="two"))
    found = [("one/b", "self"), ("one/a", "cross"), ("two/b", "self"), ("two/a", "cross")]
    assert kinds(model) == found
    masked = hm.apply_head_masks(model, CHUNK)
    assert list(masked.mask_specs) == ["one/b", "two/b"]
    assert kinds(masked) == found  # a masked model is traced as it was without the rule
    assert list(hm.apply_head_masks(model, CHUNK, layers=1).mask_specs) == ["two/b"]
    given = [normal(2, 7, 8), normal(2, 7, 8, seed=1)]
    moved = [given[0], given[1].copy()]
    moved[1][:, 6] += 1.0
    felt = abs(numpy(masked(moved)) - numpy(masked(given)))
    assert felt[:, 0].max() > 1e-4  # the memory is seen from anywhere


@pytest.mark.parametrize("dtype_policy", ["mixed_bfloat16"], indirect=True)
def test_tensors_that_are_cast_on_the_way(dtype_policy):
    """Each argument by itself: one tensor becomes two."""
    model = two_inputs(Decoder(name="one"))
    assert kinds(model) == [("one/b", "self"), ("one/a", "cross")]


def test_composite_layers_in_each_other_and_shared():
    shared = Around(name="around")
    model = two_inputs(shared, shared)
    assert kinds(model) == [("around/inside/b", "self"), ("around/inside/a", "cross")]
    swapped = keras.Model(model.inputs, shared(model.inputs[1], model.inputs[0]))
    assert kinds(swapped) == kinds(model)
    mixed = one_input(lambda x: Decoder(name="one")(x, x))
    assert kinds(mixed) == [("one/b", "self"), ("one/a", "self")]  # a memory that is the sequence


def test_self_attention_as_people_write_it():
    assert kinds(one_input(Twins(name="t"))) == [(f"t/{name}", "self") for name in Twins.names]


def test_places_added_to_query_and_key_alone():
    """As in DETR; the places come by an input of their own."""
    x, places = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="places")
    moved = x + places
    one = attention("one_tensor")(moved, x, key=moved)
    two = attention("two_tensors")(x + places, x, key=x + places)
    assert kinds(keras.Model([x, places], one + two)) == [
        ("one_tensor", "self"),
        ("two_tensors", "self"),
    ]


def mean(x):
    return ops.mean(x, axis=1, keepdims=True)


def test_two_sequences_of_which_each_is_changed_by_the_other():
    x, y = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="y")
    for of_other in (mean, lambda x: ops.flip(x, 1)):
        h, m = x + of_other(y), y + of_other(x)
        a, b = attention("a")(h + 1.0, m), attention("b")(h + 1.0, h)
        model = keras.Model([x, y], a + b)
        assert kinds(model) == [("a", "unclear"), ("b", "self")]
        with pytest.raises(ValueError, match="Cannot tell whether the attention layer"):
            hm.apply_head_masks(model, CHUNK)
        assert list(hm.apply_head_masks(model, CHUNK, layers="^a$").mask_specs) == ["a"]


@pytest.mark.parametrize("shared", ["a vector", "a mask"])
def test_two_sequences_that_share_a_third_input(shared):
    """One layer called on both: ids of one say nothing of the other."""
    x, y = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="y")
    third = keras.Input((1, 8) if shared == "a vector" else (None, 1), name="third")
    layer = attention("a")
    model = keras.Model([x, y, third], [layer(h, h) for h in (x * third, y * third)])
    with pytest.raises(ValueError, match=r"'a' .*is called on two sequences"):
        hm.apply_head_masks(model, hm.SameSegment("ids"), add_inputs=True)
    hm.apply_head_masks(model, CHUNK)  # reads none

    y = x * third  # on a sequence and what a vector makes of it: one; of a mask, nobody knows
    model = keras.Model([x, third], layer(layer(x, x) * third, y))
    if shared == "a vector":
        hm.apply_head_masks(model, hm.SameSegment("ids"), layers="a", add_inputs=True)
    else:
        with pytest.raises(ValueError, match="or on one that a further input changes"):
            hm.apply_head_masks(model, hm.SameSegment("ids"), layers="a", add_inputs=True)


def test_weights_that_look_at_the_input():
    found = [("l/among", "self"), ("l/first", "cross"), ("l/second", "cross")]
    assert kinds(one_input(Latents(name="l"))) == found
    masked = hm.apply_head_masks(one_input(Latents(name="l")), CHUNK)
    assert list(masked.mask_specs) == ["l/among"]


def test_one_length_or_another():
    """Of one input, but not of one length: the first token looks at all."""
    x = keras.Input((None, 8))
    model = keras.Model(x, attention("pool")(x[:, :1], x))
    assert kinds(model) == [("pool", "cross")]


def test_a_body_that_shows_nothing_but_its_tensors():
    """The same tensor twice is self-attention; of two tensors, a name may tell."""
    model = two_inputs(Opaque(name="one"))
    assert kinds(model) == [("one/b", "self"), ("one/a", "unclear")]
    for layers_ in (None, 0):
        with pytest.raises(ValueError, match=r"Cannot tell whether .*'one/a' .* by regex"):
            hm.apply_head_masks(model, CHUNK, layers=layers_)
    rules = {"one/b": CHUNK, "/a": hm.SameSegment("ids")}
    masked = hm.apply_head_masks(model, rules, add_inputs=True)
    assert [x.name for x in masked.inputs] == ["x", "memory", "key_ids", "query_ids"]
    lines = []
    masked.summary_masks(lines.append)
    assert [line.split()[5] for line in lines] == ["self", "unclear"]

    model.get_layer("one").a.name = "to_memory_by_cross_attention"
    assert kinds(model)[1] == ("one/to_memory_by_cross_attention", "cross")
    model.get_layer("one").a.name = "late_self_attention"
    assert kinds(model)[1] == ("one/late_self_attention", "self")


def test_a_body_that_shows_nothing_at_all_is_read_by_names():
    class Closed(OfTwo):
        names = "a_cross", "b"

        def call(self, x, memory):
            if in_symbolic_scope() or keras.backend.is_keras_tensor(x):
                raise TypeError("numbers are needed")
            return self.b(self.a_cross(x, memory), x)

    found = [("one/a_cross", "cross"), ("one/b", "unclear")]
    assert kinds(two_inputs(Closed(name="one"))) == found


class UpTo16(Decoder):
    def call(self, x, memory):
        if x.shape[1] is not None and x.shape[1] > 16:
            raise ValueError("too long")
        return super().call(x, memory)


@pytest.mark.parametrize(("block", "kernel"), [(UpTo16, 1), (Decoder, 100)])
def test_lengths_that_the_model_can_take(block, kernel):
    """Some take no long ones; a convolution over many steps takes no short ones."""
    x, memory = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="memory")
    y = layers.Conv1D(8, kernel)(x)
    model = keras.Model([x, memory], block(name="one")(y, memory))
    assert kinds(model) == [("one/b", "self"), ("one/a", "cross")]


def test_layers_that_were_built_for_the_length_that_keras_puts_in():
    """PyTorch's backend builds what a body holds at the length with which it tries the body."""

    class BuildsInside(Composite):
        names = ("a", "b")

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.Sequential([layers.Dense(8)])

        def build(self, x_shape, memory_shape):
            super().build(x_shape)

        def call(self, x, memory):
            return self.dense(self.b(x, self.a(x, memory)))

        compute_output_shape = layers.Layer.compute_output_shape

    assert kinds(two_inputs(BuildsInside(name="one"))) == [("one/a", "cross"), ("one/b", "self")]


def test_a_model_that_takes_no_known_lengths_is_read_by_its_graph():
    class Unknown(layers.Layer):
        def call(self, x):
            return x * 1.0

        def compute_output_shape(self, shape):
            if shape[1] is not None:
                raise ValueError("lengths are never known here")
            return shape

    x, memory = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="memory")
    y = attention("to_itself")(Unknown()(x), x)
    y = attention("to_memory")(y, memory)
    y = attention("again")(y, memory)
    model = keras.Model([x, memory], y)
    assert tracing._Trace(model).read_graphs() == tracing.attention_calls(model)
    found = [("to_itself", "self"), ("to_memory", "cross"), ("again", "cross")]
    assert kinds(model) == found


def test_no_trace_is_left_of_the_trace():
    @registered
    class Counts(Composite):
        names = ("a",)

        def build(self, shape):
            super().build(shape)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.calls.assign_add(1.0)
            return self.a(x, x)

    model = one_input(Counts(name="counts"))
    held = [
        (len(x._inbound_nodes), len(x._outbound_nodes), sorted(vars(x)))
        for x in model._flatten_layers()
    ]
    assert kinds(model) == [("counts/a", "self")]
    assert float(model.get_layer("counts").calls) == 0
    assert held == [
        (len(x._inbound_nodes), len(x._outbound_nodes), sorted(vars(x)))
        for x in model._flatten_layers()
    ]


def test_what_others_build_meanwhile_on_a_layer_stays():
    shared, made = layers.Dense(8), []

    def build():
        x = keras.Input((7, 8))
        made.append(keras.Model(x, shared(x)))

    @registered
    class Meets(layers.Layer):
        def call(self, x):
            if not made:
                other = threading.Thread(target=build)
                other.start()
                other.join(20)
            return x

        def compute_output_spec(self, x):
            self.call(x)
            return keras.KerasTensor(x.shape, x.dtype)

    made.append(None)  # not yet
    x = keras.Input((7, 8))
    model = keras.Model(x, Meets()(shared(layers.MultiHeadAttention(4, 3)(x, x))))
    held = shared._inbound_nodes
    made.clear()
    assert len(kinds(model)) == 1
    (other,) = made
    longer = keras.Model(other.inputs, layers.Dense(2)(other.output))
    again = keras.Model.from_config(other.get_config())
    assert longer.count_params() == 8 * 8 + 8 + 8 * 2 + 2
    assert again.output.shape == (None, 7, 8)
    assert shared._inbound_nodes is held
    assert len(held) == 2


def test_files_name_layers_by_their_attributes(tmp_path):
    """A number in a file means the same layer wherever it is loaded, and however it is traced."""
    model = two_inputs(Decoder(name="one"), Decoder(name="two"))
    masked = hm.apply_head_masks(
        model, {"0": CHUNK, "two/a": hm.Window(1, 1), "one/a": hm.Keys(0, 2)}
    )
    rules = json.loads(masked.to_json())["config"]["mask_specs"]
    assert [rule["layers"] for rule in rules] == [[0], [1], [2]]
    masked.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.mask_specs == masked.mask_specs
    assert list(again.mask_specs) == ["one/b", "one/a", "two/a"]
    given = [normal(2, 7, 8), normal(2, 5, 8, seed=1)]
    np.testing.assert_array_equal(numpy(again(given)), numpy(masked(given)))


def test_files_name_the_inputs_that_a_rule_reads(tmp_path, monkeypatch):
    """Even if, where a model is loaded, less is seen of what attends to what."""
    model = two_inputs(Decoder(name="one"))
    masked = hm.apply_head_masks(model, hm.SameSegment("ids"), add_inputs=True)
    masked.save(tmp_path / "model.keras")
    monkeypatch.setattr(tracing, "attention_calls", lambda model: [])
    monkeypatch.setattr("keras_headmask.retrofit.selectors._kind", lambda *shown: "unclear")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert [x.name for x in again.inputs] == ["x", "memory", "ids"]
    assert again.get_config()["mask_specs"] == masked.get_config()["mask_specs"]
