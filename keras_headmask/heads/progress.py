"""Progress of long calls."""

import sys
import time
from typing import Any

_SECONDS = 3  # before there is a bar
_OF_LINES = 30  # seconds between the lines of a log
_WIDTH = 30


class Progress:
    """A progress bar on standard error; in a log, lines.

    `total`: how many steps there are, or `None`; `unit`: what a step is; `verbose`: as in Keras.

    Raises:
        ValueError: for what Keras' `verbose` does not take.
    """

    def __init__(self, total: int | None, unit: str, verbose: Any = "auto"):
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f'`verbose` must be "auto", 0, 1 or 2. Received: {verbose!r}.')
        self.total, self.unit, self.done, self.verbose = total, unit, 0, verbose
        self.is_bar = sys.stderr.isatty() or "ipykernel" in sys.modules
        self.next = time.monotonic() + (_SECONDS if self.is_bar else _OF_LINES)

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if not self.verbose or time.monotonic() < self.next:
            return
        text, start, end = f"{self.done} {self.unit}", "\r", ""
        if self.total is not None:
            text = f"{self.done} of {self.total} {self.unit}"
            end = "\n" if self.done == self.total else ""
        if not self.is_bar:
            self.next, start, end = time.monotonic() + _OF_LINES, "", "\n"
        elif self.total is not None:
            bar = "=" * (_WIDTH * self.done // self.total)
            text = f"[{bar:{_WIDTH}}] {text}"
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
