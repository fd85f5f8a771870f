"""Tiles in graphs: what the run shows, and nothing computed that need not be."""

import dataclasses
import math

import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from largest import largest_in_jax, largest_in_torch, shapes_in
from tiled_contract import (
    ALWAYS,
    BACKEND,
    FLAGS,
    LONG,
    UNSORTED_IDS,
    attend,
    close,
    operands,
    weighted,
)

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning, tuned
from keras_headmask.rules import evaluation

BLOCKS_OF_3 = Tuning(tensorflow_block=3, one_flagged_in=4)

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


def planned(spec, inputs):
    """The runs of each example's tiles of 4 queries, and its flagged queries and keys."""
    from keras_headmask.attention.tensorflow import plan

    bound = evaluation.bind(spec, inputs, 23, 23, 0, batch=3)
    tuning = dataclasses.replace(BLOCKS_OF_3, local_tile=4, wide_tile=4)
    made = plan.planned(Part(spec, tuple(range(4)), bound, 1.0, tuning))
    example, *edges = np.moveaxis(numpy(made.runs)[:, 0, 0], 1, 0)
    runs = np.stack(edges, -1)
    places, wanted = (numpy(x)[:, 0, :, 0] for x in (made.queries, made.counts))
    rows = [
        np.sort(places[18:][example[18:] == i][wanted[18:][example[18:] == i]]) for i in range(3)
    ]
    assert (np.sort(example[:18].reshape(6, 3)) == range(3)).all()
    others = None if made.flagged is None else [x[x >= 0] for x in numpy(made.flagged)[:, 0]]
    return runs[:18].reshape(6, 3, -1).transpose(1, 0, 2), rows, others


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", [n for n in LONG if "whole mask" not in n and "order" not in n])
def test_ranges_hold_all_that_is_allowed_and_little_else(name):
    """Of packed documents and the like: from the first allowed block to the last, gap cut out."""
    spec, inputs = LONG[name]
    mask = np.broadcast_to(
        numpy(hm.make_mask(spec, 23, 23, num_heads=4, mask_inputs=inputs or None)), (3, 4, 23, 23)
    ).any(1)
    runs, of_queries, of_keys = planned(spec, inputs)
    # What is flagged is looked at by itself, apart from all tiles.
    mask = mask.copy()
    for example in range(3):
        mask[example, of_queries[example]] = False
        if of_keys is not None:
            mask[example][:, of_keys[example]] = False
    exact = {"window", "causal", "documents", "padded queries", "padding", "full",
             "nothing", "streaming", "dilated"}  # fmt: skip
    for example, number in np.ndindex(runs.shape[:2]):
        rows = mask[example, number * 4 : number * 4 + 4].any(0)
        allowed = np.zeros(24, bool)  # whole blocks
        allowed[:23] = rows
        blocks = allowed.reshape(-1, 3).any(1)
        seen = np.zeros(23, bool)
        for start, stop in runs[example, number].reshape(-1, 2):
            assert 0 <= start <= stop <= 23
            assert not seen[start:stop].any(), "no key twice"
            seen[start:stop] = True
        assert seen[rows].all()
        if name in exact and not blocks.any():
            assert not seen.any()
        if name in {"window", "causal", "documents", "padding", "full"} and blocks.any():
            first, last = np.flatnonzero(blocks)[[0, -1]]
            hull = np.zeros(24, bool)
            hull[first * 3 : last * 3 + 3] = True
            if name != "padding":  # window and flag meet in a tile, though in no pair of it
                np.testing.assert_array_equal(seen, hull[:23])
        if name == "streaming":
            np.testing.assert_array_equal(seen, np.repeat(blocks, 3)[:23])


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("spec", "queries", "keys"),
    [
        (hm.recipes.longformer(2, "f"), True, True),
        (hm.Window(2, 2) | hm.KeyFlag("f"), False, True),
        ((hm.Window(2, 2) | hm.QueryFlag("f")) & hm.KeyFlag("f"), True, False),
        (hm.Window(2, 2) & hm.KeyFlag("f"), False, False),  # padding: ranges are cut instead
        (hm.Window(2, 2) & ~hm.KeyFlag("f"), False, False),
        (hm.Window(2, 2) | ~hm.KeyFlag("f"), False, False),  # what is not flagged is not few
    ],
    ids=repr,
)
def test_only_flags_that_open_rows_or_columns_are_taken_out(spec, queries, keys):
    _, of_queries, of_keys = planned(spec, {"f": FLAGS})
    assert (of_keys is not None) == keys
    for example, wanted in enumerate(FLAGS):
        flagged = np.flatnonzero(wanted)
        np.testing.assert_array_equal(of_queries[example], flagged if queries else [])
        if keys:
            np.testing.assert_array_equal(of_keys[example], flagged)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.every_day("graph")
