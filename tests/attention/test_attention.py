"""The public function: its probabilities, its masks and what it refuses.

`test_laws.py` holds each kernel that it may choose to the definition.
"""

import keras
import numpy as np
import oracle
import pytest
import strategies
from contract import normal
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from laws import BATCH, CHANGES, HEADS, LENGTH
from tiled_contract import LONG, SCALE, tiles
from tolerance import assert_close

import keras_headmask as hm

BACKEND = keras.backend.backend()
# JAX on the CPU has no float16 kernel for some dot products.
NO_FLOAT16 = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX's CPU backend lacks the float16 dot product"
)
HALF = ["bfloat16", pytest.param("float16", marks=NO_FLOAT16)]
SIZE = 4


def numpy(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))


def operands(batch, heads, queries, keys, seed=0, size=SIZE):
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, heads, size), (batch, keys, heads, size), (batch, keys, heads, 3)]
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


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
    q, k, v = operands(batch, heads, queries, keys, seed)
    given_keys = [x[:, :, :1] if share else x for x in (k, v)]
    k, v = (np.broadcast_to(x, (*x.shape[:2], heads, x.shape[3])) for x in given_keys)
    more = {"mask_spec": spec, "mask_inputs": inputs, "query_offset": offset, "scale": scale}
    made = attend(q, *given_keys, **more)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    expected = oracle.attention(q, k, v, mask, scale or SIZE**-0.5)
    assert_equal(made, expected)
    assert (made[1][~mask] == 0).all()
    assert (made[0][~mask.any(-1).transpose(0, 2, 1)] == 0).all()


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (2, 2, 4, 5), (1, 2, 4, 5), (2, 1, 1, 5)])
@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_a_rule_and_a_mask_meet_by_and(shape, dtype):
    """As many heads as examples: a wrong axis would broadcast without a word."""
    mask = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    spec = hm.PerHead({1: hm.Window(1, 1)})
    lifted = mask if mask.ndim == 4 else mask[None, None] if mask.ndim == 2 else mask[:, None]
    merged = lifted.astype("bool") & oracle.mask(spec, 2, 2, 4, 5)
    q, k, v = operands(2, 2, 4, 5)
    expected = oracle.attention(q, k, v, np.broadcast_to(merged, (2, 2, 4, 5)), SIZE**-0.5)
    assert_equal(attend(q, k, v, mask=mask, mask_spec=spec), expected)


@pytest.mark.parametrize("more", [{}, {"mask_spec": hm.Full()}, {"mask": np.ones((4, 5), "bool")}])
def test_without_a_restriction_it_is_keras_own(more):
    q, k, _ = operands(2, 3, 4, 5)
    v = k + 1  # JAX's own wants values as large as keys
    expected = ops.dot_product_attention(q, k, v, flash_attention=False)
    context = hm.dot_product_attention(q, k, v, **more)
    assert_close(numpy(context), numpy(expected), depth=3)


# --- options ---


def test_probabilities_are_those_before_dropout():
    q, k, v = operands(2, 2, 9, 9)
    more = {"mask_spec": hm.Window(after=0), "return_scores": True}
    context, scores = hm.dot_product_attention(q, k, v, dropout=0.5, seed=7, **more)
    plain, plain_scores = hm.dot_product_attention(q, k, v, **more)
    np.testing.assert_array_equal(numpy(scores), numpy(plain_scores))
    assert np.abs(numpy(context) - numpy(plain)).max() > 0.1


@pytest.mark.parametrize(("name", "tiled"), [("cap and sinks", True), ("all", None)])
def test_a_soft_cap_a_bias_and_sinks(name, tiled):
    change, (spec, inputs) = CHANGES[name], LONG["documents"]
    qkv = [normal(BATCH, LENGTH, HEADS, SIZE, seed=seed) for seed in range(3)]
    mask = oracle.mask(spec, BATCH, HEADS, LENGTH, LENGTH, inputs)
    given = {"mask_spec": spec, "mask_inputs": inputs, "scale": SCALE, "tiled": tiled}
    given |= {name: change.get(name) for name in ("bias", "sinks")}
    with tiles():
        got = hm.dot_product_attention(*qkv, logits_soft_cap=change["soft_cap"], **given)
    assert_close(got, oracle.attention(*qkv, mask, SCALE, **change)[0], depth=3)


@pytest.mark.parametrize("dtype", HALF)
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


def keys_of(heads):
    return [np.ones((2, 3, heads, 4), "float32")] * 2


def ones(*shape, dtype="bool"):
    return np.ones(shape, dtype)


REFUSED = [
    ((X[0], X, X), {}, ValueError, r"shape \(batch, length, heads, size\).*\(3, 2, 4"),
    ((X, X[:1], X), {}, ValueError, r"do not fit. Received: query \(2, 3, 2, 4\), key \(1,"),
    ((X, X[:, :, :1], X), {}, ValueError, r"do not fit.*key \(2, 3, 1, 4\)"),
    ((X, *keys_of(3)), {}, ValueError, "must divide.*3 does not .* 2"),
    ((X, *keys_of(0)), {}, ValueError, "must divide.*0 does not .* 2"),
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
        ({"mask": ones(3, 4)}, ValueError, "4 keys .* has 3"),
        ({"mask": ones(2, 3)}, ValueError, r"axis of queries. Add the axis: mask\[:, None\]"),
        ({"mask_spec": {"kind": "full"}}, TypeError, "`mask_spec`.*from_config"),
        ({"mask_spec": hm.PerHead({2: hm.Full()})}, ValueError, "names head 2"),
        ({"mask_spec": hm.KeyFlag("x")}, ValueError, r"\['x'\] missing"),
        ({"mask_inputs": {"x": X}}, ValueError, r"holds \['x'\], which"),
        (
            {"mask_spec": hm.KeyFlag("x"), "mask_inputs": {"x": ones(3, 3)}},
            ValueError,
            "has 3 examples where the batch has 2",
        ),
        ({"dropout": 1.0}, ValueError, "`dropout` must be at least 0 and below 1"),
        ({"dropout": -0.1}, ValueError, "`dropout` must be .* Received: -0.1"),
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
    q, values = operands(2, 2, 4, 4)[0], np.array([[0, 0, 1, -1], [5, 6, 6, 5]])
    mask = oracle.mask(spec, 2, 2, 4, 4, {"ids": values})
    made = numpy(keras.Model([x, ids], out)([q, values]))
    assert_close(made, oracle.attention(q, q, q, mask, SIZE**-0.5)[0], depth=3)


def test_in_a_functional_model_of_unknown_length():
    """Found as a bug: an error of the backend, `arange(None)`. (Inside a layer's call it works.)"""
    x = keras.Input((None, 2, SIZE))
    with pytest.raises((TypeError, ValueError), match="length"):
        hm.dot_product_attention(x, x, x, mask_spec=hm.Window(after=0))


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
