"""Commands on a rule: they say and draw what the functions do."""

import functools
import json
import re
import sys

import keras
import numpy as np
import pytest

import keras_headmask as hm

pytest.importorskip("click")

from calling import CAUSAL, RULE, answer, as_json, failure, run

from keras_headmask.cli import bench
from keras_headmask.look import cpu

pytestmark = pytest.mark.tensorflow  # one backend is enough for what is said


def test_draw_draws_what_the_function_draws():
    ids = [[5, 9, 4, 6]]
    words = "yes . no no"
    expected = hm.draw(RULE, num_heads=4, mask_inputs={"token_ids": ids}, tokens=words.split())
    given = ("-n", "4", "--inputs", json.dumps({"token_ids": ids[0]}))
    for tokens in (words, "tokens.json", '["yes", ".", "no", "no"]'):
        assert answer("draw", "rule.json", "--tokens", tokens, *given) == expected + "\n"
    second = hm.draw(RULE, 4, mask_inputs={"token_ids": [[9, 1, 9, 1]]})
    assert (
        answer("draw", "rule.json", "-q", "4", "--inputs", "inputs.json", "--example", "1")
        == second + "\n"
    )


def test_draw_takes_all_that_the_function_takes():
    assert answer("draw", CAUSAL, "-q", "2", "-k", "4", "--query-offset", "2") == (
        "1 1 1 0\n1 1 1 1\n"
    )
    assert answer("draw", CAUSAL, "-q", "4", "--tile", "2").splitlines()[1:] == ["+ 0", "1 +"]
    sides = '{"token_ids": {"query": [1, 9, 3], "key": [9, 4]}}'
    rule = json.dumps(hm.SameSentence(9).get_config())
    found = answer("draw", rule, "--tokens", '[["a", "b", "c"], ["x", "y"]]', "--inputs", sides)
    assert found == "  x y\na 1 0\nb 1 0\nc 0 1\n"
    flags = json.dumps(hm.KeyFlag("keep").get_config())
    key_only = '{"keep": {"key": [true, false]}}'
    assert answer("draw", flags, "-q", "1", "-k", "2", "--inputs", key_only) == "1 0\n"


def test_draw_as_json():
    found = as_json("draw", "rule.json", "-q", "4", "-n", "3", "--inputs", "inputs.json")
    assert found == {
        "heads": 3,
        "tile": [1, 1],
        "panels": [
            {"heads": [0], "rows": ["1100", "1100", "0011", "0011"]},
            {"heads": [1], "rows": ["1000", "1100", "1110", "1111"]},
            {"heads": [2], "rows": ["1111"] * 4},
        ],
        "file": None,
    }
    tiles = as_json("draw", CAUSAL, "-q", "128")
    assert tiles["tile"] == [4, 4]
    assert tiles["panels"][0]["rows"][1] == "1+" + "0" * 30


def test_draw_a_picture(here):
    pytest.importorskip("matplotlib")
    before = {path.name for path in here.iterdir()}
    answer("draw", CAUSAL, "-q", "3", "-o", "rule.svg")
    assert "<svg" in (here / "rule.svg").read_text()
    (here / "link.png").symlink_to("real.png")
    found = as_json("draw", CAUSAL, "-q", "3", "-o", "link.png")
    assert found["file"] == "link.png"
    assert (here / "link.png").is_symlink()
    assert (here / "real.png").read_bytes()[:4] == b"\x89PNG"
    assert "'rule.svg' exists" in failure("draw", CAUSAL, "-q", "4", "-o", "rule.svg")
    answer("draw", CAUSAL, "-q", "4", "-o", "rule.svg", "--force")
    assert {path.name for path in here.iterdir()} == before | {"rule.svg", "link.png", "real.png"}


def test_lint_finds_what_the_function_finds():
    dead = '{"kind": "window", "before": 2, "after": -1}'
    findings = hm.lint(hm.Window(2, -1), queries=8, num_heads=2)
    given = ("lint", dead, "-q", "8", "-n", "2")
    assert answer(*given) == f"{findings}\n"
    assert answer(*given, "--strict", code=1) == f"{findings}\n"
    found = as_json(*given, "--strict", code=1)["findings"]
    assert [(f["severity"], f["code"]) for f in found] == [(f.severity, f.code) for f in findings]
    assert found[0]["positions"] == [0]
    assert found[0]["way_out"] == findings[0].way_out
    assert answer("lint", "rule.json", "--strict") == "No findings.\n"
    assert as_json("lint", "rule.json") == {"findings": []}
    assert "error: head-off" in answer("lint", '{"kind": "nothing"}', code=1)
    floats = '{"token_ids": [1.0, 9.0, 2.0]}'  # which a layer refuses, and lint explains
    assert "error: ids-collide" in answer("lint", "rule.json", "--inputs", floats, code=1)


def test_lint_models():
    assert answer("lint", "--model", "masked.keras") == "No findings.\n"
    assert answer("lint", CAUSAL, "--model", "model.keras") == "No findings.\n"
    found = as_json("lint", '{"kind": "nothing"}', "--model", "masked.keras", code=1)
    assert [(f["code"], f["layers"]) for f in found["findings"]][:1] == [
        ("head-off", ["attention"])
    ]


