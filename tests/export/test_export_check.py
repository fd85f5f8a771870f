"""What the check of an export finds, and what it does not publish."""

import dataclasses
import re
import sys

import keras
import numpy as np
import pytest
from backbone_calls import randomised
from export_models import RULE, check_in_this_process, masked, nothing_in, ours, stock
from keras import layers, ops

import keras_headmask as hm
from keras_headmask.attention import observers
from keras_headmask.export import checking, fresh_process
from keras_headmask.export.interface import answer, distance, interface_of, request
from keras_headmask.export.signatures import signatures_of, why_not_padded
from keras_headmask.retrofit.survey import Survey

tensorflow_only = pytest.mark.tensorflow


@tensorflow_only
def test_a_rule_without_effect_is_not_published(tmp_path, monkeypatch):
    check_in_this_process(monkeypatch)
    model = ours(rule=hm.PerHead({0: hm.SameSentence(9)}))
    one_sentence = {"token_ids": np.array([[5, 6, 7, 8]], "int32")}
    with pytest.raises(RuntimeError, match="answers as its twin without rules does"):
        hm.export_saved_model(model, tmp_path / "m", check=[one_sentence])
    assert nothing_in(tmp_path / "m")


class OverIds(keras.Model):
    """Its argument does not have the name that the rule has for it."""

    def __init__(self, inside, attend):
        super().__init__()
        self.embedding = layers.Embedding(200, 8)
        self.inside, self.attend = inside, attend

    def call(self, ids, other=None):
        return self.attend(self.embedding(ids), ids)


END = hm.PerHead({0: hm.SameSentence(102)})
IDS = {"ids": keras.InputSpec(shape=(None, None), dtype="int32")}


def by_our_layer(read=lambda ids: ids):
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=END, tiled=False)
    return OverIds(layer, lambda x, ids: layer(x, mask_inputs={"token_ids": read(ids)}))


def by_a_masked_model():
    inner = hm.apply_head_masks(stock(with_padding=False), hm.SameSentence(29))
    return OverIds(inner, lambda x, ids: inner({"token_ids": ids % 30})["sequence"])


@tensorflow_only
@pytest.mark.parametrize(
    ("made", "end"),
    [
        (by_our_layer, 102),
        (lambda: by_our_layer(lambda ids: ids[:, ::-1]), 102),
        (by_a_masked_model, 29),
    ],
    ids=["our layer", "of the ids", "a masked model inside"],
)
def test_samples_hold_the_ids_of_a_rule_whatever_the_input_is_called(made, end):
    """What no argument is named for is taken to be in the first one of ids."""
    both = IDS | {"other": IDS["ids"]}
    given = request(interface_of(Survey(made()), both), (2, 40))
    assert end in given["ids"]
    assert end not in given["other"]


@tensorflow_only
def test_a_subclassed_model_of_another_argument_is_published(tmp_path, monkeypatch):
    check_in_this_process(monkeypatch)
    model = by_our_layer()
    report = hm.export_saved_model(model, tmp_path, input_signature=IDS, check=[(2, 12)])
    assert report.check.twin_distance > 1e-4


def masked_task():
    """KerasHub's backbone takes ids and segments: tables of 30 rows and of 2."""
    models = pytest.importorskip("keras_hub").models
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = models.BertBackbone(vocabulary_size=30, max_sequence_length=16, **sizes)
    task = models.BertTextClassifier(randomised(backbone), num_classes=2)
    return hm.apply_head_masks(task, hm.PerHead({0: hm.SameSentence(9)}))


def test_samples_for_a_masked_model_inside_go_by_the_table_of_each_input():
    given = request(interface_of(Survey(masked_task()), None), (4, 40))
    assert given["token_ids"].max() == 29
    assert given["segment_ids"].max() == 1
    assert 0.1 < (given["token_ids"] == 9).mean() < 0.4


