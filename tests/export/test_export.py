"""An export is what the model is, with its rule; the report says what is left out."""

import contextlib
import json
import re

import keras
import numpy as np
import pytest
from contract import numpy
from export_models import (
    RULE,
    SIGNATURE,
    Subclassed,
    check_in_this_process,
    masked,
    ours,
    over,
    served,
    stock,
    tokens,
)
from keras import layers, ops
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.export.interface import answer, interface_of, request
from keras_headmask.export.precision import computing_in
from keras_headmask.export.signatures import why_not_padded
from keras_headmask.retrofit.survey import Survey

tensorflow_only = pytest.mark.tensorflow


@tensorflow_only
@pytest.mark.long  # (the README does it every day)
def test_a_model_with_everything_checked_in_a_fresh_process(tmp_path):
    """The one full run: tiled loops, scores, XLA, warm-up."""
    apis = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    import tensorflow as tf

    model = ours(tiled=None)
    report = hm.export_saved_model(
        model,
        tmp_path / "m",
        scores=True,
        xla_buckets=[(2, 16)],
        warmup=[(2, 7), {"token_ids": tokens(1, 5)}],
    )
    assert report.path == tmp_path / "m" / "1"
    assert set(report.signatures) == {
        "serving_default",
        "serve_padded",
        "serve_scores",
        "serve_xla_2x16",
    }
    check = report.check
    assert len(check.shapes) == 3
    assert max(check.error, check.padded_error, check.compiled_error) < 1e-5
    assert check.twin_distance > 1e-3
    assert check.mass_outside == 0
    assert check.mass_seen_in == "serve_scores"
    assert not any(g["python"] or g["pinned"] for g in check.graphs.values())
    assert [n for n, g in check.graphs.items() if g["compiled"]] == ["serve_xla_2x16"]
    assert "the rule is alive" in str(report)

    for shape in ((1, 1), (4, 33), (2, 300)):
        ids = tokens(*shape)
        got = served(report, token_ids=ids)
        assert_close(got["output_0"], numpy(model(ids)), depth=3)
    described = json.loads((report.path / "assets.extra" / "keras_headmask.json").read_text())
    (config,) = described["rules"].values()
    assert hm.MaskSpec.from_config(config) == RULE
    assert described["format_version"] == 1
    assert described["versions"]["tensorflow"] == tf.__version__

    file = report.path / "assets.extra" / "tf_serving_warmup_requests"
    logs = [apis.PredictionLog.FromString(x.numpy()) for x in tf.data.TFRecordDataset(str(file))]
    requests = [log.predict_log.request for log in logs]
    names = ["serving_default", "serve_scores", "serve_padded"]
    assert [r.model_spec.signature_name for r in requests] == names * 2
    assert report.warmup_records == 6
    for record in requests:
        given = {k: tf.make_ndarray(v) for k, v in record.inputs.items()}
        served(report, signature=record.model_spec.signature_name, **given)


@tensorflow_only
@pytest.mark.parametrize(
    ("precision", "least", "most"), [("bfloat16", 1e-4, 0.1), ("float16", 1e-5, 0.02)]
)
def test_precision(precision, least, most, tmp_path, monkeypatch):
    """bfloat16 of a masked model, float16 of a subclassed one; the model stays as it was."""
    model, more = (
        (masked(), {})
        if precision == "bfloat16"
        else (Subclassed(), {"input_signature": SIGNATURE})
    )
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(model, tmp_path, precision=precision, **more)
    assert least < report.check.precision_error < most
    assert report.check.twin_distance > 2 * report.check.error
    graph = (report.path / "saved_model.pb").read_bytes()
    outputs = report.signatures["serving_default"]["outputs"].values()
    assert {dtype for dtype, _ in outputs} == {"float32"}
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}
    products, softmaxes = (
        dtypes_in(graph, ("Einsum", "BatchMatMulV2", "MatMul")),
        dtypes_in(graph, ("Softmax",)),
    )
    assert precision in products
    assert softmaxes == {"float32"}


def dtypes_in(graph, kinds):
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    (meta,) = saved_model_pb2.SavedModel.FromString(graph).meta_graphs
    nodes = [
        node for f in meta.graph_def.library.function for node in f.node_def if node.op in kinds
    ]
    return {tf.as_dtype(node.attr["T"].type).name for node in nodes}


