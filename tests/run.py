"""`make test`: every pass of the tests, whatever comes of the others, and a report at the end."""

import os
import subprocess
import sys
import time

# Run once more with the tiled implementation, in tiny tiles (but those that write files).
_CONTRACT = (
    "-k",
    "not fresh_process",
    *(
        f"tests/{name}.py"
        for name in (
            "layer/test_layer",
            "attention/test_attention",
            "layer/test_parity",
            "layer/test_routes",
        )
    ),
)
_PYTEST = (sys.executable, "-m", "pytest", "-n", "2")
_RUFF = (sys.executable, "-m", "ruff")
# name, backend, command; minutes measured on two idle cores
PASSES = (
    ("style: rules", None, (*_RUFF, "check", ".")),
    ("style: layout", None, (*_RUFF, "format", "--check", ".")),
    ("TensorFlow", "tensorflow", (*_PYTEST, "--doctest-modules", "tests", "keras_headmask")),
    ("TensorFlow, tiny tiles", "tensorflow", (*_PYTEST, "--tiled", *_CONTRACT)),
    ("PyTorch, tiny tiles", "torch", (*_PYTEST, "--tiled", *_CONTRACT)),
    ("JAX", "jax", (*_PYTEST, "tests")),
    ("PyTorch", "torch", (*_PYTEST, "tests")),
)


def main():
    print("All tests: about 20 minutes on two idle cores, longer on busy ones.", flush=True)
    report, failed = [], 0
    for number, (name, backend, command) in enumerate(PASSES, 1):
        print(f"\n=== {number} of {len(PASSES)}: {name}: {' '.join(command[2:])}", flush=True)
        environment = os.environ | ({"KERAS_BACKEND": backend} if backend else {})
        start = time.perf_counter()
        code = subprocess.run(command, env=environment).returncode
        minutes = (time.perf_counter() - start) / 60
        failed += code != 0
        report.append(
            f"{name:24} {'passed' if code == 0 else f'FAILED ({code})':12} {minutes:5.1f} min"
        )
    print("\n" + "\n".join(report))
    print(f"\n{len(PASSES) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
