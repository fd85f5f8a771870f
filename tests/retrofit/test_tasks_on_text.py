"""KerasHub's tasks on text under a rule, and the backbones inside of them."""

import keras
import numpy as np
import pytest
from backbone_calls import randomised
from contract import numpy
from tolerance import assert_close

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
pytest.importorskip("tensorflow_text")
models = keras_hub.models
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8, "dropout": 0.0}
LENGTH = 12
TEXTS = np.array(["a b . c .", "c a c . a b"])
_WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "."]
_SPACED = [f"Ġ{x}" for x in "abc."]  # the byte of a space, as byte pairs have it
_MERGES = [f"Ġ {x}" for x in "abc."]
FULL_STOP = {"Bert": 8, "GPT2": 9}


def tokenizer_of(name):
    if name == "GPT2":
        tokens = ["<|endoftext|>", *"abc.", "Ġ", *_SPACED]
        return models.GPT2Tokenizer(dict(zip(tokens, range(10), strict=True)), _MERGES)
    return getattr(models, f"{name}Tokenizer")(_WORD_PIECES)


def task_of(name):
    sizes = SIZES | {"vocabulary_size": 16, "max_sequence_length": LENGTH}
    backbone = randomised(getattr(models, f"{name}Backbone")(**sizes), 0.3)
    kind = "CausalLM" if name == "GPT2" else "TextClassifier"
    task = getattr(models, f"{name}{kind}")
    preprocessor = task.preprocessor_cls(tokenizer_of(name), sequence_length=LENGTH)
    if name == "GPT2":
        return task(backbone, preprocessor=preprocessor)
    more = {"num_classes": 2, "preprocessor": preprocessor, "dropout": 0.0}
    return randomised(task(backbone, **more), 0.3)


def rule_of(name):
    """By token ids, so that what a layer obeys is an edge of the task's graph."""
    return hm.PerHead({0: hm.SameSentence(FULL_STOP[name])}, default=hm.Window(3, 3))


def tokens(task):
    """What the task makes of the texts before its graph, as a client sends it."""
    made = task.preprocessor(list(TEXTS))
    return made[0] if isinstance(made, tuple) else made  # a causal one makes labels, too


def test_a_copy_of_a_task_that_has_seen_text_has_all_of_its_state():
    """A packer is made by the first text: then the layers of task and copy are not as many."""
    task = task_of("Bert")
    task.backbone.enable_lora(2)
    task.get_layer("logits").trainable = False
    before = numpy(task(tokens(task)))
    trained = [x.path for x in task.trainable_weights]  # adapters and biases, not what they adapt
    assert not any(path.endswith("query/kernel") for path in trained)
    for model in (hm.apply_head_masks(task, hm.Full()), hm.unmasked(task)):
        np.testing.assert_array_equal(numpy(model(tokens(model))), before)
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
    y = Reads(tokenizer_of("Bert"))(x)
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(y, y))
    lacks = r"is not possible: .*'layers/\d+/words' \(BertTokenizer\).*copy=False"
    with pytest.raises(ValueError, match=lacks):
        hm.apply_head_masks(model, hm.Full(), ignore="reads")


# --- The backbone of a masked task ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_the_backbone_of_a_masked_task_obeys(name, tmp_path):
    task, rule = task_of(name), rule_of(name)
    given = {k: numpy(x) for k, x in tokens(task).items()}
    alone = hm.apply_head_masks(task.backbone, rule)
    wanted, stock = (keras.tree.map_structure(numpy, x(given)) for x in (alone, task.backbone))
    task = hm.apply_head_masks(task, rule)
    task.save(tmp_path / "task.keras")
    again = keras.saving.load_model(tmp_path / "task.keras", compile=False)
    inner = keras.Model(task.backbone.input, keras.tree.flatten(task.backbone.output)[0])
    for refused in (lambda: inner(given), lambda: task.backbone.save(tmp_path / "backbone.keras")):
        with pytest.raises(ValueError, match=f"of the masked model '{task.name}'.*Mask last"):
            refused()
    for backbone in (task.backbone, again.backbone):
        built_on_it = keras.Model(backbone.input, backbone(backbone.input))
        for made in (backbone(given), backbone.predict(given, verbose=0), built_on_it(given)):
            close(made, wanted)
    with pytest.raises(AssertionError):
        close(stock, wanted)


def close(made, wanted):
    keras.tree.map_structure(lambda x, y: assert_close(numpy(x), y, depth=3), made, wanted)
