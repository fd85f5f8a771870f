"""The findings of a lint."""

import dataclasses
from collections.abc import Iterable

from keras_headmask.rules import words
from keras_headmask.rules.words import in_one_line

_SEVERITIES = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is likely wrong.

    Attributes:
        severity: "error", "warning" or "info".
        code: A permanent name of what was found.
        message: What was found.
        way_out: What to do.
        heads: The heads it speaks of.
        positions: The queries or keys it speaks of.
        layers: The paths of the attention layers, where a model was looked at.
    """

    severity: str
    code: str
    message: str
    way_out: str
    heads: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        heads = f", {words.heads_in_words(self.heads).lower()}" if self.heads else ""
        lines = [f"{self.severity}: {self.code}{heads}: {self.message}", f"    {self.way_out}"]
        if self.layers:
            more = f" and {len(self.layers) - 3} more layers" if len(self.layers) > 3 else ""
            lines.append(f"    In {', '.join(self.layers[:3])}{more}.")
        return "\n".join(map(in_one_line, lines))


class Findings(list[Finding]):
    """A list of `Finding`, errors first; printed, a paragraph for each."""

    def __init__(self, findings: Iterable[Finding] = ()):
        super().__init__(sorted(findings, key=lambda x: _SEVERITIES.index(x.severity)))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "No findings."
