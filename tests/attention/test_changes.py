"""A soft cap, biases and sinks beside the rule: dense and tiled, against PyTorch in float64."""

import changed
import keras
import numpy as np
import pytest
from contract import gradient, numpy
from keras import ops
from oracle import mask as mask_by_loops
from tiled_contract import (
    BACKEND,
    LONG,
    SCALE,
    SORTED_IDS,
    attend,
    close,
    heads_alone,
    operands,
    tiles,
)
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.attention.tuning import tuned

LENGTH, HEADS, BATCH = 23, 4, 3
LEARNED = hm.relative_position_bias(HEADS, num_buckets=6, max_distance=9)
_rng = np.random.default_rng(5)


def normal(*shape):
    return _rng.normal(size=shape).astype("float32")


# What is passed to `hm.dot_product_attention`; tensors by the names of the formula.
CHANGES = {
    "soft cap": {"soft_cap": 0.8},
    "bias": {"bias": normal(BATCH, HEADS, LENGTH, LENGTH)},
    "bias of one example": {"bias": normal(1, HEADS, LENGTH, LENGTH)},
    "bias of all heads": {"bias": normal(BATCH, 1, LENGTH, LENGTH)},
    "bias of keys": {"bias": normal(BATCH, 1, 1, LENGTH)},
    "bias of keys, by head": {"bias": normal(HEADS, 1, LENGTH)},
    "bias of queries": {"bias": normal(BATCH, HEADS, LENGTH, 1), "sinks": normal(HEADS)},
    "one number": {"bias": normal(1)[0], "sinks": normal(HEADS)},
    "alibi": {"position_bias": hm.alibi(HEADS)},
    "relative": {"position_bias": LEARNED, "table": normal(6, HEADS)},
    "sinks": {"sinks": normal(HEADS)},
    "all": {
        "soft_cap": 0.8,
        "bias": normal(LENGTH, LENGTH),
        "position_bias": LEARNED,
        "table": normal(6, HEADS),
        "sinks": normal(HEADS),
    },
}
TENSORS = ("bias", "table", "sinks")
RULES = {
    "window": LONG["window"],
    "documents": LONG["documents"],
    "longformer": LONG["longformer"],
    "two dead ends": LONG["two dead ends"],
    "full": LONG["full"],
    "far keys": LONG["far keys"],
    "per head": (
        hm.PerHead({0: hm.Window(2, 1), 2: hm.Window(2, 1), 3: hm.SameSegment("ids")}),
        {"ids": SORTED_IDS},
    ),
}


def tensors_of(change):
    return {name: change[name] for name in TENSORS if name in change}


def arguments(change, tensors):
    """The arguments of the function for a change, with `tensors` for its own."""
    given = {name: tensors[name] for name in ("bias", "sinks") if name in tensors}
    if "soft_cap" in change:
        given["logits_soft_cap"] = change["soft_cap"]
    if "position_bias" in change:
        bias = change["position_bias"]
        given["position_bias"] = (bias, tensors["table"]) if "table" in tensors else bias
    return given


def oracle(qkv, spec, inputs, change, weights=None, offset=0):
    """Context and gradients, by PyTorch."""
    queries, keys = qkv[0].shape[1], qkv[1].shape[1]
    heads = qkv[0].shape[2]
    both = {k: v if isinstance(v, tuple) else (v, v) for k, v in inputs.items()}
    mask = mask_by_loops(spec, len(qkv[0]), heads, queries, keys, both, offset)
    tensors, constant = tensors_of(change), {"soft_cap": change.get("soft_cap")}
    bias = change.get("position_bias")
    if bias is not None and "table" in change:
        constant["rows"] = changed.buckets(bias, queries, keys, offset)
    elif bias is not None:
        tensors["bias"] = changed.alibi(heads, queries, keys, offset)
    context, gradients = changed.wanted(qkv, mask, SCALE, weights, tensors, constant)
    return context, gradients, mask


