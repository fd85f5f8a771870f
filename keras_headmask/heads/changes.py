"""Other values for inputs, and how far outputs move."""

import numpy as np

from keras_headmask.rules.examples import marks_padding

Arrays = dict[str, np.ndarray]


def has_positions(name: str, values: np.ndarray) -> bool:
    """Whether there are other values for the positions of an input, which is no mask."""
    is_number = values.dtype.kind not in "bOSU" and (
        values.ndim == 2 or values.dtype.kind not in "iu"
    )
    return values.ndim > 1 and is_number and not marks_padding(name) and count_others(values) > 0


def count_others(values: np.ndarray) -> int:
    """How many values can take the place of one: only ids that the inputs hold are known valid."""
    return len(np.unique(values)) - 1 if _are_ids(values) else 2**31


def _are_ids(values: np.ndarray) -> bool:
    """Whether values are ids or flags; Keras' inputs without a dtype hold ids as floats."""
    if values.dtype.kind in "iub":
        return True
    return values.ndim == 2 and bool((np.isfinite(values) & (values == np.round(values))).all())


def replaced(values: np.ndarray, places: np.ndarray, draw: int) -> np.ndarray:
    """`values` with others at `places`, boolean over the first axes; each draw gives other ones.

    >>> replaced(np.array([[3, 5, 8]]), np.array([[True, False, True]]), draw=0).tolist()
    [[5, 5, 3]]
    """
    if _are_ids(values):
        ids = np.array([False, True]) if values.dtype.kind == "b" else np.unique(values)
        other = ids[(np.searchsorted(ids, values) + 1 + draw) % len(ids)]
    else:
        other = _moved(np.where(np.isfinite(values), values, 0), draw)
    places = places.reshape(places.shape + (1,) * (values.ndim - places.ndim))
    return np.where(places, other, values)


def _moved(values: np.ndarray, draw: int) -> np.ndarray:
    """Floats of other positions, valid in their column; noise is added to equal ones."""
    rows = values.astype("float64").reshape((-1, int(np.prod(values.shape[2:]))))
    other = np.roll(rows, 1 + draw % max(len(rows) - 1, 1), 0)
    spread = max(rows.std(), 1e-4 * np.abs(rows).max(initial=0.0)) or 1.0
    noise = spread * (1 + draw) * np.random.default_rng(draw).normal(size=rows.shape)
    is_same = np.isclose(other, rows, rtol=1e-3, atol=1e-3 * spread).all(-1, keepdims=True)
    return np.where(is_same, rows + noise, other).astype(values.dtype).reshape(values.shape)


def scales(values: np.ndarray) -> np.ndarray:
    """The size that changes of an output, `(batch, rows, numbers)`, are compared with.

    It is the value, or what is typical of its feature (the median over rows) in its row (the median
    over features), since a value near 0 is a rounded sum of larger ones. Medians, so that one huge
    row or feature hides nothing. At least 0.1% of what is typical for a feature that is mostly 0,
    30% for a row.
    """
    sizes = np.abs(np.where(np.isfinite(values), values, 0)).reshape(-1, values.shape[-1])
    of_features = _medians(sizes, 0)
    of_features = np.maximum(of_features, 1e-3 * _medians(of_features, None))
    relative = np.divide(sizes, of_features, out=np.zeros_like(sizes), where=of_features > 0)
    usual = of_features * np.maximum(_medians(relative, 1), 0.3)
    return np.maximum(sizes, usual).reshape(values.shape)


def _medians(sizes: np.ndarray, axis: int | None) -> np.ndarray:
    """Medians of the nonzero values along `axis`, which is kept; 0 where all are 0."""
    return np.ma.filled(np.ma.median(np.ma.masked_equal(sizes, 0), axis, keepdims=True), 0)


def difference(before: np.ndarray, after: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """How far an output, `(batch, rows, numbers)`, moved at each row, `(batch, rows)`.

    Changes up to `limit`, of each number, count as 0; one to NaN or from NaN is infinite.
    """
    with np.errstate(invalid="ignore"):
        moved = np.where(before == after, 0.0, np.abs(after - before))
    moved = np.where(np.isnan(before) & np.isnan(after), 0.0, moved)
    moved = np.where(np.isnan(moved), np.inf, moved)
    return np.where(moved > limit, moved, 0.0).max(-1, initial=0.0)
