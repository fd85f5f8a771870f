"""Runs what this TensorFlow exports in one two minor versions older: `make older`.

Makes a virtual environment for it (600 MB to download), so it is no test of every day. The record
of the last run is `older_tensorflow.json`, beside this file.
"""

import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

import keras_headmask as hm

HERE = pathlib.Path(__file__).parent
SHAPES = [(1, 1), (2, 17), (3, 300)]
TOLERANCE = 1e-5
# Runs in the older one: a folder, and files of inputs and outputs.
READER = """
import sys
import numpy as np, tensorflow as tf
folder, *files = sys.argv[1:]
loaded = tf.saved_model.load(folder)
run = loaded.signatures["serving_default"]
for file in files:
    with np.load(file) as given:
        inputs = {k[3:]: tf.constant(given[k]) for k in given if k.startswith("in/")}
        outputs = {k[4:]: given[k] for k in given if k.startswith("out/")}
    for key, value in run(**inputs).items():
        print(float(np.abs(value.numpy() - outputs[key]).max()))
"""


def requests(signature, rng):
    """Inputs for each shape, and what this TensorFlow answers, as one file's arrays."""
    for batch, length in SHAPES:
        inputs = {"token_ids": rng.integers(1, 20, (batch, length)).astype("int32")}
        outputs = signature(**{name: tf.constant(x) for name, x in inputs.items()})
        yield {f"in/{name}": x for name, x in inputs.items()} | {
            f"out/{name}": x.numpy() for name, x in outputs.items()
        }


def main():
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support")]
    import write_golden

    major, minor = tf.__version__.split(".")[:2]
    older = f"{major}.{int(minor) - 2}"
    record = {
        "date": datetime.date.today().isoformat(),
        "exported_by": f"TensorFlow {tf.__version__}",
        "tolerance": TOLERANCE,
        "largest_difference": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        subprocess.run([sys.executable, "-m", "venv", scratch / "older"], check=True)
        python = scratch / "older" / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", f"tensorflow=={older}.*"]
        subprocess.run(install, check=True)
        version = [python, "-c", "import tensorflow as tf; print(tf.__version__)"]
        told = subprocess.run(version, check=True, capture_output=True, text=True)
        record["run_by"] = f"TensorFlow {told.stdout.strip()}"
        model = write_golden.model()
        folders = {"golden": write_golden.GOLDEN / "format-1" / "saved_model" / "1"}
        for way, scope in (("tiled", contextlib.nullcontext), ("dense", hm.dense_scope)):
            with scope():
                hm.export_saved_model(model, scratch / way)
            folders[way] = scratch / way / "1"
        rng = np.random.default_rng(0)
        for way, folder in folders.items():
            here = tf.saved_model.load(str(folder))
            files = []
            for arrays in requests(here.signatures["serving_default"], rng):
                files.append(scratch / f"{way}-{len(files)}.npz")
                np.savez(files[-1], **arrays)
            command = [python, "-c", READER, folder, *files]
            ran = subprocess.run(command, check=True, capture_output=True, text=True)
            differences = [float(line) for line in ran.stdout.split()]
            assert len(differences) == len(SHAPES), ran.stdout
            record["largest_difference"][way] = max(differences)
    text = json.dumps(record, indent=2) + "\n"
    (HERE / "older_tensorflow.json").write_text(text, encoding="utf-8")
    print(text)
    if not max(record["largest_difference"].values()) <= TOLERANCE:
        sys.exit("The older TensorFlow disagrees.")


if __name__ == "__main__":
    main()
