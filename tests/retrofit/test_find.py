"""Which attention of a model is self-attention and in which order it runs, by how it is called."""

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from small_models import CHUNK, TOKENS, apply, of_vectors, one_layer
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.find import Found

registered = keras.saving.register_keras_serializable("test_find")


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
class Twins(Composite):
    """Self-attention on one tensor, and on two that only a name tells apart."""

    names = "plain", "as_in_detr", "norm_twice", "my_self_attention"

    def call(self, x):
        batch, length = ops.shape(x)[:2]
        x = x + self.plain(x, x, attention_mask=ops.ones((batch, length, length), "bool"))
        moved = x + 1.0
        x = x + self.as_in_detr(moved, x, key=moved)
        x = x + self.norm_twice(self.norm(x), self.norm(x))
        return x + self.my_self_attention(x * 2.0, x)


@registered
class Latents(Composite):
    """Queries that are weights look at the input, which is of another length, and at themselves."""

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


def two_inputs(*blocks):
    x, memory = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="memory")
    y = x
    for block in blocks:
        y = block(y, memory)
    return keras.Model([x, memory], y, name="model")


def kinds(model):
    return [(entry.path, entry.kind) for entry in Found(model).known]


def test_an_unnamed_cross_attention_gets_no_rule_of_self_attention():
    model = two_inputs(Decoder(name="one"), Decoder(name="two"))
    found = [("one/b", "self"), ("one/a", "unclear"), ("two/b", "self"), ("two/a", "unclear")]
    assert kinds(model) == found
    with pytest.raises(ValueError, match=r"Cannot tell whether .*'one/a' .* by regex"):
        apply(model, CHUNK)
    masked = apply(model, CHUNK, layers="/b")
    assert list(hm.mask_specs(masked)) == ["one/b", "two/b"]
    assert kinds(masked) == found  # a masked model shows what it showed without the rule
    given = [normal(2, 7, 8), normal(2, 7, 8, seed=1)]
    moved = [given[0], given[1].copy()]
    moved[1][:, 6] += 1.0
    felt = abs(numpy(masked(moved)) - numpy(masked(given)))
    assert felt[:, 0].max() > 1e-4  # the memory is seen from anywhere


@pytest.mark.parametrize("dtype_policy", ["mixed_bfloat16"], indirect=True)
def test_tensors_that_are_cast_on_the_way(dtype_policy):
    """Each argument by itself: one tensor must not become two."""
    model = of_vectors(lambda x: Decoder(name="one")(x, x))
    assert kinds(model)[0] == ("one/b", "self")


def test_self_attention_as_people_write_it():
    found = kinds(of_vectors(Twins(name="t")))
    assert found == [
        ("t/plain", "self"),
        ("t/as_in_detr", "self"),
        ("t/norm_twice", "unclear"),
        ("t/my_self_attention", "self"),
    ]


def test_weights_that_look_at_the_input():
    model = of_vectors(lambda x: Latents(name="l")(x))
    found = [("l/among", "self"), ("l/first", "cross"), ("l/second", "cross")]
    assert kinds(model) == found
    assert list(hm.mask_specs(apply(model, CHUNK))) == ["l/among"]


def test_a_body_that_cannot_be_run_is_read_by_names():
    class Closed(OfTwo):
        names = "a_cross", "b"

        def call(self, x, memory):
            if in_symbolic_scope():
                raise TypeError("numbers are needed")
            return self.b(self.a_cross(x, memory), x)

    found = [("one/a_cross", "cross"), ("one/b", "unclear")]
    assert kinds(two_inputs(Closed(name="one"))) == found


def test_attention_that_does_not_run_for_shapes_is_not_taken_for_cross_attention():
    @registered
    class InTraining(Composite):
        names = "always", "in_training"

        def call(self, x, training=False):
            x = self.in_training(x, x) if training else x
            return self.always(x, x)

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    block = InTraining(name="block")
    model = keras.Model(ids, block(layers.Embedding(12, 8)(ids)))
    not_seen = r"(?s)Cannot tell whether .*in_training'.*It did not run when Keras inferred shapes"
    with pytest.raises(ValueError, match=not_seen + r"\. Name the layers by regexes"):
        apply(model, hm.SameSentence(9))
    with pytest.raises(ValueError, match=not_seen + r"\. Name the layer by 'self' or 'cross'"):
        apply(model, hm.SameSentence(9), "in_training", add_inputs=True)
    block.in_training.name = "self_in_training"
    masked = apply(model, hm.SameSentence(9), copy=False)
    assert len(hm.mask_specs(masked)) == 2


