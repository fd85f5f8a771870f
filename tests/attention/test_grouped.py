"""Grouped queries: fewer key heads than query heads, as if each were repeated, and none is.

Query head h reads key head h // (H / Hk). The oracle is attention of repeated keys.
"""

import numpy as np
import oracle
import pytest
from contract import gradient, numpy
from hypothesis import given
from hypothesis import strategies as st
from keras import ops
from largest import largest_made
from strategies import FEW, cases
from tiled_contract import (
    BACKEND,
    LONG,
    SCALE,
    TRACED,
    UNSORTED_IDS,
    attend,
    close,
    heads_alone,
    operands,
    seeds,
    sizes,
    tiles,
    weighted,
)

import keras_headmask as hm
from keras_headmask.attention import blocks, head_groups, unrolled
from keras_headmask.attention.choose import part_of_all
from keras_headmask.attention.request import Request
from keras_headmask.rules import evaluation

RULES = (hm.Window(1, 1), hm.Window(after=0), hm.Chunk(3) | hm.Keys(0, 1))
# Every implementation: tiles, tiles of a loop in Python, head by head, dense.
COMPUTED = ["by tiles", "in a Python loop", "head by head", "dense"]


def repeated(qkv):
    """The same attention with a key head for each query head, one after the other."""
    query, *of_keys = qkv
    return query, *(np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in of_keys)


