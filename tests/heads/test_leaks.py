"""Planted leaks are found, sealed models pass, and what is allowed is checked by loops."""

import itertools
import json
import re

import keras
import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm
from keras_headmask.heads import reaches
from keras_headmask.heads.changes import difference, scales
from keras_headmask.heads.leaks import find_leaks
from keras_headmask.heads.testing import assert_no_leaks

CAUSAL = hm.recipes.causal()
FLOATS = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
IDS = np.array([[5, 9, 4, 6, 9, 7, 1], [4, 3, 9, 8, 3, 2, 6]], "int32")


def floats(*blocks, length=6):
    """Features -> blocks, each with a residual connection."""
    x = first = keras.Input((length, 8), name="features")
    for block in blocks:
        x = layers.Add()([x, block(x)])
    return keras.Model(first, x)


def causal(heads=2, cls=layers.MultiHeadAttention, **arguments):
    attention = cls(heads, 3, **arguments)
    return lambda x: attention(x, x, use_causal_mask=True)


class MeanOverTime(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=1, keepdims=True)


class OverTheBatch(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class AlwaysInTraining(layers.Layer):
    """Its batch statistics are those of the inputs, when serving, too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(x, training=True)


class OneHeadOpen(layers.MultiHeadAttention):
    """Its head 7 obeys no mask."""

    def _compute_attention(self, query, key, value, attention_mask=None, *args, **arguments):
        arguments.pop("use_causal_mask", None)
        if attention_mask is not None:
            head = ops.arange(self.num_heads)[None, :, None, None]
            attention_mask = ops.logical_or(attention_mask[:, None], head == 7)
        return super()._compute_attention(query, key, value, attention_mask, *args, **arguments)


class NaNWhereAllAreLarge(layers.Layer):
    def call(self, x):
        total = ops.sum(x, axis=1, keepdims=True)
        return x + 0 * ops.sqrt(float(abs(FLOATS.sum(1)).max()) + 0.1 - ops.abs(total))


# --- Planted leaks --------------------------------------------------------------------------------


def test_no_causal_mask():
    attention = layers.MultiHeadAttention(2, 3, name="open")
    model = floats(causal(), lambda x: attention(x, x), causal())
    report = find_leaks(model, FLOATS, rule=CAUSAL)
    assert report
    assert report.tried == report.pairs == 2 * 15
    assert report.first_layer == "'open' (MultiHeadAttention)"
    assert all(leak.position > leak.output_position for leak in report.leaks)
    assert not find_leaks(model, FLOATS)  # by its layers, each output may see everything


@pytest.mark.parametrize(
    ("planted", "rule"), [(MeanOverTime, CAUSAL), (lambda **k: layers.Lambda(means, **k), None)]
)
def test_a_mean_over_time(planted, rule):
    report = find_leaks(floats(causal(), planted(name="planted"), causal()), FLOATS, rule)
    assert report.first_layer.startswith("'planted'")
    assert len(report.leaks) == report.pairs


def means(x):
    return x - keras.ops.mean(x, axis=1, keepdims=True)


@pytest.mark.parametrize("planted", [AlwaysInTraining, OverTheBatch])
def test_batch_statistics(planted):
    report = find_leaks(floats(causal(), planted(name="planted")), FLOATS)
    assert {(leak.example, leak.output_example) for leak in report.leaks} >= {(0, 1), (1, 0)}
    assert report.first_layer.startswith("'planted")
    assert not find_leaks(floats(causal(), layers.BatchNormalization()), FLOATS)


def padded_by_input(as_heads):
    ids = keras.Input((7,), dtype="int32", name="token_ids")
    padding = keras.Input((7,), dtype="int32", name="padding_mask")
    x = layers.Embedding(12, 8)(ids)
    mask = padding[None, :, None, :] if as_heads else padding[:, None, None, :]
    attention = layers.MultiHeadAttention(2, 3)
    return keras.Model([ids, padding], attention(x, x, attention_mask=mask))


def test_padding_read_as_heads():
    inputs = {"token_ids": IDS, "padding_mask": (TOKENS != 0).astype("int32")}
    report = find_leaks(padded_by_input(as_heads=True), inputs)
    across = {leak.input for leak in report.leaks if leak.example != leak.output_example}
    assert "padding_mask" in across
    assert any(leak.example == leak.output_example for leak in report.leaks)
    sealed = find_leaks(padded_by_input(as_heads=False), inputs)
    assert not sealed
    assert sealed.tried == sealed.pairs > 0


def test_a_head_of_twelve():
    report = find_leaks(floats(causal(12, OneHeadOpen, name="planted")), FLOATS)
    assert report.first_layer == "'planted' (OneHeadOpen)"
    report = find_leaks(floats(causal(7, OneHeadOpen)), FLOATS)  # which has no head 7
    assert not report
    assert report.tried == report.pairs


def test_a_change_to_nan_is_a_change():
    report = find_leaks(floats(NaNWhereAllAreLarge(name="planted")), FLOATS, rule=hm.Window(0, 0))
    assert report.leaks[0].change == float("inf")
    assert report.to_json()["leaks"][0]["change"] == "inf"


def test_padding_of_an_output_without_positions():
    ids = keras.Input((7,), dtype="int32", name="token_ids")
    padding = keras.Input((7,), dtype="bool", name="padding_mask")
    x = layers.Embedding(12, 8)(ids)
    weights = ops.cast(padding, "float32")[..., None]
    inputs = {"token_ids": IDS, "padding_mask": TOKENS != 0}
    rule = hm.recipes.padding("padding_mask")
    model = keras.Model([ids, padding], {"all": ops.sum(x, 1), "x": x})
    report = find_leaks(model, inputs, rule=rule)
    found = {(leak.example, leak.position, leak.output) for leak in report.leaks}
    assert found == {(0, 6, "all"), (1, 5, "all"), (1, 6, "all")}
    assert report.leaks[0].output_position is None
    assert not find_leaks(keras.Model([ids, padding], ops.sum(x * weights, 1)), inputs, rule=rule)


@pytest.mark.parametrize("length", [None, 8])
def test_as_many_features_as_positions(length):
    """An axis of 8 features is not taken for the 8 positions of the input."""
    values = np.random.default_rng(1).normal(size=(2, 8, 8)).astype("float32")
    x = keras.Input((length, 8), name="features")
    attended = causal()(x)
    pooled = layers.GlobalAveragePooling1D()(attended)
    report = find_leaks(keras.Model(x, {"pooled": pooled, "all": attended}), values)
    assert not report
    assert "The output 'pooled', (2, 8), has no axis that is known" in str(report)
    with pytest.raises(ValueError, match="No output has an axis known to be positions"):
        find_leaks(keras.Model(x, pooled), values)
    # By a rule an output is left out no more. Of a fixed length it is taken for positions, and the
    # report says so; otherwise it may depend on what any position may.
    report = find_leaks(keras.Model(x, pooled), values, rule=CAUSAL)
    assert bool(report) == ("was taken to have the input's positions" in str(report))
    assert bool(report) == (length is not None)


@pytest.mark.parametrize("named", [True, False])
def test_a_pooled_output_has_a_rule_as_the_error_says(named):
    masked = padded_by_input(as_heads=False)
    inputs = {"token_ids": IDS, "padding_mask": (TOKENS != 0).astype("int32")}
    if not named:
        masked, inputs = one_layer(mask_zero=False), {"token_ids": TOKENS}
    model = keras.Model(masked.inputs, ops.mean(masked.output, 1))
    with pytest.raises(ValueError, match="No output has an axis known to be positions") as raised:
        find_leaks(model, inputs)
    (rule,) = re.findall(r"`rule=(.*?)`", str(raised.value))
    report = find_leaks(model, inputs, rule=eval(rule, {"hm": hm}))
    assert {(leak.example, leak.position) for leak in report.leaks} == {(0, 6), (1, 5), (1, 6)}
    assert report.tried == report.pairs


def causal_and_open():
    """Ids, and what causal attention and open attention make of them."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(10, 8)(ids)
    return ids, x + causal()(x), x + layers.MultiHeadAttention(2, 3)(x, x)


@pytest.mark.parametrize("part", [slice(-1), slice(1, None)], ids=str)
def test_by_a_rule_outputs_of_another_length_are_searched(part):
    """Row i of such an output is query i."""
    ids, sealed, opened = causal_and_open()
    outputs = {"hidden": sealed, "logits": opened[:, part]}
    report = find_leaks(keras.Model(ids, outputs), IDS, rule=CAUSAL)
    assert report.pairs == 2 * (21 + 21)
    assert {leak.output for leak in report.leaks} == {"logits"}
    assert len(report.leaks) == 2 * 21
    assert report.shown == ("ids", "logits")
    if part == slice(-1):
        assert not find_leaks(keras.Model(ids, sealed[:, part]), IDS, rule=CAUSAL)


def test_by_a_rule_what_has_no_positions_is_said():
    ids, sealed, _ = causal_and_open()
    outputs = {"hidden": sealed, "first": sealed[:, :1], "turned": ops.transpose(sealed, (0, 2, 1))}
    report = find_leaks(keras.Model(ids, outputs), IDS, rule=CAUSAL)
    for which in ("'first', (2, 1, 8)", "'turned', (2, 8, 7)"):
        assert f"The output {which}, was taken to have no positions" in str(report)


def test_attention_that_an_output_is_not_made_of_allows_it_nothing():
    ids, sealed, opened = causal_and_open()
    leaking = sealed + 0.1 * ops.mean(opened, 1, keepdims=True)
    pooled = ops.mean(layers.MultiHeadAttention(2, 3)(sealed, sealed), 1)
    assert len(find_leaks(keras.Model(ids, leaking), IDS, rule=CAUSAL).leaks) == 42
    x = layers.Embedding(10, 8)(ids)
    mixed = x + causal()(x) + 0.1 * ops.mean(x, 1, keepdims=True)
    for outputs in ({"main": mixed, "pooled": pooled}, {"main": mixed, "open": opened}):
        report = find_leaks(keras.Model(ids, outputs), IDS)
        assert {leak.output for leak in report.leaks} == {"main"}
        assert len(report.leaks) == 42


@pytest.mark.parametrize("rule", [None, CAUSAL], ids=["layers", "rule"])
def test_outputs_in_nests_and_numbers(rule):
    ids, sealed, opened = causal_and_open()
    outputs = {"a": {"b": sealed, "c": [opened]}, "loss": ops.mean(sealed)}
    report = find_leaks(keras.Model(ids, outputs), IDS, rule=rule)
    assert {leak.output for leak in report.leaks} == (set() if rule is None else {"a/c/0"})
    assert "The output 'loss', (), was left out" in str(report)
    with pytest.raises(ValueError, match="No output has an axis known to be positions: 'output'"):
        find_leaks(keras.Model(ids, ops.mean(sealed)), IDS, rule=rule)


@pytest.mark.parametrize("masked", ["encoder", "decoder"])
def test_padding_of_another_input_hides_no_outputs(masked):
    """By a rule nobody says whose padding it is: what all inputs take for padding is."""
    ids, sealed, opened = causal_and_open()
    names = [f"{name}_padding_mask" for name in ("encoder", "decoder")]
    flags = {name: keras.Input((None,), dtype="bool", name=name) for name in names}
    read = ops.cast(ops.logical_or(*flags.values()), "float32")[..., None]
    given = {"ids": IDS, **{name: np.ones((2, 7), bool) for name in names}}
    given[f"{masked}_padding_mask"][:, 3:] = False
    for outputs, pairs in ((sealed, 0), (opened, 42)):
        model = keras.Model({"ids": ids, **flags}, outputs + 0 * read)
        assert len(find_leaks(model, given, rule=CAUSAL).leaks) == pairs


def test_an_input_with_a_number_for_each_example():
    ids, sealed, _ = causal_and_open()
    weight = keras.Input((), name="weight")
    given = {"ids": IDS, "weight": np.array([1.0, 2.0], "float32")}
    assert not find_leaks(keras.Model([ids, weight], sealed * weight[:, None, None]), given)
    report = find_leaks(keras.Model([ids, weight], sealed * ops.mean(weight)), given)
    assert {leak.input for leak in report.leaks} == {"weight"}
    assert {(leak.example, leak.position, leak.output_example) for leak in report.leaks} == {
        (0, None, 1),
        (1, None, 0),
    }


def test_floats_stay_what_their_columns_may_be():
    """A logarithm of numbers above 0, and a category that an embedding reads."""
    x = keras.Input((None, 3))
    kind = layers.Embedding(4, 8)(ops.cast(x[..., 2], "int32"))
    read = kind + layers.Dense(8)(ops.log(x[..., :2]))
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random((2, 6, 2)) + 0.01, rng.integers(0, 4, (2, 6, 1))], -1)
    report = find_leaks(keras.Model(x, read + causal()(read)), values)
    assert not report
    assert report.tried == report.pairs
    assert find_leaks(keras.Model(x, read + ops.mean(read, 1, keepdims=True)), values, rule=CAUSAL)


