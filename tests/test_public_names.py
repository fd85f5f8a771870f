"""Public names arrive on first use; what files name is registered by the import alone."""

import ast
import builtins
import doctest
import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow  # one backend is enough
ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / "saved_models" / "golden" / "format-1" / "model.keras"


def test_type_checkers_see_the_lazy_names_that_python_finds():
    tree = ast.parse(pathlib.Path(hm.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if getattr(node.test, "id", "") == "TYPE_CHECKING")
    imported = {
        alias.name: statement.module.removeprefix("keras_headmask.")
        for statement in block.body
        for alias in statement.names
    }
    assert imported == hm._HOME_OF
    assert imported.keys() < set(hm.__all__)


@pytest.mark.parametrize("name", hm._HOME_OF)
def test_each_lazy_name_is_the_one_of_its_home(name):
    home = importlib.import_module(f"keras_headmask.{hm._HOME_OF[name]}")
    vars(hm).pop(name, None)  # as if it had not been used
    assert name in dir(hm)
    assert getattr(hm, name) is getattr(home, name)
    assert vars(hm)[name] is getattr(home, name)


def test_a_star_imports_all_names():
    given = {}
    exec("from keras_headmask import *", given)
    assert given.keys() >= set(hm.__all__)


def _examples():
    """Each public name, or member of one, whose docstring has an example."""
    finder = doctest.DocTestFinder()
    for name in hm.__all__:
        for test in finder.find(getattr(hm, name), name, module=False, globs={}):
            if test.examples:
                own = test.name.rpartition(".")[2]
                source = "".join(example.source for example in test.examples)
                yield pytest.param(own, source, id=test.name)


@pytest.mark.parametrize(("own", "source"), list(_examples()))
def test_an_example_reads_what_it_imports_or_public_names(own, source):
    """Copied from its page it runs: it reads no import of the module that it stands in."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
    known = {*bound, *dir(builtins), *hm.__all__, own, "keras", "np"}
    assert not sorted({node.id for node in names} - known)


# In this order: what is asked last imports more.
PROGRAM = """
import sys
import keras_headmask as hm
late = ("linting", "export", "look.plotting", "retrofit.apply")
found = [name for name in late if f"keras_headmask.{name}" in sys.modules]
assert not found, found
assert hm.PerHead({0: hm.Window()})._repr_html_()
import keras
assert hm.mask_specs(keras.saving.load_model(sys.argv[1]))
"""


def test_the_import_alone_is_small_and_lets_files_load():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, MODEL],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
