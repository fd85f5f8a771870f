"""A model without the weights of the heads that its rules switch off gives the same outputs."""

import copy
import pickle
import warnings
from pathlib import Path

import backbones
import keras
import numpy as np
import pytest
from backbone_calls import built, called, data, randomised
from contract import GROUPED, MULTI_HEAD, normal, numpy, random_biases
from fresh import reload_fresh
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops
from small_models import TOKENS, Block, stack
from strategies import FEW, positional_leaves
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.heads.prune import prune_heads
from keras_headmask.retrofit.adapters import attention
from keras_headmask.retrofit.rule import spec_of

BACKEND = keras.backend.backend()
OFF = hm.Nothing()
X = normal(2, 5, 6)
FIRST_OFF = hm.PerHead({0: OFF, 2: hm.Window(1, 1)})


def model_of(layer, dim=6, **call):
    x = keras.Input((None, dim))
    model = keras.Model(x, layer(x, x, **call), name="small")
    random_biases(layer)
    return model


def masked_and_pruned(model, rule=FIRST_OFF, **how):
    masked = hm.apply_head_masks(model, rule, **how)
    return masked, prune_heads(masked)


# --- One layer -----------------------------------------------------------------------------------


def with_heads_off(num_heads):
    rules = st.lists(st.just(OFF) | positional_leaves, min_size=num_heads, max_size=num_heads)
    return rules.filter(lambda rules: OFF in rules and len({*rules}) > 1)


def numbers_by_hand(off, num_heads, of_one_key):
    """How many query heads and key heads stay."""
    on = [
        sum(head not in off for head in range(start, start + of_one_key))
        for start in range(0, num_heads, of_one_key)
    ]
    keys = sum(count > 0 for count in on) or 1
    return keys * max(*on, 1), keys


def shown(rule):
    """A rule that hides nothing may become `Full()`."""
    return hm.Full() if rule.constant else rule


