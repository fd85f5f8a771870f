"""A masked model never loses its rule in silence, nor does any attention escape one."""

import copy

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from small_models import CHUNK, PARTS, TOKENS, apply, by_loops, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm


def test_time_distributed_runs_a_masked_model_on_each_text():
    masked = hm.apply_head_masks(one_layer(mask_zero=False), hm.SameSentence(9))
    texts = keras.Input((2, 7), dtype="int32")
    model = keras.Model(texts, layers.TimeDistributed(masked)(texts))
    assert_close(numpy(model(TOKENS[None]))[0], numpy(masked(TOKENS)))


@pytest.mark.parametrize(
    ("rule_inside", "name"),
    [
        (hm.SameSentence(9), "part_ids"),
        (hm.SameSentence(9), "token_ids"),
        (hm.SameSegment(input="token_ids"), "token_ids"),  # the same rule, of other ids
    ],
)
def test_rules_of_a_model_and_of_one_inside_read_inputs_of_their_own(rule_inside, name):
    """Also where two inputs have one name: `token_ids` of the outer model and of the inner one."""
    stock = one_layer(mask_zero=False)
    inner = hm.apply_head_masks(stock, rule_inside)
    text = keras.Input((None,), dtype="int32", name="text_ids")
    outer, part = keras.Model(text, inner(text)), hm.SameSegment(input=name)
    both = hm.apply_head_masks(outer, part, existing="and", add_inputs=True)
    inputs = {"token_ids": TOKENS, "part_ids": PARTS}
    rule = rule_inside & hm.SameSegment(input="part_ids")
    expected = by_loops(stock, rule, inputs, padding=False)
    assert_close(numpy(both([TOKENS, PARTS])), expected)


def test_a_failed_call_leaves_the_model_alone():
    model = one_layer()
    for spec in (hm.SameSegment("embedding"), hm.PerHead({9: CHUNK})):
        with pytest.raises(ValueError, match=r"Give the mask input another name|head 9"):
            hm.apply_head_masks(model, spec, copy=False)
        model(TOKENS)
    for bad, match in (("no json", "rule's JSON"), (CHUNK, "names no layer")):
        with pytest.raises(ValueError, match=match):
            hm.apply_head_masks(model, bad, layers="" if bad is CHUNK else None)


def test_a_key_that_is_not_the_name_of_its_tensor():
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model({"token_ids": ids}, layers.MultiHeadAttention(2, 4)(x, x))
    with pytest.raises(ValueError, match=r"'token_ids' under that key, but .* named 'ids'"):
        hm.apply_head_masks(model, hm.SameSentence(9))


def test_frozen_layers_and_adapters_stay_so():
    stock = stack(2)
    stock.get_layer("embedding").trainable = False
    stock.get_layer("block_0").attention.trainable = False  # which the block's config does not say
    stock.get_layer("block_1").attention.query_dense.enable_lora(2)
    adapter = stock.get_layer("block_1").attention.query_dense.lora_kernel_b
    adapter.assign(normal(*adapter.shape))
    masked = apply(stock, hm.Full())
    np.testing.assert_array_equal(numpy(masked(TOKENS)), numpy(stock(TOKENS)))
    ours, theirs = ([(w.shape, w.trainable) for w in m.weights] for m in (masked, stock))
    assert ours == theirs
    assert len(masked.trainable_weights) == len(stock.trainable_weights) < len(stock.weights)


def test_two_classes_of_one_name_are_not_mixed_up():
    def scale(by):
        class Scale(layers.Layer):
            def call(self, x):
                return x * by

        return Scale()

    x = keras.Input((7, 8))
    model = keras.Model(x, scale(3)(scale(2)(layers.MultiHeadAttention(2, 4)(x, x))))
    with pytest.raises(ValueError, match="two classes named 'Scale'"):
        apply(model, CHUNK)
    apply(model, CHUNK, copy=False)


def test_keras_hub_still_finds_its_own_classes(tmp_path):
    keras_hub = pytest.importorskip("keras_hub")
    from backbones import COVERED

    backbone = keras_hub.models.BertBackbone(**COVERED[0].arguments)
    backbone.save_to_preset(tmp_path)
    task = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    assert "BertTextClassifier" in type(hm.apply_head_masks(task, CHUNK)).__name__
    loaded = keras_hub.models.TextClassifier.from_preset(
        str(tmp_path), preprocessor=None, num_classes=2
    )
    assert type(loaded) is keras_hub.models.BertTextClassifier


def test_a_rule_that_no_layer_used():
    @keras.saving.register_keras_serializable("test_never_unmasked")
    class Sometimes(layers.MultiHeadAttention):
        bypass = False

        def call(self, query, value, key=None):
            return query if Sometimes.bypass else super().call(query, value, key)

    x, given = keras.Input((7, 8)), normal(2, 7, 8)
    masked = apply(keras.Model(x, Sometimes(4, 3, name="s")(x, x)), CHUNK)
    masked(given)
    Sometimes.bypass = True
    with pytest.raises(RuntimeError, match=r"attention layer 's' was not used in this call"):
        masked(given)


