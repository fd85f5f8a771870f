"""`make lint`, `make check` and `make test`: every pass, if others fail, too; then a report."""

import os
import subprocess
import sys
import time


def _files(*names):
    return tuple(f"tests/{name}.py" for name in names)


# What a mask is and what attention under it gives. The longest come first, for two workers.
_LAWS = (
    *_files("test_readme", "attention/test_laws", "layers/test_layer", "layers/test_parity"),
    "tests/rules",
    *_files("attention/test_attention", "test_golden", "test_layout", "test_public_names"),
)
_ATTENTION = ("tests/attention", "tests/layers", "tests/rules")
# What depends on the backend most. `make long` runs all tests on each.
_BACKENDS = (
    *_files("attention/test_laws", "attention/test_attention", "attention/test_choose"),
    *_files("attention/test_fused", "attention/test_compiled_torch"),
    *_files("layers/test_layer", "test_golden", "test_keras_internals"),
    "tests/retrofit/test_retrofit.py::test_a_rule_is_what_the_loops_say",
    *_files("retrofit/test_traced_inside_jax"),
    *_files("attention/test_planner", "attention/test_jax_symbolic"),
    *_files("attention/test_flex_block_mask", "test_hugging_face"),
)
# A worker keeps to its half of the tests, and so to their fixtures, until it has nothing to do.
_PYTEST = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--durations=25")
_RUFF = (sys.executable, "-m", "ruff")
# Each pass: name, backend, command.
_SOURCE = (
    ("style: rules", None, (*_RUFF, "check", ".")),
    ("style: layout", None, (*_RUFF, "format", "--check", ".")),
    ("types", None, (sys.executable, "-m", "mypy")),
)
# What each run says first (busy cores take longer), and its passes.
RUNS = {
    "lint": ("Style and types: under 2 minutes.", _SOURCE),
    "check": (
        "Style, the laws on TensorFlow, the README: under 5 minutes on two idle cores.",
        (*_SOURCE, ("laws, README", "tensorflow", (*_PYTEST, *_LAWS))),
    ),
    "test": (
        "All tests: 10 to 20 minutes on two idle cores. `make check` is the short run.",
        (
            *_SOURCE,
            # (Two passes: TensorFlow keeps some of what a process traced, and workers grow.)
            ("TensorFlow, attention", "tensorflow", (*_PYTEST, *_ATTENTION)),
            (
                "TensorFlow, all else",
                "tensorflow",
                (
                    *(*_PYTEST, "--doctest-modules", "tests", "keras_headmask"),
                    *(f"--ignore={folder}" for folder in _ATTENTION),
                ),
            ),
            ("JAX", "jax", (*_PYTEST, *_BACKENDS)),
            ("PyTorch", "torch", (*_PYTEST, *_BACKENDS)),
        ),
    ),
}


def main(run="test"):
    said, passes = RUNS[run]
    print(said, flush=True)
    report, failed = [], 0
    for number, (name, backend, command) in enumerate(passes, 1):
        print(f"\n=== {number} of {len(passes)}: {name}: {' '.join(command[2:])}", flush=True)
        # (A worker for each core: more threads would wait for one another.)
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"KERAS_BACKEND": backend} if backend else {}
        start = time.perf_counter()
        code = subprocess.run(command, env=environment).returncode
        minutes = (time.perf_counter() - start) / 60
        failed += code != 0
        report.append(
            f"{name:24} {'passed' if code == 0 else f'FAILED ({code})':12} {minutes:5.1f} min"
        )
    print("\n" + "\n".join(report))
    print(f"\n{len(passes) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
