"""One masked model, several threads: each call has its own ids, with configs made meanwhile."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import scopes

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
    """Attention of each kind: ours with a rule, stock under a rule, and stock without."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    ours = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 0), name="ours")
    x = layers.Add()([x, ours(x)])
    for name in ("first", "second", "third"):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4, name=name)(x, x)])
        x = Waits()(x) if name == "first" else x
    stock = keras.Model(ids, x)
    for weight in stock.weights:
        weight.assign(normal(*weight.shape))
    rule = hm.PerHead({0: hm.SameSegment("parts")})
    return hm.apply_head_masks(stock, rule, layers="first|third", add_inputs=True)


def in_another_thread(task):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(timeout=60)


def test_calls_at_once_have_their_own_inputs(monkeypatch):
    """All threads meet between two attention layers with a rule, each with other ids."""
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
        # (To find attention, layers run once more, for shapes.)
        monkeypatch.setattr(Waits, "in_call", staticmethod(lambda: None))
        made.append(in_another_thread(masked.get_config))
        in_another_thread(lambda: hm.unmasked(masked))
        in_another_thread(lambda: hm.summary_masks(masked, made.append))

    monkeypatch.setattr(Waits, "in_call", staticmethod(make))
    np.testing.assert_array_equal(numpy(masked(given)), alone)
    assert made[0] == config
    assert len(made) == 5  # and a line of each layer


# --- Looking at a model while others call it -----------------------------------------------------


def drawn(masked, _folder):
    inputs = [TOKENS, PARTS[0]]
    for layer in ("ours", "first", "second", "third"):
        figure = hm.plot_attention(masked, inputs, layer=layer)
        title = " ".join(figure.get_suptitle().split())
        has_rule = layer != "second"
        assert ("attention outside the mask: 0 pairs" in title) == has_rule


LOOKS = {
    "lint": lambda masked, _: hm.lint(masked),
    "plot": drawn,
    "summary": lambda masked, _: hm.summary_masks(masked, lambda line: None),
}
if keras.backend.backend() == "tensorflow":
    LOOKS["export"] = lambda masked, to: hm.export_saved_model(masked, to, check=False)


def state(masked):
    """What each layer object holds of its own."""
    return [sorted(vars(layer)) for layer in masked._flatten_layers()]


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_changes_nothing_for_other_threads(look, tmp_path, monkeypatch):
    """Whenever the look runs the model, another thread runs it too."""
    masked = model()
    given, me = [TOKENS, PARTS[0]], threading.get_ident()
    alone, before, answers = numpy(masked(given)), state(masked), []
    assert abs(numpy(hm.unmasked(masked)(TOKENS)) - alone).max() > 1e-2

    def beside():
        if threading.get_ident() == me:
            answers.append(in_another_thread(lambda: numpy(masked(given))))

    monkeypatch.setattr(Waits, "in_call", staticmethod(beside))
    LOOKS[look](masked, tmp_path)
    numpy(masked(given))  # (a summary need not run it)
    for answer in answers:
        assert_close(answer, alone, depth=3)
    assert answers
    assert state(masked) == before


def test_a_model_is_filed_without_what_stands_on_it_for_a_look():
    masked = model()
    config = masked.get_config()
    with scopes.overriding(masked.get_layer("first"), "call", lambda usual, *args: usual(*args)):
        assert masked.get_config() == config