def check(spec, inputs, change, offset=0, tiled=True, queries=LENGTH, key_heads=None):
    qkv = operands(BATCH, queries, LENGTH, HEADS, key_heads=key_heads)
    tensors = tensors_of(change)
    weights = np.cos(np.arange(BATCH * queries * HEADS * 2)).reshape(BATCH, queries, HEADS, 2)
    wanted, gradients, mask = oracle(qkv, spec, inputs, change, weights, offset)

    def run(*given):
        rest = arguments(change, dict(zip(tensors, given[3:], strict=True)))
        return attend(given[:3], spec, inputs, offset, tiled, **rest)

    given = [*qkv, *tensors.values()]
    got = numpy(run(*given))
    close(got, wanted)
    assert (got.transpose(0, 2, 1, 3)[~mask.any(-1)] == 0).all(), "dead rows are exactly 0"
    of = ops.convert_to_tensor(weights.astype("float32"))
    made = gradient(lambda *x: ops.sum(run(*x) * of), *given)
    for name, one in zip(("query", "key", "value", *tensors), made, strict=True):
        assert one.shape == gradients[name].shape, name
        close(one, gradients[name], f"gradient of {name}")


# Each change and each rule, not each pair: on each backend some run, or compile, for seconds.
# TensorFlow's own loop runs for flags and ids, each example by itself.
IN_A_LOOP = ("soft cap", "bias", "bias of one example", "bias of keys, by head", "bias of queries")
PAIRED = [("window", change) for change in CHANGES]
PAIRED += [("longformer", change) for change in (*IN_A_LOOP, "all")]
PAIRED += [(rule, "all") for rule in ("two dead ends", "full", "far keys", "per head")]


@pytest.mark.parametrize(("rule", "change"), PAIRED)
def test_tiles_give_what_the_formula_gives(rule, change):
    with tiles(4, 6, 3):
        check(*RULES[rule], CHANGES[change])


@pytest.mark.parametrize("change", CHANGES)
def test_dense_attention_gives_what_the_formula_gives(change):
    check(*RULES["two dead ends"], CHANGES[change], tiled=False)


@pytest.mark.tensorflow
@pytest.mark.parametrize("change", ["bias of one example", "bias of keys", "all"])
def test_all_examples_in_one_loop(change):
    with tiles(4, 6, 3), tuned(most_unrolled=0):
        check(*RULES["window"], CHANGES[change])


@pytest.mark.tensorflow
@pytest.mark.parametrize("change", ["bias of one example", "all"])
def test_short_sequences_on_tensorflow(change):
    with heads_alone():
        check(*RULES["per head"], CHANGES[change])


@pytest.mark.parametrize("tiled", [True, False])
def test_positions_honour_the_query_offset_and_heads_share_keys(tiled):
    change = {**CHANGES["all"], "bias": normal(HEADS, 1, 1)}
    with tiles(4, 6, 3):
        check(hm.Window(5, 5) | hm.Keys(0, 2), {}, change, 9, tiled, queries=8, key_heads=2)


# ---------------------------------------------------------------- hidden is hidden


@pytest.mark.parametrize("tiled", [True, False])
def test_no_change_opens_a_hidden_key(tiled):
    """To the bit, whatever stands in the bias there; and no gradient comes of it."""
    spec, inputs, shift = hm.Window(3, 0) & hm.Queries(2), {}, -1e12
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
    hidden = ~numpy(hm.make_mask(spec, LENGTH, LENGTH))[0, 0]
    plain = np.full((LENGTH, LENGTH), shift, "float32")
    change = {"soft_cap": 2.0, "sinks": normal(HEADS) + shift, "bias": plain}
    rest = {"logits_soft_cap": 2.0}

    def run(bias, *given):
        return attend(given, spec, inputs, 0, tiled, bias=bias, sinks=change["sinks"], **rest)

    with tiles(4, 6, 3):
        wanted = numpy(run(plain, *qkv))
        assert (wanted[:, :2] == 0).all()
        assert np.abs(wanted[:, 2:]).min() > 0
        for odd in (np.inf, -np.inf, np.nan, 1e30, -3e38):
            bias = np.where(hidden, np.float32(odd), plain)
            np.testing.assert_array_equal(numpy(run(bias, *qkv)), wanted)
        (of_bias, *others) = gradient(lambda *x: ops.sum(ops.square(run(*x))), bias, *qkv)
    assert (of_bias[hidden] == 0).all()
    assert all(np.isfinite(x).all() for x in (of_bias, *others))


