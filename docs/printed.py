"""What the tutorials print and draw: `python docs/printed.py masks_101` runs one and keeps it.

Some take minutes, and all that they compare with must be installed; so the site shows what a whole
run printed. Output belongs to the code that printed it: where a script's code has changed since,
the site is not built until it has been run again. (Not so where only `--quick` runs the change.)
"""

import ast
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext

ROOT = Path(__file__).parents[1]
# What a terminal does with colours and with lines that write over themselves; and TensorFlow's log,
# which a terminal gets on another stream.
NOT_TOLD = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]|^.*\r(?!\n)|^(?:INFO|WARNING):tensorflow:.*\n", re.MULTILINE
)


def printed_by(script: Path) -> list[str]:
    """What each code cell of a tutorial printed when it was last run."""
    file = _kept(script)
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if kept.get("code") != _fingerprint(_read(script)):
        raise ValueError(
            f"{script.name} is not the code that printed {file.relative_to(ROOT)}. Run it again: "
            f"python docs/printed.py {script.stem}"
        )
    return kept["printed"]


def run(script: Path) -> None:
    """Run a tutorial whole, as a notebook, and keep what it prints and draws."""
    import nbclient
    from PIL import Image

    notebook = _read(script)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        for beside in script.parent.glob(f"{script.stem}_*.py"):
            shutil.copy(beside, folder)
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=3600, resources=resources).execute()
        for picture in Path(folder).rglob("*.png"):  # of the same run, where the text shows it
            if (kept := ROOT / "docs" / "images" / picture.name).exists():
                Image.open(picture).convert("RGB").quantize().save(kept, optimize=True)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    told = {"code": _fingerprint(notebook), "printed": [_told(cell) for cell in cells]}
    file = _kept(script)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(script: Path) -> Any:
    return jupytext.read(script, fmt="py:percent")


def _kept(script: Path) -> Path:
    return ROOT / "docs" / "printed" / f"{script.stem}.json"


def _fingerprint(notebook: Any) -> str:
    cells = [cell.source.encode() for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(b"\0".join(map(_without_quick, cells))).hexdigest()


def _without_quick(code: bytes) -> bytes:
    """`code` as a whole run knows it, where `options.quick` is false and chooses alone."""
    starts = [0, *(i + 1 for i, byte in enumerate(code) if byte == ord("\n"))]
    left_out = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        chosen = {"options.quick": node.orelse, "not options.quick": node.body}
        if (test := ast.unparse(node.test)) in chosen:
            kept = chosen[test] if isinstance(chosen[test], list) else [chosen[test]]
            ends = [(x.end_lineno, x.end_col_offset) for x in (*kept[-1:], node)]
            begins = [(x.lineno, x.col_offset) for x in (node, *kept[:1])]
            cuts = [begins, ends] if kept else [begins + ends]
            left_out += [[starts[line - 1] + at for line, at in cut] for cut in cuts]
    for first, last in sorted(left_out, reverse=True):
        code = code[:first] + code[last:]
    return b"\n".join(filter(None, map(bytes.strip, code.split(b"\n"))))


def _told(cell: Any) -> str:
    streams = [o for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"]
    return NOT_TOLD.sub("", "".join(output.text for output in streams)).strip("\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(ROOT / "examples" / f"{name}.py")
