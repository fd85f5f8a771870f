"""An export is what the model is, with its rule, at any batch and length."""

import contextlib

import keras
import numpy as np
import pytest
from backbone_calls import randomised
from contract import numpy
from export_models import (
    RULE,
    Subclassed,
    check_in_this_process,
    load,
    masked,
    ours,
    over,
    served,
    server,
    stock,
    tokens,
)
from keras import layers
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow


def inputs_of(model, batch, length):
    """By name; with a padding mask, each example has one real token fewer than the one before."""
    names = [x.name for x in model.inputs]
    real = np.arange(length) < np.maximum(1, length - np.arange(batch)[:, None])
    given = {"token_ids": tokens(batch, length), "padding_mask": real.astype("int32")}
    return {name: given[name] for name in names}


def answers(model, given):
    """What the model in memory answers, by the names that an export has."""
    by_name = not isinstance(model, keras.Sequential) and isinstance(model.input, dict)
    found = model(given if by_name else given["token_ids"])
    found = found if isinstance(found, dict) else {"output_0": found}
    return {name: numpy(x) for name, x in found.items()}


def assert_same(got, wanted, dtype="float32"):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(got[name], value, dtype, message=name, depth=3)


@pytest.mark.long  # (the README does it every day)
def test_a_model_is_checked_in_a_fresh_process_and_published(tmp_path):
    model = ours(tiled=None)
    report = hm.export_saved_model(model, tmp_path / "m")
    assert report.path == tmp_path / "m" / "1"
    assert report.version == 1
    assert report.signature["inputs"] == {"token_ids": ("int32", (None, None))}
    assert report.signature["outputs"] == {"output_0": ("float32", (None, None, 8))}
    assert report.differences["output_0"] < 1e-5
    assert "token_ids int32[?, ?] -> output_0 float32[?, ?, 8]\n  checked in a" in str(report)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"1"}
    for shape in ((1, 1), (4, 33), (2, 300)):
        given = inputs_of(model, *shape)
        assert_same(served(report, **given), answers(model, given))


def sequential():
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="token_ids"),
            layers.Embedding(30, 8),
            hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 1)),
        ]
    )


@pytest.mark.parametrize(
    "make", [ours, masked, stock, lambda: masked(with_padding=False), sequential]
)
def test_every_kind_of_model_is_served_as_it_is(make, tmp_path):
    model = make()
    report = hm.export_saved_model(model, tmp_path, check=False)
    assert report.differences is None
    assert "not checked" in str(report)
    for shape in ((3, 11), (1, 1)):
        given = inputs_of(model, *shape)
        assert_same(served(report, **given), answers(model, given))


def test_the_rule_holds_in_the_export(tmp_path):
    """Of what a rule hides, nothing reaches the answer."""
    rule = hm.PerHead({"0-1": hm.SameSentence(9)})
    report = hm.export_saved_model(masked(rule, with_padding=False), tmp_path, check=False)
    one = tokens(1, 12)
    other = one.copy()
    other[:, 0] = np.where(one[:, 0] == 5, 6, 5)  # a word of the first sentence, which ends at 2
    apart = abs(served(report, token_ids=one)["first"] - served(report, token_ids=other)["first"])
    assert apart[0, 3:].max() == 0
    assert apart[0, :3].max() > 1e-4


def lists():
    """More outputs than one digit numbers, in a list, of two inputs in a list."""
    a, b = (keras.Input((3,), name=name) for name in ("a", "b"))
    return keras.Model([b, a], [b * i - a for i in range(11)])


IDS = tokens(2, 6)
CALLS = {
    "one tensor": (ours, IDS),
    "a dict": (masked, {"token_ids": IDS, "padding_mask": np.minimum(IDS % 5, 1)}),
    "lists": (lists, [np.ones((2, 3), "float32"), np.full((2, 3), 2.0, "float32")]),
}


@pytest.mark.parametrize("case", CALLS)
def test_serve_is_called_as_the_model_is(case, tmp_path):
    make, given = CALLS[case]
    model = make()
    report = hm.export_saved_model(model, tmp_path, check=False)
    loaded = load(report.path)  # holds the variables that `serve` reads
    got, wanted = loaded.serve(given), model(given)
    keras.tree.assert_same_structure(got, wanted)
    for one, other in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        assert_close(numpy(one), numpy(other), depth=3)
    if case == "one tensor":  # and Keras reads the export as its own
        layer = layers.TFSMLayer(str(report.path))
        assert len(layer.weights) == len(model.weights)
        assert_close(numpy(layer(IDS)), numpy(wanted), depth=3)


def test_a_subclassed_model_is_served_as_its_error_advises(tmp_path):
    model = Subclassed()
    x, segments = (keras.Input((None,), dtype="int32", name=n) for n in ("token_ids", "segments"))
    with_graph = keras.Model([x, segments], model(x, segments))
    report = hm.export_saved_model(with_graph, tmp_path, check=False)
    given = {
        "token_ids": tokens(2, 6),
        "segments": np.array([[0, 0, 1, 1, 1, 2], [0] * 5 + [1]], "int32"),
    }
    got = served(report, **given)["output_0"]
    assert_close(got, numpy(model(**given)))
    assert abs(got - numpy(model(given["token_ids"]))).max() > 1e-4


