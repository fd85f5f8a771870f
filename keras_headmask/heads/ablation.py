"""What each head is worth: a metric with the head switched off (Michel et al. 2019).

`Sweep` measures variants of a model, each once. `suggest_rules` uses it, too.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.heads.progress import Progress
from keras_headmask.look import plotting
from keras_headmask.look.tables import Printed, Table, layer_rows
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.rule import spec_of
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.per_head import PerHead
from keras_headmask.rules.positions import Keys, Nothing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Head = tuple[int, int]  # its layer, and its number in there
Heads = tuple[Head, ...]  # in order


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
    values: Mapping[Heads, float]
    order: Heads = ()

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
        return tuple(self.values[off] for off in _growing(self.order))

    def _parts(self) -> Iterator[str | Table]:
        yield f"The metric is {self.values[()]:.4g}. Switching off one head changes it by:"
        rows = [
            [tuple("" if i >= heads else _change(x) for i, x in enumerate(row))]
            for heads, row in zip(self.num_heads, self.changes, strict=True)
        ]
        head = ("layer", *(f"head {head}" for head in range(max(self.num_heads))))
        yield Table([head, *layer_rows(self.paths, rows)])
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
        figures = plotting.figures_module()
        return figures.heads_figure({"": self.changes}, "", [title], paths=self.paths)

    def to_json(self) -> dict[str, Any]:
        """The ablation as JSON has it, a dict of which `from_json` makes the same value."""
        values = {",".join(f"{i}-{j}" for i, j in heads): x for heads, x in self.values.items()}
        return dataclasses.asdict(self) | {"values": values}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Ablation":
        """The value whose `to_json` is `saved`.

        Args:
            saved: What `to_json` returned, also after a file.

        Raises:
            ValueError: if `to_json` did not return it.
        """
        try:
            values: dict[Heads, float] = {}
            for text, value in saved["values"].items():
                pairs = (part.split("-") for part in text.split(",") if part)
                values[tuple((int(layer), int(head)) for layer, head in pairs)] = float(value)
            order = tuple((layer, head) for layer, head in saved["order"])
            num_heads = tuple(saved["num_heads"])
            for layer, head in itertools.chain(order, *values):
                if not (0 <= layer < len(num_heads) and 0 <= head < num_heads[layer]):
                    raise ValueError(f"there is no head {head} of layer {layer}")
            if missing := {(), *_growing(order)} - values.keys():
                raise ValueError(f"the metric without the heads {min(missing)} is missing")
            if wrong := [value for value in values.values() if not math.isfinite(value)]:
                raise ValueError(f"a metric is {wrong[0]}")
            return cls(saved["model"], tuple(saved["paths"]), num_heads, values, order)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"`saved` must be what `Ablation.to_json` returned. Received: {str(saved)[:80]} "
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
    if steps is not None and not greedy:
        raise ValueError(f"`steps` is for `greedy=True`. Received: steps={steps}, greedy=False.")
    steps = None if steps is None else whole_number(steps, "steps", at_least=1)
    file = check_sweep(metric, better, save_to)
    survey = Survey(model)
    entries = selected(survey, layers)
    left = [(i, head) for i, entry in enumerate(entries) for head in range(entry.num_heads)]
    rounds = 1 if not greedy else min(len(left), steps or len(left))
    bar = Progress(sum(len(left) - number for number in range(rounds)), "runs", verbose)
    best = max if better == "higher" else min
    order: list[Head] = []

    def without(heads: Heads) -> dict[str, MaskSpec]:
        return {
            entries[layer].path: PerHead({tuple(head for _, head in of_layer): Nothing()})
            for layer, of_layer in itertools.groupby(heads, key=lambda head: head[0])
        }

    sweep = Sweep(survey, entries, without, metric, file)
    with sweep.keeping("ablation", lambda: sweep.result(order)):
        sweep.start()
        for _ in range(rounds):
            values = {}
            for head in left:
                off = sorted([*order, head])
                names = ", ".join(f"head {head} of layer {layer}" for layer, head in off)
                values[head] = sweep.value(off, f"the model without {names}")
                bar.step()
            if greedy:
                order.append(best(left, key=values.__getitem__))
                left.remove(order[-1])
    return sweep.result(order)


def _growing(order: Heads) -> list[Heads]:
    """The heads that are off after each step."""
    return [tuple(sorted(order[: i + 1])) for i in range(len(order))]


def _change(x: float) -> str:
    return "?" if math.isnan(x) else f"{x:+.3g}"


# --- A metric of many variants -------------------------------------------------------------------


def check_sweep(metric: Any, better: Any, save_to: Any) -> Path | None:
    """Raise for arguments that no sweep takes. Returns the file to save to."""
    if not callable(metric):
        raise TypeError(
            "`metric` must be a function of a model that returns a number, such as `lambda model: "
            f"model.evaluate(x, y)[1]`. Received: {metric!r}."
        )
    if better not in ("higher", "lower"):
        raise ValueError(f'`better` must be "higher" or "lower". Received: {better!r}.')
    file = None if save_to is None else Path(save_to)
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ValueError(
            "`save_to` must be a file, there or not yet, in a folder that is there. Received: "
            f"{str(save_to)!r}."
        )
    return file


class Sweep:
    """A metric of variants of a model, each measured once; `file` keeps them as an `Ablation`.

    A variant is named by the heads that are restricted; that of no heads is the model itself.
    `specs_for` has its rules, by the path of the layer, which hold beside the model's own.
    `depends_on` is plain JSON on which these rules depend.
    """

    def __init__(
        self,
        survey: Survey,
        entries: list[AttentionLayer],
        specs_for: Callable[[Heads], Mapping[str, MaskSpec]],
        metric: Callable[[keras.Model], Any],
        file: Path | None,
        depends_on: Any = None,
    ):
        self.survey, self.entries, self.specs_for = survey, entries, specs_for
        self.metric, self.file = metric, file
        self.digest = _digest(survey.model, entries, depends_on)
        self.values: dict[Heads, float] = {}
        self.is_saved = False  # all of them

    def result(self, order: Iterable[Head] = ()) -> Ablation:
        paths = tuple(entry.path for entry in self.entries)
        num_heads = tuple(entry.num_heads for entry in self.entries)
        return Ablation(self.digest, paths, num_heads, dict(self.values), tuple(order))

    def start(self) -> float:
        """The metric of the model itself. It is always measured: so a file of another metric shows.

        From then on a variant that the file holds is not measured again.
        """
        saved, value = self._saved(), self._measured((), "the model itself")
        if not math.isclose(saved.get((), value), value, rel_tol=1e-3, abs_tol=1e-9):
            raise ValueError(
                f"{self.file} is of another metric, or of other data: there the model's own is "
                f"{saved[()]}, and now {value}. Pass another `save_to`, or delete the file."
            )
        self.values = {(): value, **saved}
        self._save()
        return self.values[()]

    def value(self, heads: Iterable[Head], name: str) -> float:
        """The metric of one variant. Errors call it `name`."""
        key = tuple(sorted(heads))
        if key not in self.values:
            self.values[key] = self._measured(key, name)
            self._save()
        return self.values[key]

    @contextlib.contextmanager
    def keeping(self, attribute: str, result: Callable[[], Any]) -> Iterator[None]:
        """Let an exception that ends the sweep hold what was measured, and say where it is."""
        try:
            yield
        except BaseException as error:
            if self.values:
                setattr(error, attribute, result())
                file = f", and in {self.file}, from which a new call goes on"
                error.add_note(
                    f"What was measured before is in the attribute `{attribute}` of this exception"
                    f"{file if self.is_saved else ''}."
                )
            raise

    def _measured(self, heads: Heads, name: str) -> float:
        """The metric of a new copy, compiled as the model is.

        In one copy whose rule changes, functions that a metric compiled before would go on without
        the change, and it would take about as long. Each layer gets a rule, if only one that hides
        nothing: for a query that sees no key, as at padding, stock Keras takes the mean of all
        values, and attention under a rule 0.
        """
        from keras_headmask.retrofit.apply import masked_by  # needs all of retrofit/

        specs: dict[str, MaskSpec] = {entry.path: Keys(0) for entry in self.entries}
        specs |= {path: spec & Keys(0) for path, spec in self.specs_for(heads).items()}
        by_regex = {f"^{re.escape(path)}$": spec for path, spec in specs.items()}
        copy = masked_by(self.survey, by_regex, existing="and")
        _keras.compile_alike(self.survey.model, copy)
        return _finite(self.metric(copy), name)

    def _saved(self) -> Mapping[Heads, float]:
        if self.file is None or not self.file.is_file():
            return {}
        try:
            saved = Ablation.from_json(json.loads(self.file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(
                f"{self.file} (`save_to`) is no file of `ablate_heads` or `suggest_rules`: {error} "
                "Pass another."
            ) from error
        if saved.model != self.digest:
            raise ValueError(
                f"{self.file} is of another model, of other layers, or of other suggested rules. "
                "Pass another `save_to`, or delete the file."
            )
        return saved.values

    def _save(self) -> None:
        if self.file is not None:
            self.is_saved = False
            _write_whole(self.file, json.dumps(self.result().to_json()))
            self.is_saved = True


def _digest(model: keras.Model, entries: list[AttentionLayer], depends_on: Any) -> str:
    """A fingerprint of all that a metric depends on, except its function and data."""
    specs = [spec_of(entry.layer) for entry in entries]
    rules = [None if spec is None else spec.get_config() for spec in specs]
    layers = [(x.path, x.num_heads, rule) for x, rule in zip(entries, rules, strict=True)]
    digest = hashlib.sha256(json.dumps([layers, depends_on]).encode())
    for weight in model.weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()


def _finite(value: Any, name: str) -> float:
    """`value` as a number; `name` says of which model it is the metric."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        text, shape = " ".join(repr(value).split()), tuple(getattr(value, "shape", ()))
        text = text if len(text) < 80 else f"{text[:77]}..."
        raise ValueError(
            f"`metric` must return one finite number. Received for {name}: "
            f"{f'shape {shape}, ' if shape else ''}{text}. Of a list or dict, as `model.evaluate` "
            "returns, pick one; skip or clip batches of inf and NaN."
        )
    return number


def _write_whole(file: Path, text: str) -> None:
    """Write a file as a whole, so that an interrupt leaves it as it was."""
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    os.replace(written, file)
