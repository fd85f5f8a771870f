"""Commands on a model: what they write, and that nothing is lost."""

import pathlib
import re

import keras
import numpy as np
import pytest
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm

pytest.importorskip("click")

from calling import CAUSAL, RULE, answer, as_json, failure, run

from keras_headmask.cli import model_commands
from keras_headmask.look import cpu

pytestmark = pytest.mark.tensorflow  # one backend is enough for what is said


def test_info():
    found = as_json("info", "masked.keras")
    (layer,) = found["attention"]
    assert layer == {
        "number": 0,
        "reachable": True,
        "path": "attention",
        "class": "MultiHeadAttention",
        "heads": 4,
        "kind": "self",
        "rule": RULE.get_config(),
        "words": RULE.describe(4),
        "mask_inputs": ["token_ids"],
    }
    assert found["inputs"] == [{"name": "token_ids", "dtype": "int32", "shape": [None, None]}]
    assert (found["saved_by_keras"], found["versions"]["keras"]) == (keras.__version__,) * 2
    assert found["versions"]["keras_headmask"] == hm.__version__
    assert found["parameters"] == one_layer().count_params()
    text = answer("info", "masked.keras")
    for part in (
        f"masked.keras, saved by Keras {keras.__version__}: Functional 'small', ",
        "input token_ids: int32 (?, ?)\n",
        "0  attention  MultiHeadAttention  4 heads  self\n",
        f"Layer 0: {RULE.describe(4)}\n  reads token_ids\n",
    ):
        assert part in text
    assert "Layer 0: no rule\n" in answer("info", "model.keras")


def test_explain():
    lines = answer("explain", "--model", "masked.keras", "-q", "300").splitlines()
    assert lines[0].startswith("attention  Head 0, ")
    assert str(cpu.one_dnn()) in lines
    (layer,) = as_json("explain", "--model", "masked.keras", "-q", "300")
    assert layer["name"] == "attention"


def test_info_folds_layers_with_one_rule():
    model = hm.apply_head_masks(stack(4), {"0-2": hm.Window(after=0), "3": hm.Full()})
    model.save("deep.keras")
    lines = answer("info", "deep.keras").splitlines()
    assert "Layers 0 to 2: A token sees itself and every token before it." in lines
    assert "Layer 3: A token sees every token." in lines


def test_info_says_whether_one_dnn_is_on():
    found = as_json("info", "masked.keras")["onednn"]
    assert found["on"] in (True, False)
    assert str(cpu.OneDNN(**found)) == answer("info", "masked.keras").splitlines()[-1]


def test_info_numbers_self_attention_alone():
    class OddAttention(keras.layers.Layer):
        def call(self, x):
            return x * keras.ops.softmax(x)

    x, other = keras.Input((None, 8)), keras.Input((None, 8))
    attend = keras.layers.MultiHeadAttention
    y = attend(2, 4, name="first")(x, x)
    y = attend(2, 4, name="across")(y, other)
    y = OddAttention(name="odd")(attend(2, 4, name="second")(y, y))
    found = model_commands.information(keras.Model([x, other], y))
    assert [(x["path"], x["number"], x["reachable"]) for x in found["attention"]] == [
        ("first", 0, True),
        ("across", None, True),
        ("second", 1, True),
        ("odd", None, False),
    ]
    text = model_commands.as_text(found)
    assert re.search(r"^-  odd +OddAttention +\? heads .* no rule reaches this class$", text, re.M)
    assert "Layers 0 and 1, across: no rule" in text


def test_apply(here):
    untouched = (here / "model.keras").read_bytes()
    before = {path.name for path in here.iterdir()}
    found = as_json("apply", "model.keras", "rule.json", "-o", "out.keras")
    assert (found["file"], found["attention"][0]["rule"]) == ("out.keras", RULE.get_config())
    assert {path.name for path in here.iterdir()} == before | {"out.keras"}
    assert (here / "model.keras").read_bytes() == untouched
    written = keras.saving.load_model("out.keras")
    expected = hm.apply_head_masks(keras.saving.load_model("model.keras"), RULE)
    assert hm.mask_specs(written) == hm.mask_specs(expected)
    np.testing.assert_array_equal(written(TOKENS), expected(TOKENS))
    assert "Layer 0: Head 0: a token sees its own sentence" in answer(
        "apply", "model.keras", "rule.json", "-o", "again.keras"
    )