def test_as_many_heads_as_positions():
    """Probabilities `(batch, heads, queries, keys)` of a model of fixed length."""
    x = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(4, 3)
    outputs = attention(x, x, use_causal_mask=True, return_attention_scores=True)
    report = find_leaks(keras.Model(x, outputs), FLOATS[:, :4])
    assert not report
    assert "The output 'output 1', (2, 4, 4, 4), has no axis that is known" in str(report)


@pytest.mark.parametrize("values", [FLOATS[:, 0, :3], FLOATS[:, 0, :7], np.eye(7)[:2], IDS[:, :1]])
@pytest.mark.parametrize("rule", [None, CAUSAL], ids=["layers", "rule"])
def test_features_of_a_text_have_no_positions(values, rule):
    """`(batch, count)` beside ids of any length; where there are as many, too."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    features = keras.Input(values.shape[1:], dtype=str(values.dtype), name="f")
    x = layers.Embedding(10, 8)(ids)
    x += layers.Dense(8)(ops.cast(features, "float32"))[:, None]
    given = {"tokens": IDS, "features": values}  # by other names than those of the inputs
    inputs = {"tokens": ids, "features": features}
    report = find_leaks(keras.Model(inputs, x + causal()(x)), given, rule=rule)
    assert not report
    assert report.tried == report.pairs == 2 * 21
    assert "The input 'features' was kept within an example: it has a fixed length" in str(report)
    model = keras.Model(inputs, x + layers.MultiHeadAttention(2, 3)(x, x))
    assert find_leaks(model, given, rule=CAUSAL).pairs == 2 * 21
    with pytest.raises(ValueError, match="`inputs` hold nothing to change"):
        find_leaks(model, given | {"tokens": 0 * IDS + 3}, rule=CAUSAL)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_replaced_by_numbers(wrong):
    """Keras' additive mask lets NaN through (0 * NaN); this package's attention does not."""
    values = FLOATS.copy()
    values[0, 4] = wrong
    x = keras.Input((6, 8))
    assert find_leaks(keras.Model(x, causal()(x)), values)
    ours = hm.PerHeadMaskedMultiHeadAttention(2, 3, mask_spec=CAUSAL)
    assert not find_leaks(keras.Model(x, ours(x, x)), values)


class Subclassed(keras.Model):
    def __init__(self, other=False):
        super().__init__()
        self.embedding = layers.Embedding(12, 8)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.other = other

    def call(self, ids):
        x = self.embedding(ids)
        return x + self.attention(x, x + 1 if self.other else x, use_causal_mask=True)


def test_a_model_without_a_graph():
    report = find_leaks(Subclassed(), IDS)
    assert not report
    assert report.tried == report.pairs == 2 * 21
    with pytest.raises(ValueError, match=r"attends to another sequence\. Pass as `rule` what"):
        find_leaks(Subclassed(other=True), IDS)
    assert not find_leaks(Subclassed(other=True), IDS, rule=CAUSAL)


def test_what_was_left_out_is_said():
    model = padded_by_input(as_heads=False)
    masked = {"token_ids": IDS, "padding_mask": (TOKENS != 0).astype("int32")}
    kept = "The input 'padding_mask' was kept within an example: "
    assert f"{kept}it is a mask, or" in str(find_leaks(model, masked))
    masked["padding_mask"][:] = 1
    assert f"{kept}all its values are equal." in str(find_leaks(model, masked, rule=CAUSAL))


# --- Sealed models --------------------------------------------------------------------------------


def obeying(spec, inputs):
    """Two layers under `spec`, and the inputs of the model."""
    model = hm.apply_head_masks(stack(2), spec, add_inputs=True)
    return model, {"token_ids": IDS[:, :5]} | inputs


def sealed(spec, data):
    inputs = {}
    for name, kind in spec.inputs.items():
        shape = (2, 4, 5, 5) if kind.rank is None else (2, 5)
        elements = strategies.ids if name == "ids" else st.booleans()
        dtype = "int32" if name == "ids" else "bool"
        inputs[name] = data.draw(strategies.arrays(elements, shape, dtype))
    model, given = obeying(spec, inputs)
    report = find_leaks(model, given)
    assert not report, report
    assert report.tried == report.pairs or spec.inputs


@settings(strategies.FEW, max_examples=3)
@given(spec=strategies.any_specs, data=st.data())
def test_sealed_models_pass(spec, data):
    sealed(spec, data)


@pytest.mark.long
@settings(strategies.MANY, max_examples=200)
@given(spec=strategies.any_specs, data=st.data())
def test_200_sealed_models_pass(spec, data):
    sealed(spec, data)


def test_ends_of_sentences_are_tried_in_embeddings():
    """Another id would move the sentences; what the embedding makes of it does not."""
    model = hm.apply_head_masks(stack(2), hm.SameSentence(9, "token_ids"))
    report = find_leaks(model, {"token_ids": IDS})
    assert not report
    assert report.tried == report.pairs > 0
    broken = hm.apply_head_masks(stack(2), hm.SameSentence(9, "token_ids"), layers=1)
    assert find_leaks(broken, {"token_ids": IDS}, rule=hm.SameSentence(9, "token_ids"))


def test_a_token_between_may_decide_what_a_query_sees():
    """Whether key 0 is in the sentence of query 3 depends on token 1, which query 3 cannot see."""
    model = hm.apply_head_masks(stack(1), hm.SameSentence(9, "token_ids") & hm.Keys(0, 1))
    report = find_leaks(model, {"token_ids": IDS[:, :5]})
    assert not report
    assert report.tried == report.pairs > 0


# --- What an output may depend on -----------------------------------------------------------------


def paths(masks, query, key):
    """Whether a path leads from a key to a query, over layers and heads, by loops."""
    batch_of_one = [mask[0] for mask in masks]
    heads = [range(len(mask)) for mask in batch_of_one]
    length = batch_of_one[0].shape[-1]
    for middle in itertools.product(range(length), repeat=len(masks) - 1):
        stops = (key, *middle, query)
        for chosen in itertools.product(*heads):
            steps = zip(batch_of_one, chosen, stops[1:], stops[:-1], strict=True)
            if all(mask[head, q, k] for mask, head, q, k in steps):
                return True
    return False


@settings(strategies.MANY, max_examples=15)
@given(st.lists(strategies.arrays(st.booleans(), (1, 2, 3, 3), "bool"), min_size=1, max_size=3))
def test_composition_is_the_paths_through_the_layers(masks):
    expected = [[paths(masks, q, k) for k in range(3)] for q in range(3)]
    assert reaches.composed(masks)[0].tolist() == expected


@settings(strategies.MANY, max_examples=15)
@given(st.lists(strategies.arrays(st.booleans(), (1, 2, 4, 4), "bool"), min_size=1, max_size=3))
def test_without_a_change_of_masks_what_may_change_is_what_reaches(masks):
    for key in range(4):
        changed = np.arange(4)[None] == key
        assert (
            reaches.may_change(changed, masks, masks) == reaches.composed(masks)[..., key]
        ).all()


def test_a_position_keeps_what_it_has():
    model = hm.apply_head_masks(stack(1), hm.Window(1, -1))  # no query sees itself
    report = find_leaks(model, IDS)
    assert not report
    assert report.pairs == 2 * (49 - 7 - 6)


def test_windows_compose():
    window = hm.Window(1, 1)
    model = hm.apply_head_masks(stack(2), window)
    sealed = find_leaks(model, IDS)
    assert not sealed
    assert sealed.pairs == 2 * (4 + 3 + 2 + 1) * 2  # of 7 x 7 in two texts, those 3 apart or more
    report = find_leaks(model, IDS, rule=window)
    assert {abs(leak.position - leak.output_position) for leak in report.leaks} == {2}


# --- Reports --------------------------------------------------------------------------------------


_PLACE = ("example", "position")


def test_a_report_prints_and_saves_itself():
    report = find_leaks(floats(MeanOverTime(name="planted")), FLOATS, rule=CAUSAL)
    first, header, row, *_, last = str(report).splitlines()
    assert first == (
        "30 leaks. Tried 30 of 30 hidden pairs of positions, and 2 of 2 pairs of examples."
    )
    assert header.split() == ["input", *_PLACE, "output", *_PLACE, "change"]
    assert row.split()[0] == "features"
    assert last == "It shows first in the layer 'planted' (MeanOverTime)."
    found = json.loads(json.dumps(report.to_json()))
    assert len(found["leaks"]) == found["pairs"] == 30
    assert found["leaks"][0]["change"] >= found["leaks"][1]["change"] > 0
    with pytest.raises(AssertionError, match="30 leaks"):
        assert_no_leaks(floats(MeanOverTime()), FLOATS, rule=CAUSAL)
    with pytest.raises(
        AssertionError, match=r"^Nothing is hidden within a text, so nothing is proven"
    ):
        assert_no_leaks(floats(MeanOverTime()), FLOATS, rule=hm.Full())


def test_where_one_head_sees_everything_nothing_is_hidden():
    of_one_head = hm.PerHead({0: CAUSAL})
    attention = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=of_one_head)
    report = find_leaks(floats(lambda x: attention(x, x)), FLOATS)
    assert (report.pairs, report.tried) == (0, 0)
    first, why = str(report).splitlines()
    assert first.startswith(
        "Nothing is hidden within a text, so nothing is proven: each output may"
    )
    assert first.endswith("Tried 0 of 0 hidden pairs of positions, and 2 of 2 pairs of examples.")
    assert why.startswith("One head without a rule lets an output depend on every position.")
    by_rule = find_leaks(floats(lambda x: attention(x, x)), FLOATS, rule=hm.Full())
    assert str(by_rule).splitlines() == [first]


@pytest.mark.tensorflow
def test_a_report_draws_itself():
    pytest.importorskip("matplotlib")
    figure = find_leaks(floats(MeanOverTime()), FLOATS, rule=CAUSAL).plot()
    (ax,) = figure.axes
    assert ax.get_xlabel() == "positions of the input 'features'"
    assert ax.get_ylabel() == "positions of the output 'output'"
    crosses = {tuple(map(float, xy)) for line in ax.lines for xy in line.get_xydata()}
    assert crosses == {(j, i) for i in range(6) for j in range(i + 1, 6)}


@pytest.mark.tensorflow
def test_what_is_shipped(tmp_path):
    for name, mask in (("open", False), ("sealed", True)):
        x = keras.Input((6, 8), name="features")
        attention = layers.MultiHeadAttention(2, 3)
        model = keras.Model(x, attention(x, x, use_causal_mask=mask))
        model.export(tmp_path / name, verbose=False)
        report = find_leaks(str(tmp_path / name), {"features": FLOATS}, rule=CAUSAL)
        assert bool(report) is not mask
        assert report.first_layer is None
        assert report.tried == report.pairs == 30
    with pytest.raises(ValueError, match="The SavedModel has no layers to read"):
        find_leaks(tmp_path / "open", FLOATS)
    for wrong in ({"a": FLOATS, "b": FLOATS}, {"a": FLOATS}):
        received = rf"has the inputs \['features'\]. Received: {re.escape(str(sorted(wrong)))}"
        with pytest.raises(ValueError, match=received):
            find_leaks(tmp_path / "open", wrong, rule=CAUSAL)
    shape = r"'features' of the SavedModel .* has the shape \(None, 6, 8\). Received: \(2, 7\)."
    with pytest.raises(ValueError, match=shape):
        find_leaks(tmp_path / "open", TOKENS, rule=CAUSAL)
    assert find_leaks(tmp_path / "open", FLOATS, rule=CAUSAL).leaks[0].input == "features"
    one_layer(mask_zero=False).export(tmp_path / "ids", verbose=False)
    with pytest.raises(TypeError, match="`token_ids` must be integer or boolean"):
        find_leaks(tmp_path / "ids", FLOATS[..., 0], rule=CAUSAL)
    with pytest.raises(ValueError, match="is not the folder of a SavedModel: it holds no saved_"):
        find_leaks(tmp_path, FLOATS, rule=CAUSAL)
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(tmp_path / "none"))
    with pytest.raises(ValueError, match="has no signatures, so nothing says how to call it"):
        find_leaks(tmp_path / "none", FLOATS, rule=CAUSAL)


# --- Bad input ------------------------------------------------------------------------------------


class ByHand(layers.Layer):
    def call(self, x):
        return ops.softmax(x @ ops.transpose(x, (0, 2, 1))) @ x


def over_two_axes():
    x = keras.Input((6, 1, 8))
    return keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x))


@pytest.mark.parametrize(
    ("model", "inputs", "rule", "message"),
    [
        (
            lambda: floats(ByHand(name="by_hand")),
            FLOATS,
            None,
            "'by_hand' .ByHand. is out of reach",
        ),
        (lambda: floats(layers.Conv1D(8, 3, padding="same")), FLOATS, None, "Conv1D. mixes posit"),
        (lambda: floats(layers.LSTM(8, return_sequences=True)), FLOATS, None, "Pass it as `rule`"),
        (one_layer, TOKENS * 0 + 3, None, "hold nothing to change: .* 'token_ids': int32 .2, 7."),
        (one_layer, TOKENS[:0], None, r"at least one example, .* 'token_ids': int32 .0, 7."),
        (one_layer, TOKENS[0], None, r"each input of shape \(batch, length\) or .* int32 \(7,\)"),
        (lambda: floats(layers.Dense(8)), FLOATS, None, "the model has no attention layer, which"),
        (one_layer, TOKENS, hm.SameSegment("parts"), r"reads \['parts'\], and the inputs are"),
        (over_two_axes, FLOATS[:, :, None], None, r"over several axes, .*Pass as `rule` what"),
    ],
)
def test_what_cannot_be_tried_is_an_error(model, inputs, rule, message):
    with pytest.raises(ValueError, match=message):
        find_leaks(model(), inputs, rule)


def test_other_kinds_are_errors():
    with pytest.raises(TypeError, match="must be a Keras model, the path of a SavedModel"):
        find_leaks(3, FLOATS)
    with pytest.raises(TypeError, match="`rule` must be"):
        find_leaks(one_layer(), TOKENS, rule="causal")
    with pytest.raises(TypeError, match="`tolerance` must be a number from 0 on"):
        find_leaks(one_layer(), TOKENS, tolerance="1")
    for tolerance in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="`tolerance` must be finite and from 0 on"):
            find_leaks(one_layer(), TOKENS, tolerance=tolerance)
    with pytest.raises(ValueError, match=r"must be arrays. Received: \[\[1, 2\], \[3\]\]. Pad"):
        find_leaks(one_layer(), [[1, 2], [3]])
    for inputs in ({}, None, 3, "a text", iter([TOKENS])):
        with pytest.raises(TypeError, match=r"`inputs` must hold arrays, \(batch, length\) or"):
            find_leaks(one_layer(), inputs)


class InTrainingAlone(keras.Model):
    """Its attention does not run when it serves."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def call(self, x, training=False):
        return self.attention(x, x) if training else 2 * x


