"""What heads attend to, against loops over queries and keys, and for heads made by hand."""

import math

import keras
import numpy as np
import pytest
from contract import by_hand, numpy
from keras import layers
from small_models import TOKENS, Block, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.heads.measures import measure_heads
from keras_headmask.heads.reading import attention_probabilities

END, SPECIAL = 9, (5, 4)
PREVIOUS = hm.Window(1, 0) & ~hm.Window(0, 0)
SHARES = ["self", "previous", "next", "first", "duplicate", "induction"]
SHARES += ["special", "sentence", "local"]
LONG = np.random.default_rng(1).integers(1, 12, (5, 21)).astype("int32")
LONG[0, 17:] = LONG[1, 13:] = LONG[2, :4] = 0  # the third is padded on its left
OF_TWO = [np.random.default_rng(0).normal(size=(2, n, 8)).astype("float32") for n in (4, 6)]


def of_ids(*blocks, **attention):
    """Attention over embedded ids, under the name "attention", or `blocks`."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(40, 8)(ids)
    for block in blocks or [own_attention(**attention)]:
        x = block(x)
    return keras.Model(ids, x)


def own_attention(heads=2, name="attention", **more):
    attention = layers.MultiHeadAttention(heads, 4, name=name, **more)
    return lambda x: attention(x, x)


def with_cross_attention():
    x, other = keras.Input((4, 8), name="x"), keras.Input((6, 8), name="other")
    y = own_attention(3, "own")(x)
    y = layers.MultiHeadAttention(2, 4, name="to_other")(y, other)
    return keras.Model([x, other], y)


# --- Probabilities -------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_layer():
    model = one_layer()
    found = attention_probabilities(model, TOKENS)
    real = TOKENS != 0
    x = numpy(model.get_layer("embedding")(TOKENS))
    mask = real[:, None, None, :] & real[:, None, :, None]
    _, expected = by_hand(model.get_layer("attention"), x, mask=mask)
    assert list(found) == ["attention"]
    assert found["attention"].dtype == "float32"
    rows = np.broadcast_to(real[:, None, :], (2, 4, 7))
    assert_close(found["attention"][rows], expected[rows])


def test_probabilities_under_a_rule_and_of_layers_inside_layers():
    masked = hm.apply_head_masks(stack(2), hm.PerHead({1: PREVIOUS}), ignore="block")
    found = attention_probabilities(masked, TOKENS)
    assert len(found) == 2
    for probabilities in found.values():
        assert_close(probabilities[:, 1, 1:], np.broadcast_to(np.eye(7)[:-1], (2, 6, 7)))
        assert not probabilities[:, 1, 0].any()
        assert_close(probabilities[:, 0].sum(-1), np.ones((2, 7)))


def test_probabilities_of_cross_attention():
    model = with_cross_attention()
    found = attention_probabilities(model, OF_TWO)
    assert {path: x.shape[1:] for path, x in found.items()} == {
        "own": (3, 4, 4),
        "to_other": (2, 4, 6),
    }
    assert list(attention_probabilities(model, OF_TWO, "other")) == ["to_other"]
    assert measure_heads(model, OF_TWO).layers == ("own",)


def test_a_layer_that_runs_twice_has_two_entries():
    x = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(x, attention(attention(x, x), attention(x, x)))
    found = attention_probabilities(model, OF_TWO[0])
    assert list(found) == ["attention", "attention[1]", "attention[2]"]


# --- Against loops -------------------------------------------------------------------------------


def by_loops(probabilities, ids, real, end_ids=(END,), special_ids=SPECIAL):
    """By measure (heads,), of probabilities `(batch, heads, queries, keys)`."""
    heads = probabilities.shape[1]
    sums, most, even = ({name: np.zeros(heads) for name in SHARES} for _ in range(3))
    queries = np.zeros(heads)
    for b, head, i in np.ndindex(*probabilities.shape[:3]):
        keys = [j for j in range(ids.shape[1]) if real[b, j]]
        total = math.fsum(float(probabilities[b, head, i, j]) for j in keys)
        if not real[b, i] or total == 0:
            continue
        queries[head] += 1
        of_keys = {j: float(probabilities[b, head, i, j]) / total for j in keys}
        sentence = [sum(int(x in end_ids) for x in ids[b, :j]) for j in range(ids.shape[1])]
        same = [j for j in keys if ids[b, j] == ids[b, i]]
        such = {
            "self": {i},
            "previous": {i - 1},
            "next": {i + 1},
            "first": {keys[0]},
            "duplicate": {j for j in same if j < i},
            "induction": {j + 1 for j in same if j + 1 <= i},
            "sentence": {j for j in keys if sentence[j] == sentence[i]},
            "special": {j for j in keys if ids[b, j] in special_ids},
            "local": set(range(i - 8, i + 9)),
        }
        for name, wanted in such.items():
            there = wanted & set(keys)
            sums[name][head] += sum(of_keys[j] for j in there)
            most[name][head] += bool(there)
            even[name][head] += len(there) / len(keys)
    return [{name: x / queries for name, x in found.items()} for found in (sums, most, even)]


@pytest.mark.parametrize(
    ("rule", "batch_size"), [(hm.Full(), 32), (hm.PerHead({0: PREVIOUS, 2: hm.Window(2, 1)}), 2)]
)
def test_measures_are_those_of_loops(rule, batch_size):
    model = hm.apply_head_masks(one_layer(), rule)
    report = measure_heads(model, LONG, END, SPECIAL, batch_size=batch_size)
    probabilities = attention_probabilities(model, LONG)["attention"]
    expected = by_loops(probabilities, LONG, LONG != 0)
    for found, wanted in zip(
        (report.scores, report.upper_bound, report.uniform_baseline), expected, strict=True
    ):
        assert list(found) == SHARES
        for name, values in found.items():
            assert_close(values[0], wanted[name])
    assert (report.layers, report.heads) == (("attention",), (4,))
    assert (report.texts, report.tokens) == (5, int((LONG != 0).sum()))
    assert report.padding == "the Keras mask"


def padded_tail(name):
    """A model without a mask: padding is known to `measure_heads` alone."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = keras.Input((None,), dtype="bool", name=name)
    x = layers.Embedding(12, 8)(ids)
    x = layers.Multiply()([x, keras.ops.expand_dims(keras.ops.cast(mask, "float32"), -1) + 1.0])
    return keras.Model({"token_ids": ids, name: mask}, own_attention(4)(x))


