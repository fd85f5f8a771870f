"""`apply_head_masks`: what a rule does to a model that exists, and that it is never lost."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from contract import by_hand, normal, numpy, random_biases
from keras import layers
from oracle import mask as mask_by_loops

import keras_headmask as hm
from keras_headmask import binding, tiling

BACKEND = keras.backend.backend()
TOKENS = np.array([[5, 9, 4, 6, 9, 7, 0], [4, 4, 9, 8, 3, 0, 0]], "int32")  # 0 pads, 9 ends
PARTS = np.array([[0, 0, 1, 1, 2, 2, 2], [7, 7, 7, 1, 1, 1, 1]], "int32")
CHUNK = hm.Chunk(3)


@keras.saving.register_keras_serializable("test_retrofit")
class Block(layers.Layer):
    """A composite layer, as KerasHub's: attention is out of the graph's sight."""

    def __init__(self, attention=None, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(4, 3) if attention is None else attention
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        if not self.attention.built:  # a config builds it
            self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x + self.attention(x, x))

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return super().get_config() | {
            "attention": keras.saving.serialize_keras_object(self.attention)
        }

    @classmethod
    def from_config(cls, config):
        config["attention"] = keras.saving.deserialize_keras_object(config["attention"])
        return cls(**config)


def one_layer(attention=None, mask_zero=True, **arguments):
    """Token ids -> embedding with its Keras mask -> one attention layer."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=mask_zero, name="embedding")(ids)
    attention = layers.MultiHeadAttention(4, 3, name="attention", **arguments)
    model = keras.Model(ids, attention(x, x), name="small")
    model.get_layer("embedding").set_weights([normal(12, 8)])
    random_biases(attention)
    return model


