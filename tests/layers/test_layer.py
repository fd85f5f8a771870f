"""Our layers against NumPy loops, and the traps by name."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest
from contract import MULTI_HEAD, by_hand, normal, numpy, random_biases
from keras import ops
from keras_versions import needs
from oracle import mask as mask_by_loops
from tiled_contract import ALWAYS, close, tiles
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask import _keras
from keras_headmask.attention.scopes import overriding, tuned

Layer = hm.PerHeadMaskedMultiHeadAttention


def with_mask(x, mask):
    """`x` as a tensor that carries an implicit Keras mask."""
    x = ops.convert_to_tensor(x)
    _keras.set_keras_mask(x, ops.convert_to_tensor(mask))
    return x


def keras_mask(x):
    return getattr(x, "_keras_mask", None)


def check(layer, made, mask, *given):
    """The output and the probabilities, if they were asked for, are those of loops."""
    for got, wanted in zip(made, by_hand(layer, *given, mask=mask), strict=False):
        assert_close(numpy(got), wanted)


PADDED = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], bool)  # (B=3, T=5)
PAIRS = PADDED[:, None, None, :] & PADDED[:, None, :, None]


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 2), (1, 4), (3, 1), (2, 4)])
def test_a_rank_4_mask_meets_implicit_padding_whatever_b_and_h(kind, batch, heads):
    """B == H, B != H, B == 1, H == 1: stock Keras fails or mis-broadcasts some of them."""
    layer = kind.built(heads)
    x = normal(batch, 5, 8)
    mask = np.random.default_rng(1).random((batch, heads, 5, 5)) < 0.6
    given = {"attention_mask": mask, "return_attention_scores": True}
    y, scores = layer(with_mask(x, PADDED[:batch]), **given)
    check(layer, (y, scores), mask & PAIRS[:batch], x)
    assert (numpy(scores)[~(mask & PAIRS[:batch])] == 0).all()


@needs("sliding_window")
def test_everything_that_restricts_is_anded(kind):
    spec = hm.PerHead({0: hm.SameSegment("ids"), 2: ~hm.Chunk(2)})
    layer = kind.built(3, mask_spec=spec, sliding_window=4)
    x, ids = normal(3, 5, 8), np.array([[0, 0, 1, 1, 1]] * 3)
    explicit = np.random.default_rng(2).random((3, 5, 5)) < 0.8
    given = {"attention_mask": explicit, "use_causal_mask": True, "mask_inputs": {"ids": ids}}
    made = layer(with_mask(x, PADDED), **given, return_attention_scores=True)
    with overriding(layer, "_compute_attention", lambda usual, *of, **by: usual(*of, **by)):
        seen = layer(with_mask(x, PADDED), **given, return_attention_scores=True)
    i, j = np.arange(5)[:, None], np.arange(5)
    rule = np.ones((3, 5, 5), bool)
    rule[0] = ids[0][:, None] == ids[0]
    rule[2] = i // 2 != j // 2
    for one in (made, seen):
        check(layer, one, rule[None] & explicit[:, None] & (j <= i) & (abs(i - j) < 4) & PAIRS, x)


def test_explicit_keras_masks_count_for_query_value_and_key(kind):
    layer = kind.built(2)
    q, v, k = normal(2, 3, 8), normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2)
    query_mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    value_mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1]], bool)
    key_mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1]], bool)
    masks = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
    made = layer(q, v, k, **masks, return_attention_scores=True)
    merged = query_mask[:, None, :, None] & (value_mask & key_mask)[:, None, None, :]
    check(layer, made, merged, q, v, k)
    np.testing.assert_array_equal(numpy(keras_mask(made[0])), query_mask)


def test_one_tensor_feeds_two_layers_and_keeps_its_mask(kind):
    """And alone it is self-attention, with its mask."""
    layers, x = (kind.built(2), kind.built(2)), normal(3, 5, 8)
    masked = with_mask(x, PADDED)
    for layer in layers:
        alone, pair = layer(masked), layer(masked, masked)
        check(layer, [alone], PAIRS, x)
        np.testing.assert_array_equal(numpy(alone), numpy(pair))
        np.testing.assert_array_equal(numpy(keras_mask(alone)), PADDED)
    np.testing.assert_array_equal(numpy(keras_mask(masked)), PADDED)


def test_ids_255_and_256_stay_apart_under_bfloat16(kind):
    layer = kind.layer(2, 4, mask_spec=hm.SameSegment("ids"), dtype="mixed_bfloat16")
    ids = np.array([[255, 256, 255, 257]], "int32")
    given = {"mask_inputs": {"ids": ids}, "return_attention_scores": True}
    _, scores = layer(normal(1, 4, 8), **given)
    np.testing.assert_array_equal(numpy(scores)[0, 0] > 0, ids[0][:, None] == ids[0])


@needs("sliding_window")
@pytest.mark.parametrize("as_tensor", [False, True])
def test_query_offset_moves_rule_causal_mask_and_window(kind, as_tensor):
    """The last queries alone give the last rows of the whole: decoding with a cache."""
    spec = hm.PerHead({0: hm.Window(before=1), 1: hm.SameSegment("ids")})
    layer = kind.built(3, mask_spec=spec, sliding_window=4)
    x, ids = normal(2, 6, 8), np.array([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 3]])
    whole = layer(x, use_causal_mask=True, mask_inputs={"ids": ids})
    offset = ops.convert_to_tensor(4, dtype="int32") if as_tensor else 4
    tail = layer(x[:, 4:], x, use_causal_mask=True, mask_inputs={"ids": ids}, query_offset=offset)
    assert_close(numpy(tail), numpy(whole)[:, 4:])
    from_0 = layer(x[:, 4:], x, use_causal_mask=True, mask_inputs={"ids": (ids[:, 4:], ids)})
    assert not np.allclose(numpy(from_0), numpy(tail), atol=1e-3)


@pytest.mark.parametrize("axes", [(2,), (1, 2)])
def test_more_attention_axes_work_as_in_stock_keras(axes):
    ours, stock = (c(2, 4, attention_axes=axes) for c in (Layer, keras.layers.MultiHeadAttention))
    x = normal(2, 3, 4, 8)
    stock.build(x.shape, x.shape)
    ours.build(x.shape, x.shape)
    ours.set_weights(stock.get_weights())
    made, wanted = (layer(x, x, return_attention_scores=True) for layer in (ours, stock))
    for got, expected in zip(made, wanted, strict=True):
        assert_close(numpy(got), numpy(expected))
    fresh = Layer(2, 4, attention_axes=axes)
    symbolic = fresh(keras.Input((3, 4, 8)), return_attention_scores=True)
    assert symbolic[1].shape[1:] == made[1].shape[1:]
    with pytest.raises(ValueError, match="`value_mask` holds the integer -1"):  # open in stock
        ours(x, x, value_mask=np.full((2, 3, 4), -1))
    # There stock's own `call` runs, which takes the mask off.
    masked = with_mask(x[:, :, 0], np.array([[1, 1, 0], [1, 1, 1]], bool))
    Layer(2, 4, attention_axes=(1,))(masked)
    assert keras_mask(masked) is not None


@pytest.mark.parametrize("name", _keras.ATTENTION_HOOKS)
def test_a_subclass_that_masks_or_attends_itself_is_refused_at_once(kind, name):
    """Also where that code calls ours."""

    def own(self, *args, **kwargs):
        return getattr(super(Own, self), name)(*args, **kwargs)

    Own = type("Own", (kind.ours,), {name: own})
    message = f"subclass of {kind.ours.__name__} must leave `{name}` as it is.*`Own` overrides it"
    with pytest.raises(ValueError, match=message):
        Own(**kind.sizes(2, 4))


@needs("sliding_window")  # and the flag, both since Keras 3.15
@pytest.mark.parametrize("mask", [None, ~np.eye(5, k=-1, dtype=bool)[None]])
def test_the_hook_takes_a_causal_flag_as_that_of_stock_does(kind, mask):
    """By the flag alone, and beside a mask, whose rank of 3 has no axis of heads."""
    ours, stock = kind.twins(2, 8, 4)
    merged = np.tri(5, dtype=bool)[None] & (True if mask is None else mask)
    qkv = [ops.convert_to_tensor(normal(2, 5, 2, 4, seed=seed)) for seed in range(3)]
    for layer in (ours, stock):
        got, _ = layer._compute_attention(*qkv, attention_mask=mask, use_causal_mask=True)
        wanted, _ = ours._compute_attention(*qkv, attention_mask=merged)
        assert_close(numpy(got), numpy(wanted))


def test_lora_and_int8_quantization_come_with_it(kind):
    x = keras.Input((5, 8))
    model = keras.Model(x, kind.layer(2, 4, mask_spec=hm.Window(1, 1), name="attention")(x))
    layer = model.get_layer("attention")
    data = normal(4, 5, 8)
    before = model.predict(data, verbose=0)
    of_query, *_ = _keras.projections(layer)
    of_query.enable_lora(2)
    assert len(of_query.trainable_weights) == 3
    assert_close(model.predict(data, verbose=0), before, depth=3)
    model.quantize("int8")
    after = model.predict(data, verbose=0)
    np.testing.assert_allclose(after, before, atol=0.05)
    assert (after != before).any()


def ones(*shape):
    return np.ones(shape, bool)


@dataclass(frozen=True)
class Unregistered(hm.Window):
    pass


BAD_WINDOW = {"kind": "per_head", "heads": {"0": {"kind": "window", "before": "1"}}}


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, r"float.*from_additive.*cast to bool", {"attention_mask": ones(5, 5) * 1.0}),
        (ValueError, r"add the batch axis.*\(1, heads", {"attention_mask": ones(4, 5, 5)}),
        (TypeError, r"`mask_inputs` must be a dict", {"mask_inputs": ones(2, 5)}),
        (ValueError, r"axis of queries. Pass it as `query_mask=`", {"attention_mask": ones(2, 5)}),
        *(
            (ValueError, r"`query_offset` must be .* scalar", {"query_offset": offset})
            for offset in (np.float32(1.0), np.array([0, 1]), 1.5, 2**40, True)
        ),
        (ValueError, r"`value_mask` must .*\(2, 5\).*\(2, 4\)", {"value_mask": ones(2, 4)}),
        (ValueError, r"`query_mask` must have shape.*\(3, 5\)", {"query_mask": ones(3, 5)}),
        (ValueError, r"`key_mask` must .*an `attention_mask`", {"key_mask": ones(2, 1, 5)}),
        (ValueError, "9 keys where the attention has 5", {"attention_mask": ones(2, 5, 9)}),
        *(
            (ValueError, "`attention_bias` must broadcast", {"attention_bias": ones(*shape) * 1.0})
            for shape in ((2, 3, 5, 5), (1, 2, 4, 5, 5))
        ),
        (TypeError, "`attention_bias` must be floats", {"attention_bias": ones(5, 5)}),
        (ValueError, r"names head 4, but there are 4 (query )?heads", hm.PerHead({4: hm.Full()})),
        (TypeError, r"`mask_spec` must be a mask spec.*MaskInput", ones(5, 5)),
        (ValueError, r"`heads.0.before`.*whole", BAD_WINDOW),
        (TypeError, r"Unregistered has no kind.*@register_spec", Unregistered(1, 1)),
    ],
)
def test_bad_calls_and_rules(kind, error, message, call):
    def run():
        if not isinstance(call, dict) or "kind" in call:
            return kind.layer(4, 4, mask_spec=call)
        return kind.built(4)(normal(2, 5, 8), **call)

    with pytest.raises(error, match=message):
        run()


def test_rules_need_one_axis_of_queries():
    x, message = normal(2, 3, 4, 8), r"one axis of queries and one of keys"
    with pytest.raises(ValueError, match="speaks of one axis of queries"):
        Layer(2, 4, attention_axes=(1, 2))(x, attention_bias=np.ones((1, 1), "float32"))
    for call in ({"query_offset": 1}, {"mask_inputs": {"ids": ones(2, 3)}}):
        with pytest.raises(ValueError, match=message):
            Layer(2, 4)(x, **call)
    with pytest.raises(ValueError, match=f"{message}.*Flatten"):
        Layer(2, 4, attention_axes=(1,), mask_spec=hm.Window(1, 1))(x)


def test_the_argument_is_saved_only_where_set(kind):
    """`tiled`, and all else that a config holds."""
    assert "tiled" not in kind.layer(4, 4).get_config()
    rules = {0: hm.SameSegment("ids"), "1-2": ~hm.Window(1, 1)}
    more = {"mask_spec": hm.PerHead(rules, default=hm.Chunk(2)), "dtype": "mixed_bfloat16"}
    for tiled in (True, False):
        layer = kind.layer(3, 4, dropout=0.1, flash_attention=False, tiled=tiled, **more)
        saved = keras.saving.serialize_keras_object(layer)
        again = keras.saving.deserialize_keras_object(saved)
        assert again.get_config() == layer.get_config()
        assert again.mask_spec == layer.mask_spec
        assert again.get_config()["tiled"] is saved["config"]["tiled"] is tiled
        assert saved["config"]["flash_attention"] is False
        assert layer.get_config()["mask_spec"] == layer.mask_spec.get_config()  # permanent kinds
    with pytest.raises(TypeError, match=r"`tiled` must be True, False or None\. Received: "):
        kind.layer(4, 4, tiled=2)


def test_the_layer_drops_in_training_alone_and_anew_each_time(kind):
    """What is kept of the others' probabilities, and how often, is held in `test_laws.py`."""
    layer = kind.built(2, mask_spec=hm.Window(2, 2), dropout=0.5)
    x = normal(2, 11, 8)
    plain, first, second = numpy(layer(x)), *(numpy(layer(x, training=True)) for _ in range(2))
    close(layer(x), plain)
    for one, other in ((plain, first), (first, second)):
        assert not np.allclose(one, other)


