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
TOLERANCE = 1e-5
# Runs here and in the older one: a folder, a file of requests by number and one for answers.
RUN = """
import sys
import numpy as np, tensorflow as tf
folder, requests, answers = sys.argv[1:]
loaded = tf.saved_model.load(folder)
run = loaded.signatures["serving_default"]
with np.load(requests) as given:
    np.savez(answers, **{i: run(token_ids=tf.constant(x))["output_0"] for i, x in given.items()})
"""


def main():
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support")]
    import write_golden

    major, minor = tf.__version__.split(".")[:2]
    older = f"{major}.{int(minor) - 2}"
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        python = scratch / "older" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", scratch / "older"], check=True)
        install = [python, "-m", "pip", "install", "-q", f"tensorflow=={older}.*"]
        subprocess.run(install, check=True)
        version = [python, "-c", "import tensorflow as tf; print(tf.__version__)"]
        version = subprocess.run(version, check=True, capture_output=True, text=True).stdout
        folders = {"golden": write_golden.GOLDEN / "format-1" / "saved_model" / "1"}
        for name, scope in (("tiled", contextlib.nullcontext), ("dense", hm.dense_scope)):
            with scope():
                report = hm.export_saved_model(write_golden.model(), scratch / name)
            folders[name] = report.path
        rng, requests = np.random.default_rng(0), scratch / "requests.npz"
        shapes = [(1, 1), (2, 17), (3, 300)]
        np.savez(requests, *(rng.integers(1, 20, shape).astype("int32") for shape in shapes))
        record = {
            "date": datetime.date.today().isoformat(),
            "exported_by": f"TensorFlow {tf.__version__}",
            "tolerance": TOLERANCE,
            "largest_difference": {},
            "run_by": f"TensorFlow {version.strip()}",
        }
        for name, folder in folders.items():
            answers = []
            for where in (sys.executable, python):
                file = scratch / "answers.npz"
                subprocess.run([where, "-c", RUN, folder, requests, file], check=True)
                with np.load(file) as found:
                    answers.append(dict(found))
            here, there = answers
            apart = [abs(x - there[i]).max() for i, x in here.items()]
            record["largest_difference"][name] = float(max(apart))
    text = json.dumps(record, indent=2) + "\n"
    (HERE / "older_tensorflow.json").write_text(text, encoding="utf-8")
    print(text)
    if not max(record["largest_difference"].values()) <= TOLERANCE:
        sys.exit("The older TensorFlow disagrees.")


if __name__ == "__main__":
    main()
