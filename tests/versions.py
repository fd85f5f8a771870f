"""`make versions`: the laws and the retrofit on older versions of Keras, and on its main branch.

Releases come from the package index, and the main branch from the folder of a checkout that
`make versions KERAS=folder` names. Each stands alone in a folder, in front of the installed Keras.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The last release of each minor version; the newest is what is installed.
RELEASES = "3.13.2", "3.14.1", "3.15.1"
FIRST = "tests/test_keras_internals.py"  # what fails here explains what fails after it
PARITY = "tests/layers/test_parity.py", "tests/test_golden.py", "tests/retrofit/test_retrofit.py"
LAWS = (
    *("tests/test_readme.py::test_snippets", "tests/rules", "tests/layers", "tests/test_golden.py"),
    *("tests/attention/test_laws.py", "tests/attention/test_attention.py"),
    *("tests/retrofit/test_retrofit.py", "tests/retrofit/test_families.py"),
)
PASSES = (
    ("tensorflow", (FIRST, *LAWS)),
    ("jax", (FIRST, *PARITY)),
    ("torch", (FIRST, *PARITY)),
)


def main(*checkouts: str) -> int:
    report = []
    with tempfile.TemporaryDirectory() as scratch:
        for version in RELEASES:
            folder = Path(scratch, version)
            pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"
            subprocess.run([*pip, "--target", str(folder), f"keras=={version}"], check=True)
            report += run(f"Keras {version}", folder)
        for checkout in (Path(name).resolve() for name in checkouts):
            if not (checkout / "keras" / "src").is_dir():
                raise SystemExit(f"{checkout} is no checkout of Keras: it has no keras/src.")
            report += run(f"Keras in {checkout.name}", checkout)
    if not checkouts:
        report.append(("Keras' main branch", "", None))
    for name, backend, code in report:
        how = {None: "not run: make versions KERAS=its checkout", 0: "passed"}
        print(f"{name:24} {backend:12} {how.get(code, f'FAILED ({code})')}")
    return int(any(code for *_, code in report))


def run(name: str, folder: Path) -> list[tuple[str, str, int | None]]:
    """The passes with the Keras in `folder`: what ran, on which backend, its exit code."""
    report = []
    for backend, files in PASSES:
        print(f"\n=== {name}, {backend}", flush=True)
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": paths}
        where = f"import keras; assert keras.__file__.startswith({str(folder)!r}), keras.__file__"
        subprocess.run([sys.executable, "-c", where], env=environment, check=True)
        command = sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *files
        report.append((name, backend, subprocess.run(command, env=environment).returncode))
    return report


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
