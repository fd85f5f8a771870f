"""What heads attend to, against loops over queries and keys, and for heads made by hand."""

import functools
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


def tokens(name="token_ids", dtype="int32"):
    return keras.Input((None,), dtype=dtype, name=name)


def own_attention(heads=2, name="attention", **more):
    attention = layers.MultiHeadAttention(heads, 4, name=name, **more)
    return lambda x: attention(x, x)


def over(x, *blocks):
    """A model of `x` through `blocks`, or attention."""
    y = x
    for block in blocks or [own_attention()]:
        y = block(y)
    return keras.Model(x, y)


def of_ids(*blocks):
    """Over embedded ids."""
    return over(tokens(), layers.Embedding(40, 8), *(blocks or [own_attention()]))


def with_cross_attention():
    x, other = keras.Input((4, 8), name="x"), keras.Input((6, 8), name="other")
    y = own_attention(3, "own")(x)
    y = layers.MultiHeadAttention(2, 4, name="to_other")(y, other)
    return keras.Model([x, other], y)


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
    shapes = {path: x.shape[1:] for path, x in found.items()}
    assert shapes == {"own": (3, 4, 4), "to_other": (2, 4, 6)}
    assert list(attention_probabilities(model, OF_TWO, "other")) == ["to_other"]
    assert measure_heads(model, OF_TWO).layers == ("own",)


def test_a_layer_that_runs_twice_has_two_entries():
    x = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(x, attention(attention(x, x), attention(x, x)))
    found = attention_probabilities(model, OF_TWO[0])
    assert list(found) == ["attention", "attention[1]", "attention[2]"]


def by_loops(probabilities, ids, real, end_ids=(END,), special_ids=SPECIAL):
    """By measure (heads,), of probabilities `(batch, heads, queries, keys)`."""
    heads = probabilities.shape[1]
    sums, most, even = ({name: np.zeros(heads) for name in SHARES} for _ in range(3))
    queries, texts = np.zeros(heads), range(ids.shape[1])
    for b, head, i in np.ndindex(*probabilities.shape[:3]):
        keys = [j for j in texts if real[b, j]]
        total = math.fsum(float(probabilities[b, head, i, j]) for j in keys)
        if not real[b, i] or total == 0:
            continue
        queries[head] += 1
        of_keys = {j: float(probabilities[b, head, i, j]) / total for j in keys}
        sentence = [sum(int(x in end_ids) for x in ids[b, :j]) for j in texts]
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


def padded(name):
    """A model without a mask: padding is known to `measure_heads` alone."""
    ids, mask = tokens(), tokens(name, "bool")
    x = layers.Embedding(12, 8)(ids) * keras.ops.cast(mask, "float32")[..., None]
    return keras.Model({"token_ids": ids, name: mask}, own_attention(4)(x))


SOME = hm.PerHead({0: PREVIOUS, 2: hm.Window(2, 1)})
PADDING = {"padding_mask": "`padding_mask`", "attention_mask": "`attention_mask`"}
PADDING |= {"other": "none known"}


@pytest.mark.parametrize(
    ("rule", "batch_size", "name"),
    [(hm.Full(), 32, None), (SOME, 2, None), *((hm.Full(), 2, name) for name in PADDING)],
)
def test_measures_are_those_of_loops_where_padding_does_not_count(rule, batch_size, name):
    model, inputs, real = one_layer(), LONG, LONG != 0
    if name:
        real = (np.arange(21) + 0 * LONG) % 3 > 0
        model, inputs = padded(name), {"token_ids": LONG, name: real}
    model = hm.apply_head_masks(model, rule)
    report = measure_heads(model, inputs, END, SPECIAL, batch_size=batch_size)
    probabilities = attention_probabilities(model, inputs)["attention"]
    real = real | (name == "other")
    reported = report.scores, report.upper_bound, report.uniform_baseline
    for found, wanted in zip(reported, by_loops(probabilities, LONG, real), strict=True):
        assert list(found) == SHARES
        for measure, values in found.items():
            assert_close(values[0], wanted[measure])
    assert (report.layers, report.heads) == (("attention",), (4,))
    assert (report.texts, report.tokens) == (5, int(real.sum()))
    assert report.padding == PADDING.get(name, "the Keras mask")


def two_inputs(first, second):
    inputs = [tokens(first), tokens(second)]
    x = layers.Add()([layers.Embedding(12, 8)(x) for x in inputs])
    return keras.Model(inputs, own_attention()(x))


@pytest.mark.parametrize("name", ["token_ids", "input_ids", "ids", "decoder_token_ids"])
def test_ids_have_a_usual_name(name):
    zeros = np.zeros_like(LONG)
    by_place = measure_heads(two_inputs(name, "segment_ids"), [LONG, zeros])
    by_name = measure_heads(two_inputs("segment_ids", name), {"segment_ids": zeros, name: LONG})
    for report in (by_place, by_name):
        assert report.upper_bound["duplicate"].max() > 0.5


def test_measures_that_need_ids_are_left_out_without_them():
    report = measure_heads(over(keras.Input((6, 8))), OF_TWO[1])
    assert set(report.scores).isdisjoint(["duplicate", "induction", "sentence", "special"])
    with pytest.raises(ValueError, match=r"There is no measure 'sentence': measured were"):
        report.plot("sentence")


