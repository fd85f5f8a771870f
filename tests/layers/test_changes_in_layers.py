"""Biases, soft caps and sinks in our layers: outputs, weights, configs, files, exports."""

import changed
import keras
import numpy as np
import pytest
import torch
from contract import GROUPED, normal, numpy, random_biases
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention.tuning import tuned
from keras_headmask.retrofit.observe import watched
from keras_headmask.retrofit.survey import Survey

HEADS, LENGTH = 4, 11
RULE = hm.PerHead({1: hm.Chunk(4)}, hm.Window(3, 2))
LEARNED = hm.relative_position_bias(HEADS, num_buckets=4, max_distance=5)
OPTIONS = {
    "none": {},
    "alibi": {"position_bias": hm.alibi(HEADS)},
    "all": {"position_bias": LEARNED, "logits_soft_cap": 0.5, "use_sinks": True},
}
X, BIAS = normal(2, LENGTH, 8), normal(HEADS, 1, LENGTH, seed=3)


def layer_of(kind, option, **more):
    layer = kind.layer(HEADS, 4, **OPTIONS[option], **more)
    layer.build((None, None, 8), (None, None, 8))
    random_biases(layer)
    return layer


def by_formula(layer, option, x, bias=None, rule=RULE):
    """Output and probabilities from the weights."""
    given, length = OPTIONS[option], x.shape[1]
    of = {}
    if bias is not None:
        of["bias"] = torch.tensor(np.asarray(bias, "float64"))
    if option == "alibi":
        by_position = torch.tensor(changed.alibi(HEADS, length, length))
        of["bias"] = of.get("bias", 0) + by_position
    if option == "all":
        of["table"] = torch.tensor(numpy(layer.position_bias_table).astype("float64"))
        of["rows"] = changed.buckets(LEARNED, length, length)
        of["sinks"] = torch.tensor(numpy(layer.sinks).astype("float64"))
    *dense, output = (
        (numpy(d.kernel).astype("float64"), numpy(d.bias)) for d in _keras.projections(layer)
    )
    qkv = [torch.tensor(np.einsum("btd,dhk->bthk", x, kernel) + b) for kernel, b in dense]
    mask = np.ones((len(x), HEADS, length, length), bool)
    if rule is not None:
        mask = mask_by_loops(rule, len(x), HEADS, length, length)
    rest = {"scale": 0.5, "soft_cap": given.get("logits_soft_cap")}
    context, probabilities = changed.formula(*qkv, torch.tensor(mask), **rest, **of)
    return np.einsum("bthk,hkd->btd", context, output[0]) + output[1], probabilities.numpy()


