"""Leaks of models and functions: planted ones are found, as by loops, and sealed models pass."""

from collections import OrderedDict

import keras
import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm
from keras_headmask.heads.leaks import find_leaks
from keras_headmask.heads.testing import assert_no_leaks

CAUSAL = hm.recipes.causal()
RNG = np.random.default_rng(0)
FLOATS = RNG.normal(size=(2, 6, 8)).astype("float32")
IDS = np.array([[5, 9, 4, 6, 9, 7, 1], [4, 3, 9, 8, 3, 2, 6]], "int32")
TABLE = RNG.normal(size=(12, 4))
CLASSES = RNG.normal(size=(8, 3000)) / 3
DOCUMENTS = np.array([[0, 0, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 7, 7]])


def attend(x, allowed):
    logits = np.where(allowed, x @ x.swapaxes(1, 2), -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return x + weights / weights.sum(-1, keepdims=True) @ x


def causal(x, ahead=0):
    return attend(x, np.tri(x.shape[1], k=ahead, dtype=bool))


def one_behind(x):
    """Each query sees one key too far ahead."""
    return causal(x, 1)


def across_documents(inputs):
    """Query 3 sees key 1, whatever documents these are of."""
    ids, documents = inputs["ids"], inputs["documents"]
    allowed = (documents[:, :, None] == documents[:, None]) & np.tri(ids.shape[1], dtype=bool)
    allowed[:, 3, 1] = True
    return attend(TABLE[ids], allowed)


def over_the_batch(x):
    return x - x.mean(0, keepdims=True)


def one_change_at_a_time(function, inputs, rule):
    """The plain definition, by loops: (name, example, position, output example and position)."""
    before = function(inputs)
    batch, length = before.shape[:2]
    named = inputs if isinstance(inputs, dict) else {"inputs[0]": inputs}
    read = {name: named[name] for name in rule.inputs}
    allowed = ops.convert_to_numpy(hm.make_mask(rule, length, length, 1, read))[:, 0]
    allowed = np.broadcast_to(allowed | np.eye(length, dtype=bool), (batch, length, length))
    leaks = set()
    for name in named.keys() - read.keys():
        for example, position in np.ndindex(batch, length):
            other = named[name].copy()
            value = other[example, position]
            other[example, position] = value % 11 + 1 if other.dtype.kind == "i" else value + 1
            changed = {**named, name: other} if isinstance(inputs, dict) else other
            moved = np.abs(function(changed) - before).max(-1) > 1e-6
            for at, row in np.argwhere(moved).tolist():
                if at != example or not allowed[at, row, position]:
                    leaks.add((name, example, position, at, row))
    return leaks


def is_sealed(report, pairs=None):
    """Whether no leak was found though all was tried."""
    return not report and report.tried == report.pairs == (pairs or report.pairs) > 0


def places(report):
    return {
        (x.input, x.example, x.position, x.output_example, x.output_position) for x in report.leaks
    }


BY_DOCUMENT = {"ids": IDS, "documents": DOCUMENTS}


@pytest.mark.parametrize(
    ("function", "inputs", "rule"),
    [
        (causal, FLOATS, CAUSAL),
        (one_behind, FLOATS, CAUSAL),
        (one_behind, FLOATS[..., :4] / 2, hm.Window(1, 0)),
        (lambda x: x - x.mean(1, keepdims=True), FLOATS, hm.Nothing()),
        (lambda x: one_behind(TABLE[x]), IDS, CAUSAL),
        (across_documents, BY_DOCUMENT, CAUSAL & hm.SameSegment("documents")),
    ],
)
def test_leaks_are_those_of_one_change_at_a_time(function, inputs, rule):
    expected = one_change_at_a_time(function, inputs, rule)
    report = find_leaks(function, inputs, rule)
    assert {x for x in places(report) if x[0] != "documents"} == expected
    assert bool(expected) == (function is not causal)


@pytest.mark.parametrize("function", [over_the_batch, lambda x: x[::-1] + x])
def test_examples_that_affect_each_other(function):
    report = find_leaks(function, FLOATS, CAUSAL)
    found = {(*x[:3], x.output_example) for x in report.leaks}
    assert found == {("all inputs", 0, None, 1), ("all inputs", 1, None, 0)}
    assert str(report).startswith("12 leaks. Tried 0 of 30 hidden pairs of positions, and 2 of 2")
    assert "Pairs were not tried since outputs depend on other examples. Pass one" in str(report)


def test_what_cannot_be_stacked_is_changed_one_by_one():
    """A function of a fixed batch; and one that mixes it, which the unchanged copy shows."""

    def fixed(x):
        if len(x) != 2:
            raise RuntimeError("I take 2 examples.")
        return one_behind(x)

    assert len(find_leaks(fixed, FLOATS, CAUSAL).leaks) == 2 * 5
    report = find_leaks(lambda x: causal(over_the_batch(x) + x), FLOATS[:1], CAUSAL)
    assert is_sealed(report, 15)


@pytest.mark.parametrize(
    ("packed", "name", "left_out"),
    [
        (lambda y: {"a": {"b": [causal(y * 0), y]}}, "a/b/1", ""),
        (lambda y: (y, y.mean(), y[:, 1:]), "0", "were left out: ['1', '2']."),
        # As Hugging Face's, a dict of a class of its own.
        (lambda y: OrderedDict(y=y, cache=object(), states=(None,)), "y", "left out: ['cache']"),
    ],
)
def test_outputs_in_nests(packed, name, left_out):
    report = find_leaks(lambda x: packed(one_behind(x)), FLOATS, CAUSAL)
    assert {leak.output for leak in report.leaks} == {name}
    assert len(report.leaks) == 10
    assert left_out in str(report)


def test_nan_proves_nothing():
    report = find_leaks(lambda x: x * np.nan, FLOATS, CAUSAL)
    assert str(report).startswith("No position was tried, so nothing is proven. Tried 0 of 30")
    assert "or outputs are NaN." in str(report)
    with pytest.raises(AssertionError, match="nothing is proven"):
        assert_no_leaks(lambda x: x * np.nan, FLOATS, CAUSAL)
    largest = abs(FLOATS.sum(1, keepdims=True)).max() + 0.1
    with np.errstate(invalid="ignore"):
        to_nan = lambda x: x + 0 * np.sqrt(largest - abs(x.sum(1, keepdims=True)))  # noqa: E731
        assert find_leaks(to_nan, FLOATS, hm.Window(0, 0)).leaks[0].change == np.inf


@pytest.mark.parametrize("name", ["attention_mask", "m"])
def test_padding_of_a_function(name):
    """An input named so says it, or `real`: no real token may see padding."""
    mask = np.arange(7) < np.array([[7], [4]])
    arguments = ({"ids": IDS, name: mask}, hm.Full(), mask if name == "m" else None)
    sealed = find_leaks(lambda x: attend(TABLE[x["ids"]], x[name][:, None]), *arguments)
    assert is_sealed(sealed, 4 * 3)
    leaking = find_leaks(lambda x: attend(TABLE[x["ids"]], True), *arguments)
    assert len(leaking.leaks) == leaking.pairs == sealed.pairs
    assert f"were kept: ['{name}']." in str(leaking)


def test_rows_that_see_nothing_may_hold_anything():
    """Stock attention makes something of all keys for a query that sees none."""
    keep = np.arange(7) < np.array([[4], [0]])

    def of_pairs(x):
        allowed = x["keep"][:, None] & x["keep"][:, :, None]
        return attend(TABLE[x["ids"]], allowed | ~allowed.any(-1, keepdims=True))

    report = find_leaks(of_pairs, {"ids": IDS, "keep": keep}, hm.Full(), keep)
    assert is_sealed(report, 4 * 3)
    # A rule says what it says, of padding too, where nothing says what padding is.
    rule = hm.KeyFlag("keep") & hm.QueryFlag("keep")
    report = find_leaks(of_pairs, {"ids": IDS, "keep": keep}, rule)
    assert {(x.example, x.output_position) for x in report.leaks} == set(
        map(tuple, np.argwhere(~keep))
    )


def test_a_token_between_may_decide_what_a_query_sees():
    """Whether key 0 is in the sentence of query 3 depends on token 1, which query 3 cannot see.

    What both heads see together never changes.
    """
    sentence = hm.SameSentence(9, "ids")
    rule = hm.PerHead({0: sentence, 1: ~sentence}, hm.Nothing()) & hm.Keys(0, 1)

    def of_two(inputs):
        x, read = TABLE[inputs["ids"]], {"ids": inputs["ids"]}
        heads = ops.convert_to_numpy(hm.make_mask(rule, 7, 7, 2, read)) | np.eye(7, dtype=bool)
        return sum((n + 1) * attend(x, heads[:, n]) for n in range(2))

    report = find_leaks(of_two, {"ids": IDS}, rule)
    assert not report
    assert 0 < report.tried < report.pairs
    assert "Pairs were not tried where other ids change what is allowed" in str(report)
    assert find_leaks(lambda x: of_two(x) + TABLE[x["ids"]][:, ::-1], {"ids": IDS}, rule)


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_arrays_of_other_frameworks(framework):
    """A function gets NumPy arrays, and returns those of any framework."""
    module = pytest.importorskip({"jax": "jax.numpy"}.get(framework, framework))
    x, tolerance = (IDS, 1e-2) if framework == "torch" else (FLOATS, 1e-5)

    def sealed(x):
        if framework == "torch":
            table = module.tensor(TABLE, dtype=module.bfloat16, requires_grad=True)
            return module.cumsum(table[module.tensor(x)], 1)  # with its graph
        return module.cumsum(module.asarray(x) if framework == "jax" else module.constant(x), 1)

    assert not find_leaks(sealed, x, CAUSAL, tolerance=tolerance)
    given = module.tensor(x) if framework == "torch" else x
    assert find_leaks(lambda x: [sealed(x[0])[:, -1:] + sealed(x[0])], [given], CAUSAL)


def test_outputs_without_positions():
    inputs = {"ids": IDS, "padding_mask": TOKENS != 0}

    def pooled(inputs, real=1):
        x = TABLE[inputs["ids"]]
        return {"all": (x * real).sum(1), "x": x, "first": x[:, 0, 0]}

    report = find_leaks(pooled, inputs, hm.recipes.padding("padding_mask"))
    found = {(x.example, x.position, x.output) for x in report.leaks}
    assert found == {(0, 6, "all"), (1, 5, "all"), (1, 6, "all")}
    assert report.leaks[0].output_position is None
    assert not find_leaks(lambda x: pooled(x, x["padding_mask"][..., None]), inputs, hm.Full())


def test_padding_of_another_input_hides_no_outputs():
    """Nobody says whose padding it is: what all inputs take for padding is."""
    given = {f"{name}_padding_mask": np.ones((2, 7), bool) for name in ("encoder", "decoder")}
    given["encoder_padding_mask"][:, 3:] = False
    for function, pairs in ((causal, 0), (lambda x: attend(x, True), 42)):
        found = find_leaks(lambda x, f=function: f(TABLE[x["ids"]]), given | {"ids": IDS}, CAUSAL)
        assert len(found.leaks) == pairs


def test_inputs_that_have_no_positions():
    """A number for each example, and features, beside ids: no example reads another's."""
    given = {"ids": IDS, "weight": np.array([1.0, 2.0]), "features": FLOATS[:, 0, :4]}

    def of_all(x, weight=lambda x: x):
        return causal(TABLE[x["ids"]] + x["features"][:, None]) * weight(x["weight"])

    report = find_leaks(lambda x: of_all(x, lambda w: w[:, None, None]), given, CAUSAL)
    assert is_sealed(report, 2 * 21)
    assert "were kept: ['features']." in str(report)
    assert find_leaks(lambda x: of_all(x, np.mean), given, CAUSAL)


def test_floats_stay_what_their_columns_may_be():
    """A logarithm of numbers above 0, and a category that an embedding reads."""
    kinds = RNG.integers(0, 12, (2, 6, 1))
    values = np.concatenate([RNG.random((2, 6, 4)) + 0.01, kinds], -1)

    def read(x):
        assert (x[..., :4] > 0).all()
        return TABLE[x[..., 4].astype(int)] + np.log(x[..., :4])

    assert is_sealed(find_leaks(lambda x: causal(read(x)), values, CAUSAL), 30)
    assert find_leaks(lambda x: one_behind(read(x)), values, CAUSAL)


def test_masks_that_keras_makes():
    """Ids that say what padding is are not changed there. The mask is lost by `+`."""
    given = {"words": TOKENS, "token_ids": np.where(IDS > 6, 0, IDS)}
    inputs = [keras.Input((7,), dtype="int32", name=name) for name in given]
    words, others = (
        layers.Embedding(12, 8, mask_zero=name == "words")(x)
        for name, x in zip(given, inputs, strict=True)
    )
    attention, lost = layers.MultiHeadAttention(2, 3), words + others
    kept = layers.Lambda(lambda x: x[0] + x[1], mask=lambda x, mask: mask[0])([words, others])
    model, real = keras.Model(inputs, attention(lost, lost)), TOKENS != 0
    report = find_leaks(model, given, hm.Full(), real)
    assert {x[1:3] for x in report.leaks} == {(0, 6), (1, 5), (1, 6)}
    report = find_leaks(keras.Model(inputs, attention(kept, kept)), given, hm.Full(), real)
    assert not report
    assert report.tried == report.pairs / 2
    assert "or what is padding" in str(report)
    for unknown in (model, one_layer()):
        with pytest.raises(ValueError, match=r"no padding, since a layer .* `real=ids != 0`"):
            find_leaks(unknown, given if unknown is model else TOKENS, CAUSAL)


@settings(strategies.FEW, max_examples=3)
@given(spec=strategies.any_specs, data=st.data())
def test_sealed_models_pass(spec, data):
    """One layer under a rule."""
    inputs = {"token_ids": IDS[:, :5]}
    for name, kind in spec.inputs.items():
        shape = (2, 4, 5, 5) if kind.rank is None else (2, 5)
        kind = (strategies.ids, "int32") if name == "ids" else (st.booleans(), "bool")
        inputs[name] = data.draw(strategies.arrays(kind[0], shape, kind[1]))
    model = hm.apply_head_masks(stack(1), spec, add_inputs=True, ignore="block")
    report = find_leaks(model, inputs, spec)
    assert not report, report
    assert report.tried == report.pairs or spec.inputs


MASSIVE = np.zeros((6, 8), "float32")  # two features of the first token, as pretrained models have
MASSIVE[0, :2] = 1e4


@pytest.mark.parametrize(
    "scaled",
    [
        lambda x: 1e-6 * x,
        lambda x: np.concatenate([x, 0 * x[..., :1] - 1e9], -1),
        lambda x: np.exp(x @ CLASSES) / np.exp(x @ CLASSES).sum(-1, keepdims=True),
        lambda x: x * np.array([1e6, 1, 1, 1, 1, 1], "float32")[:, None],
        lambda x: 1e-2 * x + MASSIVE,
    ],
    ids=["small", "large feature", "many classes", "large row", "massive activation"],
)
def test_a_change_is_compared_with_what_its_feature_has(scaled):
    report = find_leaks(lambda x: scaled(attend(x, True)), FLOATS, CAUSAL)
    assert len(report.leaks) == report.pairs
    assert not find_leaks(lambda x: scaled(causal(x)), FLOATS, CAUSAL)


def test_a_leak_just_above_the_tolerance():
    """Of 1e-4 of each value: above 1e-5, the default, and below 1e-2."""
    x = np.abs(FLOATS[:1].astype("float64")) + 0.1
    x[0, -1, ::2] *= -1
    leaking = lambda x: np.cumsum(x, 1) * (1 + 1e-4 * np.sign(x[:, -1:]).sum())  # noqa: E731
    assert find_leaks(leaking, x, CAUSAL)
    assert not find_leaks(leaking, x, CAUSAL, tolerance=1e-2)
    assert find_leaks(lambda x: one_behind(1e-9 * x), FLOATS * 0 + 1e9, CAUSAL)  # noise is as large


def random(x):
    return x + np.random.default_rng().normal(size=x.shape)


@pytest.mark.parametrize(
    ("what", "inputs", "arguments", "error", "message"),
    [
        (np.abs, FLOATS, {"rule": None}, TypeError, r"hides nothing is .*rule=hm.Full\(\)"),
        (np.abs, FLOATS, {"tolerance": -1}, ValueError, "`tolerance` must be finite and from 0"),
        (np.abs, FLOATS, {"real": IDS > 0}, ValueError, r"\(2, 6\). Received: shape \(2, 7\)"),
        (np.abs, FLOATS, {"rule": hm.KeyFlag("a")}, ValueError, r"by their names.*\['a'\], and"),
        (np.abs, TOKENS * 0 + 3, {}, ValueError, r"nothing to change: .*: int32 \(2, 7\)"),
        (np.abs, TOKENS[0], {}, ValueError, r"nothing to change: .* int32 \(7,\)"),
        *(
            (np.abs, wrong, {}, TypeError, r"`inputs` must hold arrays, \(batch, length\) or")
            for wrong in ({}, None, 3, "a text", iter([TOKENS]))
        ),
        (lambda x: {"a": random}, FLOATS, {}, TypeError, r"return arrays .* \['function'\]"),
        (lambda x: x[9], FLOATS, {}, IndexError, "out of bounds"),
        (random, FLOATS, {}, ValueError, r"deterministic.* other outputs in a second run"),
        (lambda x: x[:, :-1], FLOATS, {}, ValueError, r"\(2, 6, ...\), with .*\(2, 5, 8\)"),
        (lambda x: x.sum(), FLOATS, {}, ValueError, "An output must be"),
        # (Keras casts them, so that 0.5 becomes the id 0.)
        (one_layer(), FLOATS[..., 0], {}, TypeError, "`token_ids` must be integer or boolean"),
    ],
)
def test_what_cannot_be_tried_is_an_error(what, inputs, arguments, error, message):
    with pytest.raises(error, match=message):
        find_leaks(what, inputs, **{"rule": CAUSAL} | arguments)
