"""The public function: its probabilities, its masks and what it refuses.

`test_laws.py` holds each kernel that it may choose to the definition.
"""

import keras
import numpy as np
import oracle
import pytest
import strategies
from contract import normal, numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from tiled_contract import SCALE, operands, tiles
from tolerance import assert_close

import keras_headmask as hm

BACKEND = keras.backend.backend()
# JAX on the CPU has no float16 kernel for some dot products.
NO_FLOAT16 = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX's CPU backend lacks the float16 dot product"
)
SIZE = 3


def attend(q, k, v, **more):
    more = {"return_scores": True, "query_offset": 0, **more}
    return [numpy(x) for x in hm.dot_product_attention(q, k, v, **more)]


def assert_equal(made, expected):
    for name, one, other in zip(("context", "scores"), made, expected, strict=True):
        assert_close(one, other, message=name, depth=3)


@strategies.FEW
@given(strategies.cases(), st.integers(0, 9), st.sampled_from([None, 0.3]), st.booleans())
def test_attention_is_what_it_means(case, seed, scale, share):
    """Also where all query heads share a key head: probabilities are of query heads."""
    spec, inputs, batch, heads, queries, keys, offset = case
    q, k, v = operands(batch, queries, keys, heads, seed, key_heads=1 if share else heads)
    more = {"mask_spec": spec, "mask_inputs": inputs, "query_offset": offset, "scale": scale}
    made = attend(q, k, v, **more)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    expected = oracle.attention(q, k, v, mask, scale or SIZE**-0.5)
    assert_equal(made, expected)
    assert (made[1][~mask] == 0).all()
    assert (made[0][~mask.any(-1).transpose(0, 2, 1)] == 0).all()


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (2, 2, 4, 5), (1, 2, 4, 5), (2, 1, 1, 5)])
def test_a_rule_and_a_mask_meet_by_and(shape):
    """As many heads as examples: a wrong axis would broadcast without a word."""
    mask = np.random.default_rng(1).integers(0, 2, shape)
    spec = hm.PerHead({1: hm.Window(1, 1)})
    lifted = mask if mask.ndim == 4 else mask[None, None] if mask.ndim == 2 else mask[:, None]
    merged = lifted.astype("bool") & oracle.mask(spec, 2, 2, 4, 5)
    q, k, v = operands(2, 4, 5, 2)
    expected = oracle.attention(q, k, v, np.broadcast_to(merged, (2, 2, 4, 5)), SIZE**-0.5)
    assert_equal(attend(q, k, v, mask=mask, mask_spec=spec), expected)


@pytest.mark.parametrize("more", [{}, {"mask_spec": hm.Full()}, {"mask": np.ones((4, 5), "bool")}])
def test_without_a_restriction_it_is_keras_own(more):
    q, k, _ = operands(2, 4, 5, 3)
    v = k + 1  # JAX's own wants values as large as keys
    expected = ops.dot_product_attention(q, k, v, flash_attention=False)
    context = hm.dot_product_attention(q, k, v, **more)
    assert_close(numpy(context), numpy(expected), depth=3)


# --- options ---


def test_probabilities_are_those_before_dropout():
    q, k, v = operands(2, 9, 9, 2)
    more = {"mask_spec": hm.Window(after=0), "return_scores": True}
    context, scores = hm.dot_product_attention(q, k, v, dropout=0.5, seed=7, **more)
    plain, plain_scores = hm.dot_product_attention(q, k, v, **more)
    np.testing.assert_array_equal(numpy(scores), numpy(plain_scores))
    assert np.abs(numpy(context) - numpy(plain)).max() > 0.1


@pytest.mark.parametrize("tiled", [True, None])
def test_a_soft_cap_a_bias_and_sinks(tiled):
    qkv = [normal(2, 9, 4, SIZE, seed=seed) for seed in range(3)]
    spec, ids = hm.SameSegment("ids") & hm.Window(after=0), np.arange(18).reshape(2, 9) // 4
    given = {"sinks": normal(4, seed=3)} | ({} if tiled else {"bias": normal(9, 9, seed=4)})
    more = {"mask_spec": spec, "mask_inputs": {"ids": ids}, "scale": SCALE, "tiled": tiled}
    with tiles():
        got = hm.dot_product_attention(*qkv, logits_soft_cap=0.8, **given, **more)
    mask = oracle.mask(spec, 2, 4, 9, 9, {"ids": ids})
    assert_close(got, oracle.attention(*qkv, mask, SCALE, soft_cap=0.8, **given)[0], depth=3)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=NO_FLOAT16)])
def test_scores_are_taken_in_float32(dtype):
    """Scores of 300 and 301 differ in float32; bfloat16 has no 301, float16 overflows at 70000."""
    one = np.ones((1, 1, 1, 2), "float32")
    k = np.array([[300.0, 0.0], [300.0, 1.0]], "float32").reshape(1, 2, 1, 2)
    results = hm.dot_product_attention(
        *(ops.cast(x, dtype) for x in (one, k, k)), scale=1.0, return_scores=True
    )
    assert [keras.backend.standardize_dtype(x.dtype) for x in results] == [dtype] * 2
    np.testing.assert_allclose(numpy(results[1]).ravel(), [0.269, 0.731], atol=5e-3)
    large = np.full((1, 2, 1, 2), 200.0, "float32")
    scores = attend(*(ops.cast(x, dtype) for x in (large, large, large)), scale=1.0)[1]
    np.testing.assert_array_equal(scores.ravel(), [0.5] * 4)


