"""What heads attend to, against loops over queries and keys, and for heads made by hand."""

import json
import math
import weakref

import keras
import numpy as np
import pytest
from contract import by_hand, numpy
from keras import layers
from small_models import TOKENS, Block, one_layer, stack
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.heads import reading
from keras_headmask.heads.measures import measure_heads
from keras_headmask.heads.reading import attention_probabilities

END, SPECIAL = 9, (5, 4)
PREVIOUS = hm.Window(1, 0) & ~hm.Window(0, 0)
SHARES = ["self", "previous", "next", "first", "duplicate", "induction"]
SHARES += ["sentence", "special", "local"]


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
    masked = hm.apply_head_masks(stack(2), hm.PerHead({1: PREVIOUS}))
    found = attention_probabilities(masked, TOKENS)
    assert len(found) == 2
    for probabilities in found.values():
        assert_close(probabilities[:, 1, 1:], np.broadcast_to(np.eye(7)[:-1], (2, 6, 7)))
        assert not probabilities[:, 1, 0].any()
        assert_close(probabilities[:, 0].sum(-1), np.ones((2, 7)))


def with_cross_attention():
    x, other = keras.Input((4, 8), name="x"), keras.Input((6, 8), name="other")
    y = layers.MultiHeadAttention(3, 4, name="own")(x, x)
    y = layers.MultiHeadAttention(2, 4, name="to_other")(y, other)
    return keras.Model([x, other], y)


OF_TWO = [np.random.default_rng(0).normal(size=(2, n, 8)).astype("float32") for n in (4, 6)]


def test_probabilities_of_cross_attention():
    found = attention_probabilities(with_cross_attention(), OF_TWO)
    assert {path: x.shape for path, x in found.items()} == {
        "own": (2, 3, 4, 4),
        "to_other": (2, 2, 4, 6),
    }
    assert list(attention_probabilities(with_cross_attention(), OF_TWO, "other")) == ["to_other"]


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
    names = [*SHARES, "distance", "entropy"]
    sums = {name: np.zeros(heads) for name in names}
    most, even = ({name: np.zeros(heads) for name in SHARES} for _ in range(2))
    queries = np.zeros(heads)
    for b, head, i in np.ndindex(*probabilities.shape[:3]):
        keys = [j for j in range(ids.shape[1]) if real[b, j]]
        total = math.fsum(float(probabilities[b, head, i, j]) for j in keys)
        if not real[b, i] or total == 0:
            continue
        queries[head] += 1
        of_keys = {j: float(probabilities[b, head, i, j]) / total for j in keys}
        sentence = [sum(int(x in end_ids) for x in ids[b, :j]) for j in range(ids.shape[1])]
        for j, p in of_keys.items():
            sums["distance"][head] += p * abs(i - j)
            sums["entropy"][head] -= p * math.log(p) if p > 0 else 0
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


LONG = np.random.default_rng(1).integers(1, 12, (5, 21)).astype("int32")
LONG[0, 17:] = LONG[1, 13:] = LONG[2, :4] = 0  # the third is padded on its left


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
        assert list(found) == list(wanted)
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
    x = layers.MultiHeadAttention(4, 3, name="attention")(x, x)
    return keras.Model({"token_ids": ids, name: mask}, x)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("padding_mask", {}, "`padding_mask`"),
        ("attention_mask", {}, "`attention_mask`"),
        ("is_real", {"padding": "is_real"}, "`is_real`"),
        ("other", {"padding": LONG != 0}, "`padding`"),
        ("other", {"padding": (np.arange(21) + 0 * LONG) % 3 > 0}, "`padding`"),
        ("nothing", {}, "none known"),
    ],
)
def test_padding_does_not_count_where_it_is_known(name, given, words):
    model, inputs = padded_tail(name), {"token_ids": LONG, name: LONG != 0}
    report = measure_heads(model, inputs, END, SPECIAL, batch_size=2, **given)
    probabilities = attention_probabilities(model, inputs)["attention"]
    real = np.ones_like(LONG, bool) if name == "nothing" else LONG != 0
    real = given["padding"] if name == "other" else real
    expected, _, _ = by_loops(probabilities, LONG, real)
    for measure, values in expected.items():
        assert_close(report.scores[measure][0], values)
    assert report.padding == words


