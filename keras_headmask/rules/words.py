"""A rule in plain English, and cells of text in columns.

Each leaf says by `in_words` what a token sees; here the parts are joined.
Nothing here imports the specs, so that a spec can describe itself.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from keras_headmask.rules import config


def heads_in_words(heads: Sequence[int]) -> str:
    """ "Heads 0 and 2 to 4"."""
    return f"Head{'s' if len(heads) > 1 else ''} {numbers_in_words(heads)}"


def numbers_in_words(numbers: Iterable[int]) -> str:
    """Whole numbers in rising order, runs of three and more folded."""
    parts: list[str] = []
    for run in runs(numbers):
        parts.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    return listed(parts, "and")


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Whole numbers in rising order, cut wherever one is left out: [0], [2, 3, 4]."""
    folded: list[list[int]] = []
    for number in numbers:
        if not folded or folded[-1][-1] != number - 1:
            folded.append([])
        folded[-1].append(number)
    return folded


def phrase(spec: Any) -> str:
    """What a token sees under `spec`, which holds no `PerHead`."""
    said = spec.in_words()
    mro = type(spec).__mro__
    owner = next(cls for cls in mro if "in_words" in vars(cls) or config.is_registered(cls))
    if owner is not type(spec) and config.is_registered(owner):
        said = None  # the words of another kind, inherited by a class that may mean anything
    return said or f"what {spec!r} allows"


def joined(specs: Iterable[Any], between: str) -> str:
    """The phrases of the parts of a spec; a part that has parts itself in brackets."""
    return between.join(f"({phrase(x)})" if x.children else phrase(x) for x in specs)


def counted(count: int | None, noun: str) -> str:
    """ "1 token", "2 tokens"; "every token" for `None`."""
    return f"every {noun}" if count is None else f"{count} {noun}{'s' if count > 1 else ''}"


def listed(parts: Iterable[Any], conjunction: str) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = map(str, parts)
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]