@pytest.mark.long
@tensorflow_only
def test_a_masked_task_is_published_on_made_up_requests_and_on_what_its_preprocessor_makes(
    tmp_path, monkeypatch
):
    check_in_this_process(monkeypatch)
    task = masked_task()
    made_up = hm.export_saved_model(task, tmp_path)
    rng = np.random.default_rng(0)
    given = {
        "token_ids": np.where(np.arange(12) % 4 == 3, 9, rng.integers(10, 30, (3, 12))),
        "segment_ids": np.zeros((3, 12), "int32"),
        "padding_mask": np.arange(12) < np.array([[12], [9], [5]]),  # bool, as KerasHub's are
    }
    report = hm.export_saved_model(task, tmp_path, check=[given])
    assert report.check.shapes == ((3, 12),)
    for check in (made_up.check, report.check):
        assert check.twin_distance > 10 * check.error
    refused = given | {"padding_mask": given["padding_mask"].astype("float32")}
    with pytest.raises(ValueError, match=r"'padding_mask' must be int32 .* Received: float32"):
        hm.export_saved_model(task, tmp_path, check=[refused])


@tensorflow_only
def test_a_check_without_effect_says_which_ids_it_tried(tmp_path, monkeypatch):
    check_in_this_process(monkeypatch)
    without_end = {"ids": np.arange(12, dtype="int32")[None]}
    with pytest.raises(
        RuntimeError,
        match=r"no effect on these inputs\. It looks for id 102 in 'token_ids'\. Tried: 'ids' "
        r"with ids 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(12 ids\)\. Pass inputs .* check=\[",
    ):
        hm.export_saved_model(by_our_layer(), tmp_path, input_signature=IDS, check=[without_end])
    assert nothing_in(tmp_path)


@tensorflow_only
def test_a_check_that_cannot_look_into_a_function_says_so(tmp_path, monkeypatch):
    import tensorflow as tf

    check_in_this_process(monkeypatch)
    layer = hm.PerHeadMaskedMultiHeadAttention(
        2, 4, mask_spec=hm.Window(1, 1), tiled=False, name="inside"
    )
    inside = tf.function(lambda x, ids: layer(x))
    with pytest.raises(
        RuntimeError, match=r"'.*inside' runs in a `tf\.function` inside the model.* check=False"
    ):
        hm.export_saved_model(
            OverIds(layer, inside), tmp_path, input_signature=IDS, check=[(2, 12)]
        )
    assert nothing_in(tmp_path)


@tensorflow_only
def test_an_export_that_answers_otherwise_is_not_published(tmp_path, monkeypatch):
    check_in_this_process(monkeypatch)
    model = ours()
    truth = checking.answer
    monkeypatch.setattr(checking, "answer", lambda *a: {k: v + 0.01 for k, v in truth(*a).items()})
    with pytest.raises(RuntimeError, match="gives other outputs than the model in memory"):
        hm.export_saved_model(model, tmp_path / "m", padded=False, check=[(2, 8)])
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_the_fresh_process_cannot_import_this_package(monkeypatch):
    import tensorflow as tf

    def load(folder):
        import keras_headmask  # noqa: F401

    monkeypatch.setitem(sys.modules, "keras_headmask", hm)  # as it is put back afterwards
    monkeypatch.setattr(tf.saved_model, "load", load)
    with pytest.raises(ImportError, match="keras_headmask"):
        fresh_process.main("a folder")


@tensorflow_only
def test_every_request_is_looked_at_for_attention_outside_the_rule(monkeypatch, tmp_path):
    """A wide window forbids nothing in a short one, where the scores are right without a rule."""
    model = ours(hm.Window(20, 20))
    (entry,) = Survey(model).known
    interface = interface_of(Survey(model), None)
    given = checking.requests(interface, [(1, 9), (1, 40)])
    cases = []

    def run_fresh(folder, tried):
        cases.extend(tried)
        scores = {entry.path: np.full((1, 2, 40, 40), 0.3)}
        answers = [scores if case.answer is None else case.answer for case in tried]
        return {"milliseconds": [1] * len(tried), "load_milliseconds": 1}, answers

    monkeypatch.setattr(checking, "run_fresh", run_fresh)
    signatures = signatures_of(interface, [entry], {})
    with pytest.raises(RuntimeError, match=r"has 0\.3 at a key that the rule forbids"):
        checking.checked(tmp_path, interface, signatures, given, [], 1e-4, {})
    short, long = [c for c in cases if c.signature == "serve_scores"]
    assert short.allowed == {}
    assert not long.allowed[entry.path].all()


