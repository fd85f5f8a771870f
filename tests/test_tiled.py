"""The tiled way equals the definition: any rule, any lengths, any backend, forward and gradient."""

import contextlib
import dataclasses
import math

import keras
import numpy as np
import oracle
import pytest
from contract import gradient, numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops
from strategies import FEW, MANY, cases

import keras_headmask as hm
from keras_headmask import evaluation, tiled_python, tiling
from keras_headmask.attention import dense_attention

BACKEND = keras.backend.backend()
SCALE = 0.7
TRACED = settings(FEW, max_examples=6)  # each example is traced and compiled anew
# (local tile, wide tile, block): all lengths below are ragged in some of them.
SIZES = ((4, 6, 2), (4, 6, 3), (2, 3, 2), (1, 5, 1))
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 1000)


@contextlib.contextmanager
def tiles(local=4, wide=6, block=3):
    """Tiny tiles, so that short sequences have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_LOCAL_TILE", local)
        patch.setattr(tiling, "_WIDE_TILE", wide)
        patch.setattr(tiled_python, "_BLOCK", block)
        if BACKEND == "tensorflow":
            from keras_headmask import tiled_tensorflow

            patch.setattr(tiled_tensorflow, "_BLOCK", block)
        yield


@pytest.fixture
def tiny():
    with tiles():
        yield


def operands(batch, queries, keys, heads, seed=0, size=3, value_size=2):
    rng = np.random.default_rng(seed)

    def normal(length, last):
        return rng.normal(size=(batch, length, heads, last)).astype("float32")

    return normal(queries, size), normal(keys, size), normal(keys, value_size)


def attend(qkv, spec, inputs=None, offset=0, tiled=True, **rest):
    return hm.dot_product_attention(
        *qkv,
        mask_spec=spec,
        mask_inputs=inputs or None,
        scale=SCALE,
        query_offset=offset,
        tiled=tiled,
        **rest,
    )


def weighted(result):
    """A scalar that every entry of `result` has a say in, in its own way."""
    count = math.prod(result.shape)
    weights = np.cos(np.arange(count, dtype="float32")).reshape(tuple(result.shape))
    return ops.sum(ops.cast(result, "float32") * ops.convert_to_tensor(weights))


def both_gradients(qkv, *rest):
    ways = [
        gradient(lambda *x, tiled=tiled: weighted(attend(x, *rest, tiled=tiled)), *qkv)
        for tiled in (True, False)
    ]
    return zip("qkv", *ways, strict=True)


def close(got, wanted, message=""):
    got = got if isinstance(got, np.ndarray) else numpy(got)
    wanted = wanted if isinstance(wanted, np.ndarray) else numpy(wanted)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=message)


# ---------------------------------------------------------------- the law


def check_forward(case, tile_sizes, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    with tiles(*tile_sizes):
        got = numpy(attend(qkv, spec, inputs, offset))
    close(got, oracle.attention(*qkv, mask, SCALE)[0], "the definition in loops")
    close(got, attend(qkv, spec, inputs, offset, tiled=False), "the dense way")
    assert (got.transpose(0, 2, 1, 3)[~mask.any(-1)] == 0).all(), "dead rows are exactly 0"


@MANY
@given(cases(), sizes, seeds)
def test_any_rule_equals_the_definition(case, tile_sizes, seed):
    check_forward(case, tile_sizes, seed)


@FEW
@given(cases(), sizes, seeds)
def test_any_rule_has_the_gradients_of_the_dense_way(case, tile_sizes, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    dead = ~oracle.mask(spec, batch, heads, queries, keys, inputs, offset).any(-1)
    with tiles(*tile_sizes):
        for name, got, wanted in both_gradients(qkv, spec, inputs, offset):
            close(got, wanted, f"gradient of {name}")
            if name == "q":
                assert (got.transpose(0, 2, 1, 3)[dead] == 0).all()


@FEW
@given(cases(), seeds)
def test_the_python_loop_equals_the_dense_way_on_every_backend(case, seed):
    """Called by itself, since TensorFlow has a loop of its own."""
    spec, inputs, batch, heads, queries, keys, offset = case
    rule = spec.for_head(1)
    qkv = operands(batch, queries, keys, heads, seed)
    heads_of_rule = tuple(range(heads))
    inputs = {name: inputs[name] for name in rule.inputs}
    bound = evaluation.bind(rule, inputs, queries, keys, offset)
    mask = evaluation.mask_of_all_heads(rule, bound, heads)
    with tiles(block=2):
        plan = tiled_python.plan(rule, queries, keys, 4, offset)
    q, k, v = (ops.transpose(ops.convert_to_tensor(x), (0, 2, 1, 3)) for x in qkv)
    got = tiled_python.attend(rule, heads_of_rule, bound, plan, q * SCALE, k, v)
    wanted, _ = dense_attention(*map(ops.convert_to_tensor, qkv), mask, SCALE)
    close(ops.transpose(got, (0, 2, 1, 3)), wanted)
    assert 0 <= plan.share(keys) <= 1


# Longer than the random ones: several tiles and blocks, ragged ones, gaps between runs.
_rng = np.random.default_rng(3)
SORTED_IDS = np.sort(_rng.integers(0, 5, (3, 23))).astype("int32")
UNSORTED_IDS = _rng.integers(-1, 4, (3, 23)).astype("int32")
PADDING = np.arange(23)[None] < np.array([23, 9, 1])[:, None]  # another length in each example
FLAGS = np.isin(np.arange(23), [0, 11, 12])[None] & np.array([[1], [0], [1]], bool)
LONG = {
    "window": (hm.Window(3, 2), {}),
    "window ahead": (hm.Window(-2, 7), {}),
    "causal": (hm.recipes.causal(), {}),
    "dilated": (hm.Window(8, 8, step=4), {}),
    "streaming": (hm.recipes.streaming(sinks=2, window=4), {}),
    "bigbird": (hm.recipes.bigbird(block=2, density=0.2, global_blocks=1, seed=2), {}),
    "not a window": (~hm.Window(4, 4), {}),
    "far keys": (hm.Keys(0, 2) | hm.Keys(10, 12) | hm.Keys(20), {}),
    "two dead ends": (hm.Queries(5, 17) & hm.Window(2, 2), {}),
    "full": (hm.Full(), {}),
    "nothing": (hm.Nothing(), {}),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": SORTED_IDS}),
    "unsorted": (hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "not unsorted": (~hm.SameSegment("ids"), {"ids": UNSORTED_IDS}),
    "sentences": (hm.SameSentence(1, "ids"), {"ids": UNSORTED_IDS}),
    "padding": (hm.KeyFlag("pad") & hm.Window(4, 4), {"pad": PADDING}),
    "padded queries": (hm.KeyFlag("pad") & hm.QueryFlag("pad"), {"pad": PADDING}),
    "longformer": (hm.recipes.longformer(2, "is_global"), {"is_global": FLAGS}),
    "one example's ids": (hm.SameSegment("ids") | hm.Keys(0, 1), {"ids": UNSORTED_IDS[:1]}),
    "ids of one, padding of all": (
        hm.SameSegment("ids") & hm.KeyFlag("pad"),
        {"ids": SORTED_IDS[:1], "pad": PADDING},
    ),
    "a whole mask": (hm.MaskInput("m"), {"m": _rng.random((3, 4, 23, 23)) < 0.3}),
    "a whole mask of one example": (hm.MaskInput("m"), {"m": _rng.random((1, 4, 23, 23)) < 0.3}),
    "one row of keys": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _rng.random((3, 1, 1, 23)) < 0.7, "ids": SORTED_IDS},
    ),
    "one column of queries": (
        hm.MaskInput("m") & hm.SameSegment("ids"),
        {"m": _rng.random((3, 4, 23, 1)) < 0.5, "ids": SORTED_IDS},
    ),
    "heads in any order": (
        hm.PerHead({0: hm.Window(1, 1), 1: hm.MaskInput("m"), 2: hm.Window(1, 1), 3: hm.Chunk(5)}),
        {"m": _rng.random((1, 4, 23, 23)) < 0.3},
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_longer_sequences_forward_and_gradient(name):
    spec, inputs = LONG[name]
    qkv = operands(3, 23, 23, 4)
    mask = np.broadcast_to(
        numpy(hm.make_mask(spec, 23, 23, num_heads=4, mask_inputs=inputs or None)), (3, 4, 23, 23)
    )
    for tile_sizes in SIZES[1:2]:
        with tiles(*tile_sizes):
            got = numpy(attend(qkv, spec, inputs))
            close(got, oracle.attention(*qkv, mask, SCALE)[0], name)
            dead = ~mask.any(-1)
            assert (got.transpose(0, 2, 1, 3)[dead] == 0).all()
            for which, grad, wanted in both_gradients(qkv, spec, inputs):
                close(grad, wanted, f"{name}: gradient of {which}")


@FEW
@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 1))
def test_any_permutation_of_heads_between_rules(rule_of_head, last):
    rules = (hm.Window(1, 1), hm.Window(after=0), hm.Chunk(3) | hm.Keys(0, 1))
    spec = hm.PerHead({head: rules[rule] for head, rule in enumerate(rule_of_head)}, rules[last])
    check_forward((spec, {}, 2, 5, 7, 7, 0), SIZES[0], 1)


@pytest.mark.parametrize("queries", [1, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("keys", [1, 6, 7, 13])
def test_any_length(queries, keys):
    spec = hm.PerHead({0: hm.Window(2, 1), 1: ~hm.Window(2, 1)}, hm.recipes.streaming(1, 2))
    for offset in (0, 5, -3):
        check_forward((spec, {}, 1, 3, queries, keys, offset), SIZES[0], 0)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (0, 0)])
def test_no_query(queries, keys):
    for spec in (hm.Window(1, 1), hm.Full()):
        got = attend(operands(2, queries, keys, 2), spec)
        assert tuple(got.shape) == (2, queries, 2, 2)


def test_no_example_and_no_key():
    for spec in (hm.Window(1, 1), hm.Full()):
        assert tuple(attend(operands(0, 5, 5, 2), spec).shape) == (0, 5, 2, 2)
        qkv = operands(2, 5, 0, 2)
        close(attend(qkv, spec), attend(qkv, spec, tiled=False))


# ---------------------------------------------------------------- hidden is hidden


@pytest.mark.parametrize("size", [1.0, 1e4, 1e12, 1e30])
def test_hidden_keys_do_not_influence_the_output(tiny, size):
    """To the bit, whatever they hold."""
    hidden = [2, 7, 8, 11]
    spec = hm.PerHead({0: hm.Window(2, 2)}, hm.Window(after=0)) & ~hm.KeyIn("ids", -5)
    ids = np.zeros((2, 13), "int32")
    ids[:, hidden] = -5
    q, k, v = operands(2, 13, 13, 3)
    other_k, other_v = k.copy(), v.copy()
    other_k[:, hidden] = np.random.default_rng(9).normal(size=(2, 4, 3, 3)) * size
    other_v[:, hidden] = size
    got, other = (numpy(attend(x, spec, {"ids": ids})) for x in ((q, k, v), (q, other_k, other_v)))
    np.testing.assert_array_equal(got, other)
    for name, grad, wanted in both_gradients((q, other_k, other_v), spec, {"ids": ids}):
        close(grad, wanted, f"gradient of {name}")
        if name != "q":
            assert (grad[:, hidden] == 0).all()


def test_dead_rows_are_0_with_finite_gradients_of_0(tiny):
    spec = hm.PerHead({0: hm.Nothing(), 1: hm.Window(-9, 12)}, hm.Queries(4, 6))
    qkv = operands(2, 13, 13, 3)
    got = numpy(attend(qkv, spec))
    assert (got[:, :, 0] == 0).all()
    assert (got[:, 4:, 1] == 0).all()
    assert (np.delete(got, [4, 5], axis=1)[:, :, 2] == 0).all()
    assert (got[:, 4:6, 2] != 0).all()
    for name, grad, wanted in both_gradients(qkv, spec):
        close(grad, wanted, name)
        assert np.isfinite(grad).all()
        assert (grad[:, :, 0] == 0).all()


def test_a_rule_that_allows_nothing_has_gradients_of_0(tiny):
    for _, grad, _ in both_gradients(operands(1, 5, 5, 2), hm.Nothing()):
        assert (grad == 0).all()


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_large_scores(tiny, size):
    q, k, v = operands(1, 13, 13, 2)
    spec = hm.recipes.streaming(1, 3)
    close(attend((q * size, k, v), spec), attend((q * size, k, v), spec, tiled=False))
    for name, grad, wanted in both_gradients((q * size, k, v), spec):
        # The largest scores round to 1e-7 of themselves, which is what the gradients then carry.
        np.testing.assert_allclose(grad, wanted, rtol=1e-3, atol=2e-5 * size, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_are_the_values(tiny, dtype):
    if dtype == "float64" and BACKEND == "jax":
        pytest.skip("JAX holds 32 bits")
    qkv = [ops.cast(x, dtype) for x in operands(2, 9, 9, 3)]
    spec = hm.Window(2, 1) | hm.Keys(0, 1)
    got, wanted = attend(qkv, spec), attend(qkv, spec, tiled=False)
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(numpy(got), numpy(wanted), atol=tolerance)


def test_an_explicit_mask_is_cut_too(tiny):
    rng = np.random.default_rng(0)
    qkv = operands(2, 9, 11, 3)
    spec = hm.PerHead({1: hm.Window(2, 2)}, hm.Keys(1))
    for shape in ((9, 11), (2, 9, 11), (2, 3, 9, 11), (1, 3, 9, 11), (2, 1, 1, 11), (2, 3, 9, 1)):
        mask = rng.random(shape) < 0.6
        for rule in (spec, None):
            got = attend(qkv, rule, mask=mask)
            close(got, attend(qkv, rule, mask=mask, tiled=False), str(shape))


# ---------------------------------------------------------------- traced


@TRACED
@given(cases(), sizes, seeds)
def test_jitted(case, tile_sizes, seed):
    """XLA: TensorFlow's and JAX's; shapes are known."""
    if BACKEND == "torch":
        pytest.skip("torch is eager here")
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)

    def call(qkv, inputs):
        return attend(qkv, spec, inputs, offset)

    if BACKEND == "jax":
        import jax

        call = jax.jit(call)
    else:
        import tensorflow as tf

        call = tf.function(call, jit_compile=True)
    with tiles(*tile_sizes):
        got = call(tuple(map(ops.convert_to_tensor, qkv)), inputs)
    close(got, oracle.attention(*qkv, mask, SCALE)[0])


@pytest.mark.tensorflow
@TRACED
@given(cases(), sizes, seeds, st.sampled_from(["known", "unknown"]))
def test_tf_function(case, tile_sizes, seed, lengths):
    """Output and gradients, with lengths and batch sizes known and not; a tensor as offset."""
    import tensorflow as tf

    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = [tf.constant(x) for x in operands(batch, queries, keys, heads, seed)]

    def both(qkv, inputs, offset, tiled=True):
        with tf.GradientTape() as tape:
            tape.watch(qkv)
            result = attend(qkv, spec, inputs, offset, tiled=tiled)
            weights = tf.cos(tf.range(tf.size(result), dtype="float32"))
            loss = tf.reduce_sum(result * tf.reshape(weights, tf.shape(result)))
        return result, tape.gradient(loss, qkv)

    with tiles(*tile_sizes):
        if lengths == "known":
            got = tf.function(lambda q, i: both(q, i, offset))(qkv, inputs)
        else:
            got = traced_unknown(both)(qkv, inputs, offset)
    wanted = both(qkv, inputs, offset, tiled=False)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(wanted), strict=True):
        close(a, b)


def unknown(tensor, keep=()):
    import tensorflow as tf

    shape = [size if axis in keep else None for axis, size in enumerate(tensor.shape)]
    return tf.TensorSpec(shape, tensor.dtype)


def traced_unknown(function):
    """`function(qkv, inputs, offset)` traced with no batch size, no length and any offset."""
    import tensorflow as tf

    def call(qkv, inputs, offset):
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        # A whole mask has a head axis that is known; its size-1 axes are kept, or seen as lengths.
        signature = (
            tf.nest.map_structure(lambda x: unknown(x, keep=(2, 3)), list(qkv)),
            tf.nest.map_structure(
                lambda x: unknown(x, keep=() if len(x.shape) < 4 else (1, *_ones(x))), inputs
            ),
            tf.TensorSpec([], "int32"),
        )
        traced = tf.function(lambda *x: function(*x)).get_concrete_function(*signature)
        return traced(list(qkv), inputs, tf.constant(offset))

    return call


def _ones(tensor):
    return [axis for axis in (2, 3) if tensor.shape[axis] == 1]


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["documents", "streaming", "one example's ids", "padding"])
def test_one_trace_serves_all_lengths_and_batches(tiny, name):
    import tensorflow as tf

    spec, inputs = LONG[name]

    @tf.function(reduce_retracing=True)
    def call(q, k, v, inputs):
        return attend((q, k, v), spec, inputs)

    qkv = [tf.TensorSpec([None, None, 4, size]) for size in (3, 3, 2)]
    of_inputs = {key: tf.TensorSpec([None, None], x.dtype) for key, x in inputs.items()}
    traced = call.get_concrete_function(*qkv, of_inputs)
    for batch, length in ((3, 23), (1, 8), (2, 1), (3, 12)):
        arrays = [tf.constant(x) for x in operands(batch, length, length, 4)]
        cut = {key: tf.constant(x[:batch, :length]) for key, x in inputs.items()}
        close(traced(*arrays, cut), attend(arrays, spec, cut, tiled=False), f"{batch}, {length}")


@pytest.mark.tensorflow
@pytest.mark.parametrize("shape", [(3, 1, 1, 11), (1, 1, 11, 1), (1, 4, 1, 1), (1, 4, 11, 11)])
def test_axes_of_a_whole_mask_that_turn_out_to_be_1(tiny, shape):
    """Traced as unknown: broadcast where they are 1, as the dense way does."""
    import tensorflow as tf

    spec = hm.MaskInput("m") | hm.SameSegment("ids")
    inputs = {
        "m": tf.constant(np.random.default_rng(1).random(shape) < 0.5),
        "ids": tf.constant(UNSORTED_IDS[:, :11]),
    }
    qkv = [tf.constant(x) for x in operands(3, 11, 11, 4)]

    @tf.function
    def call(qkv, inputs):
        return attend(qkv, spec, inputs)

    signature = {
        "m": tf.TensorSpec([None, shape[1], None, None], tf.bool),
        "ids": tf.TensorSpec([None, None], tf.int32),
    }
    traced = call.get_concrete_function([unknown(x, keep=(2, 3)) for x in qkv], signature)
    close(traced(qkv, inputs), attend(qkv, spec, inputs, tiled=False))


@pytest.mark.tensorflow
def test_a_tensor_as_offset(tiny):
    import tensorflow as tf

    qkv = operands(2, 5, 13, 3)
    spec = hm.PerHead({0: hm.Window(3, 0)}, hm.SameSegment("ids"))
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 13)).astype("int32"))
    call = tf.function(lambda offset: attend(qkv, spec, {"ids": ids}, offset))
    for offset in (0, 3, 8):
        close(
            call(tf.constant(offset)),
            attend(qkv, spec, {"ids": (ids[:, offset : offset + 5], ids)}, offset, tiled=False),
        )


# ---------------------------------------------------------------- only what may be allowed


@pytest.mark.tensorflow
@FEW
@given(st.integers(1, 13), st.integers(1, 6), st.integers(0, 1000), st.booleans())
def test_spans_are_the_least_and_greatest_of_each_block(length, size, seed, flags):
    import tensorflow as tf

    from keras_headmask.tiled_tensorflow import _span

    values = np.random.default_rng(seed).integers(*((0, 2) if flags else (-5, 6)), (2, length))
    values = values.astype("bool" if flags else "int32")
    low, high = _span(tf.constant(values), size, 1)
    blocks = [values[:, i : i + size].astype("int32") for i in range(0, length, size)]
    np.testing.assert_array_equal(numpy(low)[:, 0], np.stack([b.min(1) for b in blocks], 1))
    np.testing.assert_array_equal(numpy(high)[:, 0], np.stack([b.max(1) for b in blocks], 1))


@pytest.mark.tensorflow
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", [n for n in LONG if "whole mask" not in n and "order" not in n])
def test_ranges_hold_all_that_is_allowed_and_little_else(name, by_key):
    """Of packed documents and the like: from the first allowed block to the last, gap cut out."""
    from keras_headmask import tiled_tensorflow

    spec, inputs = LONG[name]
    mask = np.broadcast_to(
        numpy(hm.make_mask(spec, 23, 23, num_heads=4, mask_inputs=inputs or None)), (3, 4, 23, 23)
    ).any(1)
    mask = mask.transpose(0, 2, 1) if by_key else mask
    with tiles(4, 4, 3):
        bound = evaluation.bind(spec, inputs, 23, 23, 0)
        part = tiled_tensorflow.Part(spec, (0, 1, 2, 3), bound, 4)
        ranges = numpy(tiled_tensorflow._ranges(part, 23, 23, by_key))
    ranges = np.broadcast_to(ranges, (3, *ranges.shape[1:]))
    exact = {"window", "causal", "documents", "padded queries", "longformer", "padding", "full",
             "nothing", "streaming", "dilated"}  # fmt: skip
    for example, number in np.ndindex(ranges.shape[:2]):
        rows = mask[example, number * 4 : number * 4 + 4].any(0)
        allowed = np.zeros(24, bool)  # whole blocks
        allowed[:23] = rows
        blocks = allowed.reshape(-1, 3).any(1)
        seen = np.zeros(23, bool)
        for start, stop in ranges[example, number].reshape(-1, 2):
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
        if name == "streaming" and not by_key:
            np.testing.assert_array_equal(seen, np.repeat(blocks, 3)[:23])


def shapes_in(graph, seen=None):
    """The static shape of every tensor in a graph and in the functions that it calls."""
    from tensorflow.python.framework import func_graph

    seen = set() if seen is None else seen
    if id(graph) in seen:
        return
    seen.add(id(graph))
    for op in graph.get_operations():
        for out in op.outputs:
            if out.shape.rank is not None:
                yield op.type, out.shape.as_list()
        for attribute in op.node_def.attr.values():
            if attribute.HasField("func"):
                inner = graph._get_function(attribute.func.name)
                if inner is not None and isinstance(inner.graph, func_graph.FuncGraph):
                    yield from shapes_in(inner.graph, seen)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_nothing_of_size_queries_x_keys_is_in_the_graph(jit_compile):
    import tensorflow as tf

    length, heads = 4096, 2
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


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    "asked",
    [{"return_scores": True}, {"dropout": 0.5}, {"bias": np.zeros((1, 1, 5, 5), "float32")}],
)
def test_tiled_cannot_give_all_scores(asked):
    qkv = operands(1, 5, 5, 2)
    with pytest.raises(ValueError, match="`tiled=True` cannot be: scores, a bias or dropout"):
        attend(qkv, hm.Window(1, 1), **asked)
    attend(qkv, hm.Window(1, 1), tiled=None, **asked)


def test_unknown_lengths_off_tensorflow_graphs():
    offset = ops.convert_to_tensor(1)
    qkv = operands(1, 5, 5, 2)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        call = tf.function(lambda: attend(qkv, hm.Window(1, 1), None, offset), jit_compile=True)
    else:

        def call():
            attend(qkv, hm.Window(1, 1), None, offset)

    with pytest.raises(ValueError, match="`tiled=True` cannot be: off TensorFlow's graphs"):
        call()


# ---------------------------------------------------------------- the layer


def layer_of(spec, tiled, **rest):
    return hm.PerHeadMaskedMultiHeadAttention(3, 4, mask_spec=spec, tiled=tiled, **rest)


def test_the_argument_is_saved_only_where_set(tmp_path, tiny):
    spec = hm.Window(2, 2)
    assert "tiled" not in layer_of(spec, None).get_config()
    for tiled in (True, False):
        layer = layer_of(spec, tiled)
        assert layer.get_config()["tiled"] is tiled
        again = hm.PerHeadMaskedMultiHeadAttention.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        x = keras.Input((9, 8))
        model = keras.Model(x, layer(x))
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.layers[-1].get_config()["tiled"] is tiled
        data = np.random.default_rng(0).normal(size=(2, 9, 8)).astype("float32")
        close(loaded(data), model(data))


@pytest.mark.parametrize("tiled", ["yes", 2, 0.5])
def test_the_argument_of_a_wrong_type(tiled):
    with pytest.raises(TypeError, match=r"`tiled` must be True, False or None\. Received: "):
        layer_of(hm.Window(1, 1), tiled)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "float64"])
def test_the_layer_gives_the_same_either_way(tiny, policy):
    spec = hm.PerHead({0: hm.SameSegment("ids"), 1: hm.Window(2, 1)}, hm.Queries(3) | hm.Keys(0, 2))
    if policy == "float64" and BACKEND == "jax":
        pytest.skip("JAX holds 32 bits")
    x = np.random.default_rng(0).normal(size=(3, 11, 8)).astype("float32")
    call = {
        "mask_inputs": {"ids": SORTED_IDS[:, :11]},
        "query_mask": PADDING[:, 1:12],
        "use_causal_mask": True,
    }
    results = []
    for tiled in (True, False):
        keras.utils.set_random_seed(1)
        layer = layer_of(spec, tiled, dtype=policy)
        results.append(layer(x, **call))
        # In training with scores the dense way is taken.
        _, scores = layer(x, return_attention_scores=True, **call)
        assert tuple(scores.shape) == (3, 3, 11, 11)
    assert results[0].dtype == results[1].dtype
    atol = {"float32": 1e-5, "float64": 1e-6, "mixed_float16": 3e-3, "mixed_bfloat16": 3e-2}[policy]
    np.testing.assert_allclose(*map(numpy, results), atol=atol)


def test_a_layer_trains_the_same_either_way(tiny):
    x = np.random.default_rng(0).normal(size=(4, 11, 8)).astype("float32")
    results = []
    for tiled in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((11, 8))
        model = keras.Model(inputs, layer_of(hm.recipes.streaming(1, 3), tiled)(inputs))
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        model.fit(x, x, epochs=3, batch_size=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_dropout_in_training_takes_the_dense_way(tiny):
    layer = layer_of(hm.Window(2, 2), True, dropout=0.5)
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    plain = numpy(layer(x))
    assert not np.allclose(plain, numpy(layer(x, training=True)))
    layer._tiled = False
    close(layer(x), plain)


@pytest.mark.tensorflow
def test_a_saved_model_serves_any_length(tiny, tmp_path):
    import tensorflow as tf

    spec = hm.PerHead({0: hm.SameSegment("ids")}, hm.recipes.streaming(1, 3))
    x, ids = keras.Input((None, 8), name="x"), keras.Input((None,), dtype="int32", name="ids")
    model = keras.Model({"x": x, "ids": ids}, layer_of(spec, True)(x, mask_inputs={"ids": ids}))
    model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "saved"))
    layer = model.layers[-1]
    for batch, length in ((1, 1), (3, 23), (2, 10)):
        data = {
            "x": np.random.default_rng(0).normal(size=(batch, length, 8)).astype("float32"),
            "ids": UNSORTED_IDS[:batch, :length],
        }
        layer._tiled = False
        close(served.serve(data), layer(data["x"], mask_inputs={"ids": data["ids"]}))


# ---------------------------------------------------------------- a rule of a user's own


@hm.register_spec("test_tiled_nearer_date")
@dataclasses.dataclass(frozen=True)
class NearDate(hm.MaskSpec):
    """Reads data, and says nothing of tiles."""

    days: int

    @property
    def inputs(self):
        return {"day": hm.InputType()}

    def allowed(self, query_positions, key_positions, inputs):
        query, key = inputs["day"]
        return (key - query <= self.days) & (query - key <= self.days)


def test_a_rule_that_says_nothing_of_tiles(tiny):
    days = np.random.default_rng(0).integers(0, 9, (2, 13)).astype("int32")
    qkv = operands(2, 13, 13, 3)
    spec = hm.PerHead({1: NearDate(2)}, NearDate(3) & hm.Window(4, 4) | ~NearDate(6))
    close(attend(qkv, spec, {"day": days}), attend(qkv, spec, {"day": days}, tiled=False))
    for name, grad, wanted in both_gradients(qkv, spec, {"day": days}):
        close(grad, wanted, name)
