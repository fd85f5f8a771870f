"""Mask inputs of other sizes, where only the run of a TensorFlow graph shows them."""

import keras
import numpy as np
import pytest
from keras_versions import takes_unread_inputs

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow

WRONG = {
    (examples, keys): rf"has \(examples, keys\) =\] \[{examples}\] \[{keys}\] "
    r"\[where the attention has\] \[3\] \[6\] .*repeat it"
    for examples, keys in ((1, 6), (2, 6), (1, 1), (3, 1), (3, 5), (3, 7))
}


def _retrofitted():
    ids = keras.Input((None,), dtype="int32", name="ids")
    seen = keras.Input((None,), dtype="int32", name="seen")
    x = keras.layers.Embedding(9, 8)(ids)
    stock = keras.Model([ids, seen], keras.layers.MultiHeadAttention(2, 4)(x, x))
    return hm.apply_head_masks(stock, hm.PerHead({0: hm.KeyFlag("seen")}))


@takes_unread_inputs
def test_inputs_of_other_sizes_are_refused_when_the_graph_runs(tmp_path):
    """As a SavedModel, and compiled by XLA, which leaves assertions out."""
    import tensorflow as tf

    model = _retrofitted()
    ids = np.arange(18, dtype="int32").reshape(3, 6) % 9
    model.export(str(tmp_path), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path))  # as long as `serve` is used
    served = loaded.serve
    signature = [tf.TensorSpec((None, None), tf.int32)] * 2
    xla = tf.function(lambda *x: served(list(x)), signature, jit_compile=True)
    np.testing.assert_allclose(served([ids, ids % 2]), model([ids, ids % 2]), atol=1e-5)
    for shape, message in WRONG.items():
        seen = np.ones(shape, "int32")
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            served([ids, seen])
        with pytest.raises(tf.errors.InvalidArgumentError, match="mask_input_of_another_shape"):
            xla(ids, seen)


def _attention(rule, *given, query_offset=0):
    """A graph of dense attention of `(batch, queries, keys)` under `rule`; all three not known."""
    import tensorflow as tf

    x = tf.TensorSpec((None, None, 2, 4))

    @tf.function(input_signature=[x, x, *given])
    def run(query, key, *given):
        inputs = {"seen": given if len(given) == 2 else given[0]}
        more = {"query_offset": query_offset, "mask_spec": rule, "mask_inputs": inputs}
        return hm.dot_product_attention(query, key, key, tiled=False, **more)

    def call(sizes, *given):
        batch, *lengths = sizes
        return run(*(np.ones((batch, n, 2, 4), "float32") for n in lengths), *given)

    return call


def _ids(*shapes):
    return [np.ones(shape, "int32") for shape in shapes]


def test_each_side_of_a_pair_is_checked():
    import tensorflow as tf

    call = _attention(hm.SameSegment("seen"), *[tf.TensorSpec((None, None), tf.int32)] * 2)
    assert call((3, 5, 7), *_ids((3, 5), (3, 7))).shape == (3, 5, 2, 4)
    for shapes, message in {
        ((3, 5), (3, 6)): r"\(examples, keys\) =\] \[3\] \[6\] \[where the .* has\] \[3\] \[7\]",
        ((3, 4), (3, 7)): r"\(examples, queries\) =\] \[3\] \[4\] \[where the .* has\] \[3\] \[5\]",
        ((1, 5), (3, 7)): r"\(examples, queries\) =\] \[1\] \[5\] \[where the .* has\] \[3\] \[5\]",
    }.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            call((3, 5, 7), *_ids(*shapes))


@pytest.mark.parametrize("offset", [-1, 6, 7])
@pytest.mark.parametrize("traced", [True, False])
def test_an_offset_beyond_the_ids_says_so(traced, offset):
    import tensorflow as tf

    def mask(ids, offset):
        return hm.make_mask(hm.SameSegment("seen"), 2, 7, 1, {"seen": ids}, offset)

    call = tf.function(mask) if traced else mask
    ids = tf.constant([[1, 1, 1, 1, 2, 2, 2]])
    assert call(ids, tf.constant(5)).shape == (1, 1, 2, 7)
    message = rf"query_offset =\] \[{offset}\] \[puts .* outside\] \[`mask_inputs\[.*seen"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(ids, tf.constant(offset))


