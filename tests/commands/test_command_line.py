"""What commands say to what cannot be used, their help, and how they end."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest

import keras_headmask as hm

pytest.importorskip("click")

from calling import CAUSAL, ROOT, answer, failure, run, start

from keras_headmask import command_frame
from keras_headmask.command_line import cli

pytestmark = pytest.mark.tensorflow  # one backend is enough for what is said


BAD = [
    ("describe nope.json", "'nope.json' cannot be read: No such file or directory."),
    ("describe folder", "'folder' is a folder"),
    ("describe bad.json", "no JSON in 'bad.json': .* at line 2, column 14"),
    ("describe twice.json", r"'twice.json' cannot be read: \"after\" stands twice"),
    ("describe bytes.json", "no JSON in 'bytes.json', nor any text in UTF-8"),
    ("describe empty.json", "There is nothing in 'empty.json'"),
    ("describe -", "There is nothing in standard input"),
    ("""describe '{"kind": "window", "aftr": 0}'""", "`aftr`: no such field. Did you mean 'after'"),
    ("""describe '{"kind": "windw"}'""", "unknown kind 'windw'. Did you mean 'window'"),
    ("describe '[1, 2]'", "expected an object with a `kind`"),
    ("describe '{1}'", "no JSON in the text: .* at line 1, column 2"),
    ("describe rule.json -n 1", "names head 1, but there are 1 heads"),
    ("draw causal.json", "number of `queries`"),
    ("draw rule.json -q 3", "RULE reads token_ids: hand it in by --inputs"),
    ("""draw rule.json -q 3 --inputs '{"ids": [1]}'""", "reads token_ids: .* Received: ids"),
    ("draw rule.json -q 3 --inputs '[1, 2, 3]'", "an object of lists by name"),
    ("draw rule.json -q 3 --inputs no.json", "'no.json' cannot be read"),
    ("draw rule.json -q 3 --inputs inputs.json", "has length 4 where the attention has 3"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [1, "a"]}'""", "list of whole numbers"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [[1, 2], [3]]}'""", "lists of one length"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [1.5, 2]}'""", "integer or boolean"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": {"keys": [1]}}'""", "one for keys"),
    ("draw causal.json --tokens no.json", "'no.json' cannot be read"),
    ("draw causal.json --tokens rule.json", "Tokens are a JSON list"),
    ("draw causal.json -q 3 --tokens 'a b'", "a label for each position"),
    ("draw causal.json -q 3 -o rule.xyz", "must end in .png or .svg or .pdf"),
    ("draw causal.json -q 3 -o no/rule.png", "cannot be written: there is no folder"),
    ("draw causal.json -q 3 -o folder/nothing.png/rule.png", "there is no folder"),
    ("draw causal.json -q -3", "`queries` must be at least 0"),
    ("lint --model model.keras", "a model that has rules"),
    ("lint --model masked.keras -q 3", "told by the model"),
    (
        """lint --model masked.keras --inputs '{"token_ids": [[1, 99999]]}'""",
        r"cannot compute this: indices\[0,1\] = 99999 is not in \[0, 12\)",
    ),
    ("lint nope.json", "'nope.json' cannot be read"),
    ("bench nope.json", "'nope.json' cannot be read"),
    ("export nope.keras base", "'nope.keras' cannot be read"),
    ("info nope.keras", "'nope.keras' cannot be read"),
    ("info folder", "'folder' is a folder"),
    ("info text.keras", "'text.keras' is no .keras file"),
    ("info rule.json", "'rule.json' is no .keras file"),
    ("info lambda.keras", "does not load: .* --unsafe"),
    ("apply model.keras rule.json -o rule.json", "'rule.json' must end in .keras"),
    ("apply model.keras rule.json -o model.keras", "'model.keras' exists. .* --force"),
    ("apply model.keras rule.json -o no/out.keras", "there is no folder"),
    ("apply model.keras nope.json -o out.keras", "'nope.json' cannot be read"),
    ("apply model.keras rule.json --layers 7 -o out.keras", "no self-attention layer 7"),
    ("apply model.keras rule.json --layers no -o out.keras", "Paths: 'attention'"),
    ("apply lambda.keras rule.json --unsafe -o out.keras", "holds no self-attention layer"),
    ("export model.keras rule.json --no-check", "must be a folder of versions"),
    ("serve nope", "There is no folder 'nope'"),
    ("serve folder", "holds no version"),
    ("bench rule.json -q 1000000", "GiB for the scores"),
    ("bench rule.json -q 4 --inputs inputs.json", "hold 2 examples, and the batch has 1"),
    ("bench rule.json -n 1", "names head 1, but there are 1 heads"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_told_in_a_line(line, message, here):
    if line.startswith("serve"):
        pytest.importorskip("kserve")
    before = {path.name for path in here.iterdir()}
    assert re.search(message, failure(*shlex.split(line)))
    assert {path.name for path in here.iterdir()} == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("describ rule.json", "No such command 'describ'"),
        ("describe", "Missing argument 'RULE'"),
        ("describe rule.json more", "unexpected extra argument"),
        ("lint", "Give a RULE, or --model MODEL"),
        ("draw causal.json -q many", "'many' is not a valid integer"),
        ("draw causal.json -n 0", "not in the range"),
        ("apply model.keras rule.json", "Missing option '-o'"),
        ("export model.keras base --xla 8", "'8' is no pair such as 8x128"),
        ("export model.keras base --precision int8", "'int8' is not one of"),
        ("serve base --port 99999", "not in the range"),
    ],
)
def test_wrong_usage_names_the_help(line, message):
    result = run(*shlex.split(line))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "--help" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_written(here):
    (here / "folder").chmod(0o555)
    if os.access("folder", os.W_OK):  # an administrator may
        pytest.skip("this user writes anywhere")
    assert "read-only" in failure("draw", CAUSAL, "-q", "3", "-o", "folder/rule.png")


