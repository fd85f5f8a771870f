"""An export is what the model is, with its rule, at any batch and length."""

import contextlib
import re

import keras
import numpy as np
import pytest
from contract import numpy
from export_models import RULE, both, check_in_this_process, inputs_of_both, load, served, tokens
from keras import layers
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.export.checking import cases
from keras_headmask.export.signature import signature_of
from keras_headmask.retrofit.find import Found

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """A model and its version. (The README has one checked in a process of its own.)"""
    model = both()
    with pytest.MonkeyPatch.context() as patch:
        check_in_this_process(patch)
        return model, hm.export_saved_model(model, tmp_path_factory.mktemp("m"))


@pytest.mark.daily  # (its fixture is made anyway)
def test_a_version_answers_as_the_model(version):
    model, report = version
    assert report.path.name == str(report.version) == "1"
    assert [path.name for path in report.path.parent.iterdir()] == ["1"]
    assert report.signature["inputs"]["token_ids"] == ("int32", (None, None))
    assert report.signature["outputs"]["sequence"] == ("float32", (None, None, 8))
    assert max(report.differences.values()) < 1e-5
    words = r"token_ids int32\[\?, \?\].* -> .*first float32\[\?, 8\].*\n  checked in a process"
    assert re.search(words, str(report))
    for shape in ((1, 1), (4, 33), (2, 300)):
        given = inputs_of_both(*shape)
        got = served(report, given)
        for name, wanted in model(given).items():
            assert_close(got[name], numpy(wanted), message=f"{name} {shape}", depth=3)


def test_servers_get_an_error_for_an_input_of_another_rank(version):
    """They look at no shape, as `session.run` does, and another rank might broadcast."""
    import tensorflow as tf
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    given = inputs_of_both(3, 6)
    with contextlib.closing(tf.compat.v1.Session(graph=tf.Graph())) as session:
        with session.graph.as_default():
            meta = tf.compat.v1.saved_model.load(session, ["serve"], str(version[1].path))
        signature = meta.signature_def["serving_default"]
        feed = [signature.inputs[name].name for name in given]
        fetch = [x.name for x in signature.outputs.values()]
        ask = session._make_callable_from_options(CallableOptions(feed=feed, fetch=fetch))
        assert len(ask(*given.values())) == 2
        for name in given:
            for shape in (), (3,), (3, 6, 1), (1, 1, 3, 6):
                sizes = ",".join(map(str, shape))
                message = rf"\[{sizes}\] is not compatible .*[^$]*input_{name}_of_another_shape"
                with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                    ask(*(given | {name: np.ones(shape, given[name].dtype)}).values())


# --- Every kind of model --------------------------------------------------------------------------


def ours(dtype=None):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=RULE, tiled=False, dtype=dtype)
    x = attention(layers.Embedding(30, 8, dtype=dtype)(ids), mask_inputs={"token_ids": ids})
    return keras.Model(ids, x)


def lists():
    """More outputs than one digit numbers, in a list, of two inputs in a list."""
    a, b = (keras.Input((3,), name=name) for name in ("a", "b"))
    return keras.Model([b, a], [b * i - a for i in range(11)])


def of_words():
    """And with a name in capitals, and an output of text."""
    words = keras.Input((None,), dtype="string", name="Words")
    ids = layers.StringLookup(vocabulary=["a", "ä"])(words)
    return keras.Model(words, {"x": layers.Embedding(4, 3)(ids), "words": words})


IDS = tokens(2, 6)
WORDS = np.array([["a", "ä"], ["b", "a"]])
KINDS = {  # a model and what it is called on
    "functional": (ours, IDS),
    "half precision": (lambda: ours("mixed_bfloat16"), IDS),
    "lists": (lists, [np.ones((2, 3), "float32"), np.full((2, 3), 2.0, "float32")]),
    "a fixed length": (lambda: both(length=6), inputs_of_both(2, 6)),
    "text": (of_words, WORDS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_served_as_it_is_called(kind, tmp_path, monkeypatch):
    make, given = KINDS[kind]
    model = make()
    check_in_this_process(monkeypatch)
    names = [x.name for x in model.inputs]
    check = dict(zip(names, keras.tree.flatten(given), strict=True))
    report = hm.export_saved_model(model, tmp_path, check=check)
    assert max(report.differences.values()) < (0.05 if kind == "half precision" else 1e-5)
    loaded = load(report.path)  # holds the variables that `serve` reads
    got, wanted = loaded.serve(given), model(given)
    keras.tree.assert_same_structure(got, wanted)
    for one, other in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        assert one.dtype == other.dtype
        if one.dtype == "string":
            assert (one.numpy() == other.numpy()).all()
        else:
            precision = "bfloat16" if one.dtype == "bfloat16" else "float32"
            assert_close(numpy(one).astype("float32"), numpy(other), precision, depth=3)
    if kind == "functional":  # and Keras reads the export as its own
        layer = layers.TFSMLayer(str(report.path))
        assert len(layer.weights) == len(model.weights)
        assert_close(numpy(layer(IDS)), numpy(wanted), depth=3)


def test_the_export_of_keras_obeys_and_holds_each_loop_once(tmp_path):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(30, 8)(ids)
    for _ in range(2):
        x = layers.MultiHeadAttention(2, 4)(x, x)
    model = hm.apply_head_masks(keras.Model(ids, x), hm.Window(1, 1))
    model.export(str(tmp_path), verbose=False)
    loaded = load(tmp_path)
    assert_close(numpy(loaded.serve(IDS)), numpy(model(IDS)), depth=3)
    assert abs(numpy(hm.unmasked(model)(IDS)) - numpy(loaded.serve(IDS))).max() > 1e-4
    graph = loaded.signatures["serving_default"].graph.as_graph_def()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    ops = [node.op for body in bodies for node in body]
    assert "IdentityN" not in ops  # a custom gradient
    assert sum(op.endswith("While") for op in ops) == 2  # the loop, and what counts its steps


# --- What the check asks --------------------------------------------------------------------------


def test_made_up_requests_hold_what_the_rule_looks_for():
    found = [case.request["token_ids"] for case in cases(signature_of(Found(ours())), True)]
    assert [ids.shape for ids in found] == [(1, 9), (3, 40), (2, 272)]
    assert all(0.1 < (ids == 9).mean() < 0.4 for ids in found[1:])
    assert max(ids.max() for ids in found) == 29  # the embedding has 30 rows


def with_positions(longest):
    def embed(x):
        table, positions = keras.ops.ones((longest, 8)), keras.ops.arange(keras.ops.shape(x)[1])
        return x + keras.ops.take(table, positions, axis=0)

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    return keras.Model(ids, layers.Lambda(embed, (None, 8))(layers.Embedding(30, 8)(ids)))


def test_made_up_requests_are_as_long_as_the_model_allows():
    found = cases(signature_of(Found(with_positions(12))), True)
    assert [case.request["token_ids"].shape for case in found] == [(1, 9), (3, 10), (2, 10)]
    with pytest.raises(ValueError, match=r"cannot run the model on made-up inputs[^$]*check=\[\{"):
        cases(signature_of(Found(with_positions(1))), True)


def test_text_is_given_in_any_form():
    signature, in_bytes = signature_of(Found(of_words())), np.char.encode(WORDS, "utf-8")
    for form in (WORDS, WORDS.astype(object), in_bytes):
        (case,) = cases(signature, {"Words": form})
        np.testing.assert_array_equal(case.answer["words"], in_bytes)
