"""`python -m benchmarks.jax_backend`: rules on JAX beside `jax.nn.dot_product_attention`.

A window, packed documents, heads of several rules and a BERT layer, 16 heads of size 64, in
float32, compiled; the forward pass, and it with the gradients of queries, keys and values. JAX' own
function is given the whole mask, and makes it when it is called in the arm "with its mask". "bare
tiles" is the floor: two products and a softmax for each tile of queries and the run of keys that
the mask opens to it, known when it is compiled, and no mask. "TensorFlow" is ours there, in a
process beside. Ratios are medians of runs that take turns.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow" if "--beside" in sys.argv else "jax"

import numpy as np

from benchmarks import cases, machine, measure

RECORD = Path(__file__).parent / "results" / "jax_backend.json"
NAMES = "window", "documents", "mixed", "bert"
OURS, STOCK, MAKES_MASK = "ours", "stock", "stock with its mask"
BARE, TENSORFLOW = "bare tiles", "TensorFlow"
STEPS = "forward", "gradient"
# The most that ours may take of the time of others, forward.
GOALS = {
    "window": {STOCK: 0.09, BARE: 1.25},
    "documents": {STOCK: 0.08, TENSORFLOW: 3.0},
    "mixed": {STOCK: 0.20, BARE: 1.3},
    "bert": {STOCK: 0.60},
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9, help="of each function, in turns")
    parser.add_argument("--only", default=",".join(NAMES), help="cases, with commas between")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--beside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.beside:
        beside(cases.all_cases(options.quick)[options.beside])
        return
    repetitions = 2 if options.quick else options.repetitions
    wanted = cases.all_cases(options.quick)
    found = {
        name: {step: measured(wanted[name], step, repetitions, options.quick) for step in STEPS}
        for name in options.only.split(",")
    }
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.jax_backend", *sys.argv[1:]]),
        "quick": options.quick,
        "goals": GOALS,
        "cases": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    ratios = {name: {step: of[step].get("ratios") for step in STEPS} for name, of in found.items()}
    print(json.dumps(ratios, indent=2))


def functions(case: cases.Case, step: str) -> tuple[dict[str, Callable], tuple]:
    """Each arm as a compiled function of the arguments, and the arguments."""
    import jax
    import jax.numpy as jnp

    import keras_headmask as hm

    data, spec = case.data(), case.spec()
    inputs = {name: jnp.asarray(x) for name, x in data.items()}
    mask = case.mask(data)
    whole, alive = jnp.asarray(mask), jnp.asarray(sees_something(mask))

    def ours(inputs: dict, whole: Any, *qkv: Any) -> Any:
        return hm.dot_product_attention(*qkv, mask_spec=spec, mask_inputs=inputs or None)

    def stock(inputs: dict, whole: Any, *qkv: Any) -> Any:
        return jax.nn.dot_product_attention(*qkv, mask=whole)

    def with_its_mask(inputs: dict, whole: Any, *qkv: Any) -> Any:
        made = hm.make_mask(spec, case.length, case.length, case.heads, inputs or None)
        return jax.nn.dot_product_attention(*qkv, mask=made)

    def compiled(attend: Callable) -> Callable:
        if step == "forward":
            return jax.jit(attend)

        def loss(*given: Any) -> Any:
            return jnp.sum((alive * attend(*given)) ** 2)

        return jax.jit(jax.grad(loss, argnums=(2, 3, 4)))

    runs = runs_of(mask)

    def bare(inputs: dict, whole: Any, *qkv: Any) -> Any:
        query, key, value = (jnp.transpose(x, (0, 2, 1, 3)) for x in qkv)
        query, contexts = query / case.size**0.5, []
        for heads, tiles in runs:
            made = []
            for first, last, start, stop in tiles:
                logits = query[:, heads, first:last] @ jnp.swapaxes(key[:, heads, start:stop], 2, 3)
                made.append(jax.nn.softmax(logits) @ value[:, heads, start:stop])
            contexts.append(jnp.concatenate(made, 2))
        return jnp.transpose(jnp.concatenate(contexts, 1), (0, 2, 1, 3))

    arms = {OURS: ours, STOCK: stock, MAKES_MASK: with_its_mask, BARE: bare}
    given = inputs, whole, *map(jnp.asarray, case.operands())
    return {name: compiled(attend) for name, attend in arms.items()}, given


def sees_something(mask: np.ndarray) -> np.ndarray:
    """The rows `(B, T, H, 1)` that see some key: of others JAX' function gives a mean of values."""
    return mask.any(-1).transpose(0, 2, 1)[..., None]


