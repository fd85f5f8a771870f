"""Code in a process of its own, with this package and on this backend."""

import os
import subprocess
import sys
from pathlib import Path

import keras


def run_fresh(code, *arguments):
    """Run Python `code`; fail with what it said if it fails."""
    # (`make versions` has another Keras in the path.)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=path, KERAS_BACKEND=keras.backend.backend()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