@pytest.mark.parametrize(
    ("kind", "is_ours"),
    [
        (MULTI_HEAD, False),
        (GROUPED, True),
        pytest.param(MULTI_HEAD, True, marks=pytest.mark.long),
        pytest.param(GROUPED, False, marks=pytest.mark.long),
    ],
    ids=str,
)
@given(rules=with_heads_off(6))
@FEW
def test_pruned_equals_masked(kind, is_ours, rules):
    dim, size, num_heads = 6, 2, len(rules)
    spec = hm.PerHead(dict(enumerate(rules)))
    off = {head for head in range(num_heads) if spec.for_head(head).constant is False}
    if is_ours:
        masked = model_of(kind.layer(num_heads, size, mask_spec=spec, name="attention"))
    else:
        stock = model_of(kind.stock(**kind.sizes(num_heads, size), name="attention"))
        masked = hm.apply_head_masks(stock, spec)
    of_one_key = 2 if kind is GROUPED else 1
    queries, keys = numbers_by_hand(off, num_heads, of_one_key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some may have to stay
        if queries == num_heads:
            with pytest.raises(ValueError, match="key heads share queries evenly"):
                prune_heads(masked)
            return
        pruned = prune_heads(masked)
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    of_head = (dim + 1) * size
    assert pruned.count_params() == (queries + 2 * keys) * of_head + queries * size * dim + dim
    layer = pruned.get_layer("attention")
    found = hm.mask_specs(pruned).get("attention", hm.Full())
    now = [found.for_head(head) for head in range(queries)]
    assert [shown(rule) for rule in now if rule.constant is not False] == [
        shown(rule) for rule in rules if rule.constant is not False
    ]
    assert type(layer).__mro__[0 if hm.mask_specs(pruned) == {} or is_ours else 2] is (
        kind.ours if is_ours else kind.stock
    )


@pytest.mark.parametrize("kind", [MULTI_HEAD, GROUPED], ids=str)
def test_what_belongs_to_each_head_beside_the_projections(kind):
    more = {"use_sinks": True, "position_bias": hm.relative_position_bias(4, 4, 3)}
    more |= {"use_gate": True, "use_bias": False} if _has_gate() else {}
    rule = hm.PerHead({"2-3": OFF, 1: hm.Window(1, 1)})
    layer = kind.layer(4, 3, mask_spec=rule, logits_soft_cap=4.0, name="attention", **more)
    masked = model_of(layer)
    layer.set_weights([normal(*w.shape, seed=i) for i, w in enumerate(layer.weights)])
    pruned = prune_heads(masked)
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    now = pruned.get_layer("attention")
    assert tuple(now.sinks.shape) == (2,)
    np.testing.assert_array_equal(numpy(now.sinks), numpy(layer.sinks)[:2])
    np.testing.assert_array_equal(
        numpy(now.position_bias_table), numpy(layer.position_bias_table)[:, :2]
    )
    assert now.mask_spec == hm.PerHead({1: hm.Window(1, 1)})
    again = keras.Model.from_config(pruned.get_config())
    again.set_weights(pruned.get_weights())
    assert_close(numpy(again(X)), numpy(masked(X)))


def _has_gate():
    return hasattr(layers.MultiHeadAttention(1, 1), "_use_gate")


def test_sizes_of_values_outputs_and_keys():
    query, value = keras.Input((None, 6), name="query"), keras.Input((None, 5), name="value")
    key = keras.Input((None, 4), name="key")
    layer = layers.MultiHeadAttention(4, 3, value_dim=2, output_shape=(3, 2), name="cross")
    model = keras.Model([query, value, key], layer(query, value, key))
    random_biases(layer)
    masked, pruned = masked_and_pruned(model, layers="cross")
    given = [normal(2, 3, 6), normal(2, 5, 5), normal(2, 5, 4)]
    assert tuple(pruned(given).shape) == (2, 3, 3, 2)
    assert_close(numpy(pruned(given)), numpy(masked(given)))
    assert len(pruned.get_layer("cross").get_build_config()["shapes_dict"]) == 3


def test_a_layer_keeps_one_head_if_all_are_off():
    model = model_of(layers.MultiHeadAttention(4, 3, name="attention"))
    with pytest.warns(UserWarning, match=r"'attention' .*Head 0 must stay, since a layer has one"):
        masked, pruned = masked_and_pruned(model, OFF)
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    assert hm.mask_specs(pruned) == {"attention": OFF}
    assert pruned.get_layer("attention").num_heads == 1


def test_a_layer_whose_rule_hides_nothing_any_more_is_stock():
    model = model_of(layers.MultiHeadAttention(4, 3, name="attention"))
    _, pruned = masked_and_pruned(model, hm.PerHead({3: OFF}))
    assert type(pruned.get_layer("attention")) is layers.MultiHeadAttention
    assert "keras_headmask" not in pruned.to_json()
    assert hm.mask_specs(pruned) == {}


def of_rows(own):
    """A layer with a mask by which row 3 sees nothing."""
    x, mask = keras.Input((5, 6)), keras.Input((5, 5), dtype="bool")
    cls = hm.PerHeadMaskedMultiHeadAttention if own else layers.MultiHeadAttention
    layer = cls(4, 3, name="attention", **({"mask_spec": hm.PerHead({0: OFF})} if own else {}))
    sees = np.ones((2, 5, 5), bool)
    sees[:, 1, 2:] = sees[:, 3] = False
    return keras.Model([x, mask], layer(x, x, attention_mask=mask)), [X, sees]


@pytest.mark.parametrize("own", [False, True], ids=["retrofit", "own"])
def test_a_row_without_keys_keeps_its_output(own, tmp_path):
    """A rule that allows all keys stays: stock Keras gives such a row the mean of all values."""
    model, given = of_rows(own)
    masked = model if own else hm.apply_head_masks(model, hm.PerHead({0: OFF}))
    pruned = hm.prune_heads(masked)
    assert_close(numpy(pruned(given)), numpy(masked(given)))
    pruned.save(tmp_path / "pruned.keras")
    loaded = keras.saving.load_model(tmp_path / "pruned.keras")
    assert_close(numpy(loaded(given)), numpy(masked(given)))
    assert [str(x) for x in hm.mask_specs(pruned).values()] == ["Keys(0)"]


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask attached")
@pytest.mark.parametrize("around", ["layer", "model"])
def test_padding_keeps_its_output_inside_of_layers_and_models(around):
    """No call shows the Keras mask there."""
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    if around == "model":
        y = keras.Input((None, 8))
        x = keras.Model(y, y + layers.MultiHeadAttention(4, 2, name="first")(y, y))(x)
    else:
        x = Block(name="block")(x)
    model = keras.Model(ids, x + layers.MultiHeadAttention(4, 2, name="second")(x, x))
    randomised(model)
    masked, pruned = masked_and_pruned(model, {"0": hm.PerHead({0: OFF})})
    assert_close(numpy(pruned(TOKENS)), numpy(masked(TOKENS)))
    (rule,) = hm.mask_specs(pruned).values()
    assert rule == hm.Keys(0)


@pytest.mark.parametrize("padding", ["mask_zero", "masking", "query_mask"])
def test_padding_that_later_layers_attend_to_keeps_its_output(padding):
    """Keras' mask ends at `Add`, so the second layer sees what the first made of padding."""
    ids = np.array([[3, 4, 5, 6, 0, 0, 0], [3, 9, 9, 2, 2, 1, 0]])
    if padding == "mask_zero":
        inputs, given = keras.Input((None,), dtype="int32"), ids
        x = layers.Embedding(10, 6, mask_zero=True)(inputs)
    else:
        inputs, given = keras.Input((7, 6)), np.where(ids[..., None] > 0, normal(2, 7, 6), 0)
        x = layers.Masking()(inputs) if padding == "masking" else inputs
    more = {"query_mask": ops.any(x != 0, -1)} if padding == "query_mask" else {}
    x = ops.add(x, layers.MultiHeadAttention(4, 3, name="first")(x, x, **more))
    model = keras.Model(inputs, x + layers.MultiHeadAttention(4, 3, name="second")(x, x))
    randomised(model)
    masked = hm.apply_head_masks(model, {"first": hm.PerHead({0: OFF})})
    pruned = hm.prune_heads(masked)
    assert_close(numpy(pruned(given)), numpy(masked(given)))
    assert hm.mask_specs(pruned) == {"first": hm.Keys(0)}


def test_rules_that_meet_in_one_layer_are_each_renumbered():
    own = hm.PerHead({0: hm.Window(1, 0), 3: OFF})
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 3, mask_spec=own, name="attention")
    masked, pruned = masked_and_pruned(
        model_of(layer), hm.PerHead({1: OFF, 2: hm.Chunk(2)}), existing="and"
    )
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    now = pruned.get_layer("attention")
    assert now.mask_spec == hm.PerHead({0: hm.Window(1, 0)})
    assert hm.mask_specs(pruned)["attention"].for_head(1) == hm.Full() & hm.Chunk(2)
    masked, pruned = masked_and_pruned(masked, hm.PerHead({2: OFF}), existing="replace")
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    assert now.num_heads == 2
    assert pruned.get_layer("attention").num_heads == 3


