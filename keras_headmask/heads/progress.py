"""A bar for what takes more than seconds."""

import sys
import time

_SECONDS = 3  # before there is a bar
_WIDTH = 30


class Progress:
    """A bar on standard error, for a person: programs read what a command prints.

    `total`: how many steps there are, or `None`; `unit`: what a step is.
    """

    def __init__(self, total: int | None, unit: str, wanted: bool = True):
        self.total, self.unit, self.done, self.start = total, unit, 0, time.monotonic()
        self.wanted = wanted and (sys.stderr.isatty() or "ipykernel" in sys.modules)

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if not self.wanted or time.monotonic() - self.start < _SECONDS:
            return
        if self.total is None:
            text, end = f"{self.done} {self.unit}", ""
        else:
            bar = "=" * (_WIDTH * self.done // self.total)
            text = f"[{bar:{_WIDTH}}] {self.done} of {self.total} {self.unit}"
            end = "\n" if self.done == self.total else ""
        print(f"\r{text}", end=end, file=sys.stderr, flush=True)
