"""Which kernel computes a request, what is logged, and that masks that do not fit are refused."""

from unittest import mock

import keras
import numpy as np
import pytest
from contract import by_hand, normal, numpy, random_biases
from fresh import run_fresh
from keras import layers, ops
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import choose
from keras_headmask.attention.tuning import tuned
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


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"return_scores": True}, "returned probabilities"), ({"query_offset": 3}, "outside")],
)
def test_tiles_that_are_not_possible_are_refused(more, reason):
    if "query_offset" in more and keras.backend.backend() == "tensorflow":
        pytest.skip("its loop takes any offset")
    x, more = (
        np.ones((1, 9, 2, 4), "float32"),
        {k: ops.convert_to_tensor(v) for k, v in more.items()},
    )
    with pytest.raises(ValueError, match=f"`tiled=True` is not possible here: {reason}"):
        hm.dot_product_attention(x, x, x, mask_spec=NEAR, tiled=True, **more)


def kernel_of(queries=512, keys=512, key_heads=4, dtype="float32", how="plain", **rest):
    """The name of the kernel of one call on 2 examples and 4 heads."""
    found, rest = [], {"mask_spec": NEAR} | rest

    def watch(request, part):
        found.append(choose.choose(request, part).__name__)
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


# ---------------------------------------------------------------- what is logged


def test_the_choice_is_logged(caplog):
    x = np.ones((1, 3, 2, 4), "float32")
    with caplog.at_level("DEBUG", logger="keras_headmask"):
        hm.dot_product_attention(x, x, x, mask_spec=NEAR, return_scores=True)
    said = "Attention of queries (1, 3, 2, 4) and keys (1, 3, 2, 4): dense"
    assert said in [record.getMessage() for record in caplog.records]


STDERR = """
import os, re, sys, tempfile
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
import keras, numpy as np
import keras_headmask as hm

def kinds_of_lines(model):
    model.compile("sgd", "mse")
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        for length in (5, 9):  # the second compiles for any length
            given = np.arange(2 * length).reshape(2, length) % 9
            more = [np.ones((2, length, 8))] if sys.argv[1] == "fit" else []
            getattr(model, sys.argv[1])(given, *more, verbose=0)
        os.dup2(kept, 2)
        file.seek(0)
        lines = file.read().decode().splitlines()
    return {re.sub(r"[0-9]+", "0", re.sub(r"^[EIW][0-9]{4} [0-9:. ]+", "", x)) for x in lines}

ids = keras.Input((None,), dtype="int32", name="ids")
x = keras.layers.Embedding(9, 8, mask_zero=True)(ids)
stock = keras.Model(ids, keras.layers.MultiHeadAttention(2, 4)(x, x))
model = hm.apply_head_masks(stock, hm.PerHead({0: hm.SameSegment("ids")}, hm.Window(3, 3)))
if sys.argv[1] == "fit":
    layer = hm.PerHeadMaskedMultiHeadAttention  # without a rule it obeys padding
    model = keras.Model(ids, layer(2, 4)(layer(2, 4, mask_spec=hm.Window(3, 3))(x, x), x))
of_stock = kinds_of_lines(stock)
more = kinds_of_lines(model) - of_stock
assert not more, more
"""


@pytest.mark.tensorflow
@pytest.mark.parametrize("called", [pytest.param("predict", marks=pytest.mark.long), "fit"])
def test_nothing_is_logged_that_stock_layers_do_not_log(called):
    """By TensorFlow, to standard error."""
    run_fresh(STDERR, called)


# ---------------------------------------------------------------- dense and tiled

RULE = hm.PerHead({1: hm.Chunk(3)}, default=hm.Window(4, 4))
X = normal(2, 7, 8)
both = pytest.mark.parametrize("numbers", [{"fewest_pairs": 10**9}, ALWAYS], ids=["dense", "tiled"])


@both
@pytest.mark.parametrize("offset", [0, 3, "a tensor"])
def test_a_causal_flag_of_keras_counts_queries_from_0(numbers, offset):
    """In a retrofitted layer that is Keras' business, wherever the rule sees the queries."""
    x, attention = keras.Input((7, 8)), layers.MultiHeadAttention(4, 3)
    stock = keras.Model(x, attention(x, x))
    random_biases(attention)
    masked = hm.apply_head_masks(stock, RULE)
    at = 3 if offset == "a tensor" else offset
    allowed = mask_by_loops(RULE, 2, 4, 4, 7, query_offset=at) & np.tri(4, 7, dtype=bool)
    given = ops.convert_to_tensor(3) if offset == "a tensor" else offset
    with tuned(**numbers), opened({masked: {}}), moved(given):
        got = masked.layers[-1](X[:, :4], X, use_causal_mask=True)
    assert_close(numpy(got), by_hand(attention, X[:, :4], X, mask=allowed)[0], depth=3)


@both
@pytest.mark.parametrize(
    ("shape", "message"), [((2, 7, 9), "9 keys"), ((2, 9, 7), "9 queries"), ((2, 1, 9), "9 keys")]
)
def test_a_mask_that_does_not_fit_is_refused(numbers, shape, message):
    """Cut into tiles, a mask that is too long would be read as if it fitted."""
    mask, message = np.ones(shape, bool), f"has {message} where the attention has 7"
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 3, mask_spec=RULE)
    with tuned(**numbers), pytest.raises(ValueError, match=message):
        layer(X, attention_mask=mask)
    with tuned(**numbers), pytest.raises(ValueError, match=message):
        hm.dot_product_attention(*operands(2, 7, 7, 4), mask=mask, mask_spec=RULE)
