"""What commands say where arguments or files are not usable, their help, and how they end."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile

import keras
import pytest

import keras_headmask as hm

pytest.importorskip("click")

from calling import CAUSAL, ROOT, answer, failure, run, start

from keras_headmask.cli import frame as command_frame
from keras_headmask.cli.main import cli

pytestmark = pytest.mark.tensorflow  # one backend is enough for what is said


BAD = [
    ("describe nope.json", "Cannot read 'nope.json': No such file or directory."),
    ("describe folder", "Cannot read 'folder': Is a directory."),
    ("describe bad.json", "Cannot read 'bad.json' as JSON: .*: line 2 column 14"),
    ("describe twice.json", r"Cannot read 'twice.json' as JSON: \"after\" stands twice"),
    ("describe bytes.json", "Cannot read 'bytes.json' as JSON: 'utf-8' codec"),
    ("describe empty.json", "Cannot read 'empty.json' as JSON: Expecting value"),
    ("describe -", "Cannot read standard input as JSON: Expecting value"),
    ("""describe '{"kind": "window", "aftr": 0}'""", "`aftr`: no such field. Did you mean 'after'"),
    ("""describe '{"kind": "windw"}'""", "unknown kind 'windw'. Did you mean 'window'"),
    ("describe '[1, 2]'", "expected an object with a `kind`"),
    ("describe '{1}'", "Cannot read the text as JSON: .*: line 1 column 2"),
    ("describe rule.json -n 1", "names head 1, but there is one head, numbered 0"),
    ("draw causal.json", "number of `queries`"),
    ("draw rule.json -q 3", "RULE reads token_ids: pass it by --inputs"),
    ("""draw rule.json -q 3 --inputs '{"ids": [1]}'""", "reads token_ids: .* Received: ids"),
    ("draw rule.json -q 3 --inputs '[1, 2, 3]'", "an object of lists by name"),
    ("draw rule.json -q 3 --inputs no.json", "Cannot read 'no.json'"),
    ("draw rule.json -q 3 --inputs inputs.json", "has length 4 where the attention has 3"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [1, "a"]}'""", "list of whole numbers"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [[1, 2], [3]]}'""", "lists of one length"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": [1.5, 2]}'""", "integer or boolean"),
    ("""draw rule.json -q 2 --inputs '{"token_ids": {"keys": [1]}}'""", "one for keys"),
    ("draw causal.json --tokens no.json", "Cannot read 'no.json'"),
    ("draw causal.json --tokens rule.json", "`--tokens` must be words, or a JSON list"),
    ("draw causal.json -q 3 --tokens 'a b'", "`--tokens` must hold a label for each position"),
    ("draw causal.json -q 3 --tokens 'a b'", r"pass a pair \"\[\[...\], \[...\]\]\""),
    ("lint model.keras", "'model.keras' is a model, .* `keras-headmask lint --model model.keras`"),
    ("draw causal.json -q 3 -o rule.xyz", "must end in .png or .svg or .pdf"),
    ("draw causal.json -q 3 -o no/rule.png", "'no/rule.png': there is no folder"),
    ("draw causal.json -q 3 -o folder/nothing.png/rule.png", "there is no folder"),
    ("draw causal.json -q -3", "`queries` must be at least 0"),
    ("lint --model model.keras", "a model that has rules"),
    ("lint --model masked.keras -q 3", "follow from the model"),
    (
        """lint --model masked.keras --inputs '{"token_ids": [[1, 99999]]}'""",
        r"cannot compute this: indices\[0,1\] = 99999 is not in \[0, 12\)",
    ),
    ("lint nope.json", "Cannot read 'nope.json'"),
    ("export nope.keras base", "Cannot read 'nope.keras'"),
    ("info nope.keras", "Cannot read 'nope.keras'"),
    ("info folder", "Cannot read 'folder': Is a directory."),
    ("info text.keras", "'text.keras' is not a .keras file"),
    ("info rule.json", "'rule.json' is not a .keras file"),
    ("info lambda.keras", "does not load: .* --unsafe"),
    ("describe rule.json -n 999999999", "`num_heads` must be at most 100000"),
    ("draw causal.json -q 3 -n 999999999", "`num_heads` must be at most 100000"),
    ("lint causal.json -n 999999999", "`num_heads` must be at most 100000"),
    ("draw causal.json -q 200000", "pairs of positions .* Draw fewer positions"),
    ("draw causal.json -q 3 -k 2000000000", "`keys` of a drawing must be at most 16777216"),
    ("draw causal.json -q 200000 --tile 1", "at most 33554432 signs"),
    ("apply model.keras rule.json -o rule.json", "'rule.json' must end in .keras"),
    ("apply model.keras rule.json -o model.keras", "'model.keras' exists. .* --force"),
    ("apply model.keras rule.json -o no/out.keras", "there is no folder"),
    ("apply model.keras nope.json -o out.keras", "Cannot read 'nope.json'"),
    ("apply model.keras rule.json --layers 7 -o out.keras", "no self-attention layer 7"),
    ("apply model.keras rule.json --layers no -o out.keras", "Paths: 'attention'"),
    ("apply lambda.keras rule.json --unsafe -o out.keras", "holds no self-attention layer"),
    ("export model.keras rule.json --no-check", "must be a folder of versions"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_an_error_of_one_line(line, message, here):
    before = {path.name for path in here.iterdir()}
    assert re.search(message, failure(*shlex.split(line)))
    assert {path.name for path in here.iterdir()} == before


METADATA = [
    (
        "a list",
        b'["3.15"]',
        r"'odd.keras' is not .* metadata.json must be an object .* Received: \[",
    ),
    ("no version", b"{}", "must be an object with a text `keras_version`"),
    ("a number", b'{"keras_version": 3}', "must be an object with a text `keras_version`"),
    ("no JSON", b"{", "'odd.keras' is not .* Cannot read metadata.json as JSON"),
    ("no text", b"\xff\xfe\xfd", "'odd.keras' is not .* Cannot read metadata.json as JSON"),
    (
        "nested",
        b"[" * 10**5,
        "'odd.keras' is not .* Cannot read metadata.json as JSON: maximum",
    ),
    ("missing", None, "'odd.keras' is not a .keras file"),
]


@pytest.mark.parametrize(
    ("content", "message"), [m[1:] for m in METADATA], ids=[m[0] for m in METADATA]
)
def test_odd_metadata_is_an_error_of_one_line(content, message, here):
    with zipfile.ZipFile("model.keras") as model, zipfile.ZipFile("odd.keras", "w") as odd:
        for name in model.namelist():
            if name != "metadata.json":
                odd.writestr(name, model.read(name))
        if content is not None:
            odd.writestr("metadata.json", content)
    assert re.search(message, failure("info", "odd.keras"))


@pytest.mark.parametrize(
    "config",
    [
        b"[]",
        b"null",
        b"{",
        b"\xff",
        b'{"class_name": 3, "module": [], "config": 7}',
        b'{"class_name": "Dense", "module": "keras.layers", "config": {"units": 2}}',
    ],
)
def test_an_odd_config_is_an_error_of_one_line(config, here):
    with zipfile.ZipFile("model.keras") as model, zipfile.ZipFile("odd.keras", "w") as odd:
        for name in model.namelist():
            odd.writestr(name, config if name == "config.json" else model.read(name))
    assert "'odd.keras' " in failure("info", "odd.keras")


def test_a_file_cut_short_or_damaged_is_an_error_of_one_line(here):
    content = (here / "model.keras").read_bytes()
    altered = content.replace(b"keras_version", b"keras_VERSION")  # its checksum is wrong, then
    assert altered != content
    for damaged in (content[:-40], content[:300], altered):
        (here / "odd.keras").write_bytes(damaged)
        assert "'odd.keras' " in failure("info", "odd.keras")


HIDDEN = "a\x1b[2J\u202eb\x07\nError: c"


def test_control_characters_are_escaped(here):
    """Names in files and arguments may hold codes that a terminal obeys."""
    said = r"a\x1b[2J\u202eb\x07\nError: c"
    rule = json.dumps(hm.SameSegment(HIDDEN).get_config())
    assert said in answer("describe", rule)
    assert answer("describe", rule).count("\n") == 1
    assert json.loads(answer("describe", rule, "--json"))["mask_inputs"] == [HIDDEN]
    assert "\x1b" not in answer("describe", rule, "--json")
    assert said in failure("describe", HIDDEN)
    assert said in failure("draw", rule, "-q", "3")
    x = keras.Input((3, 4), name="\x1b[31mx")
    y = keras.layers.MultiHeadAttention(2, 2, name="\u202eattention\r")(x, x)
    keras.Model(x, y, name="\x9bmodel\nLayer 0: no rule").save("odd.keras")
    shutil.copy("odd.keras", "o\x1bdd.keras")
    text = answer("info", "o\x1bdd.keras")
    assert all(c.isprintable() for c in text.replace("\n", "")), text
    for part in (
        r"o\x1bdd.keras, saved",
        r"\x9bmodel\nLayer",
        r"\x1b[31mx:",
        r"\u202eattention\r ",
    ):
        assert part in text
    for arguments in ((HIDDEN,), ("describe", "--" + HIDDEN), ("draw", CAUSAL, "-q", HIDDEN)):
        result = run(*arguments)
        assert result.exit_code == 2
        assert all(c.isprintable() for c in result.stderr.replace("\n", "")), result.stderr
        assert "\nError: c" not in result.stderr


def test_control_characters_in_a_traceback(monkeypatch):
    def raises(*_):
        raise AssertionError("\x1b[2J")

    monkeypatch.setattr(hm.MaskSpec, "describe", raises)
    result = run("describe", "rule.json")
    assert r"AssertionError: \x1b[2J" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import sys; sys.exit(3)",
            r"Cannot import 'ends.py': SystemExit: 3",
        ),
        ("import sys; sys.exit('why')", r"SystemExit: why"),
        ("raise SystemExit", r"'ends.py': SystemExit:"),
        ("raise RuntimeError('\\x1bwhy')", r"'ends.py': RuntimeError: \\x1bwhy"),
    ],
)
def test_a_module_that_ends_the_process(text, message, here):
    (here / "ends.py").write_text(text)
    sys.modules.pop("ends", None)
    result = run("describe", CAUSAL, "--import", "ends.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr)


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
        ("export model.keras base --xla 8", "'8' is not a pair such as 8x128"),
        ("export model.keras base --precision int8", "'int8' is not one of"),
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


def test_only_a_regular_file_is_replaced(here):
    os.mkfifo(here / "pipe.png")
    assert "is not a regular file" in failure("draw", CAUSAL, "-q", "3", "-o", "pipe.png")


def test_an_error_of_the_package_has_its_traceback(monkeypatch):
    def broken(*_):
        raise KeyError("broken")

    monkeypatch.setattr(hm.MaskSpec, "describe", broken)
    result = run("describe", "rule.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "KeyError: 'broken'" in result.stderr
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
        assert examples, name
        pathlib.Path("my_specs.py").touch()
        for example in examples:  # parsed, not run
            command.make_context(name, shlex.split(example))
    assert "Exit codes: 0 " in answer("--help")
    assert answer("--version") == f"keras-headmask {hm.__version__}\n"


def test_progress_is_for_terminals(monkeypatch):
    monkeypatch.setattr(command_frame, "on_a_terminal", lambda: True)
    result = run("apply", "model.keras", "rule.json", "-o", "out.keras", "--json")
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    assert "writing" in result.stderr


@pytest.mark.long
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
                printed = process.communicate(timeout=20)
                break
        else:
            process.kill()
            raise AssertionError("the command does not end")
    assert ([text.strip() for text in printed], process.returncode) == (["", ""], 130)


# A process in which packages are missing, and importing others is a failure.
WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None

class Refuse:
    def find_spec(name, path=None, target=None):
        assert name not in {refused!r}, name

sys.meta_path.insert(0, Refuse)
"""
SLOW = ("keras", "tensorflow", "jax", "torch")
STARTS = {
    "no click": ("describe rule.json", ("click",), "Install it with `pip install click`."),
    "no matplotlib": (
        "draw causal.json -q 3 -o rule.png",
        ("matplotlib",),
        "Install it with `pip install matplotlib`",
    ),
    "no serving": (
        "export model.keras base --warmup 2x8",
        ("tensorflow_serving",),
        "pip install --no-deps tensorflow-serving-api",
    ),
    "no such file": ("info nope.keras", (), "Cannot read 'nope.keras'"),
    "wrong usage": ("describe", (), "Missing argument 'RULE'"),
}


