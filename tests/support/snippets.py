"""Python and commands of a Markdown page run from top to bottom and print what the page says."""

import contextlib
import io
import re
import shlex
from pathlib import Path

# What a page needs of packages beside Keras, where no line imports it.
NEEDED_BY = {"hm.plot": "matplotlib", "\nkeras-headmask ": "click", 'format="onnx"': "tf2onnx"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def needed(page: Path) -> set[str]:
    """The packages without which `page` does not run."""
    text = page.read_text(encoding="utf-8")
    code = "".join(body for language, body in FENCE.findall(text) if language == "python")
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    return imported | {package for sign, package in NEEDED_BY.items() if sign in text}


def run(page: Path) -> int:
    """Run every `python` block, and every line of `sh` blocks that starts with `keras-headmask`.

    Returns how many `text` blocks were held against what was printed.
    """
    namespace, printed, compared = {"__name__": page.stem}, "", 0
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    for (language, body), (following, _) in zip(fences, [*fences[1:], ("", "")], strict=True):
        if language == "python":
            assert not printed, f"printed, but not shown in {page.name}:\n{printed}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif language == "sh" and "keras-headmask " in body:
            said = "".join(map(_command, re.findall(r"^keras-headmask (.*)$", body, re.M)))
            printed = said if following == "text" else ""
        elif language == "text":
            assert printed == body
            printed, compared = "", compared + 1
    assert not printed, f"printed, but not shown in {page.name}:\n{printed}"
    return compared


def _command(line: str) -> str:
    from click.testing import CliRunner

    from keras_headmask.cli.main import cli

    arguments = shlex.split(line, comments=True)
    if arguments[0] == "export":
        arguments.append("--no-check")  # which takes a process; see test_export_check.py
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == int("exit code 1" in line), result.output
    assert result.stdout
    return result.stdout
