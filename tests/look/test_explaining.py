"""`hm.explain` says what runs, where its code is, and how much it computes."""

import keras
import numpy as np
import pytest
from contract import numpy

import keras_headmask as hm
from keras_headmask.attention import kernels

BACKEND = keras.backend.backend()
RULE = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(3, 0)})
TILES = "loop" if BACKEND == "tensorflow" else "gathered"
ALL = "loop" if BACKEND == "tensorflow" else "fused"


def test_a_rule_at_given_sizes():
    found = hm.explain(hm.Window(31, 0), queries=1024, num_heads=2)
    file = kernels.FILES[getattr(kernels, TILES)]
    assert (found.name, found.kernel, found.file) == ("Window(before=31, after=0)", TILES, file)
    assert 0.1 < found.share < 0.2
    assert str(found) == f"{found.name}: {TILES} ({file}), {found.share:.1%} of the pairs"
    few = hm.explain(hm.Window(31, 0), queries=64)
    assert (few.kernel, few.share) == (ALL, 1.0)
    mixed = hm.explain(RULE, queries=2048, batch=4, num_heads=4)
    assert (mixed.kernel, mixed.share < 1) == (ALL, BACKEND == "tensorflow")
    crossed = hm.explain(hm.SameSegment("ids") & hm.MaskInput("m"), queries=8, keys=6)
    assert crossed.share == 1
    with hm.dense_scope():
        assert hm.explain(hm.Window(31, 0), queries=1024).kernel == "dense"


def test_a_layer_is_explained_as_it_is_called():
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8, mask_spec=RULE, dropout=0.5)
    assert hm.explain(layer, queries=30).kernel == ALL
    assert not layer.built
    trained = hm.explain(layer, queries=30, training=True)
    assert (trained.name, trained.kernel) == (
        layer.name,
        "loop" if BACKEND == "tensorflow" else "dense",
    )
    stock = hm.explain(hm.PerHeadMaskedMultiHeadAttention(4, 8, name="stock"), queries=30)
    assert str(stock) == "stock: its class, all logits at once"


def test_a_model_has_an_explanation_for_each_layer():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(9, 8)(ids)
    for name in ("first", "second"):
        y = keras.layers.BatchNormalization()(x)
        attention = keras.layers.MultiHeadAttention(4, 8, dropout=0.5, seed=1, name=name)
        x = keras.layers.Add()([x, attention(y, y)])
    model = hm.apply_head_masks(keras.Model(ids, x), RULE, layers="first")
    before = [numpy(v) for v in model.variables]
    found = hm.explain(model, queries=30, training=True)
    of_first = "loop" if BACKEND == "tensorflow" else "dense"
    assert [(x.name, x.kernel) for x in found] == [("first", of_first), ("second", "its class")]
    for value, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(numpy(value), old)
    assert hm.explain(keras.Model(ids, keras.layers.Embedding(9, 8)(ids)), queries=3) == []


@pytest.mark.tensorflow
def test_a_function_inside_keeps_nothing_of_a_look():
    import tensorflow as tf

    class Inside(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(3, 0))
            self.run = tf.function(self.attention, [tf.TensorSpec((None, None, 8))])

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return self.run(x)

        def compute_output_shape(self, shape):
            return shape

    x = keras.Input((None, 8))
    layer = Inside()
    model = keras.Model(x, layer(x))
    hm.explain(model, queries=5)
    given = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    np.testing.assert_allclose(model(given), layer.attention(given), rtol=1e-5, atol=1e-6)
    assert np.abs(model(given)).max() > 0


@pytest.mark.tensorflow
@pytest.mark.parametrize("are_local", [True, False])
def test_a_graph_decides_by_sizes_as_python_does(are_local):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow.by_size import Limits

    limits = Limits(2**19 if are_local else 2**23, 2**26, 2**17)
    cases = {
        (8, 16, 16): True,
        (8, 128, 128): True,  # many logits, but a tile is a whole sequence
        (4096, 200, 200): False,  # a batch that would take gigabytes
        (1, 362, 362): True,
        (1, 512, 512): not are_local,
        (1, 1, 4096): True,
        (1, 65536, 65536): False,  # more than 32 bits
    }
    for sizes, expected in cases.items():
        assert limits.hold(8, *sizes) is expected
        of_tensors = limits.hold(8, *map(tf.constant, sizes))
        assert bool(of_tensors) == expected
    assert limits._replace(logits=0).hold(8, 1, 1, 1) is False
    for length, expected in ((16, True), (362, True), (512, None)):  # of any batch
        assert limits.hold_of(8, None, length, length) is expected
        if expected:
            assert limits.hold(8, tf.constant(4096), length, length) is True
    assert limits.hold_of(8, 1, None, 16) is None


def test_what_cannot_be_explained():
    with pytest.raises(TypeError, match=r"must be a rule, an attention layer .* its model"):
        hm.explain(keras.layers.MultiHeadAttention(2, 4), queries=4)
    with pytest.raises(ValueError, match=r"`queries`.*at least 1"):
        hm.explain(RULE, queries=0)
    with pytest.raises(TypeError, match="`queries`"):
        hm.explain(RULE)
    with pytest.raises(ValueError, match="needs the inputs of a model"):
        hm.explain(keras.Sequential([keras.layers.Dense(2)]), queries=4)
