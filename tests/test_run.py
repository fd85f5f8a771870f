"""`make lint`, `make check` and `make test` run every pass, and then say which failed."""

import pathlib
import re
import sys

import pytest
import run

pytestmark = pytest.mark.tensorflow  # one backend is enough
ROOT = pathlib.Path(__file__).parents[1]
PRINT_BACKEND = "import os; print(os.environ['KERAS_BACKEND'])"


def test_a_pass_that_fails_stops_no_other_and_is_reported(monkeypatch, capfd):
    passes = (
        ("first", None, (sys.executable, "-c", "raise SystemExit(3)")),
        ("second", "torch", (sys.executable, "-c", PRINT_BACKEND)),
    )
    monkeypatch.setitem(run.RUNS, "test", ("Some minutes.", passes))
    monkeypatch.setitem(run.RUNS, "check", ("A minute.", passes[1:]))
    assert run.main() == 1
    printed = capfd.readouterr().out
    assert printed.splitlines()[0] == "Some minutes."
    assert "\ntorch\n" in printed
    assert "FAILED (3)" in next(x for x in printed.splitlines() if x.startswith("first"))
    assert printed.rstrip().endswith("1 passed, 1 failed")

    assert run.main("check") == 0
    printed = capfd.readouterr().out
    assert printed.splitlines()[0] == "A minute."
    assert printed.rstrip().endswith("1 passed, 0 failed")


@pytest.mark.parametrize("name", run.RUNS)
def test_each_run_says_how_long_it_takes_and_is_a_command(name):
    said, passes = run.RUNS[name]
    assert re.search(r"\d+ minutes", said)
    assert all({"ruff", "mypy"} & {*command} for _, backend, command in passes if backend is None)
    for path in {x for _, _, command in passes for x in command if x.startswith("tests/")}:
        file, _, test = path.partition("::")
        assert f"def {test}" in (ROOT / file).read_text("utf-8") if test else (ROOT / file).exists()
    assert f"\n{name}: " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_backend_has_its_pass():
    backends = {name: {b for _, b, _ in passes if b} for name, (_, passes) in run.RUNS.items()}
    every = {"tensorflow", "jax", "torch"}
    assert backends == {"lint": set(), "check": {"tensorflow"}, "test": every}
