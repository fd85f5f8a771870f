"""Outputs of a model whose leaks are searched: which have positions, and how far they moved."""

import numpy as np

from keras_headmask.attention.lost_masks import marks_padding
from keras_headmask.heads.subject import Arrays, Subject, batch_of, shapes
from keras_headmask.rules.base import MaskSpec


def positions_of(
    subject: Subject, given: Arrays, before: Arrays, names: list[str], rule: MaskSpec | None
) -> tuple[dict[str, int | None], list[str]]:
    """How many positions each output has, `None` for one without; and what is to be said of some.

    Args:
        subject, given, before: What is tried, its inputs, and the outputs on these.
        names: The inputs whose positions are changed.
        rule: What the outputs may depend on, if it was passed; without it, outputs that have no
            positions are left out.

    Raises:
        ValueError: if no output is left.
    """
    lengths = {given[name].shape[1] for name in names}
    shorter = _on_less(subject, given, lengths)
    rows: dict[str, int | None] = {}
    said = []
    for name, x in before.items():
        which = f"The output {name!r}, {x.shape},"
        if not x.ndim or len(x) != batch_of(given):
            said.append(f"{which} was left out: its first axis does not count the examples.")
            continue
        is_as_long = x.ndim > 1 and x.shape[1] in lengths
        if shorter is not None:
            # By a rule on positions alone it may have any number of them.
            may_differ = rule is not None and not rule.inputs
            gets_shorter = [a < b for a, b in zip(shorter[name].shape, x.shape, strict=True)]
            has_positions = gets_shorter[1:2] == [True] and (is_as_long or may_differ)
            has_positions &= rule is not None or not any(gets_shorter[2:])  # else it has pairs
        else:  # of one length, so that what is as long may be features or heads
            is_unclear = x.ndim == 2 or bool(lengths & set(x.shape[2:]))
            has_positions = is_as_long and not (is_unclear and rule is None and x.ndim != 3)
            if has_positions and is_unclear:
                said.append(f"{which} was taken to have the input's positions.")
        if has_positions:
            rows[name] = x.shape[1]
        elif rule is not None:
            rows[name] = None
            if x.ndim > 2:  # (examples x features have none)
                said.append(
                    f"{which} was taken to have no positions: it may depend on what any position "
                    "may."
                )
        else:
            said.append(
                f"{which} has no axis that is known to be the input's positions: pass `rule` to "
                "include it."
            )
    if not rows:
        way_out = "The first axis of one at least must count the examples."
        if rule is None:
            way_out = (
                "Pass as `rule` which positions such an output may depend on, for example "
                f"`rule={_example(given)}`."
            )
        raise ValueError(
            f"No output has an axis known to be positions: {shapes(before)} from {shapes(given)}. "
            f"{way_out}"
        )
    return rows, said


def _example(given: Arrays) -> str:
    """A rule to propose for a pooled output: the real tokens, or the first positions."""
    if masks := [name for name in given if marks_padding(name)]:
        return f"hm.recipes.padding({masks[0]!r})"
    ids = [name for name, x in given.items() if x.dtype.kind in "iu"]
    return f"~hm.KeyIn({ids[0]!r}, 0)" if ids else "hm.Keys(0, 4)"


def _on_less(subject: Subject, given: Arrays, lengths: set[int]) -> Arrays | None:
    """The outputs on inputs without their last position; `None` if their length is fixed.

    An axis as long as the inputs has their positions if it gets shorter with them; else it may be
    one of features.
    """
    less = {}
    for name, x in given.items():
        axes = x.shape[1:3] if x.dtype.kind == "b" else x.shape[1:2]  # (pairs, in a mask)
        axes = () if subject.lengths.get(name) else axes
        cut = (slice(-1) if size in lengths else slice(None) for size in axes)
        less[name] = x[(slice(None), *cut)]
    if all(less[name].shape == x.shape for name, x in given.items()):
        return None
    try:
        outputs = subject.call(less)
    except Exception:  # whatever the model, or a signature, has against it
        return None
    return outputs


def scales(values: np.ndarray, positions: bool) -> np.ndarray:
    """The size that a change of each output value is compared with.

    It is the value, or what is typical of its feature (the median over rows) in its row (the median
    over features), since a value near 0 is a rounded sum of larger ones. Medians, so that one huge
    row or feature hides nothing. At least 0.1% of what is typical for a feature that is mostly 0,
    30% for a row.
    """
    values = np.atleast_1d(values)
    count = values.shape[-1] if values.ndim > 1 + positions else 1
    sizes = np.abs(np.where(np.isfinite(values), values, 0)).reshape(-1, count)
    of_features = _medians(sizes, 0)
    of_features = np.maximum(of_features, 1e-3 * _medians(of_features, None))
    relative = np.divide(sizes, of_features, out=np.zeros_like(sizes), where=of_features > 0)
    usual = of_features * np.maximum(_medians(relative, 1), 0.3)
    return np.maximum(sizes, usual).reshape(values.shape)


def _medians(sizes: np.ndarray, axis: int | None) -> np.ndarray:
    """Medians of the nonzero values along `axis`, which is kept; 0 where all are 0."""
    return np.ma.filled(np.ma.median(np.ma.masked_equal(sizes, 0), axis, keepdims=True), 0)


def difference(
    before: np.ndarray, after: np.ndarray, positions: bool, limit: np.ndarray | float = 0.0
) -> np.ndarray:
    """How far an output moved at each position, `(batch, T)`; T is 1 for one without positions.

    Changes up to `limit`, of each number, count as 0; one to NaN or from NaN is infinite.
    """
    if before.shape != after.shape:
        raise ValueError(
            f"The shape of an output depends on the values of inputs: {before.shape} and "
            f"{after.shape}. Leaks are looked for in outputs of one shape."
        )
    before, after = np.atleast_1d(before, after)
    with np.errstate(invalid="ignore"):
        moved = np.where(before == after, 0.0, np.abs(after - before))
    moved = np.where(np.isnan(before) & np.isnan(after), 0.0, moved)
    moved = np.where(np.isnan(moved), np.inf, moved)
    moved = np.where(moved > limit, moved, 0.0)
    rows = before.shape[1] if positions else 1
    return moved.reshape(len(before), rows, -1).max(-1, initial=0.0)