@pytest.mark.parametrize("case", STARTS)
def test_what_is_missing_is_said_before_keras_is_imported(case, tmp_path):
    line, missing, message = STARTS[case]
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(missing=missing, refused=SLOW))
    process = start(*shlex.split(line), path=tmp_path)
    out, said = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, ""), said
    assert message in said
    assert "Traceback" not in said


HELPS = """
import sys
from click.testing import CliRunner
sys.argv[0] = "keras-headmask"
from keras_headmask.cli.main import cli
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in cli.commands)):
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.stderr) == (0, "") and result.stdout, result
"""


def test_help_comes_before_keras_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(missing=(), refused=SLOW))
    (tmp_path / "helps.py").write_text(HELPS)
    process = start(path=tmp_path, module="helps")
    assert (*process.communicate(timeout=300), process.returncode) == ("", "", 0)


def test_without_the_backend(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        WITHOUT.format(missing=("tensorflow",), refused=())
        + "import os; os.environ['KERAS_BACKEND'] = 'tensorflow'\n"
    )
    process = start("describe", CAUSAL, path=tmp_path)
    out, said = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert said.startswith("Error: 'tensorflow' is not installed. Install it with `pip install ")
    assert said.count("\n") == 1


def test_the_script_is_the_module():
    with open(ROOT / "pyproject.toml", "rb") as file:
        script = tomllib.load(file)["project"]["scripts"]["keras-headmask"]
    assert script == "keras_headmask.__main__:main"
    from keras_headmask import __main__

    assert callable(__main__.main)
