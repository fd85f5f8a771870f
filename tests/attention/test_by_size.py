"""TensorFlow's choice by size, at lengths that show when the graph runs.

Of few logits all are computed, else tiles.
"""

import pytest
from contract import numpy
from tiled_contract import attend

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def which(monkeypatch):
    """Which is chosen for a spec and operands, of two heads."""
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import by_size

    monkeypatch.setattr(by_size, "_attended_to_all", lambda part, shared, q, *_: tf.ones_like(q))
    monkeypatch.setattr(by_size.loop, "attend", lambda part, shared, q, *_: tf.zeros_like(q))

    def chosen(spec, queries, keys):
        def run(q, k, v, flags):
            return attend((q, k, v), spec, {"pad": flags} if spec.inputs else None, tiled=None)

        operand = tf.TensorSpec([None, None, 2, 3])
        of_flags = tf.TensorSpec([None, None], "bool")
        traced = tf.function(run).get_concrete_function(*[operand] * 3, of_flags)
        operands = [tf.zeros([1, length, 2, 3]) for length in (queries, keys, keys)]
        got = numpy(traced(*operands, tf.ones([1, keys], "bool")))
        assert got.min() == got.max()
        return {1: "all logits", 0: "tiles"}[got.max()]

    return chosen


PAD = hm.KeyFlag("pad")
GROUPS = hm.PerHead({0: hm.Window(3, 3)})


@pytest.mark.parametrize(
    ("spec", "logits"),
    [(hm.Window(3, 3), 2**19), (PAD, 2**23), (GROUPS, 2**23), (GROUPS & PAD, 2**23)],
)
def test_up_to_how_many_logits_all_are_computed(which, spec, logits):
    assert which(spec, 1, logits // 2) == "all logits"
    assert which(spec, 1, logits // 2 + 1) == "tiles"


@pytest.mark.parametrize("queries", [2**14, 2**15, 2**16])
def test_lengths_whose_product_32_bits_do_not_hold(which, queries):
    assert which(hm.Window(3, 3), queries, 2**16) == "tiles"


def test_a_step_of_wide_tiles_holds_one():
    """Found as a bug: 64 heads x 256 queries x 131,072 keys are 0 logits or fewer in 32 bits."""
    from keras_headmask.attention.tensorflow.plan import planned

    length = 2**17
    bound = evaluation.bind(hm.Window(after=0), None, length, length, batch=1)
    part = Part(hm.Window(after=0), tuple(range(64)), bound, 1.0, Tuning())
    assert planned(part).in_step == 1


def test_no_branch_where_the_sizes_are_known():
    """And one for each way where they are not; the mask and the plans have one of their own."""
    import tensorflow as tf

    def branches(length):
        call = tf.function(
            lambda x: attend((x, x, x), hm.Window(3, 3), tiled=None), autograph=False
        )
        graph = call.get_concrete_function(tf.TensorSpec([2, length, 2, 3])).graph.as_graph_def()
        nodes = [node for made in graph.library.function for node in made.node_def]
        return sum(node.op in ("If", "StatelessIf") for node in [*graph.node, *nodes])

    assert [branches(length) for length in (64, None)] == [0, 3]


@pytest.mark.parametrize(
    ("batch", "length", "has_loop"),
    [
        (1, 64, False),
        (1, 2048, True),
        (None, 64, False),  # `fit` does not know the size of its last batch
        (None, 512, True),
        (None, None, True),
    ],
)
def test_which_graphs_have_a_loop(batch, length, has_loop):
    import tensorflow as tf

    x = tf.TensorSpec([batch, length, 2, 3])
    call = tf.function(lambda x: attend((x, x, x), hm.Window(3, 3), tiled=None), autograph=False)
    functions = call.get_concrete_function(x).graph.as_graph_def().library.function
    assert has_loop == any("While" in node.op for made in functions for node in made.node_def)


@pytest.mark.parametrize("spec", [hm.Window(1, 1), hm.Keys(0, 1) | hm.Window(1, 1)], ids=str)
def test_tiles_of_no_key_are_0(spec):
    """At lengths that the graph does not know: one run of keys, and two."""
    import tensorflow as tf

    def run(q, k, v):
        return hm.dot_product_attention(q, k, v, mask_spec=spec, tiled=True)

    operand = tf.TensorSpec((None, None, 2, 3))
    traced = tf.function(run, input_signature=[operand] * 3, autograph=False)
    keys = tf.zeros((1, 0, 2, 3))
    assert not numpy(traced(tf.ones((1, 5, 2, 3)), keys, keys)).any()
