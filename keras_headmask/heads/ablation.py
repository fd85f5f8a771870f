"""What each head is worth: a metric with the head switched off (Michel et al. 2019)."""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask.heads import sweeps
from keras_headmask.heads.progress import Progress, check_verbose
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table, of_layers
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.per_head import PerHead
from keras_headmask.rules.positions import Nothing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Head = tuple[int, int]  # its layer, and its number in there
Off = tuple[Head, ...]  # the heads that are switched off, in order


@dataclasses.dataclass(frozen=True, repr=False)
class Ablation(Printed):
    """The metric of a model with heads switched off. It prints as a table.

    Args:
        model: A digest of the layers, rules and weights of the model.
        paths: The path of each layer.
        num_heads: The heads of each layer.
        values: The metric by the heads that are switched off, `((layer, head), ...)` in order:
            `values[()]` is the model's own. Layers are counted as in `paths`.
        order: With `greedy=True`, the heads in the order in which they were switched off.
    """

    model: str
    paths: tuple[str, ...]
    num_heads: tuple[int, ...]
    values: Mapping[Off, float]
    order: tuple[Head, ...] = ()

    @property
    def changes(self) -> np.ndarray:
        """The metric with one head switched off less the model's own, `(layers, heads)`.

        NaN where it is not measured yet, or where a layer has fewer heads than others.
        """
        changes = np.full((len(self.paths), max(self.num_heads)), np.nan)
        for off, value in self.values.items():
            if len(off) == 1:
                changes[off[0]] = value - self.values[()]
        return changes

    @property
    def steps(self) -> tuple[float, ...]:
        """The metric after each head of `order` is switched off, with those before it."""
        return tuple(self.values[_sorted(self.order[: i + 1])] for i in range(len(self.order)))

    def _said(self) -> Iterator[str | Table]:
        yield f"The metric is {self.values[()]:.4g}. Switching off one head changes it by:"
        rows = [
            [tuple("" if i >= heads else _change(x) for i, x in enumerate(row))]
            for heads, row in zip(self.num_heads, self.changes, strict=True)
        ]
        head = ("layer", *(f"head {head}" for head in range(max(self.num_heads))))
        yield Table([head, *of_layers(self.paths, rows)])
        if self.order:
            yield "Switched off one after another:"
            heads_off = [f"layer {layer}, head {head}" for layer, head in self.order]
            steps = (f"{step:.4g}" for step in self.steps)
            yield Table(list(zip(heads_off, steps, strict=True)))

    def plot(self) -> "Figure":
        """A heat map of `changes`: orange below 0, blue above it, hatched where it is NaN.

        Raises:
            ImportError: without matplotlib.
        """
        title = f"Change of the metric, {self.values[()]:.4g}, with one head switched off"
        return plotting.figures_module().changes_figure(self.changes, title, self.paths)

    def to_json(self) -> dict[str, Any]:
        """The ablation as JSON has it, a dict of which `from_json` makes the same value."""
        values = {",".join(f"{i}-{j}" for i, j in off): x for off, x in self.values.items()}
        return dataclasses.asdict(self) | {"values": values}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Ablation":
        """The value whose `to_json` is `found`.

        Args:
            found: What `to_json` gave, also after a file.

        Raises:
            ValueError: if `to_json` did not give it.
        """
        try:
            values = {
                tuple(_head(part) for part in off.split(",") if part): float(value)
                for off, value in found["values"].items()
            }
            paths, num_heads = tuple(found["paths"]), tuple(found["num_heads"])
            order = tuple((layer, head) for layer, head in found["order"])
            _check(num_heads, values, order)
            return cls(found["model"], paths, num_heads, values, order)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"`found` must be what `Ablation.to_json` gave. Received: {str(found)[:80]} "
                f"({error!r})."
            ) from error


def ablate_heads(
    model: keras.Model,
    metric: Callable[[keras.Model], Any],
    layers: Any = None,
    greedy: bool = False,
    better: str = "higher",
    steps: int | None = None,
    save_to: str | os.PathLike[str] | None = None,
    verbose: int | str = "auto",
) -> Ablation:
    """Measure what each head is worth: the metric with the head switched off (Michel et al. 2019).

    A head that is switched off sees nothing (`Nothing()`), beside the rules that the model has, so
    it adds nothing to its layer's output. `metric` gets copies, one for each head and one with all
    of them, compiled as `model` is; `model` stays as it is. In each copy a query that sees no key,
    as at padding, has context 0, as under any rule. A sweep that is interrupted, or whose metric
    raises, keeps what it has: in `save_to`, and as the attribute `ablation` of the exception.

    Args:
        model: A model that `apply_head_masks` takes.
        metric: A function of a model; returns one finite number. It should return the same number
            each time.
        layers: Which attention layers, as in `apply_head_masks`: `None` for all self-attention.
        greedy: Whether to go on, and switch off one head after another: each time the one that
            leaves the best metric. Of equal heads, the first. For n heads, this takes up to
            n * (n + 1) / 2 runs of `metric`.
        better: Which metric is better, "higher" or "lower"; for `greedy`.
        steps: How many heads `greedy` switches off, at least 1; `None` for all.
        save_to: A JSON file, written after each run of `metric`. If it is there already, what it
            holds is not measured again, but for the metric of the model itself.
        verbose: As in `measure_heads`.

    Returns:
        An `Ablation`: `.changes`, `(layers, heads)`, `.order` and `.steps` of `greedy`, `.plot()`,
        `.to_json()`; `print` shows a table.

    Raises:
        TypeError: if `model` is not a Keras model, `metric` no function, or `steps` no whole
            number.
        ValueError: if `metric` returns no finite number, `better` or `steps` is not valid or given
            without `greedy`, the file is of another model or metric, or `apply_head_masks` refuses
            the model.

    >>> import numpy as np
    >>> x = keras.Input((5, 8))
    >>> attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    >>> model = keras.Model(x, attention(x, x))
    >>> attention.set_weights([np.ones_like(w) for w in attention.get_weights()])
    >>> data = np.ones((1, 5, 8), "float32")
    >>> print(ablate_heads(model, lambda model: np.mean(model(data))))
    The metric is 73. Switching off one head changes it by:
    layer      head 0  head 1
    attention  -36     -36
    """
    if better not in ("higher", "lower"):
        raise ValueError(f'`better` must be "higher" or "lower". Received: {better!r}.')
    if steps is not None and not greedy:
        raise ValueError(f"`steps` is for `greedy=True`. Received: steps={steps}, greedy=False.")
    steps = None if steps is None else whole_number(steps, "steps", at_least=1)
    check_verbose(verbose)
    sweeps.check_metric(metric)
    sweep = _Sweep(model, metric, layers, save_to)
    try:
        sweep.run(greedy, better == "higher", steps, verbose)
    except BaseException as error:
        if sweep.values:
            file = sweep.file if sweep.is_saved else None
            sweeps.keep_with(error, "ablation", sweep.result(), file)
        raise
    return sweep.result()


