"""Each leaf against matrices drawn by hand, and what its constructor refuses."""

import numpy as np
import pytest
from keras import ops

import keras_headmask as hm


def drawn(spec, queries, keys=None, **more):
    """The rule as `"100 110 111"`, a word for each query."""
    return hm.draw(spec, queries, keys, **more).replace(" ", "").replace("\n", " ")


# (rule, queries, keys, query_offset, matrix)
POSITIONAL = [
    (hm.Full(), 2, 3, 0, "111 111"),
    (hm.Nothing(), 2, 3, 0, "000 000"),
    (hm.Window(after=0), 3, 3, 0, "100 110 111"),
    (hm.Window(after=0), 2, 4, 2, "1110 1111"),
    (hm.Window(2, 0), 4, 5, 0, "10000 11000 11100 01110"),
    (hm.Window(2, 0), 2, 5, 3, "01110 00111"),
    (hm.Window(1, -1), 3, 3, 0, "000 100 010"),  # the previous position alone
    (hm.Window(-1, 2), 3, 4, 0, "0110 0011 0001"),  # starts ahead of the query
    (hm.Window(step=2), 2, 4, -1, "0101 1010"),
    (hm.Window(2, 2, step=2), 5, 5, 0, "10100 01010 10101 01010 00101"),
    (hm.Chunk(2), 2, 3, -1, "000 110"),  # position -1 lies in block -1
    (hm.Chunk(2, before=1), 6, 6, 0, "110000 110000 111100 111100 001111 001111"),
    (hm.Chunk(1, before=2, after=1), 4, 4, 0, "1100 1110 1111 0111"),
    (hm.Keys(0, 1), 2, 3, 4, "100 100"),
    (hm.Keys(0, 2**31 - 1), 2, 2, 0, "11 11"),
    (hm.Chunk(2**31 - 1), 2, 2, 0, "11 11"),
    (hm.Keys(1, 3), 2, 4, 0, "0110 0110"),
    (hm.Queries(4, 5), 3, 2, 3, "00 11 00"),
]


@pytest.mark.parametrize(("spec", "queries", "keys", "offset", "expected"), POSITIONAL, ids=repr)
def test_positional_leaves_as_drawn(spec, queries, keys, offset, expected):
    assert drawn(spec, queries, keys, query_offset=offset) == expected
    # An offset as a NumPy integer, and the complement of every entry.
    flipped = expected.translate(str.maketrans("01", "10"))
    assert drawn(~spec, queries, keys, query_offset=np.int32(offset)) == flipped


# (rule, the one input as a row, or as a pair of rows, matrix)
READING = [
    (hm.SameSegment("x"), [7, 7, 0, 0], "1100 1100 0011 0011"),
    (hm.SameSegment("x"), [-1, 5, -1, -2], "0000 0100 0000 0000"),
    (~hm.SameSegment("x"), [-1, 5, -1], "111 101 111"),
    (hm.SameSegment("x"), ([1, 2], [2, 2, 1]), "001 110"),
    (hm.SameSentence(9, "x"), [5, 9, 9, 4], "1100 1100 0010 0001"),  # a run of ends
    (hm.SameSentence(9, "x"), [9, 4, 2, 0, 0], "10000 01111 01111 01111 01111"),  # the tail
    (hm.SameSentence((9, 8), "x"), [1, 8, 2, 9, 3], "11000 11000 00110 00110 00001"),
    (hm.SameSentence(-1, "x"), [-1, 0], "10 01"),
    (hm.SameSentence(9, "x"), ([1, 9, 2], [9, 3]), "10 10 01"),  # first with first, and so on
    (hm.KeyFlag("x"), [-3, 0, 2], "001 001 001"),
    (hm.KeyFlag("x"), (None, [1, 0, 1]), "101 101 101"),
    (hm.QueryFlag("x"), ([0, 1, 1], None), "000 111 111"),
    (hm.KeyIn("x", (3, 5)), [5, 4, 3], "101 101 101"),
    (hm.KeyIn("x", -1), ([5, 5], [-1, 0, 1]), "100 100"),
    (hm.QueryIn("x", (3, 5)), [5, 4, 3], "111 000 111"),
]


