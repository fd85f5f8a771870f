"""Tiles in graphs: what the run shows, and nothing computed that need not be."""

import math

import numpy as np
import pytest
from tiled_contract import BACKEND, UNSORTED_IDS, attend, close, operands, tiles, weighted

import keras_headmask as hm

# ---------------------------------------------------------------- traced

# The shape of a whole mask when the graph runs: it is traced as unknown, but for heads. Of `and`,
# documents of one example at a time, and of it a mask for all queries, or for all keys.
IDS = UNSORTED_IDS[:, :11]
SHAPES = [("or", (1, 1, 11, 1)), ("or", (1, 4, 1, 1)), ("and", (3, 1, 1, 11))]
SHAPES += [("and", (3, 4, 11, 1))]


@pytest.mark.tensorflow
@pytest.mark.parametrize(("joined", "shape"), SHAPES)
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
    signature = [of_qkv, of_inputs]
    call = tf.function(lambda *x: attend(x[0], rule, x[1]), signature, autograph=False)
    close(call(list(qkv), inputs), attend(qkv, rule, inputs, tiled=False))


@pytest.mark.tensorflow
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 4, 9, 9)])
def test_heads_of_a_mask_that_turn_out_to_be_1(tiny, shape):
    import tensorflow as tf

    qkv, rule = operands(2, 9, 9, 4), hm.Window(3, 3)
    mask = np.random.default_rng(0).random(shape) < 0.6
    signature = [tf.TensorSpec([None] * 4, tf.bool)]
    run = tf.function(lambda mask: attend(qkv, rule, mask=mask), signature, autograph=False)
    close(run(mask), attend(qkv, rule, mask=mask, tiled=False))


@pytest.mark.tensorflow
def test_flags_of_keys_alone_under_an_offset_at_unknown_lengths(tiny):
    """One tensor for both sides, of which a rule on keys reads no queries."""
    import tensorflow as tf

    qkv = operands(2, 5, 13, 3)
    flags = np.random.default_rng(1).integers(0, 2, (2, 13)).astype(bool)
    spec = hm.KeyFlag("f") & hm.Window(4, 0)
    signature = [tf.TensorSpec([None, None, 3, x.shape[3]]) for x in qkv]
    signature += [tf.TensorSpec([None, None], "bool")]
    call = tf.function(lambda *x: attend(x[:3], spec, {"f": x[3]}, 6), signature, autograph=False)
    close(call(*qkv, flags), attend(qkv, spec, {"f": flags}, 6, tiled=False))


# ---------------------------------------------------------------- only what may be allowed


def largest_made(function, *arrays):
    """On the backend in use. On TensorFlow in a graph of known shapes."""
    if BACKEND == "jax":
        pytest.skip("TensorFlow and PyTorch show it")
    of_backend = largest_in_tensorflow if BACKEND == "tensorflow" else largest_in_torch
    return of_backend(function, *arrays)


def largest_in_tensorflow(function, *arrays):
    import tensorflow as tf

    given = [tf.TensorSpec(x.shape, x.dtype) for x in arrays]
    graph = tf.function(function).get_concrete_function(*given).graph
    return max(math.prod(size or 1 for size in shape) for shape in shapes_in(graph))


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
                yield out.shape.as_list()
        for attribute in op.node_def.attr.values():
            if attribute.HasField("func"):
                inner = graph._get_function(attribute.func.name)
                if inner is not None and isinstance(inner.graph, func_graph.FuncGraph):
                    yield from shapes_in(inner.graph, seen)


def largest_in_torch(function, *arrays):
    """The size of the largest tensor that any operation gives while the function runs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    with Watch():
        function(*arrays)
    return largest[0]


def largest_of_both_passes(qkv, **arguments):
    """The size of the largest tensor that attention and its gradient make."""

    def loss(*x):
        return weighted(hm.dot_product_attention(*x, **arguments))

    def gradients(*x):
        if BACKEND == "torch":
            import torch

            x = [torch.from_numpy(array).requires_grad_() for array in x]
            return torch.autograd.grad(loss(*x), x)
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


def test_keys_are_repeated_nowhere():
    """Nothing is larger than keys of the whole length in a few heads, in both passes."""
    heads, length = 8, 512
    query, key, value = operands(1, 16, length, heads, size=8, value_size=8, key_heads=1)
    spec = hm.PerHead({(0, 2, 5): hm.Window(9, 2)}, default=hm.Window(4, 0))
    given = {"mask_spec": spec, "tiled": True, "query_offset": 7}
    repeated = query, *(np.repeat(x, heads, axis=2) for x in (key, value))
    with tiles(8, 8, 4):
        assert largest_of_both_passes((query, key, value), **given) < 2 * key.size
        assert largest_of_both_passes(repeated, **given) >= heads * key.size
