"""What the check of an export finds, and what it does not publish."""

import dataclasses
import pathlib
import re

import keras
import numpy as np
import pytest
from contract import numpy
from export_models import RULE, masked, nothing_in, ours, stock
from keras import layers, ops

import keras_headmask as hm
from keras_headmask.export import checking, fresh_process
from keras_headmask.export.interface import interface_of
from keras_headmask.export.signatures import Plan
from keras_headmask.retrofit.finding import find_attention

ROOT = pathlib.Path(__file__).parents[2]
tensorflow_only = pytest.mark.tensorflow


@tensorflow_only
def test_a_rule_without_effect_is_not_published(tmp_path):
    """The fresh process sees that the export answers as its twin does."""
    model = ours(rule=hm.PerHead({0: hm.SameSentence(9)}))
    one_sentence = {"token_ids": np.array([[5, 6, 7, 8]], "int32")}
    with pytest.raises(RuntimeError, match="answers as its twin without rules does"):
        hm.export_saved_model(model, tmp_path / "m", check=[one_sentence])
    assert nothing_in(tmp_path / "m")


@tensorflow_only
def test_an_export_that_needs_this_package_or_answers_otherwise_is_not_published(
    tmp_path, monkeypatch
):
    """Both at once in one fresh process: its answers, and what it may import."""
    model = ours()
    truth = checking.answer
    monkeypatch.setattr(checking, "answer", lambda *a: {k: v + 0.01 for k, v in truth(*a).items()})
    with pytest.raises(RuntimeError, match="gives other outputs than the model in memory"):
        hm.export_saved_model(model, tmp_path / "m", padded=False, check=[(2, 8)])
    assert nothing_in(tmp_path / "m")
    with pytest.raises(ImportError, match="must not be needed"):
        fresh_process._Block().find_spec("keras_headmask.rules.base")
    assert fresh_process._Block().find_spec("numpy") is None


@tensorflow_only
def test_every_request_is_looked_at_for_attention_outside_the_rule(monkeypatch, tmp_path):
    """A wide window forbids nothing in a short one, where the scores are right without a rule."""
    model = ours(hm.Window(20, 20))
    (entry,) = find_attention(model).known
    interface = interface_of(model, None)
    plan = Plan(interface, [entry], [], None)
    given = checking.requests(interface, [(1, 9), (1, 40)])
    cases = []

    def run_fresh(folder, tried):
        cases.extend(tried)
        told = {"milliseconds": 1, "answer": 0.0, "twin": 1.0}
        bad = {"milliseconds": 1, "outside": 0.3}
        answers = {"serving_default": told, "serve_scores": {"milliseconds": 1}}
        found = [bad if case.allowed else answers[case.signature] for case in tried]
        return {"cases": found, "load_milliseconds": 1}

    monkeypatch.setattr(checking, "run_fresh", run_fresh)
    with pytest.raises(RuntimeError, match=r"has 0\.3 at a key that the rule forbids"):
        plan.checked(tmp_path, given, [], {})
    short, long = [c for c in cases if c.signature == "serve_scores"]
    assert short.allowed is None
    assert not long.allowed[entry.path].all()
    assert checking.mass_outside(checking.looked_at(interface, given[0])) is None


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
    ("changes", "told"),
    [
        ({"error": 1e-3}, "serving_default gives other outputs"),
        ({"error": float("nan")}, "serving_default gives other outputs"),
        ({"padded_error": float("inf")}, "serve_padded gives other outputs"),
        ({"compiled_error": 1.0}, "the XLA signatures gives? other outputs"),
        ({"twin_distance": 1e-6}, "as its twin without rules"),
        ({"mass_outside": 1e-3}, "0.001 at a key that the rule forbids"),
    ],
)
def test_what_the_check_finds_wrong(changes, told):
    assert list(checking._problems(a_result())) == []
    (problem, *_) = checking._problems(a_result(**changes))
    assert re.search(told, problem)


