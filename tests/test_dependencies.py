"""What the extras ask for fits together."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.tensorflow  # the same on every backend

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))[
    "project"
]["optional-dependencies"]
# The limits of what is asked for, and what a fresh environment would get.
VERSIONS = ["5.7.0", "5.9.5", "5.9.6", "5.9.8", "6.0.0", "6.1.1", "7.2.2"]


def psutil_of(requirements):
    found = [Requirement(text) for text in requirements or ()]
    return [x.specifier for x in found if x.name == "psutil" and x.marker is None]


@pytest.mark.parametrize("extra", ["server", "tutorials"])
def test_each_extra_alone_takes_a_psutil_that_suits_both(extra):
    """kserve refuses psutil 6; ipykernel before 7.4 takes any, so pip would take the newest."""
    for peer in ("kserve", "ipykernel"):
        pytest.importorskip(peer)
    asked = [
        specifier
        for peer in ("kserve", "ipykernel")
        for specifier in psutil_of(importlib.metadata.requires(peer))
    ]
    (ours,) = psutil_of(EXTRAS[extra])
    assert asked  # else the pin has no reason any more
    for version in VERSIONS:
        assert ours.contains(version) == all(x.contains(version) for x in asked), version
