"""`keras-headmask`: see a rule, check it, apply it, export the model."""

from keras_headmask.cli import (  # noqa: F401  # they add themselves
    leak_commands,
    model_commands,
    rule_commands,
)
from keras_headmask.cli.frame import cli

__all__ = ["cli"]
