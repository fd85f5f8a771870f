"""A masked model as an object of Keras: copied, saved, loaded, trained, called."""

import copy
import json

import keras
import numpy as np
import pytest
from contract import normal, numpy
from keras import layers, ops
from keras_versions import takes_unread_inputs
from small_models import (
    CHUNK,
    PARTS,
    TOKENS,
    Block,
    apply,
    by_loops,
    leak,
    of_ids,
    one_layer,
    stack,
)
from tolerance import assert_close

import keras_headmask as hm

BACKEND = keras.backend.backend()
BY_SENTENCE = hm.PerHead({0: hm.SameSentence(9)})


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


def test_a_copy_has_the_state_of_the_model():
    """What is adapted, frozen or under LoRA, which no config of a block says."""
    x = keras.Input((None, 8))
    y = layers.Normalization(name="normal")(Block(name="first")(Block(name="second")(x)))
    stock = keras.Model(x, y)
    stock.get_layer("normal").adapt(normal(4, 7, 8, seed=1))
    stock.get_layer("first").attention.trainable = False
    dense = stock.get_layer("second").attention.query_dense
    dense.enable_lora(2)
    dense.lora_kernel_b.assign(normal(*dense.lora_kernel_b.shape))
    masked = apply(stock, hm.PerHead({0: hm.SameSegment("ids")}), add_inputs=True)
    given = normal(2, 7, 8)
    for twin in (hm.unmasked(masked), apply(stock, hm.Full())):
        assert_close(numpy(twin(given)), numpy(stock(given)))
        ours, theirs = ([(w.shape, w.trainable) for w in m.weights] for m in (twin, stock))
        assert ours == theirs
    assert len(masked.trainable_weights) == len(stock.trainable_weights) < len(stock.weights)


@pytest.mark.tensorflow
def test_a_copy_has_vocabularies():
    import tensorflow as tf

    words = layers.TextVectorization(output_sequence_length=6)
    words.adapt(["drums in the deep"])
    text = keras.Input((), dtype="string")
    h = layers.Embedding(20, 8)(words(text))
    model = keras.Model(text, layers.MultiHeadAttention(2, 4)(h, h))
    given = tf.constant(["in the deep"])
    masked = hm.apply_head_masks(model, hm.Full())
    np.testing.assert_array_equal(numpy(masked(given)), numpy(model(given)))


@pytest.mark.parametrize("rule", [CHUNK, BY_SENTENCE], ids=["positions", "ids"])
def test_without_a_copy_the_model_itself_is_masked(rule):
    """It and those that hold it run no function of before."""
    model = one_layer()
    outer = keras.Sequential([model, layers.Dense(2)])
    for one in (model, outer):
        one.predict(TOKENS, verbose=0)
    kernel = model.get_layer("attention").query_dense.kernel
    wanted = numpy(hm.apply_head_masks(model, rule)(TOKENS))
    assert hm.apply_head_masks(model, rule, copy=False) is model
    assert model.get_layer("attention").query_dense.kernel is kernel
    assert_close(model.predict(TOKENS, verbose=0), wanted, depth=3)
    assert_close(outer.predict(TOKENS, verbose=0), numpy(outer.layers[-1](wanted)), depth=3)


def test_models_built_on_its_tensors_before_are_refused():
    model = one_layer()
    head = keras.Model(model.inputs, layers.Dense(2)(model.output))
    head.predict(TOKENS, verbose=0)
    hm.apply_head_masks(model, CHUNK, copy=False)
    with pytest.raises(ValueError, match=r"called outside of the masked model 'small'.*Mask last"):
        head.predict(TOKENS, verbose=0)


@keras.saving.register_keras_serializable("test_masked_model")
class BuiltLate(layers.Layer):
    """Its attention is made in `build`, and a config does not build it."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(2, 4, name="self_attention")
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)

    def get_build_config(self):
        return None


@keras.saving.register_keras_serializable("test_masked_model")
class MadeLate(keras.Model):
    """Its attention is made in the midst of its first call, and no config builds it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.block = layers.Embedding(12, 8), BuiltLate(name="block")

    def call(self, token_ids):
        return self.block(self.embedding(token_ids))

    def get_build_config(self):
        return None


def test_rules_of_a_file_wait_for_attention_that_the_first_call_makes():
    model = MadeLate()
    model(TOKENS)
    masked = apply(model, hm.SameSentence(9), "self", copy=False)
    again = type(masked).from_config(masked.get_config())
    assert again.get_config() == masked.get_config()
    assert not hm.mask_specs(again)
    first = numpy(again(TOKENS))
    masked.set_weights(again.get_weights())
    for made in (first, numpy(again(TOKENS))):
        np.testing.assert_array_equal(made, numpy(masked(TOKENS)))