@pytest.mark.parametrize("name", ["padding_mask", "attention_mask", "other"])
def test_padding_does_not_count_where_it_is_known(name):
    real = (np.arange(21) + 0 * LONG) % 3 > 0
    model, inputs = padded_tail(name), {"token_ids": LONG, name: real}
    report = measure_heads(model, inputs, END, SPECIAL, batch_size=2)
    probabilities = attention_probabilities(model, inputs)["attention"]
    is_known = name != "other"
    expected, _, _ = by_loops(probabilities, LONG, real if is_known else real | True)
    for measure, values in expected.items():
        assert_close(report.scores[measure][0], values)
    assert report.padding == (f"`{name}`" if is_known else "none known")


# --- Where token ids come from -------------------------------------------------------------------


def two_inputs(first, second):
    inputs = [keras.Input((None,), dtype="int32", name=name) for name in (first, second)]
    x = layers.Add()([layers.Embedding(12, 8)(x) for x in inputs])
    return keras.Model(inputs, own_attention()(x))


@pytest.mark.parametrize("name", ["token_ids", "input_ids", "ids", "decoder_token_ids"])
def test_ids_have_a_usual_name(name):
    zeros = np.zeros_like(LONG)
    for model, given in (
        (two_inputs(name, "segment_ids"), [LONG, zeros]),
        (two_inputs("segment_ids", name), {"segment_ids": zeros, name: LONG}),
    ):
        report = measure_heads(model, given)
        assert report.upper_bound["duplicate"].max() > 0.5


