"""What the commands have in common: their answers, their errors, their exit codes, progress.

Answers go to standard output, all else to standard error, so that `--json` is read by programs.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import click

from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.words import in_one_line, shown
from keras_headmask.server.served_versions import reason

FOUND, BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
# What the library and the system raise for arguments and files that are not usable.
_USUAL = (TypeError, ValueError, OSError, RuntimeError, ImportError, MemoryError)


class Answer(NamedTuple):
    """What a command answers: to a reader, and as JSON (or what makes it, if it is asked for)."""

    text: str
    data: Any
    exit_code: int = 0


class CheckFailed(click.ClickException):
    exit_code = FOUND


class Commands(click.Group):
    """Errors of one line, and own exit codes: Click has 1 for an interrupt and a closed pipe."""

    debug = False

    def main(self, *args: Any, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a token that the terminal cannot show
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except click.Abort:
            code = INTERRUPTED
        except click.UsageError as error:
            click.UsageError(in_one_line(error.format_message()), error.ctx).show()
            code = error.exit_code
        except Exception as error:
            said = None if self.debug else _said(error)
            click.echo(shown(f"Error: {said}" if said else traceback.format_exc()), err=True)
            code = getattr(error, "exit_code", BAD_INPUT)
        sys.exit(code or 0)


def _said(error: Exception) -> str | None:
    """What is wrong with arguments or files; `None` for an error of the package itself."""
    # An operation's error, for ids that an embedding lacks or for want of memory.
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    if errors is not None and isinstance(error, errors.OpError):
        return in_one_line(f"TensorFlow cannot compute this: {reason(str(error))}")
    if isinstance(error, click.ClickException):
        return error.message
    if not isinstance(error, _USUAL):
        return None
    return in_one_line(str(error).strip() or type(error).__name__)


def command(function: Callable[..., Answer]) -> click.Command:
    """A command with `--json` and `--import`."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.option(
        "--import",
        "modules",
        multiple=True,
        metavar="MODULE",
        expose_value=False,
        is_eager=True,
        callback=_import,
        help="Import a module, or a .py file, that registers specs or layers of your own.",
    )
    @click.pass_context
    @functools.wraps(function)
    def run(context: click.Context, as_json: bool, **arguments: Any) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # what models print
            answer = function(**arguments)
            data = answer.data() if as_json and callable(answer.data) else answer.data
        try:
            click.echo(_as_json(data) if as_json else shown(answer.text))
        except BrokenPipeError:
            sys.exit(CLOSED_PIPE)
        context.exit(answer.exit_code)

    return click.command()(run)


def _import(context: click.Context, parameter: click.Parameter, modules: Iterable[str]) -> None:
    for name in modules:
        file = pathlib.Path(name)
        is_file = file.suffix == ".py"
        sys.path.insert(0, str(file.absolute().parent if is_file else pathlib.Path.cwd()))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is not an answer
                if is_file:
                    runpy.run_path(name, run_name=file.stem)
                else:
                    importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module does
            raise click.BadParameter(
                f"Cannot import '{name}': {type(error).__name__}: {error}"
            ) from error


def _as_json(data: Any) -> str:
    """Numbers that are not finite become null."""
    text = json.dumps(data, default=_plain)
    return json.dumps(json.loads(text, parse_constant=lambda _: None))


def _plain(value: Any) -> Any:
    if isinstance(value, MaskSpec):
        return value.get_config()
    if isinstance(value, pathlib.Path):
        return str(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def on_a_terminal() -> bool:
    return sys.stderr.isatty()


def progress(text: str) -> None:
    if on_a_terminal():
        click.echo(f"{text} ...", err=True)


AT_LEAST_ONE = click.IntRange(min=1)
heads_option = click.option(
    "-n", "--heads", "num_heads", type=AT_LEAST_ONE, help="Number of heads."
)
inputs_option = click.option(
    "--inputs",
    metavar="JSON",
    help="What the rule reads, by name: a file, or as in the example.",
)
unsafe_option = click.option(
    "--unsafe", is_flag=True, help="Load code that is in the file, too (Lambda layers)."
)