def test_what_is_no_regular_file_is_not_replaced(here):
    os.mkfifo(here / "pipe.png")
    assert "no regular file" in failure("draw", CAUSAL, "-q", "3", "-o", "pipe.png")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_headmask.figures", None)
    monkeypatch.delattr(hm, "figures", raising=False)
    told = failure("draw", CAUSAL, "-q", "3", "-o", "rule.png")
    assert "pip install matplotlib" in told


def test_a_mistake_of_ours_has_its_traceback(monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    monkeypatch.setattr(hm.MaskSpec, "describe", broken)
    result = run("describe", "rule.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "KeyError: 'ours'" in result.stderr
    assert "Traceback" in result.stderr
    result = run("--debug", "describe", "nope.json")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_an_interrupt_is_quiet(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hm.MaskSpec, "describe", interrupted)
    result = run("describe", "rule.json")
    assert (result.exit_code, result.output.strip()) == (130, "")


def test_tokens_that_a_terminal_cannot_show(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as exit:
        cli(["draw", CAUSAL, "--tokens", "naïve 字"])
    assert exit.value.code == 0
    assert b"na\xefve \\u5b57" in out.buffer.getvalue()


def test_help_has_examples_that_are_commands():
    for name, command in cli.commands.items():
        text = answer(name, "--help")
        assert answer(name, "-h") == text
        summary = command.get_short_help_str(limit=66)
        assert summary in answer("--help")  # whole
        assert summary[-3:] != "..."
        joined = re.sub(r"\\\n", " ", text)
        examples = re.findall(rf"^ *(?:.*\| )?keras-headmask {name} ([^>\n]*)", joined, re.M)
        assert name == "schema" or examples, name
        pathlib.Path("my_specs.py").touch()
        for example in examples:  # parsed, not run
            command.make_context(name, shlex.split(example))
    assert "Exit codes: 0 " in answer("--help")
    assert answer("--version") == f"keras-headmask {hm.__version__}\n"


def test_progress_is_for_terminals(monkeypatch):
    monkeypatch.setattr(command_frame, "on_a_terminal", lambda: True)
    for arguments, label in (
        (("apply", "model.keras", "rule.json", "-o", "out.keras"), "writing"),
        (("bench", CAUSAL, "-q", "40", "-n", "3", "--repetitions", "3"), "measuring"),
    ):
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        json.loads(result.stdout)
        assert label in result.stderr


def test_a_closed_pipe_is_quiet():
    process = start("describe", CAUSAL)  # little enough to wait in a buffer until the end
    process.stdout.close()  # before anything is written
    assert (process.stderr.read(), process.wait(timeout=300)) == ("", 141)


def test_ctrl_c_is_quiet(here):
    os.mkfifo(here / "rule.pipe")

    def listen():  # what a shell starts in the background inherits that SIGINT is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = start("describe", "rule.pipe", preexec_fn=listen)
    with open("rule.pipe", "w"):  # which waits until the command opens it
        for _ in range(6):  # a signal just before it blocks in reading would wait for the reading
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                told = process.communicate(timeout=20)
                break
        else:
            process.kill()
            raise AssertionError("the command does not end")
    assert ([text.strip() for text in told], process.returncode) == (["", ""], 130)


def test_without_click(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['click'] = None\n")
    process = start("--help", path=tmp_path)
    told, said = process.communicate(timeout=300)
    assert (process.returncode, told) == (2, "")
    assert said.endswith("Install it with `pip install click`.\n")
    assert said.count("\n") == 1


def test_the_script_is_the_module():
    with open(ROOT / "pyproject.toml", "rb") as file:
        script = tomllib.load(file)["project"]["scripts"]["keras-headmask"]
    assert script == "keras_headmask.__main__:main"
    from keras_headmask import __main__

    assert callable(__main__.main)
