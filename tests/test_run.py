"""`make test` runs every pass, and then says which failed."""

import sys

import run

PRINT_BACKEND = "import os; print(os.environ['KERAS_BACKEND'])"


def test_a_pass_that_fails_stops_no_other_and_is_reported(monkeypatch, capfd):
    passes = (
        ("first", None, (sys.executable, "-c", "raise SystemExit(3)")),
        (
            "second",
            "torch",
            (sys.executable, "-c", "import os; print(os.environ['KERAS_BACKEND'])"),
        ),
    )
    monkeypatch.setattr(run, "PASSES", passes)
    assert run.main() == 1
    printed = capfd.readouterr().out
    assert "about 20 minutes" in printed.splitlines()[0]
    assert "\ntorch\n" in printed
    assert "FAILED (3)" in next(x for x in printed.splitlines() if x.startswith("first"))
    assert printed.rstrip().endswith("1 passed, 1 failed")

    monkeypatch.setattr(run, "PASSES", passes[1:])
    assert run.main() == 0
    assert capfd.readouterr().out.rstrip().endswith("1 passed, 0 failed")


def test_every_backend_has_its_pass():
    backends = {backend for _, backend, command in run.PASSES if command[-1] != "."}
    assert backends == {"tensorflow", "jax", "torch"}
