"""`make dist`: sdist and wheel in dist/, checked, and tried without the source tree.

What they hold and their metadata are checked first. Then the wheel is installed into a fresh
environment, and the README's Python and the laws run there, in a folder that holds the tests alone.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# What stands beside the tests there; the package does not.
BESIDE = "tests", "README.md", "pyproject.toml", "saved_models"
LAWS = (
    *("tests/test_readme.py::test_snippets", "tests/rules", "tests/test_golden.py"),
    *("tests/attention/test_laws.py", "tests/attention/test_attention.py"),
    *("tests/layers/test_layer.py", "tests/layers/test_parity.py"),
)
# By these; PyTorch is an oracle.
NEEDED = "hypothesis", "pytest", "pytest-xdist", "torch==2.13.0"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    check_contents(wheel, sdist)
    try_alone(wheel)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    expect(f"\n## [{version}]" in changes, f"CHANGELOG.md has no heading for {version}")
    print(f"\n{sdist.name} and {wheel.name} are ready in dist/.")


def run(*command: object, **rest: object) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **rest)


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel holds the package, all of it and nothing else; the sdist what git tracks of it."""
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"))
    package = {name for name in tracked if name.startswith("keras_headmask/")}
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
        licences = [name for name in file.namelist() if name.endswith("licenses/LICENSE")]
    expect(held == package, f"the wheel and git differ in {held ^ package}")
    expect(len(licences) == 1, "the wheel holds no licence")
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    wanted = {name for name in tracked if name.split("/")[0] in {"keras_headmask", "tests", "docs"}}
    expect(wanted <= inside, f"the sdist lacks {sorted(wanted - inside)[:5]}")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"dist: {otherwise}.")


def try_alone(wheel: Path) -> None:
    """In a fresh environment, with no folder of this repository on the path."""
    with tempfile.TemporaryDirectory() as scratch:
        environment, folder = Path(scratch, "venv"), Path(scratch, "work")
        run(sys.executable, "-m", "venv", environment)
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[plot]", *NEEDED)
        folder.mkdir()
        for name in BESIDE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        rest = {"cwd": folder, "env": {**os.environ, "KERAS_BACKEND": "tensorflow"}}
        rest["env"].pop("PYTHONPATH", None)
        where = "import keras_headmask as hm; assert 'site-packages' in hm.__file__, hm.__file__"
        run(python, "-c", where, **rest)
        run(python, "-m", "pytest", "-n", "2", "-q", *LAWS, **rest)


if __name__ == "__main__":
    main()
