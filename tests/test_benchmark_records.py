"""A record of speed says how quiet the machine was, and keeps TensorFlow without oneDNN apart."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
main, measure, probe, report = (
    importlib.import_module(f"benchmarks.{x}") for x in ("__main__", "measure", "probe", "report")
)
pytestmark = pytest.mark.tensorflow


def case(ours, stock, *probed):
    found = {"seconds": {"ours": ours, "stock": stock}, "repetitions": 7}
    return found | ({"probe_gflops": list(probed)} if probed else {})


CASES = {
    "window": {
        "keras": case(0.1, 1.0, 98.2, 61.0),
        "keras, oneDNN off": case(0.6, 2.0, 99.0, 97.0),
        "torch": {"seconds": {"flex": 0.2}, "repetitions": 7, "probe_gflops": [88.0, 91.0]},
    }
}


@pytest.mark.parametrize("folder", ["", "bfloat16", "avx2"])
def test_the_report_of_an_older_record_is_as_it_was(folder, tmp_path):
    results = ROOT / "benchmarks" / "results" / folder
    record = json.loads((results / "record.json").read_text(encoding="utf-8"))
    assert report.ratios(record) == record["ratios"]
    report.write(record, tmp_path)
    written, kept = ((x / "RESULTS.md").read_text(encoding="utf-8") for x in (tmp_path, results))
    assert written == kept


def test_ratios_without_one_dnn_are_to_stock_without_it():
    found = report.ratios({"cases": CASES})
    assert found["window / stock"] == 0.1
    assert found["window / flex"] == 0.5
    assert found["window, oneDNN off / stock"] == 0.3
    assert "window, oneDNN off / flex" not in found


def test_the_report_shows_the_speed_of_the_machine_and_what_one_dnn_does():
    ratios = report.ratios({"cases": CASES})
    record = {"cases": CASES, "ratios": ratios, "versions": {}, "threads": 2, "dtype": "float32"}
    record["machine"] = {"processor": "a CPU", "cores": 2, "memory_gib": 9}
    record |= {"date": "today", "command": "it"}
    table = report.goal_table(record)
    assert "| window, T=4096, oneDNN off | stock Keras | ≤ 0.16 | 0.3 | **missed** |" in table
    assert table.endswith("the machine's own speed beside the cases: 61 to 99 GFLOP/s.")
    shown = report._case_table("window", CASES["window"])
    assert "| ours, oneDNN off | 600 | 1 | 7 |" in shown
    assert "| stock, oneDNN off | 2e+03 | 0.3 | 7 |" in shown
    assert "| flex | 200 | 0.5 | 7 |" in shown
    assert "The machine's own speed (keras, oneDNN off): 97 to 99 GFLOP/s." in shown


def test_the_probe_counts_operations(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 10.5, 20.0, 20.5, 30.0, 30.5, 40.0, 49.0])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    assert probe.gigaflops() == round(2 * 8 * 512**3 / 0.5e9, 1)


def test_each_measurement_is_probed_before_and_after(monkeypatch):
    seen = iter([50.0, 70.0])
    monkeypatch.setattr(probe, "gigaflops", lambda: next(seen))
    result = measure.interleaved({"it": lambda: None}, repetitions=1)
    assert result["probe_gflops"] == [50.0, 70.0]


@pytest.mark.parametrize(
    ("states", "runs"),
    [
        ("on,off", [("keras", "1"), ("keras, oneDNN off", "0"), ("torch", "1")]),
        ("on", [("keras", "1"), ("torch", "1")]),
    ],
)
def test_tensorflow_runs_with_one_dnn_and_without(states, runs, monkeypatch):
    assert main._runs(argparse.Namespace(peers="keras,torch", onednn=states)) == runs
    started = []

    def run(task, **variables):
        started.append((task["framework"], variables["TF_ENABLE_ONEDNN_OPTS"]))
        return {"window": {"seconds": {}}}

    monkeypatch.setattr(main.workers, "run", run)
    options = main._parser().parse_args(["--only", "window", "--onednn", states])
    record = main.measure_all(["window"], options)
    assert started == [(framework.split(",")[0], variable) for framework, variable in runs]
    assert list(record["cases"]["window"]) == [framework for framework, _ in runs]
