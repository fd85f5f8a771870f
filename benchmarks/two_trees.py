"""`python -m benchmarks.two_trees FOLDER`: this checkout beside another one, call by call.

FOLDER is a checkout of another commit (`git worktree add FOLDER COMMIT`). Three processes take
turns: one with the package of this tree, two with that of FOLDER; the ratio of the two says what
noise is. Attention of the cases of `benchmarks.cases` on the backend of Keras, forward and with
gradients, compiled where the backend compiles, and a model of four stock layers under a rule, which
predicts and is fitted. Ratios are medians of calls side by side.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
_LEAST_SECONDS = 0.02  # of a run; a shorter call is repeated within it
SIZES = {  # batch and positions
    "short": (8, 128),
    "middle": (4, 512),
    "2,048": (1, 2048),
    "4,096": (1, 4096),
    "16,384": (1, 16384),
}
MODEL = "a retrofitted model"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each process, in turns")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in whose name it is")
    parser.add_argument("--quick", action="store_true", help="a tiny case: does it run?")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.folder)
        return 0
    folder = options.folder.resolve()
    if not (folder / "keras_headmask").is_dir():
        raise SystemExit(f"{folder} holds no keras_headmask: give a checkout.")
    workers = [Worker(tree) for tree in (HERE, folder, folder)]
    ratios: list[float] = []
    noise: list[float] = []
    wanted = [name for name in names() if re.search(options.only, name)]
    for name in ("quick",) if options.quick else wanted:
        calls = max(worker.ask(["make", name]) for worker in workers)
        runs = [
            [worker.ask(["run", calls]) for worker in _turned(workers, turn)]
            for turn in range(2 if options.quick else options.pairs)
        ]
        runs = [_turned(of_turn, -turn) for turn, of_turn in enumerate(runs)]
        ratios.append(statistics.median(new / old for new, old, _ in runs))
        noise.append(statistics.median(again / old for _, old, again in runs))
        ms = 1000 * statistics.median(old for _, old, _ in runs) / calls
        print(f"{ratios[-1]:.3f}  noise {noise[-1]:.3f}  {ms:8.2f} ms  {name}", flush=True)
    if not ratios:
        raise SystemExit(f"{options.only!r} is in the name of no case: {', '.join(names())}.")
    print(
        f"{len(ratios)} cases: median {statistics.median(ratios):.3f}, most {max(ratios):.3f}; "
        f"noise: median {statistics.median(noise):.3f}, {min(noise):.3f} to {max(noise):.3f}."
    )
    return 0


def _turned(things: list, by: int) -> list:
    by %= len(things)
    return things[by:] + things[:by]


def names() -> list[str]:
    from benchmarks import cases  # (a worker has another path when it starts)

    of_attention = [
        f"{name}, {size}, {step}"
        for size in SIZES
        for step in ("forward", "gradient")
        for name in cases.all_cases()
    ]
    return [*of_attention, f"{MODEL}, predict", f"{MODEL}, fit"]


class Worker:
    """A process with the package of `tree`."""

    def __init__(self, tree: Path) -> None:
        # (Threads that wait are not to take the time of the process whose turn it is.)
        quiet = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--work", str(tree)],
            env=os.environ | quiet | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: list) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"The process of {self.process.args[-1]} ended: see above.")
        return json.loads(answer)


# --- In a worker ---------------------------------------------------------------------------------


def work(tree: Path) -> None:
    """Answer questions, a line each.

    `["make", name]`: how many calls make a run. `["run", calls]`: the seconds that they take.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    import keras_headmask

    found = Path(keras_headmask.__file__).resolve()
    assert found.is_relative_to(tree), found
    sys.path.insert(0, str(HERE))  # (the cases are those of this tree)
    call: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        question, value = json.loads(line)
        if question == "make":
            call = made(value)
            for _ in range(3):
                seconds = _seconds(call, 1)
            answer: Any = max(1, round(_LEAST_SECONDS / seconds))
        else:
            answer = _seconds(call, value)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def made(name: str) -> Callable[[], Any]:
    """What the case `name` runs."""
    from benchmarks import cases

    if name.startswith(MODEL):
        return _of_model(name.endswith("fit"))
    if name == "quick":
        return _of_attention(cases.all_cases(quick=True)["window"], "gradient")
    case, size, step = name.rsplit(", ", 2)
    batch, length = SIZES[size]
    of_sizes = {"batch": batch, "length": length, "heads": 8, "reach": 31}
    return _of_attention(dataclasses.replace(cases.all_cases()[case], **of_sizes), step)


def _of_attention(case: Any, step: str) -> Callable[[], Any]:
    import keras

    if keras.backend.backend() != "tensorflow":
        from benchmarks import backends

        return backends.arms(case, step)["ours"]
    import tensorflow as tf

    from benchmarks import peers_keras

    function = peers_keras.ours(case, "float32", None)  # at lengths that are not known
    given = [*map(tf.constant, case.operands())]
    inputs = {name: tf.constant(x) for name, x in case.data().items()}
    if step == "forward":
        return lambda: function(*given, inputs).numpy()
    shape = (case.batch, None, case.heads, case.size)
    specs = {name: tf.TensorSpec((case.batch, None), x.dtype) for name, x in inputs.items()}
    function = peers_keras.step(function, shape, "float32", specs)
    return lambda: [x.numpy() for x in function(*given, given[0], inputs)]


def _of_model(fits: bool) -> Callable[[], Any]:
    import keras
    import numpy as np

    import keras_headmask as hm

    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(1000, 128, mask_zero=True)(ids)
    for _ in range(4):
        x = keras.layers.LayerNormalization()(
            keras.layers.Add()([x, keras.layers.MultiHeadAttention(8, 16)(x, x)])
        )
    model = hm.apply_head_masks(keras.Model(ids, x), hm.PerHead({0: hm.SameSentence(9)}))
    rng = np.random.default_rng(0)
    texts = rng.integers(1, 1000, (8, 256)).astype("int32")
    if not fits:
        return lambda: model.predict_on_batch(texts)
    model.compile("sgd", "mse")
    wanted = rng.normal(size=(8, 256, 128)).astype("float32")
    return lambda: model.train_on_batch(texts, wanted)


if __name__ == "__main__":
    sys.exit(main())
