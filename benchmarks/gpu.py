"""`python -m benchmarks.gpu`: whether answers are right on a card, and how fast, by backend.

Each backend and case is a process with a time limit, and the record is written after each, so that
what is stopped costs what was not measured yet alone. Ours stands beside the backend's own function
with the whole mask, and FlexAttention, in bfloat16, forward and with gradients. A time is
the median of calls, each of which is waited for. `--quick` runs on a CPU, in tiny sizes.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import backends, cases, machine, measure

OUT = Path(__file__).parent / "results" / "gpu"
NAMES = "window", "documents", "bert", "mixed"  # in the order of what is wanted most
BATCH, ANSWERS = 8, "answers"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts such as `torch, window`, with ; between")
    parser.add_argument("--seconds", type=int, default=70, help="the limit of a part")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of record and report")
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(measured(options.part.split(", ")[1], options.quick)))
        return
    record = machine.describe("benchmarks.gpu", options.quick) | {"parts": {}}
    names = (ANSWERS, "window") if options.quick else (ANSWERS, *NAMES)
    every = [f"{backend}, {name}" for name in names for backend in backends.BACKENDS]
    for part in options.only.split(";") if options.only else every:
        print(part, file=sys.stderr, flush=True)
        record["parts"][part] = _run(part, options)
        machine.write(options.out / "record.json", record)
        (options.out / "RESULTS.md").write_text(markdown(record), encoding="utf-8")


def _run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the part found, how long it took, and how it ended."""
    start, figures = time.monotonic(), {}
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, *["--quick"] * options.quick]
    limit = 600 if options.quick else options.seconds
    environment = os.environ | {
        "KERAS_BACKEND": part.split(", ")[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        pipes = {"capture_output": True, "text": True}
        done = subprocess.run(command, env=environment, timeout=limit, **pipes)
        lines = done.stderr.strip().splitlines()
        ended = "whole" if done.returncode == 0 else f"exit {done.returncode}: {lines[-1:]}"
        figures = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        ended = f"stopped after {limit} s"
    return {"ended": ended, "seconds": round(time.monotonic() - start, 1), "figures": figures}


def measured(name: str, quick: bool) -> dict[str, Any]:
    """Of a case: milliseconds by step and arm. Of `ANSWERS`: differences from the backend's own."""
    if name == ANSWERS:
        small = [*cases.all_cases(quick=True).values(), cases.window_case(1024, quick=True)]
        return {
            f"{case.name} {case.length}, {step}, {dtype}": _differences(case, step, dtype)
            for case in small
            for step in backends.STEPS
            for dtype in ("float32", "bfloat16")
        }
    case = dataclasses.replace(cases.all_cases(quick)[name], batch=2 if quick else BATCH)
    found = {}
    for step in backends.STEPS:
        calls = backends.arms(case, step, "bfloat16")
        if quick:
            calls = {arm: calls[arm] for arm in ("ours", "stock")}
        result = measure.interleaved(calls, 2 if quick else 20)
        found[step] = {arm: 1e3 * seconds for arm, seconds in result["seconds"].items()}
        found[step] |= result["errors"]
    return found


def _differences(case: cases.Case, step: str, dtype: str) -> dict[str, Any]:
    """From the answer in float32; the backend's own shows what the dtype alone costs."""
    wanted = backends.arms(case, step)["stock"]()
    calls = backends.arms(case, step, dtype)
    found: dict[str, Any] = {}
    for arm in ("ours", "stock"):
        try:
            found[arm] = backends.difference(calls[arm](), wanted)
        except Exception as error:  # whatever an engine raises belongs in the record
            found[arm] = measure.message(error)
    return found


def markdown(record: dict[str, Any]) -> str:
    accelerator = record["machine"]["accelerator"] or record["machine"]["processor"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"# On a card: {accelerator}", "", f"{versions}; {record['date']}; "]
    lines[-1] += f"`{record['command']}`."
    for name, part in record["parts"].items():
        lines += ["", f"## {name}", "", f"{part['seconds']} s, {part['ended']}.", ""]
        for what, figures in part["figures"].items():
            told = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in figures.values())
            lines.append(f"- {what}: " + ", ".join(map(" ".join, zip(figures, told, strict=True))))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