def test_nothing_of_size_queries_x_keys_is_in_the_graph(jit_compile):
    import tensorflow as tf

    length, heads = 2048, 2
    spec = hm.PerHead({0: hm.Window(64, 64)}, hm.recipes.streaming(4, 64))
    q = tf.TensorSpec((1, length, heads, 8))

    def step(q, k, v, tiled):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            result = attend((q, k, v), spec, tiled=tiled)
            loss = tf.reduce_sum(result)
        return tape.gradient(loss, [q, k, v])

    largest = {}
    for tiled in (True, False):
        traced = tf.function(step, jit_compile=jit_compile).get_concrete_function(q, q, q, tiled)
        found = [shape for _, shape in shapes_in(traced.graph)]
        largest[tiled] = max(math.prod(size or 1 for size in shape) for shape in found)
        inside = [name for name, _ in shapes_in(traced.graph) if "BatchMatMul" in name]
        assert inside, "the walk looks into loops"
    assert largest[False] >= length * length
    assert largest[True] < length * length / 4


@pytest.mark.skipif(BACKEND == "tensorflow", reason="its graphs are looked through elsewhere")
def test_nothing_of_size_queries_x_keys_is_made_off_tensorflow():
    length = 1024
    qkv = operands(1, length, length, 2)
    spec = hm.PerHead({0: hm.Window(64, 64)}, hm.recipes.streaming(4, 64))

    def forward_and_gradient(tiled):
        def loss(*x):
            return weighted(hm.dot_product_attention(*x, mask_spec=spec, tiled=tiled))

        if BACKEND == "jax":
            import jax

            return largest_in_jax(jax.grad(loss, argnums=(0, 1, 2)), *qkv)
        return largest_in_torch(lambda *x: gradient(loss, *x), *qkv)

    assert forward_and_gradient(tiled=False) >= length * length
    assert forward_and_gradient(tiled=True) < length * length / 4


@pytest.mark.tensorflow
def test_layers_with_one_rule_share_their_loops():
    import tensorflow as tf

    rule = hm.PerHead({0: hm.SameSegment("ids")}, hm.Window(2, 2))
    operand, ids = tf.TensorSpec((None, None, 2, 4)), tf.TensorSpec((None, None), "int32")

    def gradients(x, ids, layers):
        first = x
        for _ in range(layers):
            x = hm.dot_product_attention(x, x, x, mask_spec=rule, mask_inputs={"ids": ids})
        return tf.gradients(x, first)

    def counts(layers):
        """The functions in the graph, and their loops."""
        call = tf.function(lambda *given: gradients(*given, layers), [operand, ids])
        library = call.get_concrete_function().graph.as_graph_def().library.function
        return len(library), sum(n.op.endswith("While") for f in library for n in f.node_def)

    (functions, loops), (more, same_loops) = counts(1), counts(3)
    assert loops == same_loops
    assert more - functions <= 2 * 6  # each layer has two branches, and those of gradients


# ---------------------------------------------------------------- what is not possible


def test_tiles_give_no_probabilities():
    qkv = operands(1, 5, 5, 2)
    with pytest.raises(
        ValueError, match="`tiled=True` is not possible here: returned probabilities and symbolic"
    ):
        attend(qkv, hm.Window(1, 1), return_scores=True)
    attend(qkv, hm.Window(1, 1), tiled=None, return_scores=True)


def test_unknown_lengths_off_tensorflow_graphs():
    offset = ops.convert_to_tensor(1)
    qkv = operands(1, 5, 5, 2)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        call = tf.function(lambda: attend(qkv, hm.Window(1, 1), None, offset), jit_compile=True)
    else:

        def call():
            attend(qkv, hm.Window(1, 1), None, offset)

    with pytest.raises(
        ValueError, match="`tiled=True` is not possible here: outside TensorFlow graphs"
    ):
        call()


@pytest.mark.tensorflow
@pytest.mark.parametrize("length", [6, 8])
def test_ids_of_another_length_are_refused_when_the_graph_runs(length):
    """Cut into tiles, ids that are too long would be read as if they fitted."""
    import tensorflow as tf

    qkv = operands(2, 7, 7, 3)
    signature = [tf.TensorSpec((2, None, *x.shape[2:])) for x in qkv]

    @tf.function(input_signature=[*signature, tf.TensorSpec((2, None), "int32")])
    def call(query, key, value, ids):
        spec, inputs = hm.SameSegment("ids"), {"ids": ids}
        return hm.dot_product_attention(query, key, value, mask_spec=spec, mask_inputs=inputs)

    with tuned(**ALWAYS):
        assert call(*qkv, np.zeros((2, 7), "int32")).shape == qkv[2].shape
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(*qkv, np.zeros((2, length), "int32"))
