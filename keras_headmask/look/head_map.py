"""A number for each head as a picture: a heat map, layers downward and heads to the right."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_headmask.look.plotting import with_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def heads_figure(
    values: np.ndarray, title: str, paths: Sequence[str], diverging: bool = False
) -> "Figure":
    """A heat map of `values`, `(layers, heads)`, with a row for each of `paths`; NaN is hatched.

    With `diverging`, two colours stand for numbers below and above 0, and white for 0.
    """
    return with_matplotlib().heads_figure(values, title, paths, diverging)