def test_describe():
    words = RULE.describe(4)
    assert answer("describe", "rule.json", "--heads", "4") == words + "\n"
    assert as_json("describe", "rule.json", "-n", "4") == {
        "words": words,
        "mask_inputs": ["token_ids"],
        "rule": RULE.get_config(),
    }
    causal = "A token sees itself and every token before it.\n"
    assert answer("describe", "-", stdin=CAUSAL) == causal
    assert answer("describe", "-", stdin="\ufeff" + CAUSAL) == causal  # as Windows writes text


def test_explain():
    found = hm.explain(RULE, queries=2048, num_heads=4)
    arguments = "explain", "rule.json", "-q", "2048", "-n", "4"
    assert answer(*arguments) == f"{found}\n"
    shown = as_json(*arguments)
    assert (shown["kernel"], shown["lengths"]) == (found.kernel, [2048, 2048])
    assert [group["share"] for group in shown["groups"]] == [x.share for x in found.groups]
    assert "A model has no 'num_heads'" in failure("explain", "--model", "masked.keras", "-n", "4")
    assert "Give a RULE, or --model MODEL." in run("explain").stderr


def test_schema():
    assert json.loads(answer("schema")) == as_json("schema") == hm.schema()


def test_own_specs(here):
    from keras_headmask.rules import config

    assert "--import MODULE" in failure("describe", "own.json")
    try:
        for name in ("own_specs.py", "own_specs", str(here / "own_specs.py")):
            result = run("draw", "own.json", "-q", "3", "--json", "--import", name)
            assert json.loads(result.stdout)["panels"][0]["rows"] == ["110", "111", "011"]
            sys.modules.pop("own_specs", None)
        # On standard error, not among the answer.
        assert set(result.stderr.splitlines()) == {"words of a module", "evaluated"}
        assert "nearer_than" in answer("schema")
    finally:
        config.KINDS.pop("nearer_than", None)
    (here / "folder" / "json.py").write_text("")  # as a module of Python's own
    answer("describe", CAUSAL, "--import", "folder/json.py")
    result = run("describe", "own.json", "--import", "no_such.py")
    assert "Cannot import 'no_such.py': FileNotFoundError" in result.stderr
    result = run("describe", "own.json", "--import", "no_such_module")
    assert result.exit_code == 2
    assert "Cannot import 'no_such_module': ModuleNotFoundError" in result.stderr


SMALL = ("-q", "40", "-n", "3", "--key-dim", "2", "--repetitions", "3")


def test_bench():
    found = as_json("bench", "rule.json", *SMALL, "--batch", "2", "--seed", "5")
    assert found["ratio"] == found["layer"]["median"] / found["stock"]["median"]
    for name in ("layer", "stock"):
        assert 0 < found[name]["least"] <= found[name]["median"] <= found[name]["greatest"]
    assert found["difference"] < 1e-5
    assert 0.4 < found["allowed_share"] < 0.8  # a half, some, and all of three heads
    assert (found["made_up"], found["batch"], found["seed"]) == (["token_ids"], 2, 5)
    assert (found["rule"], found["versions"]["keras"]) == (RULE.get_config(), keras.__version__)
    again = as_json("bench", "rule.json", *SMALL, "--batch", "2", "--seed", "5")
    other = as_json("bench", "rule.json", *SMALL, "--batch", "2", "--seed", "6")
    assert again["allowed_share"] == found["allowed_share"] != other["allowed_share"]


def test_bench_with_inputs_that_are_given():
    given = ("-q", "4", "--batch", "2", "--inputs", "inputs.json", "--repetitions", "1")
    found = as_json("bench", "rule.json", *given)
    inputs = {"token_ids": [[5, 9, 4, 6], [9, 1, 9, 1]]}
    mask = keras.ops.convert_to_numpy(hm.make_mask(RULE, 4, 4, 8, inputs))
    assert (found["made_up"], found["allowed_share"]) == ([], mask.mean())
    text = answer("bench", CAUSAL, *SMALL)
    assert re.search(r"^ratio \d+\.\d{3} of medians of 3 interleaved runs", text, re.MULTILINE)
    assert "made up" not in text
    assert f"\n{cpu.one_dnn()}\n" in text
    assert "outputs not compared" in answer("bench", '{"kind": "nothing"}', *SMALL)


def test_bench_fails_where_outputs_differ(monkeypatch):
    wrong = hm.make_mask(hm.Window(after=1), 40, 40)
    monkeypatch.setattr(bench, "make_mask", lambda *_: wrong)
    assert as_json("bench", CAUSAL, *SMALL, code=1)["difference"] > 1e-4


def test_bench_takes_turns():
    called = []

    def call(name):
        called.append(name)
        return np.zeros((1, 1, 1))

    taken = bench._interleaved(
        {name: functools.partial(call, name) for name in "ab"}, repetitions=3
    )
    rounds = list(zip(called[::2], called[1::2], strict=True))
    assert len(rounds) == 3 + bench._WARM_UP
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert {name: len(times) for name, times in taken.items()} == {"a": 3, "b": 3}