@pytest.mark.parametrize("own", [False, True], ids=["retrofit", "own"])
@pytest.mark.parametrize("others", [hm.Full(), hm.Window(1, 0)], ids=str)
def test_the_only_reader_of_an_input_is_pruned(own, others, tmp_path):
    """The input stays, and changes nothing."""
    spec = hm.PerHead({0: hm.SameSegment("ids")}, others) & hm.PerHead({0: OFF})
    x, ids = keras.Input((None, 6)), keras.Input((None,), dtype="int32", name="ids")
    cls = hm.PerHeadMaskedMultiHeadAttention if own else layers.MultiHeadAttention
    layer = cls(4, 3, name="attention", **({"mask_spec": spec} if own else {}))
    masked = keras.Model([x, ids], layer(x, x, **({"mask_inputs": {"ids": ids}} if own else {})))
    random_biases(layer)
    if not own:
        masked = hm.apply_head_masks(masked, spec)
    pruned = prune_heads(masked)
    pruned.save(tmp_path / "model.keras")
    for model in (pruned, keras.saving.load_model(tmp_path / "model.keras")):
        assert attention(model)[0].num_heads == 3
        for values in (np.zeros((2, 5), "int32"), np.array([[0, 0, 1, 1, 1]] * 2)):
            assert_close(numpy(model([X, values])), numpy(masked([X, values])))


