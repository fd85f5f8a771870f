"""The example runs as a user runs it, and what it prints holds."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def rows(output, pattern):
    return [[float(number) for number in row] for row in re.findall(pattern, output, re.MULTILINE)]


@pytest.mark.tensorflow
def test_sentence_heads(tmp_path):
    pytest.importorskip("pysbd")
    pytest.importorskip("tokenizers")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, ROOT / "examples/sentence_heads.py", "--quick", "--out", tmp_path],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    assert "destroy the mask information" not in run.stderr

    with_rule = rows(run.stdout, r"^with the rule +layer \d +([\d.]+) +([\d.]+)$")
    twin = rows(run.stdout, r"^twin without +layer \d +([\d.]+) +([\d.]+)$")
    assert len(with_rule) == len(twin) >= 2, run.stdout
    assert [head_0 for head_0, _ in with_rule] == [1.0] * len(with_rule)
    assert all(head_1 < 0.999 for _, head_1 in with_rule)
    assert all(share < 0.999 for heads in twin for share in heads)

    differences = re.findall(r"^(model\.keras|saved_model) +(\S+)$", run.stdout, re.MULTILINE)
    assert [name for name, _ in differences] == ["model.keras", "saved_model"]
    assert all(float(difference) < 1e-5 for _, difference in differences), differences
    assert (tmp_path / "model.keras").is_file()
    assert (tmp_path / "saved_model" / "saved_model.pb").is_file()
