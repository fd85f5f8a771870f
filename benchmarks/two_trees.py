"""`python -m benchmarks.two_trees FOLDER`: this checkout beside another one, call by call.

FOLDER is a checkout of another commit (`git worktree add FOLDER COMMIT`). Three processes take
turns: one with the package of this tree, two with that of FOLDER; the ratio of the two says what
noise is. Attention under each rule of `benchmarks.cliffs` on the backend of Keras, forward and with
gradients, compiled where the backend compiles, and a model of four stock layers under a rule, which
predicts and is fitted. Ratios are medians of calls side by side.
"""

import argparse
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
    "long": (1, 1024),
    "short": (8, 128),
    "middle": (4, 512),
    "2,048": (1, 2048),
    "4,096": (1, 4096),
    "16,384": (1, 16384),
    "65,536": (1, 65536),
}
MODEL = "a retrofitted model"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each process, in turns")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in whose name it is")
    parser.add_argument("--out", type=Path, help="a JSON file, to which this backend is added")
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
    found: dict[str, Any] = {}
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
        found[name] = {"ratio": ratios[-1], "noise": noise[-1], "milliseconds": ms}
        if options.out:
            _record(options.out, folder, found)
        print(f"{ratios[-1]:.3f}  noise {noise[-1]:.3f}  {ms:8.2f} ms  {name}", flush=True)
    if not ratios:
        raise SystemExit(f"{options.only!r} is in the name of no case: {', '.join(names())}.")
    print(
        f"{len(ratios)} cases: median {statistics.median(ratios):.3f}, most {max(ratios):.3f}; "
        f"noise: median {statistics.median(noise):.3f}, {min(noise):.3f} to {max(noise):.3f}."
    )
    return 0


def _record(file: Path, before: Path, cases: dict[str, Any]) -> None:
    """Write what is known so far: a run that is cut off loses nothing."""
    from benchmarks import machine

    record = json.loads(file.read_text()) if file.exists() else {}
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    about = machine.describe() | {"commit": _commit(HERE), "before": _commit(before)}
    record[backend] = about | {"cases": cases}
    file.write_text(json.dumps(record, indent=2) + "\n")


def _commit(tree: Path) -> str:
    said = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return said.stdout.strip()


def _turned(things: list, by: int) -> list:
    """Each is first once in so many turns."""
    by %= len(things)
    return things[by:] + things[:by]


def names() -> list[str]:
    from benchmarks.cliff_cases import OF_ALL_HEADS  # (a worker has another path when it starts)

    rules = *OF_ALL_HEADS, "sentence head", "4 head groups"
    of_attention = [
        f"{rule}, {size}, {step}"
        for size in SIZES
        for step in ("forward", "gradient")
        for rule in rules
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
    from benchmarks.cliff_cases import Case

    if name.startswith(MODEL):
        return _of_model(name.endswith("fit"))
    if name == "quick":
        return _of_attention(Case("window", 2, 40, 40, 4, 8, "gradient", "known"))
    rule, size, step = name.rsplit(", ", 2)
    batch, length = SIZES[size]
    return _of_attention(Case(rule, batch, length, length, 8, 64, step, "known"))


def _of_attention(case: Any) -> Callable[[], Any]:
    import keras
    from keras import ops

    import keras_headmask as hm

    backend = keras.backend.backend()
    spec, data, arrays = case.spec(), case.data(), case.operands()
    if backend == "tensorflow":  # at lengths that are not known
        from benchmarks import cliffs

        ((_, (ours, _), _),) = cliffs.compiled([case._replace(lengths="unknown")])
        return ours
    inputs = {key: ops.convert_to_tensor(x) for key, x in data.items()}
    *operands, upstream = map(ops.convert_to_tensor, arrays)

    def attend(*qkv: Any) -> Any:
        return hm.dot_product_attention(*qkv, mask_spec=spec, mask_inputs=inputs or None)

    if backend == "jax":
        import jax

        def gradients(*qkv: Any) -> Any:
            context, pull = jax.vjp(attend, *qkv)
            return context, pull(upstream)

        function = jax.jit(attend if case.step == "forward" else gradients)
        return lambda: jax.block_until_ready(function(*operands))
    import torch

    def run() -> Any:
        if case.step == "forward":
            with torch.no_grad():
                return attend(*operands)
        qkv = [x.clone().requires_grad_() for x in operands]
        return torch.autograd.grad(attend(*qkv), qkv, upstream)

    return run


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
