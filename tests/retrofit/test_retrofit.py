"""`apply_head_masks`: what a rule does to a model that exists."""

import dataclasses
import functools
import warnings

import keras
import numpy as np
import pytest
from contract import GROUPED, MULTI_HEAD, by_hand, normal, numpy, random_biases
from keras import layers
from keras_versions import groups_give_scores, needs, takes_unread_inputs
from oracle import mask as mask_by_loops
from small_models import (
    CHUNK,
    PARTS,
    TOKENS,
    apply,
    by_loops,
    leak,
    of_ids,
    of_vectors,
    one_layer,
    stack,
)
from tiled_contract import ALWAYS
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention import kernels
from keras_headmask.attention.scopes import tuned

RULES = {
    "one head by sentence": (hm.PerHead({0: hm.SameSentence(9)}), {"token_ids": TOKENS}),
    "ids of its own": (hm.PerHead({"1-2": hm.SameSegment("parts")}), {"parts": PARTS}),
    "positions": (hm.PerHead({0: CHUNK, 3: hm.Window(1, 0)}, default=hm.Window(4, 2)), {}),
    "a head off": (hm.PerHead({2: hm.Nothing()}), {}),
    "opens all but padding": (
        ~hm.SameSegment("parts") | hm.KeyIn("token_ids", (9, 0)),
        {"parts": PARTS, "token_ids": TOKENS},
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("tiled", [False, True], ids=["dense", "tiled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_what_the_loops_say(rule, tiled, dropout, monkeypatch):
    went, real = [], kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda *given: went.append(real(*given)) or went[-1])
    with tuned(**ALWAYS) if tiled else hm.dense_scope():
        check_a_rule(rule, dropout)
    assert went
    assert {kernel is kernels.dense for kernel in went} == {not tiled}


def check_a_rule(rule, dropout):
    spec, inputs = RULES[rule]
    stock = one_layer(dropout=dropout)
    masked = hm.apply_head_masks(stock, spec, add_inputs=True)
    extra = sorted(set(inputs) - {"token_ids"})
    assert [x.name for x in masked.inputs] == ["token_ids", *extra]
    given = {"token_ids": TOKENS} | {name: inputs[name] for name in extra}
    got = numpy(masked(given if extra else TOKENS))
    pairs = {name: (ids, ids) for name, ids in inputs.items()}
    assert_close(got, by_loops(stock, spec, pairs), depth=3)
    assert abs(got - numpy(stock(TOKENS)))[TOKENS != 0].max() > 1e-2
    if dropout:
        in_training = numpy(masked(given if extra else TOKENS, training=True))
        assert abs(in_training - got).max() > 1e-3


def test_full_is_bit_equal_to_stock_in_training_too():
    """The same dropout, the same gradients, the same weights after some steps."""

    def trained(rule):
        keras.utils.set_random_seed(3)
        model = one_layer(dropout=0.3, seed=5)
        model = model if rule is None else hm.apply_head_masks(model, rule, copy=False)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(TOKENS, np.ones((2, 7, 8), "float32"), epochs=3, verbose=0)
        return model.get_weights()

    for got, wanted in zip(trained(hm.Full()), trained(None), strict=True):
        np.testing.assert_array_equal(got, wanted)
    differs = zip(trained(hm.Window(0, 0)), trained(None), strict=True)
    assert max(abs(a - b).max() for a, b in differs) > 1e-4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [MULTI_HEAD, GROUPED], ids=str)
def test_a_causal_flag_and_its_shortcut_are_kept(kind, causal):
    x = keras.Input((7, 8))
    attention = kind.stock(**kind.sizes(4, 3), name="attention")
    stock = keras.Model(x, attention(x, x, use_causal_mask=causal))
    random_biases(attention)
    given = normal(2, 7, 8)
    full = hm.apply_head_masks(stock, hm.Full())
    np.testing.assert_array_equal(numpy(full(given)), numpy(stock(given)))
    masked = hm.apply_head_masks(stock, hm.PerHead({1: CHUNK}))
    allowed = mask_by_loops(hm.PerHead({1: CHUNK}), 2, 4, 7, 7)
    if causal:
        allowed = allowed & np.tri(7, dtype=bool)
    assert_close(numpy(masked(given)), by_hand(attention, given, mask=allowed)[0], depth=2)
    plain = hm.unmasked(masked)
    assert type(plain.get_layer("attention")) is kind.stock
    np.testing.assert_array_equal(numpy(plain(given)), numpy(stock(given)))


@needs("sliding_window")
def test_a_window_of_the_layer_itself_stays():
    x, given = keras.Input((7, 8)), normal(2, 7, 8)
    attention = layers.GroupQueryAttention(3, 4, 2, sliding_window=2)
    masked = hm.apply_head_masks(keras.Model(x, attention(x, x)), hm.PerHead({1: CHUNK}))
    allowed = mask_by_loops(hm.PerHead({1: CHUNK}) & hm.Window(1, 1), 2, 4, 7, 7)
    assert_close(numpy(masked(given)), by_hand(attention, given, mask=allowed)[0], depth=2)


@pytest.mark.parametrize(
    "kind", [MULTI_HEAD, pytest.param(GROUPED, marks=groups_give_scores)], ids=str
)
def test_scores_are_those_of_the_rule(kind):
    x = keras.Input((7, 8))
    attention = kind.stock(**kind.sizes(4, 3))
    stock = keras.Model(x, attention(x, x, return_attention_scores=True))
    spec = hm.PerHead({0: hm.Nothing(), 1: CHUNK})
    _, scores = hm.apply_head_masks(stock, spec)(normal(2, 7, 8))
    allowed = mask_by_loops(spec, 2, 4, 7, 7)
    assert (numpy(scores)[~allowed] == 0).all()
    assert_close(numpy(scores).sum(-1)[:, 1:], 1)


# --- Inputs ---------------------------------------------------------------------------------------


@takes_unread_inputs
def test_structures_of_inputs():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    other = keras.Input((None, 8), name="other")
    x = layers.Embedding(12, 8)(ids)
    y = layers.MultiHeadAttention(4, 3)(x, x)
    spec = hm.SameSegment("parts")
    values = {"token_ids": TOKENS, "other": normal(2, 7, 8), "parts": PARTS}
    results = []
    for inputs, wanted in (
        (ids, list),
        ([ids, other], list),
        ({"token_ids": ids, "other": other}, dict),
    ):
        stock = keras.Model(inputs, y * 1.0)
        masked = hm.apply_head_masks(stock, spec, add_inputs=True)
        assert isinstance(masked.input, wanted)
        assert hm.unmasked(masked).input_shape == stock.input_shape
        names = [tensor.name for tensor in masked.inputs]
        assert names.count("parts") == 1
        given = {name: values[name] for name in names}
        results.append(numpy(masked(given)))
        if wanted is list:
            results.append(numpy(masked([values[name] for name in names])))
        results.append(masked.predict(given, verbose=0))
    for result in results[1:]:
        assert_close(result, results[0])


def test_a_whole_mask_is_an_input_with_a_head_axis():
    stock = one_layer()
    masked = hm.apply_head_masks(stock, hm.MaskInput("shape"), add_inputs=True)
    assert masked.inputs[1].shape == (None, 4, None, None)
    whole = np.random.default_rng(0).random((2, 4, 7, 7)) < 0.6
    got = numpy(masked([TOKENS, whole]))
    wanted = by_loops(stock, hm.MaskInput("shape"), {"shape": whole})
    assert_close(got, wanted, depth=2)


def test_an_input_that_the_model_lacks():
    """Added only on request: a typing error would leave the rule without its ids."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(12, 8)(ids)
    model = keras.Model(ids, layers.MultiHeadAttention(2, 4)(x, x))
    lacks = r"reads \['token_ids'\].*inputs are \['ids'\].*`input=.*add_inputs=True"
    for copy in (True, False):
        with pytest.raises(ValueError, match=lacks):
            hm.apply_head_masks(model, hm.SameSentence(9), copy=copy)
    masked = hm.apply_head_masks(model, hm.SameSentence(9, input="ids"))
    assert [x.name for x in masked.inputs] == ["ids"]
    masked = hm.apply_head_masks(model, hm.SameSentence(9), add_inputs=True)
    assert [x.name for x in masked.inputs] == ["ids", "token_ids"]
    again = hm.apply_head_masks(masked, hm.KeyFlag("token_ids"), existing="and")  # has it by now
    assert [x.name for x in again.inputs] == ["ids", "token_ids"]


# --- Kinds of models ------------------------------------------------------------------------------


def test_a_subclass_that_takes_other_arguments():
    @keras.saving.register_keras_serializable("test_retrofit")
    class OfAList(layers.MultiHeadAttention):
        def call(self, tensors):
            return super().call(*tensors)

        def build(self, shapes):
            super().build(*shapes)

        def compute_output_spec(self, tensors):
            return keras.KerasTensor(tensors[0].shape, tensors[0].dtype)

    model = of_ids(lambda x: OfAList(2, 4, name="self_attention")([x, x]))
    assert leak(apply(model, CHUNK)) == 0


@pytest.mark.parametrize("name", ["_compute_attention", "_masked_softmax"])
@pytest.mark.parametrize(
    ("stock", "sizes"),
    [(layers.MultiHeadAttention, (4, 3)), (layers.GroupQueryAttention, (3, 4, 2))],
)
def test_a_subclass_that_computes_attention_itself_is_refused(stock, sizes, name):
    """Also where that code calls Keras'. A rule that hides nothing has nothing to say there."""

    def own(self, *args, **kwargs):
        return getattr(super(Own, self), name)(*args, **kwargs)

    Own = type("Own", (stock,), {name: own})
    model = of_vectors(lambda x: Own(*sizes, name="own")(x, x))
    for copy in (True, False):
        with pytest.raises(ValueError, match=rf"'own' \(Own\) takes no rule.*overrides `{name}`"):
            hm.apply_head_masks(model, CHUNK, copy=copy)
    hm.apply_head_masks(model, hm.Full(), copy=False)


def test_rules_that_look_alike_do_not_share_what_is_prepared():
    @hm.register_spec("test_retrofit_ends")
    @dataclasses.dataclass(frozen=True, repr=False)
    class Ends(hm.SameSentence):
        def __repr__(self):
            return "Ends()"

    masked = [apply(stack(2), {"0": x(9), "1": x(4)}) for x in (Ends, hm.SameSentence)]
    masked[1].set_weights(masked[0].get_weights())
    np.testing.assert_array_equal(*(numpy(model(TOKENS)) for model in masked))


# --- Layers that have a rule ----------------------------------------------------------------------


def with_own_rule(kind=MULTI_HEAD):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    attention = kind.layer(4, 3, mask_spec=hm.PerHead({0: hm.SameSentence(9)}), name="attention")
    model = keras.Model(ids, attention(x, mask_inputs={"token_ids": ids}), name="own")
    random_biases(attention)
    return model


@pytest.mark.parametrize("existing", ["and", "replace"])
@pytest.mark.parametrize(
    "make",
    [with_own_rule, functools.partial(with_own_rule, GROUPED), one_layer],
    ids=["our layer", "our grouped layer", "masked before"],
)
def test_and_or_replace_a_rule(make, existing, tmp_path):
    first = hm.PerHead({0: hm.SameSentence(9)})
    second = hm.PerHead({"0-1": hm.Window(1, 1), 2: hm.SameSentence(4)})
    stock, padding = make(), make is one_layer
    before = hm.apply_head_masks(stock, first) if make is one_layer else stock
    with pytest.raises(ValueError, match=r"'attention' .*has a rule already.*existing='and'"):
        hm.apply_head_masks(before, second)
    pair = {"token_ids": (TOKENS, TOKENS)}
    wanted = {"and": first & second, "replace": second}[existing]
    was, expected = (by_loops(stock, rule, pair, padding) for rule in (first, wanted))
    for copy in (True, False):
        masked = hm.apply_head_masks(before, second, existing=existing, copy=copy)
        assert_close(numpy(masked(TOKENS)), expected, depth=2)
        masked.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(numpy(again(TOKENS)), numpy(masked(TOKENS)))
        more = hm.apply_head_masks(masked, hm.Full(), existing="and")
        assert list(hm.mask_specs(more).values()) == [wanted & hm.Full()]
        if copy:  # and the one before is as it was
            assert_close(numpy(before(TOKENS)), was, depth=2)


def test_cross_attention_under_a_rule_counts_from_0_without_a_warning(tmp_path):
    x, memory = keras.Input((3, 8)), keras.Input((7, 8))
    model = keras.Model([x, memory], layers.MultiHeadAttention(2, 4, name="cross")(x, memory))
    masked = hm.apply_head_masks(model, CHUNK, layers="cross")
    masked.save(tmp_path / "model.keras")
    given = [normal(2, 3, 8), normal(2, 7, 8)]
    with warnings.catch_warnings(action="error", category=UserWarning):
        for one in (masked, keras.saving.load_model(tmp_path / "model.keras")):
            one(given)


def test_fewer_queries_than_keys_stand_where_the_call_says():
    """A layer of ours says it; that of Keras cannot."""
    x, given = keras.Input((None, 8)), normal(2, 7, 8)
    ours = MULTI_HEAD.layer(2, 4, name="ours")
    model = keras.Model(x, [ours(x), ours(x[:, 5:], x, query_offset=5)])
    whole, last = hm.apply_head_masks(model, CHUNK, layers="ours")(given)
    assert_close(numpy(last), numpy(whole)[:, 5:])
    stock = keras.Model(x, layers.MultiHeadAttention(2, 4, name="self")(x[:, 5:], x))
    with pytest.warns(UserWarning, match=r"positions 0 to 1\..*`query_offset=5`"):
        hm.apply_head_masks(stock, CHUNK, layers="self")(given)
