"""One process per framework: `run` starts one and reads its results, `serve` is what it does.

`process` is for the benchmarks that run a function in a fresh process.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def run(task: dict[str, Any], **variables: str) -> dict[str, Any]:
    """The results of `task`, or `errors` where the process died (of too little memory, say)."""
    threads = str(task["threads"])
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # What was compiled under other limits of the processor (`machine`) would be run again.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        **variables,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks", "--worker", json.dumps(task)]
        command += ["--json", str(file)]
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE
        )
        if file.exists():
            return json.loads(file.read_text())
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    told = f"exit {done.returncode}: {lines[-1] if lines else ''}"[:600]
    rows = [
        {"peer": peer, "step": step, "length": length, "error": told}
        for peer, step, length in task.get("jobs", [])
    ]
    return {"errors": {"process": told}, "rows": rows}


@contextlib.contextmanager
def process() -> Iterator[Callable[..., Any]]:
    """`ask(function, *arguments)` runs a function in one fresh process, which keeps its globals."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def serve(task: dict[str, Any], file: str) -> None:
    """Do `task` in this process and write its results to `file`."""
    if task["framework"] == "torch":
        from benchmarks import peers_torch as peers
    else:
        from benchmarks import peers_keras as peers
    peers.pin_threads(task["threads"])
    dtype, quick, repetitions = task["dtype"], task["quick"], task["repetitions"]
    if "names" in task:
        results: dict[str, Any] = peers.run(task["names"], dtype, quick, repetitions)
    else:
        from benchmarks import scaling

        jobs = [scaling.Job(*job) for job in task["jobs"]]
        results = {"rows": [scaling.measured(job, dtype, quick, repetitions) for job in jobs]}
    Path(file).write_text(json.dumps(results))
