"""Checks for test suites: each raises an AssertionError that says what is wrong."""

from typing import Any

from keras_headmask.heads.leaks import find_leaks
from keras_headmask.rules.base import MaskSpec


def assert_no_leaks(
    model: Any, inputs: Any, rule: MaskSpec | None = None, tolerance: float = 1e-5
) -> None:
    """Fail if `hm.find_leaks` finds a leak, or can try no hidden pair at all.

    Args:
        model, ..., tolerance: As for `hm.find_leaks`.

    Raises:
        AssertionError: with the report as its text.
        TypeError, ValueError: as `hm.find_leaks`.

    >>> import keras, numpy as np
    >>> from keras_headmask import recipes
    >>> x = keras.Input((6, 4))
    >>> attention = keras.layers.MultiHeadAttention(2, 4)
    >>> model = keras.Model(x, attention(x, x, use_causal_mask=True))
    >>> assert_no_leaks(model, np.random.rand(2, 6, 4), rule=recipes.causal())
    """
    __tracebackhide__ = True
    report = find_leaks(model, inputs, rule, tolerance)
    if report or not report.tried:
        raise AssertionError(str(report))