def test_attention_that_does_not_run_says_nothing():
    model = InTrainingAlone()
    model(FLOATS, training=True)
    with pytest.raises(ValueError, match=r"None of the attention layers .* ran. Pass as `rule`"):
        find_leaks(model, FLOATS)
    assert not find_leaks(model, FLOATS, rule=hm.Window(0, 0))


# --- Which positions are padding ------------------------------------------------------------------


def towers(names, masked):
    """Two inputs of ids, and attention to the sum of what they embed, or to each apart."""
    inputs = [keras.Input((7,), dtype="int32", name=name) for name in names]
    embedded = [
        layers.Embedding(12, 8, mask_zero=name in masked)(x)
        for name, x in zip(names, inputs, strict=True)
    ]
    return inputs, embedded


def test_ids_beside_masked_ones_do_not_mark_padding():
    """The mask is lost by `+`: it shows whatever the inputs are named."""
    given = {"words": TOKENS, "token_ids": np.where(IDS > 6, 0, IDS)}
    inputs, (words, others) = towers(given, ["words"])
    attention = layers.MultiHeadAttention(2, 3)
    lost = words + others
    kept = layers.Lambda(lambda x: x[0] + x[1], mask=lambda x, mask: mask[0])([words, others])
    report = find_leaks(keras.Model(inputs, attention(lost, lost)), given)
    places = {(leak.example, leak.position) for leak in report.leaks}
    assert places == {(0, 6), (1, 5), (1, 6)}  # where `words` is 0
    assert not find_leaks(keras.Model(inputs, attention(kept, kept)), given)