X = np.ones((2, 3, 2, 4), "float32")


def ones(*shape, dtype="bool"):
    return np.ones(shape, dtype)


REFUSED = [
    ((X[0], X, X), {}, ValueError, r"shape \(batch, length, heads, size\).*\(3, 2, 4"),
    ((X, X[:1], X), {}, ValueError, r"do not fit. Received: query \(2, 3, 2, 4\), key \(1,"),
    ((X, X[:, :, :1], X), {}, ValueError, r"do not fit.*key \(2, 3, 1, 4\)"),
    *(
        (
            (X, *[np.ones((2, 3, heads, 4), "float32")] * 2),
            {},
            ValueError,
            "must divide.*does not .* 2",
        )
        for heads in (3, 0)
    ),
    ((X, X, X[:, :2]), {}, ValueError, r"do not fit.*value \(2, 2, 2, 4\)"),
    ((X, X[..., :3], X), {}, ValueError, r"do not fit.*key \(2, 3, 2, 3\)"),
]
REFUSED += [
    ((X, X, X), *case)
    for case in (
        ({"mask": np.ones((3, 3))}, TypeError, "`mask` .*from_additive.*cast to bool"),
        ({"mask": ones(3)}, ValueError, r"Received: shape \(3,\)"),
        ({"mask": ones(4, 3, 3)}, ValueError, r"4 examples.*from_torch\(mask, num_heads=2"),
        ({"mask": ones(2, 3, 3, 3)}, ValueError, "3 heads .* has 2"),
        ({"mask": ones(3, 4), "tiled": True}, ValueError, "4 keys where the attention has 3"),
        ({"mask": ones(4, 3), "tiled": True}, ValueError, "4 queries where the attention has 3"),
        ({"mask": ones(2, 3)}, ValueError, r"axis of queries. Add the axis: mask\[:, None\]"),
        ({"mask_spec": {"kind": "full"}}, TypeError, "`mask_spec`.*from_config"),
        ({"mask_spec": hm.PerHead({2: hm.Full()})}, ValueError, "names head 2"),
        ({"mask_spec": hm.KeyFlag("x")}, ValueError, r"\['x'\] missing"),
        ({"mask_inputs": {"x": X}}, ValueError, r"holds \['x'\], which"),
        (
            {"mask_spec": hm.KeyFlag("x"), "mask_inputs": {"x": ones(1, 3)}},
            ValueError,
            r"\['x'\]` has 1 example where the batch has 2.*repeat",
        ),
        ({"dropout": 1.0}, ValueError, "`dropout` must be at least 0 and below 1.* Received: 1.0"),
        ({"bias": ones(3, 3, 3, dtype="float32")}, ValueError, "`bias` must broadcast to"),
        ({"bias": ones(3, 3, dtype="int32")}, TypeError, "`bias` must be floats"),
        (
            {"bias": ones(3, 3, dtype="float32"), "mask_spec": hm.Window(1, 1), "tiled": True},
            ValueError,
            "`tiled=True` is not possible here: returned probabilities, a bias and .* all logits",
        ),
        ({"logits_soft_cap": "2"}, TypeError, "`logits_soft_cap` must be a number"),
        *(
            ({"logits_soft_cap": cap}, ValueError, "must be at least 1.175e-38.* and finite")
            for cap in (-1.0, 0, 1e-38, np.inf)
        ),
        ({"sinks": ones(3, dtype="float32")}, ValueError, r"`sinks` must be floats of shape \(2,"),
    )
]


@pytest.mark.parametrize(("args", "more", "error", "message"), REFUSED)
def test_refused(args, more, error, message):
    with pytest.raises(error, match=message):
        hm.dot_product_attention(*args, **more)


def test_in_a_functional_model():
    x, ids = keras.Input((4, 2, SIZE)), keras.Input((4,), dtype="int32")
    spec = hm.PerHead({1: hm.SameSegment("ids")}, default=hm.Window(after=0))
    out = hm.dot_product_attention(x, x, x, mask_spec=spec, mask_inputs={"ids": ids})
    q, values = operands(2, 4, 4, 2)[0], np.array([[0, 0, 1, -1], [5, 6, 6, 5]])
    mask = oracle.mask(spec, 2, 2, 4, 4, {"ids": values})
    made = numpy(keras.Model([x, ids], out)([q, values]))
    assert_close(made, oracle.attention(q, q, q, mask, SIZE**-0.5)[0], depth=3)
    # Of unknown length. Found as a bug: an error of the backend, `arange(None)`.
    x = keras.Input((None, 2, SIZE))
    with pytest.raises((TypeError, ValueError), match="length"):
        hm.dot_product_attention(x, x, x, mask_spec=spec, mask_inputs={"ids": ids})


@pytest.mark.skipif(BACKEND != "jax", reason="a setting of JAX")
@pytest.mark.parametrize("tiled", [False, True])
def test_jax_debug_nans_finds_none(tiled):
    """Where a row sees nothing, too."""
    import jax

    x, spec = np.ones((1, 9, 2, 4), "float32"), hm.Window(2, 2) & hm.Queries(3)
    with jax.debug_nans(True):
        context = hm.dot_product_attention(x, x, x, mask_spec=spec, tiled=tiled)
    np.testing.assert_array_equal(context[:, :3], 0)
    np.testing.assert_array_equal(context[:, 3:], 1)