def test_a_whole_mask_broadcasts_from_1_alone():
    import tensorflow as tf

    call = _attention(hm.MaskInput("seen"), tf.TensorSpec((None, 1, None, None), tf.bool))
    for shape in (3, 1, 5, 7), (1, 1, 1, 7), (3, 1, 5, 1):
        assert call((3, 5, 7), np.ones(shape, bool)).shape == (3, 5, 2, 4)
    for shape in (2, 1, 5, 7), (3, 1, 6, 7), (1, 1, 5, 6):
        given = " ".join(str(shape[axis]) for axis in (0, 2, 3))
        message = r"has \(examples, queries, keys\) =\] "
        message += rf"\[{given}\] \[where the attention has\] \[3 5 7\] \[\(1 broadcasts"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            call((3, 5, 7), np.ones(shape, bool))


OPERANDS = r"do not fit. Received: shapes\] \[{} {} 2 4\] \[{} {} 2 4\] \[{} {} 2 4\]"
MASK = (
    r"`attention_mask` .* has \(examples, heads, queries, keys\) =\] \[{} {} {} {}\] "
    r"\[where the attention has\] \[3 2 {} {}\] \[\(1 broadcasts"
)


def _misfits(length):
    """Shapes of query, key, value and mask that do not fit, by the message."""
    sizes = {"query": (3, length), "key": (3, length), "value": (3, length)}
    for wrong in (
        {"value": (3, length + 7)},
        {"query": (2, length)},
        {"value": (1, length)},
        {"key": (1, length), "value": (1, length)},
    ):
        pairs = (sizes | wrong).values()
        yield [*((*pair, 2, 4) for pair in pairs), (1, 1, 1, 1)], OPERANDS.format(*sum(pairs, ()))
    right = [(3, length, 2, 4)] * 3
    for mask in (2, 1), (4, 1), (1, 3):
        mask = *mask, length, length
        yield [*right, mask], MASK.format(*mask, length, length)


def test_operands_and_masks_that_do_not_fit_are_refused_when_the_graph_runs():
    """Also of long sequences, whose loop would read what belongs to other heads and examples."""
    import tensorflow as tf

    signature = [*[tf.TensorSpec((None, None, 2, 4))] * 3, tf.TensorSpec((None,) * 4, tf.bool)]

    @tf.function(input_signature=signature, autograph=False)
    def attend(query, key, value, mask):
        return hm.dot_product_attention(query, key, value, mask=mask, mask_spec=hm.Window(2, 2))

    for length in (6, 600):
        attend(*[tf.ones((3, length, 2, 4))] * 3, tf.ones((1, 2, 1, length), tf.bool))
        for (*shapes, mask), message in _misfits(length):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                attend(*map(tf.ones, shapes), tf.ones(mask, tf.bool))


@pytest.mark.parametrize(("declared", "shape"), [((None, 1), (3, 1)), ((1, None), (1, 6))])
def test_an_axis_declared_as_1_is_checked_where_assertions_are_left_out(declared, shape):
    import tensorflow as tf

    x, ids = tf.TensorSpec((None, None, 2, 4)), tf.TensorSpec(declared, tf.int32)

    @tf.function(input_signature=[x, ids], jit_compile=True)
    def run(x, ids):
        rule, given = hm.SameSegment("seen"), {"seen": ids}
        return hm.dot_product_attention(x, x, x, mask_spec=rule, mask_inputs=given, tiled=False)

    for length, batch in ((6, 3), (shape[1], shape[0])):
        operands = np.ones((batch, length, 2, 4), "float32"), np.ones(shape, "int32")
        if (batch, length) == shape:
            assert run(*operands).shape == operands[0].shape
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="of_another_shape"):
                run(*operands)
