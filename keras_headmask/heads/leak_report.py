"""The result of a search for leaks: a value that prints, draws and saves itself."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_headmask.look.tables import Printed, Table
from keras_headmask.rules.coverage import Coverage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 10  # of leaks that are printed


@dataclasses.dataclass(frozen=True)
class Leak:
    """An input position that changed an output that must not depend on it.

    Attributes:
        input: The name of the input.
        example: The example that was changed.
        position: The position that was changed; `None`: all of the example.
        output: The name of the output.
        output_example: The example whose output changed.
        output_position: Its position; `None` for an output without an axis of positions.
        change: The largest change of a number there; infinite for one to or from NaN.
    """

    input: str
    example: int
    position: int | None
    output: str
    output_example: int
    output_position: int | None
    change: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LeakReport(Printed):
    """All leaks that a search found, the largest first. It is true if there is one.

    Attributes:
        leaks: Each pair of an input position and an output that leaks.
        tried: How many of the hidden pairs of positions were tried.
        pairs: How many pairs are hidden: an output must not depend on an input position.
        examples: The number of examples; each was changed to see if others notice.
        first_layer: The first layer whose output changed where it must not, for the first leak
            found; `None` if nothing leaked or no layers are seen.
        left_out: What was not looked at, and why.
        hidden: Which pairs of `shown` are hidden: boolean
            `(batch, output positions, input positions)`.
        change: How much leaked between them, of the same shape; 0 where nothing did.
        shown: The names of an input and an output: those of the largest leak, or the first.
    """

    leaks: tuple[Leak, ...]
    tried: int
    pairs: int
    examples: int
    first_layer: str | None
    left_out: tuple[str, ...]
    hidden: np.ndarray
    change: np.ndarray
    shown: tuple[str, str]

    def __bool__(self) -> bool:
        return bool(self.leaks)

    def _parts(self) -> Iterator[str | Table]:
        rows = [("input", "example", "position", "output", "example", "position", "change")]
        for leak in self.leaks[:_MOST_LINES]:
            numbers = f"{leak.output_example}", _or(leak.output_position, "-"), f"{leak.change:.2g}"
            position = _or(leak.position, "all")
            rows.append((leak.input, f"{leak.example}", position, leak.output, *numbers))
        first, *others = self._sentences()
        yield first
        if self.leaks:
            yield Table(rows)
        if len(self.leaks) > _MOST_LINES:
            yield f"... and {len(self.leaks) - _MOST_LINES} more."
        yield from others

    def _sentences(self) -> list[str]:
        """The lines around the table of leaks: the first stands above it."""
        others = self.examples * (self.examples - 1)
        tried = f"Tried {self.tried} of {self.pairs} hidden pairs of positions"
        tried += f", and {others} of {others} pairs of examples." if others else "."
        count = len(self.leaks)
        sentences = [f"{count} leak{'s' * (count != 1)}."] if count else []
        if not self.pairs:
            sentences.append(
                "Nothing is hidden within a text, so nothing is proven: each output may depend on "
                "each position, except padding."
            )
        elif not count:
            sentences.append(
                "No leaks." if self.tried else "Nothing was tried, so nothing is proven."
            )
        where = self.first_layer
        shows = [] if where is None else [f"It shows first in the layer {where}."]
        return [" ".join([*sentences, tried]), *shows, *self.left_out]

    def plot(self) -> "Figure":
        """Leaks as red crosses between output and input positions; what is hidden is hatched.

        Needs matplotlib: `pip install matplotlib`. It shows the input and output `shown`, and all
        examples as one: a pair is hidden if it is so in any example. From 129 positions on, a cell
        is a tile of positions.

        Returns:
            A matplotlib figure.

        Raises:
            ImportError: without matplotlib.
        """
        from keras_headmask.look import grid, plotting

        rows, columns = self.hidden.shape[1:]
        tile = grid.tile_of(rows, columns, grid.IN_PICTURES)
        of_any: Any = (x.any(0) for x in (self.hidden, self.change > 0))
        hidden, leaks = (grid.reduced(np.logical_or, x, tile) for x in of_any)
        panel = grid.Panel("", np.full(hidden.shape, Coverage.ALL), hidden, leaks)
        names = {Coverage.ALL: "may matter", "hidden": "must not matter", "crossed": "leaks"}
        source, output = self.shown
        axes = f"positions of the output '{output}'", f"positions of the input '{source}'"
        drawn = grid.Grid([panel], self._sentences(), tile=tile, axes=axes, legend=names)
        return plotting.figure_of(drawn)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it, a dict without `hidden` and `change`.

        An infinite change is the text "inf", since JSON has no such number.

        Returns:
            A dict of plain values.
        """
        names = ("tried", "pairs", "examples", "first_layer")
        leaks = [dataclasses.asdict(leak) for leak in self.leaks]
        for leak in leaks:
            leak["change"] = leak["change"] if math.isfinite(leak["change"]) else "inf"
        fields = {name: getattr(self, name) for name in names}
        return {"leaks": leaks, **fields, "left_out": list(self.left_out)}


def _or(position: int | None, text: str) -> str:
    return text if position is None else str(position)
