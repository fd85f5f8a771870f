"""How close two results must be: as close as the dtype and the size of the numbers allow."""

import math

import keras
import ml_dtypes
import numpy as np

# Sums of a few hundred products, in whatever order a CPU takes them, differ by this many roundings
# of the largest number. (Half precisions round operands and results; their sums are float32.)
_ROUNDINGS = {"float64": 32, "float32": 32, "float16": 8, "bfloat16": 8}


def tolerance(expected, dtype="float32", depth=1):
    """The largest difference that rounding explains, for all entries of `expected`.

    Args:
        expected: The exact result; its largest finite entry is the size of the numbers, at least 1.
        dtype: The dtype or dtype policy in which the result was computed.
        depth: How many attention layers, or steps of a like size, the numbers went through.
    """
    dtype = dtype.removeprefix("mixed_")
    expected = np.abs(_array(expected))
    size = max(1.0, expected[np.isfinite(expected)].max(initial=0.0))
    return depth * _ROUNDINGS[dtype] * float(ml_dtypes.finfo(dtype).eps) * size


def assert_close(actual, expected, dtype="float32", depth=1, stock=None, message=""):
    """Assert that `actual` is `expected` up to rounding; see `tolerance`.

    Args:
        stock: What stock Keras computes in the same dtype. It may err more than `tolerance` says;
            `actual` is then allowed twice stock's own error.
    """
    actual, expected = _array(actual), _array(expected)
    allowed = tolerance(expected, dtype, depth)
    if stock is not None:
        allowed = max(allowed, 2 * np.abs(_array(stock) - expected).max(initial=0.0))
    assert math.isfinite(allowed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed, err_msg=message)


def _array(x):
    is_host = isinstance(x, (np.ndarray, np.generic, list, tuple, int, float))
    return np.asarray(x if is_host else keras.ops.convert_to_numpy(x), "float64")
