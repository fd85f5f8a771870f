"""KerasHub's encoders with decoders whose attention is no class of Keras, under rules.

The oracle is a family's own code with another softmax: one in NumPy, under the mask of each query
head. The two sequences have different lengths, so the logits of each kind have their own shape.
"""

import copy

import keras
import numpy as np
import pytest
from backbone_calls import drawn_by_numpy, randomised
from contract import numpy
from decoders import ENCODER_DECODERS, T5_GEMMA
from own_attention import RULE, by_oracle, drawn, of_rule
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit import observe
from keras_headmask.retrofit.find import Found

keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)  # (or made for another Keras)
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask information.*")  # T5's own
TEXT, ANSWER = 8, 6  # tokens
OF_CROSS = hm.PerHead({1: hm.Window(before=1, after=2), 2: hm.Keys(0, stop=3), 3: hm.Nothing()})


ALL = np.ones((4, ANSWER, TEXT), bool)
SELF = {(TEXT, TEXT): of_rule(TEXT), (ANSWER, ANSWER): of_rule(ANSWER), (ANSWER, TEXT): ALL}
CROSS = {(n, n): np.ones((4, n, n), bool) for n in (TEXT, ANSWER)} | {
    (ANSWER, TEXT): drawn(
        ANSWER,
        TEXT,
        lambda i, j: True,
        lambda i, j: i - 1 <= j <= i + 2,
        lambda i, j: j < 3,
        lambda i, j: False,
    )
}


@pytest.fixture(scope="module", params=ENCODER_DECODERS, ids=str)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def stock(family):
    keras.utils.set_random_seed(0)
    return randomised(getattr(keras_hub.models, family.backbone)(**family.arguments), 0.3)


@pytest.fixture(scope="module")
def masked(stock):
    return hm.apply_head_masks(stock, RULE)


def data():
    rng = np.random.default_rng(1)
    inputs = {}
    for part, length, padded in (("encoder", TEXT, 2), ("decoder", ANSWER, 1)):
        mask = np.ones((2, length), "int32")
        mask[1, length - padded :] = 0
        inputs[f"{part}_token_ids"] = rng.integers(2, 30, (2, length)).astype("int32")
        inputs[f"{part}_padding_mask"] = mask
    return inputs


def outputs(model, inputs=None):
    return {k: numpy(x) for k, x in model(data() if inputs is None else inputs).items()}


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_rule_is_the_familys_own_attention_under_a_mask(stock, masked, kind, monkeypatch):
    if kind == "cross":
        masked = hm.apply_head_masks(stock, OF_CROSS, layers="cross")
    wanted = by_oracle(monkeypatch, stock, data(), SELF if kind == "self" else CROSS)
    given = outputs(masked)
    for name, output in wanted.items():
        assert_close(given[name], output, depth=12)
        changes = abs(output - outputs(stock)[name]).max() > 1e-2
        assert changes == (kind == "self" or "decoder" in name)


def test_a_rule_in_one_layer_alone(stock, monkeypatch):
    """What one layer hands to the next, T5's bias, holds nothing of its rule."""
    first = hm.apply_head_masks(stock, RULE, layers=0)
    wanted = by_oracle(monkeypatch, stock, data(), SELF, first_alone=True)
    for name, output in outputs(first).items():
        assert_close(output, wanted[name], depth=12)


@pytest.mark.long
def test_the_encoder_of_t5gemma_2_obeys(monkeypatch):
    """Its decoder is refused (see `decoders.REFUSED`) and stays as it is."""
    stock = randomised(keras_hub.models.T5Gemma2Backbone(**T5_GEMMA), 0.3)
    wanted = by_oracle(monkeypatch, stock, data(), SELF)
    masked = hm.apply_head_masks(stock, RULE, layers="encoder")
    for name, output in outputs(masked).items():
        assert_close(output, wanted[name], depth=12)
        assert abs(output - outputs(stock)[name]).max() > 1e-2


@pytest.mark.long
def test_what_an_observer_sees(stock, masked):
    """Probabilities of each head: 0 where hidden, of sum 1 or 0; with a rule and without."""
    hidden = ~data()["encoder_padding_mask"].astype(bool)[:, None, None, :]
    for model in (masked, stock):
        for number, length in ((1, TEXT), (3, ANSWER)):
            seen = observe.observe(Found(model), data(), number)
            assert seen.probabilities.shape == (2, 4, length, length)
            assert not seen.probabilities[~seen.allowed].any()
            if model is masked:
                assert not (seen.allowed & ~SELF[length, length]).any()
            if length == TEXT:
                assert not (seen.allowed & hidden).any()
            total = seen.probabilities[seen.allowed.any(-1)].sum(-1)
            np.testing.assert_allclose(total, 1, rtol=1e-5)


@pytest.mark.long
def test_a_copy_a_file_and_training(stock, masked, tmp_path):
    twin = copy.deepcopy(masked)
    masked.save(tmp_path / "masked.keras")
    loaded = keras.saving.load_model(tmp_path / "masked.keras")
    bare = hm.unmasked(masked)
    for name, output in outputs(masked).items():
        np.testing.assert_array_equal(outputs(twin)[name], output)
        np.testing.assert_array_equal(outputs(loaded)[name], output)
        np.testing.assert_array_equal(outputs(bare)[name], outputs(stock)[name])
    twin.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True, jit_compile=False)
    before = [numpy(w) for w in twin.trainable_weights]
    targets = {k: np.zeros_like(x) for k, x in outputs(twin).items()}
    twin.train_on_batch(data(), targets)
    after = [numpy(w) for w in twin.trainable_weights]
    assert all(np.isfinite(w).all() for w in after)
    changed = sum((a != b).any() for a, b in zip(after, before, strict=True))
    assert changed > len(after) / 2


def task_of(family, stock):
    backbone = drawn_by_numpy(copy.deepcopy(stock), 0.3)
    table = getattr(backbone, "decoder_token_embedding", backbone.token_embedding).embeddings
    table.assign(0.1 * table)  # else tied embeddings repeat the last token
    name = family.backbone.replace("Backbone", "Seq2SeqLM")
    return getattr(keras_hub.models, name)(backbone=backbone, preprocessor=None)


@pytest.mark.parametrize("rule", ["all", "one layer"])
@pytest.mark.long  # (20 seconds; `test_tasks.py` does it for Bart every day)
def test_generation_is_the_uncached_forward(family, stock, rule):
    """Rules on positions hold with the cache of KerasHub, in self- and in cross-attention."""
    task = task_of(family, stock)
    if rule == "all":
        masked = hm.apply_head_masks(task, RULE)
        masked = hm.apply_head_masks(masked, OF_CROSS, layers="cross")
    else:
        masked = hm.apply_head_masks(task, RULE, layers=2)
    given = data()
    given["encoder_padding_mask"][:] = given["decoder_padding_mask"][:] = 1
    given["decoder_padding_mask"][:, 2:] = 0
    given["decoder_token_ids"][:, 2:] = 0
    tokens = []
    for model in (masked, task):
        ids = given["decoder_token_ids"].copy()
        for place in range(2, ANSWER):
            known = given | {"decoder_token_ids": ids, "decoder_padding_mask": np.ones_like(ids)}
            ids[:, place] = numpy(model(known))[:, place - 1].argmax(-1)
        tokens.append(ids)
    masked.compile(sampler="greedy", run_eagerly=True, jit_compile=False)
    got = masked.generate(given, stop_token_ids=None)["decoder_token_ids"]
    np.testing.assert_array_equal(got, tokens[0])
    assert rule != "all" or (got != tokens[1]).any()
