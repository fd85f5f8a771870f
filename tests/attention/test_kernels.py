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
    found = kernels.record(every)
    assert len(found) > len(recorded) / (every + 1)
    assert {case: recorded.get(case) for case in found} == found
