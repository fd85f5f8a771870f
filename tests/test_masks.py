"""Masks as tensors: merged, complemented, and read from and written for others."""

import itertools

import keras
import numpy as np
import pytest
from contract import numpy
from keras import ops

import keras_headmask as hm

RANDOM = np.random.default_rng(0)
B, H, T, S = 2, 3, 4, 5
SHAPES = [(T, S), (B, T, S), (B, H, T, S), (1, H, 1, S), (B, 1, T, 1)]
MASKS = [RANDOM.integers(0, 2, shape).astype("bool") for shape in SHAPES]
AS_GIVEN = {
    "booleans": lambda mask: mask,
    "integers": lambda mask: mask.astype("int32"),
    "a tensor": ops.convert_to_tensor,
}


def lifted(mask):
    """Rank 4 by NumPy alone: a rank-3 mask gets its head axis in the middle."""
    return mask if mask.ndim == 4 else mask[None, None] if mask.ndim == 2 else mask[:, None]


def check(made, expected):
    assert keras.backend.standardize_dtype(made.dtype) == "bool"
    np.testing.assert_array_equal(numpy(made), expected)


@pytest.mark.parametrize("given", AS_GIVEN.values(), ids=AS_GIVEN)
def test_masks_of_all_ranks(given):
    for one, other in itertools.product(MASKS, MASKS):
        check(hm.and_masks(given(one), other), lifted(one) & lifted(other))
        check(hm.or_masks(given(one), other), lifted(one) | lifted(other))
        check(hm.not_mask(given(one)), ~lifted(one))
    check(hm.and_masks(*MASKS), np.logical_and.reduce(np.broadcast_arrays(*map(lifted, MASKS))))


def test_the_batch_never_meets_the_heads():
    """With B == H a wrong axis would broadcast without a word."""
    padding, per_head = np.array([[[1, 0]], [[1, 1]]]), np.array([[[[0, 1]], [[1, 1]]]])
    expected = [[[[0, 0]], [[1, 0]]], [[[0, 1]], [[1, 1]]]]
    check(hm.and_masks(padding, per_head), np.array(expected, "bool"))


def test_no_mask():
    mask = MASKS[0]
    assert hm.and_masks() is None
    assert hm.and_masks(None, None) is None
    check(hm.and_masks(None, mask, None), lifted(mask))
    assert hm.or_masks(mask, None) is None  # None allows everything
    assert hm.or_masks(None) is None


def test_symbolic_masks():
    x, y = keras.Input((T, S), dtype="bool"), keras.Input((H, T, S), dtype="int32")
    outputs = [hm.and_masks(x, y, MASKS[0]), hm.or_masks(x, y), hm.not_mask(x), hm.to_additive(x)]
    shapes = [(None, H, T, S), (None, H, T, S), (None, 1, T, S), (None, T, S)]
    assert [tuple(out.shape) for out in outputs] == shapes
    made = keras.Model([x, y], outputs)([MASKS[1], MASKS[2].astype("int32")])
    one = lifted(MASKS[1])
    check(made[0], one & MASKS[2] & MASKS[0])
    check(made[1], one | MASKS[2])
    check(made[2], ~one)
    np.testing.assert_array_equal(numpy(made[3]), np.where(MASKS[1], 0, np.float32(-1e9)))


@pytest.mark.tensorflow
def test_in_a_tf_function_of_unknown_sizes():
    import tensorflow as tf

    unknown = [tf.TensorSpec([None] * 3, "bool"), tf.TensorSpec([None] * 4, "int32")]

    @tf.function(input_signature=unknown)
    def merged(x, y):
        stacked = ops.reshape(y, (-1, ops.shape(x)[1], ops.shape(x)[2]))
        again = hm.from_additive(hm.to_additive(x))
        return hm.and_masks(x, y), hm.or_masks(x, y), hm.from_torch(stacked, H), again

    made = merged(MASKS[1], MASKS[2].astype("int32"))
    check(made[0], lifted(MASKS[1]) & MASKS[2])
    check(made[1], lifted(MASKS[1]) | MASKS[2])
    check(made[2], ~MASKS[2])
    check(made[3], MASKS[1])
    # Of other integers only 0 opens: a graph knows no values to refuse.
    check(tf.function(hm.from_torch)(tf.constant([[0, -10000, 1]])), [[[[True, False, False]]]])


