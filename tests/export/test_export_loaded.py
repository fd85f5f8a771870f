"""What loading an export gives: `serve` as of Keras' own exports, and no warning."""

import keras
import numpy as np
import pytest
from contract import numpy
from export_models import SIGNATURE, Subclassed, load, masked, ours, tokens
from keras import layers, ops
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow


def lists():
    """More outputs than one digit numbers, in a list, of two inputs in a list."""
    a, b = (keras.Input((3,), name=name) for name in ("a", "b"))
    return keras.Model([b, a], [b * i - a for i in range(11)])


IDS = tokens(2, 6)
SEGMENTS = np.array([[0, 0, 1, 1, 1, 2], [0] * 5 + [1]], "int32")
CALLS = {
    "one tensor": (ours, {}, (IDS,), {}),
    "a dict": (masked, {}, ({"token_ids": IDS, "padding_mask": np.minimum(IDS % 5, 1)},), {}),
    "lists": (lists, {}, ([np.ones((2, 3), "float32"), np.full((2, 3), 2.0, "float32")],), {}),
    "arguments by place": (Subclassed, {"input_signature": SIGNATURE}, (IDS, SEGMENTS), {}),
    "arguments by name": (
        Subclassed,
        {"input_signature": SIGNATURE},
        (),
        {"segments": SEGMENTS, "token_ids": IDS},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_serve_is_called_as_the_model_is(case, tmp_path):
    make, options, given, named = CALLS[case]
    model = make()
    report = hm.export_saved_model(model, tmp_path, check=False, padded=False, **options)
    loaded = load(report.path)  # holds the variables that `serve` reads
    got, wanted = loaded.serve(*given, **named), model(*given, **named)
    keras.tree.assert_same_structure(got, wanted)
    for one, other in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        assert_close(numpy(one), numpy(other), depth=3)
    if case == "one tensor":  # and Keras reads the export as its own
        layer = layers.TFSMLayer(str(report.path))
        assert len(layer.weights) == len(model.weights)
        assert_close(numpy(layer(IDS)), numpy(wanted), depth=3)


def test_the_export_of_keras_holds_the_forward_pass_alone_and_each_loop_once(tmp_path):
    counts = []
    for layers_of_model in (1, 3):
        model = ours(hm.Window(1, 1), tiled=None, count=layers_of_model)
        folder = tmp_path / str(layers_of_model)
        model.export(str(folder), verbose=False)
        loaded = load(folder)
        graph = loaded.signatures["serving_default"].graph.as_graph_def()
        bodies = [graph.node, *(f.node_def for f in graph.library.function)]
        assert "IdentityN" not in {node.op for body in bodies for node in body}  # a custom gradient
        assert_close(numpy(loaded.serve(IDS)), numpy(model(IDS)), depth=3)
        counts.append(sum(node.op.endswith("While") for body in bodies for node in body))
    assert counts == [1, 1]


def with_gradients_of_its_own(gradient):
    """A model under a rule, of which one layer has a custom gradient."""
    import tensorflow as tf

    class Scaled(layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def scaled(x):
                return 2 * x, gradient

            return scaled(x)

    x = keras.Input((None, 8), name="x")
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 1), tiled=True)
    y = layers.Dense(8, activation="silu")(attention(x))  # TensorFlow gives silu a gradient, too
    return keras.Model(x, Scaled()(y))


@pytest.mark.long
def test_loading_an_export_prints_nothing(tmp_path, caplog, capfd, recwarn):
    """Where custom gradients are left out of the file, each is a warning on every load."""
    import tensorflow as tf

    model = with_gradients_of_its_own(lambda upstream: 3 * upstream)
    x = np.random.default_rng(0).normal(size=(1, 300, 8)).astype("float32")
    model(x)
    path = hm.export_saved_model(model, tmp_path, check=False, xla_buckets=[(1, 40)]).path
    capfd.readouterr()
    caplog.clear()
    recwarn.clear()
    loaded = load(path)
    assert_close(numpy(loaded.serve(x)), numpy(model(x)), depth=3)
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr().err == ""
    assert [str(warning.message) for warning in recwarn] == []

    def gradient(of):
        with tf.GradientTape() as tape:
            given = tf.constant(x)
            tape.watch(given)
            answer = tf.reduce_sum(of(given) ** 2)
        return numpy(tape.gradient(answer, given))

    of_model = gradient(model)
    assert np.abs(of_model).max() > 0.1
    np.testing.assert_allclose(gradient(loaded.serve), of_model, atol=1e-4)


def test_a_gradient_that_is_not_to_be_saved_keeps_no_model_from_being_served(tmp_path):
    def gradient(upstream):
        raise NotImplementedError("nobody trains this")

    model = with_gradients_of_its_own(gradient)
    path = hm.export_saved_model(model, tmp_path, check=False).path
    x = ops.ones((1, 5, 8))
    loaded = load(path)
    assert_close(numpy(loaded.serve(x)), numpy(model(x)))


def test_signatures_for_xla_multiply_in_half_precision_and_sum_in_float32(tmp_path):
    """An accelerator may run them, whatever exports them; elsewhere there is no such kernel."""
    import tensorflow as tf

    model = ours()
    report = hm.export_saved_model(
        model, tmp_path, check=False, padded=False, xla_buckets=[(2, 9)], precision="bfloat16"
    )
    loaded = load(report.path)
    given, found = {"token_ids": tf.constant(tokens(2, 9))}, {}
    for name, signature in loaded.signatures.items():
        library = signature.graph.as_graph_def().library.function
        nodes = [*signature.graph.as_graph_def().node, *(x for f in library for x in f.node_def)]
        products = [node.attr for node in nodes if node.op == "BatchMatMulV3"]
        found[name] = {
            tuple(tf.as_dtype(attr[side].type).name for side in ("Ta", "Tb", "Tout"))
            for attr in products
        }
        (got,) = signature(**given).values()
        assert_close(numpy(got), numpy(model(given["token_ids"])), "bfloat16", depth=3)
    assert found == {
        "serving_default": set(),
        "serve_xla_2x9": {("bfloat16", "bfloat16", "float32")},
    }
