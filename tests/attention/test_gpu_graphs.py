"""TensorFlow's graphs with the steps of a GPU, run on a CPU."""

import numpy as np
import pytest
from contract import numpy
from tiled_contract import attend, operands
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tuning import Tuning, tuned
from keras_headmask.rules import evaluation

pytestmark = pytest.mark.tensorflow
LENGTH, HEADS = 64, 2
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 6, (1, LENGTH))).astype("int32")
FLAGS = np.isin(np.arange(LENGTH), [0, 40])[None]
CASES = {
    "causal": (hm.recipes.causal(), {}, {}),
    "documents": (hm.SameSegment("ids") & hm.Window(after=0), {"ids": IDS}, {}),
    "flags": (hm.recipes.longformer(2, "flags"), {"flags": FLAGS}, {}),
    "head groups": (hm.PerHead({0: hm.Window(3, 0)}, hm.SameSegment("ids")), {"ids": IDS}, {}),
    "dropout": (hm.recipes.streaming(2, 4), {}, {"dropout": 0.3, "seed": 5}),
}


def traced(case):
    """A function of a graph of unknown lengths, and what to call it with."""
    import tensorflow as tf

    spec, inputs, more = case
    operand = tf.TensorSpec([None, None, HEADS, 3])
    of_inputs = {name: tf.TensorSpec((None, None), x.dtype) for name, x in inputs.items()}

    @tf.function(autograph=False, input_signature=[operand] * 3 + [of_inputs])
    def call(query, key, value, inputs):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            context = attend((query, key, value), spec, inputs, tiled=None, **more)
            loss = tf.reduce_sum(context**2)
        return context, *tape.gradient(loss, [query, key, value])

    with tuned(local_tile=4, wide_tile=4, block=16, most_logits=0):
        call.get_concrete_function()
    return call, (*operands(1, LENGTH, LENGTH, HEADS, value_size=3), inputs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every_day("flags|head groups|dropout")
def test_what_is_computed_for_a_gpu_is_the_same(name, monkeypatch):
    import tensorflow as tf

    from keras_headmask.attention.tensorflow import by_size

    answers = []
    for on_gpu in (0, 1):
        monkeypatch.setattr(by_size, "on_gpu", lambda on_gpu=on_gpu: tf.constant(on_gpu))
        call, given = traced(CASES[name])
        answers.append(call(*given))
    for got, wanted in zip(*answers, strict=True):
        assert_close(numpy(got), numpy(wanted), depth=3)


def test_a_step_of_a_gpu_holds_all_tiles():
    from keras_headmask.attention.tensorflow import plan
    from keras_headmask.attention.tensorflow.graph import on_gpu

    rule, length = hm.Window(64, 0), 4096
    bound = evaluation.bind(rule, None, length, length, batch=2)
    part = Part(rule, tuple(range(8)), bound, 1.0, Tuning())
    of_cpu, of_gpu = (plan.planned(part, where) for where in (on_gpu(), 1))
    assert of_cpu.in_step < len(of_cpu.queries) // 4
    assert of_gpu.in_step == len(of_gpu.queries)
