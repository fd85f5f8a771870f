"""`python -m benchmarks.gpu`: the same cases on a CUDA machine, on JAX and PyTorch.

Ours as it chooses by itself, dense, and tiled in several tile sizes; the peers are
cuDNN attention and SDPA with a mask, and compiled FlexAttention. bfloat16 by default. Without a GPU
`--quick` shows that it runs.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cases, machine, measure, workers


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.worker:
        task = json.loads(options.worker)
        Path(options.json).write_text(json.dumps(_serve(task)))
        return
    names = options.only.split(",") if options.only else list(cases.all_cases())
    record: dict[str, Any] = {
        **machine.describe(),
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "dtype": options.dtype,
        "quick": options.quick,
        "cases": {name: {} for name in names},
    }
    for name_group in [names] if options.quick else [[name] for name in names]:
        for backend in options.backends.split(","):
            print(f"{', '.join(name_group)}: {backend}", file=sys.stderr, flush=True)
            task = {
                "backend": backend,
                "names": name_group,
                "dtype": options.dtype,
                "quick": options.quick,
                "repetitions": options.repetitions or (2 if options.quick else 20),
                "tiles": [64] if options.quick else [int(x) for x in options.tiles.split(",")],
                "threads": os.cpu_count(),
            }
            # JAX would take most of the memory at once, PyTorch's share too.
            told = workers.run(
                task,
                module="benchmarks.gpu",
                KERAS_BACKEND=backend,
                XLA_PYTHON_CLIENT_PREALLOCATE="false",
            )
            for name in name_group:
                record["cases"][name][backend] = told.get(name, {"errors": told.get("errors")})
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    (options.out / "RESULTS.md").write_text(_markdown(record), encoding="utf-8")


def _serve(task: dict[str, Any]) -> dict[str, Any]:
    every = cases.all_cases(task["quick"])
    on_backend = _on_jax if task["backend"] == "jax" else _on_torch
    results: dict[str, Any] = {}
    for name in task["names"]:
        try:
            results[name] = on_backend(every[name], task)
        except Exception as error:  # one case must not cost the others
            results[name] = {"errors": {"all": measure.message(error)}}
    return results


def _ours(case: cases.Case, tiled: bool | None, tile: int | None = None) -> Callable:
    """Ours as a function of operands and mask inputs; the tile counts while it is traced."""
    import keras_headmask as hm
    from keras_headmask.attention.tuning import tuned

    spec = case.spec()
    sizes = {} if tile is None else {"local_tile": tile, "wide_tile": tile}

    def attend(query: Any, key: Any, value: Any, inputs: Any) -> Any:
        with tuned(**sizes):
            return hm.dot_product_attention(
                query, key, value, mask_spec=spec, mask_inputs=inputs or None, tiled=tiled
            )

    return attend


def _every_way(case: cases.Case, tiles: list[int]) -> dict[str, Callable]:
    ways = {f"ours, tiles of {tile}": _ours(case, True, tile) for tile in tiles}
    return {"ours": _ours(case, None), "ours, dense": _ours(case, False), **ways}


def _on_jax(case: cases.Case, task: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    operands = [jnp.asarray(x, task["dtype"]) for x in case.operands()]
    data = case.data()
    inputs = {name: jnp.asarray(array) for name, array in data.items()}
    allowed = case.mask(data)
    mask = jnp.asarray(allowed)
    functions = {}
    for name, attend in _every_way(case, task["tiles"]).items():
        functions[name] = functools.partial(jax.jit(attend), *operands, inputs)
    for implementation in ("xla", "cudnn"):
        if implementation == "cudnn" and jax.default_backend() != "gpu":
            continue
        attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        theirs = jax.jit(lambda q, k, v, mask, attend=attend: attend(q, k, v, mask=mask))
        functions[f"jax.nn, {implementation}"] = functools.partial(theirs, *operands, mask)
    functions = {
        name: lambda function=function: jax.block_until_ready(function())
        for name, function in functions.items()
    }
    result = measure.interleaved(functions, task["repetitions"])
    outputs = _outputs(functions, result, lambda x: np.asarray(x, "float32"))
    return result | _differences(outputs, "jax.nn, xla", allowed)


def _on_torch(case: cases.Case, task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from benchmarks import peers_torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(task["threads"])
    torch._dynamo.reset()
    heads_first = peers_torch.heads_first(case, task["dtype"], device)
    operands = [x.transpose(1, 2).contiguous() for x in heads_first]
    data = case.data()
    inputs = {name: torch.from_numpy(array).to(device) for name, array in data.items()}
    allowed = case.mask(data)
    mask = torch.from_numpy(allowed).to(device)
    functions: dict[str, Callable] = {}
    for name, attend in _every_way(case, task["tiles"]).items():
        functions[name] = functools.partial(attend, *operands, inputs)
        if not task["quick"]:  # (on a CPU it is C++ to be built for each)
            compiled = torch.compile(attend, dynamic=False)
            functions[f"{name}, compiled"] = functools.partial(compiled, *operands, inputs)
    functions |= _torch_peers(heads_first, mask, device)
    if not task["quick"] or case.name == "window":
        flex = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
        blocks = peers_torch.block_mask(case, device)
        functions["flex"] = functools.partial(flex, *heads_first, block_mask=blocks)
        if case.reads_data:
            make = torch.compile(peers_torch.create_block_mask, dynamic=False)
            maker = peers_torch.block_mask_maker(case, device, make)
            functions["flex with its mask, compiled"] = lambda: flex(
                *heads_first, block_mask=maker()
            )

    def finished(function: Callable) -> Any:
        with torch.no_grad():
            result = function()
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    functions = {name: functools.partial(finished, f) for name, f in functions.items()}
    result = measure.interleaved(functions, task["repetitions"], warm_up=3)

    def as_array(x: Any) -> np.ndarray:
        return x.float().cpu().numpy()

    outputs = _outputs(functions, result, as_array)
    for name in outputs:
        if not name.startswith("ours"):
            outputs[name] = np.swapaxes(outputs[name], 1, 2)
    return result | _differences(outputs, "sdpa", allowed)


def _torch_peers(operands: list[Any], mask: Any, device: str) -> dict[str, Callable]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    sdpa = functools.partial(scaled_dot_product_attention, *operands, attn_mask=mask)

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa()

    return {"sdpa": sdpa, **({"sdpa, cudnn": cudnn} if device == "cuda" else {})}


def _outputs(functions: dict, result: dict, as_array: Callable) -> dict[str, np.ndarray]:
    return {name: as_array(functions[name]()) for name in result["seconds"]}


def _differences(
    outputs: dict[str, np.ndarray], reference: str, allowed: np.ndarray
) -> dict[str, Any]:
    """The largest difference of each output from the reference, over rows that see something."""
    if reference not in outputs:
        return {"differences": {}}
    expected = outputs[reference]
    alive = np.swapaxes(allowed.any(-1), 1, 2)[..., None]  # (B or 1, T, H or 1, 1)
    return {
        "differences": {
            name: float(np.abs(np.where(alive, output - expected, 0)).max())
            for name, output in outputs.items()
            if name != reference
        }
    }


def _markdown(record: dict[str, Any]) -> str:
    accelerator = record["machine"]["accelerator"] or record["machine"]["processor"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"# Benchmarks: {accelerator}", ""]
    lines += [f"{record['dtype']}; {versions}; {record['date']}; `{record['command']}`.", ""]
    for name, backends in record["cases"].items():
        lines += [f"## {name}", "", "| backend | | ms | difference |", "|---|---|---|---|"]
        failed = []
        for backend, told in backends.items():
            differences = told.get("differences", {})
            for what, seconds in sorted(told.get("seconds", {}).items(), key=lambda kv: kv[1]):
                far = f"{differences[what]:.1e}" if what in differences else "-"
                lines.append(f"| {backend} | {what} | {seconds * 1e3:.3g} | {far} |")
            for what, text in (told.get("errors") or {}).items():
                failed.append(f"Failed: {backend}, {what}: {' '.join(text.split())}")
        lines += ["", *failed, ""]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, 2 repetitions: does it run?")
    add("--only", default="", help="cases, comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results" / "gpu")
    add("--backends", default="jax,torch")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--repetitions", type=int)
    add("--tiles", default="64,128,256,512", help="tile sizes, comma-separated")
    add("--worker", help=argparse.SUPPRESS)
    add("--json", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
