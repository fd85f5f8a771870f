"""`hm.find_leaks`: change what must not matter, and watch the outputs.

Each variant of the inputs has one position changed; many variants run as one stacked batch.
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_headmask.heads import changes
from keras_headmask.heads.changes import Arrays
from keras_headmask.heads.tested import Tested, as_numpy, shapes
from keras_headmask.look.tables import Printed, Table
from keras_headmask.rules import fields
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.examples import padding_inputs
from keras_headmask.rules.words import enough_heads

_DRAWS, _MOST_DRAWS = 2, 8  # of other values at a position; more where pairs are left untried
_STACKED = 4096  # positions, of all copies of a batch that run as one
_MOST_LINES = 10  # of leaks that are printed
_ALL = "all inputs"
_size = operator.attrgetter("change")


class Leak(NamedTuple):
    """An input position that changed an output that must not depend on it.

    Attributes:
        input, example, position: What was changed; without a position, all of the example.
        output, output_example, output_position: What moved; `None` for one without positions.
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
        examples: How many there are.
        left_out: What was not looked at, and why.
    """

    leaks: tuple[Leak, ...]
    tried: int
    pairs: int
    examples: int
    left_out: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.leaks)

    def _parts(self) -> Iterator[str | Table]:
        others = self.examples * (self.examples - 1)
        tried = f"Tried {self.tried} of {self.pairs} hidden pairs of positions"
        tried += f", and {others} of {others} pairs of examples." if others else "."
        count = len(self.leaks)
        found = f"{count} leak{'s' * (count != 1)}. " if count else ""
        if not self.pairs:
            found += "Nothing is hidden within a text, so nothing is proven. "
        elif not count:
            found = "No leaks. " if self.tried else "Nothing was tried, so nothing is proven. "
        yield found + tried
        if self.leaks:
            rows: list[tuple[str, ...]] = [
                ("input", "example", "position", "output", "example", "position", "change")
            ]
            for *places, change in self.leaks[:_MOST_LINES]:
                cells = ["-" if place is None else str(place) for place in places]
                rows.append((*cells, f"{change:.2g}"))
            yield Table(rows)
        if count > _MOST_LINES:
            yield f"... and {count - _MOST_LINES} more."
        yield from self.left_out


def find_leaks(
    what: Any,
    inputs: Any,
    rule: MaskSpec | None = None,
    real: Any = None,
    tolerance: float = 1e-5,
) -> LeakReport:
    """Change what must not matter to a model, and report each output that changes.

    Ids are replaced by other ids that `inputs` hold, floats by those of other positions, in several
    draws; masks and flags are kept. Many changes run as one larger batch, or one by one where the
    batch is fixed. Examples are changed, too: no output may depend on another example. If one does,
    positions are not tried. Where another id changes what is allowed, as the end of a sentence
    does, a pair counts only if it is hidden before and after.

    Args:
        what: A Keras model (dropout is off), or a function of NumPy arrays. It returns arrays of
            any framework, in dicts, lists or tuples if there are several: `(batch, length, ...)`,
            or without positions `(batch,)` or `(batch, features)`.
        inputs: Arrays, in a dict or list where there are several, `(batch, length)` or
            `(batch, length, features)`, with at least 2 different ids. Those of the greatest
            length are changed by position.
        rule: What outputs may depend on: a spec whose queries are output positions and whose keys
            are input positions; a pair is allowed if it is so for any head. It reads inputs by
            name. Each output may depend on its own position, too; one without positions on what
            any position may. `hm.Full()` hides padding and other examples alone.
        real: True at positions that are no padding: `(batch, length)`. No output may depend on
            padding, and outputs at padding are ignored. By default what inputs named
            `attention_mask` or `...padding_mask` say, or else Keras' masks. A function must not
            take padding from the ids, since these are changed there, too.
        tolerance: Changes up to this share of an output value are ignored; of a value near 0, up
            to this share of what is typical of its feature and row. (A feature counts as at least
            a thousandth of what is typical of all: below that it may be rounding.)

    Returns:
        A `LeakReport`, true if something leaked. It prints as a table.

    Raises:
        TypeError, ValueError: without a `rule`, for inputs with nothing to change, a model whose
            outputs on the same inputs differ, or outputs of another length.

    >>> from keras_headmask import Window
    >>> values = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> print(find_leaks(lambda x: np.cumsum(x, axis=1), values, rule=Window(after=0)))
    No leaks. Tried 30 of 30 hidden pairs of positions, and 2 of 2 pairs of examples.
    >>> bool(find_leaks(lambda x: x - x.mean(1, keepdims=True), values, rule=Window(after=0)))
    True
    """
    if rule is None:
        raise ValueError(
            "`rule` must say which inputs an output may depend on, such as `hm.recipes.causal()`. "
            "`rule=hm.Full()` hides padding and other examples alone."
        )
    check_spec(rule, "rule", "hm.find_leaks(what, inputs, rule=SPEC)")
    tolerance = fields.not_negative(tolerance, "tolerance")
    return _Search(Tested(what, inputs), rule, real, tolerance).report()


class _Search:
    """All that is tried of one model or function. Outputs are `(batch, rows, numbers)`."""

    def __init__(self, tested: Tested, rule: MaskSpec, real: Any, tolerance: float):
        self.tested, self.inputs, self.rule = tested, tested.arrays, rule
        self.notes: list[str] = []
        self._choose_inputs()
        outputs, masks = tested.run(self.inputs)
        self.own_masks = [i for i, x in enumerate(masks) if len(x) == self.batch]
        self.masks = [masks[i] for i in self.own_masks]
        self.rows = self._rows(outputs)
        self.before, again = self._by_rows(outputs, 1)[0], self._runs([self.inputs])[0][0]
        self.limits = {k: tolerance * changes.scales(x) for k, x in self.before.items()}
        for name, moved in self._moved(again).items():
            if moved.any():
                raise ValueError(
                    f"The output {name!r} differs in two runs on the same inputs. `find_leaks` "
                    "needs a deterministic model: switch off dropout, random layers and state."
                )
        self.real = self._real(real)
        self.seen = self._allowed(self.inputs)
        self.hidden = {name: self._hidden(self.seen, name) for name in self.rows}
        self.tried = {
            (k, x): np.zeros_like(of) for k in self.names for x, of in self.hidden.items()
        }
        self.leaks: dict[tuple, Leak] = {}  # by places, with the largest change of any draw

    # --- What is searched -----------------------------------------------------------------------

    def _choose_inputs(self) -> None:
        """The examples, the inputs whose positions are changed, and their length."""
        self.batch = max((len(x) for x in self.inputs.values() if x.ndim > 1), default=0)
        self.counts = [k for k, x in self.inputs.items() if x.ndim and len(x) == self.batch]
        able = {k: self.inputs[k] for k in self.counts if changes.has_positions(k, self.inputs[k])}
        self.length = max((x.shape[1] for x in able.values()), default=0)
        self.names = [name for name, x in able.items() if x.shape[1] == self.length]
        if not self.names:
            raise ValueError(
                "`inputs` hold nothing to change: ids are replaced by other ids that an input "
                f"holds, and masks are kept. Received: {shapes(self.inputs)}. Pass examples with "
                "several ids, or floats, of shape (batch, length) or (batch, length, features)."
            )
        if kept := [k for k, x in self.inputs.items() if k not in self.names and x.ndim > 1]:
            self.notes.append(f"Masks, and inputs without values to change, were kept: {kept}.")
        if missing := sorted(self.rule.inputs.keys() - self.inputs.keys()):
            raise ValueError(
                f"`rule` reads {missing}, and the inputs are {sorted(self.inputs)}: the `input` of "
                "a spec is the name of one of these."
            )

    def _rows(self, outputs: Arrays) -> dict[str, int]:
        """How many positions each output has; 1 if it has no axis of them."""
        rows, wrong = {}, list(self.tested.skipped)
        for name, x in outputs.items():
            if not x.ndim or len(x) != self.batch:
                wrong.append(name)
                continue
            rows[name] = self.length if x.shape[1:2] == (self.length,) else 1
            if rows[name] == 1 and x.ndim > 2:
                raise ValueError(
                    f"The output {name!r}, {x.shape}, must have the {self.length} positions of the "
                    "inputs in its second axis, or be of shape (batch, features). Pass a function "
                    "that returns other outputs alone, or fills up what this one lacks."
                )
        if not rows:
            raise ValueError(
                "The first axis of one output at least must count the examples. Received: "
                f"{shapes(outputs)} from {shapes(self.inputs)}."
            )
        if wrong:
            self.notes.append(f"Outputs without numbers of each example were left out: {wrong}.")
        return rows

    def _real(self, real: Any) -> np.ndarray:
        """Which positions are no padding, `(batch, length)`; padding is what all marks say is."""
        shape = self.batch, self.length
        marks = [self.inputs[name] != 0 for name in padding_inputs(self.inputs)] or self.masks
        if real is not None:
            marks = [as_numpy(real) != 0]
            if marks[0].shape != shape:
                raise ValueError(
                    "`real` must be true at positions that are no padding, of the shape "
                    f"{shape}. Received: shape {marks[0].shape}."
                )
        marks = [x for x in marks if x.shape in (shape, (1, self.length))]
        every = np.ones(shape, bool)
        return every & np.logical_or.reduce(marks) if marks else every

    # --- What outputs may depend on -------------------------------------------------------------

    def _allowed(self, inputs: Arrays) -> np.ndarray:
        """The pairs that the rule allows, by head, `(batch, heads, length, length)`."""
        read = {name: inputs[name] for name in self.rule.inputs}
        whole = [read[k].shape[1] for k in read if read[k].ndim == 4]
        heads = max(enough_heads(self.rule), *whole, 1)
        mask = make_mask(self.rule, self.length, self.length, heads, read)
        return ops.convert_to_numpy(mask) & self.real[:, None, None]

    def _hidden(self, allowed: Any, output: str) -> np.ndarray:
        """Where an output must not depend on an input position, `(batch, rows, length)`."""
        if self.rows[output] == 1:
            return ~allowed.any((1, 2))[:, None]
        return self.real[..., None] & ~(allowed.any(1) | np.eye(self.length, dtype=bool))

    # --- Runs -----------------------------------------------------------------------------------

    def _runs(self, variants: list[Arrays]) -> list[tuple[Arrays, list[np.ndarray]]]:
        """A run on each variant: parts of one run on a stack of all, if that is possible.

        The stack starts with the unchanged inputs. If their outputs are not as before, the batch is
        fixed, or its examples mix: then variants run one by one.
        """
        if len(variants) > 1:
            every = [self.inputs, *variants]
            joined = {k: np.concatenate([x[k] for x in every]) for k in self.counts}
            try:
                outputs, masks = self.tested.run(self.inputs | joined)
                parts = self._by_rows(outputs, len(every))
                own = [np.split(masks[i], len(every)) for i in self.own_masks]
                if not any(moved.any() for moved in self._moved(parts[0]).values()):
                    return [(x, [m[i] for m in own]) for i, x in enumerate(parts)][1:]
            except Exception:  # whatever a model of a fixed batch raises
                pass
        runs = [self.tested.run(inputs) for inputs in variants]
        return [(self._by_rows(x, 1)[0], [m[i] for i in self.own_masks]) for x, m in runs]

    def _by_rows(self, outputs: Arrays, parts: int) -> list[Arrays]:
        """The outputs of each of several stacked parts, `(batch, rows, numbers)`."""
        shaped = {k: outputs[k].reshape(parts, self.batch, n, -1) for k, n in self.rows.items()}
        return [{name: x[part] for name, x in shaped.items()} for part in range(parts)]

    def _moved(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """How far each output moved at each position, `(batch, rows)`."""
        limits = self.limits
        return {k: changes.difference(x, outputs[k], limits[k]) for k, x in self.before.items()}

    # --- Changes --------------------------------------------------------------------------------

    def _change_example(self, example: int) -> None:
        """Change all inputs of one example, its masks too: no other example may notice."""
        places = np.arange(self.batch) == example
        numbers = [name for name in self.counts if self.inputs[name].dtype.kind not in "OSU"]
        for draw in range(_DRAWS):
            other = {k: changes.replaced(self.inputs[k], places, draw) for k in numbers}
            outputs, _ = self._runs([self.inputs | other])[0]
            for output, moved in self._moved(outputs).items():
                moved[places] = 0.0
                if self.rows[output] > 1:
                    moved[~self.real] = 0.0
                self._keep(_ALL, None, output, moved, example)

    def _change_positions(self, name: str) -> None:
        """Change each hidden position of an input by itself, in all examples, in several draws."""
        values = self.inputs[name]
        size = max(1, _STACKED // (self.batch * self.length))
        for draw in range(min(_MOST_DRAWS, changes.count_others(values))):
            wanted = [
                hidden if draw < _DRAWS else hidden & ~self.tried[name, output]
                for output, hidden in self.hidden.items()
            ]
            columns = np.flatnonzero(np.any([x.any((0, 1)) for x in wanted], 0)).tolist()
            for start in range(0, len(columns), size):
                part = columns[start : start + size]
                variants = []
                for column in part:
                    places = np.tile(np.arange(self.length) == column, (self.batch, 1))
                    other = changes.replaced(values, places, draw)
                    variants.append(self.inputs | {name: other})
                for column, variant, run in zip(part, variants, self._runs(variants), strict=True):
                    self._blame(name, column, variant, *run)

    def _blame(
        self, name: str, column: int, variant: Arrays, outputs: Arrays, masks: list[np.ndarray]
    ) -> None:
        """Blame the changed position for each row that moved and must not depend on it."""
        kept = np.ones((self.batch, 1), bool)  # examples whose ids still mark the same padding
        for before, after in zip(self.masks, masks, strict=True):
            kept &= (before == after).all(1, keepdims=True)
        allowed = self._allowed(variant) if name in self.rule.inputs else self.seen
        turned = (allowed != self.seen).any((1, 3))  # rows that now see other keys
        for output, moved in self._moved(outputs).items():
            may = turned if self.rows[output] > 1 else turned.any(1, keepdims=True)
            hidden = self.hidden[output][..., column] & kept & ~may
            # A row of NaN, whatever it reads, shows nothing.
            shows = ~np.isnan(self.before[output]).all(-1)
            self.tried[name, output][..., column] |= hidden & shows
            self._keep(name, column, output, np.where(hidden, moved, 0.0))

    def _keep(
        self, name: str, column: int | None, output: str, moved: np.ndarray, example: Any = None
    ) -> None:
        for at, row in np.argwhere(moved).tolist():
            position = row if self.rows[output] > 1 else None
            changed = at if example is None else example
            leak = Leak(name, changed, column, output, at, position, float(moved[at, row]))
            before = self.leaks.get(leak[:-1], leak)
            self.leaks[leak[:-1]] = max(leak, before, key=_size)

    def report(self) -> LeakReport:
        for example in range(self.batch if self.batch > 1 else 0):
            self._change_example(example)
        if self.leaks:  # what one example changes must not be blamed on another
            self.notes.append(
                "Positions were not tried, since outputs depend on other examples. Pass one "
                "example to try its positions."
            )
        else:
            for name in self.names:
                self._change_positions(name)
        pairs = len(self.names) * sum(int(x.sum()) for x in self.hidden.values())
        tried = sum(int(x.sum()) for x in self.tried.values())
        if 0 < tried < pairs:
            self.notes.append(
                "Pairs were not tried where other ids change what is allowed, or what is padding."
            )
        leaks = sorted(self.leaks.values(), key=_size, reverse=True)
        return LeakReport(tuple(leaks), tried, pairs, self.batch, tuple(self.notes))
