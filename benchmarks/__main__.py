"""`python -m benchmarks`: every case, one process per framework, then the record and its report."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import cases, machine, report, scaling, workers

_LAYERS = ("training", "layer", "layer-window")
_BY_LENGTH = ("memory", "scaling")


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.worker:
        workers.serve(json.loads(options.worker), options.json)
        return
    record_file = options.out / "record.json"
    if options.report:
        report.write(json.loads(record_file.read_text()), options.out)
        return
    known = [*cases.all_cases(), *_LAYERS, *_BY_LENGTH]
    names = options.only.split(",") if options.only else known
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--only knows {', '.join(known)}. Received: {', '.join(unknown)}.")
    record = measure_all(names, options)
    record["ratios"] = report.ratios(record)
    machine.write(record_file, record)
    report.write(record, options.out)
    print(report.goal_table(record))


def measure_all(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The whole record but its ratios."""
    common = _common(options)
    record: dict[str, Any] = {
        **machine.describe("benchmarks", options.quick),
        "threads": options.threads,
        "dtype": options.dtype,
        "onednn": options.onednn,
        "cases": {},
    }
    alone = [name for name in names if name not in _BY_LENGTH]
    # Back to back for each case; in one process for all where no time is looked at.
    groups = [alone] if options.quick else [[name] for name in alone]
    for group in filter(None, groups):
        for framework, variable in _runs(options):
            _tell(f"{', '.join(group)}: {framework}")
            task = {"framework": framework.removesuffix(report.OFF), "names": group, **common}
            found = workers.run(task, TF_ENABLE_ONEDNN_OPTS=variable)
            for name in group:
                result = found.get(name, {"errors": found["errors"]} if "errors" in found else None)
                if result is not None:
                    record["cases"].setdefault(name, {})[framework] = result
    record |= _by_length([name for name in _BY_LENGTH if name in names], options)
    if "scaling" in record:
        record["exponents"] = {
            f"{step}, {field}": scaling.exponent(
                [row for row in record["scaling"] if row["peer"] == "ours" and row["step"] == step],
                field,
                first=1 if options.quick else 4096,
            )
            for step in ("forward", "training")
            for field in ("seconds", "first_peak_mib")
        }
    return record


def _runs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Each framework, TensorFlow with oneDNN and without; and `TF_ENABLE_ONEDNN_OPTS` for it."""
    runs = []
    for framework in options.peers.split(","):
        states = options.onednn.split(",") if framework == "keras" else ["on"]
        runs += [(framework + report.OFF * (x == "off"), str(int(x == "on"))) for x in states]
    return runs


def _by_length(names: list[str], options: argparse.Namespace) -> dict[str, list[dict]]:
    """The rows of memory and scaling: a process for each, or one for all with `quick`."""
    jobs_of = {"memory": scaling.memory_jobs, "scaling": scaling.scaling_jobs}
    jobs = [(name, job) for name in names for job in jobs_of[name](options.quick)]
    rows: dict[str, list[dict]] = {name: [] for name in names}
    for group in filter(None, [jobs] if options.quick else [[pair] for pair in jobs]):
        _tell(", ".join(f"{name}: {job.peer} {job.step} {job.length}" for name, job in group))
        task = {"framework": "keras", "jobs": [job for _, job in group], **_common(options)}
        results = workers.run(task)["rows"]
        for (name, _), row in zip(group, results, strict=True):
            rows[name].append(row)
    return rows


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "quick": options.quick,
        "repetitions": options.repetitions or (2 if options.quick else 9),
        "threads": options.threads,
    }


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    here = Path(__file__).parent
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, 2 repetitions: does it run?")
    add("--only", default="", help="cases, comma-separated")
    add("--out", type=Path, default=here / "results", help="folder of record and report")
    add("--peers", default="keras,torch", help="frameworks, comma-separated")
    add("--onednn", default="on,off", choices=("on,off", "on", "off"), help="of the cases")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--repetitions", type=int, help="at least 7 for a record; 9 by default")
    add("--threads", type=int, default=2)
    add("--report", action="store_true", help="write the report again from the record in --out")
    add("--worker", help=argparse.SUPPRESS)
    add("--json", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