def test_distances_see_names_shapes_and_what_is_not_finite():
    one = {"x": np.array([1.0, np.nan, np.inf])}
    assert fresh_process.distance(one, one) == 0
    assert fresh_process.distance({"x": np.array([1.5, np.nan, np.inf])}, one) == 0.5
    for other in ({"y": one["x"]}, {"x": one["x"][:2]}, {"x": np.array([1.0, 0.0, np.inf])}):
        assert fresh_process.distance(one, other) == float("inf")
    words = {"x": np.array([b"a", b"bc"])}
    assert fresh_process.distance({"x": words["x"].astype(object)}, words) == 0
    assert fresh_process.distance({"x": np.array([b"a", b"b"], object)}, words) == float("inf")
    wave = {"x": np.array([1 + 1j])}
    assert fresh_process.distance({"x": np.array([1 - 1j])}, wave) == pytest.approx(2 / 2**0.5)


def test_large_outputs_do_not_hide_what_is_wrong_with_small_ones():
    logits = np.array([-1e9, 0.5, 40.0], "float32")
    one = {"logits": logits, "label": np.array([0.2, 0.8], "float32"), "best": np.array([30000])}
    off = one | {"label": np.array([0.21, 0.79], "float32")}
    assert fresh_process.distance(off, one) == pytest.approx(0.01)
    off = one | {"logits": logits + np.array([0, 0.4, 0], "float32")}
    assert fresh_process.distance(off, one) == pytest.approx(0.01)  # of 40
    for logits in ([-1e9, 0.5, -1e9], [0.5, 0.5, 40]):  # masked at other places
        assert fresh_process.distance(one | {"logits": np.array(logits)}, one) >= 1
    assert fresh_process.distance(one | {"best": np.array([30001])}, one) == 1  # another id
    case = checking.Case("serving_default", {"x": np.zeros((1, 2))}, one)
    found = {"cases": [{"milliseconds": 1, "answer": 0.01}], "load_milliseconds": 1}
    with pytest.raises(RuntimeError, match="serving_default gives other outputs"):
        checking.judged(found, [case], 1e-4, None, None, {})


@tensorflow_only
def test_masked_logits_do_not_let_pooling_pass_for_padded():
    """Beside an output of -1e9 what padding changes was taken for rounding."""
    model = stock()
    x, ids = model.output["sequence"], model.input["token_ids"]
    logits = ops.where(ops.less(ids, 15), -1e9, layers.Dense(1)(x)[..., 0])
    pooled = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    plan = Plan(
        interface_of(keras.Model(model.input, {"logits": logits, "label": pooled}), None),
        *([], [], None),
    )
    plan.offer_padded([])
    assert "changes the outputs at real positions" in plan.left_out["serve_padded"]


@tensorflow_only
def test_the_twin_and_the_scores_in_memory():
    """What the check holds the export against: the twin is free of rules, and put back after."""
    for model in (
        ours(),
        masked(),
        hm.apply_head_masks(ours(hm.Window(3, 3)), RULE, existing="and"),
    ):
        interface = interface_of(model, None)
        specs = tuple(hm.mask_specs(model).values())
        given = checking.request(interface, (2, 12), specs)
        (case,) = checking.default_cases(interface, [given])
        free = ours(None) if "padding_mask" not in given else stock()
        free.set_weights(model.get_weights())
        twin = checking.answer(interface_of(free, None), given)
        assert fresh_process.distance(case.twin, twin) < 1e-5
        assert fresh_process.distance(case.answer, twin) > 1e-4
        assert fresh_process.distance(checking.answer(interface, given), case.answer) == 0
        (seen,) = checking.looked_at(interface, given)
        assert not numpy(seen.allowed).all()
        assert checking.mass_outside([seen]) == 0
        wrong = dataclasses.replace(seen, allowed=~numpy(seen.allowed))
        assert checking.mass_outside([wrong]) > 0.01
