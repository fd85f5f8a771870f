"""How sizes decide on TensorFlow, in 64 bits."""

import pytest

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow


def test_a_step_of_wide_tiles_holds_one():
    """Found as a bug: 64 heads x 256 queries x 131,072 keys are 0 logits or fewer in 32 bits."""
    from keras_headmask.attention.tensorflow.plan import planned

    length = 2**17
    bound = evaluation.bind(hm.Window(after=0), None, length, length, batch=1)
    part = Part(hm.Window(after=0), tuple(range(64)), bound, 1.0, Tuning())
    plan = planned(part)
    assert plan.fits[0] == 1
    assert (plan.fits[1:] >= plan.fits[:-1]).numpy().all()


@pytest.mark.parametrize("are_local", [True, False])
def test_a_graph_decides_by_sizes_as_python_does(are_local):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow.by_size import Limits

    limits = Limits(2**19 if are_local else 2**23, 2**26, 2**17)
    cases = {
        (8, 16, 16): True,
        (8, 128, 128): True,  # many logits, but a tile is a whole sequence
        (4096, 200, 200): False,  # a batch that would take gigabytes
        (1, 362, 362): True,
        (1, 512, 512): not are_local,
        (1, 1, 4096): True,
        (1, 65536, 65536): False,  # more than 32 bits
    }
    for sizes, expected in cases.items():
        assert limits.hold(8, *sizes) is expected
        assert bool(limits.hold(8, *map(tf.constant, sizes))) == expected
    assert limits._replace(logits=0).hold(8, 1, 1, 1) is False
    for length, expected in ((16, True), (362, True), (512, None)):  # of any batch
        assert limits.hold_of(8, None, length, length) is expected
    assert limits.hold(8, tf.constant(4096), 362, 362) is True
    assert limits.hold_of(8, 1, None, 16) is None
