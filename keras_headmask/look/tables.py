"""Tables of reports: text of 100 columns at most."""

from collections.abc import Iterator, Sequence

from keras_headmask.rules.words import aligned, numbers_in_words

Row = tuple[str, ...]

_WIDTH, _NARROW = 100, 24  # columns of a line; narrower cells are never cut


class Table(list[Row]):
    """Rows of cells; the first `labels` cells are repeated in each part of a wide table."""

    def __init__(self, rows: Sequence[Row], labels: int = 1):
        super().__init__(rows)
        self.labels = labels

    def lines(self) -> list[str]:
        """The rows as text, in several tables one below the other if they are wide."""
        if not self:
            return []
        widths = [max(map(len, column)) for column in zip(*self, strict=True)]
        while sum(widths) + 2 * len(widths) - 2 > _WIDTH and max(widths) > _NARROW:
            widths[widths.index(max(widths))] -= 1
        rows = [tuple(map(_cut, row, widths)) for row in self]
        lines: list[str] = []
        end = self.labels
        while end < len(widths) or not lines:
            start = end
            left = _WIDTH - sum(width + 2 for width in widths[: self.labels]) + 2
            while end < len(widths) and (end == start or widths[end] + 2 <= left):
                left -= widths[end] + 2
                end += 1
            lines += aligned([row[: self.labels] + row[start:end] for row in rows])
        return lines


class Printed:
    """A value that says what it is in lines and tables."""

    def _parts(self) -> Iterator[str | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        lines = ([part] if isinstance(part, str) else part.lines() for part in self._parts())
        return "\n".join(line for part in lines for line in part)

    def __repr__(self) -> str:
        return str(self)


def layer_rows(paths: Sequence[str], rows: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of each layer after its number and path; layers with equal rows share one entry.

    >>> layer_rows(["a", "b", "c"], [[("1",)], [("2",)], [("1",)]])
    [('layers 0 and 2', '1'), ('1 b', '2')]
    """
    alike: dict[tuple[Row, ...], list[int]] = {}
    for number, of_layer in enumerate(rows):
        alike.setdefault(tuple(of_layer), []).append(number)
    # (With numbers: wide tables cut what is in the middle of a path.)
    names = paths if len(paths) == 1 else [f"{i} {path}" for i, path in enumerate(paths)]
    return [
        (names[numbers[0]] if len(numbers) == 1 else f"layers {numbers_in_words(numbers)}", *row)
        for of_layer, numbers in alike.items()
        for row in of_layer
    ]


def _cut(text: str, width: int) -> str:
    """Without what is in the middle, if it is too long: paths differ at their ends."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[: width - 3 - half]}...{text[-half:]}"