def test_batches_may_come_one_by_one():
    model = one_layer()
    expected = measure_heads(model, LONG, END).scores

    def parts():
        yield LONG[:2, :]
        yield LONG[2:], np.zeros(3)  # with targets

    for inputs in (parts(), iter([LONG[:1], LONG[1:]])):
        for name, values in measure_heads(model, inputs, END).scores.items():
            assert_close(values, expected[name])


@pytest.mark.tensorflow
def test_batches_of_a_dataset():
    import tensorflow as tf

    model = one_layer()
    dataset = tf.data.Dataset.from_tensor_slices(LONG).batch(2)
    found, expected = (measure_heads(model, x).scores for x in (dataset, LONG))
    for name, values in found.items():
        assert_close(values, expected[name])


# --- Where token ids come from -------------------------------------------------------------------


def two_inputs(first, second):
    inputs = [keras.Input((None,), dtype="int32", name=name) for name in (first, second)]
    x = layers.Add()([layers.Embedding(12, 8)(x) for x in inputs])
    return keras.Model(inputs, layers.MultiHeadAttention(2, 4, name="attention")(x, x))


@pytest.mark.parametrize("name", ["token_ids", "input_ids", "ids", "decoder_token_ids"])
def test_ids_have_a_usual_name(name):
    zeros = np.zeros_like(LONG)
    for model, given in (
        (two_inputs(name, "segment_ids"), [LONG, zeros]),
        (two_inputs("segment_ids", name), {"segment_ids": zeros, name: LONG}),
    ):
        report = measure_heads(model, given)
        assert report.upper_bound["duplicate"].max() > 0.5
    named = measure_heads(two_inputs("a", "b"), [zeros, LONG], token_ids="b")
    passed = measure_heads(two_inputs("a", "b"), [zeros, zeros], token_ids=LONG, batch_size=2)
    for one in (named, passed):
        assert_close(one.upper_bound["duplicate"], report.upper_bound["duplicate"])


