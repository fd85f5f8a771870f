"""A SavedModel called from Python in a process of its own.

`python -m benchmarks.served_calls FOLDER REQUEST.npz CALLS ANSWER.npz` keeps the output and the
seconds of each call. (`tests/support/loader.cc` does so in C++.)
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).parents[1]
_WARM_UP = 3


def run(saved_model: Path, request: dict[str, Any], calls: int) -> tuple[Any, list[float]]:
    """The output of `request`, and the seconds of so many calls in a row, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.npz", Path(folder) / "answer.npz"
        np.savez(asked, **request)
        command = [sys.executable, "-m", "benchmarks.served_calls"]
        command += [str(saved_model), str(asked), str(calls), str(answered)]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{done.returncode}: {done.stderr[-3000:]}")
        answer = np.load(answered)
        return answer["output"], answer["seconds"].tolist()


def main(saved_model: str, request: str, calls: str, answer: str) -> None:
    import tensorflow as tf

    model = tf.saved_model.load(saved_model)  # to be kept while its signature is called
    signature = model.signatures["serving_default"]
    inputs = {name: tf.constant(value) for name, value in np.load(request).items()}

    def call() -> Any:
        return signature(**inputs)["output_0"].numpy()

    for _ in range(_WARM_UP):
        output = call()
    seconds = []
    for _ in range(int(calls)):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    np.savez(answer, output=output, seconds=seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