class _Sweep:
    """One call of `ablate_heads`."""

    def __init__(self, model: Any, metric: Callable, layers: Any, save_to: Any):
        self.survey, self.metric = Survey(model), metric
        self.entries = selected(self.survey, layers)
        self.file = sweeps.file_of(save_to)
        self.digest = sweeps.digest(model, self.entries)
        self.values: dict[Off, float] = {}
        self.is_saved = False  # all of them
        self.order: tuple[Head, ...] = ()

    def result(self) -> Ablation:
        paths = tuple(entry.path for entry in self.entries)
        num_heads = tuple(entry.num_heads for entry in self.entries)
        return Ablation(self.digest, paths, num_heads, dict(self.values), self.order)

    def run(self, greedy: bool, higher: bool, steps: int | None, verbose: Any) -> None:
        saved = self._saved()
        own = sweeps.finite(
            self.metric(sweeps.variant(self.survey, self.entries)), "the model itself"
        )
        sweeps.check_own(self.file, saved.get((), own), own)
        self.values = {(): own, **saved}
        self._save()
        every = [(i, head) for i, x in enumerate(self.entries) for head in range(x.num_heads)]
        count = 1 if not greedy else min(len(every), steps or len(every))
        bar = Progress(sum(len(every) - step for step in range(count)), "runs", verbose)
        for _ in range(count):
            left = [head for head in every if head not in self.order]
            for head in left:
                self._measure(_sorted((*self.order, head)))
                bar.step()
            if greedy:
                metrics = [self.values[_sorted((*self.order, head))] for head in left]
                best = max(metrics) if higher else min(metrics)
                self.order += (left[metrics.index(best)],)
        self._save()

    def _measure(self, off: Off) -> None:
        if off not in self.values:
            # A new model for each: in one model whose rule changes, functions that a metric
            # compiled before would go on without the change, and it would take about as long.
            names = ", ".join(f"head {head} of layer {layer}" for layer, head in off)
            value = self.metric(self._without(off))
            self.values[off] = sweeps.finite(value, f"the model without {names}")
            self._save()

    def _without(self, off: Off) -> keras.Model:
        rules = {}
        for layer, heads in itertools.groupby(off, key=lambda head: head[0]):
            path = f"^{re.escape(self.entries[layer].path)}$"
            rules[path] = PerHead({tuple(head for _, head in heads): Nothing()})
        return sweeps.variant(self.survey, self.entries, rules)

    def _saved(self) -> Mapping[Off, float]:
        if self.file is None or not self.file.is_file():
            return {}
        try:
            saved = Ablation.from_json(json.loads(self.file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(
                f"{self.file} (`save_to`) is no file of `ablate_heads`: {error} Pass another."
            ) from error
        if saved.model != self.digest:
            raise ValueError(
                f"{self.file} is of another model, or of other layers: weights, rules and "
                "`layers` must be the same. Pass another `save_to`, or delete the file."
            )
        return saved.values

    def _save(self) -> None:
        if self.file is not None:
            self.is_saved = False
            sweeps.write_whole(self.file, json.dumps(self.result().to_json()))
            self.is_saved = True


def _check(num_heads: Sequence[int], values: Mapping[Off, float], order: Off) -> None:
    """Raise unless there are such heads, each value is finite, and none is missing."""
    for layer, head in itertools.chain(order, *values):
        if not (0 <= layer < len(num_heads) and 0 <= head < num_heads[layer]):
            raise ValueError(f"there is no head {head} of layer {layer}")
    if () not in values:
        raise ValueError("the metric of the model itself is missing")
    if missing := {_sorted(order[: i + 1]) for i in range(len(order))} - values.keys():
        raise ValueError(f"the metric without {min(missing)} is missing")
    if wrong := [value for value in values.values() if not math.isfinite(value)]:
        raise ValueError(f"a metric is {wrong[0]}")


def _sorted(heads: Sequence[Head]) -> Off:
    return tuple(sorted(heads))


def _head(text: str) -> Head:
    layer, head = text.split("-")
    return int(layer), int(head)


def _change(x: float) -> str:
    return "?" if math.isnan(x) else f"{x:+.3g}"
