"""The rules that texts suggest, as a value that prints, draws and saves itself."""

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from keras_headmask.look.tables import Printed, Table, of_layers
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.per_head import PerHead
from keras_headmask.rules.positions import Full, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Suggestion(Printed):
    """A rule for each head, with what it keeps and computes on the texts.

    Attributes:
        specs: By the path of the layer, the rule of each head.
        numbers: By path, the number by which `apply_head_masks` names the layer, if it has one.
        keep: The share of attention that was to be kept.
        kept: The share that is kept, `(layers, heads)`; NaN where a layer has fewer heads.
        computed: The share that the rule allows of the pairs of tokens, `(layers, heads)`; in a
            causal layer of those pairs that do not look ahead.
        longest: The length of the longest text, in tokens.
        causal: By layer, whether no attention went to a later token.
        metrics: With `metric=`: that of the model itself, then of each model that was tried, with
            one head more open each time.
    """

    specs: dict[str, tuple[MaskSpec, ...]]
    numbers: dict[str, int | None]
    keep: float
    kept: np.ndarray
    computed: np.ndarray
    longest: int
    causal: tuple[bool, ...]
    metrics: tuple[float, ...] = ()

    @property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The rules as plain JSON, by layer: what `apply_head_masks` takes."""
        found = {}
        for path, specs in self.specs.items():
            number = self.numbers[path]
            name = f"^{re.escape(path)}$" if number is None else str(number)
            by_spec: dict[MaskSpec, list[int]] = {}
            for head, spec in enumerate(specs):
                by_spec.setdefault(spec, []).append(head)
            rule = PerHead({tuple(heads): spec for spec, heads in by_spec.items()})
            found[name] = (specs[0] if len(by_spec) == 1 else rule).get_config()
        return found

    @property
    def cache(self) -> float | None:
        """The share of a cache's bytes that heads need at the longest text.

        `None` unless all layers are causal.

        By positions: a rule that reads ids counts as all.
        """
        if not all(self.causal):
            return None
        return float(np.mean([self._held(x) for specs in self.specs.values() for x in specs]))

    def _held(self, spec: MaskSpec) -> float:
        """Of the keys, those that the last query sees."""
        if spec.inputs:
            return 1.0
        last = evaluation.make_mask(spec, 1, self.longest, 1, query_offset=self.longest - 1)
        return float(ops.convert_to_numpy(last).mean())

    def _said(self) -> Iterator[str | Table]:
        rows = [
            [
                (f"head {head}", str(spec), _share(self.kept[i, head], self.computed[i, head]))
                for head, spec in enumerate(specs)
            ]
            for i, specs in enumerate(self.specs.values())
        ]
        yield Table(of_layers(list(self.specs), rows))
        if self.metrics:
            own, *tried = self.metrics
            last = f"the last {tried[-1]:.4g}" if tried else "no model was tried"
            yield f"The metric is {own:.4g}; {len(tried)} models were tried, {last}."

    def opened(self, heads: "list[tuple[int, int]]") -> "Suggestion":
        """The same with `Full()` for some heads; in a causal layer with `Window(after=0)`.

        Args:
            heads: Pairs of a layer, counted as in `kept`, and a head.

        Raises:
            ValueError: if there is no such head.
        """
        specs = [list(of_layer) for of_layer in self.specs.values()]
        kept, computed = self.kept.copy(), self.computed.copy()
        for layer, head in heads:
            if not (0 <= layer < len(specs) and 0 <= head < len(specs[layer])):
                raise ValueError(f"There is no head {head} of layer {layer}: {[*self.specs]}.")
            specs[layer][head] = Window(after=0) if self.causal[layer] else Full()
            kept[layer, head] = computed[layer, head] = 1.0
        found = dict(zip(self.specs, map(tuple, specs), strict=True))
        return dataclasses.replace(self, specs=found, kept=kept, computed=computed)

    def plot(self) -> "Figure":
        """The share of pairs that each head computes, layers x heads: dark = much.

        Needs matplotlib: `pip install matplotlib`.

        Returns:
            A matplotlib figure.

        Raises:
            ImportError: without matplotlib.
        """
        from keras_headmask.look import panels, plotting

        drawn = panels.Panels(
            [panels.Panel((0,), self.computed)], 1, (1, 1), (None, None), query_offset=0
        )
        caption = [f"Rules that keep {self.keep:.0%} of the attention of each head"]
        if any(self.causal):
            caption.append("Pairs of causal layers: those that do not look ahead")
        figures = plotting.figures_module()
        return figures.heads_figure(drawn, ["computed"], 1.0, "share of pairs", caption)

    def to_json(self) -> dict[str, Any]:
        """The suggestion as JSON has it; NaN is null.

        Returns:
            A dict of plain values.
        """
        shares = {
            name: [[None if np.isnan(x) else float(x) for x in row] for row in getattr(self, name)]
            for name in ("kept", "computed")
        }
        found = {"keep": self.keep, "rules": self.rules, **shares, "cache": self.cache}
        return found | {"metrics": list(self.metrics)}


def _share(kept: float, computed: float) -> str:
    return f"keeps {kept:.2f}, computes {computed:.2f}"
