"""KerasHub's tasks under a rule: classifiers, generation with a cache, encoder and decoder."""

import gc

import keras
import numpy as np
import pytest
from backbone_calls import randomised
from contract import numpy
from greedy import GIVEN, PROMPT, without_cache
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.frame import opened

keras_hub = pytest.importorskip("keras_hub")
BACKEND = keras.backend.backend()
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
TEXT = SIZES | {"vocabulary_size": 30, "max_sequence_length": 16, "dropout": 0.0}
BY_SEGMENT = hm.PerHead({0: hm.SameSegment("sentence_ids")})
LABELS = np.array([0, 1], "int32")


def bert():
    keras.utils.set_random_seed(0)
    return randomised(keras_hub.models.BertBackbone(**TEXT | {"num_layers": 1}), 0.3)


def features(**more):
    rng = np.random.default_rng(0)
    return {
        "token_ids": rng.integers(2, 28, (2, 8)).astype("int32"),
        "segment_ids": np.zeros((2, 8), "int32"),
        "padding_mask": np.array([[1] * 8, [1] * 6 + [0] * 2], "int32"),
    } | more


SENTENCES = np.array([[0, 0, 0, 1, 1, 1, 2, 2]] * 2, "int32")


def fitted(model, given):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    eagerly = BACKEND == "jax"  # whose compiler takes longer than these steps
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eagerly, jit_compile=False)
    history = model.fit(given, LABELS, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    return history


def test_a_classifier_on_a_masked_backbone_fits_saves_and_loads(tmp_path):
    backbone = hm.apply_head_masks(bert(), BY_SEGMENT, add_inputs=True)
    task = keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=2)
    assert "sentence_ids" in task.input
    given = features(sentence_ids=SENTENCES)
    losses = fitted(task, given)
    assert losses[-1] < losses[0]
    assert set(hm.mask_specs(task.backbone).values()) == {BY_SEGMENT}
    task.save(tmp_path / "task.keras")
    again = keras.saving.load_model(tmp_path / "task.keras", compile=False)
    np.testing.assert_array_equal(numpy(again(given)), numpy(task(given)))
    moved = given | {"sentence_ids": SENTENCES[:, ::-1].copy()}
    assert abs(numpy(again(moved)) - numpy(again(given))).max() > 1e-5


def test_a_preset_is_refused_with_the_way_out(tmp_path):
    masked = hm.apply_head_masks(bert(), hm.Chunk(4))
    task = hm.apply_head_masks(keras_hub.models.BertTextClassifier(bert(), 2), hm.Chunk(4))
    of_masked = keras_hub.models.BertTextClassifier(masked, 2)  # which knows nothing of rules
    for model in (masked, task, task.backbone, of_masked):
        with pytest.raises(NotImplementedError, match=r"`hm.unmasked\(model\)` as a preset"):
            model.save_to_preset(str(tmp_path / "refused"))
    hm.unmasked(masked).save_to_preset(str(tmp_path / "preset"))
    again = keras_hub.models.BertBackbone.from_preset(str(tmp_path / "preset"))
    out = hm.apply_head_masks(again, hm.Full())(features())["sequence_output"]
    np.testing.assert_array_equal(numpy(out), numpy(bert()(features())["sequence_output"]))


def test_a_copy_of_a_task_is_not_compiled():
    """KerasHub's tasks compile themselves, by defaults, when they are made."""

    def gpt2(**kwargs):
        backbone = keras_hub.models.GPT2Backbone(**TEXT)
        return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None, **kwargs)

    task = gpt2()
    task.compile("sgd", "mse", sampler="greedy", run_eagerly=True)
    optimizer, sampler = task.optimizer, task.sampler
    given = {"token_ids": PROMPT, "padding_mask": GIVEN}
    masked = hm.apply_head_masks(task, hm.Window(after=0))
    for copy in (
        masked,
        hm.unmasked(masked),
        hm.apply_head_masks(masked, hm.Full(), existing="and"),
    ):
        assert not copy.compiled
        assert not hasattr(copy, "optimizer")
        assert copy.sampler is sampler
        with pytest.raises(ValueError, match=r"You must call `compile\(\)` before"):
            copy.fit(given, PROMPT, verbose=0)
    assert (task.compiled, task.optimizer, task.sampler) == (True, optimizer, sampler)
    task.generate_function = "compiled without the rule"
    hm.apply_head_masks(task, hm.Window(after=0), copy=False)
    assert (task.compiled, task.optimizer, task.sampler) == (True, optimizer, sampler)
    assert task.generate_function is None
    never = gpt2(compile=False)
    for one in (never, hm.apply_head_masks(never, hm.Window(after=0))):
        with pytest.raises(AttributeError, match="no attribute 'generate_function'"):
            one.generate(given, stop_token_ids=None)


