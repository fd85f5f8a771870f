"""`make lint`, `make check` and `make test` run every pass, and then say which failed."""

import sys

import pytest
import run

pytestmark = pytest.mark.tensorflow  # one backend is enough
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
