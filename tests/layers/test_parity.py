"""Equal to stock Keras without a rule, and to PyTorch with a mask per head."""

import inspect

import keras
import numpy as np
import pytest
from contract import GROUPED, MULTI_HEAD, normal, numpy, random_biases
from keras_versions import HAS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask import _keras

Ours = hm.PerHeadMaskedMultiHeadAttention

ARGUMENTS = {
    "defaults": {},
    "value_dim": {"value_dim": 5},
    "output_shape": {"output_shape": (2, 3)},
    "gate, no bias": {"use_gate": True, "use_bias": False},
    "window": {"sliding_window": 2},
    "dropout": {"dropout": 0.4, "seed": 7},
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
    if arguments.keys() <= inspect.signature(kind.stock).parameters.keys()
}
with_arguments = pytest.mark.parametrize(("kind", "arguments"), CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize("spec", [None, hm.PerHead({0: hm.Full()})], ids=repr)
@with_arguments
def test_outputs_and_scores(kind, arguments, spec):
    if "value_dim" in arguments and keras.backend.backend() == "jax":
        pytest.skip("stock Keras fails on JAX when values and keys differ in size")
    ours, stock = kind.twins(**arguments)
    if spec is not None:
        config = ours.get_config() | {"mask_spec": spec}
        with_rule = kind.ours.from_config(config)
        with_rule.build((None, None, 8), (None, None, 8))
        with_rule.set_weights(ours.get_weights())
        ours = with_rule
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
            assert_close(numpy(a), numpy(b), message=str(call))


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


def test_config_round_trip_keeps_everything(kind):
    spec = hm.PerHead({0: hm.SameSegment("ids"), "1-2": ~hm.Window(1, 1)}, default=hm.Chunk(2))
    more = {"dropout": 0.1, "flash_attention": False, "dtype": "mixed_bfloat16"}
    layer = kind.layer(3, 4, mask_spec=spec, **more)
    again = kind.ours.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.mask_spec == spec
    assert layer.get_config()["mask_spec"] == spec.get_config()  # in its permanent kinds
    assert layer.get_config()["flash_attention"] is False
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.mask_spec == spec


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


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("tiled", [True, False])
def test_grouped_is_multi_head_with_repeated_weights_of_keys(key_heads, tiled):
    """Query head h reads key head h // (H / Hk), by its own rule."""
    rules = {0: hm.Window(1, 0), 3: hm.SameSegment("ids"), 4: hm.Window(1, 0)}
    more = {"mask_spec": hm.PerHead(rules, hm.Window(2, 2)), "tiled": tiled}
    more |= {"use_gate": True} if "use_gate" in HAS else {}
    grouped = hm.PerHeadMaskedGroupedQueryAttention(4, 6, key_heads, **more)
    every = Ours(6, 4, **more)
    x, ids = normal(2, 9, 8), np.sort(np.random.default_rng(0).integers(0, 4, (2, 9)))
    for layer in (grouped, every):
        layer.build(x.shape, x.shape)
    random_biases(grouped)
    for one, other in zip(grouped.weights, every.weights, strict=True):
        *_, projection, _ = one.path.split("/")
        repeats = 6 // key_heads if projection in ("key", "value") else 1
        other.assign(np.repeat(numpy(one), repeats, axis=-2) if repeats > 1 else one)
    given = {"mask_inputs": {"ids": ids}, "use_causal_mask": True}
    assert_close(numpy(grouped(x, **given)), numpy(every(x, **given)), depth=3)


def test_torch_multihead_attention_with_a_mask_per_head():
    torch = pytest.importorskip("torch")
    batch, heads, queries, keys, dim = 2, 4, 5, 7, 16
    theirs = torch.nn.MultiheadAttention(dim, heads, batch_first=True)
    rng = np.random.default_rng(0)
    hides = rng.random((batch * heads, queries, keys)) < 0.5
    hides[..., 0] &= ~hides.all(-1)  # torch gives NaN where a row sees nothing
    q, kv = normal(batch, queries, dim), normal(batch, keys, dim, seed=1)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        theirs.out_proj.bias.normal_()
        wanted, wanted_scores = theirs(
            *(torch.from_numpy(a) for a in (q, kv, kv)),
            attn_mask=torch.from_numpy(hides),
            average_attn_weights=False,
        )
    ours = Ours(heads, dim // heads)
    ours.build(q.shape, kv.shape)
    kernels = theirs.in_proj_weight.detach().numpy().reshape(3, heads, dim // heads, dim)
    biases = theirs.in_proj_bias.detach().numpy().reshape(3, heads, dim // heads)
    weights = [w for pair in zip(kernels.transpose(0, 3, 1, 2), biases, strict=True) for w in pair]
    out = theirs.out_proj.weight.detach().numpy().T.reshape(heads, dim // heads, dim)
    ours.set_weights([*weights, out, theirs.out_proj.bias.detach().numpy()])
    mask = hm.from_torch(hides, num_heads=heads)
    got, scores = ours(q, kv, attention_mask=mask, return_attention_scores=True)
    assert_close(numpy(got), wanted.numpy(), depth=6)
    assert_close(numpy(scores), wanted_scores.numpy())
