"""`hm.find_leaks`: change what must not matter, and watch the outputs.

One engine: each variant of the inputs has one position changed, many variants run as one stacked
batch, and the rows that moved are blamed on the position of their variant.
"""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_headmask.heads import changes, reaches
from keras_headmask.heads.changes import Arrays
from keras_headmask.heads.leak_report import Leak, LeakReport
from keras_headmask.heads.progress import Progress
from keras_headmask.heads.tested import Change, Run, as_numpy, as_tested, shapes
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import fields
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.examples import padding_inputs

_DRAWS, _MOST_DRAWS = 2, 8  # of other values at a position; more where pairs are left untried
_STACKED = 4096  # positions, of all copies of a batch that run as one
_ALL = "all inputs"
_size = operator.attrgetter("change")
Masks = dict[tuple[str, int], list[np.ndarray]]  # by output and the positions of an input


def find_leaks(
    what: Any,
    inputs: Any,
    rule: MaskSpec | None = None,
    real: Any = None,
    tolerance: float = 1e-5,
) -> LeakReport:
    """Change what must not matter to a model, and report each output that changes.

    Only inputs and outputs count, so this works on any function of arrays, such as a model of
    Hugging Face or Flax, or a request to a server. Ids are replaced by other ids that `inputs`
    hold, floats by those of other positions, in several draws; masks and flags are kept. Many
    changes run at a time as one larger batch, or one by one where the batch is fixed. Examples are
    changed, too: no output may depend on another example.

    Where another id changes what is allowed, as the end of a sentence does, a pair counts only if
    it is hidden before and after; where no id keeps it hidden, what a Keras embedding makes of the
    id is changed. No output may depend on padding, and outputs at padding are ignored. The report
    says how many of the hidden pairs were tried.

    Args:
        what: A Keras model (dropout is off), the folder of a SavedModel, such as "served/1", or a
            function. It is called on `inputs` and returns arrays of NumPy, TensorFlow, JAX or
            PyTorch, in dicts, lists or tuples if there are several.
        inputs: What it is called on: arrays, in a dict or list where there are several.
            `(batch, length)` or `(batch, length, features)`, with at least 2 different ids. One of
            a fixed length, beside others of any, holds features of an example and no positions.
        rule: What outputs may depend on: a spec whose queries are output positions and whose keys
            are input positions. It reads inputs by name. Each output may depend on its own
            position, too; one without an axis of positions on what any position may. By default,
            for a Keras model, what the rules, causal masks and padding of its attention layers
            allow, multiplied over the layers: a window of 3 reaches 6 in 2 layers.
        real: Which positions are no padding: `(batch, length)`, true at real tokens. By default
            what inputs named `attention_mask` or `...padding_mask` say, or else Keras' masks. A
            function must not take padding from the ids, since these are changed there, too.
        tolerance: Relative: changes up to this share of an output value are ignored; of a value
            near 0, up to this share of what is typical of its feature and row. (A feature counts
            as at least a thousandth of what is typical of all: below that it may be rounding.)

    Returns:
        A `LeakReport`, true if something leaked. It prints as a table, and has `plot()` and
        `to_json()`.

    Raises:
        TypeError: for a `what`, `rule` or `tolerance` of another kind, or outputs without arrays.
        ValueError: if nothing says what is allowed, for inputs with nothing to change, a model
            whose outputs on the same inputs differ, a `real` of another shape, or a `tolerance`
            below 0 or not finite.

    What leaks is often a mask that a model has and loses: Keras' causal mask under dropout
    (keras#23038), or RoFormer, BigBird and RemBert in transformers 5.9 (transformers#48745), or
    the sliding window of KerasHub 0.32's Qwen, ignored by its fused operation (JAX, PyTorch).

    >>> from keras_headmask import Window
    >>> values = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> print(find_leaks(lambda x: np.cumsum(x, axis=1), values, rule=Window(after=0)))
    No leaks. Tried 30 of 30 hidden pairs of positions, and 2 of 2 pairs of examples.
    >>> bool(find_leaks(lambda x: x - x.mean(1, keepdims=True), values, rule=Window(after=0)))
    True
    """
    if rule is not None:
        check_spec(rule, "rule", "hm.find_leaks(what, inputs, rule=SPEC)")
    tolerance = fields.not_negative(tolerance, "tolerance")
    return _Search(what, inputs, rule, real, tolerance).report()