def batch_of_one(rows):
    if isinstance(rows, tuple):
        return tuple(None if row is None else np.array([row]) for row in rows)
    return np.array([rows])


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
@pytest.mark.parametrize(("spec", "rows", "expected"), READING, ids=repr)
def test_reading_leaves_as_drawn(spec, rows, expected, dtype):
    queries, keys = len(expected.split()), len(expected.split()[0])
    value = batch_of_one(rows)
    if isinstance(value, tuple):
        value = tuple(None if side is None else side.astype(dtype) for side in value)
    else:
        value = value.astype(dtype)
    assert drawn(spec, queries, keys, mask_inputs={"x": value}) == expected


def test_unsigned_ids_stay_apart():
    """255 is a segment of its own, not -1."""
    ids = np.array([[255, 255, 1]], "uint8")
    assert drawn(hm.SameSegment("x"), 3, mask_inputs={"x": ids}) == "110 110 001"
    assert drawn(hm.KeyIn("x", -1), 3, mask_inputs={"x": ids}) == "000 000 000"


def test_boolean_ids_and_flags():
    flags = np.array([[True, False, True]])
    assert drawn(hm.SameSegment("x"), 3, mask_inputs={"x": flags}) == "101 010 101"
    assert drawn(hm.KeyFlag("x"), 3, mask_inputs={"x": flags}) == "101 101 101"


# --- what constructors refuse ---

WHOLE = "must be a whole number. Received: "
NAME = "is the name under which the tensor is passed"
REFUSED = [  # (and what `test_config.py` says of fields)
    (lambda: hm.Window(before=1.0), TypeError, f"`before` {WHOLE}1.0"),
    (lambda: hm.Window(step=0), ValueError, "`step` must be at least 1. Received: 0"),
    (lambda: hm.Window(step=None), TypeError, f"`step` {WHOLE}None"),
    (lambda: hm.Window(-3, 2), ValueError, "No distance lies from 3 to 2"),
    (lambda: hm.Chunk(0), ValueError, "`size` must be at least 1. Received: 0"),
    (lambda: hm.Chunk(2, before=-1), ValueError, "`before` must be at least 0. Received: -1"),
    (lambda: hm.Keys(-1), ValueError, "`start` must be at least 0. Received: -1"),
    (lambda: hm.Queries(None), TypeError, f"`start` {WHOLE}None"),
    (lambda: hm.SameSentence(()), ValueError, "`end_ids` must hold at least one id"),
    *((lambda x=x: hm.SameSentence(x), TypeError, "`end_ids` must be ids") for x in (".", {9: 1})),
    (lambda: hm.QueryIn("x", [True]), TypeError, f"`ids` {WHOLE}True"),
    (lambda: hm.SameSegment(""), TypeError, f"`input` {NAME}.*Received: ''"),
    (lambda: hm.SameSentence(9, None), TypeError, f"`input` {NAME}.*Received: None"),
    (lambda: hm.Window(before=2**31), ValueError, "between -2147483647 and 2147483647"),
    (lambda: hm.Chunk(1, before=2**31), ValueError, "2147483647"),
    (lambda: hm.KeyIn("x", -(2**40)), ValueError, "2147483647"),
    (lambda: hm.MaskInput(np.ones((1, 1))), TypeError, f"`input` {NAME}.*ndarray of shape"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_constructors_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("offset", [-(2**30), -1, 0, 2**30])
def test_windows_of_any_width_anywhere(offset):
    far = {1, 2**29, 2**30 - 1, 2**30, 2**30 + 2, 3 * 2**29, 2**31 - 1}
    distance = np.arange(4)[None] - np.arange(3)[:, None] - np.int64(offset)
    for number in {sign * x for x in far for sign in (-1, 1)} | {0}:
        for side, expected in (("before", distance >= -number), ("after", distance <= number)):
            mask = hm.make_mask(hm.Window(**{side: number}), 3, 4, query_offset=offset)
            np.testing.assert_array_equal(
                ops.convert_to_numpy(mask)[0, 0], expected, err_msg=f"{side}={number}"
            )


def test_numpy_integers_are_numbers():
    assert hm.Window(np.int64(2), np.int32(0)) == hm.Window(2, 0)
    assert hm.KeyIn("x", [np.int64(3), 1, 3]) == hm.KeyIn("x", (1, 3))
    assert hm.KeyIn("x", np.array([3, 1])) == hm.KeyIn("x", (1, 3))
