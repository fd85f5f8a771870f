"""Subclassed models that hold a rule on ids are saved and loaded whole."""

import warnings

import keras
import pytest
import subclassed_models as subclassed
from fresh import reload_fresh
from subclassed_models import IDS, SHAPES, X

import keras_headmask as hm


@pytest.mark.long
def test_subclassed_models_reload_whole_in_a_fresh_process(tmp_path):
    models = {cls.__name__: (cls(), *given) for cls, given in SHAPES.items()}
    reload_fresh(tmp_path, models, "subclassed_models")


def test_a_model_that_keras_cannot_build_is_not_loaded_in_part(tmp_path):
    model = subclassed.Unbuildable()
    model(X, {"token_ids": IDS})
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' own, of the model
        with pytest.raises(ValueError, match="was not built, so the weights that the file holds"):
            keras.saving.load_model(tmp_path / "model.keras")


def test_a_layer_that_never_was_built_is_copied(tmp_path):
    model = keras.Sequential([hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 1))])
    model.save(tmp_path / "model.keras")
    assert not keras.saving.load_model(tmp_path / "model.keras").built