def test_measures_that_need_ids_are_left_out_without_them():
    x = keras.Input((6, 8))
    report = measure_heads(keras.Model(x, own_attention()(x)), OF_TWO[1])
    assert set(report.scores).isdisjoint(["duplicate", "induction", "sentence", "special"])
    with pytest.raises(ValueError, match=r"There is no measure 'sentence': measured were"):
        report.plot("sentence")


# --- Roles ---------------------------------------------------------------------------------------

LENGTH = 24
REPEATED = np.stack(
    [np.tile(np.random.default_rng(n).permutation(LENGTH // 2) + 1, 2) for n in range(3)]
)
REPEATED[:, [4, 7, 10]] = REPEATED[:, [16, 19, 22]] = [37, 38, 39]


def test_roles_of_heads_made_by_rules():
    rule = hm.PerHead(
        {
            0: PREVIOUS,
            1: hm.Window(0, 1) & ~hm.Window(0, 0),
            2: hm.Window(0, 0),
            3: hm.SameSentence((37, 38, 39)),
            4: hm.Window(3, 3),
            5: hm.KeyIn("token_ids", (37, 38, 39)),
        }
    )
    model = hm.apply_head_masks(of_ids(heads=7), rule)
    report = measure_heads(model, REPEATED, (37, 38, 39), (37, 38, 39))
    assert report.scores["previous"][0, 0] == 1.0
    expected = ["previous token", "next token", "current token", "sentence", "local"]
    expected.append("special token")
    assert report.roles(0.9)["attention"] == dict(enumerate(expected))
    assert str(report.roles(0.9)).split("\n")[0] == "attention  head 0  previous token"


def test_no_head_is_local_where_all_texts_are_short():
    report = measure_heads(one_layer(), TOKENS, END)
    assert_close(report.scores["local"], np.ones((1, 4)))
    assert "local" not in str(report.roles(0.0))
    assert str(report.roles(1.0)) == "No head has a role."


# --- The report ----------------------------------------------------------------------------------


def test_a_layer_with_fewer_heads_is_padded_with_nan():
    report = measure_heads(of_ids(own_attention(2, "narrow"), own_attention(3, "wide")), LONG)
    assert report.heads == (2, 3)
    for by_measure in (report.scores, report.upper_bound, report.uniform_baseline):
        for values in by_measure.values():
            np.testing.assert_array_equal(np.isnan(values), [[False, False, True], [False] * 3])
    first, heading, *rows = repr(report).splitlines()
    assert first == "5 texts of 105 tokens; padding: none known."
    assert heading.split() == ["layer", "head", "role", *report.scores]
    assert [row.split()[:2] for row in rows[1:3]] == [["narrow", "1"], ["wide", "0"]]


def test_a_head_that_sees_nothing_has_nan():
    model = hm.apply_head_masks(one_layer(), hm.PerHead({1: hm.Nothing()}))
    report = measure_heads(model, LONG)
    assert list(np.isnan(report.scores["self"][0])) == [False, True, False, False]
    assert 1 not in report.roles(0.0).get("attention", {})


def test_a_mask_of_pairs_marks_no_padding():
    """`attention_mask` as stock attention takes it, `(batch, queries, keys)`."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    pairs = keras.Input((None, None), dtype="bool", name="attention_mask")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model([ids, pairs], layers.MultiHeadAttention(2, 4)(x, x, attention_mask=pairs))
    of_pairs = np.broadcast_to(np.tri(LONG.shape[1], dtype=bool), (len(LONG), *[LONG.shape[1]] * 2))
    report = measure_heads(model, [LONG, of_pairs])
    assert (report.padding, report.tokens) == ("none known", LONG.size)
    assert_close(report.scores["next"], np.zeros((1, 2)))


# --- Bad input -----------------------------------------------------------------------------------


def of_no_rule(x):
    return layers.Attention(name="attention")([x, x])


def over_two_axes():
    x = keras.Input((4, 5, 8))
    return keras.Model(x, own_attention(attention_axes=(1, 2))(x))


def pooled():
    x = keras.Input((6, 8))
    return keras.Model(
        x, own_attention(name="pooled")(layers.AveragePooling1D(2)(own_attention()(x)))
    )


class Trains(Block):
    def call(self, x, training=None):
        return super().call(x) if training is not False else x


FRACTIONS = np.random.default_rng(0).random((2, 9), "float32")
CAST = r'`token_ids` must be integer or boolean. Received dtype float32.*dtype="int32"'


@pytest.mark.parametrize("function", [attention_probabilities, measure_heads])
@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        (lambda: of_ids(of_no_rule), LONG, ValueError, "whose masks are out of reach"),
        (lambda: of_ids(Block(name="known"), of_no_rule), LONG, ValueError, "name the others in"),
        (lambda: of_ids(layers.Dense(2)), LONG, ValueError, "The model holds no self-attention"),
        (lambda: 3, LONG, TypeError, "`model` must be a Keras model. Received: 3"),
        (over_two_axes, np.ones((2, 4, 5, 8)), ValueError, "must attend over one axis.* Leave it"),
        (lambda: of_ids(Trains()), LONG, ValueError, "None of the attention layers .* ran when"),
        (one_layer, [FRACTIONS], TypeError, CAST),
        (one_layer, {"token_ids": FRACTIONS}, TypeError, CAST),
        (one_layer, [LONG, LONG], ValueError, r"Received: 2 arrays in `inputs`. Pass one"),
    ],
)
def test_attention_that_cannot_be_seen_is_refused(function, model, inputs, error, message):
    with pytest.raises(error, match=message):
        function(model(), inputs)


def test_attention_out_of_reach_is_left_out_by_name():
    model = of_ids(Block(name="known"), of_no_rule)
    (path,) = attention_probabilities(model, LONG, layers="known")
    assert path.startswith("known/")
    assert measure_heads(model, LONG, layers="known").layers == (path,)


@pytest.mark.tensorflow
def test_attention_inside_a_function_of_its_own_is_refused():
    import tensorflow as tf

    model = one_layer()
    inner = tf.function(model)

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, x):
            return inner(x)

    with pytest.raises(ValueError, match=r"runs inside a `tf.function` or `jit`"):
        attention_probabilities(Outer(), LONG)


@pytest.mark.parametrize(
    ("model", "inputs", "more", "error", "message"),
    [
        (one_layer, LONG[:0], {}, ValueError, r"no empty ones. Received: \[\(0, 21\)\]"),
        (one_layer, LONG[:, :0], {}, ValueError, r"no empty ones. Received: \[\(5, 0\)\]"),
        (one_layer, [[1, 2]], {}, ValueError, "`inputs` must hold arrays"),
        (one_layer, 0 * LONG, {}, ValueError, "padding alone, by the Keras mask"),
        (one_layer, LONG, {"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        (one_layer, LONG, {"special_ids": "x"}, TypeError, "`special_ids` must be ids"),
        (one_layer, LONG, {"end_ids": ()}, ValueError, "`end_ids` must hold at least one id"),
        (one_layer, LONG, {"end_ids": 70}, ValueError, "among the token ids .* Received: 70"),
        (pooled, OF_TWO[1], {"end_ids": END}, ValueError, "must stand among the token ids"),
        (lambda: two_inputs("a", "b"), [LONG, LONG], {}, ValueError, r"token ids: \['a', 'b'\]"),
        (
            lambda: two_inputs("a_padding_mask", "b_padding_mask"),
            *([LONG, LONG], {}, ValueError, "Cannot tell which input marks padding"),
        ),
        (with_cross_attention, OF_TWO, {"layers": "other"}, ValueError, "'to_other'.* another seq"),
        (pooled, OF_TWO[1], {}, ValueError, r"'pooled' must attend over .* of the texts.*3, 3"),
    ],
)
def test_bad_input_is_refused(model, inputs, more, error, message):
    with pytest.raises(error, match=message):
        measure_heads(model(), inputs, **more)


def test_attention_within_other_positions_is_measured_alone():
    assert measure_heads(pooled(), OF_TWO[1], layers="pooled").tokens == 6
