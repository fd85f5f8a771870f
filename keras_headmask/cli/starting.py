"""How a command starts: it reads its arguments before Keras and TensorFlow are imported.

Importing them takes seconds. A wrong option, `--help` or a missing package is answered before.
"""

import importlib
import importlib.util
import pathlib
import sys

_SCRIPTS = {"keras-headmask", "keras-headmask.exe", "keras-headmask-script.py"}
_AS_MODULE = (["keras_headmask"], ["keras_headmask.server"])
# All that files may name: kinds of specs, layers and models.
_REGISTER = ("rules.inputs", "rules.per_head", "rules.recipes", "layer", "retrofit.masked_model")


def is_command() -> bool:
    """Whether this process is one of our commands, which imports Keras when it needs it."""
    if not sys.argv:
        return False
    if sys.argv[0] == "-m":  # Python replaces it once it has found the module
        given = sys.orig_argv
        return "-m" in given and given[given.index("-m") + 1 :][:1] in _AS_MODULE
    return pathlib.Path(sys.argv[0]).name in _SCRIPTS


def register_all() -> None:
    """Register every spec, layer and model that a file may name, and how notebooks show them."""
    for module in _REGISTER:
        importlib.import_module(f"keras_headmask.{module}")
    importlib.import_module("keras_headmask.look.notebook").install()


def import_all() -> None:
    """`register_all` for a command, which says what to install."""
    try:
        register_all()
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or importlib.util.find_spec(missing) is not None:
            raise  # it is installed, and broken
        raise ImportError(
            f"'{missing}' is not installed. Install it with `pip install {missing}`, or choose "
            "another backend of Keras by the environment variable KERAS_BACKEND."
        ) from error
