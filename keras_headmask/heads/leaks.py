"""`hm.find_leaks`: change what must not matter, and watch the outputs.

Each variant of the inputs has one position changed, in all examples; many variants run as one
stacked batch. Models and functions are called on NumPy arrays by name.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.heads.reading import as_numpy, by_name, check_named, is_several
from keras_headmask.look.tables import Printed, Table
from keras_headmask.rules.base import MaskSpec, check_spec, enough_heads, not_negative
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.leaves import marks_padding, padding_inputs

Arrays = dict[str, np.ndarray]

_DRAWS, _MOST_DRAWS = 2, 8  # of other values at a position; more where pairs are left untried
_STACKED = 4096  # positions, of all copies of a batch that run as one
_MOST_LINES = 10  # of leaks that are printed


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
        others, count = self.examples * (self.examples - 1), len(self.leaks)
        found = "No leaks" if self.tried else "No position was tried, so nothing is proven"
        found = f"{count} leak{'s' * (count != 1)}" if count else found
        found += f". Tried {self.tried} of {self.pairs} hidden pairs of positions"
        yield found + (f", and {others} of {others} pairs of examples." if others else ".")
        rows: list = [("input", "example", "position", "output", "example", "position", "change")]
        for *places, change in self.leaks[:_MOST_LINES]:
            rows.append((*("-" if x is None else str(x) for x in places), f"{change:.2g}"))
        yield Table(rows if count else [])
        if count > _MOST_LINES:
            yield f"... and {count - _MOST_LINES} more."
        yield from self.left_out


def find_leaks(
    what: Any, inputs: Any, rule: MaskSpec | None = None, real: Any = None, tolerance: float = 1e-5
) -> LeakReport:
    """Change what must not matter to a model, and report each output that changes.

    Ids are replaced by other ids that `inputs` hold, floats by those of other positions; masks and
    flags are kept. Where another id changes what `rule` allows, as the end of a sentence does, a
    pair counts if it is hidden before and after. Whole examples are changed first.

    Args:
        what: A Keras model (dropout is off), or a function of NumPy arrays that returns arrays of
            any framework: `(batch, length, ...)`, or `(batch,)` or `(batch, features)`.
        inputs: Arrays, in a dict or list where there are several, `(batch, length)` or
            `(batch, length, features)`. Those of the greatest length are changed by position.
        rule: What outputs may depend on, a spec that reads inputs by name: its queries are output
            positions, its keys input positions. A pair is allowed if it is so for any head. A
            position may depend on itself, too, and an output without positions on what any
            position may. `hm.Full()` hides padding and other examples alone.
        real: True at positions that are no padding: `(batch, length)`. No output may depend on
            padding, and outputs at padding are ignored. By default what inputs named
            `attention_mask` or `...padding_mask` say. Ids are changed there, too, so a function
            must not take padding from ids; where a Keras model does, they are kept.
        tolerance: Changes up to this share of an output value are ignored; of a value near 0, up
            to this share of what is typical of its feature and row.

    Returns:
        A `LeakReport`, true if something leaked. It prints as a table.

    Raises:
        TypeError, ValueError: for inputs with nothing to change, padding that is not known, or
            outputs of other lengths or that differ in two runs.

    >>> from keras_headmask import Window
    >>> values = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> print(find_leaks(lambda x: np.cumsum(x, axis=1), values, rule=Window(after=0)))
    No leaks. Tried 30 of 30 hidden pairs of positions, and 2 of 2 pairs of examples.
    >>> bool(find_leaks(lambda x: x - x.mean(1, keepdims=True), values, rule=Window(after=0)))
    True
    """
    check_spec(rule, "rule", "hm.find_leaks(what, inputs, rule=SPEC)")
    return _Search(what, inputs, rule, real, not_negative(tolerance, "tolerance")).report()


class _Search:
    """All that is tried. Arrays have the axes outputs, examples, rows and, of inputs, positions.

    Row i is position i of an output; an output without positions is the last row, `length`.
    """

    def __init__(self, what: Any, inputs: Any, rule: Any, real: Any, tolerance: float):
        self.what, self.given, self.rule = what, inputs, rule
        self.inputs, self.notes = arrays_of(what, inputs), list[str]()
        self._choose_inputs()
        self._choose_real(real)
        self._choose_outputs(tolerance)
        if self._moved(self.inputs).any():
            raise ValueError(
                "`what` must be deterministic. Received: other outputs in a second run on the same "
                "inputs. Switch off dropout, random layers and state."
            )
        self.seen = self._allowed(self.inputs)
        hidden = self.real[..., None] & ~(self.seen.any(1) | np.eye(self.length, dtype=bool))
        pooled: Any = ~self.seen.any((1, 2), keepdims=True)
        self.hidden = np.concatenate([hidden, pooled[:, 0]], 1) & self.has[..., None]
        self.tried = {name: np.zeros_like(self.hidden) for name in self.names}
        self.leaks: dict[tuple, float] = {}  # the largest change of any draw, by places

    def _choose_inputs(self) -> None:
        """The examples, the inputs whose positions are changed, and their length."""
        self.batch = max((len(x) for x in self.inputs.values() if x.ndim > 1), default=0)
        self.counts = {k: x for k, x in self.inputs.items() if len(x) == self.batch}
        able = {k: x for k, x in self.counts.items() if not marks_padding(k) and _count_others(x)}
        self.length = max((x.shape[1] for x in able.values()), default=0)
        self.names = [name for name, x in able.items() if x.shape[1] == self.length]
        if not self.names:
            raise ValueError(
                "`inputs` must hold several ids (batch, length), or floats, since masks are kept. "
                f"Received nothing to change: {shapes(self.inputs)}."
            )
        if kept := [k for k, x in self.inputs.items() if k not in self.names and x.ndim > 1]:
            self.notes.append(f"Masks, and inputs without values to change, were kept: {kept}.")
        if missing := sorted(self.rule.inputs.keys() - self.inputs.keys()):
            received = f"{missing}, and the inputs {sorted(self.inputs)}"
            raise ValueError(f"`rule` must read inputs by their names. Received: {received}.")

    def _choose_real(self, real: Any) -> None:
        """Which positions are no padding, `(batch, length)`; padding is what all marks say is."""
        shape = self.batch, self.length
        marks = [self.inputs[name] != 0 for name in padding_inputs(self.inputs)]
        if real is not None:
            marks = [as_numpy(real) != 0]
            if marks[0].shape != shape:
                raise ValueError(f"`real` must be {shape}. Received: shape {marks[0].shape}.")
        layers = _keras.layers_of(self.what) if isinstance(self.what, keras.Model) else ()
        # `Embedding` has `mask_zero`, `Masking` has `mask_value`.
        makes_masks = any(getattr(x, "mask_zero", hasattr(x, "mask_value")) for x in layers)
        if makes_masks and not marks and not all(self.inputs[k].all() for k in self.names):
            raise ValueError(
                "`real` must say which positions are no padding, since a layer takes 0 for padding "
                f"(Masking, or mask_zero=True). Pass booleans {shape}, such as `real=ids != 0`."
            )
        marks = [x for x in marks if x.shape in (shape, (1, self.length))]
        self.real = np.broadcast_to(np.logical_or.reduce(marks) if marks else True, shape)
        # What such a layer may read: other values at padding would be no padding.
        self.read = [k for k in self.names if makes_masks and not self.inputs[k][~self.real].any()]

    def _choose_outputs(self, tolerance: float) -> None:
        """What outputs are for unchanged inputs, `(batch, length or 1, numbers)`."""
        outputs = run(self.what, self.given, self.inputs)
        self.before: Arrays = {}
        for name, x in outputs.items():
            rows = self.length if x.shape[1:2] == (self.length,) else 1
            if x.ndim and len(x) == self.batch and (rows > 1 or x.ndim < 3):
                self.before[name] = x.reshape(self.batch, rows, -1)
        if not self.before:
            raise ValueError(
                f"An output must be ({self.batch}, {self.length}, ...), with the positions of the "
                f"inputs, or (batch, features). Received: {shapes(outputs)}."
            )
        if wrong := [name for name in outputs if name not in self.before]:
            self.notes.append(f"Outputs of other shapes, or no numbers, were left out: {wrong}.")
        self.limits = {name: tolerance * scales(x) for name, x in self.before.items()}
        are_nan = [np.isnan(x).min(-1) for x in self.before.values()]  # rows which show nothing
        self.shows = np.stack([self._rows(~x) for x in are_nan])
        self.has = np.stack([self._rows(np.ones_like(x)) for x in are_nan])

    def _rows(self, output: np.ndarray) -> np.ndarray:
        """Numbers of each row of an output, put at their places among `length` + 1."""
        edge = (0, 1) if output.shape[-1] > 1 else (self.length, 0)
        return np.pad(output, [*[(0, 0)] * (output.ndim - 1), edge])

    def _allowed(self, inputs: Arrays) -> np.ndarray:
        """The pairs that the rule allows, by head, `(batch, heads, length, length)`."""
        read = {name: inputs[name] for name in self.rule.inputs}
        heads = max([enough_heads(self.rule), *(x.shape[1] for x in read.values() if x.ndim == 4)])
        mask = make_mask(self.rule, self.length, self.length, heads, read)
        return ops.convert_to_numpy(mask) & self.real[:, None, None]

    def _changed(self, names: Iterable[str], place: Any, draw: int) -> Arrays:
        """The inputs with other values at one place of some."""
        changed = {name: self.inputs[name].copy() for name in names}
        for x in changed.values():
            x[place] = _others(x, draw)[place]
        return self.inputs | changed

    def _moved(self, inputs: Arrays, copies: int = 1) -> np.ndarray:
        """How far outputs moved, `(outputs, copies, batch, length + 1)`, for stacked copies."""
        after = run(self.what, self.given, inputs)
        pairs = ((x, after[k].reshape(copies, *x.shape), k) for k, x in self.before.items())
        return np.stack([self._rows(difference(x, y, self.limits[k])) for x, y, k in pairs])

    def _runs(self, variants: list[Arrays]) -> Iterable[np.ndarray]:
        """How far outputs moved in each variant: by one run on a stack of all, and of the inputs.

        If the outputs of these are not as before, a stack is not allowed: variants run one by one.
        """
        every = [self.inputs, *variants]
        joined = {k: np.concatenate([x[k] for x in every]) for k in self.counts}
        try:
            unchanged, *moved = self._moved(self.inputs | joined, len(every)).swapaxes(0, 1)
            if not unchanged.any():
                return moved
        except Exception:  # whatever a model of a fixed batch raises
            pass
        return [self._moved(x)[:, 0] for x in variants]

    def _change_example(self, example: int) -> None:
        """Change all inputs of one example, its masks too: no other example may notice."""
        for draw in range(_DRAWS):
            moved = self._moved(self._changed(self.counts, example, draw))[:, 0]
            moved[:, example] = moved[..., :-1][:, ~self.real] = 0.0
            self._keep("all inputs", example, None, moved)

    def _change_positions(self, name: str) -> None:
        """Change each hidden position of an input by itself, in all examples, in several draws."""
        size = max(1, _STACKED // (self.batch * self.length))
        for draw in range(_count_others(self.inputs[name])):
            wanted = self.hidden & ~self.tried[name] if draw >= _DRAWS else self.hidden
            columns = np.flatnonzero(wanted.any((0, 1, 2))).tolist()
            for start in range(0, len(columns), size):
                part = columns[start : start + size]
                variants = [self._changed([name], np.s_[:, column], draw) for column in part]
                for column, inputs, moved in zip(part, variants, self._runs(variants), strict=True):
                    hidden = self.hidden[..., column] & ~self._turned(name, column, inputs)
                    self.tried[name][..., column] |= hidden & self.shows
                    self._keep(name, None, column, np.where(hidden, moved, 0.0))

    def _turned(self, name: str, column: int, inputs: Arrays) -> np.ndarray:
        """The rows that may see other keys than before, `(batch, length + 1)`."""
        turned = np.zeros((self.batch, self.length), bool)
        if name in self.rule.inputs:
            turned = (self._allowed(inputs) != self.seen).any((1, 3))
        if name in self.read:
            turned = turned | ~self.real[:, [column]]
        return np.concatenate([turned, turned.any(1, keepdims=True)], 1)

    def _keep(self, name: str, example: int | None, column: int | None, moved: np.ndarray) -> None:
        names = list(self.before)
        for output, at, row in np.argwhere(moved).tolist():
            position = None if row == self.length else row
            place = name, at if example is None else example, column, names[output], at, position
            self.leaks[place] = max(self.leaks.get(place, 0.0), float(moved[output, at, row]))

    def report(self) -> LeakReport:
        for example in range(self.batch if self.batch > 1 else 0):
            self._change_example(example)
        are_mixed = bool(self.leaks)  # what one example changes must not be blamed on another
        for name in () if are_mixed else self.names:
            self._change_positions(name)
        pairs = len(self.names) * int(self.hidden.sum())
        tried = sum(int(x.sum()) for x in self.tried.values())
        reason = "where other ids change what is allowed or what is padding, or outputs are NaN."
        if are_mixed:
            reason = (
                "since outputs depend on other examples. Pass one example to try its positions."
            )
        if tried < pairs:
            self.notes.append(f"Pairs were not tried {reason}")
        leaks = sorted(self.leaks.items(), key=operator.itemgetter(1), reverse=True)
        found = tuple(Leak(*(*place, change)) for place, change in leaks)
        return LeakReport(found, tried, pairs, self.batch, tuple(self.notes))


def _ids(values: np.ndarray) -> np.ndarray:
    """The ids or flags of an input, maybe as floats, as Keras' have no dtype; none of others."""
    are_whole = values.ndim == 2 and values.dtype.kind == "f" and np.isfinite(values).all()
    are_whole = are_whole and (values % 1 == 0).all()
    return np.unique(values) if are_whole or values.dtype.kind not in "fcV" else np.zeros(0)


