"""The documentation site: it builds strictly, holds all it should, and what it says runs."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest
import snippets

import keras_headmask as hm
from keras_headmask.rules import config

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
WITH_SNIPPETS = [name for name, text in PAGES.items() if "```python\n" in text]


# Their snippets take half a minute each; another test or an example does the same every day.
# (`found_leaks` is about faults of others.)
SLOW = "devices", "export", "found_leaks", "generate", "hugging_face", "retrofit", "task"


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
    code = "import pathlib, sys, snippets; snippets.run(pathlib.Path(sys.argv[1]))"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    fresh = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"} | {"PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, "-c", code, page], env=fresh, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr


def other_versions(page):
    """Packages of another version than the one that a page says its faults were seen with."""
    seen = re.search(r"^Seen with (.*)\.$", page.read_text("utf-8"), re.MULTILINE)
    pairs = re.findall(r"([\w-]+) (\d[\w.]*)", seen[1]) if seen else []
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name, _ in pairs}
    return {name: versions[name] for name, version in pairs if versions[name] != version}


PROSE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "keras_headmask").rglob("*.py"))
# Say "reports", "implementation", "stock Keras", "not possible", "logits" or "probabilities", and
# "wrapper". Only "Cannot tell" is plain.
VAGUE = re.compile(
    r"\b(?:told|tells|(?<!Cannot )tell|ways?|face|room|doors?|stock's"
    r"|(?:is|are)\snone|cannot\sbe|(?<!--)scores?|whoever|comes?\sof|what\sis\sasked)\b"
)
# What is code in a page, and in a docstring or a message: examples, the name of an argument.
CODE = re.compile(r"^```.*?^```$|`[^`]+`", re.MULTILINE | re.DOTALL)
CODE_IN_STRINGS = re.compile(r"^ *(?:>>>|\.\.\.) .*|^ *\w+(?:, \w+)*:|`[^`]+`", re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_plain_words(page):
    assert VAGUE.findall(CODE.sub("", page.read_text("utf-8"))) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_plain_words_in_docstrings_and_messages(source):
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = (getattr(part, "value", None) for part in parts)
        text = "".join(value if isinstance(value, str) else "_" for value in values)
        if " " in text:  # else a key or a name
            assert VAGUE.findall(CODE_IN_STRINGS.sub("", text)) == []


def test_the_extras_that_pages_name_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = "".join(page.read_text("utf-8") for page in (*PROSE, *ROOT.glob("examples/*.py")))
    named = re.findall(r"""["']\.\[([a-z,]+)\]["']""", text)
    assert named
    assert {x for names in named for x in names.split(",")} <= {*project["optional-dependencies"]}


def test_every_public_name_is_in_the_reference():
    pages = (ROOT / "docs" / "api").glob("*.md")
    named = re.findall(r"^::: keras_headmask\.(\S+)$", "".join(map(Path.read_text, pages)), re.M)
    assert set(hm.__all__) - set(named) == set()


def test_every_kind_is_in_the_language_table():
    kinds = {c for c in config.KINDS.values() if c.__module__.startswith("keras_headmask.")}
    _, _, table = PAGES["concepts"].partition("## The whole language")
    documented = set(re.findall(r"\b([A-Z][A-Za-z]+)\(", table))
    assert {cls.__name__ for cls in kinds} - {"And", "Or", "Not"} - documented == set()


@pytest.mark.tensorflow
@pytest.mark.long  # (`make docs` builds it, too)
def test_the_site(tmp_path):
    for module in ("material", "mkdocstrings_handlers.python", "jupytext"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {x.relative_to(tmp_path).as_posix(): x.read_text() for x in tmp_path.rglob("*.html")}
    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    recipes = [f"recipes.{x.__name__}" for x in vars(hm.recipes).values() if is_recipe(x)]
    names = [*hm.__all__, *recipes]
    assert [n for n in names if f'id="keras_headmask.{n}"' not in reference] == []
    scripts = (ROOT / "examples").glob("*.py")
    tutorials = {f"examples/{s.stem}.html" for s in scripts if "\n# %%" in s.read_text()}
    assert tutorials - pages.keys() == set()
    assert "look-ahead   28" in pages["examples/masks_101.html"]  # what it prints


def is_recipe(value):
    return getattr(value, "__module__", "") == hm.recipes.__name__


def test_every_finding_is_explained():
    codes = re.search(r"Codes: (.*?)\n\n", hm.lint.__doc__, re.DOTALL)[1]
    page = PAGES["look_and_lint"]
    assert re.findall(r"`[a-z-]+`", codes)
    assert [code for code in re.findall(r"`[a-z-]+`", codes) if f"| {code} |" not in page] == []
