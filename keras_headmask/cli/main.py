"""`keras-headmask`: see a rule, check it, apply it, export and serve the model."""

import sys
import traceback
from typing import Any

import click

import keras_headmask
from keras_headmask.cli import model_commands, rule_commands
from keras_headmask.cli.frame import BAD_INPUT, INTERRUPTED
from keras_headmask.rules.terminal import in_one_line, shown


class _Commands(click.Group):
    """Exit codes of our own: Click's are 1 for an interrupt and for a closed pipe, too."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a token that the terminal cannot show
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            escaped = in_one_line if isinstance(error, click.UsageError) else shown
            error.message = escaped(error.message)
            error.show()
            code = error.exit_code
        except click.Abort:
            code = INTERRUPTED
        except Exception:
            click.echo(shown(traceback.format_exc()), nl=False, err=True)
            code = BAD_INPUT
        sys.exit(code or 0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(keras_headmask.__version__, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """See, check and apply rules that say what each attention head may attend to.

    RULE is a JSON file, the JSON itself, or - for standard input. MODEL is a .keras file.

    Exit codes: 0 all is well; 1 something was found, or a check failed; 2 what was handed in cannot
    be used; 130 interrupted.
    """
    context.obj = debug


for _command in (
    rule_commands.draw,
    rule_commands.lint,
    rule_commands.describe,
    rule_commands.schema,
    rule_commands.bench,
    model_commands.info,
    model_commands.apply,
    model_commands.export,
    model_commands.serve,
):
    cli.add_command(_command)
