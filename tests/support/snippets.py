"""Python of a Markdown page run from top to bottom and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

# What a page needs of packages beside Keras, where no line imports it.
NEEDED_BY = {"hm.plot": "matplotlib", 'format="onnx"': "tf2onnx"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def needed(page: Path) -> set[str]:
    """The packages without which `page` does not run."""
    text = page.read_text(encoding="utf-8")
    code = "".join(body for language, body in FENCE.findall(text) if language == "python")
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    return imported | {package for sign, package in NEEDED_BY.items() if sign in text}


def run(page: Path) -> int:
    """Run every `python` block; returns how many `text` blocks equalled what was printed."""
    namespace, printed, compared = {"__name__": page.stem}, "", 0
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            assert not printed, f"printed, but not shown in {page.name}:\n{printed}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif language == "text":
            assert printed == body
            printed, compared = "", compared + 1
    assert not printed, f"printed, but not shown in {page.name}:\n{printed}"
    return compared
