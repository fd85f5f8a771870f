"""Shared by the commands: answers, errors, exit codes, progress.

Answers go to standard output, all else to standard error, so that `--json` is read by programs.
"""

import contextlib
import functools
import importlib.util
import json
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import click

import keras_headmask as hm
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.words import in_one_line, shown

FOUND, BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
# What the library and the system raise for arguments and files that are not usable.
_USUAL = (TypeError, ValueError, OSError, RuntimeError, ImportError, MemoryError)
_HINTS = {  # for what messages of the library hold
    "does not load: .*lambda": " If you trust the file: --unsafe.",
    "Could not locate|unknown kind": " Here: --import MODULE.",
}


class Answer(NamedTuple):
    """The answer of a command: for a reader, and as JSON."""

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
            message = None if self.debug else _said(error)
            click.echo(shown(f"Error: {message}" if message else traceback.format_exc()), err=True)
            code = getattr(error, "exit_code", BAD_INPUT)
        sys.exit(code or 0)


def _said(error: Exception) -> str | None:
    """The fault of arguments or files; `None` for an error of the package itself."""
    # An operation's error, for ids that an embedding lacks or for want of memory.
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    if errors is not None and isinstance(error, errors.OpError):
        return in_one_line(f"TensorFlow cannot compute this: {_reason(str(error))}")
    if isinstance(error, click.ClickException):
        return error.message
    if not isinstance(error, _USUAL):
        return None
    message = str(error).strip() or type(error).__name__
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and missing and importlib.util.find_spec(missing) is None:
        message = (
            f"'{missing}' is not installed. Install it with `pip install {missing}`, or choose "
            "another backend of Keras by the environment variable KERAS_BACKEND."
        )
    hints = (hint for pattern, hint in _HINTS.items() if re.search(pattern, message, re.IGNORECASE))
    return in_one_line(message + next(hints, ""))


# Of TensorFlow's messages: lines about places in the graph, and names of nodes in other lines.
_PLACES = re.compile(
    r"^(Graph execution error:|Detected at node|<stack traces|\s*File \"|\d+ root error).*"
    r"|^(Exception encountered when calling|Arguments received by|\s*•).*"
    r"|^\s*\(\d+\) [A-Z_]+:|\[\[?\{\{.*|\{\{[^}]*\}\}|\[Op:\w+\].*"
)
_BOLD = re.compile(r"\x1b\[[0-9;]*m")  # as Keras writes it around TensorFlow's message


def _reason(message: str) -> str:
    """The line of TensorFlow's message that says what is wrong, without places in the graph."""
    lines = (_PLACES.sub("", line).strip() for line in _BOLD.sub("", message).splitlines())
    return next((line for line in lines if line), "it gives no reason")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hm.__version__, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """See, check and apply rules that say what each attention head may attend to.

    RULE is a JSON file, the JSON itself, or - for standard input. MODEL is a .keras file.

    Exit codes: 0 all is well; 1 something was found, or a check failed; 2 the arguments or files
    are not usable; 130 interrupted.
    """
    Commands.debug = debug


def command(function: Callable[..., Answer]) -> click.Command:
    """A command of `cli` with `--json` and `--import`."""

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
        try:
            click.echo(_as_json(answer.data) if as_json else shown(answer.text))
        except BrokenPipeError:
            sys.exit(CLOSED_PIPE)
        context.exit(answer.exit_code)

    return cli.command()(run)


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
    return str(value) if isinstance(value, pathlib.Path) else vars(value)  # of a dataclass


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
