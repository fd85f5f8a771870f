"""Bars of ratios, and time and memory by length, as PNG."""

from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart by colour-blind readers; markers and labels tell them too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#555555"
_CASES = ("bert", "window", "documents", "mixed", "longformer", "longformer-scattered")
_LINES = {
    ("ours", "forward"): ("ours, forward", _BLUE, "o", "-"),
    ("ours", "training"): ("ours, training step", _GREEN, "s", "--"),
    ("stock", "forward"): ("stock Keras, forward", _ORANGE, "^", "-."),
}


def draw(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Write the plots that the record has data for; file names and titles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    # (Not for the whole process: others draw in it.)
    style = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        if any(name in record["cases"] for name in _CASES):
            figure = _bars(record["ratios"])
            made.append(("ratios.png", "Time of ours over its peers'", figure))
        if record.get("scaling"):
            figure = _by_length(record["scaling"], record.get("exponents", {}))
            made.append(("scaling.png", "Time and peak memory by length, window rule", figure))
        for file, _, figure in made:
            figure.savefig(folder / file, dpi=130)
            pyplot.close(figure)
    return [(file, title) for file, title, _ in made]


def _bars(ratios: dict[str, float]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    names = [name for name in _CASES if f"{name} / stock" in ratios or f"{name} / flex" in ratios]
    series = (
        ("stock", "stock Keras, 4-D mask", _BLUE, ""),
        ("flex", "compiled FlexAttention, kernel alone", _ORANGE, "//"),
    )
    for n, (peer, label, colour, hatch) in enumerate(series):
        there = [
            (i, ratios[f"{name} / {peer}"])
            for i, name in enumerate(names)
            if f"{name} / {peer}" in ratios
        ]
        if not there:
            continue
        bars = axes.barh(
            [i + 0.38 * n - 0.19 for i, _ in there],
            [ratio for _, ratio in there],
            height=0.36,
            label=f"ours / {label}",
            color=colour,
            hatch=hatch,
            edgecolor="white",
        )
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color=_GREY, linestyle=":", linewidth=1.5)
    axes.set_yticks(range(len(names)), [name.replace("-", ",\n") for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("time of ours / time of theirs (left of the dotted line: ours is faster)")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", frameon=False, ncols=2)
    return figure


def _by_length(rows: list[dict], exponents: dict[str, float | None]) -> Any:
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    fields = (("seconds", "seconds"), ("first_peak_mib", "peak memory above the inputs, MiB"))
    lengths = sorted({row["length"] for row in rows})
    for axes, (field, title) in zip(panels, fields, strict=True):
        for (peer, step), (label, colour, marker, line) in _LINES.items():
            points = [
                (row["length"], row[field])
                for row in rows
                if (row["peer"], row["step"]) == (peer, step) and row.get(field, 0) > 0
            ]
            slope = exponents.get(f"{step}, {field}") if peer == "ours" else None
            if points:
                told = label if slope is None else f"{label} (exponent {slope:.2f})"
                x, y = zip(*sorted(points), strict=True)
                axes.plot(x, y, label=told, color=colour, marker=marker, linestyle=line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
        )
        axes.set_xlabel("T, positions")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=10)
    return figure
