"""`keras-headmask`: see a rule, check it, apply it, export the model."""

from keras_headmask.cli import model_commands, rule_commands  # noqa: F401  # they add themselves
from keras_headmask.cli.frame import cli

__all__ = ["cli"]
