"""Layers of one graph share what follows from their rule and its inputs, and nothing else."""

import contextlib
import dataclasses
import functools
import gc
import weakref

import keras
import numpy as np
import pytest
from contract import normal
from keras import layers, ops
from tiled_contract import tiles
from tolerance import assert_close

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow
Ours = hm.PerHeadMaskedMultiHeadAttention
SCOPES = {"all logits": contextlib.nullcontext, "tiles": tiles}
LOGITS, TILES = SCOPES.values()


# --- Counted --------------------------------------------------------------------------------------

made = []  # what `Counted` did


@hm.register_spec("test_counted")
@dataclasses.dataclass(frozen=True)
class Counted(hm.MaskSpec):
    """Keys of the query's segment, up to `most` positions away."""

    most: int = 3

    @property
    def inputs(self):
        return {"ids": hm.InputType()}

    def prepare(self, inputs):
        made.append("prepared")
        return inputs

    def allowed(self, query_positions, key_positions, inputs):
        if query_positions.shape.rank == 2:  # else of a step of a loop, which each layer has
            made.append("mask")
        is_near = ops.abs(query_positions - key_positions) <= self.most
        return is_near & (inputs["ids"].query == inputs["ids"].key)


@hm.register_spec("test_near")
@dataclasses.dataclass(frozen=True)
class Near(hm.MaskSpec):
    """Keys up to 3 positions away: what reads no input has lengths alone to share by."""

    def allowed(self, query_positions, key_positions, inputs):
        made.append("near" if query_positions.shape.rank == 2 else "near in a step")
        return ops.abs(query_positions - key_positions) <= 3


RULE = hm.PerHead({0: Counted()})
ONE = ["prepared", "mask"]  # what a layer makes by itself


def of_layers(count, rule=RULE, rules=(), ids="ids", offset=0):
    """A stack of our layers; the last may have other ids or another offset."""
    given = {name: keras.Input((None,), dtype="int32", name=name) for name in ("ids", "others")}
    x = layers.Embedding(9, 8)(given["ids"])
    for i in range(count):
        rule, is_last = rules[i] if rules else rule, i == count - 1
        inputs = {"ids": given[ids if is_last else "ids"]} if rule.inputs else None
        start = offset if is_last else 0  # (keys are longer then, and the ids are theirs)
        queries = x[:, start:] if start else x
        attention = Ours(2, 4, mask_spec=rule)
        x = queries + attention(queries, x, mask_inputs=inputs, query_offset=start)
    return keras.Model(given, x)


def retrofitted(count, rule=RULE):
    given = {name: keras.Input((None,), dtype="int32", name=name) for name in ("ids", "others")}
    x = layers.Embedding(9, 8)(given["ids"])
    for _ in range(count):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return hm.apply_head_masks(keras.Model(given, x), rule)


class Block(layers.Layer):
    """Makes its mask of padding anew, as KerasHub's blocks do."""

    def build(self, x_shape, padding_mask_shape):
        self.attention = layers.MultiHeadAttention(2, 4)
        self.attention.build(x_shape, x_shape)

    def call(self, x, padding_mask):
        mask = ops.expand_dims(ops.cast(padding_mask, "int32"), 1)
        return x + self.attention(x, x, attention_mask=mask)

    def compute_output_shape(self, x_shape, padding_mask_shape):
        return x_shape


def of_blocks(count, rule=RULE):
    given = {name: keras.Input((None,), dtype="int32", name=name) for name in ("ids", "others")}
    x = layers.Embedding(9, 8)(given["ids"])
    for _ in range(count):
        x = Block()(x, given["others"])
    return hm.apply_head_masks(keras.Model(given, x), rule, ignore="block")


def trace(*models, shape=(None, None)):
    """A graph that calls them on ids of that shape, and what was made for it."""
    import tensorflow as tf

    spec = {name: tf.TensorSpec(shape, tf.int32) for name in ("ids", "others")}
    made.clear()
    call = tf.function(lambda x: [model(x) for model in models], [spec], autograph=False)
    return call.get_concrete_function().graph, list(made)


