"""`python tests/planted.py [word ...]`: plant bugs, one at a time, and see `make test` catch each.

Each bug of planted.toml is one edit of a copy of the package. A test of `make test` must fail under
it, and pass without. Words choose bugs by their names; without any all are planted, and the table
in tests/README.md is written anew.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "tests" / "README.md"


class Bug(NamedTuple):
    name: str
    file: str  # in the package
    right: str  # its code, which stands there once
    wrong: str
    test: str  # under tests/
    backend: str = "tensorflow"


BUGS = [Bug(**x) for x in tomllib.loads((ROOT / "tests/planted.toml").read_text("utf-8"))["bug"]]


def main(*words):
    chosen = [bug for bug in BUGS if all(word in bug.name for word in words)]
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("keras_headmask", "tests", "saved_models", "docs", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(scratch, part))
        for backend in sorted({bug.backend for bug in chosen}):
            tests = sorted({bug.test for bug in chosen if bug.backend == backend})
            if run(scratch, backend, tests):
                raise SystemExit(f"without a bug, these must pass on {backend}: {tests}")
        for bug in chosen:
            code = plant(bug, Path(scratch))
            # 1: tests ran, and failed. All else is no test that saw the bug.
            missed += [] if code == 1 else [bug.name]
            print(f"{'caught' if code == 1 else f'MISSED ({code})':12} {bug.name}", flush=True)
    if not words and not missed:
        README.write_text(with_table(README.read_text("utf-8")), "utf-8")
    return len(missed)


def plant(bug, root):
    """The exit code of the test under the bug."""
    file = root / "keras_headmask" / bug.file
    right = file.read_text("utf-8")
    file.write_text(right.replace(bug.right, bug.wrong), "utf-8")
    try:
        return run(root, bug.backend, [bug.test])
    finally:
        file.write_text(right, "utf-8")


def run(root, backend, tests):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--part=daily", "-p", "no:cacheprovider"]
    environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": str(root)}
    paths = [f"tests/{test}" for test in tests]
    done = subprocess.run([*command, *paths], cwd=root, env=environment, capture_output=True)
    return done.returncode


def with_table(text):
    rows = [f"| {x.name} | `{x.file}` | `{x.test}` |" for x in BUGS]
    table = "\n".join(["| bug | in | a test that sees it |", "|---|---|---|", *rows])
    above, _, _ = text.partition("<!-- bugs -->")
    return f"{above}<!-- bugs -->\n{table}\n<!-- /bugs -->\n"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