def _count_others(values: np.ndarray) -> int:
    """How many draws have other values, known to be valid; 0 for masks and without positions."""
    ids = _ids(values)
    if values.ndim < 2 or values.dtype.kind in "bOSU" or (values.ndim > 2 and len(ids)):
        return 0
    return min(_MOST_DRAWS, len(ids) - 1 if len(ids) else values.size)


def _others(values: np.ndarray, draw: int) -> np.ndarray:
    """Another value for each: the next id, or a float of another position, or one with noise."""
    if len(ids := _ids(values)):
        return ids[(np.searchsorted(ids, values) + 1 + draw) % len(ids)]
    rows = np.where(np.isfinite(values), values, 0).astype("float64")
    rows = rows.reshape(-1, int(np.prod(values.shape[2:])))
    others = np.roll(rows, 1 + draw % max(len(rows) - 1, 1), 0)
    spread = max(rows.std(), 1e-4 * np.abs(rows).max(initial=0.0)) or 1.0
    noise = spread * (1 + draw) * np.random.default_rng(draw).normal(size=rows.shape)
    is_same = np.isclose(others, rows, rtol=1e-3, atol=1e-3 * spread).all(-1, keepdims=True)
    return np.where(is_same, rows + noise, others).astype(values.dtype).reshape(values.shape)