# --- Models --------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_prune")
class MadeInBuild(layers.Layer):
    """Its config holds the number of heads that it makes, as KerasHub's."""

    def build(self, shape):
        self.attention = hm.PerHeadMaskedMultiHeadAttention(
            4, 3, mask_spec=hm.PerHead({3: hm.Window(1, 1)})
        )
        self.attention.build(shape)

    def call(self, x):
        return x + self.attention(x)


def of_blocks():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    x = MadeInBuild(name="made")(x)
    inner = keras.Sequential([keras.Input((None, 8)), Block(name="block")], name="inner")
    return randomised(keras.Model(ids, inner(x)))


def bert():
    keras_hub = pytest.importorskip("keras_hub")
    sizes = {"vocabulary_size": 30, "num_layers": 1, "num_heads": 4, "hidden_dim": 16}
    more = {"intermediate_dim": 16, "max_sequence_length": 16}
    return randomised(keras_hub.models.BertBackbone(**sizes, **more))


def encoder():
    keras_hub = pytest.importorskip("keras_hub")
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8)(ids)
    return randomised(
        keras.Model(ids, keras_hub.layers.TransformerEncoder(16, 4, name="encoder")(x))
    )


MODELS = {
    "encoder": (encoder, hm.PerHead({2: OFF})),
    "blocks": (of_blocks, hm.PerHead({"0,2": OFF, 1: hm.Chunk(2)})),
    "bert": (bert, hm.PerHead({0: hm.SameSentence(9), 1: OFF})),
}


@pytest.fixture(scope="module")
def made():
    """By name: the stock model, the masked one, and the pruned one."""
    found = {}
    for name, (build, rule) in MODELS.items():
        keras.utils.set_random_seed(0)
        stock = build()
        found[name] = (stock, *masked_and_pruned(stock, rule, existing="and"))
    return found


def inputs_of(model):
    is_small = [x.name for x in model.inputs] == ["token_ids"]
    return {"token_ids": TOKENS % 10} if is_small else data(model)


def assert_equal(one, other):
    given = inputs_of(one)
    found, expected = called(one, given), called(other, given)
    for name, value in expected.items():
        assert_close(found[name], value, depth=2, message=name)


@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_model(made, name):
    stock, masked, pruned = made[name]
    assert_equal(pruned, masked)
    assert {x.num_heads for x in attention(stock)} == {4}
    layers_now = attention(pruned)
    for whole, now in zip(attention(masked), layers_now, strict=True):
        rule, renumbered = spec_of(whole), spec_of(now)
        renumbered = hm.Full() if renumbered is None else renumbered
        kept = [rule.for_head(h) for h in range(4) if rule.for_head(h).constant is not False]
        assert [renumbered.for_head(h) for h in range(now.num_heads)] == kept
    # One row for each head goes: three of the projections with a bias, and one of the output.
    gone = sum(4 - x.num_heads for x in layers_now)
    size, dim = (4, 16) if "bert" in name else (2, 8) if name == "encoder" else (3, 8)
    of_head = 3 * (dim + 1) * size + size * dim
    assert masked.count_params() - pruned.count_params() == gone * of_head > 0
    if name in ("encoder", "bert"):  # (others name the layers inside anew)
        assert [w.path for w in pruned.weights] == [w.path for w in masked.weights]
    if BACKEND == "torch":
        listed = {tuple(p.shape) for p in pruned.parameters()}
        assert listed == {tuple(v.shape) for v in pruned.variables}


