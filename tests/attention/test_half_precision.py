"""Products of half precision: float32 sums, exact masks, errors no larger than stock Keras' own.

Accelerators alone compute so by themselves; here it is asked for.
"""

import contextlib
import functools
import math

import keras
import ml_dtypes
import numpy as np
import pytest
from contract import gradient, normal, numpy
from keras import ops
from tiled_contract import BACKEND, tiles
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import half_precision
from keras_headmask.attention.half_precision import HALF, half_dtype, half_products, product

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def compiled(function):
    """By XLA where there is one: TensorFlow has such products in it alone."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    return function


def rounded(array, dtype):
    return array.astype(NUMPY[dtype]).astype("float64")


# --- One product ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "subscripts",
    [
        *("bthd,bshd->bhts", "bhts,bshd->bthd"),
        *("bhtd,bhsd->bhts", "bhts,bhsd->bhtd", "bhts,bhtd->bhsd"),
    ],
)
def test_operands_are_rounded_and_nothing_else(subscripts, dtype):
    sizes = {"b": 2, "h": 3, "t": 5, "s": 4, "d": 64}
    axes = left, right, out = subscripts.replace("->", ",").split(",")
    arrays = [normal(*(sizes[x] for x in of), seed=i) for i, of in enumerate(axes)]
    *exact, above = (rounded(x, dtype) for x in arrays)
    upstream = arrays.pop()
    made = compiled(lambda *x: product(subscripts, *x, dtype))(*map(ops.convert_to_tensor, arrays))
    assert keras.backend.standardize_dtype(made.dtype) == "float32"
    assert_close(made, np.einsum(subscripts, *exact))

    def loss(*x):
        return ops.sum(product(subscripts, *x, dtype) * ops.convert_to_tensor(upstream))

    grads = gradient(compiled(loss), *arrays)
    if BACKEND == "jax":  # it rounds the gradient of a half operand in place of what it is made of
        above = upstream
    wanted = (
        np.einsum(f"{out},{right}->{left}", above, exact[1]),
        np.einsum(f"{left},{out}->{right}", exact[0], above),
    )
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == "float32"
        assert_close(got, want, dtype if BACKEND == "jax" else "float32")


def dtype_of_products(*dtypes, scale=0.5, wanted=True):
    """What is chosen for operands of these dtypes, where it matters."""
    chosen = []

    def run(*operands):
        chosen.append(
            half_dtype(scale, *(ops.cast(x, d) for x, d in zip(operands, dtypes, strict=True)))
        )
        return operands[0]

    with half_products(wanted):
        compiled(run)(*(ops.ones((1,)) for _ in dtypes))
    return chosen[-1]


def test_the_dtype_of_products():
    assert [dtype_of_products(x, x, x) for x in HALF] == list(HALF)
    assert dtype_of_products("float32", "float32") is None
    assert dtype_of_products("bfloat16", "float32", "bfloat16") is None, "nothing is lost"
    assert dtype_of_products("bfloat16", "float16") is None
    assert dtype_of_products("float16", scale=-1) == "float16"
    assert dtype_of_products("float16", scale=1.01) is None, "65504 x 1.01 is infinite"
    assert dtype_of_products("bfloat16", scale=8.0) == "bfloat16"
    # No test has an accelerator: a CPU multiplies float32 faster.
    assert dtype_of_products("bfloat16", wanted=None) is None
    assert dtype_of_products("bfloat16", wanted=False) is None
    with half_products():
        assert half_dtype(1.0, keras.KerasTensor((1, 2), dtype="bfloat16")) is None
        if BACKEND == "tensorflow":  # no kernel outside of XLA
            assert half_dtype(1.0, ops.ones((1,), "bfloat16")) is None


# --- Attention -----------------------------------------------------------------------------------

SEEDS, LENGTH, HEADS, SIZE = 6, 20, 2, 24  # (a size whose root would be exact hides a rounding)
IDS = np.repeat([0, 1, 2], [9, 2, 9]).astype("int32")
PLACES = np.arange(LENGTH)
# A window, documents; fully masked rows in the other head.
RULE = hm.PerHead({0: hm.Window(9, 3)}, hm.SameSegment("ids") & ~hm.Queries(3, 8))
_WINDOW = (PLACES[:, None] - 9 <= PLACES) & (PLACES[:, None] + 3 >= PLACES)
_DOCUMENTS = (IDS[:, None] == IDS) & ~np.isin(PLACES, range(3, 8))[:, None]
MASK = np.stack([_WINDOW, _DOCUMENTS])[None]
ROUTES = {
    "dense": (contextlib.nullcontext, False),
    "tiles": (functools.partial(tiles, local=10, wide=10, block=10), True),
}


def drawn(dtype):
    """Queries, keys, values and the gradient of their context, of an example for each seed."""
    arrays = [normal(SEEDS, LENGTH, HEADS, SIZE, seed=seed) for seed in range(4)]
    return [rounded(x, dtype) for x in arrays]


def exactly(q, k, v, upstream):
    """Context, and the gradients of the operands, in float64."""
    scale = 1 / math.sqrt(SIZE)
    logits = np.where(MASK, np.einsum("bthd,bshd->bhts", q, k) * scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True, initial=-1e9))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-9)
    d_p = np.einsum("bthd,bshd->bhts", upstream, v)
    d_logits = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    return {
        "context": np.einsum("bhts,bshd->bthd", p, v),
        "query": np.einsum("bhts,bshd->bthd", d_logits, k),
        "key": np.einsum("bhts,bthd->bshd", d_logits, q),
        "value": np.einsum("bhts,bthd->bshd", p, upstream),
    }


def by_ours(tiled):
    def attend(query, key, value):
        ids = np.repeat(IDS[None], SEEDS, 0)
        return hm.dot_product_attention(
            query, key, value, mask_spec=RULE, mask_inputs={"ids": ids}, tiled=tiled
        )

    return attend


def by_stock(dtype):
    """Keras' own layer, whose projections change nothing."""
    size = HEADS * SIZE
    layer = keras.layers.MultiHeadAttention(HEADS, SIZE, use_bias=False, dtype=f"mixed_{dtype}")
    layer.build((None, None, size), (None, None, size))
    layer.set_weights([np.eye(size).reshape(x.shape) for x in layer.weights])
    mask = np.broadcast_to(MASK, (SEEDS, HEADS, LENGTH, LENGTH))

    def attend(query, key, value):
        flat = (ops.reshape(x, (SEEDS, LENGTH, size)) for x in (query, value, key))
        context, _ = layer(*flat, attention_mask=mask, return_attention_scores=True)
        return ops.reshape(context, (SEEDS, LENGTH, HEADS, SIZE))

    return attend