def scales(values: np.ndarray) -> np.ndarray:
    """The sizes that changes of an output, `(batch, rows, numbers)`, are compared with.

    Each is the value, or what is typical of its feature and row, since a value near 0 is a rounded
    sum of larger ones. Typical is a median: one huge feature or row hides no change of others.
    """
    sizes = np.abs(np.where(np.isfinite(values), values, 0)).reshape(-1, values.shape[-1])

    def medians(x: np.ndarray, axis: int | None) -> np.ndarray:  # of what is not 0
        return np.ma.filled(np.ma.median(np.ma.masked_equal(x, 0), axis, keepdims=True), 0)

    typical = medians(sizes, 0)
    typical = np.maximum(typical, 1e-3 * medians(typical, None))  # of a feature that is mostly 0
    of_row = medians(sizes / np.where(typical > 0, typical, 1), 1)
    return np.maximum(sizes, typical * np.maximum(of_row, 0.3)).reshape(values.shape)


def difference(before: np.ndarray, after: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """How far each row moved: beyond the `limit` of some number, or infinitely, to or from NaN."""
    is_same = (before == after) | (np.isnan(before) & np.isnan(after))
    with np.errstate(invalid="ignore"):
        moved = np.nan_to_num(np.abs(after - before), nan=np.inf, posinf=np.inf)
    return np.where(is_same | (moved <= limit), 0.0, moved).max(-1, initial=0.0)


def arrays_of(what: Any, inputs: Any) -> Arrays:
    """The inputs of a model or function, by name."""
    model = what if isinstance(what, keras.Model) else None
    arrays = {name: as_numpy(x) for name, x in by_name(model, inputs).items()}
    if not arrays or any(not x.ndim for x in arrays.values()):
        raise TypeError(
            "`inputs` must hold arrays, (batch, length) or (batch, length, features), in a dict or "
            f"list where there are several. Received: {inputs!r}."
        )
    check_named(model, arrays)
    return arrays


def run(what: Any, given: Any, arrays: Arrays) -> Arrays:
    """The outputs of a model or function by name; `given` are its inputs as they came."""
    options = {"training": False} if isinstance(what, keras.Model) else {}
    return numbers_of(what(packed(arrays, given), **options), "`what`")


def packed(arrays: Arrays, given: Any) -> Any:
    """`arrays` as the inputs came: in a dict, in a list, or one alone."""
    if isinstance(given, Mapping):
        return dict(arrays)
    return list(arrays.values()) if is_several(given) else next(iter(arrays.values()))


def numbers_of(outputs: Any, kind: str) -> Arrays:
    """The outputs of a function in float64, by their paths; NaN for what is no array of numbers."""
    leaves = {path.lstrip("/") or "output": x for path, x in _leaves(outputs, "").items()}
    known = {k: x for k, x in leaves.items() if hasattr(x, "dtype") or isinstance(x, (int, float))}
    arrays = {name: as_numpy(x) for name, x in known.items()}
    arrays = {k: x.astype("float64") for k, x in arrays.items() if x.dtype.kind not in "OSU"}
    if not arrays:
        raise TypeError(
            f"{kind} must return arrays of numbers, in a dict, list or tuple if there are several. "
            f"Received: {sorted({type(x).__name__ for x in leaves.values()})}."
        )
    return dict.fromkeys(leaves, np.array(np.nan)) | arrays


def _leaves(nest: Any, path: str) -> dict[str, Any]:
    if isinstance(nest, (list, tuple)):
        nest = dict(enumerate(nest))
    if not isinstance(nest, Mapping):  # (of any class, such as those of Hugging Face)
        return {} if nest is None else {path: nest}
    return {k: x for key, part in nest.items() for k, x in _leaves(part, f"{path}/{key}").items()}


def shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name!r}: {x.dtype} {x.shape}" for name, x in arrays.items())