def runs_of(mask: np.ndarray) -> list[tuple[slice, list[tuple[int, int, int, int]]]]:
    """Heads of one rule, and of each of their tiles the queries and the keys, as first and stop.

    All examples have the tiles of the union of their masks.
    """
    mask = mask.any(0)
    edges = [h for h in range(1, len(mask)) if (mask[h] != mask[h - 1]).any()]
    found = []
    for first, stop in zip([0, *edges], [*edges, len(mask)], strict=True):
        of_all = first == 0 and stop == len(mask) == 1  # one mask for all heads
        size = 256 if mask[first].mean() > 0.4 else 128
        tiles = []
        for start in range(0, mask.shape[1], size):
            keys = np.flatnonzero(mask[first, start : start + size].any(0))
            rows = start, min(start + size, mask.shape[1])
            tiles.append((*rows, int(keys[0]), int(keys[-1]) + 1))
        found.append((slice(None) if of_all else slice(first, stop), tiles))
    return found


def beside(case: cases.Case) -> None:
    """On TensorFlow: run the case once for each line that is read, and answer each by a line."""
    import tensorflow as tf

    import keras_headmask as hm

    spec = case.spec()
    inputs = {name: tf.constant(x) for name, x in case.data().items()}
    qkv = list(map(tf.constant, case.operands()))
    call = tf.function(
        lambda *x: hm.dot_product_attention(*x, mask_spec=spec, mask_inputs=inputs or None)
    )
    for _ in sys.stdin:
        call(*qkv).numpy()
        print(flush=True)


def measured(case: cases.Case, step: str, repetitions: int, quick: bool) -> dict[str, Any]:
    """Seconds of each arm, their ratios, and how far apart the results are."""
    import jax

    arms, given = functions(case, step)
    alive = sees_something(case.mask(case.data())) if step == "forward" else True
    results = {
        name: [alive * x for x in jax.tree.leaves(arm(*given))] for name, arm in arms.items()
    }
    differences = {
        name: max(
            float(abs(x - y).max() / max(1, abs(y).max()))
            for x, y in zip(results[name], results[STOCK], strict=True)
        )
        for name in (OURS, MAKES_MASK)
    }
    del results
    runs = {name: lambda arm=arm: jax.block_until_ready(arm(*given)) for name, arm in arms.items()}
    if step == "forward":
        command = [sys.executable, "-m", "benchmarks.jax_backend", "--beside", case.name]
        command += ["--quick"] if quick else []
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # (Threads that wait are not to take the time of this process.)
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        with subprocess.Popen(command, env=environment, **pipes) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            ask, answered = other.stdin, other.stdout

            def of_other() -> None:
                print(file=ask, flush=True)
                assert answered.readline(), "the process of TensorFlow ended: see above"

            found = measure.interleaved(runs | {TENSORFLOW: of_other}, repetitions)
            ask.close()
    else:
        found = measure.interleaved(runs, repetitions)
    seconds = found["seconds"]
    ratios = {f"{OURS} / {name}": seconds[OURS] / seconds[name] for name in seconds if name != OURS}
    return found | {"differences": differences, "ratios": ratios}


if __name__ == "__main__":
    main()
