"""Equal to stock Keras without a rule. (`examples/from_pytorch.py` has PyTorch, with masks.)"""

import inspect

import keras
import numpy as np
import pytest
from contract import GROUPED, MULTI_HEAD, normal, numpy, random_biases
from keras_versions import HAS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask import _keras

# XLA on the CPU has no float16 dot; in float64 JAX is float32, and so is stock on PyTorch in part.
PRECISIONS = {"jax": ["mixed_bfloat16"], "torch": ["mixed_bfloat16", "mixed_float16"]}
PRECISIONS = PRECISIONS.get(keras.backend.backend(), ["mixed_bfloat16", "mixed_float16", "float64"])
ARGUMENTS = {
    "defaults": {},
    "value_dim": {"value_dim": 5},
    "output_shape": {"output_shape": (2, 3)},
    "gate, no bias": {"use_gate": True, "use_bias": False},
    "window": {"sliding_window": 2},
    "dropout": {"dropout": 0.4, "seed": 7},
    **{dtype: {"dtype": dtype} for dtype in PRECISIONS},
    "initializers": {
        "kernel_initializer": "ones",
        "bias_initializer": "ones",
        "kernel_regularizer": "l2",
        "kernel_constraint": "max_norm",
    },
}
CASES = {
    f"{kind}, {name}": (kind, arguments)
    for kind in (MULTI_HEAD, GROUPED)
    for name, arguments in ARGUMENTS.items()
    if arguments.keys() - {"dtype"} <= inspect.signature(kind.stock).parameters.keys()
}
with_arguments = pytest.mark.parametrize(("kind", "arguments"), CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize("spec", [None, hm.PerHead({0: hm.Full()})], ids=repr)
@with_arguments
def test_outputs_and_scores(kind, arguments, spec):
    if "value_dim" in arguments and keras.backend.backend() == "jax":
        pytest.skip("stock Keras fails on JAX when values and keys differ in size")
    ours, stock = kind.twins(mask_spec=spec, **arguments)
    q, v = normal(2, 4, 8), normal(2, 6, 8, seed=1)
    mask = np.random.default_rng(0).random((2, 4, 6)) < 0.7
    mask[..., 0] = mask[:, :, 0] | ~mask.any(-1)  # stock averages rows with no allowed key
    # A dead row under sliding_window is stock's to average: compare rows that see something.
    window = arguments.get("sliding_window")
    if window:
        mask |= abs(np.arange(4)[:, None] - np.arange(6)) < 1
    with_scores = {"attention_mask": mask, "return_attention_scores": True}
    for call in ({}, {"attention_mask": mask}, {"use_causal_mask": True}, with_scores):
        got, wanted = ours(q, v, **call), stock(q, v, **call)
        got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, wanted))
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype
            assert_close(numpy(a), numpy(b), ours.dtype_policy.name, message=str(call))


@with_arguments
def test_config_has_stock_keys_and_two_more(kind, arguments):
    ours, stock = kind.twins(**arguments)
    assert [(w.path, w.shape) for w in ours.weights] == [(w.path, w.shape) for w in stock.weights]
    config, stock_config = ours.get_config(), stock.get_config()
    assert {k: config[k] for k in stock_config} == stock_config
    assert config.keys() - stock_config.keys() == {"mask_spec", "flash_attention"}


def test_constructor_takes_what_stock_takes_in_the_same_order(kind):
    classes = kind.ours, kind.stock
    ours, stock = (list(inspect.signature(c.__init__).parameters.values()) for c in classes)
    ours = [p for p in ours if p.name in HAS or p.name not in _keras.SINCE]
    ours, stock = ([(p.name, p.default) for p in taken] for taken in (ours, stock))
    assert ours[: len(stock) - 1] == stock[:-1]
    assert [name for name, _ in ours[len(stock) - 1 :]] == ["mask_spec", "tiled", "kwargs"]
    of_heads = (2, 4, None, 0.0, True, None, None, None, False)
    by_place = kind.ours(*(of_heads if kind is MULTI_HEAD else (4, 4, 2, 0.0, True, None, False)))
    assert by_place.get_config()["flash_attention"] is False


def test_ours_and_stock_share_a_file(kind, tmp_path):
    def model(first, second):
        x, sizes = keras.Input((4, 8)), kind.sizes(4, 4)
        y = first(**sizes, name="first")(x, x)
        return keras.Model(x, second(**sizes, name="second")(y, y))

    source, target = model(kind.ours, kind.stock), model(kind.stock, kind.ours)
    for name in ("first", "second"):
        random_biases(source.get_layer(name))
    source.save_weights(tmp_path / "a.weights.h5")
    target.load_weights(tmp_path / "a.weights.h5")
    for a, b in zip(source.get_weights(), target.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    x = normal(2, 4, 8)
    assert_close(target.predict(x, verbose=0), source.predict(x, verbose=0))


def test_training_step(kind):
    def trained(layer):
        keras.utils.set_random_seed(3)
        x = keras.Input((4, 8))
        model = keras.Model(x, layer(**kind.sizes(4, 4))(x, x, use_causal_mask=True))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(normal(8, 4, 8), normal(8, 4, 8, seed=1), batch_size=4, epochs=2, verbose=0)
        return model.get_weights()

    for ours, stock in zip(trained(kind.ours), trained(kind.stock), strict=True):
        assert_close(ours, stock)


def test_dropout_is_seeded_as_in_stock(kind):
    """In training the probabilities drop, by the same draws; the scores returned are whole."""
    ours, stock = kind.twins(dropout=0.5, seed=11)
    x = normal(2, 4, 8)
    got = ours(x, x, training=True, return_attention_scores=True)
    wanted = stock(x, x, training=True, return_attention_scores=True)
    for a, b in zip(got, wanted, strict=True):
        assert_close(numpy(a), numpy(b))
    assert not np.allclose(numpy(got[0]), numpy(ours(x, x)), atol=1e-3)
