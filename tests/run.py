"""`make lint`, `make test` and `make test-all`: every pass, if others fail, too; then a report."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

# A worker keeps to its half of the tests, and so to their fixtures, until it has nothing to do.
_TWO_WORKERS = "-n", "2", "--dist", "worksteal"
_ALL = "--doctest-modules", "tests", "keras_headmask", "--ignore=tests/repository"
# What explains or measures the package, or takes processes of its own: not in `make test`.
_PAGES = [f"tests/test_{name}.py" for name in ("examples", "docs", "benchmarks", "memory")]
_PAGES += ["tests/distributed"]
_ATTENTION = ["tests/attention", "tests/layers", "tests/rules"]
_A_RETROFIT = "tests/retrofit/test_retrofit.py::test_a_rule_is_what_the_loops_say"
# What depends on the backend most. `make long` runs all tests on each.
_BACKENDS = [
    *(f"tests/attention/test_{name}.py" for name in ("laws", "attention", "choose", "fused")),
    *(f"tests/attention/test_{name}.py" for name in ("compiled_torch", "jax_symbolic")),
    *("tests/attention/test_flex_block_mask.py", "tests/layers/test_layer.py"),
    *("tests/test_golden.py", "tests/test_keras_internals.py", "tests/test_hugging_face.py"),
    "tests/retrofit/test_functions.py",
    _A_RETROFIT,
]


class Pass(NamedTuple):
    name: str
    module: str
    arguments: tuple[str, ...]
    backend: str = ""


def _tests(name, backend, *arguments):
    return Pass(name, "pytest", ("-q", "--durations=15", *arguments), backend)


def _without(folders):
    return [f"--ignore={folder}" for folder in folders]


def _by_backend(*options):
    """TensorFlow in two passes, since it keeps some of what a process traced, and workers grow."""
    on_two = *_TWO_WORKERS, *options
    return [
        [_tests("TensorFlow, attention", "tensorflow", *on_two, *_ATTENTION)],
        [_tests("TensorFlow, all else", "tensorflow", *on_two, *_ALL, *_without(_ATTENTION))],
        [_tests("JAX", "jax", *on_two, *_BACKENDS)],
        [_tests("PyTorch", "torch", *on_two, *_BACKENDS)],
    ]


_SOURCE = [
    [Pass("style: rules", "ruff", ("check", "."))],
    [Pass("style: layout", "ruff", ("format", "--check", "."))],
    [Pass("types", "mypy", ())],
    [Pass("the repository", "pytest", ("-q", "--noconftest", "tests/repository"))],
]
_DAILY = "--part=daily"
# What each run says first (busy cores take longer), and its passes; those of a list run at once.
RUNS = {
    "lint": ("Style, types and pages: a minute.", _SOURCE),
    "test": (
        "Style, and the tests that catch most: about 5 minutes on two idle cores.",
        [
            *_SOURCE,
            [_tests("TensorFlow", "tensorflow", *_TWO_WORKERS, _DAILY, *_ALL, *_without(_PAGES))],
            [
                # (Few: JAX compiles each case, and what is cheap alone is so after another.)
                _tests("JAX", "jax", _DAILY, _BACKENDS[0], _A_RETROFIT),
                _tests("PyTorch", "torch", _DAILY, *_BACKENDS),
            ],
        ],
    ),
    "test-all": (
        "All tests of every day: 15 to 20 minutes.",
        [*_SOURCE, *_by_backend("--write-seconds")],
    ),
    "rest": ("What `make test` leaves out on TensorFlow.", _by_backend("--part=rest")[:2]),
}


def main(run="test"):
    said, passes = RUNS[run]
    print(said, flush=True)
    report, failed = [], 0
    for number, together in enumerate(passes, 1):
        for code, line in _run(f"{number} of {len(passes)}", together):
            failed += code != 0
            report.append(line)
    print("\n" + "\n".join(report))
    print(f"\n{len(report) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def _run(number, together):
    """Run passes at once; what all but the first of them print follows when they end."""
    begun, before = time.perf_counter(), _children()
    started = []
    for one in together:
        print(f"\n=== {number}: {one.name}: {one.module} {' '.join(one.arguments)}", flush=True)
        # (A worker for each core: more threads would wait for one another.)
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"KERAS_BACKEND": one.backend} if one.backend else {}
        output = tempfile.TemporaryFile("w+") if started else None  # noqa: SIM115
        command = [sys.executable, "-m", one.module, *one.arguments]
        started.append((one, output, subprocess.Popen(command, env=environment, stdout=output)))
    for one, output, process in started:
        code = process.wait()
        if output:
            output.seek(0)
            print(f"\n=== {one.name}:\n{output.read()}", flush=True)
        minutes, spent = (time.perf_counter() - begun) / 60, _children() - before
        what = "passed" if code == 0 else f"FAILED ({code})"
        yield code, f"{one.name:24} {what:12} {minutes:5.1f} min {spent:6.0f} CPU s"
        before += spent


def _children():
    """CPU seconds of all processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