@pytest.mark.parametrize("tiled", [True, False])
def test_a_bias_of_minus_inf_hides_as_the_mask_does(tiled):
    spec = hm.Window(4, 4)
    allowed = _rng.random((1, HEADS, LENGTH, LENGTH)) < 0.5
    allowed[:, :, 7] = False  # fully masked rows
    qkv, sinks = operands(BATCH, LENGTH, LENGTH, HEADS), normal(HEADS)
    bias = np.where(allowed, 0.0, -np.inf).astype("float32")
    with tiles(4, 6, 3):
        for more in ({}, {"sinks": sinks}):
            got = numpy(attend(qkv, spec, tiled=tiled, bias=bias, **more))
            close(got, attend(qkv, spec, tiled=tiled, mask=allowed, **more))
            assert (got[:, 7] == 0).all()


@pytest.mark.parametrize("more", [{}, {"bias": np.zeros((LENGTH, LENGTH), "float32")}])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_sink_of_inf_takes_all_probability(tiled, more):
    """Of its head alone; and nothing learns from that head."""
    spec = hm.Window(3, 0) & hm.Queries(2)  # some rows are fully masked
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)
    calm = normal(HEADS)
    sinks = np.where(np.arange(HEADS) == 1, np.inf, calm).astype("float32")

    def run(sinks, *given):
        return attend(given, spec, tiled=tiled, sinks=sinks, **more)

    with tiles(4, 6, 3):
        got, wanted = numpy(run(sinks, *qkv)), numpy(run(calm, *qkv))
        made = gradient(lambda *x: ops.sum(ops.square(run(*x))), sinks, *qkv)
    wanted[:, :, 1] = 0
    close(got, wanted)
    assert all(np.isfinite(x).all() for x in made)
    assert all((x[:, :, 1] == 0).all() for x in made[1:])
    assert made[0][1] == 0


@pytest.mark.parametrize("tiled", [True, False])
def test_gradients_of_the_least_soft_cap_are_finite(tiled):
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)

    def loss(*given):
        cap = float(np.finfo("float32").tiny)
        return ops.sum(ops.square(attend(given, hm.Window(3, 0), tiled=tiled, logits_soft_cap=cap)))

    with tiles(4, 6, 3):
        assert all(np.isfinite(x).all() for x in gradient(loss, *qkv))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_are_the_values(dtype):
    if dtype == "float64" and BACKEND == "jax":
        pytest.skip("JAX holds 32 bits")
    spec, inputs = RULES["window"]
    change = CHANGES["all"]
    qkv = [ops.cast(x, dtype) for x in operands(BATCH, LENGTH, LENGTH, HEADS)]
    wanted, _, _ = oracle([numpy(x) for x in qkv], spec, inputs, change)
    with tiles(4, 6, 3):
        for tiled in (True, False):
            got = attend(qkv, spec, tiled=tiled, **arguments(change, tensors_of(change)))
            assert keras.backend.standardize_dtype(got.dtype) == dtype
            assert_close(numpy(got), wanted, dtype, depth=3)


@pytest.mark.skipif(BACKEND == "jax", reason="it differentiates by itself, and compiles for long")
def test_dropout_does_not_depend_on_the_tiles():
    """The same are dropped, forward and backward, whatever the tiles."""
    spec, inputs = RULES["window"]
    change, qkv = CHANGES["all"], operands(BATCH, LENGTH, LENGTH, HEADS)
    tensors = tensors_of(change)

    def run(*given):
        rest = arguments(change, dict(zip(tensors, given[3:], strict=True)))
        return attend(given[:3], spec, inputs, dropout=0.4, seed=3, **rest)

    results = []
    for sizes in ((4, 6, 3), (5, 7, 2)):
        with tiles(*sizes):
            of_all = gradient(lambda *x: ops.sum(ops.square(run(*x))), *qkv, *tensors.values())
            results.append([numpy(run(*qkv, *tensors.values())), *of_all])
    for one, two in zip(*results, strict=True):
        close(one, two)


