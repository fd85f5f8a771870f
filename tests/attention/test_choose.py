"""Which kernel computes a request, and what is logged."""

from unittest import mock

import keras
import numpy as np
import pytest
from contract import by_hand, normal, numpy, random_biases
from keras import layers, ops
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import kernels
from keras_headmask.attention.scopes import tuned
from keras_headmask.retrofit.frame import moved, opened

IDS = {"ids": np.zeros((2, 512), "int32")}
NEAR, CAUSAL = hm.Window(63, 0), hm.Window(after=0)
DOCUMENTS = {"mask_spec": hm.SameSegment("ids"), "mask_inputs": IDS}
# What a reader of "Which code runs" in `docs/architecture.md` says of each: a request, and the
# kernel on TensorFlow, and on JAX and PyTorch; `None` where it is not possible.
REQUESTS = {
    "a window, long": ({}, "loop", "gathered"),
    "lengths not known": ({"how": "of any length"}, "loop", "fused"),
    "documents": (DOCUMENTS, "loop", "fused"),
    "documents, compiled": (DOCUMENTS | {"how": "compiled"}, "dense", "fused"),
    "short": ({"queries": 128, "keys": 128}, "loop", "fused"),
    "short, tiled": ({"queries": 128, "keys": 128, "tiled": True}, "loop", "gathered"),
    "dropout": ({"dropout": 0.1, "seed": 0}, "loop", "gathered"),
    "dropout, causal": ({"mask_spec": CAUSAL, "dropout": 0.1, "seed": 0}, "loop", "dense"),
    "half precision, causal": ({"mask_spec": CAUSAL, "dtype": "bfloat16"}, "loop", "fused"),
    "grouped queries": ({"key_heads": 2}, "loop", "gathered"),
    "a soft cap, causal": ({"mask_spec": CAUSAL, "logits_soft_cap": 5.0}, "loop", "dense"),
    "one query, many keys": ({"queries": 1, "keys": 4096, "query_offset": 4095}, "loop", "fused"),
    "compiled": ({"how": "compiled"}, "gathered", "gathered"),
    "compiled, causal": ({"mask_spec": CAUSAL, "how": "compiled"}, "dense", "fused"),
    "probabilities": ({"return_scores": True}, "dense", "dense"),
    "no rule": ({"mask_spec": None}, "dense", "fused"),
    "all logits, please": ({"tiled": False}, "dense", "fused"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_page_says_which_kernel_computes_a_request(name):
    request, *kernels = REQUESTS[name]
    if keras.backend.backend() == "torch" and request.get("how") == "of any length":
        pytest.skip("lengths are known; those that `torch.compile` leaves open have a test")
    assert kernel_of(**request) == kernels[keras.backend.backend() != "tensorflow"]


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="its loop takes any offset")
def test_tiles_under_an_offset_that_is_not_known_are_refused():
    x, offset = np.ones((1, 9, 2, 4), "float32"), ops.convert_to_tensor(3)
    with pytest.raises(ValueError, match="`tiled=True` is not possible here: outside"):
        hm.dot_product_attention(x, x, x, mask_spec=NEAR, tiled=True, query_offset=offset)


def kernel_of(queries=512, keys=512, key_heads=4, dtype="float32", how="plain", **rest):
    """The name of the kernel of one call on 2 examples and 4 heads."""
    found, rest = [], {"mask_spec": NEAR} | rest

    def watch(request, part):
        found.append(kernels.choose(request, part).__name__)
        return ops.zeros_like(request.query)

    def call(query, key):
        return hm.dot_product_attention(query, key, key, **rest)

    shapes = (2, queries, 4, 8), (2, keys, key_heads, 8)
    with kernels.watched(watch):
        called(call, [ops.ones(shape, dtype) for shape in shapes], how)
    return found[0]


def called(call, operands, how):
    if how == "plain":
        call(*operands)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        given = operands
        if how == "of any length":
            given = [tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for x in operands]
        traced = tf.function(call, jit_compile=how == "compiled", autograph=False)
        traced.get_concrete_function(*given)
    elif keras.backend.backend() == "jax":
        import jax

        if how == "compiled":
            jax.jit(call).lower(*operands)
            return
        shape = jax.export.symbolic_shape("batch, length, 4, 8")
        jax.eval_shape(call, *(jax.ShapeDtypeStruct(shape, x.dtype) for x in operands))
    else:  # (The compiler itself takes a minute.)
        with mock.patch("torch.compiler.is_compiling", return_value=True):
            call(*operands)


# ---------------------------------------------------------------- what is logged


def test_the_choice_is_logged(caplog):
    x = np.ones((1, 3, 2, 4), "float32")
    with caplog.at_level("DEBUG", logger="keras_headmask"):
        hm.dot_product_attention(x, x, x, mask_spec=NEAR, return_scores=True)
    said = "Attention of queries (1, 3, 2, 4) and keys (1, 3, 2, 4): dense"
    assert said in [record.getMessage() for record in caplog.records]


# ---------------------------------------------------------------- a causal flag


@pytest.mark.parametrize("numbers", [{"fewest_pairs": 10**9}, ALWAYS], ids=["dense", "tiled"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_causal_flag_of_keras_counts_queries_from_0(numbers, as_tensor):
    """In a retrofitted layer that is Keras' business, wherever the rule sees the queries."""
    rule, data = hm.PerHead({1: hm.Chunk(3)}, default=hm.Window(4, 4)), normal(2, 7, 8)
    x, attention = keras.Input((7, 8)), layers.MultiHeadAttention(4, 3)
    stock = keras.Model(x, attention(x, x))
    random_biases(attention)
    masked = hm.apply_head_masks(stock, rule)
    allowed = mask_by_loops(rule, 2, 4, 4, 7, query_offset=3) & np.tri(4, 7, dtype=bool)
    offset = ops.convert_to_tensor(3) if as_tensor else 3
    with tuned(**numbers), opened({masked: {}}), moved(offset):
        got = masked.layers[-1](data[:, :4], data, use_causal_mask=True)
    assert_close(numpy(got), by_hand(attention, data[:, :4], data, mask=allowed)[0], depth=3)