ENDS = (37, 38, 39)
REPEATED = np.stack([np.tile(np.random.default_rng(n).permutation(12) + 1, 2) for n in range(3)])
REPEATED[:, [4, 7, 10]] = REPEATED[:, [16, 19, 22]] = ENDS
ROLES = {
    "previous token": PREVIOUS,
    "next token": hm.Window(0, 1) & ~hm.Window(0, 0),
    "current token": hm.Window(0, 0),
    "sentence": hm.SameSentence(ENDS),
    "local": hm.Window(3, 3),
    "special token": hm.KeyIn("token_ids", ENDS),
}


def test_roles_of_heads_made_by_rules():
    """The last head sees everything, and that before it nothing, so has no numbers."""
    rule = hm.PerHead(dict(enumerate([*ROLES.values(), hm.Nothing()])))
    model = hm.apply_head_masks(of_ids(own_attention(8)), rule)
    report = measure_heads(model, REPEATED, ENDS, ENDS)
    assert report.scores["previous"][0, 0] == 1.0
    assert np.argwhere(np.isnan(report.scores["self"])).tolist() == [[0, 6]]
    assert report.roles(0.9)["attention"] == dict(enumerate(ROLES))
    assert str(report.roles(0.9)).split("\n")[0] == "attention  head 0  previous token"
    assert 6 not in report.roles(0.0)["attention"]


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


def test_a_mask_of_pairs_marks_no_padding():
    """`attention_mask` as stock attention takes it, `(batch, queries, keys)`."""
    ids, pairs = tokens(), keras.Input((None, None), dtype="bool", name="attention_mask")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model([ids, pairs], layers.MultiHeadAttention(2, 4)(x, x, attention_mask=pairs))
    of_pairs = np.tile(np.tri(LONG.shape[1], dtype=bool), (len(LONG), 1, 1))
    report = measure_heads(model, [LONG, of_pairs])
    assert (report.padding, report.tokens) == ("none known", LONG.size)
    assert_close(report.scores["next"], np.zeros((1, 2)))


def of_no_rule(x):
    return layers.Attention(name="attention")([x, x])


def over_two_axes():
    return over(keras.Input((4, 5, 8)), own_attention(attention_axes=(1, 2)))


def pooled():
    pool = layers.AveragePooling1D(2)
    return over(keras.Input((6, 8)), own_attention(), pool, own_attention(name="pooled"))


class Trains(Block):
    def call(self, x, training=None):
        return super().call(x) if training is not False else x


FRACTIONS = np.random.default_rng(0).random((2, 9), "float32")
TWO_MASKS = functools.partial(two_inputs, "a_padding_mask", "b_padding_mask")
CAST = r'`token_ids` must be integer or boolean. Received dtype float32.*dtype="int32"'


UNSEEN = [
    (lambda: of_ids(of_no_rule), LONG, {}, ValueError, "whose masks are out of reach"),
    (lambda: of_ids(Block(name="known"), of_no_rule), LONG, {}, ValueError, "name the others in"),
    (lambda: of_ids(layers.Dense(2)), LONG, {}, ValueError, "The model holds no self-attention"),
    (lambda: 3, LONG, {}, TypeError, "`model` must be a Keras model. Received: 3"),
    (over_two_axes, np.ones((2, 4, 5, 8)), {}, ValueError, "must attend over one axis.* Leave it"),
    (lambda: of_ids(Trains()), LONG, {}, ValueError, "None of the attention layers .* ran when"),
    (one_layer, [FRACTIONS], {}, TypeError, CAST),
    (one_layer, {"token_ids": FRACTIONS}, {}, TypeError, CAST),
    (one_layer, [LONG, LONG], {}, ValueError, r"Received: 2 arrays in `inputs`. Pass one"),
]
UNMEASURED = [
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
    (TWO_MASKS, [LONG, LONG], {}, ValueError, "Cannot tell which input marks padding"),
    (with_cross_attention, OF_TWO, {"layers": "other"}, ValueError, "'to_other'.* another seq"),
    (pooled, OF_TWO[1], {}, ValueError, r"'pooled' must attend over .* of the texts.*3, 3"),
]


@pytest.mark.parametrize(
    ("function", "model", "inputs", "more", "error", "message"),
    [
        *((attention_probabilities, *row) for row in UNSEEN),
        *((measure_heads, *row) for row in UNMEASURED),
    ],
)
def test_what_is_refused(function, model, inputs, more, error, message):
    with pytest.raises(error, match=message):
        function(model(), inputs, **more)


def test_attention_out_of_reach_is_left_out_by_name():
    model = of_ids(Block(name="known"), of_no_rule)
    (path,) = attention_probabilities(model, LONG, layers="known")
    assert path.startswith("known/")
    assert measure_heads(model, LONG, layers="known").layers == (path,)
    assert measure_heads(pooled(), OF_TWO[1], layers="pooled").tokens == 6  # of other positions


@pytest.mark.tensorflow
def test_attention_inside_a_function_of_its_own_is_refused():
    import tensorflow as tf

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = one_layer()
            self.call = tf.function(self.inner)

    with pytest.raises(ValueError, match=r"runs inside a `tf.function` or `jit`"):
        attention_probabilities(Outer(), LONG)
