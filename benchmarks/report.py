"""A record becomes ratios and a Markdown report.

`python -m benchmarks.report` writes the table of docs/performance.md from all records.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

_INTRODUCTION = (
    "Ratios are ours over theirs, so below 1 is faster or smaller. Attention alone, forward, "
    "{dtype}, unless said otherwise."
)
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_MARKS = "<!-- record:start -->\n", "\n<!-- record:end -->"
_LAYOUTS = (
    "Operands are `(B, T, H, D)` for Keras and `(B, H, T, D)` for PyTorch, each its "
    "own layout. FlexAttention's block mask is made once. A peak is what a call "
    "adds to the memory in use before it; the context that it returns is part of it."
)


OFF = ", oneDNN off"  # ends what TensorFlow did without it; all else is with it


class Goal(NamedTuple):
    """`ratio` names a measured ratio, which is to be at most `limit`."""

    case: str
    against: str
    ratio: str
    limit: float


GOALS = (
    Goal("BERT-large layer", "stock Keras", "bert / stock", 0.80),
    Goal("BERT-large layer", "FlexAttention", "bert / flex", 0.80),
    Goal("window, T=4096", "stock Keras", "window / stock", 0.16),
    Goal("window, T=4096", "FlexAttention", "window / flex", 0.60),
    Goal("packed documents, T=4096", "stock Keras", "documents / stock", 0.10),
    Goal("packed documents, T=4096", "FlexAttention", "documents / flex", 0.60),
    Goal("mixed heads, T=2048", "stock Keras", "mixed / stock", 0.33),
    Goal("mixed heads, T=2048", "FlexAttention", "mixed / flex", 0.45),
    Goal("peak memory, window, T=8192", "stock Keras", "memory / stock", 0.02),
    Goal("training step, window, static T", "stock Keras", "training / stock", 0.15),
    Goal("training step, window, unknown T", "stock Keras", "training, unknown T / stock", 0.22),
    Goal("unknown T, window", "ours, static T", "window, unknown T / static T", 1.06),
    Goal("layer with `Full()`", "stock layer", "layer, Full() / stock", 1.02),
    Goal("layer without a spec", "stock layer", "layer, no spec / stock", 1.02),
    Goal("BERT-large layer, oneDNN off", "stock Keras", "bert, oneDNN off / stock", 0.70),
    Goal("window, T=4096, oneDNN off", "stock Keras", "window, oneDNN off / stock", 0.16),
    Goal("packed documents, oneDNN off", "stock Keras", "documents, oneDNN off / stock", 0.10),
    Goal("mixed heads, oneDNN off", "stock Keras", "mixed, oneDNN off / stock", 0.33),
    Goal("exponent of time, window, 4k to 64k", "-", "exponent of time", 1.1),
    Goal("exponent of memory, window, 4k to 64k", "-", "exponent of memory", 1.1),
)


def ratios(record: dict[str, Any]) -> dict[str, float]:
    """Every ratio that the record holds both sides of: ours over theirs."""
    found: dict[str, float | None] = {}
    for name, of_case in record["cases"].items():
        for off in ("", OFF):
            times = dict(of_case.get(f"keras{off}", {}).get("seconds", {}))
            if not off:
                times |= of_case.get("torch", {}).get("seconds", {})
            mine = [key for key in times if key.startswith("ours")]
            others = [key for key in times if key not in mine]
            for key in mine:
                label = name + key.removeprefix("ours") + off
                for other in others:
                    found[f"{label} / {other}"] = _over(times[key], times[other])
            if "ours, unknown T" in times:
                label = f"{name}, unknown T{off} / static T"
                found[label] = _over(times["ours, unknown T"], times.get("ours"))
    peaks = {row["peer"]: row for row in record.get("memory", [])}
    ours, stock = (peaks.get(peer, {}).get("first_peak_mib") for peer in ("ours", "stock"))
    found["memory / stock"] = _over(ours, stock)
    exponents = record.get("exponents", {})
    found["exponent of time"] = exponents.get("forward, seconds")
    found["exponent of memory"] = exponents.get("forward, first_peak_mib")
    return {name: round(ratio, 4) for name, ratio in found.items() if ratio is not None}


def goal_table(record: dict[str, Any]) -> str:
    """The goals, what was measured, and whether it meets them."""
    lines = ["| case | against | goal | measured | |", "|---|---|---|---|---|"]
    for goal in GOALS:
        ratio = record["ratios"].get(goal.ratio)
        told = ("-", "not measured") if ratio is None else (f"{ratio:.3g}", _met(ratio, goal.limit))
        lines.append(f"| {goal.case} | {goal.against} | ≤ {goal.limit:.2f} | {' | '.join(told)} |")
    return "\n".join([*lines, "", _origin(record)])


def page_table() -> str:
    """The table of docs/performance.md: ours over theirs, of every record."""

    def read(name: str) -> Any:
        return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))

    of_cases = read("record")["ratios"]
    rows: dict[str, list[float | None]] = {}
    for goal in GOALS:
        subject, _, other = goal.ratio.partition(" / ")
        if other == "stock" and OFF not in goal.case:
            others = f"{subject}{OFF} / {other}", f"{subject} / flex"
            rows[goal.case] = [of_cases.get(name) for name in (goal.ratio, *others)]
    models, served = (read(name)["ratios"] for name in ("retrofit", "served"))
    first = read("first_answer")["layers"]["12"]["ratios"]["one rule"]
    alone = {
        "MiniLM, 8 x 256 tokens, `Full()`": models["full"],
        "MiniLM, 8 x 256 tokens, one head in its sentence": models["head 0 same sentence"],
        **{f"that, served, {what} tokens": served[what] for what in served if " x " in what},
        "that, a process loads it and answers four requests": served["start"],
        "first `predict`, 12 layers": first["predict"],
        "first `predict` at another length": first["another length"],
        "first step of `fit`": first["fit"],
    }
    rows |= {case: [ratio] for case, ratio in alone.items()}
    lines = [
        "| ours over | stock Keras | the same, oneDNN off | FlexAttention |",
        "|---|---|---|---|",
    ]
    for case, found in rows.items():
        cells = ["-" if x is None else f"{x:.2f}" for x in [*found, None, None][:3]]
        lines.append(f"| {' | '.join([case, *cells])} |")
    return "\n".join(lines)


def page_with(table: str) -> str:
    """docs/performance.md with `table` in place of its own."""
    before, _, rest = PAGE.read_text("utf-8").partition(_MARKS[0])
    return "".join([before, _MARKS[0], table, _MARKS[1], rest.partition(_MARKS[1])[2]])


def write(record: dict[str, Any], folder: Path) -> None:
    parts = [
        "# Benchmarks",
        _INTRODUCTION.format(dtype=record["dtype"]),
        *(["**Tiny sizes (`--quick`): these numbers say nothing.**"] if record["quick"] else []),
        goal_table(record),
        "## Seconds, medians",
        *(_case_table(name, of_case) for name, of_case in record["cases"].items()),
        _LAYOUTS,
        *_length_tables(record),
    ]
    (folder / "RESULTS.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _case_table(name: str, of_case: dict[str, dict]) -> str:
    lines = [f"### {name}", "", "| | ms | ours / it | repetitions |", "|---|---|---|---|"]
    notes = []
    for framework, told in of_case.items():
        off = OFF if framework.endswith(OFF) else ""
        times = of_case.get(f"keras{off}", told).get("seconds", {})
        ours = next((times[what] for what in times if what.startswith("ours")), None)
        for what, seconds in told.get("seconds", {}).items():
            ratio = "-" if ours is None else f"{ours / seconds:.3g}"
            cells = f"{what}{off}", f"{seconds * 1e3:.3g}", ratio, str(told["repetitions"])
            lines.append(f"| {' | '.join(cells)} |")
        if "difference" in told:
            notes.append(f"Largest difference ({framework}): {told['difference']:.1e}.")
        if "allowed_share" in told:
            notes.append(f"Allowed pairs: {told['allowed_share']:.1%}.")
        notes += [f"Failed: {what}: {text}" for what, text in told.get("errors", {}).items()]
    return "\n".join([*lines, "", " ".join(note.replace("\n", " ") for note in notes)])


def _length_tables(record: dict[str, Any]) -> list[str]:
    tables = []
    for name in ("memory", "scaling"):
        if name not in record:
            continue
        lines = [f"## {name.capitalize()}, window", ""]
        lines += [
            "| | T | ms | peak MiB of the first run | of the second |",
            "|---|---|---|---|---|",
        ]
        for row in record[name]:
            told = [f"{row['peer']}, {row['step']}", str(row["length"])]
            if "error" in row:
                told += ["-", row["error"].replace("\n", " ").replace("|", "/"), "-"]
            else:
                told += [f"{row['seconds'] * 1e3:.3g}"]
                told += [f"{row['first_peak_mib']:.1f}", f"{row['peak_mib']:.1f}"]
            lines.append("| " + " | ".join(told) + " |")
        tables.append("\n".join(lines))
    slopes = [f"- {name}: {slope:.2f}" for name, slope in _known(record.get("exponents"))]
    return [
        *tables,
        *(["Exponents (slopes of the log-log lines):", "\n".join(slopes)] * bool(slopes)),
    ]


def _known(exponents: dict[str, float | None] | None) -> list[tuple[str, float]]:
    return [(name, slope) for name, slope in (exponents or {}).items() if slope is not None]


def _origin(record: dict[str, Any]) -> str:
    return f"{where(record)}; {record['dtype']}; {record['date']}; `{record['command']}`."


def where(record: dict[str, Any]) -> str:
    """The machine and the versions of a record, in words."""
    machine, versions = record["machine"], record["versions"]
    with_versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    threads = "thread" if record["threads"] == 1 else "threads"
    return (
        f"{machine['processor']}, {record['threads']} {threads} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; {with_versions}"
    )


def _over(ours: float | None, other: float | None) -> float | None:
    return None if not ours or not other else ours / other


def _met(ratio: float, limit: float) -> str:
    return "met" if ratio <= limit else "**missed**"


if __name__ == "__main__":
    PAGE.write_text(page_with(page_table()), encoding="utf-8")
