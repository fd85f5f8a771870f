"""`python -m benchmarks.torch_backend`: the PyTorch backend beside what its users would pick.

Attention of the same operands by this package on Keras' PyTorch backend, as it is and compiled by
`torch.compile`, by PyTorch's `scaled_dot_product_attention` with the whole mask, and by compiled
FlexAttention, its block mask made before; ours makes its own in each call. The peers get their
operands heads first, the layout that suits them best; "flex, heads last" gets those of a layer, as
ours do. The training case is forward and gradients of the window; FlexAttention has no backward
pass on a CPU.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # as in `workers`

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases, machine, measure, peers_torch

RECORD = Path(__file__).parent / "results" / "torch_backend.json"
CASES = ("bert", "window", "documents", "mixed")
TRAINING = "training"
OURS = {"ours": "", "ours, compiled": ", compiled"}  # and how the ratios name them
# Ours over theirs.
COMPILED = {"flex": 1.15, "flex, heads last": 1.05}
GOALS = {"window / sdpa": 0.25} | {
    f"{name}, compiled / {peer}": most for name in CASES for peer, most in COMPILED.items()
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join((*CASES, TRAINING)), help="by commas")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-flex", action="store_true", help="no compiler is needed then")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    repetitions = 2 if options.quick else options.repetitions
    peers_torch.pin_threads(options.threads)
    every, results = cases.all_cases(options.quick), {}
    for name in options.only.split(","):
        try:
            if name == TRAINING:
                results[name] = training(every["window"], repetitions)
            else:
                # Each rule is a C++ build of its own: one will do where no time is looked at.
                with_flex = not options.no_flex and (not options.quick or name == "documents")
                results[name] = attention(every[name], repetitions, with_flex)
        except Exception as error:  # one case must not cost the others
            results[name] = {"errors": {"all": measure.message(error)}}
        print(name, json.dumps(results[name]), flush=True)
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.torch_backend", *sys.argv[1:]]),
        "quick": options.quick,
        "threads": options.threads,
        "cases": results,
        "ratios": ratios(results),
        "goals": GOALS,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["ratios"], indent=2))


def ratios(results: dict[str, dict]) -> dict[str, float]:
    """Ours over each peer, by case."""
    found = {}
    for name, result in results.items():
        seconds = result.get("seconds", {})
        for peer in set(seconds) - set(OURS):
            for own, how in OURS.items():
                if own in seconds:
                    found[f"{name}{how} / {peer}"] = seconds[own] / seconds[peer]
    return dict(sorted(found.items()))


def operands(case: cases.Case) -> list[Any]:
    """Query, key and value `(B, T, H, D)`, as Keras' layers have them."""
    return [torch.from_numpy(x) for x in case.operands()]


def ours(case: cases.Case, given: list[Any]) -> Any:
    import keras_headmask as hm

    inputs = {name: torch.from_numpy(x) for name, x in case.data().items()} or None
    spec = case.spec()
    return lambda: hm.dot_product_attention(*given, mask_spec=spec, mask_inputs=inputs)


@torch.no_grad()
def attention(case: cases.Case, repetitions: int, with_flex: bool) -> dict[str, Any]:
    """Attention alone, forward."""
    of_peers, given = peers_torch.heads_first(case, "float32"), operands(case)
    allowed = torch.from_numpy(case.mask(case.data()))
    attend = ours(case, given)
    functions = {
        "ours": attend,
        "sdpa": lambda: scaled_dot_product_attention(*of_peers, attn_mask=allowed),
    }
    if with_flex:
        flex, blocks = peers_torch.compiled_flex(), peers_torch.block_mask(case)
        functions["flex"] = lambda: flex(*of_peers, block_mask=blocks)
        as_views = [x.transpose(1, 2) for x in given]
        functions["flex, heads last"] = lambda: flex(*as_views, block_mask=blocks)
        functions["ours, compiled"] = torch.compile(attend, dynamic=False)
    result = measure.interleaved(functions, repetitions)
    alive, wanted = allowed.any(-1)[..., None], functions["sdpa"]()
    result["difference"] = max(
        float(torch.where(alive, functions[own]().transpose(1, 2) - wanted, 0.0).abs().max())
        for own in set(OURS) & set(result["seconds"])
    )
    return result


def training(case: cases.Case, repetitions: int) -> dict[str, Any]:
    """Forward and gradients."""
    given = [x.requires_grad_() for x in operands(case)]
    of_peers = [x.requires_grad_() for x in peers_torch.heads_first(case, "float32")]
    allowed = torch.from_numpy(case.mask(case.data()))
    attend = ours(case, given)

    def step() -> tuple:
        return torch.autograd.grad(attend(), given, torch.ones(case.shape))

    def step_of_sdpa() -> tuple:
        context = scaled_dot_product_attention(*of_peers, attn_mask=allowed)
        return torch.autograd.grad(context, of_peers, torch.ones_like(context))

    result = measure.interleaved({"ours": step, "sdpa": step_of_sdpa}, repetitions)
    pairs = zip(step(), step_of_sdpa(), strict=True)
    result["difference"] = max(float((a.transpose(1, 2) - b).abs().max()) for a, b in pairs)
    return result


if __name__ == "__main__":
    main()