class _Search:
    """All that is tried of one model or function."""

    def __init__(self, what: Any, inputs: Any, rule: MaskSpec | None, real: Any, tolerance: float):
        self.tested, self.inputs = as_tested(what, inputs)
        self.rule, self.tolerance, self.real = rule, tolerance, real
        sizes = [len(x) for x in self.inputs.values() if x.ndim > 1]
        self.batch = 0 if 0 in sizes else max(sizes, default=0)
        model = self.tested.model
        self.survey = None if model is None else Survey(model)
        known = [] if self.survey is None else self.survey.known
        self.heads = max((entry.num_heads for entry in known), default=None)
        self.counts = [k for k, x in self.inputs.items() if x.ndim and len(x) == self.batch]
        self.numbers = [k for k in self.counts if self.inputs[k].dtype.kind not in "OSU"]
        self.notes: list[str] = []
        self._choose_inputs()
        self._check()
        self.before = self._run_twice()
        self.rows, notes = reaches.rows_of_outputs(
            self.tested, self.inputs, self.before.outputs, self.names, rule
        )
        self.notes += notes
        self.limits = {
            name: tolerance * changes.scales(self.before.outputs[name], count is not None)
            for name, count in self.rows.items()
        }
        self.layers_behind = reaches.layers_behind_outputs(self.survey) if self.survey else {}
        self.runs_stacked = True
        (self.seen,) = self._seen([self.inputs], [self.before])
        # By names of an input and an output: `(batch, output positions, input positions)`.
        self.hidden: dict[tuple[str, str], Any] = {
            (name, output): self._real_rows(output, self.inputs, self.before)[..., None]
            & ~reaches.composed(self.seen[output, self.inputs[name].shape[1]])
            for name in self.names
            for output in self.rows
        }
        self.tried = {key: np.zeros_like(hidden) for key, hidden in self.hidden.items()}
        self.leaks: dict[Leak, Leak] = {}  # with the largest change of any draw
        self.first: tuple[Change, np.ndarray] | None = None

    # --- What is searched -----------------------------------------------------------------------

    def _choose_inputs(self) -> None:
        """The inputs whose positions are changed; notes on the others."""
        kept = {name: changes.why_kept(name, x, self.batch) for name, x in self.inputs.items()}
        if None in self.tested.lengths.values():
            fixed = "it has a fixed length where others may have any, so it holds no positions"
            kept |= {name: fixed for name, length in self.tested.lengths.items() if length}
        self.names = [name for name, why in kept.items() if why is None]
        self.notes += [
            f"The input {name!r} was kept within an example: {why}."
            for name, why in kept.items()
            if why is not None and self.inputs[name].ndim > 1
        ]

    def _check(self) -> None:
        received = shapes(self.inputs)
        if self.batch == 0:
            raise ValueError(
                "`inputs` must hold at least one example, each input of shape (batch, length) or "
                f"(batch, length, features). Received: {received}."
            )
        if not self.names:
            raise ValueError(
                "`inputs` hold nothing to change: ids are replaced by other ids that an input "
                f"holds, and masks are kept. Received: {received}. Pass examples with several ids, "
                "or floats, of shape (batch, length) or (batch, length, features)."
            )
        self.lengths = {self.inputs[name].shape[1] for name in self.names}
        if self.real is not None:
            self.real = as_numpy(self.real) != 0
            if self.real.shape not in {(self.batch, length) for length in self.lengths}:
                raise ValueError(
                    "`real` must be true at positions that are no padding, of the shape "
                    f"{(self.batch, max(self.lengths))}. Received: shape {self.real.shape}."
                )
        if self.rule is not None:
            if missing := sorted(self.rule.inputs.keys() - self.inputs.keys()):
                raise ValueError(
                    f"`rule` reads {missing}, and the inputs are {sorted(self.inputs)}. Pass a "
                    "rule that reads these: the `input` of a spec is its name."
                )
            return
        why: str | None = f"{self.tested.kind} has no layers to read"
        if self.survey is not None:
            why = reaches.why_not_by_layers(self.survey)
        if why:
            raise ValueError(
                f"Cannot tell what the outputs may depend on: {why}. Pass it as `rule`, a spec "
                "between output and input positions, such as `rule=hm.recipes.causal()`."
            )
        if len(self.lengths) > 1:
            raise ValueError(
                f"The inputs have several lengths, {sorted(self.lengths)}. Pass as `rule` what the "
                "outputs may depend on."
            )

    def _run_twice(self) -> Run:
        """A run on the inputs, if a second one gives the same; else an error."""
        run, again = self.tested.run(self.inputs), self.tested.run(self.inputs)
        for name, x in run.outputs.items():
            limit = self.tolerance * changes.scales(x, False)
            if changes.difference(x, again.outputs[name], False, limit).any():
                raise ValueError(
                    f"The output {name!r} differs in two runs on the same inputs. `find_leaks` "
                    "needs a deterministic model: switch off dropout, random layers and state."
                )
        self.notes += [
            f"The output {name!r} was left out: a {kind} is no array of numbers."
            for name, kind in run.skipped.items()
        ]
        return run

    # --- What outputs may depend on -------------------------------------------------------------

    def _real(self, inputs: Arrays, run: Run, length: int) -> np.ndarray:
        """Which positions are no padding, `(batch, length)`."""
        marks = {name: inputs[name] != 0 for name in padding_inputs(inputs)}
        marks = marks or run.masks
        if self.real is not None:  # and an id in the place of padding may be taken for a token
            moved = [x != self.before.masks[k] for k, x in run.masks.items()]
            fits = [x for x in moved if x.shape == self.real.shape]
            marks = {"real": np.logical_or.reduce([self.real, *fits])}
        masks = [x for x in marks.values() if x.shape[1] == length]
        if self.rule is None and any((mask != masks[0]).any() for mask in masks):
            raise ValueError(
                f"{sorted(marks)} mark padding at other positions. Pass in `real` "
                "which positions are no padding."
            )
        every = np.ones((self.batch, length), bool)
        return every & np.logical_or.reduce(masks) if masks else every

    def _real_rows(self, output: str, inputs: Arrays, run: Run) -> np.ndarray:
        """Which rows of an output are no padding, `(batch, rows)`."""
        rows = self.rows[output]
        return np.ones((self.batch, 1), bool) if rows is None else self._real(inputs, run, rows)

    def _seen(self, variants: Sequence[Arrays], runs: Sequence[Run]) -> list[Masks]:
        """What each output sees of inputs with so many positions, for each variant.

        Masks `(batch, heads, rows, columns)` of one rule, or of layers in forward order. No query
        sees padding, and each sees its own position.
        """
        by_layers = []
        if self.rule is None and self.survey is not None:
            (length,) = self.lengths
            stacked = self.tested.pack(self._stacked(variants))
            by_layers = reaches.by_layers(self.survey, stacked, length)
        seen = []
        for n, (inputs, run) in enumerate(zip(variants, runs, strict=True)):
            masks: Masks = {}
            for output, rows in self.rows.items():
                for columns in self.lengths:
                    real = self._real(inputs, run, columns)[:, None, None]
                    if self.rule is not None:
                        by_rule = reaches.by_rule(self.rule, self.heads, inputs, rows, columns)
                        allowed = [by_rule]
                    else:
                        behind = self.layers_behind.get(output)
                        allowed = [
                            mask if len(mask) == 1 else mask[n * self.batch :][: self.batch]
                            for layer, mask in by_layers
                            if behind is None or id(layer) in behind
                        ] or [np.zeros((1, 1, columns, columns), bool)]
                    allowed = [mask & real for mask in allowed]
                    if rows is not None:
                        allowed = [mask | np.eye(rows, columns, dtype=bool) for mask in allowed]
                    masks[output, columns] = allowed
            seen.append(masks)
        return seen

    # --- Runs -----------------------------------------------------------------------------------

    def _stacked(self, variants: Sequence[Arrays]) -> Arrays:
        """Several variants as one batch; an input that does not count examples serves all."""
        joined = {name: np.concatenate([x[name] for x in variants]) for name in self.counts}
        return self.inputs | joined

    def _runs(self, variants: list[Arrays]) -> list[Run]:
        """A run on each variant: parts of one run on a stack of all, if that is possible.

        The stack starts with the unchanged inputs. If their outputs are not as before, the batch is
        fixed, or its examples mix: then variants run one by one, now and later.
        """
        if self.runs_stacked and len(variants) > 1:
            try:
                run = self.tested.run(self._stacked([self.inputs, *variants]))
                same, *parts = (self._part(run, n) for n in range(len(variants) + 1))
                if not any(moved.any() for moved in self._moved(same).values()):
                    return parts
            except Exception:  # whatever a model of a fixed batch raises
                pass
            self.runs_stacked = False
        return [self.tested.run(inputs) for inputs in variants]

    def _part(self, run: Run, number: int) -> Run:
        rows = slice(number * self.batch, (number + 1) * self.batch)
        outputs = {name: run.outputs[name][rows] for name in self.rows}
        masks = {k: x if len(x) == 1 else x[rows] for k, x in run.masks.items()}
        return Run(outputs, masks, {})

    def _moved(self, run: Run) -> dict[str, np.ndarray]:
        """How far each output moved at each position, `(batch, rows)`."""
        return {
            name: changes.difference(
                self.before.outputs[name], run.outputs[name], count is not None, self.limits[name]
            )
            for name, count in self.rows.items()
        }

    # --- Changes --------------------------------------------------------------------------------

    def _change_example(self, example: int) -> None:
        """Change all inputs of one example, its masks too: no other example may notice."""
        places = (np.arange(self.batch) == example)[:, None]
        for draw in range(_DRAWS):
            other = {k: changes.replaced(self.inputs[k], places[:, 0], draw) for k in self.numbers}
            change = Change(_ALL, None, self.inputs | other, places)
            self._blame(change, self.tested.run(change.inputs), self.seen)

    def _change_positions(self, name: str, columns: Sequence[Any], examples: np.ndarray) -> None:
        """Change each of several positions by itself, in `examples`, in several draws."""
        most = max(1, min(_MOST_DRAWS, changes.count_others(self.inputs[name])))
        for draw in range(most if name in self.names else 1):
            if draw >= _DRAWS:
                columns = [j for j in columns if self._is_untried(name, j, examples)]
            if draw == _DRAWS:
                columns = [j for j in columns if not self._try_embedding(name, j, examples)]
            self._try([self._changed(name, j, examples, draw) for j in columns])

    def _changed(self, name: str, column: int | None, examples: np.ndarray, draw: int) -> Change:
        values, places = self.inputs[name], examples[:, None]
        if column is not None:
            places = places & (np.arange(values.shape[1]) == column)
        other = changes.replaced(values, places if values.ndim > 1 else examples, draw)
        return Change(name, column, self.inputs | {name: other}, places)

    def _is_untried(self, name: str, column: int, examples: np.ndarray) -> bool:
        keys = [(name, output) for output in self.rows]
        return any((self.hidden[k] & ~self.tried[k])[examples, :, column].any() for k in keys)

    def _try_embedding(self, name: str, column: int, examples: np.ndarray) -> bool:
        """Change what embeddings make of an id; whether there is one that reads it."""
        change = self._changed(name, column, examples, 0)
        change = change._replace(inputs=self.inputs, in_embeddings=True)
        with self.tested.embeddings_changed(change) as reads:
            run = self.tested.run(self.inputs)
        if reads:
            self._blame(change, run, self.seen)
        return bool(reads)

    def _try(self, changed: list[Change]) -> None:
        variants = [change.inputs for change in changed]
        runs = self._runs(variants)
        size = len(variants) if self.runs_stacked else 1
        for start in range(0, len(variants), size or 1):
            part = slice(start, start + size)
            seen = [self.seen] * size
            if self.rule is None or self.before.masks or changed[0].name in self.rule.inputs:
                seen = self._seen(variants[part], runs[part])
            for change, run, masks in zip(changed[part], runs[part], seen, strict=True):
                self._blame(change, run, masks)

    def _blame(self, change: Change, run: Run, seen: Masks) -> None:
        """Blame the changed position for each row that moved and must not depend on it."""
        examples: Any = change.places.any(1)
        for output, moved in self._moved(run).items():
            must_stay = self._real_rows(output, self.inputs, self.before) & ~examples[:, None]
            if change.name in self.names and change.column is not None:
                key, lengths = (change.name, output), (output, change.places.shape[1])
                may = reaches.may_change(change.places, self.seen[lengths], seen[lengths])
                hidden = self.hidden[key][:, :, change.column] & examples[:, None] & ~may
                hidden &= self._real_rows(output, change.inputs, run)
                must_stay |= hidden
                # A row of NaN, whatever it reads, shows nothing.
                before = self.before.outputs[output].reshape((*hidden.shape, -1))
                self.tried[key][:, :, change.column] |= hidden & ~np.isnan(before).all(-1)
            moved = np.where(must_stay, moved, 0.0)
            if moved.any() and self.first is None:
                self.first = change, moved > 0
            for at, row in np.argwhere(moved).tolist():
                example = at if examples[at] else int(examples.argmax())
                place = None if self.rows[output] is None else row
                size = float(moved[at, row])
                leak = Leak(change.name, example, change.column, output, at, place, size)
                where = dataclasses.replace(leak, change=0.0)
                self.leaks[where] = max(leak, self.leaks.get(where, leak), key=_size)

    # --- The report -----------------------------------------------------------------------------

    def report(self) -> LeakReport:
        for example in range(self.batch if self.batch > 1 else 0):
            self._change_example(example)
        # If examples mix, what one changes must not be blamed on another.
        mix = bool(self.leaks)
        self.runs_stacked = not mix
        groups = np.eye(self.batch, dtype=bool) if mix else np.ones((1, self.batch), bool)
        columns = {name: self._columns(name, mix) for name in self.inputs}
        bar = Progress(sum(map(len, columns.values())), "changes")
        for name, every in columns.items():
            size = max(1, _STACKED // max(1, math.prod(self.inputs[name].shape[:2])))
            for start in range(0, len(every), size):
                for examples in groups:
                    self._change_positions(name, every[start : start + size], examples)
                for _ in every[start : start + size]:
                    bar.step()
        leaks = sorted(self.leaks.values(), key=_size, reverse=True)
        if any(x.input != _ALL and x.example != x.output_example for x in leaks):
            leaks = [x for x in leaks if x.input != _ALL]
        count, tried = (
            sum(int(x.sum()) for x in pairs.values()) for pairs in (self.hidden, self.tried)
        )
        if self.rule is None and not count:
            self.notes.insert(
                0,
                "One head without a rule lets an output depend on every position. "
                "`hm.plot_attention` shows whether each head keeps its own rule.",
            )
        within = [x for x in leaks if x.position is not None and x.example == x.output_example]
        shown = (within[0].input, within[0].output) if within else next(iter(self.hidden))
        change = np.zeros(self.hidden[shown].shape)
        for x in within:
            if (x.input, x.output) == shown:
                change[x.example, x.output_position or 0, x.position] = x.change
        first_layer = None
        if self.first is not None:
            first_layer = self.tested.first_layer(self.inputs, *self.first, self.tolerance)
        return LeakReport(
            tuple(leaks),
            tried=tried,
            pairs=count,
            examples=self.batch,
            first_layer=first_layer,
            left_out=tuple(self.notes),
            hidden=self.hidden[shown],
            change=change,
            shown=shown,
        )

    def _columns(self, name: str, mix: bool) -> list[Any]:
        """The positions of an input to change: the hidden ones, or all where examples mix."""
        if mix and name not in self.names:
            return [None] if name in self.numbers else []
        if mix:
            return list(range(self.inputs[name].shape[1]))
        hidden = [self.hidden[key].any((0, 1)) for key in self.hidden if key[0] == name]
        return np.flatnonzero(np.any(hidden, axis=0)).tolist() if hidden else []
