"""Our layers compute tiles by themselves, and train, save and serve with them."""

import keras
import numpy as np
import pytest
from contract import numpy
from tiled_contract import (
    UNSORTED_IDS,
    close,
)

import keras_headmask as hm

# ---------------------------------------------------------------- the layer


def layer_of(kind, spec, tiled, **rest):
    return kind.layer(4, 4, mask_spec=spec, tiled=tiled, **rest)


def test_the_argument_is_saved_only_where_set(kind):
    spec = hm.Window(2, 2)
    assert "tiled" not in layer_of(kind, spec, None).get_config()
    for tiled in (True, False):
        saved = keras.saving.serialize_keras_object(layer_of(kind, spec, tiled))
        again = keras.saving.deserialize_keras_object(saved)
        assert again.get_config()["tiled"] is saved["config"]["tiled"] is tiled


@pytest.mark.parametrize("tiled", ["yes", 2, 0.5])
def test_the_argument_of_a_wrong_type(kind, tiled):
    with pytest.raises(TypeError, match=r"`tiled` must be True, False or None\. Received: "):
        layer_of(kind, hm.Window(1, 1), tiled)


@pytest.mark.every_day("by tiles")
def test_the_layer_drops_in_training_alone_and_anew_each_time(tiny):
    """What is kept of the others' probabilities, and how often, is held in `test_laws.py`."""
    layer = hm.PerHeadMaskedMultiHeadAttention(
        2, 4, mask_spec=hm.Window(2, 2), dropout=0.5, tiled=True
    )
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    plain, first, second = numpy(layer(x)), *(numpy(layer(x, training=True)) for _ in range(2))
    close(layer(x), plain)
    for one, other in ((plain, first), (first, second)):
        assert not np.allclose(one, other)


@pytest.mark.parametrize(("name", "batch"), [("query_mask", 1), ("value_mask", 2), ("key_mask", 1)])
@pytest.mark.every_day("by tiles")
def test_a_keras_mask_of_length_1_serves_all_positions(tiny, name, batch):
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    mask = np.array([[True], [False]])[-batch:]
    outs = []
    for tiled in (True, False):
        keras.utils.set_random_seed(0)
        layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(2, 2), tiled=tiled)
        outs.append(layer(x, **{name: mask}))
    close(*outs)


@pytest.mark.tensorflow
@pytest.mark.every_day("Grouped.*by tiles")
def test_a_saved_model_serves_any_length(kind, tiny, tmp_path):
    import tensorflow as tf

    spec = hm.PerHead({0: hm.SameSegment("ids")}, hm.recipes.streaming(1, 3))
    x, ids = keras.Input((None, 8), name="x"), keras.Input((None,), dtype="int32", name="ids")
    model = keras.Model(
        {"x": x, "ids": ids}, layer_of(kind, spec, True)(x, mask_inputs={"ids": ids})
    )
    model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "saved"))
    layer = model.layers[-1]
    for batch, length in ((1, 1), (3, 23), (2, 10)):
        data = {
            "x": np.random.default_rng(0).normal(size=(batch, length, 8)).astype("float32"),
            "ids": UNSORTED_IDS[:batch, :length],
        }
        layer._tiled = False
        close(served.serve(data), layer(data["x"], mask_inputs={"ids": data["ids"]}))