def test_several_attention_axes_are_refused():
    x = keras.Input((4, 4, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x))
    with pytest.raises(ValueError, match="attends over several axes"):
        hm.apply_head_masks(model, CHUNK)(normal(1, 4, 4, 8))


# --- What would be wrong in silence ---------------------------------------------------------------


def attention_of(query, value):
    return layers.MultiHeadAttention(2, 4)(query, value)


@pytest.mark.tensorflow
def test_a_copy_has_vocabularies():
    import tensorflow as tf

    words = layers.TextVectorization(output_sequence_length=6)
    words.adapt(["drums in the deep"])
    text = keras.Input((), dtype="string")
    h = layers.Embedding(20, 8)(words(text))
    model = keras.Model(text, attention_of(h, h))
    given = tf.constant(["in the deep"])
    masked = hm.apply_head_masks(model, hm.Full())
    np.testing.assert_array_equal(numpy(masked(given)), numpy(model(given)))


def test_layers_outside_of_the_graph_cannot_be_copied():
    model = one_layer()
    model.head = layers.Dense(3)
    model.head.build((None, 8))
    with pytest.raises(ValueError, match=r"outside of its graph.*'dense.*copy=False"):
        hm.apply_head_masks(model, CHUNK)


def test_a_layer_called_on_two_sequences_needs_a_rule_that_reads_neither():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    h = layers.Embedding(12, 8)(ids)
    encoder = keras.Model(ids, attention_of(h, h), name="encoder")

    def siamese(encoder):
        both = [keras.Input((None,), dtype="int32", name=n) for n in ("token_ids", "other_ids")]
        return keras.Model(both, [encoder(x) for x in both])

    with pytest.raises(ValueError, match="is called on two sequences"):
        hm.apply_head_masks(siamese(encoder), hm.SameSentence(9))
    hm.apply_head_masks(siamese(encoder), CHUNK)  # reads none
    model = siamese(hm.apply_head_masks(encoder, hm.SameSentence(9)))  # the way out
    one, two = np.array([[1, 2, 3, 9, 4, 5]]), np.array([[1, 9, 3, 4, 5, 6]])
    changed = np.array([[7, 9, 3, 4, 5, 6]])
    before, after = (numpy(model([one, x])[1])[0] for x in (two, changed))
    np.testing.assert_array_equal(before[2:], after[2:])
    assert np.abs(before[1] - after[1]).max() > 1e-3


def test_a_query_changed_by_another_input_is_not_taken_for_cross_attention():
    x, other = keras.Input((None, 8), name="x"), keras.Input((8,), name="other")
    query = layers.Multiply()([x, layers.Reshape((1, 8))(other)])
    model = keras.Model([x, other], attention_of(query, x))
    with pytest.raises(ValueError, match="Cannot tell whether the attention layer"):
        hm.apply_head_masks(model, CHUNK)
    hm.apply_head_masks(model, CHUNK, layers="multi_head")


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has 32 bits")
def test_ids_of_64_bits():
    """Keras casts a model's inputs, so that of the ids must have 64 bits."""
    x, ids = keras.Input((4, 8)), keras.Input((4,), dtype="int64", name="ids")
    model = keras.Model([x, ids], attention_of(x, x))
    masked = hm.apply_head_masks(model, hm.SameSegment("ids"))
    outer = keras.Model([x, ids], masked([x, ids]))
    given, wide = normal(1, 4, 8), np.array([[5, 5 + 2**32, 6, 5]])
    expected = numpy(masked([given, np.array([[5, 7, 6, 5]])]))
    assert_close(numpy(outer([given, wide])), expected)


# --- Made again: which attention, which tensors, which rule ---------------------------------------


@keras.saving.register_keras_serializable("test_never_unmasked")
class BuiltLate(layers.Layer):
    """Its attention is made in `build`, and a config does not build it."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(2, 4, name="self_attention")
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)

    def get_build_config(self):
        return None


@keras.saving.register_keras_serializable("test_never_unmasked")
class AfterABlock(layers.Layer):
    """Without `build`: a config says it is built before the block inside has made its attention."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = BuiltLate(name="inner")
        self.other = layers.MultiHeadAttention(2, 4, name="other_self_attention")

    def call(self, x):
        x = self.inner(x)
        return ops.concatenate([x, 0 * self.other(x, x)], axis=-1)


@pytest.mark.parametrize(
    "again",
    [
        lambda model, file: model.save(file) or keras.saving.load_model(file),
        lambda model, file: copy.deepcopy(model),
        lambda model, file: apply(model, hm.Full(), existing="and"),
    ],
    ids=["save", "deepcopy", "a rule on top"],
)
def test_a_rule_stays_with_its_attention_when_others_are_made_later(again, tmp_path):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model(ids, AfterABlock(name="block")(x))
    rule = hm.SameSentence(9)
    masked = apply(model, rule, layers="block/inner.*")
    again = again(masked, tmp_path / "model.keras")
    again.set_weights(masked.get_weights())
    specs = {path.split("block/")[1]: spec for path, spec in hm.mask_specs(again).items()}
    assert specs["inner/self_attention"] in (rule, rule & hm.Full())
    assert specs.get("other_self_attention", hm.Full()) == hm.Full()
    np.testing.assert_array_equal(numpy(again(TOKENS)), numpy(masked(TOKENS)))
