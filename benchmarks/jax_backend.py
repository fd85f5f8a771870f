"""`python -m benchmarks.jax_backend`: rules on JAX beside `jax.nn.dot_product_attention`.

A window and packed documents over 4,096 tokens of 16 heads of size 64, in float32, compiled; the
forward pass, and it with the gradients of queries, keys and values. JAX' own function is given the
whole mask, and makes it when it is called in the arm "with its mask". Ratios are medians of runs
that take turns.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "jax"

from benchmarks import cases, machine, measure

RECORD = Path(__file__).parent / "results" / "jax_backend.json"
NAMES = "window", "documents"
OURS, STOCK, MAKES_MASK = "ours", "stock", "stock with its mask"
STEPS = "forward", "gradient"
# The most that ours may take of the time of stock, forward.
GOALS = {"window": 0.20, "documents": 0.15}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9, help="of each function, in turns")
    parser.add_argument("--only", default=",".join(NAMES), help="cases, with commas between")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    repetitions = 2 if options.quick else options.repetitions
    wanted = cases.all_cases(options.quick)
    found = {
        name: {step: measured(wanted[name], step, repetitions) for step in STEPS}
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
    whole = jnp.asarray(case.mask(data))

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
        return jax.jit(jax.grad(lambda *given: jnp.sum(attend(*given) ** 2), argnums=(2, 3, 4)))

    arms = {OURS: ours, STOCK: stock, MAKES_MASK: with_its_mask}
    given = inputs, whole, *map(jnp.asarray, case.operands())
    return {name: compiled(attend) for name, attend in arms.items()}, given


def measured(case: cases.Case, step: str, repetitions: int) -> dict[str, Any]:
    """Seconds of each arm, their ratios, and how far apart the results are."""
    import jax

    arms, given = functions(case, step)
    results = {name: jax.tree.leaves(arm(*given)) for name, arm in arms.items()}
    differences = {
        name: max(
            float(abs(x - y).max() / max(1, abs(y).max()))
            for x, y in zip(results[name], results[STOCK], strict=True)
        )
        for name in (OURS, MAKES_MASK)
    }
    del results
    runs = {name: lambda arm=arm: jax.block_until_ready(arm(*given)) for name, arm in arms.items()}
    found = measure.interleaved(runs, repetitions)
    seconds = found["seconds"]
    ratios = {f"{OURS} / {name}": seconds[OURS] / seconds[name] for name in (STOCK, MAKES_MASK)}
    return found | {"differences": differences, "ratios": ratios}


if __name__ == "__main__":
    main()