def errors(attend, dtype):
    """How far it is from `exactly`, for each seed: of the context, and of the gradients."""
    *operands, upstream = drawn(dtype)
    factors = ops.convert_to_tensor(upstream.astype("float32"))

    def loss(spy, *operands):
        """`spy` is 0 and its gradient is the context: both come of one compilation."""
        context = attend(*(ops.cast(x, dtype) for x in operands))
        assert keras.backend.standardize_dtype(context.dtype) == dtype
        context = ops.cast(context, "float32")
        return ops.sum(context * factors) + ops.sum(ops.stop_gradient(context) * spy)

    arrays = [np.zeros_like(upstream), *operands]
    got = gradient(compiled(loss), *(x.astype("float32") for x in arrays))
    wanted = exactly(*operands, upstream)
    return {
        name: np.linalg.norm((g - wanted[name]).reshape(SEEDS, -1), axis=1)
        for name, g in zip(wanted, got, strict=True)
    }


@functools.cache
def errors_of_stock(dtype):
    return errors(by_stock(dtype), dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every_day("dense-bfloat16|tiles-float16")
def test_errors_are_no_larger_than_stocks(route, dtype, monkeypatch):
    how, tiled = ROUTES[route]
    used = []

    def seen(subscripts, left, right, half):
        used.append(half)
        return product(subscripts, left, right, half)

    monkeypatch.setattr(half_precision, "product", seen)
    with how(), half_products():
        of_half = errors(by_ours(tiled), dtype)
    assert set(used) == {dtype}
    for name, of_stock in errors_of_stock(dtype).items():
        assert (of_half[name] <= of_stock).all(), name


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("route", ROUTES)
def test_masks_are_exact(route, dtype):
    """Nothing comes of what a hidden key holds, nor of a row that sees nothing."""
    how, tiled = ROUTES[route]
    q, k, v, _ = (ops.cast(x.astype("float32"), dtype) for x in drawn(dtype))
    with how(), half_products():
        attend = compiled(by_ours(tiled))
        before = numpy(attend(q, k, v))
        for bad in (np.nan, 65504.0):
            place = (PLACES == 10)[None, :, None, None]  # of the second document
            changed = [ops.where(place, ops.cast(bad, dtype), x) for x in (k, v)]
            after = numpy(attend(q, *changed))
            unseen = ~np.broadcast_to(MASK[:, :, :, 10], (SEEDS, HEADS, LENGTH)).swapaxes(1, 2)
            np.testing.assert_array_equal(after[unseen], before[unseen])
            assert (after[~unseen] != before[~unseen]).any()
    assert (before[:, 3:8, 1:] == 0).all()
    assert (before[:, 3:8, 0] != 0).all()


@pytest.mark.parametrize("route", ROUTES)
def test_logits_beyond_float16_stay_apart(route):
    """120000 and 120050 are both infinite in float16, and one number in bfloat16."""
    how, tiled = ROUTES[route]
    query = np.full((SEEDS, LENGTH, HEADS, 2), [300.0, 1.0], "float32")
    key = np.full((SEEDS, LENGTH, HEADS, 2), [400.0, 0.0], "float32")
    key[:, 1::2, :, 1] = 50
    operands = [ops.cast(x, "float16") for x in (query, key, key)]

    def attend(*operands):
        rule = hm.Window(7, 0)
        return hm.dot_product_attention(*operands, mask_spec=rule, scale=1.0, tiled=tiled)

    with how(), half_products():
        context = numpy(compiled(attend)(*operands))
    wanted = np.where(PLACES == 0, 0.0, 50.0)  # the first query sees the first key alone
    np.testing.assert_array_equal(
        context[..., 1], np.broadcast_to(wanted[None, :, None], context.shape[:3])
    )
