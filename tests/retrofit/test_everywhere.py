"""A BERT under "every head in its sentence": whatever is made of it obeys.

One token is changed, and no output of another sentence may change: in the model, in what is built
on it, cut from it, copied, saved, and loaded in a fresh process.
"""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from contract import numpy
from keras import layers

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.tensorflow  # what is built is Keras' own on every backend
STOP, LENGTH = 1012, 10
ROOT = Path(__file__).parents[2]


def given(changed):
    """Two sentences; the last token but one of the second is changed."""
    ids = np.array([[101, 2000, 3000, STOP, 4000, 5000, 6000, 7000, STOP, 102]], "int32")
    ids[0, 6] += 11 * changed
    return {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }


def sequence(outputs):
    outputs = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    return numpy(outputs)


def check(model):
    """The first sentence does not feel the second; that one feels itself."""
    before, after = (sequence(model(given(changed))) for changed in (False, True))
    moved = abs(before - after)[0]
    assert moved[:4].max() < 1e-5 < 1e-3 < moved[4:9].max()


@pytest.fixture(scope="module")
def masked():
    keras.utils.set_random_seed(1)
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}
    stock = keras_hub.models.BertBackbone(9000, **sizes, name="bert")
    for weight in stock.trainable_weights:  # as far apart as those of a trained model
        weight.assign(4 * weight)
    with pytest.raises(AssertionError):
        check(stock)
    return hm.apply_head_masks(stock, hm.SameSentence(STOP))


def with_a_trained_head(masked):
    y = layers.Dense(3)(masked.output["sequence_output"])
    model = keras.Model(masked.input, y)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    model.fit(given(False), np.ones((1, LENGTH, 3), "float32"), epochs=1, verbose=0)
    return model


def around(masked):
    inputs = {x.name: keras.Input((None,), dtype="int32", name=x.name) for x in masked.inputs}
    return keras.Model(inputs, layers.Dense(3)(masked(inputs)["sequence_output"]))


def time_distributed(masked):
    """Over batches of token ids."""
    ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    zeros = ids * 0
    y = masked({"token_ids": ids, "segment_ids": zeros, "padding_mask": zeros + 1})
    one = keras.Model(ids, y["sequence_output"])
    several = keras.Input((1, LENGTH), dtype="int32", name="token_ids")
    y = layers.TimeDistributed(one)(several)
    model = keras.Model(several, y)

    class First(keras.Model):
        def call(self, x):
            return model(x["token_ids"][:, None])[:, 0]

    return First()


def weights_of(model, other):
    other.set_weights(model.get_weights())
    return other


def cloned(model):
    return weights_of(model, keras.models.clone_model(model))


ROUTES = {
    "itself": lambda m: m,
    "a trained head": with_a_trained_head,
    "cut": lambda m: keras.Model(m.input, m.get_layer("transformer_layer_0").output),
    "clone_model": lambda m: cloned(with_a_trained_head(m)),
    "from_config": lambda m: weights_of(m, type(m).from_config(m.get_config())),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "around": around,
}

FRESH = """
import sys
sys.path[:0] = sys.argv[2:]
import pathlib, keras, keras_headmask, keras_hub, test_everywhere
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    print(file.stem)
    test_everywhere.check(keras.saving.load_model(file, compile=False))
"""


@pytest.mark.long  # (`test_never_unmasked` does a part of it every day)
def test_what_is_made_of_a_masked_model_obeys_here_and_in_a_fresh_process(masked, tmp_path):
    for name, route in ROUTES.items():
        model = route(masked)
        check(model)
        model.save(tmp_path / f"{name}.keras")
    folders = [str(ROOT / "tests" / part) for part in ("retrofit", "support")]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path), *folders],
        env=dict(os.environ, PYTHONPATH=str(ROOT), KERAS_BACKEND=keras.backend.backend()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == sorted(ROUTES)


def test_time_distributed(masked):
    check(time_distributed(masked))


def test_a_task_on_it(masked):
    task = keras_hub.models.BertMaskedLM(backbone=masked, preprocessor=None)
    places = {"mask_positions": np.array([[1, 2]], "int32")}
    before, after = (numpy(task(given(changed) | places)) for changed in (False, True))
    assert abs(before - after).max() < 1e-5


def test_the_summary_shows_where_the_inputs_of_the_rule_flow(masked, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # Keras' summary is as wide as the terminal
    lines = []
    masked.summary(print_fn=lambda line, **_: lines.append(line), line_length=200)
    text = "\n".join(lines)
    first, second = (text.index(f"transformer_layer_{i} ") for i in (0, 1))
    assert "HeadMaskInputs" in text
    assert "head_mask_inputs" in text[first:second]


def test_plot_model_shows_where_the_inputs_of_the_rule_flow(masked):
    dot = keras.utils.model_to_dot(masked)
    names = {node.get_name(): node.get_label() for node in dot.get_nodes()}
    edges = {(names[e.get_source()], names[e.get_destination()]) for e in dot.get_edges()}
    readers = [to for start, to in edges if "HeadMaskInputs" in start]
    assert len(readers) == len(hm.mask_specs(masked)) == 2