def test_a_fixed_length_and_a_padding_mask(tmp_path, monkeypatch):
    inputs = {
        "token_ids": keras.Input((6,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((6,), dtype="bool", name="padding_mask"),
    }
    rule = hm.Window(1, 1) & hm.KeyFlag("padding_mask")
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=rule)
    x = layers.Embedding(30, 8)(inputs["token_ids"])
    mask_inputs = {"padding_mask": inputs["padding_mask"]}
    model = keras.Model(inputs, attention(x, mask_inputs=mask_inputs))
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(model, tmp_path)
    assert report.signature["inputs"]["padding_mask"] == ("bool", (None, 6))
    assert report.differences["output_0"] < 1e-5
    given = {"token_ids": tokens(2, 6), "padding_mask": np.arange(6) < [[6], [3]]}
    assert_same(served(report, **given), answers(model, given))


@pytest.mark.parametrize("form", [str, object, "S"])
def test_text_is_checked_with_what_is_given(form, tmp_path, monkeypatch):
    """And so are names in capitals, and outputs of text."""
    words = keras.Input((None,), dtype="string", name="Words")
    ids = layers.StringLookup(vocabulary=["a", "ä"])(words)
    model = keras.Model(words, {"x": layers.Embedding(4, 3)(ids), "words": words})
    text = np.array([["a", "ä"], ["b", "a"]])
    given = np.char.encode(text, "utf-8") if form == "S" else text.astype(form)
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(model, tmp_path, check={"Words": given})
    assert report.differences == {"x": 0, "words": 0}
    got = load(report.path).serve(text)["words"].numpy()
    assert [[word.decode() for word in row] for row in got] == text.tolist()
    with pytest.raises(ValueError, match=r"'Words' of `check` must be string of shape"):
        hm.export_saved_model(model, tmp_path, check={"Words": [[1]]})


def test_a_model_of_half_precision_is_served_in_it(tmp_path, monkeypatch):
    with policy("mixed_bfloat16"):
        model = ours()
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(model, tmp_path, check={"token_ids": tokens(2, 9)})
    assert report.signature["outputs"]["output_0"][0] == "bfloat16"
    assert report.differences["output_0"] < 0.05
    loaded = load(report.path)
    wanted = numpy(model(tokens(2, 9))).astype("float32")
    got = numpy(loaded.serve(tokens(2, 9))).astype("float32")
    assert_close(got, wanted, "bfloat16", depth=3)


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.long
def test_a_masked_task_is_checked_on_made_up_requests_and_on_those_of_its_preprocessor(
    tmp_path, monkeypatch
):
    models = pytest.importorskip("keras_hub").models
    check_in_this_process(monkeypatch)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = models.BertBackbone(vocabulary_size=30, max_sequence_length=16, **sizes)
    task = models.BertTextClassifier(randomised(backbone), num_classes=2)
    task = hm.apply_head_masks(task, hm.PerHead({0: hm.SameSentence(9)}))
    rng = np.random.default_rng(0)
    given = {
        "token_ids": np.where(np.arange(12) % 4 == 3, 9, rng.integers(10, 30, (3, 12))),
        "segment_ids": np.zeros((3, 12), "int32"),
        "padding_mask": np.arange(12) < np.array([[12], [9], [5]]),  # bool, as KerasHub's are
    }
    for check in True, [given]:
        assert max(hm.export_saved_model(task, tmp_path, check=check).differences.values()) < 1e-5
    refused = given | {"padding_mask": given["padding_mask"].astype("float32")}
    with pytest.raises(ValueError, match=r"'padding_mask' .* must be int32 .* Received: float32"):
        hm.export_saved_model(task, tmp_path, check=[refused])


def test_servers_get_an_error_for_an_input_of_another_rank(tmp_path):
    """They look at no shape, and a tensor of another rank might broadcast."""
    import tensorflow as tf

    given = inputs_of(masked(), 3, 6)
    with server(hm.export_saved_model(masked(), tmp_path, check=False).path) as ask:
        assert ask("serving_default", **given)
        for name in given:
            for shape in (), (3,), (3, 6, 1), (1, 1, 3, 6):
                sizes = ",".join(map(str, shape))
                message = rf"\[{sizes}\] is not compatible .*[^$]*input_{name}_of_another_shape"
                with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                    ask("serving_default", **given | {name: np.ones(shape, "int32")})


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


def test_the_export_of_keras_obeys_under_apply_head_masks(tmp_path):
    model = masked(RULE)
    model.export(str(tmp_path / "1"), verbose=False)
    given = inputs_of(model, 2, 11)
    loaded = load(tmp_path / "1")
    got = {name: numpy(x) for name, x in loaded.serve(given).items()}
    assert_same(got, answers(model, given))
    free = hm.unmasked(model)
    assert abs(answers(free, given)["sequence"] - got["sequence"]).max() > 1e-4


@pytest.mark.long
def test_loading_an_export_prints_nothing_and_gives_gradients(tmp_path, caplog, capfd, recwarn):
    """Where custom gradients are left out of the file, each is a warning on every load."""
    import tensorflow as tf

    class Scaled(layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def scaled(x):
                return 2 * x, lambda upstream: 3 * upstream

            return scaled(x)

    ids = keras.Input((None, 8), name="x")
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 1), tiled=True)
    y = layers.Dense(8, activation="silu")(attention(ids))  # TensorFlow gives silu one, too
    model = keras.Model(ids, Scaled()(y))
    x = np.random.default_rng(0).normal(size=(1, 300, 8)).astype("float32")
    path = hm.export_saved_model(model, tmp_path, check=False).path
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

    np.testing.assert_allclose(gradient(loaded.serve), gradient(model), atol=1e-4)


def test_a_second_version_stands_beside_the_first(tmp_path):
    model = over()
    first = hm.export_saved_model(model, tmp_path, version=5, check=False)
    before = {p: p.read_bytes() for p in first.path.rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="Version 5 exists"):
        hm.export_saved_model(model, tmp_path, version=5, check=False)
    assert hm.export_saved_model(model, tmp_path, check=False).version == 6
    assert {p: p.read_bytes() for p in first.path.rglob("*") if p.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]
