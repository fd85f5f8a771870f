"""What the commands have in common: their answers, their errors, their exit codes, progress.

Answers go to standard output, all else to standard error, so that `--json` is read by programs.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import click

from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.terminal import in_one_line, shown
from keras_headmask.server.tensorflow_errors import reason

FOUND, BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
# What the library and the system raise for what they are handed.
_USUAL = (TypeError, ValueError, OSError, RuntimeError, ImportError, MemoryError)


class Answer(NamedTuple):
    """What a command has to say: to a reader, and as JSON (or what makes that, if it is asked)."""

    text: str
    data: Any
    exit_code: int = 0


class BadInput(click.ClickException):
    exit_code = BAD_INPUT


class CheckFailed(click.ClickException):
    exit_code = FOUND


def command(function: Callable[..., Answer]) -> click.Command:
    """A command with `--json`, `--import`, and errors of one line."""

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
        with (
            errors_in_a_line(context.obj),
            contextlib.redirect_stdout(sys.stderr),
        ):  # what models print
            answer = function(**arguments)
            data = answer.data() if as_json and callable(answer.data) else answer.data
        try:
            click.echo(json.dumps(plain(data)) if as_json else shown(answer.text))
        except BrokenPipeError:
            sys.exit(CLOSED_PIPE)
        context.exit(answer.exit_code)

    return click.command()(run)


@contextlib.contextmanager
def errors_in_a_line(debug: bool) -> Iterator[None]:
    """Errors that say what is wrong with what was handed in, without a traceback."""
    try:
        yield
    except Exception as error:
        if debug:
            raise
        said = str(error).strip() or type(error).__name__
        # An operation's error, for ids that an embedding lacks or for want of memory.
        errors = getattr(sys.modules.get("tensorflow"), "errors", None)
        if errors is not None and isinstance(error, errors.OpError):
            said = f"TensorFlow cannot compute this: {reason(said)}"
        elif not isinstance(error, _USUAL):
            raise
        raise BadInput(in_one_line(said)) from error


def _import(context: click.Context, parameter: click.Parameter, modules: Iterable[str]) -> None:
    for name in modules:
        file = pathlib.Path(name)
        is_file = file.suffix == ".py"
        if is_file and not file.is_file():
            raise click.BadParameter(f"'{name}' cannot be imported: there is no such file.")
        sys.path.insert(0, str(file.absolute().parent if is_file else pathlib.Path.cwd()))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is no answer
                module = importlib.import_module(file.stem if is_file else name)
            found = getattr(module, "__file__", None)
            if is_file and (found is None or not file.samefile(found)):
                raise ImportError(f"there is another module '{file.stem}'. Rename the file.")
        except SystemExit as error:
            raise click.BadParameter(
                f"'{name}' cannot be imported: it ends the process by sys.exit({error.code!r}). "
                'Put that under `if __name__ == "__main__":`.'
            ) from error
        except Exception as error:  # whatever the module does
            raise click.BadParameter(
                f"'{name}' cannot be imported: {type(error).__name__}: {error}"
            ) from error


def plain(value: Any) -> Any:
    """`value` as JSON: what is not finite is null."""
    if isinstance(value, MaskSpec):
        return value.get_config()
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, pathlib.Path) else value


def on_a_terminal() -> bool:
    return sys.stderr.isatty()


@contextlib.contextmanager
def steps(count: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; call what it yields when a step begins."""
    if not on_a_terminal():
        yield lambda label: None
        return
    with click.progressbar(length=count, file=sys.stderr, show_eta=False) as bar:

        def begin(label: str) -> None:
            if bar.label:
                bar.update(1)
            bar.label = label
            bar.render_progress()

        yield begin
        bar.update(1)


def rounds(numbers: range) -> Iterator[int]:
    if not on_a_terminal():
        yield from numbers
        return
    with click.progressbar(numbers, label="measuring", file=sys.stderr) as bar:
        yield from bar


AT_LEAST_ONE = click.IntRange(min=1)
heads_option = click.option("-n", "--heads", type=AT_LEAST_ONE, help="Number of heads.")
inputs_option = click.option(
    "--inputs",
    metavar="JSON",
    help="What the rule reads, by name: a file, or as in the example.",
)
unsafe_option = click.option(
    "--unsafe", is_flag=True, help="Load code that is in the file, too (Lambda layers)."
)
