"""A masked model never loses its rule in silence, nor does any attention escape one."""

import copy
import pickle

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from small_models import CHUNK, TOKENS, leak, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm

LOST = "obeys a rule of the model .*if it was saved, cloned or copied alone"


def cut_out(masked):
    """A model of a masked one's tensors, as one builds a head on a stock model."""
    return keras.Model(masked.inputs, layers.Dense(2)(masked.output))


WAYS = {
    "save": lambda model, file: model.save(file),
    "clone": lambda model, file: keras.models.clone_model(model),
    "config": lambda model, file: model.get_config(),
    "deepcopy": lambda model, file: copy.deepcopy(model),
    "pickle": lambda model, file: pickle.dumps(model),
    "a rule on top": lambda model, file: hm.apply_head_masks(model, hm.Full(), existing="and"),
}


@pytest.mark.parametrize("make", [one_layer, stack], ids=["layer", "composite layers"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_masked_layers_is_not_filed_without_the_rule(way, make, tmp_path):
    model = cut_out(hm.apply_head_masks(make(), CHUNK))
    with pytest.raises((RuntimeError, ValueError), match=LOST):
        WAYS[way](model, tmp_path / "model.keras")


def test_nor_is_a_masked_layer():
    layer = hm.apply_head_masks(one_layer(), CHUNK).get_layer("attention")
    for way in (copy.deepcopy, pickle.dumps, lambda x: x.get_config()):
        with pytest.raises(RuntimeError, match=LOST):
            way(layer)


def test_what_is_built_on_a_call_keeps_the_rule(tmp_path):
    masked = hm.apply_head_masks(one_layer(), CHUNK)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    model = keras.Model(ids, layers.Dense(2)(masked(ids)))
    assert leak(model) == 0
    model.save(tmp_path / "model.keras")
    assert leak(keras.saving.load_model(tmp_path / "model.keras")) == 0
    assert leak(hm.apply_head_masks(model, hm.Window(5, 5), existing="and")) == 0


def test_the_masked_model_itself_is_filed_and_copied(tmp_path):
    masked = hm.apply_head_masks(stack(), CHUNK)
    masked.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for other in (loaded, copy.deepcopy(masked), pickle.loads(pickle.dumps(masked))):
        np.testing.assert_array_equal(numpy(other(TOKENS)), numpy(masked(TOKENS)))
    assert leak(masked.unmasked()) > 1e-3
    masked.unmasked().get_config()  # the layers of a stock copy are free


def test_replace_after_and_replaces_all():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    own = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=CHUNK, name="attention")
    both = hm.apply_head_masks(keras.Model(ids, own(x)), hm.Window(5, 5), existing="and")
    assert both.mask_specs == {"attention": CHUNK & hm.Window(5, 5)}
    assert leak(both) == 0
    replaced = hm.apply_head_masks(both, hm.Full(), existing="replace")
    assert replaced.mask_specs == {"attention": hm.Full()}
    assert leak(replaced) > 1e-4


def test_a_rule_over_a_masked_model_inside_tells_both():
    inner = hm.apply_head_masks(one_layer(), CHUNK)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    both = hm.apply_head_masks(keras.Model(ids, inner(ids)), hm.Window(5, 5), existing="and")
    assert list(both.mask_specs.values()) == [CHUNK & hm.Window(5, 5)]
    lines = []
    both.summary_masks(lines.append)
    assert "Chunk(3) & Window" in lines[0]
    replaced = hm.apply_head_masks(both, hm.Full(), existing="replace")
    assert list(replaced.mask_specs.values()) == [hm.Full()]


def test_floats_for_a_mask_input_are_refused():
    masked = hm.apply_head_masks(one_layer(), hm.MaskInput("mask"), add_inputs=True)
    allowed = np.tril(np.ones((2, 4, 7, 7), bool))
    masked([TOKENS, allowed])
    additive = np.where(allowed, 0, -1e9).astype("float32")
    for given in ([TOKENS, additive], {"token_ids": TOKENS, "mask": additive}):
        with pytest.raises(TypeError, match=r"'mask'.* must be integer or boolean.*from_additive"):
            masked(given)


class MaskedSelfAttention(layers.Layer):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("attend", "told"),
    [
        (MaskedSelfAttention(), "MaskedSelfAttention"),
        (
            lambda x: keras.ops.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None])[
                :, :, 0
            ],
            "DotProductAttention",
        ),
    ],
    ids=["a class of its own", "an operation"],
)
def test_attention_that_no_rule_reaches_is_told(attend, told):
    x = keras.Input((7, 8))
    model = keras.Model(x, attend(layers.MultiHeadAttention(2, 4)(x, x)))
    with pytest.raises(ValueError, match=f"{told}.*cannot be reached"):
        hm.apply_head_masks(model, CHUNK)


