"""cuDNN on JAX: its limits, in which program it is, and what half precision adds to the laws.

`test_laws.py` holds its code to every law, in float32 with XLA in its place. No test here needs a
GPU, and none shows that cuDNN itself computes rightly.
"""

import contextlib
import itertools
import re
from unittest import mock

import keras
import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from strategies import FEW
from tiled_contract import SCALE, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import choose, device
from keras_headmask.attention.kernels import ByGroup, CuDNN, first

if keras.backend.backend() != "jax":
    pytest.skip("a kernel of JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as theirs

from keras_headmask.attention.jax import cudnn
from keras_headmask.attention.tuning import forward_only

HALF = "bfloat16", "float16"
CAUSAL = hm.Window(after=0)


def shapes(dtype="bfloat16", size=64, value_size=None, queries=16, keys=16, key_heads=4):
    """Operands of which the shapes and dtypes are known alone."""
    value_size = size if value_size is None else value_size
    each = (queries, 4, size), (keys, key_heads, size), (keys, key_heads, value_size)
    return [jax.ShapeDtypeStruct((2, *shape), dtype) for shape in each]


# ---------------------------------------------------------------- limits


@contextlib.contextmanager
def a_gpu(*capability):
    """As if one were at hand, for our limits and for JAX' own."""

    def has(wanted):
        return capability >= tuple(map(int, wanted.split(".")))

    with (
        mock.patch.object(cudnn, "_capability", return_value=capability),
        mock.patch.object(theirs, "check_compute_capability", has),
    ):
        yield


def refused_by_jax(operands, is_masked):
    """Whether JAX raises, in training, where all that it gets from us has these shapes."""
    query, key, value = operands
    bias = None
    if is_masked:
        bias = jax.ShapeDtypeStruct((1, 1, query.shape[1], key.shape[1]), query.dtype)
    layout = theirs.AttentionLayout.BTNH
    try:
        theirs.check_layout(query, key, value, bias, *[None] * 6, layout)
        theirs.check_is_flash_attention(*operands, layout.value, 91000, is_masked, True)
    except (ValueError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_jax_refuses_is_refused_in_words(capability):
    """And of what it takes, what is named here alone."""
    dtypes, sizes = ("float32", *HALF), (8, 12, 128, 136, 256, 264)
    own = "in float16 no number that is added hides every logit"
    with a_gpu(*capability):
        for dtype, size, is_masked in itertools.product(dtypes, sizes, (False, True)):
            given = shapes(dtype, size)  # (odd lengths are filled up)
            words = cudnn.limit(*given, SCALE, is_masked)
            if words == own:
                assert dtype == "float16"
                assert is_masked
            else:
                assert (words is not None) == refused_by_jax(given, is_masked), (given, words)


def test_limits_of_operands_the_scale_and_the_gpu():
    half, single = shapes()[0], shapes("float32")[0]
    assert "not all bfloat16, or all float16" in cudnn.limit(half, half, single)
    assert "no multiple of 8, or above 128" in cudnn.limit(*shapes(size=136))
    assert "another size than keys" in cudnn.limit(*shapes(value_size=32))
    assert cudnn.limit(*shapes(), np.float32(0.5)) is None
    assert "the scale is a tensor" in cudnn.limit(*shapes(), jnp.ones(()))
    with a_gpu(7, 5):
        assert "since Ampere" in cudnn.limit(*shapes())
    with a_gpu(9, 0):
        assert cudnn.limit(*shapes(size=256)) is None


@pytest.mark.parametrize(
    ("says", "capability"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx90a", (0, 0)), ("", (0, 0))]
)
def test_the_capability_of_the_gpu_at_hand(says, capability):
    """That of AMD's is no number."""
    at_hand = mock.Mock(compute_capability=says)
    with (
        mock.patch.object(cudnn, "_is_at_hand", return_value=True),
        mock.patch.object(jax, "local_devices", return_value=[at_hand]),
    ):
        assert cudnn._capability() == capability


# ---------------------------------------------------------------- which kernel


def kernel_of(queries=512, keys=512, size=64, dtype="bfloat16", **rest):
    """Of a call on a GPU, and why cuDNN does not compute it; of 2 examples and 4 heads."""
    found, rest = [], {"mask_spec": CAUSAL} | rest

    def watch(request, part):
        kernel = choose.choose(request, part)
        if isinstance(kernel, ByGroup):
            kernel = first(kernel.kernels, request, part)
        found.append((kernel.name, CuDNN().refuses(request, part)))
        return ops.zeros_like(request.query)

    shape = (2, queries, 4, size), (2, keys, 4, size)
    with device.assuming("gpu"), choose.watched(watch):
        query, key = (ops.ones(x, dtype) for x in shape)
        hm.dot_product_attention(query, key, key, **rest)
    return found[0]


NEAR = hm.Window(31, 0)
BIAS = np.zeros((512, 512), "float32")
CHOSEN = {
    "half of the logits": ({}, "cuDNN", None),
    "short": ({"queries": 64, "keys": 64, "mask_spec": NEAR}, "cuDNN", None),
    "no rule": ({"mask_spec": None}, "cuDNN", None),
    "no rule, float16": ({"mask_spec": None, "dtype": "float16"}, "cuDNN", None),
    "a rule that hides nothing, odd": ({"mask_spec": hm.Full(), "queries": 511}, "cuDNN", None),
    "all logits, please": ({"mask_spec": NEAR, "tiled": False}, "cuDNN", None),
    "few of the logits": ({"mask_spec": NEAR}, "gathered", None),
    "tiles, please": ({"tiled": True}, "gathered", None),
    "float32": ({"dtype": "float32"}, "dense", "not all bfloat16"),
    "float16": ({"dtype": "float16"}, "dense", "in float16 no number"),
    "head size 12": ({"size": 12}, "dense", "no multiple of 8"),
    "dropout": ({"dropout": 0.1, "seed": 0}, "dense", "dropout"),
    "soft cap": ({"logits_soft_cap": 2.0}, "dense", "soft caps"),
    "bias": ({"bias": BIAS}, "dense", "biases"),
    "sinks": ({"sinks": np.zeros(4, "float32")}, "dense", "sinks"),
    "one query": ({"queries": 1, "query_offset": 511}, "cuDNN", None),
    "no query": ({"queries": 0, "query_offset": 0}, "dense", "a size is 0"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_which_kernel_a_gpu_computes_with(name):
    request, kernel, words = CHOSEN[name]
    chosen, reason = kernel_of(**request)
    assert chosen == kernel
    assert (reason or "").find(words or "") >= 0
    assert (reason is None) == (words is None)


def test_not_where_flash_attention_or_the_format_forbids_it():
    keras.config.disable_flash_attention()
    try:
        assert kernel_of() == ("dense", "`keras.config.disable_flash_attention()` was called")
    finally:
        keras.config.enable_flash_attention()
    with hm.dense_scope():
        assert kernel_of() == ("dense", "`hm.dense_scope` holds")


def test_not_in_code_that_is_mapped_or_exported(monkeypatch):
    """JAX' rule for mapped calls of cuDNN fails where an operand is not mapped."""
    taken = []
    monkeypatch.setattr(cudnn, "_fused", lambda query, *_: taken.append(1) or query)
    x = jnp.ones((2, 1, 16, 4, 64), "bfloat16")

    def attended(q):
        return hm.dot_product_attention(q, q, x[0], mask_spec=CAUSAL, tiled=False)

    with device.assuming("gpu"):
        jax.vmap(attended)(x)
        jax.vmap(jax.grad(lambda q: attended(q).astype("float32").sum()))(x)
        with forward_only():
            attended(x[0])
        assert not taken
        attended(x[0])
        assert taken


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("spec", [None, hm.Full(), CAUSAL])
def test_explain_says_so_of_a_layer(spec, dtype):
    """Under no rule bfloat16 runs stock Keras' own kernel, cuDNN's, too."""
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 64, mask_spec=spec, dtype=dtype)
    explained = hm.explain(layer, queries=64, device="gpu")
    if spec is not CAUSAL:
        own = "Keras' own attention"
        assert explained.kernel == (own if dtype == "bfloat16" else "cuDNN")
    elif dtype == "bfloat16":
        assert explained.kernel == "cuDNN"
    else:
        assert explained.kernel == "dense"
        assert explained.refused[-1][1].startswith("in float16 no number")


def test_a_layer_returns_the_probabilities_that_are_asked_for():
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 8, dtype="float16")
    x = ops.ones((1, 6, 8), "float16")
    with device.assuming("gpu"):
        _, probabilities = layer(x, x, return_attention_scores=True)
    assert probabilities.shape == (1, 4, 6, 6)


# ---------------------------------------------------------------- the program


def lowered(mask_heads, with_gradients=True, sharing=1):
    """The program for CUDA, which needs none to be written."""
    query, key, value = shapes(size=8, queries=6, keys=10, key_heads=4 // sharing)
    mask = np.tri(6, 10, dtype=bool)[None, None] & np.ones((1, mask_heads, 1, 1), bool)

    def total(*qkv):
        return cudnn.attention(*qkv, None if mask_heads == 0 else mask, SCALE).sum()

    call = jax.grad(total, (0, 1, 2)) if with_gradients else total
    with (
        mock.patch.object(cudnn, "_is_at_hand", return_value=True),
        mock.patch.object(theirs, "check_cudnn_version", return_value=91000),
    ):
        traced = jax.jit(call).trace(query, key, value)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize(
    ("mask_heads", "forward"), [(0, "fmhaSoftmax"), *((n, "fmhaScaleBiasSoftmax") for n in (1, 4))]
)
def test_the_program_calls_cudnn_and_holds_no_logits(mask_heads, forward, sharing):
    program = lowered(mask_heads, sharing=sharing)
    calls = re.findall(r"__cudnn\$(\w+)", program)
    assert calls == [forward, f"{forward}Backward"]
    assert "x6x10xf32>" not in program
    if mask_heads:  # whole along queries and keys, and no larger than the mask
        assert f"tensor<1x{mask_heads}x6x10xbf16>" in program
        assert "tensor<2x4x6x10xbf16>" not in program
    assert re.findall(r"__cudnn\$(\w+)", lowered(mask_heads, False, sharing)) == [forward]


# ---------------------------------------------------------------- half precision

rules = st.sampled_from(
    [
        hm.PerHead({0: hm.Window(2, 1), 2: hm.Chunk(3)}, ~hm.Keys(6, 7)),
        hm.Queries(3) & CAUSAL,
        hm.PerHead({1: hm.Nothing()}, CAUSAL),
    ]
)


@FEW
@given(rules, st.sampled_from([None, np.nan, np.inf, -3e38]), st.sampled_from([2, 4]))
def test_half_operands_under_any_rule(spec, bad, key_heads):
    """What is hidden has no say, however large; who may see what is not small gets NaN."""
    length, at = 10, 6
    qkv = [
        np.float32(jnp.asarray(x, "bfloat16"))
        for x in operands(2, length, length, 4, size=8, value_size=8, key_heads=key_heads)
    ]
    mask = oracle.mask(spec, 2, 4, length, length)
    sees = np.zeros((2, length, 4), bool)
    if bad is not None:
        qkv[1][0, at, 0, 3] = qkv[2][1, at, 1, 2] = bad
        sharing = 4 // key_heads
        sees[0, :, :sharing] = mask[0, :sharing, :, at].T
        sees[1, :, sharing : 2 * sharing] = mask[1, sharing : 2 * sharing, :, at].T
    upstream = np.where(
        sees[..., None], 0, np.cos(np.arange(2 * length * 32)).reshape(2, length, 4, 8)
    ).astype("float32")
    calm = [np.where(np.abs(x) < 1e30, x, 0) for x in qkv]
    wanted, exact = oracle.with_gradients(*calm, mask, SCALE, upstream)

    def run(*given):
        context, pull = jax.vjp(lambda *x: cudnn.attention(*x, mask, SCALE), *given)
        return context, *pull(jnp.asarray(upstream, "bfloat16"))

    context, *gradients = jax.jit(run)(*(jnp.asarray(x, "bfloat16") for x in qkv))
    assert context.dtype == "bfloat16"
    got = numpy(context)
    assert_close(got[~sees], wanted[~sees], "bfloat16")
    assert np.isnan(got[sees]).all()
    assert (got[~mask.any(-1).transpose(0, 2, 1)] == 0).all()
    exact["key"][np.abs(qkv[1]) > 1e30] = exact["value"][np.abs(qkv[2]) > 1e30] = 0
    for made, (name, of) in zip(map(numpy, gradients), exact.items(), strict=True):
        clean = ~sees if name == "query" else slice(None)
        assert_close(made[clean], of[clean], "bfloat16", depth=3, message=name)


def test_without_a_mask_it_is_the_plain_formula():
    qkv = operands(2, 5, 7, 4, size=8, value_size=8, key_heads=2)
    got = cudnn.attention(*map(jnp.asarray, qkv), None, SCALE)
    repeated = [np.repeat(x, 4 // x.shape[2], axis=2) for x in qkv]
    wanted, _ = oracle.attention(*repeated, np.ones((2, 4, 5, 7), bool), SCALE)
    assert_close(got, wanted)


def test_the_largest_keys_that_it_takes_do_not_show_where_they_are_hidden():
    """One step below what counts as too large, in the direction that is hardest to hide."""
    size, scale = 8, 1.0
    largest = float(jnp.asarray((cudnn._LARGEST_LOGIT / size) ** 0.5, "bfloat16"))
    query = jnp.full((1, 2, 1, size), largest, "bfloat16")
    key = jnp.stack([jnp.full((1, 1, size), -largest), jnp.full((1, 1, size), largest)], axis=1)
    value = jnp.stack([jnp.ones((1, 1, size)), jnp.full((1, 1, size), 7.0)], axis=1)
    key, value = (x.astype("bfloat16") for x in (key, value))
    mask = np.array([True, False])[None, None, None]
    got = numpy(cudnn.attention(query, key, value, mask, scale))
    np.testing.assert_array_equal(got, np.ones_like(got))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_and_sees_nothing_has_a_finite_gradient(bad):
    query, key, value = (jnp.ones((1, 2, 1, 8)) for _ in range(3))
    query = query.at[0, 0, 0, 3].set(bad)
    mask = np.array([[False, False], [True, False]])[None, None]

    def total(*qkv):
        return cudnn.attention(*qkv, mask, SCALE).sum()

    for gradient in jax.grad(total, (0, 1, 2))(query, key, value):
        assert np.isfinite(gradient).all()
    assert (cudnn.attention(query, key, value, mask, SCALE)[:, 0] == 0).all()


def test_a_row_that_is_nan_spoils_no_gradient_of_keys_that_it_may_not_see():
    """Though its own gradient is NaN: cuDNN multiplies that by a probability of 0."""
    qkv = [jnp.asarray(x) for x in operands(1, 4, 4, 1, size=8, value_size=8)]
    qkv[2] = qkv[2].at[0, 3, 0, 0].set(np.nan)
    mask = np.kron(np.eye(2), np.ones((2, 2))).astype(bool)[None, None]
    square = jax.grad(lambda *x: (cudnn.attention(*x, mask, SCALE) ** 2).sum(), (0, 1, 2))
    of_query, *of_keys = square(*qkv)
    assert np.isnan(of_query[:, 2:]).all()
    assert np.isfinite(of_query[:, :2]).all()
    for of_key in of_keys:
        assert np.isfinite(of_key[:, :2]).all()
        assert (np.abs(of_key[:, :2]).sum() > 0).all()


def test_a_row_that_sees_nothing_is_open_to_cudnn():
    """Which need not subtract numbers that are large and negative from each other there."""
    mask = np.array([[False, False], [True, False]])[None, None]
    with mock.patch.object(cudnn, "_fused", side_effect=cudnn._fused) as fused:
        cudnn.attention(*(jnp.ones((1, 2, 1, 8)) for _ in range(3)), mask, SCALE)
    bias = fused.call_args.args[3]
    assert bias.tolist() == [[[[0.0, 0.0], [0.0, -(2.0**41)]]]]