@tensorflow_only
def test_softmax_layers_of_stock_attention_stay_in_float32():
    """With dropout, stock attention goes through one."""
    attention = layers.MultiHeadAttention(2, 4, dropout=0.5)
    x = keras.Input((None, 8), name="x")
    head = layers.Dense(3, activation="softmax")
    model = keras.Model(x, head(attention(x, x)))
    with computing_in(model, "float16"):
        assert head.compute_dtype == "float32"
        assert attention._softmax.compute_dtype == "float32"
        assert attention._query_dense.compute_dtype == "float16"
    assert attention._query_dense.compute_dtype == "float32"


@tensorflow_only
def test_layers_that_were_given_a_precision_keep_it():
    x = keras.Input((None, 8), name="x")
    with policy("mixed_float16"):
        half, single = layers.Dense(3), layers.Dense(3, dtype="float32")
    double = layers.Dense(3, dtype="float64")
    model = keras.Model(x, double(single(half(x))))
    with computing_in(model, "bfloat16"):
        dtypes = [layer.compute_dtype for layer in (half, single, double)]
    assert dtypes == ["bfloat16", "float32", "float64"]


@tensorflow_only
@pytest.mark.parametrize("dtypes", ["mixed_bfloat16", "float16"])
def test_a_half_precision_model_computes_in_float32_for_a_while(dtypes):
    with policy(dtypes):
        model = ours()
    single = ours()
    single.set_weights([w.astype("float32") for w in model.get_weights()])
    with computing_in(model, "float32"):
        got = numpy(model(tokens(2, 9)))
    assert got.dtype == "float32"
    assert_close(got, numpy(single(tokens(2, 9))))
    assert model(tokens(2, 9)).dtype == dtypes.removeprefix("mixed_")


@tensorflow_only
def test_outputs_keep_their_dtypes_in_any_precision(tmp_path):
    with policy("mixed_float16"):
        model = ours()
    report = hm.export_saved_model(model, tmp_path, precision="bfloat16", scores=True, check=False)
    outputs = {name: sides["outputs"] for name, sides in report.signatures.items()}
    assert outputs["serving_default"]["output_0"][0] == "float16"  # as the model's own
    assert {dtype for dtype, _ in outputs["serve_scores"].values()} == {"float32"}


@tensorflow_only
@pytest.mark.parametrize("make", [ours, masked, stock, lambda: masked(with_padding=False)])
def test_every_kind_of_model_is_served_as_it_is(make, tmp_path):
    model = make()
    report = hm.export_saved_model(model, tmp_path, check=False)
    assert report.check is None
    assert "not checked" in str(report)
    ids = tokens(3, 11)
    inputs = {"token_ids": ids}
    if "padding_mask" in report.signatures["serving_default"]["inputs"]:
        inputs["padding_mask"] = np.array([[1] * 11, [1] * 7 + [0] * 4, [1] + [0] * 10], "int32")
    wanted = model(inputs if isinstance(model.input, dict) else ids)
    wanted = wanted if isinstance(wanted, dict) else {"output_0": wanted}
    got = served(report, **inputs)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(got[name], numpy(value), depth=3)
    check_padded(report, inputs, got)


def check_padded(report, inputs, whole):
    """Padded as TensorFlow Serving pads, with first elements; each example as if it were alone."""
    lengths = np.array([11, 7, 1], "int32")
    padded = {name: value.copy() for name, value in inputs.items()}
    for value in padded.values():
        for i, length in enumerate(lengths):
            value[i, length:] = value[i, 0]
    got = served(report, signature="serve_padded", lengths=lengths, **padded)
    for i, length in enumerate(lengths):
        alone = served(report, **{name: x[i : i + 1, :length] for name, x in inputs.items()})
        for name, value in alone.items():
            if whole[name].ndim == 2:  # no axis of positions
                assert_close(got[name][i : i + 1], value, depth=3)
                continue
            assert_close(got[name][i : i + 1, :length], value, depth=3)
            assert not got[name][i, length:].any()
    with pytest.raises(Exception, match="lengths_of_another_batch"):  # not one for all
        served(report, signature="serve_padded", lengths=lengths[:1], **padded)


@tensorflow_only
def test_a_subclassed_model_is_served_with_the_arguments_that_the_signature_names(tmp_path):
    model = Subclassed()
    report = hm.export_saved_model(model, tmp_path, input_signature=SIGNATURE, check=False)
    ids, segments = tokens(2, 6), np.array([[0, 0, 1, 1, 1, 2], [0] * 5 + [1]], "int32")
    got = served(report, token_ids=ids, segments=segments)["output_0"]
    assert_close(got, numpy(model(ids, segments)))
    assert abs(got - numpy(model(ids))).max() > 1e-4
    assert "subclassed" in report.left_out["serve_padded"]


