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


def test_every_format_version_has_its_folder_and_no_file_is_large():
    assert {f.name for f in FORMATS} == {f"format-{n + 1}" for n in range(len(FORMATS))}
    for folder in FORMATS:
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        assert size < 300_000, folder


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


def test_the_newest_rules_hold_every_kind():
    def kinds(value):
        if isinstance(value, dict):
            yield from [value["kind"]] if "kind" in value else []
            for part in value.values():
                yield from kinds(part)
        elif isinstance(value, list):
            for part in value:
                yield from kinds(part)

    ours = {k for k, c in config.KINDS.items() if c.__module__.startswith("keras_headmask")}
    assert set(kinds(configs(FORMATS[-1]))) >= ours


@each_format
def test_a_keras_file_loads_and_answers_as_it_did(folder):
    with zipfile.ZipFile(folder / "model.keras") as file:
        written_by = json.loads(file.read("metadata.json"))["keras_version"]
    if numbers(written_by) > numbers(keras.__version__):
        pytest.skip(f"Keras {written_by} wrote it, which no older version need read")
    model = keras.saving.load_model(folder / "model.keras")
    ids = arrays(folder, "mask_inputs")["token_ids"]
    wanted = arrays(folder, "outputs")["output_0"]
    assert_close(numpy(model(ids)), wanted)
    assert hm.Window(1, 0) in hm.mask_specs(model).values()


@pytest.mark.tensorflow
@each_format
def test_a_saved_model_loads_and_answers_as_it_did(folder):
    import tensorflow as tf

    path = folder / "saved_model" / "1"
    loaded = tf.saved_model.load(str(path))
    ids = arrays(folder, "mask_inputs")["token_ids"]
    wanted = arrays(folder, "outputs")["output_0"]
    got = loaded.signatures["serving_default"](token_ids=ids)["output_0"]
    assert_close(got, wanted)


@pytest.mark.tensorflow
def test_golden_files_are_never_written_again(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # which the script sets
    import write_golden

    before = {p: p.stat().st_mtime_ns for p in GOLDEN.rglob("*")}
    with pytest.raises(SystemExit, match="never written again"):
        write_golden.main()
    assert {p: p.stat().st_mtime_ns for p in GOLDEN.rglob("*")} == before
