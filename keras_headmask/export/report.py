"""What an export reports."""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Iterator
from typing import Any

from keras_headmask.rules.terminal import in_one_line


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What the fresh process found.

    Distances are the largest differences of outputs, in units of the output's largest element if
    that is above 1; elements from 1e4 on are held against themselves.
    """

    shapes: tuple[tuple[int, int], ...]  # (batch, length) of the requests
    error: float  # from the model in memory
    tolerance: float
    milliseconds: tuple[float, ...]  # of the second call of each request
    load_milliseconds: float
    twin_distance: float | None  # from the twin without rules; None: no rule restricts anything
    mass_outside: float | None  # the largest probability that a rule forbids
    mass_seen_in: str | None  # "serve_scores", or "the model in memory"
    padded_error: float | None  # a padded batch, from its examples alone, and from 0 past them
    compiled_error: float | None  # of the XLA signatures
    precision_error: float | None  # from the model in float32
    graphs: dict[str, dict[str, Any]]  # what the graph of each signature holds


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What was exported, and what was checked of it. `print` it to read it."""

    path: pathlib.Path
    version: int
    signatures: dict[str, dict[str, Any]]  # {name: {"inputs": {name: (dtype, shape)}, "outputs"}}
    left_out: dict[str, str]  # signatures that were asked for, and why they are not there
    rules: dict[str, Any]  # the rule of each attention layer, by path
    precision: str | None
    warmup_records: int
    bytes: dict[str, int]  # "graph", "variables", "total"
    milliseconds: dict[str, float]  # "trace", "write", "check", "total"
    check: CheckResult | None

    def __str__(self) -> str:
        return "\n".join(map(in_one_line, _lines(self)))


def installed_versions() -> dict[str, str]:
    """Installed versions, this package's first."""
    import keras_headmask

    found = {"keras_headmask": keras_headmask.__version__}
    for name in ("keras", "tensorflow", "jax", "torch", "keras-hub", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _lines(report: ExportReport) -> Iterator[str]:
    size, took = report.bytes, report.milliseconds
    yield (
        f"{report.path}: {size['total'] / 2**20:.2f} MiB (graph {size['graph'] / 2**20:.2f}), "
        f"written in {took['total'] / 1000:.1f} s"
    )
    for name, sides in report.signatures.items():
        inputs, outputs = (
            ", ".join(f"{k} {dtype}{_shape(shape)}" for k, (dtype, shape) in sides[side].items())
            for side in ("inputs", "outputs")
        )
        yield f"  {name}({inputs}) -> {outputs}"
    for name, reason in report.left_out.items():
        yield f"  {name} left out: {reason}"
    if report.warmup_records:
        yield f"  {report.warmup_records} warm-up records"
    result = report.check
    if result is None:
        yield "  not checked"
        return
    yield (
        f"  checked in a fresh process at (batch, length) {', '.join(map(str, result.shapes))}: "
        f"differs from the model by {result.error:.1e} (rounding: {result.tolerance:.0e})"
    )
    if result.precision_error is not None:
        yield f"  {report.precision}: differs from float32 by {result.precision_error:.1e}"
    if result.twin_distance is None:
        yield "  no rule restricts anything"
    else:
        yield f"  the rule is alive: differs from the twin without it by {result.twin_distance:.1e}"
    if result.mass_outside is not None:
        yield (
            f"  largest attention at a forbidden key: {result.mass_outside:.1e} "
            f"(seen in {result.mass_seen_in})"
        )
    for name, error in (("serve_padded", result.padded_error), ("XLA", result.compiled_error)):
        if error is not None:
            yield f"  {name} differs by {error:.1e}"
    yield (
        f"  loads in {result.load_milliseconds:.0f} ms; a request takes "
        f"{', '.join(f'{ms:.1f}' for ms in result.milliseconds)} ms"
    )


def _shape(shape: tuple) -> str:
    return "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"