@pytest.mark.parametrize(("name", "batch"), [("query_mask", 1), ("value_mask", 2), ("key_mask", 1)])
def test_a_keras_mask_of_length_1_serves_all_positions(name, batch):
    x, mask = normal(2, 11, 8), np.array([[True], [False]])[-batch:]
    layer = MULTI_HEAD.built(2, mask_spec=hm.Window(2, 2))
    with tiles():
        tiled = layer(x, **{name: mask})
    with hm.dense_scope():
        close(tiled, layer(x, **{name: mask}))


# --- attention_bias ------------------------------------------------------------------------------

HEADS, LENGTH = 4, 11
RULE = hm.PerHead({1: hm.Chunk(4)}, hm.Window(3, 2))
X, BIAS = normal(2, LENGTH, 8), normal(HEADS, 1, LENGTH, seed=3)


def by_formula(layer, bias, rule=RULE):
    mask = mask_by_loops(rule, len(X), HEADS, LENGTH, LENGTH)
    return by_hand(layer, X, mask=mask, bias=bias)


@pytest.mark.parametrize("tiled", [None, True])
def test_a_bias_counts_for_outputs_and_probabilities(kind, tiled):
    layer, free = (kind.built(HEADS, mask_spec=rule, tiled=tiled) for rule in (RULE, None))
    wanted, probabilities = by_formula(layer, BIAS)
    with tuned(**ALWAYS, local_tile=3, block=2):
        assert_close(numpy(layer(X, attention_bias=BIAS)), wanted, depth=3)
    output, made = layer(X, attention_bias=BIAS, return_attention_scores=True)
    assert_close(numpy(output), wanted, depth=3)
    assert_close(numpy(made), probabilities, depth=3)
    wanted = by_formula(free, BIAS, hm.Full())[0]
    assert_close(numpy(free(X, attention_bias=BIAS)), wanted, depth=3)


def test_a_bias_in_a_file_for_who_looks_and_under_a_second_rule(kind, tmp_path):
    """The last two go by the hook of Keras."""
    x, bias = keras.Input((None, 8), name="x"), keras.Input((1, 1, None), name="bias")
    layer = kind.layer(HEADS, 4, mask_spec=RULE)
    model = keras.Model({"x": x, "bias": bias}, {"y": layer(x, attention_bias=bias)})
    random_biases(layer)
    data = {"x": X, "bias": normal(2, 1, 1, LENGTH)}
    wanted, probabilities = by_formula(layer, data["bias"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(numpy(loaded(data)["y"]), wanted, depth=3)
    assert_close(hm.attention_probabilities(model, data)[layer.name], probabilities, depth=3)
    both = hm.apply_head_masks(model, hm.Window(1, 9), existing="and")
    wanted, _ = by_formula(layer, data["bias"], RULE & hm.Window(1, 9))
    assert_close(numpy(both(data)["y"]), wanted, depth=3)
