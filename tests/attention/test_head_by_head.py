"""Which short sequences on TensorFlow go head by head, and how many logits a step holds."""

import numpy as np
import pytest
from tiled_contract import (
    attend,
    close,
    operands,
    tiles,
)

import keras_headmask as hm

pytestmark = pytest.mark.tensorflow


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