def stack(count=3, **inputs):
    """Token ids -> embedding -> blocks, each with an attention layer of its own."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    for i in range(count):
        x = Block(name=f"block_{i}")(x)
    return keras.Model(ids, x, name="stack")


def by_loops(model, spec, inputs=None, padding=True):
    """What `one_layer` must give under `spec`, from its weights, in NumPy loops."""
    x = numpy(model.get_layer("embedding")(TOKENS))
    allowed = mask_by_loops(spec, 2, 4, 7, 7, inputs or {})
    if padding:
        real = TOKENS != 0
        allowed = allowed & real[:, None, None, :] & real[:, None, :, None]
    return by_hand(model.get_layer("attention"), x, mask=allowed)[0]


def leak(model, inputs=None, position=1, rows=slice(3, None)):
    """How far a change of one token is felt in `rows`."""
    inputs = {"token_ids": TOKENS} | (inputs or {})
    changed = dict(inputs, token_ids=TOKENS.copy())
    changed["token_ids"][:, position] = 11
    before, after = (
        numpy(model(x if len(model.inputs) > 1 else x["token_ids"])) for x in (inputs, changed)
    )
    return abs(before - after)[:, rows].max()


RULES = {
    "one head by sentence": (hm.PerHead({0: hm.SameSentence(9)}), {"token_ids": TOKENS}),
    "ids of its own": (hm.PerHead({"1-2": hm.SameSegment("parts")}), {"parts": PARTS}),
    "positions": (hm.PerHead({0: CHUNK, 3: hm.Window(1, 0)}, default=hm.Window(4, 2)), {}),
    "a head off": (hm.PerHead({2: hm.Nothing()}), {}),
    "opens all but padding": (
        ~hm.SameSegment("parts") | hm.KeyIn("token_ids", (9, 0)),
        {
            "parts": PARTS,
            "token_ids": TOKENS,
        },
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("way", ["dense", "tiled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_what_the_loops_say(rule, way, dropout, monkeypatch):
    if way == "tiled":
        monkeypatch.setattr(tiling, "_SMALLEST", 0)
        monkeypatch.setattr(tiling, "_LARGEST_SHARE", 1.0)
    went = []
    real = binding.tiled_attention
    monkeypatch.setattr(binding, "tiled_attention", lambda *a, **k: went.append(1) or real(*a, **k))
    spec, inputs = RULES[rule]
    stock = one_layer(dropout=dropout)
    masked = hm.apply_head_masks(stock, spec)
    extra = sorted(set(inputs) - {"token_ids"})
    assert [x.name for x in masked.inputs] == ["token_ids", *extra]
    given = {"token_ids": TOKENS} | {name: inputs[name] for name in extra}
    got = numpy(masked(given if extra else TOKENS))
    pairs = {name: (ids, ids) for name, ids in inputs.items()}
    np.testing.assert_allclose(got, by_loops(stock, spec, pairs), atol=1e-5)
    assert abs(got - numpy(stock(TOKENS)))[TOKENS != 0].max() > 1e-2
    assert bool(went) == (way == "tiled")
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


def test_full_leaves_the_work_to_the_class(monkeypatch):
    """At sizes, and on machines, where another way would round otherwise, too."""

    def never(*arguments, **keywords):
        raise AssertionError("a layer that nothing restricts computes as it did")

    for way in ("dense_attention", "tiled_attention"):
        monkeypatch.setattr(binding, way, never)
    stock = one_layer()
    for spec in (hm.Full(), hm.PerHead({0: hm.Full()}), hm.Full().get_config()):
        full = hm.apply_head_masks(stock, spec)
        np.testing.assert_array_equal(numpy(full(TOKENS)), numpy(stock(TOKENS)))
    with pytest.raises(AssertionError, match="as it did"):
        hm.apply_head_masks(stock, CHUNK)(TOKENS)


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_flag_and_its_shortcut_are_kept(causal):
    x = keras.Input((7, 8))
    attention = layers.MultiHeadAttention(4, 3, name="attention")
    stock = keras.Model(x, attention(x, x, use_causal_mask=causal))
    given = normal(2, 7, 8)
    full = hm.apply_head_masks(stock, hm.Full())
    np.testing.assert_array_equal(numpy(full(given)), numpy(stock(given)))
    masked = hm.apply_head_masks(stock, hm.PerHead({1: CHUNK}))
    allowed = mask_by_loops(hm.PerHead({1: CHUNK}), 2, 4, 7, 7)
    if causal:
        allowed = allowed & np.tri(7, dtype=bool)
    np.testing.assert_allclose(
        numpy(masked(given)), by_hand(attention, given, mask=allowed)[0], atol=5e-6
    )


def test_scores_are_those_of_the_rule():
    x = keras.Input((7, 8))
    attention = layers.MultiHeadAttention(4, 3)
    stock = keras.Model(x, attention(x, x, return_attention_scores=True))
    spec = hm.PerHead({0: hm.Nothing(), 1: CHUNK})
    _, scores = hm.apply_head_masks(stock, spec)(normal(2, 7, 8))
    allowed = mask_by_loops(spec, 2, 4, 7, 7)
    assert (numpy(scores)[~allowed] == 0).all()
    np.testing.assert_allclose(numpy(scores).sum(-1)[:, 1:], 1, atol=1e-6)


def test_what_the_rule_reads_is_prepared_once_and_its_mask_shared(monkeypatch):
    prepared, made = [], []
    prepare, make = hm.SameSentence.prepare, binding.evaluation.mask_of_all_heads
    monkeypatch.setattr(
        hm.SameSentence, "prepare", lambda self, x: prepared.append(1) or prepare(self, x)
    )
    monkeypatch.setattr(
        binding.evaluation, "mask_of_all_heads", lambda *a: made.append(1) or make(*a)
    )
    masked = hm.apply_head_masks(stack(3), hm.PerHead({0: hm.SameSentence(9)}))
    masked(TOKENS)
    assert (len(prepared), len(made)) == (1, 1)
    masked(TOKENS)
    assert (len(prepared), len(made)) == (2, 2)


# --- Inputs ---------------------------------------------------------------------------------------


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
        masked = hm.apply_head_masks(keras.Model(inputs, y * 1.0), spec)
        assert isinstance(masked.input, wanted)
        names = [tensor.name for tensor in masked.inputs]
        assert names.count("parts") == 1
        given = {name: values[name] for name in names}
        results.append(numpy(masked(given)))
        if wanted is list:
            results.append(numpy(masked([values[name] for name in names])))
        results.append(masked.predict(given, verbose=0))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-6)


def test_a_whole_mask_is_an_input_with_a_head_axis():
    stock = one_layer()
    masked = hm.apply_head_masks(stock, hm.MaskInput("shape"))
    assert masked.inputs[1].shape == (None, 4, None, None)
    whole = np.random.default_rng(0).random((2, 4, 7, 7)) < 0.6
    got = numpy(masked([TOKENS, whole]))
    wanted = by_loops(stock, hm.MaskInput("shape"), {"shape": whole})
    np.testing.assert_allclose(got, wanted, atol=5e-6)


def test_inputs_that_cannot_be_read():
    x = keras.Input((7, 8), name="vectors")
    scores = keras.Input((7,), name="scores")
    y = layers.MultiHeadAttention(4, 3)(x, x)
    model = keras.Model([x, scores], y * 1.0)
    with pytest.raises(ValueError, match=r"'vectors' as one value per position.*another name"):
        hm.apply_head_masks(model, hm.SameSegment("vectors"))
    with pytest.raises(TypeError, match=r"'scores', which has dtype float32.*another name"):
        hm.apply_head_masks(model, hm.SameSegment("scores"))
    two = keras.Model(x, layers.MultiHeadAttention(4, 3)(y, y))
    with pytest.raises(ValueError, match=r"'ids' is read both"):
        hm.apply_head_masks(two, {0: hm.SameSegment("ids"), 1: hm.MaskInput("ids")})
    masked = hm.apply_head_masks(model, hm.SameSegment("ids"))
    with pytest.raises(ValueError, match=r"In the attention layer .*has length 5.*has 7"):
        masked([normal(2, 7, 8), normal(2, 7), np.zeros((2, 5), "int32")])


# --- Kinds of models ------------------------------------------------------------------------------


def test_a_sequential_model():
    stock = keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="token_ids"),
            layers.Embedding(12, 8),
            Block(name="block"),
        ]
    )
    masked = hm.apply_head_masks(stock, CHUNK)
    assert leak(masked) == 0 < leak(stock)
    assert hm.apply_head_masks(stock, hm.SameSegment("parts")).inputs[1].name == "parts"
    np.testing.assert_array_equal(numpy(masked.unmasked()(TOKENS)), numpy(stock(TOKENS)))
    lazy = keras.Sequential([layers.Dense(3)])
    with pytest.raises(ValueError, match=r"has no graph yet: start it with a keras.Input"):
        hm.apply_head_masks(lazy, CHUNK)


def test_nested_models_and_shared_layers():
    inner = stack(2)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    shared = Block(name="shared")
    outer = keras.Model(ids, shared(shared(inner(ids))), name="outer")
    masked = hm.apply_head_masks(outer, CHUNK)
    assert list(masked.mask_specs) == [
        f"stack/block_{i}/{masked.get_layer('stack').get_layer(f'block_{i}').attention.name}"
        for i in range(2)
    ] + [f"shared/{masked.get_layer('shared').attention.name}"]
    assert leak(masked) == 0 < leak(outer)


def test_a_masked_model_inside_a_model(tmp_path):
    inner = hm.apply_head_masks(stack(2), hm.PerHead({0: hm.SameSegment("parts")}, default=CHUNK))
    outer = keras.Model(inner.input, layers.Dense(3)(inner(inner.input)), name="outer")
    given = {"token_ids": TOKENS, "parts": np.array([[0, 0, 0, 1, 1, 1, 1]] * 2, "int32")}
    outer.save(tmp_path / "outer.keras")
    reloaded = keras.saving.load_model(tmp_path / "outer.keras")
    np.testing.assert_array_equal(numpy(reloaded(given)), numpy(outer(given)))
    assert reloaded.get_layer("stack").mask_specs == inner.mask_specs
    with pytest.raises(ValueError, match="existing='and'"):
        hm.apply_head_masks(outer, hm.Window(0, 0))
    both = hm.apply_head_masks(outer, hm.Window(0, 0), existing="and")
    assert leak(outer, given, rows=slice(2, 3)) > 0 == leak(both, given, rows=slice(2, 3))
    wider = hm.apply_head_masks(outer, hm.Window(3, 3), existing="replace")
    assert leak(wider, given) > 0 == leak(outer, given)
    wider.save(tmp_path / "wider.keras")
    again = keras.saving.load_model(tmp_path / "wider.keras")
    np.testing.assert_array_equal(numpy(again(given)), numpy(wider(given)))


def test_a_subclass_that_computes_by_itself_gets_the_merged_mask():
    seen = []

    @keras.saving.register_keras_serializable("test_retrofit")
    class Own(layers.MultiHeadAttention):
        def _compute_attention(
            self,
            query,
            key,
            value,
            attention_mask=None,
            training=None,
            return_attention_scores=False,
        ):
            seen.append(numpy(attention_mask))
            return query * 1.0 + value, None

    x = keras.Input((7, 8))
    model = keras.Model(x, Own(4, 3, name="own")(x, x, use_causal_mask=True))
    rule, given = hm.PerHead({0: CHUNK, 3: hm.Nothing()}), normal(2, 7, 8)
    masked = hm.apply_head_masks(model, rule)
    got = numpy(masked(given))
    allowed = mask_by_loops(rule, 1, 4, 7, 7) & np.tri(7, dtype=bool)
    np.testing.assert_array_equal(np.broadcast_to(seen[-1], allowed.shape), allowed)
    own = model.get_layer("own")
    context = numpy(own.query_dense(given)) + numpy(own.value_dense(given))
    context[:, :, 3] = 0  # a head that is off gives 0, whatever the class would make of it
    np.testing.assert_allclose(got, numpy(own.output_dense(context)), atol=1e-5)


def test_models_without_a_graph_are_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(TypeError, match=r"`Own` is a subclassed model without a graph"):
        hm.apply_head_masks(Own(), CHUNK)
    with pytest.raises(TypeError, match="must be a functional or Sequential Keras model"):
        hm.apply_head_masks(layers.MultiHeadAttention(4, 3), CHUNK)


# --- Selectors ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder():
    """Two self-attentions and, between them, attention to another sequence."""
    q = keras.Input((7, 8), name="q")
    v = keras.Input((5, 8), name="v")
    x = layers.MultiHeadAttention(4, 3, name="first")(q, q)
    x = layers.MultiHeadAttention(4, 3, name="looks_over")(x, value=v)
    x = layers.MultiHeadAttention(4, 3, name="last")(x, x)
    return keras.Model([q, v], x, name="decoder")


@pytest.mark.parametrize(
    ("selector", "paths"),
    [
        (None, ["first", "last"]),
        (1, ["last"]),
        (np.int64(0), ["first"]),
        ("1", ["last"]),
        ("0-1", ["first", "last"]),
        ("0,1", ["first", "last"]),
        ((0, "las"), ["first", "last"]),
        ([0, "0-1"], ["first", "last"]),
        ("looks", ["looks_over"]),
        ("^(first|looks_over)$", ["first", "looks_over"]),
    ],
)
def test_selectors(decoder, selector, paths):
    assert list(hm.apply_head_masks(decoder, CHUNK, layers=selector).mask_specs) == paths


@pytest.mark.parametrize(
    ("selector", "error", "told"),
    [
        (2, ValueError, r"no self-attention layer 2: the model has 2"),
        (-1, ValueError, r"no self-attention layer -1"),
        ("1-2", ValueError, r"no self-attention layer 2"),
        ("1-0", ValueError, r"runs backwards"),
        ("second", ValueError, r"No attention layer's path matches 'second'. Paths: 'first'"),
        ("(", ValueError, r"`layers` is no regex"),
        ((), ValueError, r"\(\) names no layer"),
        (True, TypeError, r"Layers are named by .* Received: True"),
        (0.0, TypeError, r"Layers are named by .* Received: 0.0"),
    ],
)
def test_selectors_that_name_nothing(decoder, selector, error, told):
    with pytest.raises(error, match=told):
        hm.apply_head_masks(decoder, CHUNK, layers=selector)


def test_rules_by_layer(decoder):
    a, b = hm.Window(1, 1), hm.PerHead({3: CHUNK})
    masked = hm.apply_head_masks(decoder, {0: a, "looks": b.get_config(), (1,): b})
    assert masked.mask_specs == {"first": a, "looks_over": b, "last": b}
    with pytest.raises(ValueError, match=r"'last' \(MultiHeadAttention\) has two rules"):
        hm.apply_head_masks(decoder, {"0-1": a, 1: b})
    with pytest.raises(ValueError, match="say the same twice"):
        hm.apply_head_masks(decoder, {0: a}, layers=0)
    with pytest.raises(ValueError, match="empty mapping"):
        hm.apply_head_masks(decoder, {})
    with pytest.raises(TypeError, match="must be a mask spec"):
        hm.apply_head_masks(decoder, np.ones((7, 7), bool))
    with pytest.raises(ValueError, match=r"In the attention layer 'first'.*names head 4"):
        hm.apply_head_masks(decoder, hm.PerHead({4: a}))
    for config in (a.get_config(), json.dumps(a.get_config())):
        assert set(hm.apply_head_masks(decoder, config).mask_specs.values()) == {a}


def test_cross_attention_reads_a_pair(decoder):
    rule = hm.SameSegment("ids") & hm.KeyFlag("open")
    masked = hm.apply_head_masks(decoder, rule, layers="looks")
    assert [x.name for x in masked.inputs] == ["q", "v", "key_ids", "open", "query_ids"]
    given = {"q": normal(2, 7, 8), "v": normal(2, 5, 8, seed=1)}
    ids = {"query_ids": PARTS, "key_ids": PARTS[:, 1:6], "open": np.array([[1, 1, 0, 1, 1]] * 2)}
    got = numpy(masked(given | ids))
    first, over, last = (decoder.get_layer(name) for name in ("first", "looks_over", "last"))
    x = by_hand(first, given["q"])[0]
    pairs = {"ids": (PARTS, PARTS[:, 1:6]), "open": (None, ids["open"])}
    x = by_hand(over, x, given["v"], mask=mask_by_loops(rule, 2, 4, 7, 5, pairs))[0]
    np.testing.assert_allclose(got, by_hand(last, x)[0], atol=2e-5)


def test_layers_of_one_name_are_told_apart():
    @keras.saving.register_keras_serializable("test_retrofit")
    class Twins(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.twins = [layers.MultiHeadAttention(4, 3, name="twin") for _ in range(2)]

        def build(self, shape):
            for layer in self.twins:
                layer.build(shape, shape)

        def call(self, x):
            return self.twins[1](y := self.twins[0](x, x), y)

    x = keras.Input((7, 8))
    masked = hm.apply_head_masks(keras.Model(x, Twins(name="pair")(x)), {0: CHUNK, 1: hm.Full()})
    assert masked.mask_specs == {"pair/twin": CHUNK, "pair/twin#2": hm.Full()}


# --- Layers that have a rule ----------------------------------------------------------------------


def with_own_rule():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, name="embedding")(ids)
    attention = hm.PerHeadMaskedMultiHeadAttention(
        4, 3, mask_spec=hm.PerHead({0: hm.SameSentence(9)}), name="attention"
    )
    model = keras.Model(ids, attention(x, mask_inputs={"token_ids": ids}), name="own")
    random_biases(attention)
    return model


@pytest.mark.parametrize("existing", ["and", "replace"])
@pytest.mark.parametrize("make", [with_own_rule, one_layer], ids=["our layer", "masked before"])
def test_and_or_replace_a_rule(make, existing, tmp_path):
    first, second = hm.PerHead({0: hm.SameSentence(9)}), hm.PerHead({"0-1": hm.Window(1, 1)})
    stock, padding = make(), make is one_layer
    before = stock if make is with_own_rule else hm.apply_head_masks(stock, first)
    with pytest.raises(ValueError, match=r"'attention' .*has a rule already.*existing='and'"):
        hm.apply_head_masks(before, second)
    pair = {"token_ids": (TOKENS, TOKENS)}
    wanted = {"and": first & second, "replace": second}[existing]
    was, expected = (by_loops(stock, rule, pair, padding) for rule in (first, wanted))
    for copy in (True, False):
        masked = hm.apply_head_masks(before, second, existing=existing, copy=copy)
        np.testing.assert_allclose(numpy(masked(TOKENS)), expected, atol=5e-6)
        masked.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(numpy(again(TOKENS)), numpy(masked(TOKENS)))
        if copy:  # and the one before is as it was
            np.testing.assert_allclose(numpy(before(TOKENS)), was, atol=5e-6)


def test_other_layers_may_get_a_rule_later():
    masked = hm.apply_head_masks(stack(2), CHUNK, layers=0)
    assert leak(masked) > 0
    masked = hm.apply_head_masks(masked, CHUNK, layers=1)
    assert leak(masked) == 0
    with pytest.raises(ValueError, match=r"`existing` must be one of"):
        hm.apply_head_masks(masked, CHUNK, existing="or")


# --- Copies ---------------------------------------------------------------------------------------


def test_a_copy_leaves_the_model_as_it_was():
    stock = one_layer()
    before, weights = numpy(stock(TOKENS)), stock.get_weights()
    masked = hm.apply_head_masks(stock, CHUNK)
    assert [w.path for w in masked.weights] == [w.path for w in stock.weights]
    masked.compile("sgd", "mse")
    masked.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
    assert max(abs(a - b).max() for a, b in zip(masked.get_weights(), weights, strict=True)) > 0
    np.testing.assert_array_equal(numpy(stock(TOKENS)), before)


def test_without_a_copy_the_model_is_used_up():
    stock = one_layer()
    kernel = stock.get_layer("attention").query_dense.kernel
    outside = keras.Model(stock.input, stock.get_layer("attention").output)
    masked = hm.apply_head_masks(stock, CHUNK, copy=False)
    assert masked.get_layer("attention").query_dense.kernel is kernel
    for use in (
        lambda: stock(TOKENS),
        lambda: stock.predict(TOKENS),
        lambda: stock.weights,
        lambda: stock.save("model.keras"),
        lambda: setattr(stock, "trainable", False),
    ):
        with pytest.raises(RuntimeError, match=r"used up by `apply_head_masks\(model, ..., copy"):
            use()
    assert "used up" in repr(stock)
    with pytest.raises(RuntimeError, match="ran outside it"):
        outside(TOKENS)
    assert leak(masked) == 0
    np.testing.assert_array_equal(masked.get_weights()[1], numpy(kernel))


def test_a_model_that_cannot_be_copied():
    class Secret(layers.Layer):
        def __init__(self, secret):
            super().__init__()

        def call(self, x):
            return x

        def get_config(self):
            return {}

    x = keras.Input((7, 8))
    model = keras.Model(x, Secret(3)(layers.MultiHeadAttention(4, 3)(x, x)))
    with pytest.raises(ValueError, match=r"(?s)cannot be copied.*copy=False"):
        hm.apply_head_masks(model, CHUNK)
    assert hm.apply_head_masks(model, CHUNK, copy=False)(normal(2, 7, 8)).shape == (2, 7, 8)

    block = Block(name="block")  # whose inner layer stands in the graph, too: a config parts them
    y = block(x)
    model = keras.Model(x, [y, block.attention(y, y)])
    with pytest.raises(ValueError, match=r"(?s)cannot be copied.*copy=False"):
        hm.apply_head_masks(model, CHUNK)


# --- Never silently unmasked ----------------------------------------------------------------------


def test_a_layer_or_a_part_outside_its_model():
    masked = hm.apply_head_masks(stack(2), CHUNK)
    block = masked.get_layer("block_1")
    part = keras.Model(masked.input, masked.get_layer("block_0").output)
    for run in (
        lambda: block(normal(1, 4, 8)),
        lambda: part(TOKENS),
        lambda: part.predict(TOKENS, verbose=0),
    ):
        with pytest.raises(Exception, match=r"'block_\d/.*\(MultiHeadAttention\) obeys a rule"):
            run()
    assert part.output.shape == (None, None, 8)


def test_clone_model_refuses_and_config_clones():
    masked = hm.apply_head_masks(stack(2), CHUNK)
    with pytest.raises(RuntimeError, match=r"`clone_model` would drop the rule"):
        keras.models.clone_model(masked)
    clone = masked.from_config(masked.get_config())
    assert clone.mask_specs == masked.mask_specs
    clone.set_weights(masked.get_weights())
    np.testing.assert_array_equal(numpy(clone(TOKENS)), numpy(masked(TOKENS)))
    outer = keras.Model(masked.input, layers.Dense(2)(masked.output))
    clone = keras.models.clone_model(keras.Model(x := keras.Input((None,)), masked(x)))
    assert clone.layers[-1].mask_specs == masked.mask_specs
    with pytest.raises(RuntimeError, match="ran outside it"):
        outer(TOKENS)


def test_a_rule_that_no_layer_used():
    @keras.saving.register_keras_serializable("test_retrofit")
    class Bypass(layers.MultiHeadAttention):
        def call(self, query, value, key=None):
            return self.hidden_way(query, value)

        def hidden_way(self, query, value):
            return query

    @keras.saving.register_keras_serializable("test_retrofit")
    class HidesIt(Bypass):
        def call(self, query, value, key=None):
            return super().call(query, value)

    x = keras.Input((7, 8))
    with pytest.raises(ValueError, match=r"\(Bypass\) is of a class whose masks cannot be"):
        hm.apply_head_masks(keras.Model(x, Bypass(4, 3)(x, x)), CHUNK)
    masked = hm.apply_head_masks(keras.Model(x, HidesIt(4, 3)(x, x)), CHUNK)
    with pytest.raises(RuntimeError, match=r"\(HidesIt\) was not used in this forward"):
        masked(normal(2, 7, 8))


@pytest.mark.parametrize(
    "attention", [layers.GroupQueryAttention(3, 4, 2, name="g"), layers.Attention(name="g")]
)
def test_an_attention_class_we_do_not_know(attention):
    x = keras.Input((7, 8))
    y = attention(x, x) if "Group" in type(attention).__name__ else attention([x, x])
    model = keras.Model(x, layers.MultiHeadAttention(4, 3, name="known")(y, y))
    name = type(attention).__name__
    with pytest.raises(ValueError, match=rf"'g' \({name}\).*name the others in `layers`: 'known'"):
        hm.apply_head_masks(model, CHUNK)
    with pytest.raises(ValueError, match=rf"'g' \({name}\), which 'g' names"):
        hm.apply_head_masks(model, CHUNK, layers="g")
    assert list(hm.apply_head_masks(model, CHUNK, layers="known").mask_specs) == ["known"]


def test_several_attention_axes_are_refused():
    x = keras.Input((4, 4, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x))
    with pytest.raises(ValueError, match="attends over several axes"):
        hm.apply_head_masks(model, CHUNK)(normal(1, 4, 4, 8))


def test_the_report(decoder):
    lines = []
    hm.apply_head_masks(decoder, hm.PerHead({0: CHUNK}), layers=1).summary_masks(lines.append)
    assert [line.split()[:6] for line in lines] == [
        ["0", "first", "MultiHeadAttention", "4", "heads", "self"],
        ["-", "looks_over", "MultiHeadAttention", "4", "heads", "cross"],
        ["1", "last", "MultiHeadAttention", "4", "heads", "self"],
    ]
    assert lines[0].endswith("None")
    assert lines[2].endswith("PerHead({0: Chunk(3)})")


# --- Files ----------------------------------------------------------------------------------------

FRESH = """
import sys, numpy as np, keras, keras_headmask
sys.path.insert(0, sys.argv[2])
import test_retrofit
model = keras.saving.load_model(sys.argv[1] + ".keras")
np.savez(sys.argv[1] + ".npz", y=model.predict(test_retrofit.TOKENS, verbose=0))
model.evaluate(test_retrofit.TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
"""


def test_saved_after_fitting_and_loaded_in_a_fresh_process(tmp_path):
    masked = hm.apply_head_masks(stack(2), {0: hm.PerHead({0: hm.SameSentence(9)}), 1: CHUNK})
    masked.compile("adam", "mse", jit_compile=False)
    x, y = np.tile(TOKENS, (4, 1)), np.tile(normal(2, 7, 8), (4, 1, 1))
    losses = masked.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    masked.save(tmp_path / "model.keras")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "model"), str(here)],
        env=dict(os.environ, PYTHONPATH=str(here.parent), KERAS_BACKEND=BACKEND),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "model.npz") as out:
        np.testing.assert_array_equal(out["y"], masked.predict(TOKENS, verbose=0))


def test_weight_files_of_stock_and_masked_are_the_same(tmp_path):
    stock = stack(2)
    masked = hm.apply_head_masks(stack(2), hm.SameSegment("parts"))
    stock.save_weights(tmp_path / "stock.weights.h5")
    masked.load_weights(tmp_path / "stock.weights.h5")
    for a, b in zip(masked.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    masked.set_weights([w + 1 for w in masked.get_weights()])
    masked.save_weights(tmp_path / "masked.weights.h5")
    stock.load_weights(tmp_path / "masked.weights.h5")
    for a, b in zip(masked.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_file_holds_the_stock_model_and_the_rule_in_json():
    masked = hm.apply_head_masks(stack(3), {"0,2": CHUNK, 1: hm.Full()})
    config = json.loads(masked.to_json())
    assert config["registered_name"] == "keras_headmask>HeadMaskedModel"
    assert config["config"]["mask_specs"] == [
        {"layers": [0, 2], "spec": {"kind": "chunk", "size": 3}},
        {"layers": [1], "spec": {"kind": "full"}},
    ]
    assert config["config"]["model"]["class_name"] == "Functional"
    config["config"]["mask_specs"][0]["layers"] = [7]
    with pytest.raises(ValueError, match=r"name attention layer 7, but the model has 3"):
        keras.models.model_from_json(json.dumps(config))
    assert leak(pickle.loads(pickle.dumps(hm.apply_head_masks(stack(1), CHUNK)))) == 0


@pytest.mark.tensorflow
def test_exported(tmp_path):
    import tensorflow as tf

    masked = hm.apply_head_masks(one_layer(), RULES["ids of its own"][0])
    masked.export(str(tmp_path / "model"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "model"))
    got = served.serve([tf.constant(TOKENS), tf.constant(PARTS)]).numpy()
    np.testing.assert_allclose(got, numpy(masked([TOKENS, PARTS])), atol=1e-5)


# --- Training in other ways -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_other_dtypes(policy, tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        stock = one_layer()
        full = hm.apply_head_masks(stock, hm.Full())
        np.testing.assert_array_equal(numpy(full(TOKENS)), numpy(stock(TOKENS)))
        # In bfloat16, 256 and 257 are one number; as ids they must stay two.
        masked = hm.apply_head_masks(stock, hm.SameSegment("parts"))
        parts = np.array([[256, 256, 256, 257, 257, 257, 257]] * 2, "int32")
        assert leak(masked, {"parts": parts}) == 0 < leak(stock)
        masked.compile("sgd", "mse")
        history = masked.fit([TOKENS, parts], np.ones((2, 7, 8), "float32"), verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        masked.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        given = [TOKENS, parts]
        np.testing.assert_array_equal(numpy(again(given)), numpy(masked(given)))
    finally:
        keras.config.set_dtype_policy(before)


def test_compiled_by_xla():
    masked = hm.apply_head_masks(one_layer(), RULES["one head by sentence"][0])
    weights = masked.get_weights()
    trained = []
    for jit_compile in (True, False):
        masked.set_weights(weights)
        if BACKEND == "torch" and jit_compile:
            continue  # torch.compile is another matter, and slow to start
        masked.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        masked.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
        trained.append(masked.get_weights())
    for a, b in zip(trained[0], trained[-1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("where", "copy"), [("block", True), ("attention", False)])
def test_rematerialised_layers_find_the_rule_again(where, copy):
    """Gradients are those of plain training: the second run has the same rule."""

    def trained(remat):
        keras.utils.set_random_seed(5)
        mode = ("full" if where == "block" else "list_of_layers") if remat else None
        with keras.RematScope(mode=mode, layer_names=["inner"]):
            block = Block(layers.MultiHeadAttention(4, 3, name="inner"), name="block")
            ids = keras.Input((7,), dtype="int32", name="token_ids")
            x = block(layers.Embedding(12, 8)(ids))
        model = hm.apply_head_masks(
            keras.Model(ids, x), hm.PerHead({0: hm.SameSentence(9)}, default=CHUNK), copy=copy
        )
        for layer in (model.get_layer("block"), model.get_layer("block").attention):
            assert getattr(layer._remat_mode, "mode", None) == mode  # in a copy, too
        model.compile(
            keras.optimizers.SGD(0.1), "mse", run_eagerly=BACKEND == "tensorflow", jit_compile=False
        )
        model.fit(TOKENS, np.ones((2, 7, 8), "float32"), epochs=2, verbose=0)
        return model.get_weights()

    for plain, again in zip(trained(False), trained(True), strict=True):
        np.testing.assert_allclose(again, plain, atol=1e-6)
