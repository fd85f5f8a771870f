"""`python -m benchmarks.cliffs` walks what was slow before and prints what is slow, no noise."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed
cliff_cases, cliffs = (
    importlib.import_module(f"benchmarks.{x}") for x in ("cliff_cases", "cliffs")
)
pytestmark = pytest.mark.tensorflow


def test_the_grid_of_cliffs_holds_what_was_slow_before():
    every = list(cliff_cases.grid())
    assert len(set(every)) == len(every)
    named = [
        ("4 head groups", "unknown", lambda case: case.queries <= 64 and case.heads == 8),
        ("window", "unknown", lambda case: case[1:5] == (64, 260, 260, 1)),
        ("window", "known", lambda case: case[1:5] == (64, 260, 260, 1)),
        ("random blocks, a seed for each head", "unknown", lambda case: case.queries > 64),
        ("window", "known", lambda case: 128 <= case.queries <= 255),
        ("window", "known", lambda case: case.dropout and case.queries == 200),
    ]
    for rule, lengths, fits in named:
        steps = {x.step for x in every if (x.rule, x.lengths) == (rule, lengths) and fits(x)}
        assert steps == {"forward", "gradient"}, rule
    assert any(x[:4] == ("window", 1, 1, 4096) and x.lengths == "known" for x in every)


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
def test_ours_is_compared_with_dense_in_turns(cost, verdict):
    now = [0.0]
    load = iter(range(1, 10**6))  # neighbours that grow: both slow down alike

    def costs(seconds):
        now[0] += seconds * (1 + next(load) / 1000)

    found = cliffs.compare(lambda: costs(cost), lambda: costs(1.0), 35, clock=lambda: now[0])
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(cost, rel=0.01)
    assert len(found.ratios) < 12


def test_a_cliff_is_printed_and_fails(monkeypatch, capsys):
    cases = list(cliff_cases.grid(quick=True))
    monkeypatch.setattr(cliffs, "compiled", lambda cases, _: [(x, (0, 0), 11.0) for x in cases])
    slow = cases[1]
    verdicts = {True: cliffs.Found([1.5, 1.7, 9.0], 2.0, "slower")}
    fine = cliffs.Found([1.0], 2.0, "not slower")
    turns = iter(cases)
    monkeypatch.setattr(cliffs, "compare", lambda *given: verdicts.get(next(turns) == slow, fine))
    assert cliffs.main(["--quick"]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines[1] == f"1.70 {slow} (dense: 2.00 ms)"
    assert [line for line in lines if "to compile" in line] == lines[:1] + lines[2:]
    assert all(x in summary for x in ("4 cases", "1 slower than 1.1", "4 compiled"))


@pytest.mark.parametrize("number", [0, 3])
def test_what_cliffs_compares_is_equal(number):
    case = list(cliff_cases.grid(quick=True))[number]
    of_both = {against: next(iter(cliffs.compiled([case], against))) for against in cliffs.AGAINST}
    for _, (ours, other), seconds in of_both.values():
        assert seconds > 0
        np.testing.assert_allclose(ours()[0], other()[0], atol=1e-5)


def test_where_nothing_is_slow_cliffs_prints_a_line(capsys):
    case = next(cliff_cases.grid(quick=True))
    assert cliffs.main(["--quick", "--only", str(case), "--repetitions", "1"]) == 0
    (summary,) = capsys.readouterr().out.splitlines()
    assert all(x in summary for x in ("1 cases", "0 slower"))
    with pytest.raises(SystemExit, match="No case has 'nonsense'"):
        cliffs.main(["--only", "nonsense"])
