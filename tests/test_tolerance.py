"""The measure of all comparisons: it passes roundings, and nothing else."""

import numpy as np
import pytest
from tolerance import assert_close, tolerance


@pytest.mark.parametrize("size", [0.1, 1.0, 37.0, 1e4])
def test_float32_products_in_another_order_pass(size):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 64, 512)).astype("float32") * np.sqrt(size / 8, dtype="float32")
    exact = a.astype("float64") @ b.T.astype("float64")
    for made in (a @ b.T, (a[:, ::-1] @ b[:, ::-1].T)):
        assert_close(made, exact)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2**-23), ("mixed_bfloat16", 2**-7)])
@pytest.mark.parametrize("size", [1.0, 37.0])
def test_it_follows_from_dtype_size_and_depth(dtype, rounding, size):
    expected = np.array([size, 0.0])
    assert rounding * size <= tolerance(expected, dtype) <= 64 * rounding * size
    assert tolerance(expected, dtype, depth=3) == 3 * tolerance(expected, dtype)
    off = np.array([0.0, 1.5 * tolerance(expected, dtype)])
    with pytest.raises(AssertionError):
        assert_close(expected + off, expected, dtype)
    assert_close(expected + off, expected, dtype, depth=2)


def test_twice_the_error_of_stock_is_allowed_and_no_more():
    expected, stock = np.ones(3), np.array([1, 1.01, 1])
    assert_close(expected + 0.019, expected, stock=stock)
    with pytest.raises(AssertionError):
        assert_close(expected + 0.021, expected, stock=stock)


def test_nan_and_other_shapes_fail():
    with pytest.raises(AssertionError):
        assert_close(np.array([np.nan, 1]), np.array([1, 1]))
    with pytest.raises(AssertionError):
        assert_close(np.ones((2, 3)), np.ones((2, 1)) * np.ones((3, 1, 1)))
