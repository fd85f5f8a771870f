"""Commands as a user runs them: in this process, and in one of their own."""

import json
import os
import pathlib
import subprocess
import sys

import keras_headmask as hm

ROOT = pathlib.Path(__file__).parents[2]
RULE = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(after=0)})
CAUSAL = '{"kind": "window", "after": 0}'


def run(*arguments, stdin=None):
    from click.testing import CliRunner

    from keras_headmask.cli.main import cli

    return CliRunner().invoke(cli, arguments, input=stdin, prog_name="keras-headmask")


def answer(*arguments, code=0, stdin=None):
    """What a command prints, with nothing else said."""
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return result.stdout


def as_json(*arguments, code=0):
    return json.loads(answer(*arguments, "--json", code=code))


def failure(*arguments, stdin=None):
    """The one line in which a command says why it cannot."""
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def start(*arguments, path=ROOT, module="keras_headmask", **options):
    """`python -m keras_headmask`, on the backend that starts fastest."""
    paths = os.pathsep.join([str(path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"KERAS_BACKEND": "numpy", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
