"""What a key holds does not matter to queries that may not see it: inf, NaN and overflow.

By every implementation, forward and backward, against loops that never touch a hidden key.
"""

import contextlib

import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from tiled_contract import BACKEND, SCALE, at_once, heads_alone, operands, tiles

import keras_headmask as hm
from keras_headmask.attention import one_query

LENGTH, BAD = 13, 6  # the position that holds what is not finite
IDS = np.repeat([0, 1, 2], [5, 4, 4]).astype("int32")[None]
RULES = {
    "positions": (hm.PerHead({0: hm.Window(2, 2), 1: hm.Chunk(5), 2: ~hm.Keys(6, 7)}), {}),
    "ids": (hm.SameSegment("ids"), {"ids": IDS}),
    "flags": (hm.recipes.longformer(2, "f"), {"f": np.isin(np.arange(LENGTH), [2, 9])[None]}),
}


def loops(qkv, mask, upstream):
    """Context and gradients, row by row, from the keys that the row sees."""
    q, k, v, upstream = (np.asarray(x, "float64") for x in (*qkv, upstream))
    context, grads = np.zeros_like(upstream), [np.zeros_like(x) for x in (q, k, v)]
    for b, h, i in np.ndindex(mask.shape[:3]):
        seen = np.flatnonzero(mask[b, h, i])
        if not seen.size:
            continue
        keys, values, d_row = k[b, seen, h], v[b, seen, h], upstream[b, i, h]
        scores = keys @ q[b, i, h] * SCALE
        p = np.exp(scores - scores.max())
        p /= p.sum()
        context[b, i, h] = p @ values
        d_p = values @ d_row
        d_scores = p * (d_p - p @ d_p) * SCALE
        grads[0][b, i, h] = d_scores @ keys
        grads[1][b, seen, h] += d_scores[:, None] * q[b, i, h]
        grads[2][b, seen, h] += p[:, None] * d_row
    return context, grads


def jitted(function):
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True)


def traced(function):
    if BACKEND != "tensorflow":
        return function
    import tensorflow as tf

    return tf.function(function)


def with_unknown_lengths(function):
    import tensorflow as tf

    free = [tf.TensorSpec([None, None, *x.shape[2:]]) for x in operands(1, 1, 1, 3)]
    return tf.function(function).get_concrete_function(*free)


# Each: how short or long it is taken, `tiled`, and what is done to the function.
ROUTES = {
    "dense": (contextlib.nullcontext, False, None),
    "tiles": (tiles, True, traced),
}
if BACKEND != "torch":
    ROUTES |= {
        "dense by XLA": (contextlib.nullcontext, False, jitted),
        "XLA": (tiles, True, jitted),
    }
if BACKEND == "tensorflow":
    ROUTES |= {
        "dense of unknown lengths": (contextlib.nullcontext, False, with_unknown_lengths),
        "tiles, unknown lengths": (tiles, True, with_unknown_lengths),
        "head by head, unknown lengths": (heads_alone, True, with_unknown_lengths),
        "all logits at once, unknown lengths": (at_once, None, with_unknown_lengths),
        "exported": (hm.dense_scope, None, None),
    }


# An example for each: nothing bad, then each kind of value in each operand.
CASES = [(0, 0.0), *((p, bad) for p in range(3) for bad in (np.nan, np.inf, -np.inf, 3e38))]


# Rules that read data differ in what the loops look at; elsewhere one rule is enough.
OF_DATA = [route for route in ROUTES if "," in route or (BACKEND, route) == ("torch", "tiles")]
RUNS = [
    (route, rule) for route in ROUTES for rule in RULES if rule == "positions" or route in OF_DATA
]


@pytest.mark.parametrize(("route", "rule"), RUNS)
def test_who_may_not_see_it_has_what_0_in_its_place_gives(route, rule):
    how, tiled, wrap = ROUTES[route]
    spec, inputs = RULES[rule]
    examples = len(CASES)
    inputs = {name: np.repeat(x, examples, 0) for name, x in inputs.items()}
    qkv = [np.repeat(x, examples, 0) for x in operands(1, LENGTH, LENGTH, 3)]
    mask = numpy(hm.make_mask(spec, LENGTH, LENGTH, 3, mask_inputs=inputs or None))
    mask = np.broadcast_to(mask, (examples, 3, LENGTH, LENGTH))
    sees = np.zeros((examples, 3, LENGTH), bool)  # the rows that may be harmed
    for example, (place, bad) in enumerate(CASES):
        qkv[place][example, BAD] = bad
        if bad != 0 and place > 0:
            sees[example] = mask[example, :, :, BAD]
        elif bad != 0:
            sees[example, :, BAD] = mask[example, :, BAD].any(-1)
    of_such = (mask & sees[..., None]).any(2).transpose(0, 2, 1)  # the keys that they see
    sees = sees.transpose(0, 2, 1)
    weights = np.cos(np.arange(qkv[2].size, dtype="float32")).reshape(qkv[2].shape)
    weights = np.where(sees[..., None], 0, weights).astype("float32")

    counts, factors = ops.convert_to_tensor(weights != 0), ops.convert_to_tensor(weights)

    def attend(*qkv):
        return hm.dot_product_attention(
            *qkv, mask_spec=spec, mask_inputs=inputs or None, scale=SCALE, tiled=tiled
        )

    def loss(*qkv):
        return ops.sum(ops.where(counts, called(*qkv), 0.0) * factors)

    with np.errstate(all="ignore"):
        wanted, d_wanted = loops(qkv, mask, weights)
    with how():
        called = wrap(attend) if wrap else attend
        got = numpy(called(*map(ops.convert_to_tensor, qkv)))
        made = gradient(loss, *qkv)
        as_zero = [np.where(np.abs(x) < 1e30, x, 0) for x in qkv]
        calm = numpy(called(*map(ops.convert_to_tensor, as_zero)))
    np.testing.assert_allclose(got[~sees], wanted[~sees], 1e-4, 1e-5)
    np.testing.assert_array_equal(got[~sees], calm[~sees], "a bit of it shows")
    for example, (_, bad) in enumerate(CASES):
        if not abs(bad) < np.inf:
            assert not np.isfinite(got[example][sees[example]]).any(), "hidden from who may see it"
    clean_parts = (~sees, ~of_such, ~of_such)
    for name, one, other, part in zip("qkv", made, d_wanted, clean_parts, strict=True):
        np.testing.assert_allclose(
            one[part], other[part], 1e-4, 1e-5, err_msg=f"gradient of {name}"
        )


