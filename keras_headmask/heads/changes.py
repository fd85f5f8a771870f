"""Other values for inputs whose leaks are searched, and how far outputs move."""

import numpy as np

from keras_headmask.rules.examples import marks_padding

Arrays = dict[str, np.ndarray]


# --- Other inputs ---------------------------------------------------------------------------------


def why_kept(name: str, values: np.ndarray, batch: int) -> str | None:
    """Why no position of an input is changed; `None` if its positions are."""
    kind = values.dtype.kind
    is_mask = kind == "b" or marks_padding(name)
    has_positions = values.ndim > 1 and len(values) == batch and values.shape[1] > 0
    is_number = kind not in "OSU" and (values.ndim == 2 or kind not in "iu")
    if has_positions and is_number and not is_mask and count_others(values):
        return None
    if values.size and (values == values.flat[0]).all():
        return "all its values are equal"
    return "it is a mask, or holds no numbers by position"


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
    """Floats of other positions, so that each column holds values that are valid in it.

    Where those are the same, noise as large as the values is added.
    """
    rows = values.astype("float64").reshape((-1, int(np.prod(values.shape[2:]))))
    other = np.roll(rows, 1 + draw % max(len(rows) - 1, 1), 0)
    spread = max(rows.std(), 1e-4 * np.abs(rows).max(initial=0.0)) or 1.0
    noise = spread * (1 + draw) * np.random.default_rng(draw).normal(size=rows.shape)
    is_same = np.isclose(other, rows, rtol=1e-3, atol=1e-3 * spread).all(-1, keepdims=True)
    return np.where(is_same, rows + noise, other).astype(values.dtype).reshape(values.shape)


# --- How far outputs move -------------------------------------------------------------------------


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

    Raises:
        ValueError: if the shapes differ.
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
