"""Code in a process of its own, with this package and on this backend."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras


def run_fresh(code, *arguments):
    """Run Python `code`; fail with what it said if it fails."""
    # (`make versions` has another Keras in the path.)
    here = Path(__file__)
    folders = os.environ.get("PYTHONPATH", ""), str(here.parents[2]), str(here.parent)
    path = os.pathsep.join(folders)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=path, KERAS_BACKEND=keras.backend.backend()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


RELOADS = """
import importlib, pathlib, pickle, sys, warnings
import keras, numpy as np
import keras_headmask
for name in sys.argv[2:]:
    importlib.import_module(name)
warnings.filterwarnings("error", message=".*cannot be built.*|.*unbuilt state.*")
for file in pathlib.Path(sys.argv[1]).glob("*.keras"):
    given, wanted, weights = pickle.loads(file.with_suffix(".pickle").read_bytes())
    model = keras.saving.load_model(file)
    for one, other in zip(model.get_weights(), weights, strict=True):  # before a call builds any
        np.testing.assert_array_equal(one, other, err_msg=file.stem)
    for one, other in zip(keras.tree.flatten(model(*given)), wanted, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), other, err_msg=file.stem)
"""


def reload_fresh(folder, models, *imports):
    """Files give the same in a process that has only imported this package and `imports`.

    `models` holds by name a model and what it is called on.
    """
    for name, (model, *given) in models.items():
        given = keras.tree.map_structure(keras.ops.convert_to_numpy, given)
        wanted = [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(model(*given))]
        kept = pickle.dumps((given, wanted, model.get_weights()))
        (folder / f"{name}.pickle").write_bytes(kept)
        model.save(folder / f"{name}.keras")
    run_fresh(RELOADS, folder, *imports)