def test_inputs_that_disagree_on_padding_need_a_rule():
    given = {"a": TOKENS, "b": TOKENS[::-1]}
    inputs, embedded = towers(given, given)
    outputs = [layers.MultiHeadAttention(2, 3)(x, x) for x in embedded]
    model = keras.Model(inputs, outputs)
    with pytest.raises(ValueError, match=r"mark padding at other positions. Pass in `real` which"):
        find_leaks(model, given)
    apart = {"a": given["a"], "b": given["a"]}
    assert not find_leaks(model, apart, real=TOKENS != 0)
    assert not find_leaks(keras.Model(inputs[1], outputs[1]), given["b"])


def test_rows_that_keras_masks_are_padding():
    x = keras.Input((6, 8))
    values = FLOATS.copy()
    values[0, 4:] = 0
    masked = layers.Masking()(x)
    assert not find_leaks(keras.Model(x, causal()(masked)), values)


@pytest.mark.parametrize("counts", [(7, 4), (4, 0)], ids=str)
def test_real_says_which_positions_are_no_padding(counts):
    """Stock attention makes something of all keys for a query that sees none."""
    ids, keep = (
        keras.Input((None,), dtype=d, name=n) for d, n in (("int32", "ids"), ("bool", "keep"))
    )
    x = layers.Embedding(10, 8)(ids)
    of_pairs = ops.logical_and(keep[:, None], keep[:, :, None])
    inputs = {"ids": IDS, "keep": np.arange(7) < np.array(counts)[:, None]}

    y = x + layers.MultiHeadAttention(2, 4)(x, x, attention_mask=of_pairs)
    report = find_leaks(keras.Model([ids, keep], y), inputs, real=inputs["keep"])
    assert not report
    assert report.tried == report.pairs == sum(size * (7 - size) for size in counts)
    by_rule = find_leaks(keras.Model([ids, keep], y), inputs, hm.Full(), inputs["keep"])
    assert (bool(by_rule), by_rule.pairs) == (False, report.pairs)
    # A rule says what it says, of padding too, where nothing says what padding is.
    report = find_leaks(
        keras.Model([ids, keep], y), inputs, hm.KeyFlag("keep") & hm.QueryFlag("keep")
    )
    assert {(x.example, x.output_position) for x in report.leaks} == {
        (example, row) for example in range(2) for row in range(counts[example], 7)
    }
    y = x + layers.MultiHeadAttention(2, 4)(x, x)
    leaking = find_leaks(keras.Model([ids, keep], y), inputs, hm.Full(), inputs["keep"])
    assert len(leaking.leaks) == leaking.pairs
    with pytest.raises(ValueError, match=r"of the shape \(2, 7\). Received: shape \(2, 6\)"):
        find_leaks(keras.Model([ids, keep], y), inputs, real=inputs["keep"][:, 1:])


