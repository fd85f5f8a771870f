"""The measure of all comparisons: it passes roundings, and nothing else."""

import numpy as np
import pytest
from tolerance import assert_close, tolerance


def test_products_in_another_order_pass():
    a, b = np.random.default_rng(0).normal(size=(2, 64, 512)).astype("float32")
    assert_close(a[:, ::-1] @ b[:, ::-1].T, a.astype("float64") @ b.T.astype("float64"))


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2**-23), ("mixed_bfloat16", 2**-7)])
@pytest.mark.parametrize("size", [1.0, 37.0])
def test_it_follows_from_dtype_size_and_depth(dtype, rounding, size):
    expected = np.array([size, 0.0])
    assert rounding * size <= tolerance(expected, dtype) <= 64 * rounding * size
    off = np.array([size, 1.5 * tolerance(expected, dtype)])
    with pytest.raises(AssertionError):
        assert_close(off, expected, dtype)
    assert_close(off, expected, dtype, depth=2)


def test_twice_the_error_of_stock_passes_and_no_nan_or_other_shape():
    stock = np.array([1, 1.01, 1])
    assert_close(np.full(3, 1.019), np.ones(3), stock=stock)
    for got in (np.full(3, 1.021), np.array([np.nan, 1, 1]), np.ones((1, 3))):
        with pytest.raises(AssertionError):
            assert_close(got, np.ones(3), stock=stock)