def called(graph):
    """The functions that the graph calls, each as often."""
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    return [op.get_attr("f").name for op in calls]


def nodes_of(graph):
    """How many it has, with those of its functions."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(x.node_def) for x in definition.library.function)


@pytest.mark.parametrize(
    ("scope", "make", "shape", "most"),
    [
        (TILES, of_layers, (None, None), 50),
        (LOGITS, of_blocks, (None, 7), 80),
        (LOGITS, retrofitted, (None, None), 50),
    ],
)
def test_three_layers_make_what_one_makes(scope, make, shape, most):
    """Found as a bug: each layer has its own lengths, and traced what followed from them."""
    rule = hm.PerHead({0: Counted(), 1: Near()})
    with scope():
        (first, one), (last, three) = (trace(make(n, rule), shape=shape) for n in (1, 3))
    assert one == three
    assert scope is TILES or {"prepared", "mask", "near"} <= set(one)
    # The operations of the plan, and of the padding, are counted by TensorFlow alone.
    nodes = [nodes_of(graph) for graph in (first, last)]
    assert nodes[1] - nodes[0] < 2 * most
    assert scope is LOGITS or nodes[0] > 500
    assert len(set(called(first))) == len(set(called(last)))  # the attention is traced once, too
    assert len(called(last)) == len(called(first)) + 2


NEAR = hm.Window(1, 1)
UNLIKE = {
    "ids": {"ids": "others"},
    "offset": {"offset": 1},
    "an offset and ids": {"offset": 1, "ids": "others"},
    "a field": {"rules": [RULE, hm.PerHead({0: Counted(2)})]},
    "other heads": {"rules": [RULE, hm.PerHead({1: Counted()})]},
    "and, or": {"rules": [Counted() & NEAR, Counted() | NEAR]},
    "not": {"rules": [Counted(), ~Counted()]},
    "one more": {"rules": [Counted(), Counted() & hm.KeyFlag("ids")]},
}


@pytest.mark.parametrize("unlike", UNLIKE.values(), ids=UNLIKE)
def test_a_layer_that_alone_differs_makes_its_own(unlike):
    assert len(trace(of_layers(2, **unlike), shape=(2, 7))[1]) > len(ONE)


def test_two_models_share_if_they_have_the_same_ids():
    model = of_layers(1)
    assert trace(model, of_layers(1), model)[1] == ONE
    # (A retrofitted model prepares its inputs itself.)
    assert trace(retrofitted(1), retrofitted(1))[1].count("mask") == 1


# --- Right ----------------------------------------------------------------------------------------

# A program calls layers, and runs twice: in a graph, and eagerly, where each layer makes its own.

READS = hm.SameSegment("ids") & hm.Window(2, 1)
FIRST = np.array([[0, 0, 2, 2, 1], [4, 1, 1, 4, 4]], "int32")
SECOND = np.array([[2, 2, 0, 0, 0, 1, 1], [1, 1, 4, 4, 4, 4, 2]], "int32")
THIRD = np.roll(FIRST, 2, 1)


@functools.cache
def attention(number):
    import tensorflow as tf

    with tf.init_scope():  # also where a graph is the first to ask for it
        layer = Ours(2, 3, mask_spec=READS, name=f"attention_{number}")
        layer.build((None, None, 8), (None, None, 8))
        # (Small ones, always the same: `loop` makes large errors of roundings by large ones.)
        rng = np.random.default_rng(number)
        layer.set_weights([0.25 * rng.normal(size=x.shape) for x in layer.get_weights()])
    return layer


def attend(number, x, ids, other=None, ids_of_other=None):
    pair = ids if other is None else (ids, ids_of_other)
    return attention(number)(x, x if other is None else other, mask_inputs={"ids": pair})


def encoder_and_decoder(x, y, first, second, third):
    """Two layers are called again: on other ids, and on other ones of other lengths."""
    for number in (0, 1):
        x += attend(number, x, first)
    for number in (2, 4):
        y += attend(number, y, second)
        y += attend(number + 1, y, second, x, first)
    return x + attend(0, x, third), x + attend(2, x, third + 1), y


def loop(x, _, first, second, third):
    """Each step has ids of its own, made by operations that have the same names outside."""
    import tensorflow as tf

    steps = tf.stack([first, third, first + third, first % 2])

    def step(i, x):
        ids = tf.gather(steps, i)
        x += attend(0, x, ids) + attend(1, x, first)
        return i + 1, x + attend(2, x, ids)

    x += attend(3, x, tf.gather(steps, 1))
    _, x = tf.while_loop(lambda i, _: i < 4, step, (tf.constant(0), x), maximum_iterations=4)
    return x


def remat(x, _, first, second, third):
    def block(number, ids):
        return lambda x: x + attend(number, x, ids) + attend(number + 1, x, ids)

    x = keras.remat(block(0, first))(x)
    return keras.remat(block(2, third))(x) + attend(4, x, third)


PROGRAMS = [(LOGITS, encoder_and_decoder, True), (LOGITS, encoder_and_decoder, False)]
PROGRAMS += [(LOGITS, remat, True), (TILES, loop, False)]


@pytest.mark.parametrize(("scope", "program", "is_known"), PROGRAMS)
def test_layers_in_a_graph_give_what_each_gives_by_itself(scope, program, is_known):
    """At known lengths with gradients, at unknown ones, which take long to trace, without."""
    import tensorflow as tf

    def run(x, y, *ids):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            found = tf.nest.flatten(program(x, y, *ids))
            loss = sum(tf.reduce_sum(tf.sin(one)) for one in found)
        if not is_known:
            return found
        return *found, *tape.gradient(loss, [x, y], unconnected_gradients="zero")

    given = [normal(2, 5, 8), normal(2, 7, 8, seed=1), FIRST, SECOND, THIRD]
    given = [tf.constant(x) for x in given]
    sizes = [x.shape[1:] if is_known else [None, *x.shape[2:]] for x in given]
    signature = [
        tf.TensorSpec([None, *size], x.dtype) for size, x in zip(sizes, given, strict=True)
    ]
    with scope():
        found = tf.function(run, signature, autograph=False)(*given)
    for one, other in zip(found, run(*given), strict=True):
        assert_close(one, other, depth=12)


@pytest.mark.daily  # two planted bugs are seen here alone
def test_rules_on_positions_have_sizes_and_offsets_of_their_own():
    import tensorflow as tf

    def program(x, y, offset):
        calls = [(x, x, 0), (y, y, 0), (x[:1], x[:1], 0)]
        calls += [(x, y, start) for start in (0, 2, offset, 1)]
        rule = hm.PerHead({0: hm.Window(1, 0)})
        return [
            hm.dot_product_attention(one, other, other, mask_spec=rule, query_offset=start)
            for one, other, start in calls
        ]

    given = [tf.constant(x) for x in (normal(2, 5, 2, 4), normal(2, 7, 2, 4, seed=1), 1)]
    unknown = [tf.TensorSpec([None, None, 2, 4])] * 2 + [tf.TensorSpec([], tf.int32)]
    found = tf.function(program, unknown, autograph=False)(*given)
    for one, other in zip(found, program(*given), strict=True):
        assert_close(one, other)


# --- Gone -----------------------------------------------------------------------------------------


def test_what_was_shared_goes_with_the_graph():
    import tensorflow as tf

    with tiles():
        model = of_layers(2)
        graph, _ = trace(model)
    weights = [weakref.ref(weight.value.handle) for weight in model.weights]
    shared = [weakref.ref(x) for x in tf.nest.flatten(graph.headmask_made) if tf.is_tensor(x)]
    assert len(shared) > 3
    refs = [weakref.ref(graph), *shared, *weights]
    del graph, model
    keras.backend.clear_session()
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
