"""Our layers against NumPy loops, and the traps by name."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest
from contract import MULTI_HEAD, by_hand, normal, numpy
from keras import ops
from keras_versions import needs
from tiled_contract import close, tiles
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask import _keras

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
    i, j = np.arange(5)[:, None], np.arange(5)
    rule = np.ones((3, 5, 5), bool)
    rule[0] = ids[0][:, None] == ids[0]
    rule[2] = i // 2 != j // 2
    check(layer, made, rule[None] & explicit[:, None] & (j <= i) & (abs(i - j) < 4) & PAIRS, x)


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
    first, second = kind.built(2), kind.built(2)
    x = with_mask(normal(3, 5, 8), PADDED)
    _, a = first(x, x, return_attention_scores=True)
    _, b = second(x, x, return_attention_scores=True)
    for scores in (a, b):
        assert (numpy(scores)[:, :, :, 4][:2] == 0).all()
    np.testing.assert_array_equal(numpy(keras_mask(x)), PADDED)


def test_one_tensor_alone_is_self_attention_with_its_mask(kind):
    layer = kind.built(2)
    x = normal(3, 5, 8)
    alone, pair = layer(with_mask(x, PADDED)), layer(with_mask(x, PADDED), with_mask(x, PADDED))
    np.testing.assert_array_equal(numpy(alone), numpy(pair))
    check(layer, [alone], PAIRS, x)
    np.testing.assert_array_equal(numpy(keras_mask(alone)), PADDED)


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
    # There stock's own `call` runs, which takes the mask off.
    masked = with_mask(x[:, :, 0], np.array([[1, 1, 0], [1, 1, 1]], bool))
    Layer(2, 4, attention_axes=(1,))(masked)
    assert keras_mask(masked) is not None


@pytest.mark.parametrize("name", ["_compute_attention", "_masked_softmax"])
def test_a_subclass_that_computes_attention_itself_is_refused_at_once(kind, name):
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


def test_hooks_of_stock_that_a_subclass_overrides_are_called(kind):
    class Hooked(kind.ours):
        def _compute_causal_mask(self, query, value=None):
            return ops.ones((1, query.shape[1], query.shape[1]), "bool")

        def _compute_attention_mask(self, query, value, **masks):  # Keras' own signature
            known = {"query_mask", "value_mask", "key_mask", "attention_mask", "use_causal_mask"}
            assert set(masks) <= known
            return super()._compute_attention_mask(query, value, **masks)

    x = normal(2, 5, 8)
    layer = Hooked(**kind.sizes(2, 4))
    _, scores = layer(x, use_causal_mask=True, return_attention_scores=True, query_offset=0)
    assert (numpy(scores) > 0).all()  # nothing is causal


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


# XLA on the CPU has no float16 dot, and JAX no float64 unless the whole process has.
PRECISIONS = {"float64", "mixed_bfloat16", "mixed_float16"}
PRECISIONS -= {"float64", "mixed_float16"} if keras.backend.backend() == "jax" else set()


@pytest.mark.parametrize("dtype", sorted(PRECISIONS))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_precisions_with_and_without_scores_and_with_idle_dropout(kind, dtype, dropout):
    layer = kind.built(3, dtype=dtype, dropout=dropout, mask_spec=hm.PerHead({1: hm.Window(1, 0)}))
    x = normal(2, 5, 8)
    i = np.arange(5)
    mask = np.ones((3, 5, 5), bool)
    mask[1] = (i - i[:, None] >= -1) & (i <= i[:, None])
    expected, probabilities = by_hand(layer, x, mask=mask[None])
    y, scores = layer(x, return_attention_scores=True)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    assert keras.backend.standardize_dtype(scores.dtype) == layer.compute_dtype
    stock = kind.stock(**kind.sizes(3, 4), dtype=dtype)
    stock.build(x.shape, x.shape)
    stock.set_weights(layer.get_weights())
    of_stock = map(numpy, stock(x, x, attention_mask=mask[None], return_attention_scores=True))
    made = (expected, probabilities), of_stock, (y, scores), (layer(x), scores)
    for wanted, beside, *each in zip(*made, strict=True):
        for got in each:
            assert_close(numpy(got), wanted, dtype, stock=beside)


def test_the_argument_is_saved_only_where_set(kind):
    assert "tiled" not in kind.layer(4, 4).get_config()
    for tiled in (True, False):
        saved = keras.saving.serialize_keras_object(kind.layer(4, 4, tiled=tiled))
        again = keras.saving.deserialize_keras_object(saved)
        assert again.get_config()["tiled"] is saved["config"]["tiled"] is tiled
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
