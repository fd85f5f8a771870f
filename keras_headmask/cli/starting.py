"""How a command starts: it reads its arguments before Keras and TensorFlow are imported.

Importing them takes seconds. A wrong option, `--help` or a missing package is answered before.
"""

import importlib
import importlib.util
import pathlib
import sys

_SCRIPTS = {"keras-headmask", "keras-headmask.exe", "keras-headmask-script.py"}
_AS_MODULE = (["keras_headmask"], ["keras_headmask.server"])


def _is_command() -> bool:
    if not sys.argv:
        return False
    if sys.argv[0] == "-m":  # Python replaces it once it has found the module
        given = sys.orig_argv
        return "-m" in given and given[given.index("-m") + 1 :][:1] in _AS_MODULE
    return pathlib.Path(sys.argv[0]).name in _SCRIPTS


waiting = _is_command()  # then the package waits for `import_all`, or for the first use of a name


def import_all() -> None:
    """Import the whole package, which also registers every spec and layer with Keras."""
    global waiting
    if not waiting:
        return
    waiting = False
    try:
        importlib.reload(sys.modules["keras_headmask"])
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or importlib.util.find_spec(missing) is not None:
            raise  # it is installed, and broken
        raise ImportError(
            f"'{missing}' is not installed. Install it with `pip install {missing}`, or choose "
            "another backend of Keras by the environment variable KERAS_BACKEND."
        ) from error
