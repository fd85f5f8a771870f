"""Our layers compute tiles by themselves, and train, save and serve with them."""

import keras
import numpy as np
import pytest
from contract import numpy
from tiled_contract import (
    BACKEND,
    PADDING,
    SORTED_IDS,
    UNSORTED_IDS,
    close,
)
from tolerance import assert_close

import keras_headmask as hm

# ---------------------------------------------------------------- the layer


def layer_of(kind, spec, tiled, **rest):
    return kind.layer(4, 4, mask_spec=spec, tiled=tiled, **rest)


def test_the_argument_is_saved_only_where_set(kind, tmp_path, tiny):
    spec = hm.Window(2, 2)
    assert "tiled" not in layer_of(kind, spec, None).get_config()
    for tiled in (True, False):
        layer = layer_of(kind, spec, tiled)
        assert layer.get_config()["tiled"] is tiled
        again = kind.ours.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        x = keras.Input((9, 8))
        model = keras.Model(x, layer(x))
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.layers[-1].get_config()["tiled"] is tiled
        data = np.random.default_rng(0).normal(size=(2, 9, 8)).astype("float32")
        close(loaded(data), model(data))


@pytest.mark.parametrize("tiled", ["yes", 2, 0.5])
def test_the_argument_of_a_wrong_type(kind, tiled):
    with pytest.raises(TypeError, match=r"`tiled` must be True, False or None\. Received: "):
        layer_of(kind, hm.Window(1, 1), tiled)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "float64"])
@pytest.mark.every_day("Multi.*by tiles|Grouped.*all logits")
def test_the_layer_gives_the_same_either_way(kind, tiny, policy):
    spec = hm.PerHead({0: hm.SameSegment("ids"), 1: hm.Window(2, 1)}, hm.Queries(3) | hm.Keys(0, 2))
    if policy == "float64" and BACKEND == "jax":
        pytest.skip("JAX holds 32 bits")
    x = np.random.default_rng(0).normal(size=(3, 11, 8)).astype("float32")
    call = {
        "mask_inputs": {"ids": SORTED_IDS[:, :11]},
        "query_mask": PADDING[:, 1:12],
        "use_causal_mask": True,
    }
    results = []
    for tiled in (True, False):
        keras.utils.set_random_seed(1)
        layer = layer_of(kind, spec, tiled, dtype=policy)
        results.append(layer(x, **call))
        # With returned scores all logits are computed.
        _, scores = layer(x, return_attention_scores=True, **call)
        assert tuple(scores.shape) == (3, 4, 11, 11)
    assert results[0].dtype == results[1].dtype
    assert_close(*map(numpy, results), dtype=policy)


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


@pytest.mark.parametrize("name", ["query_mask", "value_mask", "key_mask"])
@pytest.mark.parametrize("batch", [1, 2])
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