@tensorflow_only
def test_a_sequential_model_and_sizes_fixed_by_the_signature(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="token_ids"),
            layers.Embedding(30, 8),
            hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.Window(1, 1)),
        ]
    )
    fixed = {"token_ids": keras.InputSpec(shape=(None, 6), dtype="int32")}
    report = hm.export_saved_model(model, tmp_path, input_signature=fixed, check=False)
    assert report.signatures["serving_default"]["inputs"] == {"token_ids": ("int32", (None, 6))}
    assert "no input has a length that varies" in report.left_out["serve_padded"]
    ids = tokens(2, 6)
    assert_close(served(report, token_ids=ids)["output_0"], numpy(model(ids)))


@tensorflow_only
def test_a_fixed_length_and_a_padding_mask(tmp_path, monkeypatch):
    inputs = {
        "token_ids": keras.Input((6,), dtype="int32", name="token_ids"),
        "padding_mask": keras.Input((6,), dtype="bool", name="padding_mask"),
    }
    rule = hm.Window(1, 1) & hm.KeyFlag("padding_mask")
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=rule)
    x = layers.Embedding(30, 8)(inputs["token_ids"])
    mask_inputs = {"padding_mask": inputs["padding_mask"]}
    model = keras.Model(inputs, attention(x, mask_inputs=mask_inputs))
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(model, tmp_path)
    assert {length for _, length in report.check.shapes} == {6}
    given = {"token_ids": tokens(2, 6), "padding_mask": np.arange(6) < [[6], [3]]}
    assert_close(served(report, **given)["output_0"], numpy(model(given)))


@tensorflow_only
def test_chosen_layers_give_their_scores(tmp_path):
    model = ours(count=2)
    report = hm.export_saved_model(model, tmp_path, scores=1, check=False)
    (path,) = report.signatures["serve_scores"]["outputs"]
    assert path == list(report.rules)[1]
    scores = served(report, signature="serve_scores", token_ids=tokens(2, 12))[path]
    assert_close(scores.sum(-1), 1, depth=3)
    allowed = numpy(hm.make_mask(RULE, 12, 12, 2, {"token_ids": tokens(2, 12)}))
    assert scores[~allowed].max() == 0


@tensorflow_only
def test_attention_of_an_unknown_class_is_reported(tmp_path):
    x = keras.Input((None, 8), name="x")
    y = layers.MultiHeadAttention(2, 4, name="known")(x, x)
    y = layers.AdditiveAttention(name="odd")([y, y])
    report = hm.export_saved_model(keras.Model(x, y), tmp_path, scores=True, check=False)
    assert list(report.signatures["serve_scores"]["outputs"]) == ["known"]
    (name,) = [name for name in report.left_out if name.startswith("serve_scores of")]
    assert "'odd' (AdditiveAttention)" in name
    assert "out of reach" in report.left_out[name]


def text_model():
    words = keras.Input((None,), dtype="string", name="Words")
    ids = layers.StringLookup(vocabulary=["a", "ä"])(words)
    return keras.Model(words, {"x": layers.Embedding(4, 3)(ids), "words": words})


@tensorflow_only
def test_text_is_checked_and_warmed_up_with_what_is_given(tmp_path, monkeypatch):
    """And so are names in capitals, and outputs of text."""
    apis = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    import tensorflow as tf

    given = {"Words": [["a", "ä"], ["b", "a"]]}
    check_in_this_process(monkeypatch)
    report = hm.export_saved_model(text_model(), tmp_path, check=[given], warmup=[given])
    assert report.check.error == 0
    file = report.path / "assets.extra" / "tf_serving_warmup_requests"
    (record,) = tf.data.TFRecordDataset(str(file))
    request = apis.PredictionLog.FromString(record.numpy()).predict_log.request
    words = tf.make_ndarray(request.inputs["Words"])
    assert [[word.decode() for word in row] for row in words] == given["Words"]


@tensorflow_only
@pytest.mark.parametrize("dtype", [str, object, "S"])
def test_text_may_be_given_in_any_form(dtype):
    interface = interface_of(Survey(text_model()), None)
    text = np.array([["a", "ä"]])
    given = np.char.encode(text, "utf-8") if dtype == "S" else text.astype(dtype)
    for item in (given, given.tolist(), given.astype(object)):
        words = answer(interface, request(interface, {"Words": item}))["words"]
        assert [word.decode() for word in words[0]] == ["a", "ä"]
    with pytest.raises(ValueError, match="'Words' must be string of shape"):
        request(interface, {"Words": [[1]]})