@pytest.mark.long
def test_files_are_smaller_and_load_in_a_fresh_process(made, tmp_path):
    for _, masked, pruned in made.values():
        masked.save(tmp_path / "masked.keras")
        pruned.save(tmp_path / "pruned.keras")
        sizes = [(tmp_path / f"{name}.keras").stat().st_size for name in ("masked", "pruned")]
        assert sizes[0] > sizes[1]
    without_own_classes = {name: made[name][2] for name in ("bert", "encoder")}
    (tmp_path / "fresh").mkdir()
    models = {name: (pruned, inputs_of(pruned)) for name, pruned in without_own_classes.items()}
    reload_fresh(tmp_path / "fresh", models, "keras_hub")


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["bert", pytest.param("blocks", marks=pytest.mark.long)])
def test_exported(made, name, tmp_path):
    import tensorflow as tf

    _, masked, pruned = made[name]
    hm.export_saved_model(pruned, tmp_path, check=False, padded=False)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    given = inputs_of(masked)
    found = served(**{k: tf.constant(v) for k, v in given.items()})
    expected = called(masked, given)
    for name in expected:
        key = "output_0" if name == "only" else name
        np.testing.assert_allclose(found[key].numpy(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["encoder", *(pytest.param(x, marks=pytest.mark.long) for x in ("bert", "blocks"))]
)
def test_what_is_made_of_a_pruned_model(made, name):
    _, masked, pruned = made[name]
    assert_equal(copy.deepcopy(pruned), masked)
    assert_equal(pickle.loads(pickle.dumps(pruned)), masked)
    inside = {"bert": "transformer_layer_0", "encoder": "encoder", "blocks": "made"}
    layer = pruned.get_layer(inside[name])
    cut = keras.Model(pruned.input, layer.output)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(cut))
    again.set_weights(cut.get_weights())
    assert_equal(again, cut)
    unmasked = hm.unmasked(pruned)
    assert [w.shape for w in unmasked.weights] == [w.shape for w in pruned.weights]
    once_more = prune_heads(hm.apply_head_masks(pruned, hm.PerHead({0: OFF}), existing="replace"))
    assert {x.num_heads for x in attention(once_more)} <= {1, 2}
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(once_more))
    again.set_weights(once_more.get_weights())
    assert_equal(again, once_more)


def test_weights_are_trained_and_the_first_model_stays():
    stock = stack(1)
    stock.get_layer("block_0").attention.query_dense.trainable = False
    masked = hm.apply_head_masks(stock, hm.PerHead({0: hm.SameSentence(9), 1: OFF}))
    before = [w.copy() for w in masked.get_weights()]
    pruned = prune_heads(masked)
    flags = [[w.trainable for w in x.weights] for x in (masked, pruned)]
    assert flags[0] == flags[1]
    assert flags[1].count(False) == 2
    start = pruned.get_weights()
    pruned.compile("sgd", "mse")
    pruned.fit(TOKENS, np.ones((2, 7, 8), "float32"), verbose=0)
    moved = [not np.array_equal(a, b) for a, b in zip(start, pruned.get_weights(), strict=True)]
    for weight, has_moved in zip(pruned.weights, moved, strict=True):
        # (A bias of keys has no gradient.)
        assert has_moved is weight.trainable or weight.path.endswith("key/bias")
    for old, now in zip(before, masked.get_weights(), strict=True):
        np.testing.assert_array_equal(old, now)