@keras.saving.register_keras_serializable("test_masked_model")
class AfterABlock(layers.Layer):
    """Without `build`: a config says it is built before the block inside has made its attention."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = BuiltLate(name="inner")
        self.other = layers.MultiHeadAttention(2, 4, name="other_self_attention")

    def call(self, x):
        x = self.inner(x)
        return ops.concatenate([x, 0 * self.other(x, x)], axis=-1)


@pytest.mark.parametrize(
    "again",
    [
        lambda model, file: model.save(file) or keras.saving.load_model(file),
        lambda model, file: copy.deepcopy(model),
        lambda model, file: apply(model, hm.Full(), existing="and"),
    ],
    ids=["save", "deepcopy", "a rule on top"],
)
def test_a_rule_stays_with_its_attention_when_others_are_made_later(again, tmp_path):
    model = of_ids(lambda x: AfterABlock(name="block")(x))
    rule = hm.SameSentence(9)
    masked = apply(model, rule, layers="block/inner.*")
    again = again(masked, tmp_path / "model.keras")
    again.set_weights(masked.get_weights())
    specs = {path.split("block/")[1]: spec for path, spec in hm.mask_specs(again).items()}
    assert specs["inner/self_attention"] in (rule, rule & hm.Full())
    assert specs.get("other_self_attention", hm.Full()) == hm.Full()
    np.testing.assert_array_equal(numpy(again(TOKENS)), numpy(masked(TOKENS)))


# --- Files ----------------------------------------------------------------------------------------


def test_weight_files_of_stock_and_masked_are_the_same(tmp_path):
    stock = stack(2)
    masked = apply(stack(2), hm.SameSegment("parts"), add_inputs=True)
    for one, other in ((stock, masked), (masked, stock)):
        one.set_weights([w + 1 for w in one.get_weights()])
        one.save_weights(tmp_path / "one.weights.h5")
        other.load_weights(tmp_path / "one.weights.h5")
        for a, b in zip(other.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


# By what is changed in the config of a masked model, and in its only rule.
EDITED = {
    "no rules": ({"rules": []}, {}, r"no rule in 'rules', .* without its mask\. Received: \[\]"),
    "rules of null": ({"rules": None}, {}, r"no rule in 'rules', .* Received: None"),
    "no layers": ({}, {"layers": []}, r"'stack', which has 1, numbered from 0\. Received: \[\]"),
    "a layer too far": ({}, {"layers": [7]}, r"'stack', which has 1, .* Received: \[7\]"),
    "a layer from the end": ({}, {"layers": [-1]}, r"'stack', which has 1, .* \[-1\]"),
    "half a layer": ({}, {"layers": [0.0]}, r"'stack', which has 1, .* \[0\.0\]"),
    "a head too far": ({}, {"spec": hm.PerHead({9: CHUNK}).get_config()}, "names head 9, but"),
    "no key for rules": (
        {"rules": ...},
        {},
        r"lacks \['rules'\], which format 1 of keras_headmask",
    ),
    "no number": ({"attention": ...}, {}, r"lacks \['attention'\], which format 1"),
    "no inputs": ({"inputs": ...}, {}, r"lacks \['inputs'\], which format 1"),
    "no key for layers": ({}, {"layers": ...}, r"lacks \['layers'\], which format 1"),
}


def edited(config, changes):
    for key, value in changes.items():
        config[key] = value
        if value is ...:
            del config[key]


@pytest.mark.parametrize("case", EDITED)
def test_an_edited_file_never_loads_without_its_rule(case):
    config = json.loads(apply(stack(1), CHUNK).to_json())
    of_model, of_rule, message = EDITED[case]
    edited(config["config"]["rules"][0], of_rule)
    edited(config["config"], of_model)
    with pytest.raises(ValueError, match=message):
        keras.models.model_from_json(json.dumps(config))


# --- Training in other ways -----------------------------------------------------------------------


# (JAX has no products in float16 on a CPU.)
POLICIES = ["mixed_bfloat16", "float64", *(["mixed_float16"] if BACKEND != "jax" else [])]


@pytest.mark.parametrize("dtype_policy", POLICIES, indirect=True)
def test_other_dtypes(dtype_policy, tmp_path):
    stock = one_layer()
    full = hm.apply_head_masks(stock, hm.Full())
    np.testing.assert_array_equal(numpy(full(TOKENS)), numpy(stock(TOKENS)))
    # In bfloat16, 256 and 257 are one number; as ids they must stay two.
    masked = hm.apply_head_masks(stock, hm.SameSegment("parts"), add_inputs=True)
    parts = np.array([[256, 256, 256, 257, 257, 257, 257]] * 2, "int32")
    assert leak(masked, {"parts": parts}) == 0 < leak(stock)
    given, before = [TOKENS, parts], masked.get_weights()
    masked.compile("sgd", "mse", run_eagerly=True)
    masked.fit(given, np.ones((2, 7, 8), "float32"), verbose=0)
    for weight, value in zip(masked.weights, before, strict=True):  # (a key's bias stays)
        moved = abs(numpy(weight) - value).sum()
        assert moved < np.inf, weight.path
        assert "kernel" not in weight.name or moved > 0, weight.path
    masked.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_layer("attention").dtype_policy.name == dtype_policy
    np.testing.assert_array_equal(numpy(again(given)), numpy(masked(given)))


def test_compiled_by_xla():
    masked = hm.apply_head_masks(one_layer(), BY_SENTENCE)
    weights = masked.get_weights()
    trained = []
    for jit_compile in (True, False):
        masked.set_weights(weights)
        if BACKEND == "torch" and jit_compile:
            continue  # torch.compile is another matter, and slow to start
        how = {"jit_compile": jit_compile, "run_eagerly": not jit_compile}
        masked.compile(keras.optimizers.SGD(0.1), "mse", **how)
        masked.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
        trained.append(masked.get_weights())
    for a, b in zip(trained[0], trained[-1], strict=True):
        assert_close(a, b, depth=3)


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
        model = apply(
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
        assert_close(again, plain)


# --- Calls ----------------------------------------------------------------------------------------


def test_a_rule_that_no_layer_used():
    @keras.saving.register_keras_serializable("test_masked_model")
    class Sometimes(layers.MultiHeadAttention):
        bypass = False

        def call(self, query, value, key=None):
            return query if Sometimes.bypass else super().call(query, value, key)

    x, given = keras.Input((7, 8)), normal(2, 7, 8)
    masked = apply(keras.Model(x, Sometimes(4, 3, name="s")(x, x)), CHUNK)
    masked(given)
    Sometimes.bypass = True
    for call in (masked, lambda x: masked.predict(x, verbose=0)):
        with pytest.raises(RuntimeError, match=r"attention layer 's' was not used in this call"):
            call(given)


def test_time_distributed_runs_a_masked_model_on_each_text():
    masked = hm.apply_head_masks(one_layer(mask_zero=False), hm.SameSentence(9))
    texts = keras.Input((2, 7), dtype="int32")
    model = keras.Model(texts, layers.TimeDistributed(masked)(texts))
    assert_close(numpy(model(TOKENS[None]))[0], numpy(masked(TOKENS)))


@pytest.mark.parametrize(
    ("rule_inside", "name"),
    [
        (hm.SameSentence(9), "part_ids"),
        (hm.SameSentence(9), "token_ids"),
        (hm.SameSegment(input="token_ids"), "token_ids"),  # the same rule, of other ids
    ],
)
def test_rules_of_a_model_and_of_one_inside_read_inputs_of_their_own(rule_inside, name):
    """Also where two inputs have one name: `token_ids` of the outer model and of the inner one."""
    stock = one_layer(mask_zero=False)
    inner = hm.apply_head_masks(stock, rule_inside)
    text = keras.Input((None,), dtype="int32", name="text_ids")
    outer, part = keras.Model(text, inner(text)), hm.SameSegment(input=name)
    both = hm.apply_head_masks(outer, part, existing="and", add_inputs=True)
    inputs = {"token_ids": TOKENS, "part_ids": PARTS}
    rule = rule_inside & hm.SameSegment(input="part_ids")
    expected = by_loops(stock, rule, inputs, padding=False)
    assert_close(numpy(both([TOKENS, PARTS])), expected)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has 32 bits")
@takes_unread_inputs
def test_ids_of_64_bits():
    """Keras casts a model's inputs, so that of the ids must have 64 bits."""
    x, ids = keras.Input((4, 8)), keras.Input((4,), dtype="int64", name="ids")
    model = keras.Model([x, ids], layers.MultiHeadAttention(2, 4)(x, x))
    masked = hm.apply_head_masks(model, hm.SameSegment("ids"))
    outer = keras.Model([x, ids], masked([x, ids]))
    given, wide = normal(1, 4, 8), np.array([[5, 5 + 2**32, 6, 5]])
    expected = numpy(masked([given, np.array([[5, 7, 6, 5]])]))
    assert_close(numpy(outer([given, wide])), expected)
