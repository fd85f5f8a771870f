"""`python -m benchmarks.backends`: rules on JAX and PyTorch beside what their users would call.

Attention of the same operands, forward and with the gradients of query, key and value: ours, which
makes its mask in each call, and the backend's own function with the whole mask, made before. JAX
compiles both. On PyTorch ours is measured as it is and compiled; compiled FlexAttention stands
beside where a C++ compiler is, its block mask made before. Ratios are medians of runs in turns.
Each backend is a process of its own, which `benchmarks.gpu` starts on a card, too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cases, machine, measure

RECORD = Path(__file__).parent / "results" / "backends.json"
BACKENDS, STEPS = ("jax", "torch"), ("forward", "gradient")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9, help="of each function, in turns")
    parser.add_argument("--only", default=",".join(cases.all_cases()), help="cases, by commas")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--no-flex", action="store_true", help="no C++ compiler is needed then")
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.backend:
        print(json.dumps(of_backend(options)))
        return
    record = machine.describe("benchmarks.backends", options.quick) | {"backends": {}}
    for backend in BACKENDS:
        command = [sys.executable, "-m", "benchmarks.backends", *sys.argv[1:], "--backend", backend]
        environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # as in `workers`
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        record["backends"][backend] = json.loads(done.stdout.splitlines()[-1])
    machine.write(options.out, record)
    for backend, found in record["backends"].items():
        for name, steps in found.items():
            for step, of in steps.items():
                ratios = ", ".join(f"{x} {ratio:.2f}" for x, ratio in of["ratios"].items())
                print(f"{backend}, {name}, {step}: {ratios}")


def of_backend(options: argparse.Namespace) -> dict[str, dict]:
    """Of each case and step: seconds, ratios, and how far ours is from the backend's own."""
    every, found = cases.all_cases(options.quick), {}
    repetitions = 2 if options.quick else options.repetitions
    for name in options.only.split(","):
        found[name] = {}
        for step in STEPS:
            calls = arms(every[name], step)
            # Each rule is a C++ build of its own: one will do where no time is looked at.
            if options.no_flex or (options.quick and name != "documents"):
                calls.pop("flex", None)
            answers = {arm: calls[arm]() for arm in ("ours", "stock")}
            result = measure.interleaved(calls, repetitions)
            result["difference"] = difference(*answers.values())
            seconds = result["seconds"]
            result["ratios"] = {
                f"{own} / {other}": seconds[own] / seconds[other]
                for own in seconds
                for other in seconds
                if own.startswith("ours") and not other.startswith("ours")
            }
            found[name][step] = result
    return found


def arms(case: cases.Case, step: str, dtype: str = "float32") -> dict[str, Callable[[], list]]:
    """Calls by name: each gives the context, or gradients, and waits until they are there."""
    import keras

    make = _of_jax if keras.backend.backend() == "jax" else _of_torch
    return make(case, step, dtype)


def difference(ours: list, stock: list) -> float:
    """The largest one, over the largest value of stock's (or 1)."""
    from keras import ops

    pairs = (
        [ops.convert_to_numpy(ops.cast(x, "float32")) for x in pair]
        for pair in zip(ours, stock, strict=True)
    )
    return max(float(abs(x - y).max() / max(1, abs(y).max())) for x, y in pairs)


def _alive(mask: np.ndarray) -> np.ndarray:
    """The rows `(B, T, H, 1)` that see some key: of others each library has its own opinion."""
    return mask.any(-1).transpose(0, 2, 1)[..., None]


def _attend(case: cases.Case, inputs: dict[str, Any]) -> Callable:
    import keras_headmask as hm

    spec = case.spec()
    return lambda *qkv: hm.dot_product_attention(*qkv, mask_spec=spec, mask_inputs=inputs or None)


def _of_jax(case: cases.Case, step: str, dtype: str) -> dict[str, Callable[[], list]]:
    import jax
    import jax.numpy as jnp

    data = case.data()
    mask = case.mask(data)
    whole, alive = jnp.asarray(mask), jnp.asarray(_alive(mask), dtype)
    given = [jnp.asarray(x, dtype) for x in case.operands()]
    inputs = {name: jnp.asarray(x) for name, x in data.items()}

    def compiled(attend: Callable) -> Callable[[], list]:
        def forward(*qkv: Any) -> list:
            return [alive * attend(*qkv)]

        def gradient(*qkv: Any) -> list:
            _, pull = jax.vjp(lambda *x: forward(*x)[0], *qkv)
            return list(pull(jnp.broadcast_to(alive, qkv[0].shape)))

        call = jax.jit(forward if step == "forward" else gradient)
        return lambda: jax.block_until_ready(call(*given))

    stock = {"stock": lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=whole)}
    return {name: compiled(x) for name, x in {"ours": _attend(case, inputs), **stock}.items()}


def _of_torch(case: cases.Case, step: str, dtype: str) -> dict[str, Callable[[], list]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from benchmarks import peers_torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = case.data()
    mask = case.mask(data)
    whole, alive = (torch.from_numpy(x).to(device) for x in (mask, _alive(mask)))
    heads_first = peers_torch.heads_first(case, dtype, device)
    heads_last = [x.transpose(1, 2).contiguous() for x in heads_first]
    inputs = {name: torch.from_numpy(x).to(device) for name, x in data.items()}
    ours = _attend(case, inputs)

    def runs(attend: Callable, is_ours: bool) -> Callable[[], list]:
        operands = heads_last if is_ours else heads_first
        seen = alive if is_ours else alive.transpose(1, 2)

        def run() -> list:
            if step == "forward":
                with torch.no_grad():
                    made = [attend(*operands) * seen]
            else:
                qkv = [x.detach().requires_grad_() for x in operands]
                upstream = seen.expand(qkv[0].shape).to(qkv[0].dtype)
                made = list(torch.autograd.grad(attend(*qkv), qkv, upstream))
            if device == "cuda":
                torch.cuda.synchronize()
            return [x if is_ours else x.transpose(1, 2) for x in made]

        return run

    calls = {
        "ours": runs(ours, True),
        "ours, compiled": runs(torch.compile(ours, dynamic=False), True),
        "stock": runs(lambda *x: scaled_dot_product_attention(*x, attn_mask=whole), False),
    }
    if step == "forward" or device == "cuda":  # FlexAttention has no gradient on a CPU
        flex, blocks = peers_torch.compiled_flex(), peers_torch.block_mask(case, device)
        calls["flex"] = runs(lambda *x: flex(*x, block_mask=blocks), False)
    return calls


if __name__ == "__main__":
    main()