def test_dtype_policies_stay():
    model = model_of(layers.MultiHeadAttention(4, 3, dtype="mixed_bfloat16", name="attention"))
    masked, pruned = masked_and_pruned(model)
    layer = pruned.get_layer("attention")
    assert layer.query_dense.dtype_policy.name == "mixed_bfloat16"
    assert {w.dtype for w in layer.weights} == {"float32"}
    assert_close(numpy(pruned(X)), numpy(masked(X)), "bfloat16")


@pytest.mark.long
def test_a_class_that_is_registered_nowhere():
    class Own(MadeInBuild):
        pass

    x = keras.Input((None, 6))
    model = keras.Model(x, Own(name="own")(x))
    masked, pruned = masked_and_pruned(model, hm.PerHead({0: OFF}), existing="and")
    assert_close(numpy(pruned(X)), numpy(masked(X)))
    assert attention(hm.unmasked(pruned))[0].num_heads == 3
    clone = keras.models.clone_model(pruned)
    clone.set_weights(pruned.get_weights())
    assert_close(numpy(clone(X)), numpy(masked(X)))


@pytest.mark.long
def test_every_backbone_is_pruned_or_named():
    pytest.importorskip("keras_hub")
    of_own_code = "GPT2Backbone", "OPTBackbone", "WhisperBackbone", "BLIP2Backbone"
    for entry in backbones.COVERED:
        stock = randomised(built(entry.name, entry.arguments))
        masked = hm.apply_head_masks(stock, hm.PerHead({1: OFF}))
        if entry.name in of_own_code:
            with pytest.raises(ValueError, match="CachedMultiHeadAttention has code of its own"):
                prune_heads(masked)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            pruned = prune_heads(masked)
        assert pruned.count_params() < stock.count_params(), entry.name
        assert_equal(pruned, masked)


# --- What is not pruned --------------------------------------------------------------------------


class OwnCode(layers.MultiHeadAttention):
    pass


def quantized():
    layer = layers.MultiHeadAttention(4, 3, name="attention")
    model = model_of(layer)
    layer.query_dense.quantize("int8")
    return model


def with_lora():
    layer = layers.MultiHeadAttention(4, 3, name="attention")
    model = model_of(layer)
    layer.value_dense.enable_lora(2)
    return model


def with_other_projection():
    class Dense(layers.EinsumDense):
        pass

    layer = layers.MultiHeadAttention(4, 3, name="attention")
    model = model_of(layer)
    object.__setattr__(layer.output_dense, "__class__", Dense)
    return model


def with_mask_by_head():
    x, mask = keras.Input((None, 6)), keras.Input((4, None, None), dtype="bool")
    layer = layers.MultiHeadAttention(4, 3, name="attention")
    return keras.Model([x, mask], layer(x, x, attention_mask=mask))


def with_bias_by_head():
    layer = hm.PerHeadMaskedMultiHeadAttention(4, 3, name="attention")
    return model_of(layer, attention_bias=np.zeros((4, 1, 1), "float32"))


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(4, 3, name="attention")

    def call(self, x):
        return self.attention(x, x)


def subclassed():
    model = Subclassed()
    model(X)
    return model


