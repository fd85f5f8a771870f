"""Short sequences on TensorFlow go head by head, which equals the definition.

What else tiles keep is asked of this implementation, too, by the fixture `tiny`.
"""

import numpy as np
import oracle
import pytest
from contract import numpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEW, cases
from tiled_contract import (
    LONG,
    SCALE,
    TRACED,
    attend,
    both_gradients,
    close,
    heads_alone,
    operands,
    seeds,
    tiles,
)

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow
logits_of_a_step = st.sampled_from([1, 30, 100, 2**20])


@FEW
@given(cases(), logits_of_a_step, seeds)
def test_any_rule_equals_the_definition(case, logits, seed):
    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = operands(batch, queries, keys, heads, seed)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    with heads_alone(logits):
        got = numpy(attend(qkv, spec, inputs, offset))
        gradients = list(both_gradients(qkv, spec, inputs, offset))
    close(got, oracle.attention(*qkv, mask, SCALE)[0], "the definition in loops")
    dead = ~mask.any(-1)
    assert (got.transpose(0, 2, 1, 3)[dead] == 0).all(), "dead rows are exactly 0"
    for name, grad, wanted in gradients:
        close(grad, wanted, f"gradient of {name}")
        if name == "q":
            assert (grad.transpose(0, 2, 1, 3)[dead] == 0).all()


@pytest.mark.parametrize("name", LONG)
def test_rules_with_gaps_flags_and_whole_masks(name):
    spec, inputs = LONG[name]
    qkv = operands(3, 23, 23, 4)
    with heads_alone(2 * 23 * 23):
        close(attend(qkv, spec, inputs), attend(qkv, spec, inputs, tiled=False), name)
        for which, grad, wanted in both_gradients(qkv, spec, inputs):
            close(grad, wanted, f"{name}: gradient of {which}")


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_what_turns_out_to_be_empty(batch, queries, keys):
    import tensorflow as tf

    qkv = [tf.constant(x) for x in operands(batch, queries, keys, 3)]
    free = [tf.TensorSpec([None, None, *x.shape[2:]]) for x in qkv]
    for spec in (hm.Full(), hm.PerHead({1: hm.Window(1, 1)})):
        with heads_alone():
            traced = tf.function(lambda *x, spec=spec: attend(x, spec))
            got = traced.get_concrete_function(*free)(*qkv)
        np.testing.assert_array_equal(got, np.zeros((batch, queries, 3, 2)))


@TRACED
@given(cases(), seeds, st.sampled_from([0, 8, 10**6]))
def test_the_length_decides_when_it_is_known(case, seed, short):
    """One graph serves short and long sequences, each as suits it."""
    import tensorflow as tf

    spec, inputs, batch, heads, queries, keys, offset = case
    qkv = [tf.constant(x) for x in operands(batch, queries, keys, heads, seed)]
    free = [tf.TensorSpec([None, None, *x.shape[2:]]) for x in qkv]
    with tiles(short=short):
        traced = tf.function(lambda *x: attend(x, spec, inputs, offset))
        got = traced.get_concrete_function(*free)(*qkv)
    close(got, attend(qkv, spec, inputs, offset, tiled=False))


@pytest.mark.parametrize(
    ("length", "wanted"), [(256, "head by head"), (257, "by tiles")], ids=["short", "long"]
)
def test_which_implementation_computes(length, wanted, monkeypatch):
    from keras_headmask.attention import kernels
    from keras_headmask.attention.tensorflow import head_by_head

    used = []
    for holder, name, called in (
        (head_by_head, "head by head", "compute"),
        (kernels.ByGroup, "by tiles", "compute"),
    ):
        real = getattr(holder, called)
        monkeypatch.setattr(
            holder, called, lambda *a, real=real, name=name: used.append(name) or real(*a)
        )
    qkv = operands(1, length, length, 2)
    close(attend(qkv, hm.Window(3, 3)), attend(qkv, hm.Window(3, 3), tiled=False))
    assert used == [wanted]


def test_a_step_holds_few_logits(monkeypatch):
    from keras_headmask.attention.tensorflow import head_by_head

    sizes, real = [], head_by_head.logits_of

    def seen(*given):
        logits, *rest = real(*given)
        sizes.append(int(np.prod(logits.shape)))
        return logits, *rest

    monkeypatch.setattr(head_by_head, "logits_of", seen)
    attend(operands(20, 256, 256, 3), hm.PerHead({(0, 2): hm.Window(3, 3)}))
    assert sizes == [16 * 256**2, 16 * 256**2, 8 * 256**2, 16 * 256**2, 4 * 256**2]


def test_which_implementation_computes_where_the_length_is_not_known(monkeypatch):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import head_by_head
    from keras_headmask.attention.tensorflow.graph import Passes

    ones = Passes(lambda q, k, v: [tf.ones_like(v)], lambda *given: given[:3])
    monkeypatch.setattr(head_by_head, "passes", lambda part: ones)
    operand = tf.TensorSpec([1, None, 2, 3])
    call = tf.function(lambda q, k, v: attend((q, k, v), hm.Window(1, 1)))
    with tiles(short=8 * 8):
        traced = call.get_concrete_function(operand, operand, operand)
    for length in (8, 9):
        qkv = [tf.constant(x) for x in operands(1, length, length, 2, value_size=3)]
        wanted = attend(qkv, hm.Window(1, 1), tiled=False)
        close(traced(*qkv), np.ones_like(wanted) if length == 8 else wanted)
