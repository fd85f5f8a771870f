"""`hm.find_leaks`: change what must not matter, and watch the outputs."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_headmask.heads import outputs, probes, reaches
from keras_headmask.heads.leak_report import Leak, LeakReport
from keras_headmask.heads.probes import Probe
from keras_headmask.heads.progress import Progress
from keras_headmask.heads.subject import Arrays, Subject, batch_of, shapes, subject_of
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import fields
from keras_headmask.rules.base import MaskSpec, check_spec

_DRAWS, _MOST_DRAWS = 2, 8  # of other values at a position; more where pairs are left untried
Masks = dict[tuple[str, int], list[np.ndarray]]  # by output and the positions of an input


def find_leaks(
    model: Any, inputs: Any, rule: MaskSpec | None = None, tolerance: float = 1e-5
) -> LeakReport:
    """Change what must not matter to a model, and report each output that changes.

    This works on any model, also on one whose attention nobody can read: only inputs and outputs
    count. Ids are replaced by other ids that `inputs` hold, floats are perturbed, in several draws.
    Examples are changed one by one, too: no output may depend on another example. Dropout is off.

    Masks and flags are kept while positions change. Where another id changes what is allowed, as
    the end of a sentence does, a pair counts only if it is hidden before and after; where no id
    keeps it hidden, what an embedding layer makes of the id is changed. Outputs at padding matter
    to nobody, nor do those at positions that see nothing and that none sees. The report says how
    many of the hidden pairs were tried.

    Args:
        model: A Keras model, or the folder of a SavedModel, such as "served/1".
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
            `(batch, length)` or `(batch, length, features)`, with at least 2 different ids. One of
            a fixed length, beside others of any, holds features of an example and no positions.
        rule: What outputs may depend on: a spec whose queries are output positions and whose keys
            are input positions. It reads inputs of the model by name. Each output may depend on its
            own position, too; one without an axis of positions on what any position may.
            By default, what the rules, causal masks and padding of the model's attention layers
            allow, multiplied over the layers: a window of 3 reaches 6 in 2 layers.
        tolerance: Relative: changes up to this share of an output value are ignored; of a value
            near 0, up to this share of what is typical of its feature and row. (A feature counts
            as at least a thousandth of what is typical of all: below that it may be rounding.)

    Returns:
        A `LeakReport`, true if something leaked. It prints as a table, and has `plot()` and
        `to_json()`.

    Raises:
        TypeError: for a `model`, `rule` or `tolerance` of another kind.
        ValueError: if the layers do not say what is allowed, for inputs with nothing to change, a
            model whose outputs on the same inputs differ, or if `tolerance` is below 0 or not
            finite.

    What leaks is often a mask that a model has and loses: Keras' causal mask under dropout
    (keras#23038), or RoFormer, BigBird and RemBert in transformers 5.9 (transformers#48745), or
    the sliding window of KerasHub 0.32's Qwen, ignored by its fused operation (JAX, PyTorch).

    >>> import keras
    >>> from keras_headmask import Window
    >>> x = keras.Input((6, 4))
    >>> attention = keras.layers.MultiHeadAttention(2, 4)
    >>> sealed = keras.Model(x, attention(x, x, use_causal_mask=True))
    >>> values = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> print(find_leaks(sealed, values))
    No leaks. Tried 30 of 30 hidden pairs of positions, and 2 of 2 pairs of examples.
    >>> open_to_all = keras.Model(x, attention(x, x))
    >>> bool(find_leaks(open_to_all, values, rule=Window(after=0)))
    True
    """
    if rule is not None:
        check_spec(rule, "rule", "hm.find_leaks(model, inputs, rule=SPEC)")
    tolerance = fields.not_negative(tolerance, "tolerance")
    subject, given = subject_of(model, inputs)
    return _Search(subject, given, rule, tolerance).report()


class _Pairs:
    """An input and an output: which pairs are hidden, were tried, and by how much they leak.

    All `(batch, output positions, input positions)`.
    """

    def __init__(self, hidden: np.ndarray):
        self.hidden = hidden
        self.tried = np.zeros_like(hidden)
        self.change = np.zeros(hidden.shape)


class _Search:
    """All that is tried of one model."""

    def __init__(self, subject: Subject, given: Arrays, rule: MaskSpec | None, tolerance: float):
        self.subject, self.given, self.rule, self.tolerance = subject, given, rule, tolerance
        self.batch = batch_of(given)
        lengths = subject.lengths if None in subject.lengths.values() else {}
        fixed = {name for name, x in given.items() if x.ndim > 1 and lengths.get(name)}
        able = [n for n, x in given.items() if probes.is_changeable(n, x, self.batch)]
        self.names = [name for name in able if name not in fixed]
        self.survey = None if subject.model is None else Survey(subject.model)
        self.entries = [] if self.survey is None else self.survey.known
        self._check()
        self.before = subject.call(given)
        again = probes.again(subject, given)
        self.paddings = reaches.named_for_padding(given) or again.masked_ids
        self.row_masks = again.masks
        self._check_same(again.outputs)
        self._check_paddings()
        self.left_out: list[str] = [
            f"The input {n!r} was kept within an example: {probes.why_kept(x, n in fixed)}."
            for n, x in given.items()
            if n not in self.names and x.ndim > 1
        ]
        self.rows, said = outputs.positions_of(subject, given, self.before, self.names, rule)
        self.left_out += said
        self.limits = {
            name: tolerance * outputs.scales(self.before[name], count is not None)
            for name, count in self.rows.items()
        }
        self.behind = {} if subject.model is None else reaches.behind_outputs(subject.model)
        heads = [entry.num_heads for entry in self.entries if entry.num_heads is not None]
        self.heads = max(heads, default=None)
        seen = self._seen(given)
        self.masks_before = self._with_own(seen)
        self.unused: dict[str, np.ndarray] = {}
        self._find_unused(seen)
        self.first: tuple[Probe, np.ndarray] | None = None
        self.pairs: dict[tuple[str, str], _Pairs] = {}
        self.embedded: dict[str, bool] = {}  # whether an embedding reads the ids of an input

    def _check(self) -> None:
        if self.batch == 0:
            raise ValueError(
                "`inputs` must hold at least one example, each input of shape (batch, length) or "
                f"(batch, length, features). Received: {shapes(self.given)}."
            )
        if not self.names:
            raise ValueError(
                "`inputs` hold nothing to change: ids are replaced by other ids that an input "
                f"holds, and masks are kept. Received: {shapes(self.given)}. Pass examples with "
                "several ids, or floats, of shape (batch, length) or (batch, length, features)."
            )
        rule = self.rule
        if rule is not None and (missing := sorted(rule.inputs.keys() - self.given.keys())):
            raise ValueError(
                f"`rule` reads {missing}, and the inputs are {sorted(self.given)}. Pass a rule "
                "that reads these: the `input` of a spec is its name."
            )
        if rule is None:
            why = "a SavedModel has no layers to read"
            if self.survey is not None:
                why = reaches.why_not_by_layers(self.survey) or ""
            if why:
                raise ValueError(
                    f"Cannot tell what the outputs may depend on: {why}. Pass it as `rule`, a spec "
                    "between output and input positions, such as `rule=hm.recipes.causal()`."
                )

    def _check_same(self, again: Arrays) -> None:
        """Raise for a model that changes by itself."""
        for name, x in self.before.items():
            limit = self.tolerance * outputs.scales(x, False)
            if outputs.difference(x, again[name], False, limit).any():
                raise ValueError(
                    f"The output {name!r} differs in two runs on the same inputs: the model keeps "
                    "a state or draws random numbers. Leaks show where all else stays the same."
                )

    def _check_paddings(self) -> None:
        """Raise where inputs disagree on padding, and no rule says whose counts."""
        of_lengths: dict[int, np.ndarray] = {}
        for name in self.paddings if self.rule is None else ():
            real = self.given[name] != 0
            if (of_lengths.setdefault(real.shape[1], real) != real).any():
                raise ValueError(
                    f"The inputs {self.paddings} mark padding at other positions. Pass as `rule` "
                    "what the outputs may depend on, or search the models of each input."
                )

    def _find_unused(self, seen: Masks) -> None:
        """Positions that take no part in what layers see are padding, if no rule says otherwise."""
        for (output, _), masks in seen.items() if self.rule is None else ():
            unused = reaches.unused(masks)
            if count := int((unused & self._real(output, self.given)).sum()):
                self.left_out.append(
                    f"Of the output {output!r} {count} positions were taken for padding: they see "
                    "nothing, and none sees them."
                )
            self.unused[output] = unused

    def _with_own(self, seen: Masks) -> Masks:
        """`seen`, and each position sees itself."""
        return {
            (output, columns): masks if self.rows[output] is None else reaches.with_own(masks)
            for (output, columns), masks in seen.items()
        }

    def _seen(self, given: Arrays) -> Masks:
        """What each output sees of inputs with so many positions, by layers."""
        columns = {given[name].shape[1] for name in self.names}
        if self.rule is not None:
            by_sizes = {
                (r, c): reaches.by_rule(self.rule, self.heads, given, self.batch, r, c)
                for r in set(self.rows.values())
                for c in columns
            }
            return {(x, c): by_sizes[r, c] for x, r in self.rows.items() for c in columns}
        assert self.subject.model is not None
        if len(columns) > 1:
            raise ValueError(
                f"The inputs have several lengths, {sorted(columns)}. Pass as `rule` what the "
                "outputs may depend on."
            )
        (length,) = columns
        packed = self.subject.pack(given)
        try:
            real = reaches.padding_of(self.paddings, given, length)
            by_layers = reaches.by_layers(
                self.subject.model, self.entries, packed, real, self.batch, length
            )
        except ValueError as error:
            raise ValueError(f"{error} Pass as `rule` what the outputs may depend on.") from error
        nothing = [np.zeros((self.batch, 1, length, length), bool)]
        return {
            (output, length): [
                mask
                for layer, mask in by_layers
                if id(layer) in self.behind.get(output, {id(layer)})
            ]
            or nothing
            for output in self.rows
        }

    def report(self) -> LeakReport:
        hidden = {key: ~reaches.composed(masks) for key, masks in self.masks_before.items()}
        for name in self.names:
            for output in self.rows:
                pairs = hidden[output, self.given[name].shape[1]].copy()
                self.pairs[name, output] = _Pairs(pairs & self._real(output, self.given)[..., None])
        probed = list(self._columns())
        total = self.batch * (self.batch > 1) + len(probed)
        bar, leaks = Progress(total, "changes"), []
        for example in range(self.batch if self.batch > 1 else 0):
            leaks += self._across(example)
            bar.step()
        # What another example changed must not be taken for what the own one did.
        apart = bool(leaks)
        for name, column in probed:
            for examples in (
                np.eye(self.batch, dtype=bool) if apart else [np.ones(self.batch, bool)]
            ):
                self._within(name, column, examples)
            bar.step()
        leaks += [leak for key, pairs in self.pairs.items() for leak in self._found(*key, pairs)]
        leaks.sort(key=lambda leak: -leak.change)
        where = None
        if self.first is not None:
            probe, wrong = self.first
            args = self.subject, probe, self.given, wrong, self.tolerance
            where = probes.first_shown(*args)
        count = sum(int(pairs.hidden.sum()) for pairs in self.pairs.values())
        if self.rule is None and not count:
            self.left_out.insert(
                0,
                "One head without a rule lets an output depend on every position. "
                "`hm.plot_attention` shows whether each head keeps its own rule.",
            )
        shown = max(self.pairs, key=lambda key: self.pairs[key].change.max(initial=0.0))
        return LeakReport(
            tuple(leaks),
            tried=sum(int(p.tried.sum()) for p in self.pairs.values()),
            pairs=count,
            examples=self.batch,
            first_layer=where,
            left_out=tuple(self.left_out),
            hidden=self.pairs[shown].hidden,
            change=self.pairs[shown].change,
            shown=shown,
        )

    def _columns(self) -> Iterator[tuple[str, int]]:
        """Each input and position that some output must not depend on."""
        for name in self.names:
            of_input = [p.hidden.any((0, 1)) for (n, _), p in self.pairs.items() if n == name]
            yield from ((name, int(j)) for j in np.flatnonzero(np.any(of_input, axis=0)))

    # --- Within an example ---------------------------------------------------------------------

    def _within(self, name: str, column: int, examples: np.ndarray) -> None:
        """Change one position of an input in `examples`, boolean `(batch,)`, in several draws."""
        values = self.given[name]
        places = np.zeros(values.shape[:2], bool)
        places[examples, column] = True
        for draw in range(probes.draws(values, _MOST_DRAWS)):
            if draw >= _DRAWS and not self._untried(name, column, examples):
                break
            if draw == _DRAWS and self._is_embedded(name):
                self._try(Probe(name, self.given, places, in_embeddings=True), column)
                break
            other = self.given | {name: probes.replaced(values, places, draw)}
            self._try(Probe(name, other, places), column)

    def _untried(self, name: str, column: int, examples: np.ndarray) -> bool:
        of_input = [p for (n, _), p in self.pairs.items() if n == name]
        return any((p.hidden & ~p.tried)[examples, :, column].any() for p in of_input)

    def _is_embedded(self, name: str) -> bool:
        if name not in self.embedded:
            self.embedded[name] = probes.reads_by_embedding(self.subject, name, self.given)
        return self.embedded[name]

    def _try(self, probe: Probe, column: int) -> None:
        """Run the model on a probe, unless it may change whatever is hidden."""
        reads_it = self.rule is None or probe.name in self.rule.inputs
        is_moved = reads_it and not probe.in_embeddings
        masks = self.masks_before
        if is_moved:
            masks = self._with_own(self._seen(probe.given))
        tried = {output: self._tried(probe, column, output, masks) for output in self.rows}
        if not any(pairs.any() for pairs in tried.values()):
            return
        with probes.applied(self.subject.model, probe):
            after = self.subject.call(probe.given)
        for output, hidden in tried.items():
            pairs, before = self.pairs[probe.name, output], self.before[output]
            positions = self.rows[output] is not None
            moved = outputs.difference(before, after[output], positions, self.limits[output])
            moved = np.where(hidden, moved, 0.0)
            # What is NaN whatever it reads shows nothing.
            shows = ~np.isnan(before).reshape((*hidden.shape, -1)).all(-1)
            pairs.tried[:, :, column] |= hidden & shows
            largest = pairs.change[:, :, column]
            np.maximum(largest, moved, out=largest)
            if moved.any() and self.first is None:
                self.first = probe, hidden

    def _tried(self, probe: Probe, column: int, output: str, masks: Masks) -> np.ndarray:
        """Where an output must not change, `(batch, rows)`, before the probe and with it."""
        key = output, probe.places.shape[1]
        may = reaches.may_change(probe.places, self.masks_before[key], masks[key])
        hidden = self.pairs[probe.name, output].hidden[:, :, column] & ~may
        hidden &= probe.places.any(1, keepdims=True)  # in the examples that are changed
        return hidden & self._real(output, probe.given)

    def _real(self, output: str, given: Arrays) -> np.ndarray:
        """Which rows of an output are no padding, `(batch, rows)`, or true for all."""
        rows = self.rows[output]
        if rows is None:
            return np.ones((self.batch, 1), bool)
        real = reaches.padding_of(self.paddings, given, rows)
        real = np.ones((self.batch, rows), bool) if real is None else real
        real = real & ~self.unused.get(output, np.zeros((1, 1), bool))
        mask = self.row_masks.get(output)
        return real & mask if mask is not None and mask.shape == real.shape else real

    def _found(self, name: str, output: str, pairs: _Pairs) -> Iterator[Leak]:
        for example, row, column in np.argwhere(pairs.change > 0).tolist():
            at = row if self.rows[output] is not None else None
            change = float(pairs.change[example, row, column])
            yield Leak(name, example, column, output, example, at, change)

    # --- Across examples -----------------------------------------------------------------------

    def _across(self, example: int) -> list[Leak]:
        """What others show of a change of one example: of all of it, then of each position."""
        for draw in range(_DRAWS):
            other = probes.another_example(self.given, example, self.batch, draw)
            if not self._seen_elsewhere(other, "", example, None):
                continue
            single = []
            for name, values in self.given.items():
                if other[name] is values:
                    continue
                for column in range(values.shape[1]) if values.ndim > 1 else [None]:
                    one = values.copy()
                    at = example if column is None else (example, column)
                    one[at] = other[name][at]
                    single += self._seen_elsewhere(self.given | {name: one}, name, example, column)
            return single or self._seen_elsewhere(other, "all inputs", example, None)
        return []

    def _seen_elsewhere(
        self, given: Arrays, name: str, example: int, column: int | None
    ) -> list[Leak]:
        after, leaks = self.subject.call(given), []
        for output, rows in self.rows.items():
            limit, is_long = self.limits[output], rows is not None
            moved = outputs.difference(self.before[output], after[output], is_long, limit)
            moved = np.where(self._real(output, self.given), moved, 0.0)
            moved[example] = 0.0
            wrong = moved > 0
            if wrong.any() and self.first is None and name:
                self.first = Probe(name, given, wrong), wrong
            for at, row in np.argwhere(wrong).tolist():
                there = row if rows is not None else None
                change = float(moved[at, row])
                leaks.append(Leak(name, example, column, output, at, there, change))
        return leaks