def crossing():
    a, b = (keras.Input((None, 8), name=name) for name in "ab")
    return keras.Model([a, b], layers.MultiHeadAttention(2, 4, name="crossing")(a, b))


def mean_behind_a_padding_mask():
    model = stock()
    return keras.Model(model.input, layers.GlobalAveragePooling1D()(model.output["sequence"]))


def max_behind_a_padding_mask():
    """Which a first element, repeated, does not change."""
    model = stock()
    return keras.Model(model.input, layers.GlobalMaxPooling1D()(model.output["sequence"]))


def with_positions():
    """An input whose length is not that of the tokens: where to look."""

    class Take(layers.Layer):
        def call(self, x, positions):
            return ops.take_along_axis(x, positions[..., None], axis=1)

        def compute_output_shape(self, x_shape, positions_shape):
            return (*positions_shape, x_shape[-1])

    model = stock()
    positions = keras.Input((None,), dtype="int32", name="positions")
    taken = Take()(model.output["sequence"], positions)
    return keras.Model({**model.input, "positions": positions}, taken)


LEFT_OUT = {
    "pooling": (
        lambda: over(layers.GlobalMaxPooling1D(name="pool")),
        r"'pool' \(GlobalMaxPooling1D\)",
    ),
    "convolution": (lambda: over(layers.Conv1D(4, 3, padding="same")), r"\(Conv1D\)"),
    "recurrence": (lambda: over(layers.LSTM(4, return_sequences=True)), r"\(LSTM\)"),
    "last position": (lambda: over(lambda x: x[:, -1]), r"\(GetItem\)"),
    "along positions": (lambda: over(layers.Softmax(axis=1)), r"\(Softmax\)"),
    "inside a model": (lambda: over(over2()), r"\(GlobalMaxPooling1D\)"),
    "cross-attention": (crossing, "'crossing'.* attends, or may attend, to another sequence"),
    "unknown attention": (
        lambda: over(lambda x: layers.AdditiveAttention()([x, x])),
        r"\(AdditiveAttention\) is out of reach",
    ),
    "a name taken": (
        lambda: keras.Model(x := keras.Input((None, 4), name="lengths"), layers.Dense(2)(x)),
        "an input named 'lengths'",
    ),
    "seen in spite of a padding mask": (mean_behind_a_padding_mask, "changes the outputs at real"),
    "a maximum": (max_behind_a_padding_mask, "changes the outputs at real"),
    "another length": (with_positions, "axis 1 of 'positions' may have another length"),
}


def over2():
    x = keras.Input((None, 8))
    return keras.Model(x, layers.GlobalMaxPooling1D()(x))


@tensorflow_only
@pytest.mark.parametrize("case", LEFT_OUT)
def test_serve_padded_is_left_out_with_its_reason(case):
    make, reason = LEFT_OUT[case]
    found = why_not_padded(interface_of(Survey(make()), None), 8)
    assert re.search(reason, found), found


@tensorflow_only
def test_outputs_of_a_subclassed_model_are_0_past_the_lengths():
    """Its graph says which axes are positions: the trial's own outputs have numbers there."""

    class WithPadding(Subclassed):
        def call(self, token_ids, padding_mask):
            x = self.embedding(token_ids)
            of_keys = ops.cast(padding_mask, "bool")[:, None, None]
            return self.attention(x, mask_inputs={"segments": token_ids}, attention_mask=of_keys)

    names = "token_ids", "padding_mask"
    signature = {name: keras.InputSpec(shape=(None, None), dtype="int32") for name in names}
    assert why_not_padded(interface_of(Survey(WithPadding()), signature), 8) is None


@tensorflow_only
def test_a_maximum_is_seen_however_long_the_requests_are():
    """A maximum over many positions seldom changes, whatever comes behind them."""
    found = why_not_padded(interface_of(Survey(max_behind_a_padding_mask()), None), 250)
    assert "changes the outputs at real" in found


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@tensorflow_only
@pytest.mark.parametrize("dtypes", ["float32", "mixed_bfloat16", "float16"])
def test_half_precision_does_not_let_pooling_pass_for_padded(dtypes):
    """Its rounding is coarser than what padding changes; attention alone stays on offer."""
    with policy(dtypes):
        models = [mean_behind_a_padding_mask(), masked()]
    for model, pooled in zip(models, (True, False), strict=True):
        precision = "bfloat16" if dtypes == "float32" else None
        with computing_in(model, precision):
            found = why_not_padded(interface_of(Survey(model), None), 8)
        if pooled:
            assert "changes the outputs at real positions" in found
        else:
            assert found is None
