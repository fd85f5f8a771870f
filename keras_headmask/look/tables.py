"""What a report prints: lines, and tables of cells."""

from collections.abc import Iterator

from keras_headmask.rules.words import aligned


class Table(list[tuple[str, ...]]):
    """Rows of cells, which stand in columns."""


class Printed:
    """A value that says what it is in lines and tables."""

    def _parts(self) -> Iterator[str | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        lines = ([part] if isinstance(part, str) else aligned(part) for part in self._parts())
        return "\n".join(line for part in lines for line in part)

    def __repr__(self) -> str:
        return str(self)
