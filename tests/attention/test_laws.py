"""What every kernel of the backend keeps, each called by itself: its context and its gradients.

The oracles are loops for the mask and a formula in float64. `support/by_kernel.py` lists the
kernels; one that is added is held to all of this. What a kernel refuses is skipped, with its
sentence.
"""

import keras
import numpy as np
import oracle
import pytest
from by_kernel import (
    KERNELS,
    each,
    each_kernel,
    for_examples,
    penalties,
    results,
    sixty_four_bits,
    skipping,
)
from contract import numpy
from hypothesis import settings
from hypothesis import strategies as st
from laws import (
    AT,
    BATCH,
    BY_HEAD,
    CHANGES,
    EDGES,
    EMPTY,
    HEADS,
    IDS,
    LENGTH,
    LOCAL,
    RATE,
    READING,
    RULES,
    SEEN,
    SOME_CHANGES,
    check,
    check_dropout,
    close_to_all,
    mask_of,
    reading,
    rounded,
    weights,
)
from strategies import FEW, MANY, cases
from tiled_contract import SCALE, UNSORTED_IDS, attend, operands, seeds, sizes
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

BACKEND = keras.backend.backend()
UPSTREAM = weights(BATCH, LENGTH, HEADS)

# ---------------------------------------------------------------- any rule, any lengths, any heads


def random_rules(kernel, many):
    """Of a kernel that traces each example anew, a few."""
    if kernel.is_traced:
        many = settings(many, max_examples=12 if many is MANY else 2)

    @for_examples(many, cases(), sizes, st.sampled_from([1, 2, 3, 4]), seeds)
    def _(case, tile_sizes, sharing, seed):
        spec, inputs, batch, heads, queries, keys, offset = case
        key_heads = heads // sharing if heads % sharing == 0 else heads
        qkv = operands(batch, queries, keys, heads, seed, key_heads=key_heads)
        local, wide, block = tile_sizes
        step = (1, 30, 100, 2**20)[seed % 4]
        with tuned(local_tile=local, wide_tile=wide, block=block, most_logits_of_a_step=step):
            check(kernel, qkv, spec, inputs, offset)


@each_kernel
def test_any_rule_equals_the_definition(kernel):
    random_rules(kernel, FEW)


@pytest.mark.long
@each_kernel
def test_many_rules_equal_the_definition(kernel):
    random_rules(kernel, MANY)


@each(RULES, ["flags and padding", "certain tiles of unequal width"], ["heads in any order"])
@skipping
def test_longer_sequences(kernel, name):
    """Gaps, dead ends, flags on both axes, whole masks; two query heads share keys."""
    spec, inputs = RULES[name]
    check(kernel, operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2), spec, inputs)


@each(EDGES, ["more keys"])
@skipping
def test_lengths_that_fit_no_tile_and_an_offset(kernel, name):
    queries, keys, offset = EDGES[name]
    ids = tuple(np.arange(2 * n).reshape(2, n) % 5 for n in (queries, keys))
    check(kernel, operands(2, queries, keys, 3), BY_HEAD, {"ids": ids}, offset)