def a_result(**changes):
    graph = {"nodes": 1, "python": [], "compiled": [], "pinned": []}
    good = checking.CheckResult(
        shapes=((1, 2),),
        error=1e-6,
        tolerance=1e-4,
        milliseconds=(1.0,),
        load_milliseconds=1.0,
        twin_distance=0.1,
        mass_outside=0.0,
        mass_seen_in="serve_scores",
        padded_error=1e-6,
        compiled_error=None,
        precision_error=None,
        graphs={"serving_default": graph, "serve_xla_1x2": graph | {"compiled": ["XlaLaunch"]}},
    )
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": 1e-3}, "serving_default gives other outputs"),
        ({"error": float("nan")}, "serving_default gives other outputs"),
        ({"padded_error": float("inf")}, "serve_padded gives other outputs"),
        ({"compiled_error": 1.0}, "the XLA signatures gives? other outputs"),
        ({"twin_distance": 1e-6}, "as its twin without rules"),
        ({"mass_outside": 1e-3}, "0.001 at a key that the rule forbids"),
    ],
)
def test_what_the_check_finds_wrong(changes, message):
    assert list(checking._problems(a_result())) == []
    (problem, *_) = checking._problems(a_result(**changes))
    assert re.search(message, problem)


def test_distances_see_names_shapes_and_what_is_not_finite():
    one = {"x": np.array([1.0, np.nan, np.inf])}
    assert distance(one, one) == 0
    assert distance({"x": np.array([1.5, np.nan, np.inf])}, one) == 0.5
    for other in ({"y": one["x"]}, {"x": one["x"][:2]}, {"x": np.array([1.0, 0.0, np.inf])}):
        assert distance(one, other) == float("inf")
    words = {"x": np.array([b"a", b"bc"])}
    assert distance({"x": fresh_process.plain(words["x"].astype(object))}, words) == 0
    assert distance({"x": np.array([b"a", b"b"])}, words) == float("inf")
    wave = {"x": np.array([1 + 1j])}
    assert distance({"x": np.array([1 - 1j])}, wave) == pytest.approx(2 / 2**0.5)


def test_large_outputs_do_not_hide_what_is_wrong_with_small_ones():
    logits = np.array([-1e9, 0.5, 40.0], "float32")
    one = {"logits": logits, "label": np.array([0.2, 0.8], "float32"), "best": np.array([30000])}
    off = one | {"label": np.array([0.21, 0.79], "float32")}
    assert distance(off, one) == pytest.approx(0.01)
    off = one | {"logits": logits + np.array([0, 0.4, 0], "float32")}
    assert distance(off, one) == pytest.approx(0.01)  # of 40
    for logits in ([-1e9, 0.5, -1e9], [0.5, 0.5, 40]):  # masked at other places
        assert distance(one | {"logits": np.array(logits)}, one) >= 1
    assert distance(one | {"best": np.array([30001])}, one) == 1  # another id


@tensorflow_only
def test_masked_logits_do_not_let_pooling_pass_for_padded():
    """Beside an output of -1e9 what padding changes was taken for rounding."""
    model = stock()
    x, ids = model.output["sequence"], model.input["token_ids"]
    logits = ops.where(ops.less(ids, 15), -1e9, layers.Dense(1)(x)[..., 0])
    pooled = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(model.input, {"logits": logits, "label": pooled})
    assert "changes the outputs at real positions" in why_not_padded(
        interface_of(Survey(model), None), 8
    )


@tensorflow_only
def test_the_twin_and_the_scores_in_memory():
    """What the check holds the export against: the twin is free of rules, and put back after."""
    for model in (
        ours(),
        masked(),
        hm.apply_head_masks(ours(hm.Window(3, 3)), RULE, existing="and"),
    ):
        interface = interface_of(Survey(model), None)
        given = request(interface, (2, 12))
        here = answer(interface, given)
        with observers.rules_off():
            twin = answer(interface, given)
        free = ours(None) if "padding_mask" not in given else stock()
        free.set_weights(model.get_weights())
        assert distance(twin, answer(interface_of(Survey(free), None), given)) < 1e-5
        assert distance(here, twin) > 1e-4
        assert distance(answer(interface, given), here) == 0
        allowed, scores = checking.looked_at(interface, Survey(model).known, given)
        ((path, mask),) = allowed.items()
        assert scores.keys() == {path}
        assert not mask.all()
        assert checking.mass_outside(allowed, scores) == 0
        assert checking.mass_outside({path: ~mask}, scores) > 0.01
        assert checking.mass_outside({}, scores) is None