def test_attention_that_a_model_has_not_made_yet():
    class MadeInBuild(keras.Model):
        def build(self, shape):
            self.attention = attention("self_attention")
            self.attention.build(shape, shape)

        def call(self, x):
            return self.attention(x, x)

    model = MadeInBuild()
    for layer in (None, "attention"):
        with pytest.raises(ValueError, match=r"layers: none.* call it once on data before"):
            apply(model, CHUNK, layer, copy=False)
    model(normal(2, 7, 8))
    assert hm.mask_specs(apply(model, CHUNK, copy=False)) == {"self_attention": CHUNK}


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

    def held():
        tracked = model._flatten_layers()
        return [(len(x._inbound_nodes), len(x._outbound_nodes), sorted(vars(x))) for x in tracked]

    model = of_vectors(Counts(name="counts"))
    before = held()
    assert kinds(model) == [("counts/a", "self")]
    assert float(model.get_layer("counts").calls) == 0
    assert held() == before


def test_files_name_layers_by_their_attributes(tmp_path):
    """A number in a file means the same layer wherever it is loaded, and however it is seen."""
    model = two_inputs(Decoder(name="one"), Decoder(name="two"))
    rules = {"one/b": CHUNK, "two/a": hm.Window(1, 1), "one/a": hm.Keys(0, 2)}
    masked = hm.apply_head_masks(model, rules)
    masked.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert hm.mask_specs(again) == hm.mask_specs(masked) == rules
    assert list(hm.mask_specs(again)) == ["one/b", "one/a", "two/a"]
    given = [normal(2, 7, 8), normal(2, 5, 8, seed=1)]
    np.testing.assert_array_equal(numpy(again(given)), numpy(masked(given)))


# --- One sequence, or several ---------------------------------------------------------------------


def of_two_texts(outputs):
    first, second = (keras.Input((7,), dtype="int32", name=x) for x in ("token_ids", "answer_ids"))
    embedding = layers.Embedding(12, 8)
    return keras.Model([first, second], outputs(embedding(first), embedding(second)))


def inside(layer):
    return of_vectors(lambda x: layer(x, x))


def mixed(x, y):
    shared = attention("shared")
    z = shared(x, x)
    z = ops.concatenate([z[:, :1], y[:, 1:]], axis=1)
    return shared(z, z)


def in_one_model(x, y):
    model = inside(attention("shared"))
    return [model(x), model(y)]


def in_two_models(x, y):
    shared = attention("shared")
    return [inside(shared)(x), inside(shared)(y)]


def inside_and_directly(x, y):
    shared = attention("shared")
    return [inside(shared)(x), shared(y, y)]


@registered
class Twice(OfTwo):
    names = ("self",)

    def call(self, x, memory):
        self_attention = self.self
        return self_attention(x, x) + self_attention(memory, memory)


def in_a_composite(x, y):
    return Twice()(x, y)


@pytest.mark.parametrize(
    "outputs", [mixed, in_one_model, in_two_models, inside_and_directly, in_a_composite]
)
def test_attention_that_runs_on_two_sequences_takes_no_ids_of_one(outputs):
    model, ids = of_two_texts(outputs), np.ones((1, 7), "int32")
    with pytest.raises(ValueError, match="is called on two sequences, or on one that a further"):
        apply(model, hm.SameSentence(9), copy=False)
    assert not hm.mask_specs(model)
    apply(model, CHUNK, copy=False)([ids, ids])  # reads none


def test_a_masked_model_may_be_called_on_two_texts():
    encoder = hm.apply_head_masks(one_layer(), hm.SameSentence(9))
    names = "token_ids", "other_ids"
    both = [keras.Input((None,), dtype="int32", name=name) for name in names]
    model = keras.Model(both, [encoder(x) for x in both])
    texts = TOKENS, TOKENS[:, ::-1]
    for got, ids in zip(model(list(texts)), texts, strict=True):
        assert_close(numpy(got), numpy(encoder(ids)))


def test_a_query_changed_by_another_input_is_not_taken_for_cross_attention():
    x, other = keras.Input((None, 8), name="x"), keras.Input((8,), name="other")
    query = layers.Multiply()([x, layers.Reshape((1, 8))(other)])
    model = keras.Model([x, other], attention()(query, x))
    with pytest.raises(ValueError, match="Cannot tell whether the attention layer"):
        apply(model, CHUNK)
    apply(model, CHUNK, layers="multi_head")


def test_a_residual_sum_goes_on_with_one_sequence():
    shared = attention("shared")
    ids = keras.Input((7,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    y = x + shared(x, x)
    model = keras.Model(ids, x + shared(y, y))
    assert hm.mask_specs(hm.apply_head_masks(model, hm.SameSentence(9)))