def context(computed, qkv, spec, inputs=None, offset=0, **rest):
    """Attention by one implementation."""
    if computed == "dense":
        return attend(qkv, spec, inputs, offset, tiled=False, **rest)
    if computed == "by tiles":
        with tiles():
            return attend(qkv, spec, inputs, offset, **rest)
    if computed == "head by head":
        with heads_alone():
            return attend(qkv, spec, inputs, offset, **rest)
    query, key, value = qkv = [ops.convert_to_tensor(x) for x in qkv]
    queries, keys = query.shape[1], key.shape[1]
    bound = evaluation.bind(spec, inputs, queries, keys, offset)
    contexts, order = [], []
    with tiles():
        made = head_groups.by_rule(part_of_all(Request(*qkv, spec, bound, scale=SCALE)))
    for part in made:
        own = head_groups.key_heads(part.heads, query.shape[2] // key.shape[2])
        plan = blocks.plan_of(part, queries, keys, offset)
        of_part = (
            head_groups.of_heads(query, part.heads, 2),
            *(head_groups.of_heads(x, own, 2) for x in (key, value)),
        )
        contexts.append(unrolled.compute(part, plan, *of_part))
        order += part.heads
    return head_groups.in_order(ops.concatenate(contexts, axis=2), order, axis=2)


def check(computed, qkv, spec, inputs=None, offset=0, gradients=True):
    if computed == "head by head" and BACKEND != "tensorflow":
        pytest.skip("only TensorFlow computes head by head")
    query, key, _ = qkv
    sizes = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    mask = oracle.mask(spec, *sizes, inputs, offset)
    got = context(computed, qkv, spec, inputs, offset)
    close(got, oracle.attention(*repeated(qkv), mask, SCALE)[0], "the definition in loops")
    if not gradients:
        return

    def of_repeated(query, *of_keys):
        every = [ops.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in of_keys]
        return weighted(attend((query, *every), spec, inputs, offset, tiled=False))

    made = gradient(lambda *x: weighted(context(computed, x, spec, inputs, offset)), *qkv)
    for name, one, other in zip("qkv", made, gradient(of_repeated, *qkv), strict=True):
        close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("computed", COMPUTED)
@FEW
@given(cases(), st.sampled_from([1, 2]), seeds)
def test_any_rule_equals_repeated_keys(computed, case, key_heads, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    key_heads = key_heads if heads % key_heads == 0 else 1
    qkv = operands(batch, queries, keys, heads, seed, key_heads=key_heads)
    check(computed, qkv, spec, inputs, offset)


# Gaps, dead ends, flags on both axes, whole masks with axes of size 1, several rules.
CHOSEN = [
    "streaming",
    "two dead ends",
    "documents",
    "flags both ways",
    "flags and padding",
    "a whole mask",
    "one column of queries",
    "heads in any order",
]


@pytest.mark.parametrize("computed", COMPUTED[:3])
@pytest.mark.parametrize("name", CHOSEN)
def test_longer_sequences(computed, name):
    spec, inputs = LONG[name]
    check(computed, operands(3, 23, 23, 4, key_heads=2), spec, inputs)


@FEW
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.sampled_from([1, 2, 3]))
def test_any_distribution_of_rules_over_heads_that_share_keys(rule_of_head, key_heads):
    spec = hm.PerHead({head: RULES[rule] for head, rule in enumerate(rule_of_head)})
    qkv = operands(2, 9, 9, 6, key_heads=key_heads)
    for computed in ("by tiles", "in a Python loop"):
        check(computed, qkv, spec, gradients=False)


@given(st.sets(st.integers(0, 11), min_size=1), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_in_a_set_every_key_head_is_read_by_equally_many(heads, sharing):
    sets = head_groups.of_equal_sharing(tuple(sorted(heads)), sharing)
    assert sorted(head for members in sets for head in members) == sorted(heads)
    for members in sets:
        assert list(members) == sorted(members)
        keys = head_groups.key_heads(members, sharing)
        assert {head // sharing for head in members} == set(keys)
        each = len(members) // len(keys)
        assert members == tuple(h for key in keys for h in members if h // sharing == key)
        assert all(sum(h // sharing == key for h in members) == each for key in keys)
    if sharing == 1:
        assert sets == [tuple(sorted(heads))], "as without grouped queries"


@pytest.mark.parametrize("computed", COMPUTED)
def test_hidden_values_that_are_not_finite_do_no_harm(computed):
    query, key, value = operands(2, 13, 13, 4, key_heads=2)
    bad = key.copy(), value.copy()
    bad[0][:, 9, 0], bad[1][:, 10, 1] = np.inf, np.nan
    spec = hm.PerHead({0: hm.Window(1, 0)}, hm.Window(2, 2)) & hm.Keys(0, 9)
    if computed == "head by head" and BACKEND != "tensorflow":
        pytest.skip("only TensorFlow computes head by head")
    close(context(computed, (query, *bad), spec), context(computed, (query, key, value), spec))
    seen = numpy(context(computed, (query, *bad), hm.Window(1, 0)))
    assert np.isnan(seen[:, 9:11, :2]).all()
    assert np.isnan(seen[:, 10:12, 2:]).all()
    assert np.isfinite(seen[:, 9, 2:]).all()
    assert np.isfinite(seen[:, 11:, :2]).all()


def test_dropout_draws_for_query_heads():
    spec = hm.PerHead({1: hm.Window(8, 3), 3: hm.Full()}, hm.SameSegment("ids"))
    qkv = operands(3, 23, 23, 4, key_heads=2)
    more = {"dropout": 0.3, "seed": 3}
    inputs = {"ids": UNSORTED_IDS}

    def loss(*x):
        return weighted(attend(x, spec, inputs, **more))

    with tiles():
        close(attend(qkv, spec, inputs, **more), attend(repeated(qkv), spec, inputs, **more))
        made, of_repeated = gradient(loss, *qkv), gradient(loss, *repeated(qkv))
    summed = (x.reshape(*x.shape[:2], 2, 2, -1).sum(3) for x in of_repeated[1:])
    for name, one, other in zip("qkv", made, (of_repeated[0], *summed), strict=True):
        close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("bias", [False, True])
def test_probabilities_are_of_query_heads(bias):
    qkv = operands(2, 5, 7, 4, key_heads=2)
    more = {"bias": operands(2, 5, 7, 4)[0][..., :1].transpose(0, 2, 1, 3)} if bias else {}
    more |= {
        "mask_spec": hm.PerHead({2: hm.Window(1, 1)}),
        "query_offset": 0,
        "return_scores": True,
    }
    made = [hm.dot_product_attention(*x, **more) for x in (qkv, repeated(qkv))]
    for one, other in zip(*made, strict=True):
        close(one, other)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_nothing_changes_to_the_bit_where_keys_are_not_shared_by_a_rule(key_heads):
    """With a rule for each head, a key head has one reader in each part."""
    spec = hm.PerHead({h: hm.Window(h, 1) for h in range(4)})
    qkv = operands(2, 13, 13, 4, key_heads=key_heads)
    with tiles():
        made, of_repeated = attend(qkv, spec), attend(repeated(qkv), spec)
    np.testing.assert_array_equal(numpy(made), numpy(of_repeated))


# ---------------------------------------------------------------- in graphs


@pytest.mark.tensorflow
@pytest.mark.long
@TRACED
@given(cases(), sizes, seeds, st.sampled_from(["known", "unknown", "xla"]))
def test_traced(case, tile_sizes, seed, lengths):
    """Output and gradients, by tiles and, out of XLA, head by head."""
    import tensorflow as tf

    spec, inputs, batch, heads, queries, keys, offset = case
    made = operands(batch, queries, keys, heads, seed, key_heads=heads // 2 if heads == 4 else 1)
    qkv = [tf.constant(x) for x in made]

    def both(*qkv, tiled=True):
        with tf.GradientTape() as tape:
            tape.watch(qkv)
            result = attend(qkv, spec, inputs, offset, tiled=tiled)
            weights = tf.cos(tf.range(tf.size(result), dtype="float32"))
            loss = tf.reduce_sum(result * tf.reshape(weights, tf.shape(result)))
        return result, *tape.gradient(loss, qkv)

    shapes = [[None, None, *x.shape[2:]] if lengths == "unknown" else x.shape for x in qkv]
    for short in (0, 10**6):
        call = tf.function(lambda *x: both(*x), jit_compile=lengths == "xla")
        with tiles(*tile_sizes, short=short):
            got = call.get_concrete_function(*map(tf.TensorSpec, shapes))(*qkv)
        for one, other in zip(got, both(*qkv, tiled=False), strict=True):
            close(one, other)


@pytest.mark.parametrize("of_one_rule", [True, False])
def test_keys_are_repeated_nowhere(of_one_rule):
    """Nothing is larger than keys of the whole length in a few heads, in both passes."""
    heads, length = 8, 2048
    query, key, value = operands(1, 16, length, heads, size=8, value_size=8, key_heads=1)
    of_heads = hm.PerHead({(0, 2, 5): hm.Window(9, 2)}, default=hm.Window(4, 0))
    spec = hm.Window(2, 2) if of_one_rule else of_heads

    def forward_and_gradients(*qkv):
        def loss(*x):
            more = {"mask_spec": spec, "tiled": True, "query_offset": 7}
            return weighted(hm.dot_product_attention(*x, **more))

        if BACKEND == "jax":
            import jax

            return jax.grad(loss, argnums=(0, 1, 2))(*qkv)
        if BACKEND == "torch":
            return gradient(loss, *qkv)
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(qkv)
            result = loss(*qkv)
        return tape.gradient(result, qkv)

    with tiles(64, 64, 32):
        assert largest_made(forward_and_gradients, query, key, value) < 2 * key.size
        every = largest_made(forward_and_gradients, *repeated((query, key, value)))
        assert every >= heads * key.size
