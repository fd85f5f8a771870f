"""An export is published after its answers were compared, and only where they are the model's."""

import sys

import keras
import numpy as np
import pytest
from export_models import check_in_this_process, nothing_in, ours, tokens
from keras import layers

import keras_headmask as hm
from keras_headmask.export import checking, fresh_process
from keras_headmask.export.checking import cases, distance
from keras_headmask.export.signature import signature_of
from keras_headmask.retrofit.survey import Survey

pytestmark = pytest.mark.tensorflow


def two_outputs():
    x = keras.Input((None, 4), name="x")
    return keras.Model(x, {"even": layers.Dense(2)(x), "odd": layers.Dense(2)(x)})


def test_an_export_that_answers_otherwise_is_not_published(tmp_path, monkeypatch):
    """The error names the output that differs most, by how much, and on which input."""
    rng = np.random.default_rng(0)
    given = [{"x": rng.normal(size=(2, n, 4))} for n in (3, 5)]

    def run(folder, requests):
        answers = run_fresh(folder, requests)
        answers[1]["odd"][1, 4, 0] += 0.25
        return answers

    check_in_this_process(monkeypatch)
    run_fresh = checking.run_fresh
    monkeypatch.setattr(checking, "run_fresh", run)
    message = (
        r"not published: its output 'odd' differs .* by up to 0\.(25|2\d|1\d) .*"
        r"on the input x float32\[2, 5, 4\]\. Does the model draw random numbers"
    )
    with pytest.raises(RuntimeError, match=message):
        hm.export_saved_model(two_outputs(), tmp_path / "m", check=given)
    assert nothing_in(tmp_path / "m")


def test_nothing_is_published_before_it_is_compared(tmp_path, monkeypatch):
    """What is compared stands on the same file system, under a name that servers pass over."""
    seen = []

    def run(folder, requests):
        (hidden,) = tmp_path.iterdir()
        seen.append((hidden.name[0], folder.parent == hidden, (folder / "variables").is_dir()))
        return [{"even": np.zeros(0), "odd": np.zeros(0)} for _ in requests]

    monkeypatch.setattr(checking, "run_fresh", run)
    with pytest.raises(RuntimeError, match=r"'even' differs from the model's by up to inf"):
        hm.export_saved_model(two_outputs(), tmp_path)
    assert seen == [(".", True, True)]
    assert nothing_in(tmp_path)


def test_an_export_that_does_not_run_there_is_not_published(tmp_path, monkeypatch):
    """Here by a script that fails; so do ops that a library brought into this process."""
    broken = tmp_path / "script.py"
    broken.write_text("raise ValueError('no such op')")
    monkeypatch.setattr(fresh_process, "__file__", str(broken))
    with pytest.raises(RuntimeError, match=r"could not run it\. ValueError: no such op"):
        hm.export_saved_model(two_outputs(), tmp_path / "m")
    assert nothing_in(tmp_path / "m")


def test_an_export_of_other_outputs_is_refused():
    signature = signature_of(Survey(two_outputs()))
    (case,) = cases(signature, {"x": np.ones((1, 2, 4))})
    with pytest.raises(RuntimeError, match=r"has the outputs \['even'\] where the model has"):
        checking.differences(signature, [case], [{"even": case.answer["even"]}])


def test_the_fresh_process_cannot_import_this_package(monkeypatch):
    import tensorflow as tf

    def load(folder):
        import keras_headmask  # noqa: F401

    monkeypatch.setitem(sys.modules, "keras_headmask", hm)  # as it is put back afterwards
    monkeypatch.setattr(tf.saved_model, "load", load)
    with pytest.raises(ImportError, match="keras_headmask"):
        fresh_process.main("a folder", "requests", "answers")


def test_made_up_requests_hold_what_the_rule_looks_for():
    found = [case.request["token_ids"] for case in cases(signature_of(Survey(ours())), True)]
    assert [ids.shape for ids in found] == [(1, 9), (3, 40), (2, 272)]
    assert all(0.1 < (ids == 9).mean() < 0.4 for ids in found[1:])
    assert max(ids.max() for ids in found) == 29  # the embedding has 30 rows


def with_positions(longest):
    class Positions(layers.Layer):
        def build(self, _):
            self.table = self.add_weight(shape=(longest, 8))

        def call(self, x):
            return x + keras.ops.take(self.table, keras.ops.arange(keras.ops.shape(x)[1]), axis=0)

        def compute_output_shape(self, shape):
            return shape

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    return keras.Model(ids, Positions()(layers.Embedding(30, 8)(ids)))


def test_made_up_requests_are_as_long_as_the_model_allows():
    found = cases(signature_of(Survey(with_positions(12))), True)
    assert [case.request["token_ids"].shape for case in found] == [(1, 9), (3, 10), (2, 10)]
    with pytest.raises(ValueError, match=r"cannot run the model on made-up inputs[^$]*check=\[\{"):
        cases(signature_of(Survey(with_positions(1))), True)


def test_what_is_given_is_what_is_tried():
    signature = signature_of(Survey(ours()))
    given = {"token_ids": tokens(2, 5).astype("int64")}
    for check in given, [given]:
        (case,) = cases(signature, check)
        np.testing.assert_array_equal(case.request["token_ids"], given["token_ids"])
        assert case.request["token_ids"].dtype == "int32"


def test_distances_see_shapes_and_what_is_not_finite():
    one = np.array([1.0, np.nan, np.inf])
    assert distance(one, one) == 0
    assert distance(np.array([1.5, np.nan, np.inf]), one) == 0.5
    for other in (one[:2], np.array([1.0, 0.0, np.inf]), np.array([1.0, np.nan, -np.inf])):
        assert distance(one, other) == float("inf")
    words = np.array([b"a", b"bc"])
    assert distance(fresh_process.plain(words.astype(object)), words) == 0
    assert distance(np.array([b"a", b"b"]), words) == float("inf")
    assert distance(np.array([1 - 1j]), np.array([1 + 1j])) == pytest.approx(2 / 2**0.5)


def test_large_outputs_do_not_hide_what_is_wrong_with_small_ones():
    logits = np.array([-1e9, 0.5, 40.0], "float32")
    assert distance(logits + np.array([0, 0.4, 0], "float32"), logits) == pytest.approx(0.01)
    for other in ([-1e9, 0.5, -1e9], [0.5, 0.5, 40]):  # masked at other places
        assert distance(np.array(other), logits) >= 1
    assert distance(np.array([30001]), np.array([30000])) == 1  # another id