# --- additive masks ---

DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: str(mask.shape))
def test_there_and_back(mask, dtype):
    bias = hm.to_additive(mask, dtype)
    # JAX without its x64 mode holds no float64.
    assert keras.backend.standardize_dtype(bias.dtype) in {dtype, dtype.replace("64", "32")}
    values = numpy(ops.cast(bias, "float32"))
    assert np.isfinite(values).all()
    assert np.isfinite(numpy(ops.cast(2 * bias, "float32"))).all()  # two of them, added by mistake
    assert (values[mask] == 0).all()
    np.testing.assert_allclose(values[~mask], -3e4 if dtype == "float16" else -1e9, rtol=0.01)
    check(hm.from_additive(bias), mask)


WILD = [(hidden, "float32") for hidden in (-np.inf, -3.4028235e38, -1e9, -3e4, -1e4)]
# Found as a bug: bfloat16 rounds -1e4 to -9984, which was refused as "between".
WILD += [(-1e9, "float64"), (-1e4, "float16"), (-1e4, "bfloat16")]


@pytest.mark.parametrize(("hidden", "dtype"), WILD)
def test_additive_masks_in_the_wild(hidden, dtype):
    bias = np.array([[0.0, -0.0, hidden]], "float64")
    check(hm.from_additive(bias if dtype == "float64" else ops.cast(bias, dtype)), [[1, 1, 0]])


@pytest.mark.parametrize("odd", [1.0, -1.0, -9000.0, 1e9, np.inf, np.nan])
def test_a_bias_is_no_mask(odd):
    with pytest.raises(ValueError, match=r"at most -1e4.*Received the value .*mask.astype"):
        hm.from_additive(np.array([[0.0, -1e9], [0.0, odd]], "float32"))


# --- torch ---


@pytest.mark.parametrize("given", AS_GIVEN.values(), ids=AS_GIVEN)
def test_torch_masks_hide_where_true(given):
    hides = MASKS[2].reshape(B * H, T, S)
    check(hm.from_torch(given(hides), num_heads=H), ~MASKS[2])
    check(hm.from_torch(given(MASKS[0])), ~lifted(MASKS[0]))
    check(hm.from_torch(given(MASKS[0]), num_heads=H), ~lifted(MASKS[0]))
    additive = np.where(hides, 0, -np.inf).astype("float32")  # floats are
    check(hm.from_torch(additive, num_heads=H), MASKS[2])


# --- what is refused ---

FLOATS = np.zeros((T, S), "float32")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hm.and_masks(FLOATS), TypeError, "from_additive.*cast to bool.*dtype='bool'"),
        (lambda: hm.or_masks(MASKS[0], FLOATS), TypeError, "Received dtype float32.*from_additive"),
        (lambda: hm.not_mask(FLOATS), TypeError, "must be boolean or integer.*float32"),
        (lambda: hm.to_additive(FLOATS), TypeError, "must be boolean or integer.*float32"),
        (lambda: hm.and_masks(keras.Input((4, 5))), TypeError, "Received dtype float32"),
        (lambda: hm.and_masks(MASKS[0][0]), ValueError, r"shape \(queries, keys\).*shape \(5,\)"),
        (lambda: hm.and_masks(MASKS[2][None]), ValueError, r"Received: shape \(1, 2, 3, 4, 5\)"),
        (lambda: hm.or_masks(), ValueError, "needs at least one mask"),
        (lambda: hm.not_mask(None), ValueError, "its complement has no shape"),
        (lambda: hm.to_additive(MASKS[0], "int32"), TypeError, "needs a float dtype.*int32"),
        (lambda: hm.from_additive(MASKS[0]), TypeError, "dtype bool.*needs no conversion"),
        (lambda: hm.from_torch(MASKS[0][0]), ValueError, r"Received: shape \(5,\)"),
        (lambda: hm.from_torch(MASKS[2]), ValueError, r"Received: shape \(2, 3, 4, 5\)"),
        (lambda: hm.from_torch(MASKS[1]), ValueError, r"shape \(2, 4, 5\).*pass `num_heads`"),
        (lambda: hm.from_torch(MASKS[1], 3), ValueError, "2 is no multiple of num_heads=3"),
        (lambda: hm.from_torch(FLOATS + 1), ValueError, "Received the value 1"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