class AttentionWithMore(layers.Layer):
    """Attention of Keras', and some that it computes itself beside it."""

    def __init__(self, operation, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.MultiHeadAttention(2, 4)
        self.operation = operation

    def call(self, x):
        return self.inner(x, x) + getattr(self, self.operation)(x)

    def of_scores(self, x):
        return keras.ops.softmax(x @ keras.ops.swapaxes(x, 1, 2)) @ x


class Mixer(AttentionWithMore):
    def of_an_operation(self, x):
        x = x[:, :, None]
        return keras.ops.dot_product_attention(x, x, x)[:, :, 0]


class Wraps(layers.Layer):
    """A softmax that is no attention's."""

    def __init__(self):
        super().__init__()
        self.inner = layers.MultiHeadAttention(2, 4, name="inner")

    def call(self, x):
        return self.inner(x, x) * keras.ops.softmax(x)


def test_attention_beside_that_of_an_inner_layer_is_told():
    x = keras.Input((7, 8))
    for layer in (AttentionWithMore("of_scores"), Mixer("of_an_operation")):
        model = keras.Model(x, layer(x))
        with pytest.raises(ValueError, match=f"{type(layer).__name__}.*cannot be reached"):
            hm.apply_head_masks(model, CHUNK)
        masked = hm.apply_head_masks(model, CHUNK, layers="/multi_head", copy=False)
        assert len(masked.mask_specs) == 1
    assert hm.apply_head_masks(keras.Model(x, Wraps()(x)), CHUNK, copy=False).mask_specs


def test_self_and_cross_are_told_by_where_the_tensors_come_from():
    """Positions added to the query alone, a norm applied twice: still the same sequence."""
    x, memory = keras.Input((7, 8), name="x"), keras.Input((7, 8), name="memory")
    norm = layers.LayerNormalization()
    h = layers.MultiHeadAttention(2, 4, name="as_in_detr")(x + 1.0, x, key=x + 1.0)
    h = layers.MultiHeadAttention(2, 4, name="norm_twice")(norm(h), norm(h))
    h = layers.MultiHeadAttention(2, 4, name="to_memory")(h, memory)
    h = layers.MultiHeadAttention(2, 4, name="after_memory")(h, h)
    masked = hm.apply_head_masks(keras.Model([x, memory], h), CHUNK)
    assert set(masked.mask_specs) == {"as_in_detr", "norm_twice", "after_memory"}


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
    stock.get_layer("block_1").attention.query_dense.enable_lora(2)
    adapter = stock.get_layer("block_1").attention.query_dense.lora_kernel_b
    adapter.assign(normal(*adapter.shape))
    masked = hm.apply_head_masks(stock, hm.Full())
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
        hm.apply_head_masks(model, CHUNK)
    hm.apply_head_masks(model, CHUNK, copy=False)


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


def test_a_layer_or_a_part_outside_its_model():
    masked = hm.apply_head_masks(stack(2), CHUNK)
    block = masked.get_layer("block_1")
    part = keras.Model(masked.input, masked.get_layer("block_0").output)
    for run in (
        lambda: block(normal(1, 4, 8)),
        lambda: part(TOKENS),
        lambda: part.predict(TOKENS, verbose=0),
    ):
        with pytest.raises(Exception, match=r"'block_\d/.*\(MultiHeadAttention\) obeys a rule"):
            run()
    assert part.output.shape == (None, None, 8)


def test_clone_model_refuses_and_config_clones():
    masked = hm.apply_head_masks(stack(2), CHUNK)
    with pytest.raises(RuntimeError, match=r"`clone_model` would drop the rule"):
        keras.models.clone_model(masked)
    clone = masked.from_config(masked.get_config())
    assert clone.mask_specs == masked.mask_specs
    clone.set_weights(masked.get_weights())
    np.testing.assert_array_equal(numpy(clone(TOKENS)), numpy(masked(TOKENS)))
    outer = keras.Model(masked.input, layers.Dense(2)(masked.output))
    clone = keras.models.clone_model(keras.Model(x := keras.Input((None,)), masked(x)))
    assert clone.layers[-1].mask_specs == masked.mask_specs
    with pytest.raises(RuntimeError, match="ran outside it"):
        outer(TOKENS)


def test_a_rule_that_no_layer_used():
    @keras.saving.register_keras_serializable("test_never_unmasked")
    class Bypass(layers.MultiHeadAttention):
        def call(self, query, value, key=None):
            return self.hidden_way(query, value)

        def hidden_way(self, query, value):
            return query

    @keras.saving.register_keras_serializable("test_never_unmasked")
    class HidesIt(Bypass):
        def call(self, query, value, key=None):
            return super().call(query, value)

    x = keras.Input((7, 8))
    with pytest.raises(ValueError, match=r"\(Bypass\) is of a class whose masks cannot be"):
        hm.apply_head_masks(keras.Model(x, Bypass(4, 3)(x, x)), CHUNK)
    masked = hm.apply_head_masks(keras.Model(x, HidesIt(4, 3)(x, x)), CHUNK)
    with pytest.raises(RuntimeError, match=r"\(HidesIt\) was not used in this forward"):
        masked(normal(2, 7, 8))


@pytest.mark.parametrize(
    "attention", [layers.GroupQueryAttention(3, 4, 2, name="g"), layers.Attention(name="g")]
)
def test_an_attention_class_we_do_not_know(attention):
    x = keras.Input((7, 8))
    y = attention(x, x) if "Group" in type(attention).__name__ else attention([x, x])
    model = keras.Model(x, layers.MultiHeadAttention(4, 3, name="known")(y, y))
    name = type(attention).__name__
    with pytest.raises(ValueError, match=rf"'g' \({name}\).*name the others in `layers`: 'known'"):
        hm.apply_head_masks(model, CHUNK)
    with pytest.raises(ValueError, match=rf"'g' \({name}\), which 'g' names"):
        hm.apply_head_masks(model, CHUNK, layers="g")
    assert list(hm.apply_head_masks(model, CHUNK, layers="known").mask_specs) == ["known"]


def test_several_attention_axes_are_refused():
    x = keras.Input((4, 4, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x))
    with pytest.raises(ValueError, match="attends over several axes"):
        hm.apply_head_masks(model, CHUNK)(normal(1, 4, 4, 8))


# --- What would be wrong in silence ---------------------------------------------------------------


def attention_of(query, value):
    return layers.MultiHeadAttention(2, 4)(query, value)


def test_a_copy_has_what_layers_derive_from_their_weights():
    norm = layers.Normalization()
    norm.adapt(normal(64, 7, 8) * 3 + 5)
    x = keras.Input((None, 8))
    h = norm(x)
    model = keras.Model(x, attention_of(h, h))
    given = normal(2, 7, 8) * 3 + 5
    masked = hm.apply_head_masks(model, hm.Full())
    np.testing.assert_array_equal(numpy(masked(given)), numpy(model(given)))
    np.testing.assert_array_equal(numpy(masked.unmasked()(given)), numpy(model(given)))


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


def test_ids_of_64_bits_stay_apart():
    x = keras.Input((None, 8))
    model = keras.Model(x, attention_of(x, x))
    model = hm.apply_head_masks(model, hm.SameSegment("ids"), add_inputs=True)
    given, wide = normal(1, 4, 8), np.array([[5, 5 + 2**32, 3 * 10**9, 5]])
    expected = numpy(model([given, np.array([[5, 6, 7, 5]])]))
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="does not fit in the 32 bits"):
            model([given, wide])
        return
    assert_close(numpy(model([given, wide])), expected)
    assert_close(model.predict([given, wide], verbose=0), expected)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has 32 bits")
