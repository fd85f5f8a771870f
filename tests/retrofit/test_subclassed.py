"""Subclassed models that hold a rule on ids are saved and loaded whole."""

import warnings

import keras
import pytest
import subclassed_models as subclassed
from contract import numpy
from fresh import reload_fresh
from keras import layers
from subclassed_models import IDS, SHAPES, X

import keras_headmask as hm


@pytest.mark.long
def test_subclassed_models_reload_whole_in_a_fresh_process(tmp_path):
    models = {cls.__name__: (cls(), *given) for cls, given in SHAPES.items()}
    reload_fresh(tmp_path, models, "subclassed_models")


@pytest.mark.parametrize("cls", [subclassed.OfAList, subclassed.Nested])
def test_they_refuse_floats_when_they_run(cls):
    given = SHAPES[cls][0]
    floats = keras.tree.map_structure(lambda value: value.astype("float32"), given)
    with pytest.raises(TypeError, match="must be integer or boolean"):
        cls()(floats)


def test_nor_do_they_run_without_mask_inputs():
    with pytest.raises(ValueError, match=r"\['token_ids'\] missing"):
        subclassed.OfAnArgument()(X)


def test_a_layer_of_a_functional_model_refuses_floats_while_the_model_is_made():
    x, ids = keras.Input((7, 8)), keras.Input((7,))
    with pytest.raises(TypeError, match="must be integer or boolean"):
        subclassed.attention()(x, mask_inputs={"token_ids": ids})


def test_unknown_lengths_inside_a_composite_layer():
    x, ids = keras.Input((None, 8)), keras.Input((None,), dtype="int32")
    model = keras.Model([x, ids], layers.Dense(2)(subclassed.Block()(x, ids)))
    assert numpy(model([X, IDS])).shape == (2, 7, 2)


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
