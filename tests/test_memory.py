"""A model that is gone leaves nothing: no weights, no traced graphs, no registered gradients."""

import contextlib
import functools
import gc
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from export_models import both, inputs_of_both
from tiled_contract import tiles

import keras_headmask as hm

BACKEND = keras.backend.backend()
LENGTHS = (5, 9, 7)  # the second is traced as unknown, and serves the third


def predict(model):
    for length in LENGTHS:
        model.predict(inputs_of_both(2, length), verbose=0)


def fit(model):
    model.compile("sgd", "mse", jit_compile=False)
    for length in LENGTHS:
        targets = {"sequence": np.zeros((2, length, 8)), "first": np.zeros((2, 8))}
        model.fit(inputs_of_both(2, length), targets, batch_size=2, verbose=0)


def export(model):
    with tempfile.TemporaryDirectory() as folder:
        hm.export_saved_model(model, folder, check=False)


tiled = functools.partial(both, tiled=None)
ROUTES = [
    pytest.param(tiled, fit, tiles, id="fit, tiles of head groups"),
    pytest.param(both, predict, contextlib.nullcontext, id="predict"),
    pytest.param(both, export, contextlib.nullcontext, id="export", marks=pytest.mark.tensorflow),
]


def memory_of(weight):
    """What holds the numbers of a weight, and lives as long as they do."""
    return weight.value.handle if BACKEND == "tensorflow" else weight.value


def kept():
    """What TensorFlow holds of what was traced: gradients by name, graphs, functions."""
    gc.collect()
    if BACKEND != "tensorflow":
        return ()
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.func_graph import FuncGraph

    graphs = sum(isinstance(x, FuncGraph) for x in gc.get_objects())
    functions = len(context.context().list_function_names())
    return len(ops.gradient_registry.list()), graphs, functions


def gone(make, use):
    """What is alive of a model after its end: (its weights, what Keras and TensorFlow hold)."""
    model = make()
    use(model)
    weights = [weakref.ref(memory_of(weight)) for weight in model.weights]
    assert weights
    del model
    keras.backend.clear_session()
    left = kept()
    return sum(weight() is not None for weight in weights), left


@pytest.mark.parametrize(("make", "use", "scope"), ROUTES)
def test_a_model_that_is_gone_leaves_nothing(make, use, scope):
    with scope():
        weights, before = gone(make, use)  # and what is made once
        assert weights == 0
        assert gone(make, use) == (0, before)


@pytest.mark.long
@pytest.mark.tensorflow  # (elsewhere `kept` sees nothing, and JAX compiles for each length)
def test_a_model_that_lives_long_does_not_grow():
    """With lengths, batches and threads."""
    model = both(tiled=None)

    def at(size):
        given = inputs_of_both(1 + size % 3, 3 + size)
        model(given)
        model.predict(given, verbose=0, batch_size=1 + size % 4)

    def all_of(sizes):
        for size in sizes:
            at(size)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda size: model(inputs_of_both(2, 3 + size)), sizes))
        return kept()

    before = all_of(range(12))  # (each number of batches has an operation of TensorFlow's own)
    assert all_of(range(12, 20)) == before