def test_measures_that_need_ids_are_left_out_without_them():
    x = keras.Input((20, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    values = np.random.default_rng(0).normal(size=(2, 20, 8))
    report = measure_heads(model, values)
    assert list(report.left_out) == ["duplicate", "induction", "sentence", "special"]
    assert set(report.scores).isdisjoint(report.left_out)
    assert "No induction: no input holds token ids. Pass `token_ids`" in str(report)
    assert "sentence" in measure_heads(model, values, END, token_ids=LONG[:2, :20]).scores
    with pytest.raises(ValueError, match=r"There is no measure 'sentence': pass `end_ids`"):
        report.plot("sentence")


def test_a_backbone_of_keras_hub_needs_no_names():
    hub = pytest.importorskip("keras_hub").models
    model = hub.BertBackbone(12, 2, 2, 8, 16, max_sequence_length=32)
    inputs = {
        "token_ids": LONG,
        "padding_mask": LONG != 0,
        "segment_ids": np.zeros_like(LONG),
    }
    report = measure_heads(hm.apply_head_masks(model, hm.PerHead({1: PREVIOUS})), inputs, END)
    assert_close(report.scores["previous"][:, 1], [1.0, 1.0])
    assert report.padding == "`padding_mask`"
    assert report.heads == (2, 2)


# --- Roles ---------------------------------------------------------------------------------------

TOKENS_KNOWN, LENGTH = 40, 24
REPEATED = np.stack(
    [np.tile(np.random.default_rng(n).permutation(LENGTH // 2) + 1, 2) for n in range(3)]
)
REPEATED[:, [4, 7, 10]] = REPEATED[:, [16, 19, 22]] = [37, 38, 39]


def heads_by_weights(*heads):
    """Ids -> token, position and token before, one-hot -> a head for each name."""
    ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    before = keras.ops.pad(ids[:, :-1], [[0, 0], [1, 0]])
    places = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    sizes = {"token": TOKENS_KNOWN, "place": LENGTH, "before": TOKENS_KNOWN}
    of = {"token": ids, "place": places, "before": before}
    features = [
        layers.Embedding(n, n, "identity", name=name)(of[name]) for name, n in sizes.items()
    ]
    x = layers.Concatenate()(features)
    size = TOKENS_KNOWN + LENGTH
    attention = layers.MultiHeadAttention(len(heads), size, name="attention")
    model = keras.Model(ids, attention(x, x, use_causal_mask=True))
    token, before = np.eye(TOKENS_KNOWN, size), np.eye(TOKENS_KNOWN, size)
    place = np.eye(LENGTH, size, TOKENS_KNOWN)
    nothing = np.zeros_like(token)
    none = np.zeros_like(place)
    at_0 = np.tile(place[:1], (LENGTH, 1))
    near = sum(np.roll(place, n, 0) for n in range(5))
    made = {  # what queries look for, and what keys show: by token, place and token before
        "previous token": ((nothing, np.roll(place, 1, 0), nothing), (nothing, place, nothing)),
        "current token": ((nothing, place, nothing), (nothing, place, nothing)),
        "sink": ((nothing, at_0, nothing), (nothing, place, nothing)),
        "local": ((nothing, near, nothing), (nothing, place, nothing)),
        "duplicate token": ((token, -2 * place, nothing), (token, place, nothing)),
        "induction": ((token, none, nothing), (nothing, none, before)),
        "": ((nothing, none, nothing), (nothing, none, nothing)),
    }
    shape = x.shape[-1], len(heads), size
    query, key = (
        np.stack([np.concatenate(made[head][side]) for head in heads], 1) for side in (0, 1)
    )
    assert query.shape == shape
    weights = [np.zeros(w.shape) for w in attention.weights]
    weights[0], weights[2] = 600 * query, key
    attention.set_weights(weights)
    return model


def test_roles_of_heads_made_by_weights():
    names = ["previous token", "duplicate token", "induction", "sink", "current token", "local", ""]
    report = measure_heads(heads_by_weights(*names), REPEATED)
    assert report.roles()["attention"] == {h: name for h, name in enumerate(names) if name}
    assert report.scores["induction"][0, 2] > 0.49  # of the 0.5 that can have it
    assert report.upper_bound["induction"][0, 2] == 0.5


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
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(TOKENS_KNOWN, 8)(ids)
    model = keras.Model(ids, layers.MultiHeadAttention(7, 4, name="attention")(x, x))
    report = measure_heads(hm.apply_head_masks(model, rule), REPEATED, (37, 38, 39), (37, 38, 39))
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


def of_different_heads():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    x = Block(layers.MultiHeadAttention(2, 4), name="narrow")(x)
    return keras.Model(ids, Block(layers.MultiHeadAttention(3, 4), name="wide")(x))


def test_a_layer_with_fewer_heads_is_padded_with_nan():
    report = measure_heads(of_different_heads(), LONG)
    assert report.heads == (2, 3)
    for values in (
        *report.scores.values(),
        *report.upper_bound.values(),
        *report.uniform_baseline.values(),
    ):
        np.testing.assert_array_equal(np.isnan(values), [[False, False, True], [False] * 3])
    assert len([line for line in str(report).split("\n") if " wide" in line]) == 3 * 2


def test_a_head_that_sees_nothing_has_nan():
    model = hm.apply_head_masks(one_layer(), hm.PerHead({1: hm.Nothing()}))
    report = measure_heads(model, LONG)
    assert list(np.isnan(report.scores["self"][0])) == [False, True, False, False]
    assert 1 not in report.roles(0.0).get("attention", {})
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["scores"]["self"][0][1] is None


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


def test_a_report_prints_as_a_table():
    report = measure_heads(hm.apply_head_masks(one_layer(), PREVIOUS), LONG, END)
    lines = str(report).split("\n")
    assert lines[0] == f"5 texts of {report.tokens} tokens; padding: the Keras mask."
    assert lines[1].split() == ["layer", "head", "role", *report.scores][: len(lines[1].split())]
    assert lines[2].split()[:6] == ["attention", "0", "previous", "token", "0.00", "1.00"]
    assert lines[-1] == "No special: pass `special_ids`, such as BERT's (101, 102)."
    assert {*lines[1].split(), *lines[6].split()} == {"layer", "head", "role", *report.scores}
    assert len(lines) == 12
    assert str(measure_heads(one_layer(), LONG[:1])).startswith("1 text of ")


def test_of_many_heads_those_with_a_role_are_printed():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model(ids, layers.MultiHeadAttention(60, 2, name="attention")(x, x))
    report = measure_heads(hm.apply_head_masks(model, hm.PerHead({"0-2": PREVIOUS})), LONG)
    lines = str(report).split("\n")
    assert "... and 57 more heads: see `scores` and `roles()`." in lines
    assert {tuple(x.split()[1:3]) for x in lines if x.startswith("attention")} == {
        (f"{head}", "previous") for head in range(3)
    }


def test_json_holds_everything():
    report = measure_heads(one_layer(), LONG, END)
    found = json.loads(json.dumps(report.to_json()))
    assert found["layers"] == ["attention"]
    assert found["texts"] == 5
    for name in ("scores", "uniform_baseline", "upper_bound"):
        for measure, values in getattr(report, name).items():
            np.testing.assert_array_equal(found[name][measure], values)


def test_pictures_of_measures():
    pytest.importorskip("matplotlib")
    report = measure_heads(of_different_heads(), LONG, END)
    figure = report.plot()
    assert [ax.get_title() for ax in figure.axes[:-1]] == list(report.upper_bound)
    ax, scale = report.plot("distance").axes
    np.testing.assert_array_equal(
        np.ma.filled(ax.images[0].get_array(), np.nan), report.scores["distance"]
    )
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("heads", "layers")
    assert scale.get_ylabel() == "positions"
    assert ax.patch.get_hatch()  # shows where a layer has fewer heads
    assert ax.images[0].cmap.get_bad()[3] == 0


def test_one_layer_of_one_batch_is_held_at_a_time(monkeypatch):
    held, most = [], 0

    def counted(seen):
        nonlocal most
        for path, values in probabilities_in_numpy(seen):
            held.append(weakref.ref(values))
            del values  # (each step of a generator holds its own)
            yield path, held[-1]()
            most = max(most, sum(ref() is not None for ref in held))

    probabilities_in_numpy = reading._in_numpy
    monkeypatch.setattr(reading, "_in_numpy", counted)
    measure_heads(stack(3), LONG, batch_size=1)
    assert (len(held), most) == (15, 1)


# --- Bad input -----------------------------------------------------------------------------------


class Handwritten(layers.Layer):
    def call(self, x):
        return keras.ops.softmax(x @ keras.ops.transpose(x, (0, 2, 1))) @ x


def out_of_reach():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    return keras.Model(ids, Handwritten(name="attention")(layers.Embedding(12, 8)(ids)))


def without_attention():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    return keras.Model(ids, layers.Embedding(12, 8)(ids))


@pytest.mark.parametrize("function", [attention_probabilities, measure_heads])
def test_a_model_whose_attention_cannot_be_seen_is_refused(function):
    with pytest.raises(ValueError, match=r"attention.*is of a class whose masks are out of reach"):
        function(out_of_reach(), LONG)
    with pytest.raises(ValueError, match="The model holds no self-attention layer"):
        function(without_attention(), LONG)
    with pytest.raises(TypeError, match=r"`model` must be a Keras model. Received: 3"):
        function(3, LONG)


def over_two_axes():
    x = keras.Input((4, 5, 8))
    attention = layers.MultiHeadAttention(2, 4, attention_axes=(1, 2), name="attention")
    return keras.Model(x, attention(x, x))


@pytest.mark.parametrize("function", [attention_probabilities, measure_heads])
def test_attention_out_of_reach_is_left_out_by_name_alone(function):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = Block(name="known")(layers.Embedding(12, 8)(ids))
    model = keras.Model(ids, Handwritten(name="attention")(x))
    with pytest.raises(ValueError, match="To leave it as it is, name the others in `layers`"):
        function(model, LONG)
    function(model, LONG, layers="known")


class Pools(Block):
    """Its queries are every second token; that of one sequence nobody can see."""

    def call(self, x):
        return self.attention(x[:, ::2], x)

    def compute_output_shape(self, shape):
        return shape[0], None, shape[2]


def only_in_training():
    class Trains(Block):
        def call(self, x, training=None):
            return super().call(x) if training is not False else x

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    return keras.Model(ids, Trains(name="block")(layers.Embedding(12, 8)(ids)))


@pytest.mark.parametrize("function", [attention_probabilities, measure_heads])
def test_attention_that_gives_no_square_is_refused(function):
    with pytest.raises(ValueError, match=r"'attention' attends over several axes.* Leave it out"):
        function(over_two_axes(), np.ones((2, 4, 5, 8), "float32"))
    with pytest.raises(ValueError, match=r"None of the attention layers .* ran when the model"):
        function(only_in_training(), LONG)


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


def test_attention_to_another_sequence_is_not_measured():
    model = with_cross_attention()
    assert measure_heads(model, OF_TWO).layers == ("own",)
    with pytest.raises(ValueError, match=r"'to_other'.* attends to another sequence"):
        measure_heads(model, OF_TWO, layers="other")


EMPTY = np.zeros((0, 5), "int32")


@pytest.mark.parametrize(
    ("inputs", "more", "error", "message"),
    [
        (EMPTY, {}, ValueError, "`inputs` holds no texts"),
        ([[]], {}, TypeError, "`inputs` must hold arrays whose first axis counts texts"),
        (iter(()), {}, ValueError, "`inputs` holds no texts"),
        (iter([LONG, EMPTY]), {}, ValueError, r"a batch without texts: \(0, 5\)"),
        (LONG[:, :0], {}, ValueError, r"a batch without tokens: \(5, 0\)"),
        (3, {}, TypeError, "an iterable of batches of that. Received: 3"),
        ([LONG, LONG], {}, ValueError, r"Received: 2 arrays in `inputs`. Pass one.*or batches as"),
        ([[1, 2]], {}, TypeError, "arrays whose first axis counts texts. Received: int"),
        (np.full((2, 9), 4), {}, ValueError, r"All token ids are equal \(4\)"),
        (LONG[:, :1], {}, ValueError, "at least 2 tokens. Received: 5 texts, the longest of 1"),
        (
            LONG,
            {"padding": np.arange(21) + 0 * LONG == 3},
            ValueError,
            "5 texts, the longest of 1 .padding: `padding`",
        ),
        (LONG, {"token_ids": "words"}, ValueError, "`token_ids` must be the name of an input"),
        (LONG, {"padding": "mask"}, ValueError, r"one of \['token_ids'\].* Received: 'mask'"),
        (LONG, {"padding": LONG[:, :4]}, ValueError, r"shape \(5, 21\). Received: shape \(5, 4\)"),
        (LONG, {"token_ids": LONG[0]}, ValueError, r"must hold as many texts. Received: \[5, 21\]"),
        (LONG, {"token_ids": LONG[..., None]}, ValueError, r"the shape \(batch, length\)"),
        (iter([LONG]), {"padding": LONG}, TypeError, "`padding` must be the name of an input"),
        (LONG, {"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        (3, {}, TypeError, "`inputs` must be what the model is called on"),
        (iter([[[1, 2], [3, 4]]]), {}, TypeError, "must hold arrays whose first axis counts texts"),
        (LONG, {"special_ids": "x"}, TypeError, "`special_ids` must be ids"),
        (LONG, {"end_ids": ()}, ValueError, "`end_ids` must hold at least one id"),
        (LONG, {"end_ids": 70}, ValueError, r"stand in the texts. Received: \(70,\), and 5 texts"),
        (
            LONG,
            {"end_ids": LONG[0, 0], "special_ids": 70, "batch_size": 2},
            ValueError,
            "or leave out `special_ids`",
        ),
        (
            np.array([[1, 2, 3, END]]),
            {"end_ids": END, "padding": np.array([[1, 1, 1, 0]])},
            ValueError,
            "1 text without any of them",
        ),
    ],
)
def test_bad_input_is_refused(inputs, more, error, message):
    with pytest.raises(error, match=message):
        measure_heads(one_layer(mask_zero=False), inputs, **more)


CAST = 'must be integer or boolean. Received dtype float32.*dtype="int32"'


@pytest.mark.parametrize(
    "function", [measure_heads, attention_probabilities, hm.suggest_rules, hm.find_leaks]
)
@pytest.mark.parametrize("given", [lambda x: x, lambda x: [x], lambda x: {"token_ids": x}])
def test_floats_are_no_ids(function, given):
    """Keras casts them, so that 0.5 becomes the id 0."""
    floats = np.random.default_rng(0).random((2, 9), "float32")
    with pytest.raises(TypeError, match=f"`token_ids` {CAST}"):
        function(one_layer(), given(floats))


@pytest.mark.parametrize(
    "function", [measure_heads, attention_probabilities, hm.suggest_rules, hm.find_leaks]
)
@pytest.mark.parametrize("given", [list, np.array, lambda x: np.array(x, object), lambda x: x[0]])
def test_texts_are_to_be_preprocessed(function, given):
    said = r"'small' is called on: token ids. Received: strings. .* `model.preprocessor\(texts\)`"
    with pytest.raises(TypeError, match=said):
        function(one_layer(), given(["a text", "another"]))
    if function is measure_heads:
        with pytest.raises(TypeError, match=said):
            function(one_layer(), iter([given(["a text", "another"])]))


@pytest.mark.tensorflow  # strings are its tensors
def test_a_model_that_takes_texts_gets_texts():
    ids = layers.TextVectorization(vocabulary=["a", "text", "other"], output_sequence_length=3)
    x = keras.Input((), dtype="string")
    y = layers.Embedding(9, 8)(ids(x))
    model = keras.Model(x, layers.MultiHeadAttention(2, 4)(y, y))
    texts = np.array(["a text", "a other text"])
    assert measure_heads(model, texts, token_ids=np.array(ids(texts))).texts == 2


def test_floats_beside_the_inputs_are_no_ids():
    x = keras.Input((None,), name="x")
    y = layers.Embedding(9, 8)(x)
    model = keras.Model(x, layers.MultiHeadAttention(2, 4)(y, y))
    with pytest.raises(TypeError, match=f"`token_ids` {CAST}"):
        measure_heads(model, LONG % 9, token_ids=LONG.astype("float32"))
    with pytest.raises(TypeError, match=f"`token_ids` {CAST}"):
        measure_heads(model, LONG.astype("float32") % 9, token_ids="x")


def test_inputs_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match=r"which input holds the token ids: \['a', 'b'\]. Name it"):
        measure_heads(two_inputs("a", "b"), [LONG, LONG])
    model = two_inputs("a_padding_mask", "b_padding_mask")
    with pytest.raises(ValueError, match="Cannot tell which input marks padding"):
        measure_heads(model, [LONG, LONG])
    x = keras.Input((20, 8), name="x")
    model = keras.Model(x, layers.MultiHeadAttention(2, 4)(x, x))
    with pytest.raises(ValueError, match=r"no input holds them: \['x'\]. Pass `token_ids`"):
        measure_heads(model, np.ones((2, 20, 8)), END)


def test_layers_of_another_length_are_named_apart():
    x = keras.Input((20, 8))
    y = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    y = layers.AveragePooling1D(2)(y)
    model = keras.Model(x, layers.MultiHeadAttention(2, 4, name="pooled")(y, y))
    values = np.random.default_rng(0).normal(size=(2, 20, 8))
    with pytest.raises(ValueError, match=r"position of the layer 'pooled', shape \(2, 10\)"):
        measure_heads(model, values)
    assert measure_heads(model, values, layers="pooled").tokens == 20


def test_a_layer_with_more_keys_than_queries_is_refused():
    x = keras.Input((None, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(x, Pools(attention, name="own")(x))
    refused = "attends from 10 queries to 20 keys"
    if keras.backend.backend() != "tensorflow":  # lengths have numbers when the model is made
        refused = "attends to another sequence"
    with pytest.raises(ValueError, match=refused):
        measure_heads(model, np.ones((2, 20, 8)), layers="own")


def test_a_threshold_is_a_share():
    with pytest.raises(ValueError, match=r"`threshold` must lie between 0 and 1"):
        measure_heads(one_layer(), LONG).roles(2)


def test_a_measure_must_be_there():
    report = measure_heads(one_layer(), LONG)
    with pytest.raises(ValueError, match=r"There is no measure 'nearness': measured were"):
        report.plot("nearness")
