"""`keras-headmask`: see a rule, check it, apply it, export and serve the model."""

from keras_headmask.cli import model_commands, rule_commands  # noqa: F401  # they add themselves
from keras_headmask.cli.frame import cli
from keras_headmask.server import main as server

cli.add_command(server.main, "serve")