@pytest.mark.parametrize("bias", [None, BIAS], ids=["", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
def test_dense_tiled_and_with_probabilities(kind, option, bias):
    layer = layer_of(kind, option, mask_spec=RULE)
    wanted, probabilities = by_formula(layer, option, X, bias)
    with tuned(**ALWAYS, local_tile=3, block=2):
        assert_close(numpy(layer(X, attention_bias=bias)), wanted, depth=3)
    output, made = layer(X, attention_bias=bias, return_attention_scores=True)
    assert_close(numpy(output), wanted, depth=3)
    assert_close(numpy(made), probabilities, depth=3)
    free = layer_of(kind, option)
    wanted, _ = by_formula(free, option, X, bias, rule=None)
    assert_close(numpy(free(X, attention_bias=bias)), wanted, depth=3)


@pytest.mark.parametrize("option", ["alibi", "all"])
def test_a_query_offset_moves_the_bias(kind, option):
    layer = layer_of(kind, option, mask_spec=RULE)
    whole = numpy(layer(X))[:, 6:8]
    assert_close(numpy(layer(X[:, 6:8], X, query_offset=6)), whole, depth=3)


def test_weights_and_config_are_there_only_where_asked_for(kind):
    plain, option = layer_of(kind, "none"), layer_of(kind, "all")
    names = {"position_bias", "logits_soft_cap", "use_sinks"}
    assert not names & plain.get_config().keys()
    config = option.get_config()
    assert config["position_bias"] == LEARNED.get_config()
    assert (config["logits_soft_cap"], config["use_sinks"]) == (0.5, True)
    again = kind.ours.from_config(config)
    assert again.get_config() == config
    assert len(option.get_weights()) == len(plain.get_weights()) + 2
    assert tuple(option.position_bias_table.shape) == (4, HEADS)
    assert tuple(option.sinks.shape) == (HEADS,)
    assert plain.sinks is None
    mixed = kind.layer(HEADS, 4, **OPTIONS["all"], dtype="mixed_bfloat16")
    mixed(X)
    assert mixed.sinks.dtype == mixed.position_bias_table.dtype == "float32"


def model_of(kind, option, with_bias, **more):
    x, bias = keras.Input((None, 8), name="x"), keras.Input((1, 1, None), name="bias")
    layer = kind.layer(HEADS, 4, mask_spec=RULE, **OPTIONS[option], **more)
    output = layer(x, attention_bias=bias if with_bias else None)
    model = keras.Model({"x": x, "bias": bias} if with_bias else {"x": x}, {"y": output})
    random_biases(layer)
    return model, layer


def data_of(model):
    return {k: v for k, v in {"x": X, "bias": normal(2, 1, 1, LENGTH)}.items() if k in model.input}


@pytest.mark.parametrize("option", ["alibi", "all"])
def test_a_model_is_saved_and_loaded(kind, option, tmp_path):
    model, layer = model_of(kind, option, True)
    data = data_of(model)
    wanted, _ = by_formula(layer, option, X, data["bias"])
    assert_close(numpy(model(data)["y"]), wanted, depth=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(numpy(loaded(data)["y"]), wanted, depth=3)


@pytest.mark.every_day("Grouped")
def test_a_layer_trains_the_same_dense_and_tiled(kind):
    results = []
    for tiled in (True, False):
        keras.utils.set_random_seed(1)
        x = keras.Input((LENGTH, 8))
        layer = kind.layer(HEADS, 4, mask_spec=RULE, tiled=tiled, **OPTIONS["all"])
        model = keras.Model(x, layer(x))
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        with tuned(local_tile=3, block=2):
            model.fit(X, X, epochs=3, verbose=0)
        assert (numpy(layer.sinks) != 0).all()
        assert (numpy(layer.position_bias_table) != 0).any()
        results.append(model.get_weights())
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, depth=3)


@pytest.mark.parametrize("option", ["alibi", "all"])
@pytest.mark.every_day("Multi.*all|Grouped.*alibi")
def test_who_looks_and_a_second_rule_find_them(kind, option):
    """Both go by the hook of Keras, whose signature knows none of it."""
    model, layer = model_of(kind, option, False)
    _, probabilities = by_formula(layer, option, X)
    with watched(Survey(model).known) as seen:
        model({"x": X})
    assert_close(numpy(seen[0].probabilities), probabilities, depth=3)
    both = hm.apply_head_masks(model, hm.Window(1, 9), existing="and")
    wanted, _ = by_formula(layer, option, X, rule=RULE & hm.Window(1, 9))
    assert_close(numpy(both({"x": X})["y"]), wanted, depth=3)


def test_a_subclass_that_overrides_something_else_takes_them(kind):
    class Named(kind.ours):
        def get_config(self):
            return super().get_config()

    layer = Named(**kind.sizes(HEADS, 4), **OPTIONS["all"])
    assert layer(X).shape == X.shape


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"position_bias": hm.alibi(3)}, ValueError, "is of 3 heads where the attention has 4"),
        ({"position_bias": 1.0}, TypeError, "`position_bias` must be hm.alibi"),
        ({"position_bias": {"kind": "what"}}, ValueError, "has a `kind`, one of 'alibi'"),
        ({"logits_soft_cap": 0}, ValueError, "`logits_soft_cap` must be above 0 and finite"),
        ({"logits_soft_cap": 1e-38}, ValueError, "`logits_soft_cap` must be at least 1.175e-38"),
        ({"logits_soft_cap": "2"}, TypeError, "`logits_soft_cap` must be a number"),
        ({"use_sinks": 1}, TypeError, "`use_sinks` must be True or False"),
        ({"use_sinks": True, "flash_attention": True}, ValueError, "A flash kernel knows no"),
    ],
)
def test_options_that_are_wrong(kind, given, error, message):
    with pytest.raises(error, match=message):
        kind.layer(HEADS, 4, **given)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (np.ones((2, 3, LENGTH, LENGTH), "float32"), ValueError, "`attention_bias` must broadcast"),
        (np.ones((1, 2, 4, LENGTH, LENGTH), "float32"), ValueError, "must broadcast to"),
        (np.ones((LENGTH, LENGTH), bool), TypeError, "`attention_bias` must be floats"),
    ],
)
def test_a_bias_that_does_not_fit(kind, bias, error, message):
    with pytest.raises(error, match=message):
        layer_of(kind, "none")(X, attention_bias=bias)


def test_several_attention_axes_are_refused():
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, attention_axes=(1, 2), use_sinks=True)
    with pytest.raises(ValueError, match="speak of one axis of queries"):
        layer(normal(1, 3, 3, 8))


@pytest.mark.tensorflow
@pytest.mark.long
def test_exported_with_all_of_them(tmp_path):
    """Lengths are unknown and tiled, and a batch axis or an axis of the bias may be 1 when run."""
    import tensorflow as tf

    model, layer = model_of(GROUPED, "all", True, tiled=True)
    with tuned(**ALWAYS, local_tile=3, block=2):
        hm.export_saved_model(model, tmp_path / "saved", check=False)
    (version,) = (tmp_path / "saved").iterdir()
    served = tf.saved_model.load(str(version)).signatures["serving_default"]
    data = data_of(model)
    wanted, _ = by_formula(layer, "all", X, data["bias"])
    (got,) = served(**{k: tf.constant(v) for k, v in data.items()}).values()
    assert_close(numpy(got), wanted, depth=3)


@pytest.mark.tensorflow
def test_onnx_gets_the_nodes_that_are_fused(tmp_path):
    onnx = pytest.importorskip("onnx", reason="`pip install -e .[targets]`")
    pytest.importorskip("tf2onnx", reason="`pip install -e .[targets]`")
    x, bias = keras.Input((LENGTH, 2, 4), name="x"), keras.Input((2, LENGTH, LENGTH), name="bias")
    with hm.dense_scope():  # (outside of it a bias of -inf hides keys that hold NaN, by more nodes)
        output = hm.dot_product_attention(x, x, x, bias=bias)
        model = keras.Model({"x": x, "bias": bias}, {"y": output})
        model({"x": normal(2, LENGTH, 2, 4), "bias": normal(2, 2, LENGTH, LENGTH)})
        model.export(str(tmp_path / "model.onnx"), format="onnx", verbose=False)
    nodes = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    kept = [node for node in nodes if node not in ("Transpose", "Mul", "Reshape", "Einsum")]
    assert kept == ["MatMul", "Add", "Softmax", "MatMul"], nodes
