"""Tiles of TensorFlow: what its plan holds, how sizes decide, and how much its graphs compute."""

import dataclasses
import math

import keras
import numpy as np
import pytest
from tiled_contract import at_once, attend, close, operands, tiles

import keras_headmask as hm
from keras_headmask.attention.request import Part
from keras_headmask.attention.scopes import Tuning, tuned
from keras_headmask.rules import evaluation

if keras.backend.backend() != "tensorflow":
    pytest.skip("code for TensorFlow alone", allow_module_level=True)

import tensorflow as tf

from keras_headmask.attention.tensorflow.by_size import Limits
from keras_headmask.attention.tensorflow.plan import planned

LENGTH = 1024
IDS = np.isin(np.arange(LENGTH), (3, 400, 700, 1020))[None] * np.int32(1)


@hm.register_spec("test_unset")
@dataclasses.dataclass(frozen=True)
class Unset(hm.MaskSpec):
    """A kind of a user's own: the keys whose flag is not set."""

    @property
    def inputs(self):
        return {"ids": hm.InputType(dtype="bool", sides=frozenset({"key"}))}

    def allowed(self, query_positions, key_positions, inputs):
        return ~inputs["ids"].key

    def coverage(self, tiles, inputs):
        flags = inputs["ids"].key
        return hm.Bounds(flags.low < 1, flags.high < 1)


RULES = {
    "keys": (hm.KeyIn("ids", 1), IDS),
    "queries": (hm.QueryFlag("ids"), IDS),
    "own kind": (Unset(), IDS < 1),
}


@pytest.mark.parametrize("name", RULES)
def test_few_flags_open_no_block(name):
    leaf, ids = RULES[name]
    rule = hm.Window(63, 0) | leaf
    bound = evaluation.bind(rule, {"ids": ids}, LENGTH, LENGTH, batch=1)
    plan = planned(Part(rule, (0,), bound, 1.0, Tuning()))
    (count, _, tile, _), apart = plan.queries.shape, int(name == "queries")  # one more: of all keys
    assert count == LENGTH // tile + apart
    assert (plan.sizes[apart:, 1] <= (63 + tile + 31) // 32 * 32).numpy().all()


@pytest.mark.parametrize("joined", ["or", "both ways"])
def test_a_flag_of_any_kind_is_read_as_its_coverage_says(joined):
    few = np.arange(23)[None] % np.array([[5], [9]]) > 0
    rule = hm.Window(1, 1) | Unset()
    if joined == "both ways":
        rule &= hm.Window(4, 0) | ~Unset()
    qkv = operands(2, 23, 23, 3)
    with tiles(), tuned(most_logits_of_a_step=2**20):  # tiles of several widths in one step
        close(attend(qkv, rule, {"ids": few}), attend(qkv, rule, {"ids": few}, tiled=False))


# --- Sizes, in 64 bits ---------------------------------------------------------------------------


def test_a_step_of_wide_tiles_holds_one():
    """Found as a bug: 64 heads x 256 queries x 131,072 keys are 0 logits or fewer in 32 bits."""
    length = 2**17
    bound = evaluation.bind(hm.Window(after=0), None, length, length, batch=1)
    part = Part(hm.Window(after=0), tuple(range(64)), bound, 1.0, Tuning())
    plan = planned(part)
    fits = plan.sizes[:, 0]
    assert fits[0] == 1
    assert (fits[1:] >= fits[:-1]).numpy().all()


def test_a_graph_decides_by_sizes_as_python_does():
    limits = Limits(2**23, 2**26, 2**17)
    cases = {
        (8, 128, 128): True,  # many logits, but a tile is a whole sequence
        (4096, 200, 200): False,  # a batch that would take gigabytes
        (1, 512, 512): True,
        (1, 65536, 65536): False,  # more than 32 bits
    }
    for sizes, expected in cases.items():
        assert limits.hold(8, *sizes) is expected
        assert bool(limits.hold(8, *map(tf.constant, sizes))) == expected
    assert limits.hold_of(8, None, 16, 16) is True  # of any batch
    assert limits.hold_of(8, 1, None, 16) is None


# --- Graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [tiles, at_once])
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 4, 9, 9)])
def test_heads_of_a_mask_that_turn_out_to_be_1(scope, shape):
    """They are broadcast, as dense attention does, and not cut."""
    qkv, rule = operands(2, 9, 9, 4), hm.Window(3, 3)
    mask = np.random.default_rng(0).random(shape) < 0.6
    signature = [tf.TensorSpec([None] * 4, tf.bool)]
    run = tf.function(lambda mask: attend(qkv, rule, mask=mask), signature, autograph=False)
    with scope():
        close(run(mask), attend(qkv, rule, mask=mask, tiled=False))


def largest_of_both_passes(qkv, **arguments):
    """The size of the largest tensor that attention and its gradient make."""

    def gradients(*x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hm.dot_product_attention(*x, **arguments) ** 2)
        return tape.gradient(loss, x)

    given = [tf.TensorSpec(x.shape, x.dtype) for x in qkv]
    graph = tf.function(gradients).get_concrete_function(*given).graph.as_graph_def(add_shapes=True)
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    shapes = [shape.dim for node in nodes for shape in node.attr["_output_shapes"].list.shape]
    return max(math.prod(abs(axis.size) for axis in shape) for shape in shapes)  # -1: not known


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