@pytest.mark.parametrize("route", ROUTES)
def test_a_query_whose_scores_are_all_infinite_sees_nothing_that_is_hidden(route):
    how, tiled, wrap = ROUTES[route]
    ones, v = (np.ones((1, LENGTH, 3, size), "float32") for size in (3, 2))
    v[:, 8:] = 777.0

    def attend(*qkv):
        return hm.dot_product_attention(*qkv, mask_spec=hm.Keys(0, 8), tiled=tiled)

    with how():
        called = wrap(attend) if wrap else attend
        for q, k in ((ones * 1e20, ones * -1e20), (ones * -np.inf, ones)):
            got = numpy(called(*map(ops.convert_to_tensor, (q, k, v))))
            assert not (got > 1).any()  # NaN or 0, or a mean of what it sees


@pytest.mark.parametrize("route", ROUTES)
def test_allowed_logits_below_the_number_that_hides_stay_above_hidden_ones(route):
    """Found as a bug: beside logits of -6e9 the hidden ones, at -1e9, took all probability."""
    how, tiled, wrap = ROUTES[route]
    spec, _ = RULES["positions"]
    q, k, v = operands(1, LENGTH, LENGTH, 3)
    q, k = (
        (np.arange(3) == 0) * np.full_like(x, number) for x, number in ((q, -(2**16)), (k, 2**17))
    )
    mask = numpy(hm.make_mask(spec, LENGTH, LENGTH, 3))
    weights = np.cos(np.arange(v.size, dtype="float32")).reshape(v.shape)

    def attend(*qkv):
        return hm.dot_product_attention(*qkv, mask_spec=spec, scale=SCALE, tiled=tiled)

    def loss(*qkv):
        return ops.sum(called(*qkv) * ops.convert_to_tensor(weights))

    qkv = [q.astype("float32"), k.astype("float32"), v]
    wanted, gradients = loops(qkv, mask, weights)
    with how():
        called = wrap(attend) if wrap else attend
        got = numpy(called(*map(ops.convert_to_tensor, qkv)))
        made = gradient(loss, *qkv)
    np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)
    # (Of queries it is a sum of entries like 1e4 that is 0.)
    for one, other, rounding in zip(made, gradients, (0.5, 0.5, 1e-5), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, rounding)


def test_a_step_of_generation_does_the_same():
    query, key = np.full((1, 1, 2, 1), -(2.0**16)), np.full((1, 2, 4, 1), 2.0**17)
    value = np.arange(8.0).reshape(1, 2, 4, 1)
    mask = np.array([[[[True, True, False, False]], [[False, False, False, True]]]])
    given = (ops.convert_to_tensor(x.astype("float32")) for x in (query, key, value))
    got = one_query.attention(*given, ops.convert_to_tensor(mask), 1.0)
    np.testing.assert_allclose(numpy(got).ravel(), [0.5, 7.0])


@pytest.mark.parametrize("route", ROUTES)
def test_who_may_see_it_gets_no_gradient_that_looks_sound(route):
    how, tiled, wrap = ROUTES[route]
    spec, _ = RULES["positions"]
    mask = numpy(hm.make_mask(spec, LENGTH, LENGTH, 3))[0]

    def attend(*qkv):
        return hm.dot_product_attention(*qkv, mask_spec=spec, scale=SCALE, tiled=tiled)

    def loss(*qkv):
        return ops.sum(called(*qkv) ** 2)

    for place in (1, 2):
        qkv = operands(1, LENGTH, LENGTH, 3)
        qkv[place][0, BAD] = np.nan
        with how():
            called = wrap(attend) if wrap else attend
            of_query = gradient(loss, *qkv)[0]
        sees = mask[:, :, BAD].transpose()
        assert not np.isfinite(of_query[0][sees]).any()
        assert np.isfinite(of_query[0][~sees]).all()
