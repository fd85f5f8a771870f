"""Public names arrive on first use; what files name is registered by the import alone."""

import ast
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


# In this order: what is asked last imports more.
PROGRAM = """
import sys
import keras_headmask as hm
late = ("linting", "export", "look.plotting", "retrofit.apply", "rules.json_schema")
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
