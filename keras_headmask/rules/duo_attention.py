"""The files of DuoAttention's published patterns: which heads of a model stream."""

import csv
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from keras_headmask.rules.fields import whole_number


class DuoAttentionFiles(NamedTuple):
    """The contents of a folder in DuoAttention's `attn_patterns`."""

    heads_file: Path
    gates: list[list[float]]  # a row for each layer, in it a number for each key head
    sink_size: int
    recent_size: int

    def streaming_heads(self, sparsity: float) -> list[set[int]]:
        """The key heads of each layer that stream: those of the least gates in the whole model."""
        every = [(i, head) for i, row in enumerate(self.gates) for head in range(len(row))]
        every.sort(key=lambda at: self.gates[at[0]][at[1]])  # equal ones stay in this order
        # As many as lie under the quantile, which stands at this place among all gates in order.
        count = len(every) if sparsity == 1 else math.ceil(sparsity * (len(every) - 1))
        streaming: list[set[int]] = [set() for _ in self.gates]
        for i, head in every[:count]:
            streaming[i].add(head)
        return streaming


def read_duo_attention(folder: str | os.PathLike[str]) -> DuoAttentionFiles:
    """The two files of `folder`, checked."""
    heads_file, config_file = Path(folder, "full_attention_heads.tsv"), Path(folder, "config.json")
    requirement = (
        "`folder` must hold full_attention_heads.tsv and config.json, as the folders do two levels "
        "below DuoAttention's `attn_patterns`."
    )
    sizes = _sizes(config_file, _text(config_file, requirement))
    return DuoAttentionFiles(heads_file, _gates(heads_file, _text(heads_file, requirement)), *sizes)


def _text(file: Path, requirement: str) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}. {requirement}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}.") from error


def _gates(file: Path, text: str) -> list[list[float]]:
    rows: list[list[float]] = []
    lines = csv.reader(text.splitlines(), delimiter="\t")
    for row in filter(None, lines):
        try:
            rows.append([float(value) for value in row])
            if not all(map(math.isfinite, rows[-1])):
                raise ValueError(f"found {row}, which is not finite")
            if len(row) != len(rows[0]):
                raise ValueError(f"found {len(row)} values, and {len(rows[0])} on the line before")
        except ValueError as error:
            raise ValueError(
                f"{file}, line {lines.line_num}: {error}. Each line is a layer, with one number "
                "for each key head, divided by tabs."
            ) from error
    if not rows:
        raise ValueError(f"{file} is empty: it must hold a line of numbers for each layer.")
    return rows


def _sizes(file: Path, text: str) -> tuple[int, int]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}. Found: {text[:80]!r}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object. Found: {text[:80]!r}.")
    if missing := [name for name in ("sink_size", "recent_size") if name not in config]:
        raise ValueError(f"{file} lacks `{missing[0]}`. Found: {sorted(config)}.")
    try:
        sinks = whole_number(config["sink_size"], "sink_size", at_least=0)
        return sinks, whole_number(config["recent_size"], "recent_size", at_least=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