def test_apply_to_chosen_layers_and_over_rules():
    stack(4).save("deep.keras")

    def rules(*arguments):
        found = as_json("apply", *arguments, "-o", "out.keras", "--force")
        return [None if x["rule"] is None else x["rule"]["kind"] for x in found["attention"]]

    chosen = ("--layers", "0-1", "--layers", "block_3")
    assert rules("deep.keras", CAUSAL, *chosen) == ["window", "window", None, "window"]
    by_layer = '{"0,2": {"kind": "nothing"}, "block_3": {"kind": "full"}}'
    assert rules("deep.keras", by_layer) == ["nothing", None, "nothing", "full"]
    full = '{"kind": "full"}'
    found = failure("apply", "masked.keras", full, "-o", "out.keras", "--force")
    assert "Pass `--existing=and` to keep both, or `--existing=replace`." in found
    assert rules("masked.keras", full, "--existing", "replace") == ["full"]
    assert rules("masked.keras", full, "--existing", "and") == ["and"]


def test_apply_adds_inputs_only_when_asked(here):
    rule = '{"0": {"kind": "same_segment", "input": "parts"}}'  # a key of JSON is a text: a layer
    given = ("apply", "model.keras", rule, "-o", "out.keras")
    assert "reads ['parts'], and the model has no inputs of those names" in failure(*given)
    assert not (here / "out.keras").exists()
    answer(*given, "--add-inputs")
    assert [x.name for x in keras.saving.load_model("out.keras").inputs] == ["token_ids", "parts"]


def test_apply_overwrites_only_when_asked(here):
    (here / "out.keras").write_text("precious")
    assert "exists" in failure("apply", "model.keras", "rule.json", "-o", "out.keras")
    assert (here / "out.keras").read_text() == "precious"
    answer(
        "apply", "masked.keras", CAUSAL, "--existing", "replace", "-o", "masked.keras", "--force"
    )
    assert hm.mask_specs(keras.saving.load_model("masked.keras")) == {
        "attention": hm.Window(after=0)
    }


def test_apply_leaves_nothing_half_written(here, monkeypatch):
    def half(model, path):
        pathlib.Path(path).write_text("half a mod")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras.Model, "save", half)
    (here / "out.keras").write_text("precious")
    before = {path.name for path in here.iterdir()}
    given = ("apply", "model.keras", "rule.json", "-o", "out.keras", "--force")
    assert "No space left on device" in failure(*given)
    assert (here / "out.keras").read_text() == "precious"
    assert {path.name for path in here.iterdir()} == before


def test_export(here):
    text = answer("export", "masked.keras", "served", "--no-check")
    assert text.startswith("served/1: ")
    assert "serve_padded(token_ids int32[?, ?], lengths int32[?])" in text
    found = as_json("export", "masked.keras", "served", "--no-check", "--no-padded", "--dense")
    assert (found["version"], found["path"], list(found["signatures"])) == (
        2,
        "served/2",
        ["serving_default"],
    )
    assert found["rules"] == {"attention": RULE.get_config()}
    assert found["check"] is None
    assert (here / "served/2/saved_model.pb").stat().st_size * 2 < (
        here / "served/1/saved_model.pb"
    ).stat().st_size


def test_export_hands_its_options_on(monkeypatch):
    pytest.importorskip("tensorflow_serving")  # for `--warmup`
    seen = {}

    def exported(model, base, **options):
        seen.update(options, base=base)
        raise RuntimeError("The export was not published: its head sees too much")

    monkeypatch.setattr(hm, "export_saved_model", exported)
    result = run(
        *("export", "model.keras", "base", "--version", "7", "--no-padded", "--scores"),
        *("--xla", "8x128", "--xla", "1X16", "--warmup", "2x9", "--precision", "bfloat16"),
    )
    assert seen == {
        "base": "base",
        "version": 7,
        "padded": False,
        "xla_buckets": ((8, 128), (1, 16)),
        "scores": True,
        "warmup": ((2, 9),),
        "precision": "bfloat16",
        "check": True,
    }
    assert (result.exit_code, result.stdout) == (1, "")  # a check that failed is no wrong usage
    assert result.stderr == "Error: The export was not published: its head sees too much\n"


def test_export_needs_tensorflow(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert "runs on jax: set KERAS_BACKEND=tensorflow" in failure("export", "model.keras", "base")
