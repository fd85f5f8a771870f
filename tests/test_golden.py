"""Files of each format version are read: rules, `.keras`, SavedModels."""

import json
import pathlib
import zipfile

import keras
import numpy as np
import pytest
from contract import numpy
from keras_versions import numbers
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.rules import config

GOLDEN = pathlib.Path(__file__).parents[1] / "saved_models" / "golden"
FORMATS = sorted(GOLDEN.glob("format-*"))
each_format = pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)


def arrays(folder, name):
    with np.load(folder / f"{name}.npz") as file:
        return dict(file)


def configs(folder):
    return json.loads((folder / "rules.json").read_text(encoding="utf-8"))


@each_format
def test_rules_mean_what_they_meant(folder):
    inputs, masks = arrays(folder, "mask_inputs"), arrays(folder, "masks")
    assert masks.keys() == configs(folder).keys()
    for name, of_rule in configs(folder).items():
        spec = hm.MaskSpec.from_config(of_rule)
        read = {key: inputs[key] for key in spec.inputs}
        mask = hm.make_mask(spec, *masks[name].shape[2:], 3, read)
        np.testing.assert_array_equal(numpy(mask), masks[name], err_msg=name)
        assert hm.MaskSpec.from_config(spec.get_config()) == spec
        assert folder != FORMATS[-1] or json.dumps(spec.get_config()) == json.dumps(of_rule)


def test_the_newest_rules_hold_every_kind():
    ours = {k for k, c in config.KINDS.items() if c.__module__.startswith("keras_headmask")}
    written = (FORMATS[-1] / "rules.json").read_text(encoding="utf-8")
    assert [kind for kind in ours if f'"kind": "{kind}"' not in written] == []


@each_format
def test_a_keras_file_loads_and_answers_as_it_did(folder):
    with zipfile.ZipFile(folder / "model.keras") as file:
        written_by = json.loads(file.read("metadata.json"))["keras_version"]
    if numbers(written_by) > numbers(keras.__version__):
        pytest.skip(f"Keras {written_by} wrote it, which no older version need read")
    model = keras.saving.load_model(folder / "model.keras")
    ids = arrays(folder, "mask_inputs")["token_ids"]
    assert_close(numpy(model(ids)), arrays(folder, "outputs")["output_0"])
    assert hm.Window(1, 0) in hm.mask_specs(model).values()


@pytest.mark.tensorflow
@each_format
def test_a_saved_model_loads_and_answers_as_it_did(folder):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder / "saved_model" / "1"))
    ids = arrays(folder, "mask_inputs")["token_ids"]
    got = loaded.signatures["serving_default"](token_ids=ids)["output_0"]
    assert_close(got, arrays(folder, "outputs")["output_0"])
