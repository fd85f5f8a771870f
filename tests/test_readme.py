"""The README's Python prints what it says; its figures, and those of pages, are of the records."""

import importlib
import json
import math
import re
from pathlib import Path

import pytest
import snippets

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.mark.daily
@pytest.mark.tensorflow  # what it exports is TensorFlow's
def test_snippets(tmp_path, monkeypatch):
    for package in snippets.needed(README):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    assert snippets.run(README) == 1


def test_the_table_of_heads_is_what_the_tutorial_printed():
    printed = json.loads((ROOT / "docs/printed/know_your_heads.json").read_text("utf-8"))["printed"]
    row = re.compile(r"^(no rule|keep|all heads).*? +(\d\.\d\d) +\d\.\d{3} +(\d\.\d{3}) ", re.M)
    found, text = row.findall("\n".join(printed)), (ROOT / "docs/heads.md").read_text("utf-8")
    (stock,) = [rank for kind, _, rank in found if kind == "no rule"]
    shares = [share for kind, share, _ in found if kind == "keep"]
    assert f" | 1 | {' | '.join(reversed(shares))} |" in text
    lines = {"keep": "a rule suggested for each head", "all heads": "one window for all heads"}
    for name, line in lines.items():
        ranks = [rank for kind, _, rank in reversed(found) if kind == name]
        assert f"\n| {line} | {' | '.join([stock, *ranks])} |\n" in text


@pytest.fixture
def benchmarks(monkeypatch):
    """Modules of it by name: it is no part of the installed package."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def record(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_its_speeds_are_those_of_the_record(page, benchmarks):
    goals, ratios = benchmarks("report").GOALS, record("record.json")["ratios"]
    expected = {g.case: f"{ratios[g.ratio]:.2f}" for g in goals if g.against == "stock Keras"}
    table = r"^\| (.*) \|\n[|-]+\n\| ([\d.| ]+) \|$"
    (found,) = re.findall(table, (ROOT / page).read_text(encoding="utf-8"), re.M)
    shown = dict(zip(*(row.split(" | ") for row in found), strict=True))
    assert len(shown) == 5
    assert shown.items() <= expected.items()


def test_the_table_of_performance_is_made_from_the_records(benchmarks):
    report = benchmarks("report")
    page = report.PAGE.read_text(encoding="utf-8")
    assert page == report.page_with(report.page_table()), "python -m benchmarks.report"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_its_experiment_is_that_of_the_records(page, benchmarks):
    models = benchmarks("language_model")
    losses, ratios = models.losses_of(record(models.LOSS)), record(models.TIME)["ratios"]
    rule, full = losses[models.REPEATS], losses[models.FULL]
    assert len(rule) == len(full) == 3
    spread = math.ceil(100 * max(max(of_arm) - min(of_arm) for of_arm in (rule, full))) / 100
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert f"loss {sum(rule) / 3:.2f} against {sum(full) / 3:.2f} with full attention" in text
    assert f"differ by at most {spread:.2f}" in text
    assert f"in {ratios[models.REPEATS]:.2f} of stock Keras' time" in text