LEFT = {
    "own code": (
        lambda: model_of(OwnCode(4, 3, name="attention")),
        "OwnCode has code of its own, which may count",
    ),
    "probabilities": (
        lambda: model_of(
            layers.MultiHeadAttention(4, 3, name="attention"), return_attention_scores=True
        ),
        "its probabilities are read",
    ),
    "mask": (with_mask_by_head, "called with an `attention_mask` that has a row for each head"),
    "bias": (with_bias_by_head, "called with an `attention_bias` that has a row for each head"),
    "subclassed": (subclassed, "no call of it was seen"),
    "quantized": (quantized, r"its weights are quantized \(int8\): prune, then quantize"),
    "lora": (with_lora, "LoRA weights: save the model and load it"),
    "projection": (with_other_projection, "its projection 'attention_output' is a Dense"),
    "alibi": (
        lambda: model_of(
            hm.PerHeadMaskedMultiHeadAttention(4, 3, position_bias=hm.alibi(4), name="attention")
        ),
        r"its position_bias goes by the number of heads \(alibi\)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_why_a_layer_is_not_pruned(name):
    build, reason = LEFT[name]
    rule = hm.PerHead({1: OFF})
    # (A copy would not have what is changed inside of attention.)
    is_copied = name not in ("quantized", "projection")
    masked = hm.apply_head_masks(build(), rule, layers="attention", copy=is_copied)
    with pytest.raises(
        ValueError, match=f"(?s)None of the heads .*'attention' .*{reason}.*Change that"
    ):
        prune_heads(masked)


def test_a_rule_that_reads_a_whole_mask_is_not_pruned():
    model = model_of(layers.MultiHeadAttention(4, 3, name="attention"))
    rule = hm.PerHead({0: OFF, 1: hm.MaskInput("mask")})
    masked = hm.apply_head_masks(model, rule, add_inputs=True)
    with pytest.raises(ValueError, match=r"its rule reads \['mask'\], masks with"):
        prune_heads(masked)


def test_lora_is_merged_as_the_error_says(tmp_path):
    model = with_lora()
    layer = model.get_layer("attention").value_dense
    layer.lora_kernel_b.assign(normal(*layer.lora_kernel_b.shape))
    masked = hm.apply_head_masks(model, FIRST_OFF)
    masked.save(tmp_path / "model.keras")
    pruned = prune_heads(keras.saving.load_model(tmp_path / "model.keras"))
    assert_close(numpy(pruned(X)), numpy(masked(X)))


def test_what_is_left_beside_what_is_pruned_is_named():
    x = keras.Input((None, 6))
    y = layers.GroupQueryAttention(3, 4, 2, name="grouped")(x, x)
    model = keras.Model(x, OwnCode(4, 3, name="own")(y, y))
    rule = {"grouped": hm.PerHead({"0,1": OFF, 2: OFF}), "own": hm.PerHead({0: OFF})}
    masked = hm.apply_head_masks(model, rule)
    with pytest.warns(UserWarning, match=r"not pruned.\n'own' \(OwnCode\): .*code") as said:
        pruned = prune_heads(masked)
    (one,) = [x for x in said if x.category is UserWarning]
    assert "grouped" not in str(one.message)
    assert Path(one.filename) == Path(__file__)
    assert pruned.get_layer("grouped").num_query_heads == 1
    assert_close(numpy(pruned(X)), numpy(masked(X)), depth=2)
    with pytest.warns(UserWarning, match="Head 0 must stay, since key heads share queries evenly"):
        _, pruned = masked_and_pruned(
            model_of(layers.GroupQueryAttention(3, 9, 3, name="grouped")),
            hm.PerHead({"0-1,3-5": OFF, 8: OFF}),
        )
    grouped = pruned.get_layer("grouped")
    assert (grouped.num_query_heads, grouped.num_key_value_heads) == (4, 2)


def test_errors():
    with pytest.raises(TypeError, match="`model` must be a Keras model"):
        prune_heads(layers.MultiHeadAttention(4, 3))
    stock = model_of(layers.MultiHeadAttention(4, 3, name="attention"))
    for model in (stock, hm.apply_head_masks(stock, hm.Window(1, 1))):
        with pytest.raises(ValueError, match=r"No head of 'small' has the rule Nothing\(\), so"):
            prune_heads(model)


def test_what_a_file_must_hold(made, tmp_path):
    pruned = hm.unmasked(made["bert"][2])
    with pytest.raises(NotImplementedError, match="KerasHub loads a preset by the exact class"):
        pruned.save_to_preset(str(tmp_path / "preset"))
    config = pruned.get_config()
    with pytest.raises(ValueError, match=r"has the heads of 2 attention layers in .*which has 1"):
        type(pruned).from_config(config | {"heads": config["heads"] * 2})
    with pytest.raises(ValueError, match=r"lacks \['heads'\]"):
        type(pruned).from_config({"layer": config["layer"]})
