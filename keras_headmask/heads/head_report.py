"""What heads attend to, as a value that prints, draws and saves itself."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_headmask.heads import texts
from keras_headmask.look.tables import Printed, Table, of_layers
from keras_headmask.rules import fields
from keras_headmask.rules.words import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 48  # of heads that are printed
# The field's words. A head that keeps to the previous token also keeps to what is near, so a role
# of the second table is only for heads that have none of the first.
_NARROW = {
    "previous": "previous token",
    "duplicate": "duplicate token",
    "induction": "induction",
    "first": "sink",
    "special": "special token",
    "self": "current token",
    "next": "next token",
}
_WIDE = {"sentence": "sentence", "local": "local"}
_UNITS = {"distance": "positions", "entropy": "nats"}


class Roles(dict[str, dict[int, str]]):
    """The role of each head that has one: `roles["path of the layer"][3]`. It prints as a table."""

    def __str__(self) -> str:
        rows = [
            (path, f"head {head}", role) for path, of in self.items() for head, role in of.items()
        ]
        return "\n".join(aligned(rows)) if rows else "No head has a role."


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadReport(Printed):
    """What each head attends to, over many texts.

    Attributes:
        layers: The paths of the layers, in the order in which they run.
        heads: The number of heads of each layer.
        scores: By measure an array `(layers, heads)`: mean shares of attention, `distance` in
            positions, `entropy` in nats. `nan` where a layer has fewer heads, or where no query
            of a head sees anything.
        even: For shares: what a head would have that attends evenly to every token of a text.
        most: For shares: what a head could have at most. It is below 1 where some queries have no
            such key, as a token that stands for the first time has no duplicate.
        texts, tokens: How many were measured.
        padding: What marks it, in words.
        left_out: By measure, why it is not in `scores`.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    scores: dict[str, np.ndarray]
    even: dict[str, np.ndarray]
    most: dict[str, np.ndarray]
    texts: int
    tokens: int
    padding: str
    left_out: dict[str, str]

    def roles(self, threshold: float = 0.5) -> Roles:
        """The role of each head, in the words of TransformerLens' `detect_head` and others.

        Roles: previous token, duplicate token, induction, sink (the first token), special token,
        current token, next token; for a head without one of these: local, sentence. A head has the
        role in which it goes farthest from even attention (`even`, 0) to the most possible (`most`,
        1), if it goes as far as `threshold`. So no head is local where all texts are short.

        Args:
            threshold: A number from 0 to 1.

        Returns:
            By the path of the layer, the role of each head that has one.

        Raises:
            TypeError, ValueError: if `threshold` is not a number from 0 to 1.
        """
        threshold = fields.fraction(threshold, "threshold")
        found = Roles()
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            roles = ((head, self._role((i, head), threshold)) for head in range(heads))
            if named := {head: role for head, role in roles if role}:
                found[path] = named
        return found

    def _role(self, at: tuple[int, int], threshold: float) -> str:
        for names in (_NARROW, _WIDE):
            gains = {role: self._gain(measure, at) for measure, role in names.items()}
            role = max(gains, key=lambda role: gains[role])  # of equals, the first
            if gains[role] >= threshold:
                return role
        return ""

    def _gain(self, measure: str, at: tuple[int, int]) -> float:
        """0 for even attention, 1 for the most possible; -inf where all heads have the same."""
        if measure not in self.scores:
            return -math.inf
        score, even, most = (x[measure][at] for x in (self.scores, self.even, self.most))
        # (Rounded, as attention is computed in float32.)
        return round((score - even) / (most - even), 5) if most - even > 1e-9 else -math.inf

    def _said(self) -> Iterator[str | Table]:
        yield f"{texts.counted(self.texts)} of {self.tokens:,} tokens; padding: {self.padding}."
        roles, of_heads = self.roles(), []
        for i, (path, heads) in enumerate(zip(self.layers, self.heads, strict=True)):
            names = [roles.get(path, {}).get(head, "") for head in range(heads)]
            cells = [[f"{x[i, head]:.2f}" for x in self.scores.values()] for head in range(heads)]
            of_heads.append([(f"{j}", names[j], *cells[j]) for j in range(heads)])
        rows = of_layers(self.layers, of_heads)
        count = len(rows)
        if count > _MOST_LINES:
            rows = [row for row in rows if row[2]][:_MOST_LINES]
        yield Table([("layer", "head", "role", *self.scores), *rows], labels=3)
        if count > len(rows):
            yield f"... and {count - len(rows)} more heads: see `scores` and `roles()`."
        yield from (f"No {name}: {why}" for name, why in self.left_out.items())

    def plot(self, measure: str | None = None) -> "Figure":
        """Layers x heads as a matplotlib figure: dark = much.

        Needs matplotlib: `pip install matplotlib`.

        Args:
            measure: One of `scores`; by default each that is a share of attention has a panel.

        Returns:
            A matplotlib figure, with a panel for each measure.

        Raises:
            ImportError: without matplotlib.
            ValueError: if `measure` was not measured.
        """
        from keras_headmask.look import panels, plotting

        if measure is not None and measure not in self.scores:
            why = self.left_out.get(measure, f"measured were {list(self.scores)}.")
            raise ValueError(f"There is no measure {measure!r}: {why}")
        measures = list(self.most) if measure is None else [measure]
        shown = [panels.Panel((0,), self.scores[name]) for name in measures]
        drawn = panels.Panels(shown, 1, (1, 1), (None, None), 0)
        most, unit = 1.0, "share of attention"
        if measure in _UNITS:
            most, unit = float(np.nanmax(self.scores[measure], initial=1e-9)), _UNITS[measure]
        caption = [str(self).split("\n")[0]]
        return plotting.figures_module().heads_figure(drawn, measures, most, unit, caption)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it, a dict; `nan` is null."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("scores", "even", "most"):
            found[name] = {key: _with_null(x.tolist()) for key, x in found[name].items()}
        return found | {"layers": list(self.layers), "heads": list(self.heads)}


def _with_null(rows: list[list[float]]) -> list[list[float | None]]:
    return [[None if math.isnan(x) else x for x in row] for row in rows]