# ---------------------------------------------------------------- graphs


@pytest.mark.tensorflow
def test_nothing_is_known_when_the_graph_is_traced():
    """An axis of the bias of a size not known may be 1, or not."""
    import tensorflow as tf

    spec, inputs = RULES["documents"]
    qkv = operands(BATCH, LENGTH, LENGTH, HEADS)

    def loss(*given, tiled=True):
        rest = {"position_bias": hm.alibi(HEADS), "bias": given[3]}
        return ops.sum(ops.square(attend(given[:3], spec, inputs, tiled=tiled, **rest)))

    unknown = [tf.TensorSpec([None, None, HEADS, n]) for n in (3, 3, 2)]

    @tf.function(input_signature=[*unknown, tf.TensorSpec([None] * 4)])
    def gradients(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = loss(*given)
        return tape.gradient(found, given)

    for shape in ((1, 1, 1, LENGTH), (BATCH, HEADS, LENGTH, 1), (1, HEADS, LENGTH, LENGTH)):
        given = [*qkv, normal(*shape)]
        with tiles(4, 6, 3):
            made = gradients(*map(tf.constant, given))
        for one, other in zip(
            made, gradient(lambda *x: loss(*x, tiled=False), *given), strict=True
        ):
            close(one, other)


@pytest.mark.tensorflow
def test_layers_with_one_rule_share_a_function_and_not_their_tensors():
    import tensorflow as tf

    spec, inputs = RULES["documents"]
    qkv = [tf.constant(x) for x in operands(BATCH, LENGTH, LENGTH, HEADS)]
    many = [normal(HEADS) for _ in range(2)]

    @tf.function
    def run(*sinks):
        return [attend(qkv, spec, inputs, sinks=x) for x in sinks]

    with tiles(4, 6, 3):
        for got, sinks in zip(run(*map(tf.constant, many)), many, strict=True):
            close(got, oracle([x.numpy() for x in qkv], spec, inputs, {"sinks": sinks})[0])


@pytest.mark.tensorflow
def test_in_xla():
    import tensorflow as tf

    spec, inputs = RULES["window"]
    change, qkv = CHANGES["all"], operands(BATCH, LENGTH, LENGTH, HEADS)

    @tf.function(jit_compile=True)
    def run(*given):
        return attend(given, spec, inputs, **arguments(change, tensors_of(change)))

    with tiles(4, 6, 3):
        close(run(*qkv), oracle(qkv, spec, inputs, change)[0])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bias": np.ones((2, 5, 5), "float32")}, ValueError, "`bias` must broadcast to"),
        ({"bias": np.ones((5, 5), "int32")}, TypeError, "`bias` must be floats"),
        ({"position_bias": hm.alibi(2)}, ValueError, "is of 2 heads where the attention has 4"),
        ({"position_bias": LEARNED}, ValueError, "`position_bias` is learned: pass a pair"),
        (
            {"position_bias": (LEARNED, np.ones((4, 6), "float32"))},
            ValueError,
            r"The table of `position_bias` must be floats of shape \(6, 4\)",
        ),
        ({"position_bias": (hm.alibi(4), np.ones(3))}, ValueError, "has no table"),
        ({"logits_soft_cap": -1.0}, ValueError, "`logits_soft_cap` must be above 0"),
        (
            {"logits_soft_cap": 1e-38},
            ValueError,
            "`logits_soft_cap` must be at least 1.175e-38.*Received: 1e-38",
        ),
        ({"sinks": np.ones(3, "float32")}, ValueError, r"`sinks` must be floats of shape \(4,\)"),
    ],
)
def test_what_does_not_fit(given, error, message):
    with pytest.raises(error, match=message):
        hm.dot_product_attention(*operands(1, 5, 5, 4), **given)


def test_a_step_with_a_cache_needs_its_offset():
    with pytest.warns(UserWarning, match="without `query_offset`"):
        hm.dot_product_attention(*operands(1, 1, 5, 4), position_bias=hm.alibi(4))
