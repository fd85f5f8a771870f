"""The tutorials: scripts that open as notebooks, and whose text says what their output says."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow  # what is told here is the same everywhere

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
IMAGES = EXAMPLES.parent / "docs/images"
NOTEBOOKS = sorted(
    path for path in EXAMPLES.glob("*.py") if "\n# %%" in f"\n{path.read_text(encoding='utf-8')}"
)
PICTURES = {
    "masks_101": ["before_or_after", "maximum", "three_masks"],
    "multi_head_from_scratch": ["heads"],
    "two_berts": ["heads", "kernels"],
    "from_pytorch": ["notations"],
    "pack_documents": ["rule"],
}


def test_the_tutorials_are_there():
    assert {path.stem for path in NOTEBOOKS} >= PICTURES.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_as_a_notebook(path):
    jupytext = pytest.importorskip("jupytext")
    nbformat = pytest.importorskip("nbformat")
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    nbformat.validate(nbformat.from_dict(notebook))

    first, *others = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert sum(cell.cell_type == "markdown" for cell in others) >= 3
    code = [cell.source for cell in others if cell.cell_type == "code"]
    assert len(code) >= 3
    for source in code:
        compile(source, str(path), "exec")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_of_the_text_are_committed(path):
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", path.read_text(encoding="utf-8"))
    for alternative, link in pictures:
        assert len(alternative.split()) >= 8, f"{link}: say what it shows"
        file = (EXAMPLES / link).resolve()
        assert file.parent == IMAGES
        check_picture(file)
        assert file.stat().st_size < 80_000
    if path.stem in PICTURES:
        named = sorted(pathlib.Path(link).stem for _, link in pictures)
        assert named == [f"{path.stem}_{name}" for name in PICTURES[path.stem]]


def check_picture(file):
    image = pytest.importorskip("matplotlib.image").imread(file)[..., :3]  # from 0 to 1
    height, width, _ = image.shape
    assert width >= 400
    assert height >= 200
    greys = (255 * image.mean(axis=-1)).astype("uint8")
    assert (np.bincount(greys.ravel()) > 20).sum() > 10, f"{file} has hardly anything on it"
    assert (greys < 240).mean() > 0.05, f"{file} is nearly blank"


def run_script(name, folder, monkeypatch):
    """What `python examples/NAME.py --quick --out FOLDER` prints (here without a new process)."""
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--quick", "--out", os.fspath(folder)])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(os.fspath(EXAMPLES / f"{name}.py"), run_name="__main__")
    check_pictures(name, folder)
    return printed.getvalue()


def check_pictures(name, folder):
    pictures = sorted(folder.glob("*"))
    assert [file.name for file in pictures] == [f"{name}_{p}.png" for p in PICTURES[name]]
    for file in pictures:
        check_picture(file)


def numbers_of(output, name):
    """The numbers in the line of `name` and numbers alone."""
    lines = re.findall(rf"^{re.escape(name)}((?: +-?[\d,]*\.?\d+(?:e[+-]\d+)?)+)$", output, re.M)
    assert len(lines) == 1, f"{name!r} begins {len(lines)} lines of:\n{output}"
    return [float(number.replace(",", "")) for number in lines[0].split()]


def test_masks_101(tmp_path, monkeypatch):
    output = run_script("masks_101", tmp_path, monkeypatch)

    def numbers(name):
        return numbers_of(output, name)

    assert [numbers(name) for name in ("padding", "look-ahead", "both")] == [[35], [28], [25]]
    assert numbers("as meant") == [1, 0]
    assert numbers("inverted") == [1, 1]
    assert "error: looks-inverted" in output

    # weights of four keys, their sum, that of the hidden key
    assert numbers("no mask")[-2:] == [1, 0.989]
    assert numbers("multiplied after") == [0.007, 0.002, 0.001, 0, 0.011, 0]
    assert numbers("multiplied before")[-2:] == [1, 0.078]
    assert numbers("added before") == [0.629, 0.231, 0.140, 0, 1, 0]
    assert "multiplied after    0.007 -> 0.579" in output
    assert "added before        0.629 -> 0.629" in output
    assert "divided by the sum 0: [nan nan nan nan]" in output
    assert "Added before, same scores: [0.629 0.231 0.14  0.   ]" in output

    # wrongly open, wrongly hidden
    assert numbers("maximum, both 1 = hidden") == [0, 0]
    assert numbers("minimum, both 1 = may attend") == [0, 0]
    assert numbers("maximum, both 1 = may attend") == [13, 0]
    assert numbers("maximum of one of each, read as 1 = hidden") == [3, 25]
    assert numbers("maximum of one of each, read as 1 = may attend") == [21, 0]
    assert output.count(": 0 pairs differ from the right mask") == 2

    assert "-1e9 in float16: -inf" in output
    assert "after the softmax: [nan nan nan]" in output
    assert "added up in float16: -inf" in output
    assert "to_additive in float16: 0 for allowed, -30000 for hidden" in output
    assert "-1e9 + 3.7 == -1e9 in float32: True" in output
    assert "layer in float16: 0 NaN in the output,\nlargest weight on a hidden key 0\n" in output

    seventh = " ".join(["0.143"] * 7)
    assert re.search(rf"^-1e9, once +\[{seventh}\]$", output, re.M)
    assert re.search(rf"^-inf +\[{' '.join(['nan'] * 7)}\]$", output, re.M)
    assert re.search(rf"^this package +\[{' '.join(['0.'] * 7)}\]$", output, re.M)
    assert "7 of 7 positions are NaN" in output
    assert numbers("stock Keras:")[0] > 0.1
    assert numbers("   - average of all:")[0] < 1e-5
    assert numbers("stock Keras, scores:") == numbers("this package:") == [0]
    assert "warning: dead-rows, head 0: Query 0 sees no key" in output


def test_multi_head_from_scratch_as_a_notebook(tmp_path, monkeypatch):
    """Run by a kernel, as Jupyter runs it: its arguments are not the script's."""
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    name = "multi_head_from_scratch"
    root = os.fspath(EXAMPLES.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    for variable in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):  # nothing is left in the home folder
        monkeypatch.setenv(variable, os.fspath(tmp_path / variable))
    notebook = jupytext.read(EXAMPLES / f"{name}.py", fmt="py:percent")
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": os.fspath(tmp_path)}}
    )
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    check_pictures(name, tmp_path / "saved_models" / name)
    output = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")

    assert "mask (1, 4, 9, 9); allowed pairs of each head: [41, 45, 25, 81]" in output
    equal = [
        "the layer under its rule",
        *(f"   its weights of head {head}" for head in range(4)),
        "stock Keras without a mask",
        "stock Keras with the mask (1, 4, 9, 9)",
        "sum of messages",
        "head 3 under Nothing()",
        "post-norm block",
        "pre-norm block",
        "other queries",
        "first query: x + b_o",
    ]
    differs = [
        "(with and without masks, from scratch)",
        "post-norm block, epsilon of BERT",
        "first query: from scratch, -1e9 everywhere",
    ]
    check_differences(output, equal, differs)


