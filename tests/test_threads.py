"""One masked model, several threads: each call has its own ids, with configs made meanwhile."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
from contract import normal, numpy
from keras import layers

import keras_headmask as hm

THREADS = 3
TOKENS = np.array([[5, 9, 4, 6, 9, 7, 2]] * 2, "int32")
PARTS = [np.random.default_rng(i).integers(0, 3, (2, 7)).astype("int32") for i in range(THREADS)]


@keras.saving.register_keras_serializable("test_threads")
class Waits(layers.Layer):
    """Runs what a test hands it in the midst of a call, or of a config."""

    in_call = in_config = staticmethod(lambda: None)

    def call(self, x):
        Waits.in_call()
        return x * 1.0

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        Waits.in_config()
        return super().get_config()


def model():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    x = layers.MultiHeadAttention(2, 4, name="first")(x, x)
    x = Waits()(x)
    x = layers.MultiHeadAttention(2, 4, name="second")(x, x)
    stock = keras.Model(ids, x)
    stock.get_layer("embedding").set_weights([normal(12, 8)])
    return hm.apply_head_masks(stock, hm.PerHead({0: hm.SameSegment("parts")}), add_inputs=True)


def in_another_thread(task):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(timeout=60)


def test_calls_at_once_have_their_own_inputs(monkeypatch):
    """All threads meet between the two attention layers, each with other ids."""
    masked = model()
    alone = [numpy(masked([TOKENS, parts])) for parts in PARTS]
    assert all(abs(a - b).max() > 1e-3 for a, b in itertools.pairwise(alone))
    meet = threading.Barrier(THREADS)
    monkeypatch.setattr(Waits, "in_call", staticmethod(lambda: meet.wait(timeout=60)))
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(lambda parts: numpy(masked([TOKENS, parts])), PARTS))
    for got, wanted in zip(together, alone, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_model_runs_while_another_thread_makes_its_config(monkeypatch):
    masked = model()
    given = [TOKENS, PARTS[0]]
    alone, config, called = numpy(masked(given)), masked.get_config(), []

    def run():
        called.append(in_another_thread(lambda: numpy(masked(given))))

    monkeypatch.setattr(Waits, "in_config", staticmethod(run))
    assert masked.get_config() == config
    np.testing.assert_array_equal(called[0], alone)


def test_a_config_is_made_while_another_thread_runs_the_model(monkeypatch):
    masked = model()
    given = [TOKENS, PARTS[0]]
    alone, config, made = numpy(masked(given)), masked.get_config(), []

    def make():
        made.append(in_another_thread(masked.get_config))
        in_another_thread(masked.unmasked)
        in_another_thread(lambda: masked.summary_masks(made.append))

    monkeypatch.setattr(Waits, "in_call", staticmethod(make))
    np.testing.assert_array_equal(numpy(masked(given)), alone)
    assert made[0] == config
    assert len(made) == 3
