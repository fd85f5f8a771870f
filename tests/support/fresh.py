"""Code in a process of its own, with this package and on this backend."""

import os
import subprocess
import sys
from pathlib import Path

import keras


def run_fresh(code, *arguments):
    """Run Python `code`; fail with what it said if it fails."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=root, KERAS_BACKEND=keras.backend.backend()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