def check_differences(output, equal, differs, column=0):
    found = {name: numbers_of(output, name)[column] for name in equal + differs}
    assert {name: found[name] for name in equal if not found[name] < 1e-5} == {}
    assert {name: found[name] for name in differs if not found[name] > 5e-4} == {}


def test_two_berts(tmp_path, monkeypatch):
    output = run_script("two_berts", tmp_path, monkeypatch)
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
    for sizes in ("1 x 16 tokens", "16 x 128 tokens"):
        two, one, ratio = numbers_of(output, sizes)
        assert one / two == pytest.approx(ratio, abs=0.02)


def test_from_pytorch(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = run_script("from_pytorch", tmp_path, monkeypatch)
    equal = [
        "masks converted",
        "   its weights",
        "a rule",
        "difference where PyTorch has a number",
        "bool",
        "float, by from_additive",
        "is_causal=True, as a rule",
        "a tokenizer's mask",
        "(batch, 1, 1, keys), by from_additive",
        "(batch, heads, queries, keys), by from_additive",
        "a rule, by to_additive",
    ]
    traps = [
        "attn_mask not inverted",
        "key_padding_mask not inverted",
        "batch * heads taken apart as heads * batch",
        "key_padding_mask forgotten",
    ]
    check_differences(output, equal, traps)
    assert "ValueError: `mask` has 8 examples where the attention has 2" in output
    assert "TypeError: `mask` must be boolean or integer" in output

    shares = [
        float(share) for share in re.findall(r"^(?:the|no) mask.* (\d\.\d{3})$", output, re.M)
    ]
    sdpa, hugging_face = shares[:4], shares[4:]
    assert sdpa[0] == hugging_face[0] == 0
    assert sdpa[2] == 1
    assert all(share > 0.1 for share in (sdpa[1], sdpa[3], *hugging_face[1:]))
    assert len(hugging_face) == 3

    nan = {
        name.strip(): [int(count) for count in counts.split(",")]
        for name, counts in re.findall(r"^(.*)\[(.*)\] tokens of 6 are NaN$", output, re.M)
    }
    assert nan == {
        "PyTorch, one layer": [0, 2],
        "PyTorch, and one more layer, without masks": [0, 6],
        "here, one layer": [0, 0],
        "here, and one more layer, without masks": [0, 0],
        "all hidden by one mask": [0, 0],
        "all hidden by two masks, added up": [6, 6],
        "all hidden, here": [0, 0],
    }
    assert "the last 2 of 6 queries see [1, 2] keys" in output
    assert "query_offset=4, they see [5, 6] keys" in output