@each(EMPTY, ["no key"])
@skipping
def test_what_is_empty(kernel, name):
    batch, queries, keys = EMPTY[name]
    spec = hm.PerHead({1: hm.Window(1, 1), 2: hm.Keys(0, 1) | hm.Window(1, 1)}, hm.KeyIn("ids", 1))
    ids = {"ids": tuple(np.zeros((batch, n), "int32") for n in (queries, keys))}
    qkv = operands(batch, queries, keys, 3)
    with kernel.setting():
        got, gradients = results(kernel, qkv, spec, ids, 0, weights(batch, queries, 3))
    np.testing.assert_array_equal(got, np.zeros((batch, queries, 3, 2)))
    for gradient, x in zip(gradients.values(), qkv, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


@each_kernel
def test_any_distribution_of_rules_over_heads_that_share_keys(kernel):
    rules = (hm.Window(1, 1), hm.Window(after=0) & hm.KeyFlag("f"), hm.Chunk(3) | hm.Keys(0, 1))
    flags = {"f": np.arange(18).reshape(2, 9) % 4 > 0}
    owners = st.lists(st.integers(0, 2), min_size=6, max_size=6)
    some = settings(FEW, max_examples=2 if kernel.is_traced else 8)

    @for_examples(some, owners, st.sampled_from([1, 2, 3]))
    def _(rule_of_head, key_heads):
        spec = hm.PerHead({head: rules[rule] for head, rule in enumerate(rule_of_head)})
        inputs = flags if spec.inputs else {}
        qkv = operands(2, 9, 9, 6, key_heads=key_heads)
        check(kernel, qkv, spec, inputs, with_gradients=False)


# ---------------------------------------------------------------- caps, a bias, sinks


@each(CHANGES, ["cap and sinks", "all"], ["cap and sinks"])
@skipping
def test_what_changes_logits(kernel, name):
    check(kernel, operands(BATCH, LENGTH, LENGTH, HEADS), *reading(kernel), changes=CHANGES[name])


@each(["two dead ends", "full", "far keys", "longformer", "heads in any order"])
@skipping
def test_changes_under_any_rule_with_an_offset_and_shared_keys(kernel, name):
    spec, inputs = RULES[name]
    inputs = {k: x if x.ndim == 4 else (x, x) for k, x in inputs.items()}
    changes = CHANGES["cap and sinks"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2)
    check(kernel, qkv, spec, inputs, 0 if name == "far keys" else 9, changes)


@each_kernel
@skipping
def test_no_change_opens_a_hidden_key(kernel):
    """To the bit, whatever a bias holds there; and it has no gradient."""
    qkv, shift = operands(BATCH, LENGTH, LENGTH, HEADS), -1e12
    hidden = ~oracle.mask(LOCAL, BATCH, HEADS, LENGTH, LENGTH, SEEN)[0, 0]
    plain = np.full((LENGTH, LENGTH), shift, "float32")
    changes = {"soft_cap": 2.0, "sinks": CHANGES["sinks"]["sinks"] + np.float32(shift)}

    def run(odd):
        bias = np.where(hidden, np.float32(odd), plain)
        return results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, changes | {"bias": bias})

    with kernel.setting():
        wanted, _ = run(shift)
        assert (wanted[:, :2] == 0).all()
        assert np.abs(wanted[:, 2:]).min() > 0
        for odd in (np.inf,) if kernel.is_traced else (np.inf, -np.inf, np.nan, 1e30, -3e38):
            got, gradients = run(odd)
            np.testing.assert_array_equal(got, wanted)
            assert (gradients["bias"][hidden] == 0).all()
            assert all(np.isfinite(x).all() for x in gradients.values())


@each_kernel
@skipping
def test_a_bias_of_minus_inf_hides_as_the_mask_does(kernel):
    """And a row in which one of both hides each key is 0."""
    allowed = np.random.default_rng(0).random((1, HEADS, LENGTH, LENGTH)) < 0.5
    allowed[:, :, 7] = allowed[..., 5] = False  # fully masked rows, and a key that nobody sees
    qkv, sinks = operands(BATCH, LENGTH, LENGTH, HEADS), CHANGES["sinks"]
    mask = mask_of(qkv, LOCAL, SEEN) & allowed
    bias = {"bias": np.where(allowed, 0.0, -np.inf).astype("float32")}
    with kernel.setting():
        got, made = results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, sinks | bias)
    del made["bias"]
    close_to_all((got, made), oracle.with_gradients(qkv, mask, SCALE, UPSTREAM, **sinks))
    assert (got[:, 7] == 0).all()


@each_kernel
@skipping
def test_gradients_of_the_least_soft_cap_are_finite(kernel):
    qkv, cap = operands(BATCH, LENGTH, LENGTH, HEADS), float(np.finfo("float32").tiny)
    with kernel.setting():
        made = results(kernel, qkv, LOCAL, SEEN, 0, UPSTREAM, {"soft_cap": cap})
    assert all(np.isfinite(x).all() for x in (made[0], *made[1].values()))