@pytest.fixture
def heap_at_rest():
    """Keras collects garbage at each weight that is replaced: let it look at the test's own."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
def test_int8(tmp_path, heap_at_rest):
    stock, full, rule = (
        bert(),
        hm.apply_head_masks(bert(), hm.Full()),
        hm.apply_head_masks(bert(), hm.PerHead({0: hm.Chunk(4)})),
    )
    outputs = []
    for model in (stock, full, rule):
        model.quantize("int8")
        outputs.append(numpy(model(features())["sequence_output"]))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    assert abs(outputs[2] - outputs[0]).max() > 1e-2
    rule.save(tmp_path / "int8.keras")
    again = keras.saving.load_model(tmp_path / "int8.keras")
    assert again.transformer_layers[0]._self_attention_layer.query_dense.quantization_mode == "int8"
    np.testing.assert_array_equal(numpy(again(features())["sequence_output"]), outputs[2])


# --- Generation -----------------------------------------------------------------------------------

POSITIONS = hm.PerHead({0: hm.Window(before=1), 1: hm.Window(before=2, step=2) | hm.Keys(0, 1)})


def causal_lm(name):
    backbone, task = (getattr(keras_hub.models, f"{name}{x}") for x in ("Backbone", "CausalLM"))
    return task(backbone=randomised(backbone(**TEXT), 0.3), preprocessor=None)


def generated(task):
    task.compile(sampler="greedy", run_eagerly=True)
    given = {"token_ids": PROMPT.copy(), "padding_mask": GIVEN.copy()}
    return task.generate(given, stop_token_ids=None)["token_ids"]


def test_a_task_on_a_masked_backbone_generates_only_if_it_has_the_rule():
    """KerasHub's cache calls the layers of the backbone, not the backbone."""
    stock = causal_lm("GPT2")
    backbone = hm.apply_head_masks(stock.backbone, POSITIONS)
    task = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    with pytest.raises(ValueError, match="called outside of the masked model 'gpt2_backbone"):
        generated(task)
    masked = hm.apply_head_masks(task, hm.Full(), existing="and")
    np.testing.assert_array_equal(generated(masked), without_cache(task))
    assert (without_cache(task) != without_cache(stock)).any()


@pytest.mark.long
def test_scores_are_the_logits_of_the_whole_forward():
    """KerasHub's `score()` calls the layers one by one, without the model's inputs."""
    stock, ids = causal_lm("GPT2"), np.where(GIVEN, PROMPT, 9)
    given = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    by_ids = hm.apply_head_masks(stock, hm.PerHead({0: hm.SameSentence(5), 1: hm.Window(1, 0)}))
    logits = numpy(by_ids(given))
    assert abs(logits - numpy(stock(given))).max() > 1e-3
    assert_close(numpy(by_ids.score(ids)), logits, depth=6)
    assert_close(numpy(by_ids.score(ids, given["padding_mask"])), logits, depth=6)
    other = hm.apply_head_masks(stock, hm.SameSegment("sentence_ids"), add_inputs=True)
    with pytest.raises(
        ValueError, match=r"read \['sentence_ids'\], and `score\(\)` takes .*model\("
    ):
        other.score(ids)


# --- Encoder and decoder --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bart():
    return randomised(keras_hub.models.BartBackbone(**TEXT), 0.3)


def both_sides(**more):
    rng = np.random.default_rng(1)
    return {
        "encoder_token_ids": rng.integers(2, 28, (2, 8)).astype("int32"),
        "encoder_padding_mask": np.ones((2, 8), "int32"),
        "decoder_token_ids": rng.integers(2, 28, (2, 5)).astype("int32"),
        "decoder_padding_mask": np.ones((2, 5), "int32"),
    } | more


# --- Encoder and decoder generate -----------------------------------------------------------------

IN_EACH = {
    "encoder": hm.PerHead({0: hm.Window(1, 1)}),
    "decoder.*/self": hm.PerHead({0: hm.Window(before=1), 1: hm.Keys(0, 2) | hm.Window(0, 0)}),
    # By the place in the translation: with another offset other keys are seen.
    "cross": hm.PerHead({0: hm.Window(1, 1)}, default=hm.Queries(3) | hm.Keys(0, 3)),
}


def translator(bart):
    return keras_hub.models.BartSeq2SeqLM(backbone=bart, preprocessor=None)


def translated(task, run_eagerly=True):
    task.compile(sampler="greedy", run_eagerly=run_eagerly)
    given = both_sides(decoder_token_ids=PROMPT[:, :8], decoder_padding_mask=GIVEN[:, :8])
    return task.generate(given, stop_token_ids=None)["decoder_token_ids"]


def translated_without_cache(task):
    ids = PROMPT[:, :8].copy()
    for position in range(GIVEN.sum(1).min(), ids.shape[1]):
        given = both_sides(decoder_token_ids=ids, decoder_padding_mask=np.ones_like(ids))
        best = numpy(task(given))[:, position - 1].argmax(-1)
        ids[:, position] = np.where(GIVEN[:, position], ids[:, position], best)
    return ids


@pytest.mark.skipif(
    BACKEND == "jax", reason="its compiler takes long; the steps are compared below"
)
def test_translation_is_the_uncached_forward(bart):
    run_eagerly = BACKEND != "tensorflow"  # compiled on one backend: it takes its time
    stock = translator(bart)
    masked = hm.apply_head_masks(stock, IN_EACH)
    assert isinstance(masked, keras_hub.models.BartSeq2SeqLM)
    np.testing.assert_array_equal(translated(masked, run_eagerly), translated_without_cache(masked))
    assert (translated_without_cache(masked) != translated_without_cache(stock)).any()


@pytest.mark.long
def test_a_step_of_a_translation_needs_its_place(bart):
    masked, given = hm.apply_head_masks(translator(bart), IN_EACH), both_sides()
    inputs = (given[f"encoder_{x}"] for x in ("token_ids", "padding_mask"))
    layer = masked.backbone.decoder_transformer_layers[0]
    with opened({masked: {}}):
        _, encoded, own, cross = masked._build_cache(*inputs, given["decoder_token_ids"])
        caches = {"self_attention_cache": own[:, 0], "cross_attention_cache": cross[:, 0]}
        with pytest.raises(ValueError, match="needs the place of the first token: pass `self_att"):
            layer(encoded[:, :1], encoder_sequence=encoded, **caches)


@pytest.mark.long
def test_translation_that_could_not_hold_the_rule_is_refused(bart):
    by_ids = hm.SameSentence(29, input="encoder_token_ids")
    with pytest.raises(ValueError, match=r"reads \['encoder_token_ids'\].*KerasHub's cache"):
        translated(hm.apply_head_masks(translator(bart), by_ids, layers="encoder"))
