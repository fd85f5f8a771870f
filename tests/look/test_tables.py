"""Reports print as tables that fit a terminal, equal layers once."""

import dataclasses

import numpy as np
import pytest
from small_models import apply, stack

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow  # a table is the same on each backend

LONG = np.random.default_rng(0).integers(1, 12, (2, 12)).astype("int32")


@pytest.fixture(scope="module")
def reports():
    model = apply(stack(2), hm.Window(1, 0))
    return {
        "measures": hm.measure_heads(model, LONG),
        "suggestion": hm.suggest_rules(model, LONG),
        "leaks": hm.find_leaks(model, LONG, rule=hm.Window(0, 0)),
    }


NAMES = ["measures", "suggestion", "leaks"]


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_what_it_prints(reports, name):
    report = reports[name]
    assert repr(report) == str(report)


@pytest.mark.parametrize("name", ["measures", "suggestion", "leaks"])
def test_reports_of_long_names_stay_narrow(reports, name):
    path, rule = "backbone/" * 12 + "attention", hm.Chunk(3) | hm.Window(100, 100) | hm.Keys(0, 1)
    report = reports[name]
    if name == "leaks":
        leak = report.leaks[0]._replace(input=path, output=path)
        report = dataclasses.replace(report, leaks=(leak,))
    elif name == "measures":
        report = dataclasses.replace(report, layers=(path, "b"))
    else:
        specs = {path: (rule,) * 4, "b": (hm.Full(),) * 4}
        report = dataclasses.replace(report, specs=specs)
    assert max(map(len, str(report).splitlines())) <= 100


def test_equal_layers_stand_once(reports):
    suggestion = reports["suggestion"]
    specs = {f"layer_{i}": (hm.Window(int(i == 4), 0),) * 2 for i in range(6)}
    alike = dataclasses.replace(
        suggestion, specs=specs, kept=np.ones((6, 2)), computed=np.ones((6, 2))
    )
    starts = [line.split("  ")[0] for line in str(alike).splitlines()]
    assert starts == ["layers 0 to 3 and 5"] * 2 + ["4 layer_4"] * 2


def test_layers_are_told_apart_where_their_paths_are_cut(reports):
    paths = tuple(f"transformer_layer_{i}_of_a_backbone/self_attention_layer" for i in range(2))
    scores = {name: np.arange(8.0).reshape(2, 4) for name in reports["measures"].scores}
    report = dataclasses.replace(reports["measures"], layers=paths, heads=(4, 4), scores=scores)
    starts = {line[:2] for line in str(report).splitlines() if "..." in line.split("  ")[0]}
    assert starts == {"0 ", "1 "}
