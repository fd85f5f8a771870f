"""Grouped queries: fewer key heads than query heads, and none of these is repeated.

Query head h reads key head h // (H / Hk), in each kernel: `test_laws.py`.
"""

import numpy as np
import pytest
from contract import gradient, numpy
from hypothesis import given
from hypothesis import strategies as st
from largest import largest_made
from tiled_contract import (
    BACKEND,
    attend,
    close,
    operands,
    tiles,
    weighted,
)

import keras_headmask as hm
from keras_headmask.attention import head_groups


def repeated(qkv):
    """The same attention with a key head for each query head, one after the other."""
    query, *of_keys = qkv
    return query, *(np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in of_keys)


@given(st.sets(st.integers(0, 11), min_size=1), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_in_a_set_every_key_head_is_read_by_equally_many(heads, sharing):
    sets = head_groups.split_by_sharing(tuple(sorted(heads)), sharing)
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
