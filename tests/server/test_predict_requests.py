"""Requests of both dialects against signatures that the served test model does not have."""

import ml_dtypes
import numpy as np
import pytest

from keras_headmask.server.predict_requests import (
    BadRequest,
    Predict,
    Signature,
    Tensor,
    read_v1,
    write_v1,
    write_v2,
)


def signatures(**inputs):
    return {"serving_default": Signature("serving_default", inputs, {})}


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("float32", [1, 2.5], np.float32),
        ("float64", [1e300], np.float64),
        ("bfloat16", [1, 0.5], ml_dtypes.bfloat16),
        ("float16", [0.5], np.float16),
        ("int64", [-(2**63), 2**63 - 1], np.int64),
        ("uint64", [0, 2**64 - 1], np.uint64),
        ("uint8", [0, 255], np.uint8),
        ("bool", [True, False], np.bool_),
        ("string", ["a", "ü"], np.object_),
    ],
)
def test_every_dtype_arrives_whole(dtype, value, stored):
    predict = read_v1({"inputs": value}, signatures(x=Tensor(dtype, (None,))))
    array = predict.arrays["x"]
    assert array.dtype == stored
    expected = [item.encode() for item in value] if dtype == "string" else value
    assert array.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("uint8", 256, r"must lie in \[0, 255\]"),
        ("uint8", -1, r"must lie in \[0, 255\]"),
        ("float16", 70_000, "finite in float16"),
        ("bfloat16", 1e39, "finite in bfloat16"),
        ("float64", float("nan"), "finite in float64"),
        ("string", 3, "must be strings. Received: 3"),
        ("float32", True, "must be numbers. Received: true"),
    ],
)
def test_what_does_not_fit_a_dtype(dtype, value, message):
    with pytest.raises(BadRequest, match=message):
        read_v1({"inputs": [value]}, signatures(x=Tensor(dtype, (None,))))


def test_an_unknown_rank_takes_any():
    for value, shape in ((1, ()), ([[1, 2]], (1, 2))):
        predict = read_v1({"inputs": value}, signatures(x=Tensor("int32", None)))
        assert predict.arrays["x"].shape == shape


def test_a_fixed_batch_need_not_agree_with_the_open_one():
    asked = signatures(x=Tensor("int32", (None,)), table=Tensor("int32", (3,)))
    arrays = read_v1({"inputs": {"x": [1, 2], "table": [1, 2, 3]}}, asked).arrays
    assert {name: len(array) for name, array in arrays.items()} == {"x": 2, "table": 3}


def test_no_default_signature_is_an_error():
    with pytest.raises(BadRequest, match=r"must be one of \['a'\].*where none is named"):
        read_v1({"inputs": []}, {"a": Signature("a", {}, {})})


def test_an_output_without_rows_is_an_error():
    predict = Predict(Signature("s", {}, {}), {"x": np.zeros((2, 3))}, rows=2)
    with pytest.raises(BadRequest, match=r"Output `loss` has shape \(\).*Ask with `inputs`"):
        write_v1(predict, {"loss": np.float32(1)})


def test_outputs_that_json_does_not_know():
    predict = Predict(Signature("s", {}, {}), {})
    half = np.array([0.5], ml_dtypes.bfloat16)
    assert write_v1(predict, {"y": half}) == {"outputs": [0.5]}
    assert write_v1(predict, {"y": np.array([b"a", "ü".encode()], object)}) == {
        "outputs": ["a", "ü"]
    }
    assert write_v2(half)[1] == write_v2(np.float16([0.5]))[1] == "FP32"
    assert write_v2(np.array([b"a"], object))[1] == "BYTES"
