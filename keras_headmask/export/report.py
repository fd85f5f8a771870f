"""The report of an export."""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Iterator
from typing import Any

from keras_headmask.rules.words import in_one_line


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The findings of the fresh process.

    Distances are the largest differences of outputs, in units of the output's largest element if
    that is above 1; elements from 1e4 on are compared with themselves.
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

    def lines(self, precision: str | None) -> Iterator[str]:
        yield (
            f"checked in a fresh process at (batch, length) {', '.join(map(str, self.shapes))}: "
            f"differs from the model by {self.error:.1e} (rounding: {self.tolerance:.0e})"
        )
        if self.precision_error is not None:
            yield f"{precision}: differs from float32 by {self.precision_error:.1e}"
        if self.twin_distance is None:
            yield "no rule restricts anything"
        else:
            yield f"the rule is alive: differs from the twin without it by {self.twin_distance:.1e}"
        if self.mass_outside is not None:
            yield (
                f"largest attention at a forbidden key: {self.mass_outside:.1e} "
                f"(seen in {self.mass_seen_in})"
            )
        for name, error in (("serve_padded", self.padded_error), ("XLA", self.compiled_error)):
            if error is not None:
                yield f"{name} differs by {error:.1e}"
        yield (
            f"loads in {self.load_milliseconds:.0f} ms; a request takes "
            f"{', '.join(f'{ms:.1f}' for ms in self.milliseconds)} ms"
        )


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The signatures of an export, and the result of its check. `print` it to read it.

    Attributes:
        path: The folder of the version.
        version: Its number.
        signatures: By name, `{"inputs": {name: (dtype, shape)}, "outputs": {...}}`.
        left_out: Signatures that were asked for, and why they are not there.
        rules: The rule of each attention layer, by path.
        precision: As in `export_saved_model`.
        warmup_records: How many there are.
        bytes: The sizes of "graph" and "variables", and the "total".
        milliseconds: The durations of "trace", "write" and "check", and the "total".
        check: What the check found; `None` without one.
    """

    path: pathlib.Path
    version: int
    signatures: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    rules: dict[str, Any]
    precision: str | None
    warmup_records: int
    bytes: dict[str, int]
    milliseconds: dict[str, float]
    check: CheckResult | None

    def __str__(self) -> str:
        megabytes = {name: number / 2**20 for name, number in self.bytes.items()}
        sizes = f"{megabytes['total']:.2f} MiB (graph {megabytes['graph']:.2f})"
        seconds = self.milliseconds["total"] / 1000
        lines = [f"{self.path}: {sizes}, written in {seconds:.1f} s"]
        for name, sides in self.signatures.items():
            inputs, outputs = (_named_shapes(sides[side]) for side in ("inputs", "outputs"))
            lines.append(f"  {name}({inputs}) -> {outputs}")
        lines += [f"  {name} left out: {reason}" for name, reason in self.left_out.items()]
        if self.warmup_records:
            lines.append(f"  {self.warmup_records} warm-up records")
        check_lines = ["not checked"] if self.check is None else self.check.lines(self.precision)
        return "\n".join(map(in_one_line, [*lines, *(f"  {line}" for line in check_lines)]))


def _named_shapes(side: dict[str, Any]) -> str:
    shapes = {k: ", ".join("?" if n is None else str(n) for n in s) for k, (_, s) in side.items()}
    return ", ".join(f"{name} {dtype}[{shapes[name]}]" for name, (dtype, _) in side.items())


def installed_versions() -> dict[str, str]:
    """This package's version and those of what it runs on."""
    import keras_headmask

    versions = {"keras_headmask": keras_headmask.__version__}
    for name in ("keras", "tensorflow", "jax", "torch", "keras-hub", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
