"""`keras-headmask`: see a rule, check it, apply it, export and serve the model."""

import click

import keras_headmask
from keras_headmask.cli import model_commands, rule_commands
from keras_headmask.cli.frame import Commands
from keras_headmask.server import main as server


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(keras_headmask.__version__, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """See, check and apply rules that say what each attention head may attend to.

    RULE is a JSON file, the JSON itself, or - for standard input. MODEL is a .keras file.

    Exit codes: 0 all is well; 1 something was found, or a check failed; 2 the arguments or files
    are not usable; 130 interrupted.
    """
    Commands.debug = debug


for _module in (rule_commands, model_commands):
    for _command in vars(_module).values():
        if isinstance(_command, click.Command):
            cli.add_command(_command)
cli.add_command(server.main, "serve")
