"""The extras that pages, examples and the Makefile name are there, and each is named."""

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow  # the same on every backend

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
NAMED = re.compile(r"""["']\.\[([a-z,]+)\]["']""")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_extras_that_a_page_names_exist(file):
    named = {name for found in NAMED.findall(file.read_text("utf-8")) for name in found.split(",")}
    assert named <= set(EXTRAS)


def test_the_tests_install_every_extra():
    """Else what one of them asks for is never tried beside the others."""
    (own,) = (x for x in EXTRAS["test"] if x.startswith("keras-headmask["))
    assert set(own.split("[")[1].rstrip("]").split(",")) == set(EXTRAS) - {"test", "dev"}
