"""Which kernel computes a request: held to a record, and said in words."""

import importlib
import json
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package
kernels = importlib.import_module("benchmarks.kernels")


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.long)])
def test_what_computes_each_case_is_as_recorded(every):
    """Where it changes on purpose, `python -m benchmarks.kernels` records it anew."""
    recorded = json.loads(kernels.RECORD.read_text(encoding="utf-8"))[keras.backend.backend()]
    # Of each kernel, or mix of kernels, two cases at least.
    computed = {case: words.partition(";")[0] for case, words in recorded.items()}
    of_each = [[c for c in recorded if computed[c] == x][:2] for x in set(computed.values())]
    names = {*list(recorded)[::every], *(case for cases in of_each for case in cases)}
    assert kernels.record(names) == {case: recorded[case] for case in names}