# ---------------------------------------------------------------- dtypes and large numbers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each(SOME_CHANGES, ["cap and sinks"])
@skipping
def test_the_result_has_the_dtype_of_the_value(kernel, dtype, name):
    """And rows that see nothing are 0, whose gradients are 0 and no others NaN."""
    dead_ends = RULES["groups with dead ends"]
    spec, inputs = RULES["padding"] if kernel.is_traced else dead_ends
    changes = SOME_CHANGES[name]
    qkv = [rounded(x, dtype) for x in operands(BATCH, LENGTH, LENGTH, HEADS, key_heads=2)]
    mask = mask_of(qkv, spec, inputs)
    dead = ~mask.any(-1).transpose(0, 2, 1)
    with kernel.setting():
        got, made = results(kernel, qkv, spec, inputs, 0, UPSTREAM, changes, dtype=dtype)
    assert_close(got, oracle.attention(*qkv, mask, SCALE, **changes)[0], dtype, 3)
    assert (got[dead] == 0).all()
    assert all(np.isfinite(x).all() for x in made.values())
    assert (made["query"][dead] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each(["none", "cap and sinks", "bias"])
@skipping
def test_float64_is_float64_throughout(kernel, name, dtype):
    """And float32 stays float32 where there are 64 bits."""
    changes = {} if name == "none" else CHANGES[name]
    changes = {k: np.asarray(x, dtype) if np.ndim(x) else x for k, x in changes.items()}
    qkv = [x.astype(dtype) for x in operands(BATCH, LENGTH, LENGTH, HEADS)]
    exact = oracle.with_gradients(qkv, mask_of(qkv, *READING), SCALE, UPSTREAM, **changes)
    with sixty_four_bits(), kernel.setting():
        got = results(kernel, qkv, *READING, 0, UPSTREAM.astype(dtype), changes)
    assert {x.dtype.name for x in (got[0], *got[1].values())} == {dtype}
    close_to_all(got, exact, dtype=dtype, depth=16)


@pytest.mark.parametrize("size", [30.0, 1000.0])
@each_kernel
@skipping
def test_large_logits(kernel, size):
    q, k, v = operands(BATCH, LENGTH, LENGTH, HEADS)
    qkv = (q * np.float32(size), k, v)
    with kernel.setting():
        got = results(kernel, qkv, *READING, 0, UPSTREAM)
    exact = oracle.with_gradients(qkv, mask_of(qkv, *READING), SCALE, UPSTREAM)
    # The largest logits round to 1e-7 of themselves, which is what the results then carry.
    close_to_all(got, exact, depth=6 * size)


# ---------------------------------------------------------------- dropout


@each(SOME_CHANGES, ["cap and sinks"])
@skipping
def test_dropout_is_drawn_for_pairs_and_found_again_by_the_gradient(kernel, name):
    check_dropout(kernel, SOME_CHANGES[name])


def test_a_fair_draw():
    """By example, head, query and key, and of neighbours, in many tiles and two head groups."""
    query, key, _ = operands(2, 300, 300, 3, size=8)
    units = np.broadcast_to(np.eye(300, dtype="float32")[None, :, None], (2, 300, 3, 300)).copy()
    rule = hm.PerHead({1: hm.Window(50, 30)}, hm.Window(40, 40))
    with tuned(local_tile=50, most_logits_of_a_step=2**14):
        plain, dropped = (
            numpy(attend((query, key, units), rule, **more)).transpose(0, 2, 1, 3)
            for more in ({}, {"dropout": RATE, "seed": 1})
        )
    allowed = plain > 0
    kept = dropped > 0
    assert not (kept & ~allowed).any(), "nothing is opened"
    assert_close(dropped[kept], plain[kept] / (1 - RATE))
    spread = np.sqrt(RATE * (1 - RATE))
    assert abs(kept[allowed].mean() - (1 - RATE)) < 5 * spread / np.sqrt(allowed.sum())
    for axis in range(4):  # no example, head, query or key is favoured: deviations are normal
        others = tuple({0, 1, 2, 3} - {axis})
        count = allowed.sum(others)
        deviation = (kept.sum(others) - (1 - RATE) * count) / (spread * np.sqrt(count))
        assert np.abs(deviation).max() < 5
        assert len(deviation) < 100 or 0.8 < deviation.std() < 1.2
        # Neighbours, and the last with the first, have nothing in common.
        other = np.roll(allowed, 1, axis)
        pairs = allowed & other
        common = np.corrcoef(kept[pairs], np.roll(kept, 1, axis)[pairs])[0, 1]
        assert abs(common) < 5 / np.sqrt(pairs.sum())


# ---------------------------------------------------------------- gradients of gradients


@pytest.mark.parametrize("name", SOME_CHANGES)
@each_kernel
@skipping
def test_gradients_of_gradients(kernel, name):
    """A penalty on gradients."""
    if kernel.is_fused and BACKEND == "torch":
        pytest.skip("PyTorch's attention has no gradient of its gradient: an error there")
    length, changes = 9, SOME_CHANGES[name]
    spec, ids = READING[0], {"ids": UNSORTED_IDS[:1, :length]}
    qkv = operands(1, length, length, HEADS, key_heads=2)
    with kernel.setting():
        made = penalties(kernel, qkv, spec, ids, changes)
    exact = oracle.penalties(qkv, mask_of(qkv, spec, ids), SCALE, **changes)
    for what, one in made.items():
        assert_close(one, exact[what], depth=256, message=what)


# ---------------------------------------------------------------- hidden is hidden


@pytest.mark.parametrize("size", [2**17, 1e30])
@each_kernel
@skipping
def test_allowed_logits_far_below_hide_as_well(kernel, size):
    """Found as a bug: beside logits of -6e9 the hidden ones, at -1e9, took all probability."""
    spec, inputs = IDS
    q, k, v = operands(1, AT, AT, HEADS)
    first = (np.arange(3) == 0).astype("float32")
    qkv = np.full_like(q, -(2**16)) * first, np.full_like(k, size) * first, v
    upstream = weights(1, AT, HEADS)
    wanted, exact = oracle.with_gradients(qkv, mask_of(qkv, spec, inputs), SCALE, upstream)
    with kernel.setting():
        got, made = results(kernel, qkv, spec, inputs, 0, upstream)
    np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)
    for what, one in made.items():
        # (Of queries and keys it is a sum of large entries that is 0.)
        rounding = {"query": 4e-6 * size, "key": 0.5, "value": 1e-5}[what]
        np.testing.assert_allclose(one, exact[what], 1e-4, rounding, err_msg=what)


@each_kernel
@skipping
def test_a_hidden_key_has_no_probability_whatever_its_logit_is(kernel):
    """To the bit: a change of a hidden key and its value changes nothing."""
    (q, k, v), (spec, inputs) = operands(1, AT, AT, HEADS), IDS
    hidden = ~mask_of((q, k), spec, inputs)[0, :, 0].any(0)  # from the first query
    made = []
    for size in (1.0, 1e10, -1e10, 1e35):
        key, value = k.copy(), v.copy()
        key[:, hidden] *= np.float32(size)
        value[:, hidden] += np.float32(size)
        with kernel.setting():
            made.append(results(kernel, (q, key, value), spec, inputs)[0][:, 0])
    for got in made[1:]:
        np.testing.assert_array_equal(got, made[0])


# ---------------------------------------------------------------- the suite itself


@pytest.mark.parametrize("name", sorted({x.compute.__name__ for x in KERNELS}))
def test_no_kernel_escapes(name):
    """Each computes a plain request here, and its gradient."""
    kernel = next(x for x in KERNELS if x.compute.__name__ == name and x.manner != "XLA")
    with kernel.setting():
        qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
        _, gradients = results(kernel, qkv, *READING, 0, UPSTREAM)
    assert gradients