def test_where_no_position_takes_part_all_are_tried():
    """Not all is padding: under `Nothing()`, which hides all from all, a mean over time leaks."""
    attention = layers.MultiHeadAttention(2, 3)
    model = floats(lambda x: attention(x, x), MeanOverTime())
    report = find_leaks(hm.apply_head_masks(model, hm.Nothing()), FLOATS)
    assert len(report.leaks) == report.pairs == 2 * 30


# --- How much is a change -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaled",
    [
        lambda x: 1e-6 * x,
        lambda x: layers.Concatenate()([x, 0 * x[..., :1] - 1e9]),
        lambda x: layers.Dense(3000, activation="softmax")(x),
        lambda x: x * np.array([1e6, 1, 1, 1, 1, 1], "float32")[:, None],
    ],
    ids=["small", "beside a large feature", "of many classes", "beside a large row"],
)
def test_a_change_is_compared_with_what_its_feature_has(scaled):
    x = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(2, 3)
    leaking = keras.Model(x, scaled(x + attention(x, x)))
    report = find_leaks(leaking, FLOATS, rule=CAUSAL)
    assert len(report.leaks) == report.pairs
    assert not find_leaks(keras.Model(x, scaled(x + causal()(x))), FLOATS)


def test_a_leak_beside_a_massive_activation():
    """Two features of the first token, as in many pretrained models; what leaks is 1e-2 of all."""
    massive = np.zeros((6, 8), "float32")
    massive[0, :2] = 1e4
    x = keras.Input((6, 8))
    leaked = 1e-2 * ops.sum(x, 1, keepdims=True) * np.eye(8, dtype="float32")[0]
    report = find_leaks(keras.Model(x, x + massive + leaked), FLOATS, rule=hm.Window(0, 0))
    rows = {(leak.output_position, leak.position) for leak in report.leaks}
    assert rows >= {(i, j) for i in range(1, 6) for j in range(6) if i != j}
    assert not find_leaks(keras.Model(x, x + massive), FLOATS, rule=hm.Window(0, 0))


@pytest.mark.parametrize("is_relu", [False, True])
@pytest.mark.parametrize("features", [1, 8])
def test_rounding_is_no_leak(features, is_relu):
    """A number near 0 is a sum of larger ones: it is rounded as these are."""
    before = np.random.default_rng(0).normal(size=(2, 500, features))
    before = np.maximum(before, 0) if is_relu else before
    limit = 1e-5 * scales(before, True)
    after = before + 3e-7 * np.random.default_rng(1).normal(size=before.shape)
    assert not difference(before, after, True, limit).any()
    after[0, 3, 0] += 1e-3
    assert np.argwhere(difference(before, after, True, limit)).tolist() == [[0, 3]]


def test_noise_is_as_large_as_the_inputs():
    x = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(2, 3)
    scaled = 1e-9 * x
    assert find_leaks(keras.Model(x, attention(scaled, scaled)), FLOATS * 0 + 1e9, rule=CAUSAL)


def test_whole_numbers_as_floats_are_ids():
    x = keras.Input((7,))
    embedded = layers.Embedding(12, 8)(x)
    model = keras.Model(x, causal()(embedded))
    report = find_leaks(model, IDS.astype("float32"))
    assert not report
    assert report.tried == report.pairs > 0
