"""Tiles in graphs: what the run shows, and nothing computed that need not be."""

import numpy as np
import pytest
from contract import gradient
from largest import largest_made
from tiled_contract import (
    BACKEND,
    UNSORTED_IDS,
    attend,
    close,
    operands,
    tiles,
    weighted,
)

import keras_headmask as hm

# ---------------------------------------------------------------- traced

IDS = UNSORTED_IDS[:, :11]
# The shape of a whole mask when the graph runs: it is traced as unknown, but for heads.
OR_IDS = [(3, 1, 1, 11), (1, 1, 11, 1), (1, 4, 1, 1), (1, 4, 11, 11)]
# Documents of one example at a time, and of it a mask for all queries, or for all keys.
AND_IDS = [(3, 1, 1, 11), (3, 4, 11, 1)]


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("joined", "shape"), [*(("or", x) for x in OR_IDS), *(("and", x) for x in AND_IDS)]
)
@pytest.mark.every_day("tiles-(or-shape[02]|and)|logits-or-shape[13]")
def test_axes_of_a_whole_mask_that_turn_out_to_be_1(tiny, joined, shape):
    """They are broadcast, as dense attention does, and not cut."""
    import tensorflow as tf

    mask, documents = hm.MaskInput("m"), hm.SameSegment("ids")
    rule = mask & documents if joined == "and" else mask | documents
    ids = np.sort(IDS) if joined == "and" else IDS
    inputs = {"m": np.random.default_rng(1).random(shape) < 0.6, "ids": ids}
    qkv = operands(3, 11, 11, 4)
    of_inputs = {
        "m": tf.TensorSpec([None, shape[1], None, None], tf.bool),
        "ids": tf.TensorSpec([None, None], tf.int32),
    }
    of_qkv = [tf.TensorSpec([None, None, *x.shape[2:]]) for x in qkv]

    @tf.function(input_signature=[of_qkv, of_inputs])
    def call(qkv, inputs):
        return attend(qkv, rule, inputs)

    close(call(list(qkv), inputs), attend(qkv, rule, inputs, tiled=False))


@pytest.mark.tensorflow
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (1, 1, 9, 9), (2, 1, 1, 9), (2, 4, 9, 9)])
@pytest.mark.every_day("True|tiles")
def test_heads_of_a_mask_that_turn_out_to_be_1(tiny, shape, tiled):
    import tensorflow as tf

    qkv = operands(2, 9, 9, 4)
    mask = np.random.default_rng(0).random(shape) < 0.6

    @tf.function(input_signature=[tf.TensorSpec([None] * 4, tf.bool)])
    def run(mask):
        return attend(qkv, hm.Window(3, 3), mask=mask, tiled=tiled)

    close(run(mask), attend(qkv, hm.Window(3, 3), mask=mask, tiled=False))


@pytest.mark.tensorflow
def test_flags_of_keys_alone_under_an_offset_at_unknown_lengths(tiny):
    """One tensor for both sides, of which a rule on keys reads no queries."""
    import tensorflow as tf

    query, key, value = operands(2, 5, 13, 3)
    flags = np.random.default_rng(1).integers(0, 2, (2, 13)).astype(bool)
    spec = hm.KeyFlag("f") & hm.Window(4, 0)
    unknown = [tf.TensorSpec([None, None, 3, x.shape[3]]) for x in (query, key, value)]
    signature = [*unknown, tf.TensorSpec([None, None], "bool")]

    @tf.function(input_signature=signature)
    def call(query, key, value, flags):
        return attend((query, key, value), spec, {"f": flags}, 6)

    wanted = attend((query, key, value), spec, {"f": flags}, 6, tiled=False)
    close(call(query, key, value, flags), wanted)


# ---------------------------------------------------------------- only what may be allowed


def largest_of_both_passes(qkv, **arguments):
    """The size of the largest tensor that attention and its gradient make."""

    def loss(*x):
        return weighted(hm.dot_product_attention(*x, **arguments))

    def gradients(*x):
        if BACKEND == "jax":
            import jax

            return jax.grad(loss, argnums=(0, 1, 2))(*x)
        if BACKEND == "torch":
            return gradient(loss, *x)
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            result = loss(*x)
        return tape.gradient(result, x)

    return largest_made(gradients, *qkv)


def test_nothing_of_size_queries_x_keys_is_made():
    length = 1024
    qkv = operands(1, length, length, 2)
    spec = hm.PerHead({0: hm.Window(64, 64)}, hm.recipes.streaming(4, 64))
    tiled, dense = (largest_of_both_passes(qkv, mask_spec=spec, tiled=x) for x in (True, False))
    assert 4 * tiled < length * length <= dense


@pytest.mark.parametrize("of_one_rule", [True, False])
def test_keys_are_repeated_nowhere(of_one_rule):
    """Nothing is larger than keys of the whole length in a few heads, in both passes."""
    heads, length = 8, 2048
    query, key, value = operands(1, 16, length, heads, size=8, value_size=8, key_heads=1)
    of_heads = hm.PerHead({(0, 2, 5): hm.Window(9, 2)}, default=hm.Window(4, 0))
    spec = hm.Window(2, 2) if of_one_rule else of_heads

    given = {"mask_spec": spec, "tiled": True, "query_offset": 7}
    repeated = query, *(np.repeat(x, heads, axis=2) for x in (key, value))
    with tiles(64, 64, 32):
        assert largest_of_both_passes((query, key, value), **given) < 2 * key.size
        assert largest_of_both_passes(repeated, **given) >= heads * key.size
