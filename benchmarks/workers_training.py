"""`python -m benchmarks.workers_training`: training steps on 1 worker and on 2, as ratios.

The model and the text are those of `examples/train_on_workers.py`, on JAX and CPUs; the batch
is the same for all. Two cores can show only this much: one worker whose threads use both, one that
is held to one core, and two workers with a core each. The first epoch compiles and is not counted.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "jax")

from benchmarks import machine

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_on_workers.py"
RECORD = Path(__file__).parent / "results" / "workers_training.json"
# The cores of each worker.
CASES = {
    "1 worker, 2 cores": [{0, 1}],
    "1 worker, 1 core": [{0}],
    "2 workers, a core each": [{0}, {1}],
}
LIMITS = (
    "Two workers on two cores have no more of them than one worker with threads. Against that one, "
    "the ratio shows what splitting the batch costs or saves: smaller matrix products on a core; "
    "after each step all gradients go over loopback (gloo), and each waits for the slower."
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each case, in turns")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--worker", type=json.loads, help="what a started process gets")
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.worker)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("This needs two cores. `taskset` or a container may have held it to one.")
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.workers_training", *sys.argv[1:]]),
        "quick": options.quick,
    }
    record |= measured(options.quick, 1 if options.quick else options.repetitions, cores)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for name, ratio in record["steps_per_second_ratios"].items():
        print(f"{name}: {ratio:.2f}")
    print(LIMITS)


def measured(quick: bool, repetitions: int, cores: list[int]) -> dict[str, Any]:
    size = (
        {"batch": 8, "length": 16, "steps": 5}
        if quick
        else {"batch": 32, "length": 128, "steps": 10}
    )
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repetitions):  # in turns, so that a busy moment meets all alike
        for name, pinned in CASES.items():
            each = [[cores[n] for n in of_worker] for of_worker in pinned]
            times[name] += run(size, each)
    seconds = {name: statistics.median(of_case) for name, of_case in times.items()}
    two, threads, one = (seconds[name] for name in ("2 workers, a core each", *list(CASES)[:2]))
    return size | {
        "seconds_of_a_step": seconds,
        "least_seconds_of_a_step": {name: min(of_case) for name, of_case in times.items()},
        "runs": repetitions,
        "steps_per_second_ratios": {
            "2 workers with a core each, over 1 worker with 1 core": one / two,
            "2 workers with a core each, over 1 worker with 2 cores": threads / two,
            "1 worker with 2 cores, over 1 worker with 1 core": one / threads,
        },
        "parameters": parameters(),
        "limits": LIMITS,
    }


def run(size: dict[str, int], cores: list[list[int]]) -> list[float]:
    """Seconds of a step in each epoch but the first, on as many workers as `cores` has lists."""
    example = load_example()
    shared = os.environ | {
        example.ADDRESSES: example.free_addresses(len(cores)),
        example.WORKERS: str(len(cores)),
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, of_worker in enumerate(cores):
            task = size | {"cores": of_worker, "out": folder}
            command = [
                sys.executable,
                "-m",
                "benchmarks.workers_training",
                "--worker",
                json.dumps(task),
            ]
            environment = shared | {example.WORKER: str(number)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        try:
            codes = [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"The workers ended with {codes}; see above.")
        return json.loads((Path(folder) / "seconds.json").read_text())


def work(task: dict[str, Any]) -> None:
    os.sched_setaffinity(0, task["cores"])  # before JAX counts them for its threads
    example = load_example()
    worker, workers = int(os.environ[example.WORKER]), int(os.environ[example.WORKERS])
    epochs: list[float] = []

    class Timed(example.Epochs):
        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):  # `fit` has waited for the last step's loss
            epochs.append((time.perf_counter() - self.start) / len(self.shard))

    example.Epochs = Timed
    options = example.parse(
        [f"--{name}={task[name]}" for name in ("batch", "length", "steps", "out")]
    )
    example.train(options, worker, workers)
    if worker == 0:
        Path(task["out"], "seconds.json").write_text(json.dumps(epochs[1:]))


def parameters() -> int:
    example = load_example()
    return example.build_model(example.make_rule(1), blocks=2).count_params()


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_on_workers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
