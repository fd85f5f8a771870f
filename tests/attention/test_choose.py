"""One dispatcher: from any caller the same request is computed, or refused, alike.

Each test holds the function, the layer and a retrofitted layer to one answer, dense and tiled.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import keras
import numpy as np
import pytest
from contract import by_hand, normal, numpy, random_biases
from keras import layers, ops
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import choose
from keras_headmask.attention.kernels import ByGroup, first
from keras_headmask.attention.tuning import current_tuning, tuned
from keras_headmask.retrofit.call import opened_frame

RULE = hm.PerHead({1: hm.Chunk(3)}, default=hm.Window(4, 4))
X = normal(2, 7, 8)


def dense():
    return tuned(fewest_pairs=10**9)


def tiled():
    return tuned(**ALWAYS)


both = pytest.mark.parametrize("computed", [dense, tiled])


def masked(**arguments):
    """The attention layer of a model under a rule."""
    x = keras.Input((7, 8))
    attention = layers.MultiHeadAttention(4, 3)
    stock = keras.Model(x, attention(x, x, **arguments))
    random_biases(attention)
    hm.apply_head_masks(stock, RULE, copy=False)
    return attention


# ---------------------------------------------------------------- which kernel

IDS = {"ids": np.zeros((2, 512), "int32")}
NEAR, CAUSAL = hm.Window(63, 0), hm.Window(after=0)
# What a reader of "Which code runs" in `docs/architecture.md` says of each: a request, and the
# kernel on TensorFlow, JAX and PyTorch; `None` where it is not possible.
REQUESTS = {
    "a window, long": ({}, "loop", "loop", "SDPA"),
    "lengths not known": ({"how": "of any length"}, "loop", "dense", None),
    "documents": (
        {"mask_spec": hm.SameSegment("ids"), "mask_inputs": IDS},
        *("loop", "loop", "SDPA"),
    ),
    "documents, compiled": (
        {"mask_spec": hm.SameSegment("ids"), "mask_inputs": IDS, "how": "compiled"},
        *("dense", "loop", "FlexAttention"),
    ),
    "short": ({"queries": 128, "keys": 128}, "loop", "dense", "dense"),
    "short, tiled": ({"queries": 128, "keys": 128, "tiled": True}, "loop", "loop", "SDPA"),
    "dropout": ({"dropout": 0.1, "seed": 0}, "loop", "gathered", "gathered"),
    "dropout, causal": (
        {"mask_spec": CAUSAL, "dropout": 0.1, "seed": 0},
        *("loop", "dense", "dense"),
    ),
    "half precision": ({"dtype": "bfloat16"}, "loop", "loop", "SDPA"),
    "grouped queries": ({"key_heads": 2}, "loop", "loop", "SDPA"),
    "a bias": ({"position_bias": hm.alibi(4)}, "loop", "loop", "gathered"),
    "one query, many keys": (
        {"queries": 1, "keys": 4096, "query_offset": 4095},
        *("loop", "dense", "dense"),
    ),
    "compiled": ({"how": "compiled"}, "gathered", "loop", "FlexAttention"),
    "compiled, causal": (
        {"mask_spec": CAUSAL, "how": "compiled"},
        *("dense", "loop", "FlexAttention"),
    ),
    "probabilities": ({"return_scores": True}, "dense", "dense", "dense"),
    "no rule": ({"mask_spec": None}, "dense", "dense", "dense"),
    "all logits, please": ({"tiled": False}, "dense", "dense", "dense"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_page_says_which_kernel_computes_a_request(name):
    request, *kernels = REQUESTS[name]
    expected = dict(zip(("tensorflow", "jax", "torch"), kernels, strict=True))
    if expected[keras.backend.backend()] is None:
        pytest.skip("lengths are known")
    assert kernel_of(**request) == expected[keras.backend.backend()]


def kernel_of(queries=512, keys=512, key_heads=4, dtype="float32", how="plain", **rest):
    """The name of the kernel of one call on 2 examples and 4 heads."""
    found, rest = [], {"mask_spec": NEAR} | rest

    def watch(request, part):
        kernel = choose.choose(request, part)
        if isinstance(kernel, ByGroup):
            kernel = first(kernel.kernels, request, part)
        found.append(kernel.name)
        return ops.zeros_like(request.query)

    def call(query, key):
        return hm.dot_product_attention(query, key, key, **rest)

    shapes = (2, queries, 4, 8), (2, keys, key_heads, 8)
    with choose.watched(watch):
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


# ---------------------------------------------------------------- positions


@both
@pytest.mark.parametrize("offset", [0, 3, "a tensor"])
def test_a_causal_flag_of_keras_counts_queries_from_0(computed, offset):
    """In a retrofitted layer that is Keras' business, wherever the rule sees the queries."""
    attention = masked()
    at = 3 if offset == "a tensor" else offset
    allowed = mask_by_loops(RULE, 2, 4, 4, 7, query_offset=at) & np.tri(4, 7, dtype=bool)
    given = ops.convert_to_tensor(3) if offset == "a tensor" else offset
    with computed(), opened_frame([attention], None, given):
        got = attention(X[:, :4], X, use_causal_mask=True)
    assert_close(numpy(got), by_hand(attention, X[:, :4], X, mask=allowed)[0], depth=3)


# ---------------------------------------------------------------- masks


@both
@pytest.mark.parametrize(
    ("shape", "message"), [((2, 7, 9), "9 keys"), ((2, 9, 7), "9 queries"), ((2, 1, 9), "9 keys")]
)
def test_a_mask_that_does_not_fit_is_refused(computed, shape, message):
    """Cut into tiles, a mask that is too long would be read as if it fitted."""
    mask, message = np.ones(shape, bool), f"has {message} where the attention has 7"
    attention = masked()
    expected = pytest.raises(ValueError, match=f"In the attention layer .*{message}")
    with computed(), expected:
        attention(X, X, attention_mask=mask)
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 3, mask_spec=RULE)
    with computed(), pytest.raises(ValueError, match=message):
        layer(X, attention_mask=mask)
    qkv = operands(2, 7, 7, 4)
    with computed(), pytest.raises(ValueError, match=message):
        hm.dot_product_attention(*qkv, mask=mask, mask_spec=RULE)


# ---------------------------------------------------------------- tuning


def test_tuning_holds_inside_alone():
    before = current_tuning()
    with tuned(local_tile=4) as outer:
        assert current_tuning() == outer == replace(before, local_tile=4)
        with tuned(wide_tile=6):
            assert current_tuning() == replace(outer, wide_tile=6)
        with contextlib.suppress(KeyError), tuned(wide_tile=9):
            raise KeyError
        assert current_tuning() == outer
    assert current_tuning() is before
