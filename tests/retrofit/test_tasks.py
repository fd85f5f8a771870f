"""KerasHub's tasks under a rule, and copies of what they hold."""

import gc

import keras
import numpy as np
import pytest
from backbone_calls import randomised
from contract import numpy
from tolerance import assert_close

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
BACKEND = keras.backend.backend()
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
TEXT = SIZES | {"vocabulary_size": 30, "max_sequence_length": 16, "dropout": 0.0}
BY_SEGMENT = hm.PerHead({0: hm.SameSegment("sentence_ids")})


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


def test_a_classifier_on_a_masked_backbone_fits_saves_and_loads(tmp_path):
    backbone = hm.apply_head_masks(bert(), BY_SEGMENT, add_inputs=True)
    task = keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=2)
    assert "sentence_ids" in task.input
    given = features(sentence_ids=SENTENCES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    eagerly = BACKEND == "jax"  # whose compiler takes longer than these steps
    task.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eagerly, jit_compile=False)
    losses = task.fit(given, np.array([0, 1]), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert set(hm.mask_specs(task.backbone).values()) == {BY_SEGMENT}
    task.save(tmp_path / "task.keras")
    again = keras.saving.load_model(tmp_path / "task.keras", compile=False)
    np.testing.assert_array_equal(numpy(again(given)), numpy(task(given)))
    moved = given | {"sentence_ids": SENTENCES[:, ::-1].copy()}
    assert abs(numpy(again(moved)) - numpy(again(given))).max() > 1e-5


def test_the_backbone_of_a_masked_task_obeys(tmp_path):
    """Alone, and in a task from a file."""
    task, rule, given = (
        keras_hub.models.BertTextClassifier(bert(), 2),
        hm.SameSentence(9),
        features(),
    )
    wanted = numpy(hm.apply_head_masks(task.backbone, rule)(given)["sequence_output"])
    assert abs(numpy(task.backbone(given)["sequence_output"]) - wanted).max() > 1e-3
    masked = hm.apply_head_masks(task, rule)
    masked.save(tmp_path / "task.keras")
    for one in (masked, keras.saving.load_model(tmp_path / "task.keras", compile=False)):
        assert_close(numpy(one.backbone(given)["sequence_output"]), wanted, depth=3)


def test_a_preset_is_refused_with_the_way_out(tmp_path):
    masked = hm.apply_head_masks(bert(), hm.Chunk(4))
    task = hm.apply_head_masks(keras_hub.models.BertTextClassifier(bert(), 2), hm.Chunk(4))
    of_masked = keras_hub.models.BertTextClassifier(masked, 2)  # which knows nothing of rules
    for model in (masked, task, task.backbone, of_masked):
        with pytest.raises(NotImplementedError, match=r"`hm.unmasked\(model\)` as a preset"):
            model.save_to_preset(str(tmp_path / "refused"))
    preset = str(tmp_path / "preset")
    hm.unmasked(masked).save_to_preset(preset)
    stock = keras_hub.models.TextClassifier.from_preset(preset, num_classes=2, preprocessor=None)
    assert type(stock) is keras_hub.models.BertTextClassifier  # not the class of `task`
    again = keras_hub.models.BertBackbone.from_preset(preset)
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
    given = {name: x for name, x in features().items() if name in task.input}
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
            copy.fit(given, given["token_ids"], verbose=0)
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
    rules = hm.Full(), hm.PerHead({0: hm.Chunk(4)})
    masked, outputs = [hm.apply_head_masks(bert(), rule) for rule in rules], []
    for model in (bert(), *masked):
        model.quantize("int8")
        outputs.append(numpy(model(features())["sequence_output"]))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    assert abs(outputs[2] - outputs[0]).max() > 1e-2
    masked[1].save(tmp_path / "int8.keras")
    again = keras.saving.load_model(tmp_path / "int8.keras")
    assert again.transformer_layers[0]._self_attention_layer.query_dense.quantization_mode == "int8"
    np.testing.assert_array_equal(numpy(again(features())["sequence_output"]), outputs[2])


# --- State that no config has ---------------------------------------------------------------------


def tokenizer():
    pytest.importorskip("tensorflow_text")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc."]
    return keras_hub.models.BertTokenizer(words)


def test_a_copy_of_a_task_that_has_seen_text_has_all_of_its_state():
    """A packer is made by the first text: then the layers of task and copy are not as many."""
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer(), sequence_length=12)
    task = keras_hub.models.BertTextClassifier(bert(), num_classes=2, preprocessor=preprocessor)
    texts = ["a b . c .", "c a c . a b"]
    given = preprocessor(texts)
    task.backbone.enable_lora(2)
    task.get_layer("logits").trainable = False
    before = numpy(task(given))
    trained = [x.path for x in task.trainable_weights]  # adapters and biases, not what they adapt
    assert not any(path.endswith("query/kernel") for path in trained)
    for model in (hm.apply_head_masks(task, hm.Full()), hm.unmasked(task)):
        np.testing.assert_array_equal(numpy(model(model.preprocessor(texts))), before)
        assert [x.path for x in model.trainable_weights] == trained


def test_state_that_a_copy_has_no_layer_for_is_an_error():
    class Reads(keras.layers.Layer):
        def __init__(self, words=None, **kwargs):
            super().__init__(**kwargs)
            self.words = words

        def get_config(self):
            return {}  # which lacks the words

        def call(self, x):
            return x

    x = keras.Input((None, 8))
    y = Reads(tokenizer())(x)
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(y, y))
    lacks = r"is not possible: .*'layers/\d+/words' \(BertTokenizer\).*copy=False"
    with pytest.raises(ValueError, match=lacks):
        hm.apply_head_masks(model, hm.Full(), ignore="reads")
