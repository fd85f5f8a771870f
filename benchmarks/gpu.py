"""`python -m benchmarks.gpu`: what the card gives, whether answers are right there, and how fast.

Each part is a process with a time limit of its own, and writes its JSON after each figure, so that
a part that is stopped, or a machine that is gone, costs what was not measured yet alone. The limits
of all parts are less than ten minutes. `--quick` runs each on a CPU, in tiny sizes.

Times are of the card: CUDA events around many calls, the sum of all kernels by the profiler, and
beside them milliseconds of the host, and launches, of a call.
"""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import cases, machine, measure

OUT = Path(__file__).parent / "results" / "gpu"


class Part(NamedTuple):
    """`function` of `module` gets a `Record`; `seconds` is its limit."""

    module: str
    function: str
    seconds: int


PARTS = {
    "card": Part("gpu_torch", "card", 30),
    "torch-semantics": Part("gpu_torch", "semantics", 110),
    "torch": Part("gpu_torch", "attention", 160),
    "torch-training": Part("gpu_torch", "training", 100),
    "jax": Part("gpu_jax", "attention", 140),
    "proxies": Part("gpu_torch", "proxies", 40),
}


class Record:
    """The JSON file of a part, which is written with each figure."""

    def __init__(self, file: Path, quick: bool) -> None:
        self.file, self.quick, self.figures = file, quick, {}

    def put(self, *path: str, value: Any) -> None:
        place: dict[str, Any] = self.figures
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
        # (Never half of a file: a part may be stopped at any moment.)
        made = self.file.with_suffix(".new")
        made.write_text(json.dumps(self.figures))
        os.replace(made, self.file)

    def attempt(self, *path: str, do: Callable[[], Any]) -> None:
        """What `do()` gives, put there; or its error, which costs the others nothing."""
        try:
            value = do()
        except Exception as error:  # whatever an engine raises belongs in the record
            value = {"error": measure.message(error)}
        self.put(*path, value=value)


def sized(quick: bool) -> Iterator[cases.Case]:
    """The cases in the order of what is wanted most: B = 8, then 16,384 positions, then B = 1."""
    every = cases.all_cases(quick)
    names = ("window",) if quick else ("window", "documents", "bert", "mixed", "longformer")
    for batch in (2,) if quick else (8, 1):
        for name in names:
            yield dataclasses.replace(every[name], batch=batch)
        if batch != 1 and not quick:
            for name in ("window", "documents"):
                yield dataclasses.replace(every[name], length=16384)


def ours(spec: Any, tiled: bool | None = None) -> Callable:
    """Attention under `spec`, of query, key, value and mask inputs."""
    import keras_headmask as hm

    def attend(query: Any, key: Any, value: Any, inputs: Any) -> Any:
        return hm.dot_product_attention(
            query, key, value, mask_spec=spec, mask_inputs=inputs or None, tiled=tiled
        )

    return attend


def titled(case: cases.Case) -> str:
    return f"{case.name}, {case.batch} x {case.length}"


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.part:
        part = PARTS[options.part]
        function = getattr(importlib.import_module(f"benchmarks.{part.module}"), part.function)
        function(Record(options.json, options.quick))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        **machine.describe(),
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "quick": options.quick,
        "parts": {},
    }
    for name in options.only.split(",") if options.only else PARTS:
        print(name, file=sys.stderr, flush=True)
        record["parts"][name] = _run(name, options.quick)
        (options.out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
        (options.out / "RESULTS.md").write_text(_markdown(record), encoding="utf-8")


def _run(name: str, quick: bool) -> dict[str, Any]:
    """What the part wrote, how long it took, and how it ended."""
    environment = os.environ | {
        "KERAS_BACKEND": "jax" if "jax" in PARTS[name].module else "torch",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        file, start = Path(folder) / "part.json", time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--json", str(file)]
        try:
            done = subprocess.run(
                command + ["--quick"] * quick,
                env=environment,
                timeout=600 if quick else PARTS[name].seconds,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
            )
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            ended = "whole" if done.returncode == 0 else f"exit {done.returncode}: {lines[-1:]}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {PARTS[name].seconds} s"
        figures = json.loads(file.read_text()) if file.exists() else {}
    return {"ended": ended, "seconds": round(time.monotonic() - start, 1), "figures": figures}


def _markdown(record: dict[str, Any]) -> str:
    accelerator = record["machine"]["accelerator"] or record["machine"]["processor"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"# On a card: {accelerator}", "", f"{versions}; {record['date']}; "]
    lines[-1] += f"`{record['command']}`."
    for name, part in record["parts"].items():
        lines += ["", f"## {name}", "", f"{part['seconds']} s, {part['ended']}."]
        for group, figures in part["figures"].items():
            lines += ["", f"- {group}"]
            for what, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
                lines.append(f"    - {what}: {_short(value)}".replace(" : ", " "))
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(x)}" for key, x in value.items())
    return f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, a few calls, on a CPU: does it run?")
    add("--only", default="", help=f"parts, with commas between: {', '.join(PARTS)}")
    add("--out", type=Path, default=OUT)
    add("--part", help=argparse.SUPPRESS)
    add("--json", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