def test_ids_of_64_bits_through_an_outer_model():
    """The outer model casts its inputs before ours sees them, so its dtype must have 64 bits."""
    x = keras.Input((4, 8))
    masked = hm.apply_head_masks(
        keras.Model(x, attention_of(x, x)), hm.SameSegment("ids"), add_inputs=True
    )
    ids = keras.Input((4,), dtype="int64", name="ids")
    outer = keras.Model([x, ids], masked([x, ids]))
    given, wide = normal(1, 4, 8), np.array([[5, 5 + 2**32, 6, 5]])
    expected = numpy(masked([given, np.array([[5, 7, 6, 5]])]))
    assert_close(numpy(outer([given, wide])), expected)


def test_a_float_mask_in_a_nested_structure_is_refused():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = keras.Input((2, None, None), dtype="bool", name="mask")
    h = layers.Embedding(12, 8)(ids)
    model = keras.Model({"text": {"token_ids": ids, "mask": mask}}, attention_of(h, h))
    model = hm.apply_head_masks(model, hm.MaskInput("mask"))
    text = {"token_ids": np.ones((1, 3), "int32"), "mask": np.zeros((1, 2, 3, 3), "float32")}
    with pytest.raises(TypeError, match="must be integer or boolean"):
        model({"text": text})


def test_a_trace_that_shows_nothing_tells_nothing(monkeypatch):
    monkeypatch.setattr("keras_headmask.retrofit.tracing._SIZES", ())
    with pytest.raises(ValueError, match="Cannot tell whether the attention layer"):
        hm.apply_head_masks(stack(), CHUNK)
