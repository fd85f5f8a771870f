"""Lint: each finding on a planted example, none on a recipe used as meant, and what it claims."""

import re
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from keras import layers
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm
from keras_headmask import recipes
from keras_headmask.linting import input_checks, linter, rule_checks

W, SELF, CAUSAL = hm.Window, hm.Window(0, 0), hm.Window(after=0)
SENTENCES = hm.SameSentence(9)
REAL = np.array([[1] * 24 + [0] * 8, [1] * 32])
BY_SENTENCE = hm.PerHead({0: SENTENCES})
FLAGS = np.array([[1] + [0] * 31] * 2)
IDS = np.where(REAL == 1, np.arange(32) % 7 + 3, 0)  # 9 among them; 0 pads
PAD = {"padding_mask": REAL}


def found(*args, **kwargs):
    """`(severity, code, heads, positions)` of each finding."""
    return [(f.severity, f.code, f.heads, f.positions) for f in hm.lint(*args, **kwargs)]


def codes(*args, **kwargs):
    return [f"{severity} {code}" for severity, code, *_ in found(*args, **kwargs)]


# What is looked at is NumPy; that masks come alike from every backend, a law below sees.
AS_MEANT = [
    (recipes.causal(), {}),
    (recipes.padding(), PAD),
    (recipes.prefix_lm(4), {}),
    (recipes.longformer(2, "g"), {"g": FLAGS}),
    (recipes.longformer(256, "g"), {}),
    (recipes.streaming(4, 256), {}),
    (recipes.streaming(1, 2), {}),
    (recipes.sparse_transformer(8), {}),
    (recipes.sparse_transformer(128), {}),
    (hm.Chunk(4, 1, 1) | hm.Queries(0, 4) | hm.Keys(0, 4), {}),
    (recipes.causal() & recipes.padding(), PAD),
    (recipes.longformer(2, "g") & recipes.padding(), {"g": FLAGS} | PAD),
    (recipes.streaming(4, 8) & recipes.padding(), PAD),
    (hm.PerHead({0: SENTENCES}, default=recipes.padding()) & recipes.padding(), {}),
    (hm.PerHead({0: SENTENCES}) & recipes.padding(), {"token_ids": IDS} | PAD),
    (hm.PerHead({"0-3": recipes.streaming(4, 256)}, default=CAUSAL), {}),
    (recipes.padding(), {"padding_mask": REAL[:1]}),  # no query sees padding
    (hm.KeyFlag("attention_mask"), {"attention_mask": REAL[:1]}),
    (~hm.KeyFlag("key_padding_mask"), {"key_padding_mask": 1 - REAL[:1]}),  # as PyTorch has it
    (BY_SENTENCE, {"token_ids": IDS} | PAD),  # the layer is given padding beside its rule
    (~hm.KeyIn("token_ids", 9), {"token_ids": IDS[:1]}),
    (recipes.streaming(4, 4096), {}),
    (hm.PerHead({0: hm.Chunk(4)}) & hm.Chunk(8), {}),  # each part matters in some head
    (hm.PerHead({0: W(1, -1) | SELF, 1: hm.Chunk(8)}), {}),
]


@pytest.mark.tensorflow
@pytest.mark.parametrize(("spec", "inputs"), AS_MEANT, ids=repr)
def test_recipes_used_as_meant(spec, inputs):
    for examples in inputs, None:
        findings = hm.lint(spec, mask_inputs=examples)
        assert [f for f in findings if f.severity != "info"] == [], str(findings)


@hm.register_spec("test_lint_triangle")
@dataclass(frozen=True)
class Triangle(hm.MaskSpec):
    """Right for the whole mask alone: each tile has a corner of its own."""

    def allowed(self, query_positions, key_positions, inputs):
        return np.tril(np.ones((query_positions.shape[0], key_positions.shape[1]), bool))


@hm.register_spec("test_lint_ids_triangle")
@dataclass(frozen=True)
class OfIds(Triangle):
    @property
    def inputs(self):
        return {"x": hm.InputType()}


OFF = hm.KeyFlag("x") & ~hm.KeyFlag("x")
HALF = hm.PerHead({0: W(3, -1)})
X = {"x": REAL}

# (rule, arguments, finding)
PLANTED = [
    (hm.PerHead({1: hm.Nothing()}), {}, ("info", "head-off", (1,), ())),
    (hm.Nothing(), {"num_heads": 2}, ("error", "head-off", (0, 1), ())),
    (OFF, {}, ("error", "head-off", (0,), ())),
    (hm.PerHead({2: hm.Keys(9) & hm.Keys(0, 9)}), {}, ("error", "head-off", (2,), ())),
    (W(3, -1), {"queries": 6}, ("warning", "dead-rows", (0,), (0,))),
    (HALF, {"queries": 6, "num_heads": 3}, ("warning", "dead-rows", (0,), (0,))),
    (W(-2), {"queries": 6}, ("warning", "dead-rows", (0,), (4, 5))),
    (
        hm.KeyFlag("x"),
        {"mask_inputs": {"x": np.array([[1, 0, 1], [0, 0, 0]])}},
        ("warning", "dead-rows", (0,), (0, 1, 2)),
    ),
    (hm.Keys(0, 4), {"queries": 6}, ("warning", "unseen-keys", (), (4, 5))),
    (hm.PerHead({0: hm.Keys(0, 4)}), {"queries": 6}, ("info", "unseen-keys", (0,), (4, 5))),
    (W(2, 2), {"queries": 3, "keys": 7}, ("warning", "unseen-keys", (), (5, 6))),
    (CAUSAL & W(after=5), {}, ("warning", "clause-changes-nothing", (0,), ())),
    (hm.Full() & hm.KeyFlag("x"), {}, ("warning", "clause-changes-nothing", (0,), ())),
    (
        hm.PerHead({1: hm.KeyFlag("x") | (hm.KeyFlag("x") & SELF)}),
        {},
        ("warning", "clause-changes-nothing", (1,), ()),
    ),
    (
        recipes.streaming(4, 256),
        {"queries": 32},
        ("info", "clause-changes-nothing", (0,), ()),
    ),
    (
        CAUSAL & hm.KeyFlag("x"),
        {"mask_inputs": {"x": np.ones((1, 8), "int32")}},
        ("info", "clause-changes-nothing", (0,), ()),
    ),
    (
        hm.PerHead({0: SELF, 2: hm.Full()}),
        {"num_heads": 4},
        ("warning", "equals-default", (2,), ()),
    ),
    (
        hm.PerHead({3: hm.KeyFlag("x") | ~hm.KeyFlag("x")}),
        {},
        ("warning", "equals-default", (3,), ()),
    ),
    (hm.Chunk(4) & ~SELF, {}, ("warning", "never-self", (0,), ())),
    (HALF, {}, ("info", "never-self", (0,), ())),
    (~hm.SameSegment("x"), {"mask_inputs": X}, ("warning", "never-self", (0,), ())),
    (~recipes.padding(), {"mask_inputs": PAD}, ("error", "looks-inverted", (0,), ())),
    (
        hm.PerHead({1: ~recipes.padding() | SELF}),
        {"mask_inputs": PAD},
        ("error", "looks-inverted", (1,), ()),
    ),
    (
        recipes.padding() & (SENTENCES | hm.Full()),
        {"mask_inputs": {"padding_mask": 1 - REAL, "token_ids": IDS}},
        ("error", "looks-inverted", (), ()),
    ),
    (W(4, 4), {"mask_inputs": PAD}, ("info", "padding-missing", (0,), ())),
    (W(4, 4), {"mask_inputs": {"attention_mask": REAL}}, ("info", "padding-missing", (0,), ())),
    (
        hm.PerHead({0: recipes.padding()}),
        {"mask_inputs": PAD, "num_heads": 3},
        ("warning", "padding-missing", (1, 2), ()),
    ),
    (CAUSAL, {"mask_inputs": X}, ("warning", "input-never-read", (), ())),
    (W(before=2), {}, ("info", "open-side", (0,), ())),
    (W(after=2) & hm.KeyFlag("x"), {}, ("info", "open-side", (0,), ())),
    (hm.PerHead({1: W(before=2)}), {}, ("info", "open-side", (1,), ())),
    (W(step=8), {}, ("info", "full-cost", (0,), ())),
    (W(step=8) & hm.KeyFlag("x"), {}, ("info", "full-cost", (0,), ())),
    (
        hm.SameSegment("x"),
        {"mask_inputs": {"x": np.array([[1, 1, 2**32 + 1]])}},
        ("warning", "ids-collide", (), ()),
    ),
    (
        hm.SameSegment("x"),
        {"mask_inputs": {"x": np.array([[256.0, 256.0, 257.0]])}},
        ("error", "ids-collide", (), ()),
    ),
    (
        hm.MaskInput("x") | SELF,
        {"mask_inputs": {"x": np.array([[0, -1e9], [0, 0]])}},
        ("error", "ids-collide", (), ()),
    ),
    (
        hm.PerHead({0: hm.SameSentence(102)}),
        {"mask_inputs": {"token_ids": IDS}},
        ("info", "ids-absent", (), ()),
    ),
    (
        hm.PerHead({0: hm.SameSentence(0)}),
        {"mask_inputs": {"token_ids": IDS} | PAD},
        ("warning", "ids-at-padding", (), ()),
    ),
    (
        hm.QueryIn("token_ids", 0) | SELF,
        {"mask_inputs": {"token_ids": IDS}},
        ("info", "ids-at-padding", (), ()),
    ),
    (hm.PerHead({1: Triangle()}), {}, ("error", "unsound-spec", (), ())),
    (Triangle(), {"queries": 4}, ("error", "unsound-spec", (), ())),
    (OfIds() & hm.Chunk(4), {"mask_inputs": X}, ("error", "unsound-spec", (), ())),
    (
        hm.SameSegment("a") | hm.SameSegment("b") | hm.SameSegment("c") | hm.SameSegment("d")
        | hm.SameSegment("e") | hm.SameSegment("f") | hm.SameSegment("g"),
        {},
        ("info", "not-checked", (), ()),
    ),
]  # fmt: skip


@pytest.mark.tensorflow
@pytest.mark.parametrize(("spec", "arguments", "finding"), PLANTED)
def test_planted(spec, arguments, finding):
    assert finding in found(spec, **arguments), str(hm.lint(spec, **arguments))


def test_every_code_is_planted_and_documented():
    listed = hm.lint.__doc__.partition("Codes: ")[2].partition("Raises:")[0]
    documented = set(re.findall("`([a-z-]+)`", listed))
    modules = (linter, input_checks, rule_checks)
    source = "".join(Path(module.__file__).read_text() for module in modules)
    written = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', source))
    assert {finding[1] for *_, finding in PLANTED} == documented == written


@pytest.mark.parametrize("rule", [SENTENCES, hm.SameSentence((0, 9)), ~hm.KeyIn("token_ids", 0)])
def test_no_id_is_taken_for_padding(rule):
    for more in ({}, PAD):
        assert "ids-at-padding" not in str(hm.lint(rule, mask_inputs={"token_ids": IDS} | more))
    for ids in ([[5, 0, 6, 7, 0], [5, 6, 7, 8, 0]], [[5, 6, 7], [0, 0, 0]]):
        found = hm.lint(hm.SameSentence(0), mask_inputs={"token_ids": np.array(ids)})
        assert "ids-at-padding" not in str(found)


@pytest.mark.parametrize("rule", [hm.SameSentence(0), hm.KeyIn("token_ids", 0) | SELF], ids=repr)
def test_a_model_shows_which_id_pads(rule):
    rule, at_padding = hm.PerHead({0: rule}), "warning ids-at-padding"
    assert at_padding in codes(hm.apply_head_masks(one_layer(mask_zero=True), rule))
    flagged = hm.apply_head_masks(padded(True), rule)
    assert at_padding not in codes(flagged)  # made-up ids show nothing
    examples = {"token_ids": IDS, "padding_mask": REAL}
    assert at_padding in codes(flagged, mask_inputs=examples)
    assert at_padding not in codes(flagged, mask_inputs=examples | {"token_ids": IDS + 1})


def test_a_finding_says_what_and_the_way_out():
    findings = hm.lint(hm.PerHead({(0, 2): hm.Keys(0, 4) & W(after=0)}), queries=6, num_heads=4)
    assert str(findings) == (
        "info: unseen-keys, heads 0 and 2: Keys 4 and 5 are seen by no query of these heads.\n"
        "    If that is not meant, widen the rule."
    )
    assert str(hm.lint(CAUSAL)) == "No findings."
    both = "256 and 257 are equal in bfloat16; a layer refuses them"
    assert both in str(hm.lint(SENTENCES, mask_inputs={"token_ids": [[9.0, 256.0, 257.0]]}))


def test_padding_is_no_query_that_must_see():
    segments = np.where(REAL == 1, 0, -1)
    rule = hm.SameSegment("doc") & recipes.padding()
    inputs = {"doc": segments} | PAD
    assert codes(rule, mask_inputs=inputs) == ["info clause-changes-nothing"]
    assert codes(hm.SameSegment("doc"), mask_inputs={"doc": segments}) == ["warning dead-rows"]


def test_much_padding_makes_no_rule_look_inverted():
    inputs = {"padding_mask": np.array([[1] * 4 + [0] * 28])}
    assert "info padding-missing" in codes(hm.Full(), mask_inputs=inputs)
    assert "error looks-inverted" not in codes(hm.Full(), mask_inputs=inputs)


def test_cross_attention_and_decoding():
    pair = {"x": (np.array([[1, 2, 2]]), np.array([[1, 2, 2, 1, 1]]))}
    assert codes(hm.SameSegment("x"), mask_inputs=pair) == []
    assert codes(hm.SameSegment("x"), mask_inputs={"x": (pair["x"][0], pair["x"][1] * 0 + 1)}) == [
        "warning dead-rows"
    ]
    assert codes(CAUSAL, queries=1, keys=8, query_offset=3) == []


def test_a_spec_of_ones_own():
    @dataclass(frozen=True)
    class Far(hm.MaskSpec):
        least: int

        def allowed(self, query_positions, key_positions, inputs):
            return key_positions - query_positions >= self.least

    assert "warning dead-rows" in codes(Far(100))
    assert codes(Far(-100) & CAUSAL) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones((2, 2)),), TypeError, "`rule` must be a mask spec"),
        ((CAUSAL, 0), ValueError, "`queries` must be at least 1"),
        ((CAUSAL, 20000), ValueError, "20000 x 20000 pairs are more than 67108864. Pass a smaller"),
        ((CAUSAL, 2, 2.5), TypeError, "`keys` must be a whole number"),
        ((hm.PerHead({4: SELF}), 8, 8, 4), ValueError, "names head 4, but there are 4 heads"),
        ((CAUSAL, 8, 8, 1, [1]), TypeError, "`mask_inputs` must be a dict"),
        ((hm.KeyFlag("x"), 8, 8, 1, {"x": [[1, 0]]}), ValueError, "length 2 where.* 8 keys"),
        ((CAUSAL, 8, 8, 1, PAD), ValueError, "has length 32 where the attention has 8 keys"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        hm.lint(*arguments)


# --- What a finding claims, in NumPy --------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _short():
    with mock.patch.object(rule_checks, "_MANY", 256):
        yield


@strategies.FEW
@given(strategies.cases())
def test_what_sees_nothing_agrees_with_the_mask(case):
    spec, inputs, batch, heads, queries, keys, offset = case
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    rows, off = dict.fromkeys(range(heads), ()), set()
    for severity, code, some, positions in found(spec, queries, keys, heads, inputs, offset):
        if code == "head-off":
            off |= set(some)
        if code == "dead-rows":
            assert severity == "warning"
            rows |= dict.fromkeys(some, positions)
    for head in range(heads):
        dead = (~mask[:, head].any(-1)).any(0)
        assert (head in off) == (not mask[:, head].any())
        assert rows[head] == (() if head in off else tuple(np.flatnonzero(dead)))


@pytest.mark.tensorflow
@strategies.FEW
@given(strategies.cases())
def test_what_holds_for_any_inputs_holds_for_these(case):
    """Found without inputs: dead rows are dead, and heads are off, whatever comes."""
    spec, inputs, batch, heads, queries, keys, offset = case
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, offset)
    for _, code, some, positions in found(spec, queries, keys, heads, None, offset):
        if code == "head-off":
            assert not mask[:, list(some)].any()
        if code == "dead-rows":
            assert not mask[:, list(some)][:, :, list(positions)].any()
        if code == "unseen-keys":
            seen = mask[:, list(some)] if some else mask
            assert not seen[..., list(positions)].any()


@pytest.mark.tensorflow
@strategies.FEW
@given(strategies.cases(strategies.shared_specs), st.booleans(), st.data())
def test_a_clause_that_changes_nothing_can_be_left_out(case, is_and, data):
    spec, inputs, batch, heads, queries, keys, offset = case
    other = data.draw(strategies.positional_leaves)
    joined = spec & other if is_and else spec | other
    if not joined.children or other not in joined.children:
        return
    said = f"Without {other!r} in {joined!r} the same is allowed."
    if any(f.message == said for f in hm.lint(joined)):
        rest = [part for part in joined.children if part != other]
        rest = hm.MaskSpec.from_config(
            {"kind": joined.kind, "specs": [part.get_config() for part in rest]}
        )
        before, after = (
            oracle.mask(s, batch, heads, queries, keys, inputs, offset) for s in (joined, rest)
        )
        np.testing.assert_array_equal(before, after)


# --- Models ---------------------------------------------------------------------------------------


def padded(reaches, longest=None):
    """Two attention layers on token ids, to which the model's padding mask gets, or does not."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    real = keras.Input((None,), dtype="int32", name="padding_mask")
    x = layers.Embedding(12, 8)(ids)
    if longest is not None:
        x = Positions(longest)(x)
    mask = {"attention_mask": real[:, None]} if reaches else {}
    for name in "ab":
        x = layers.MultiHeadAttention(4, 3, name=name)(x, x, **mask)
    return keras.Model({"token_ids": ids, "padding_mask": real}, x)


class Positions(layers.Layer):
    """Says how many positions it has, as KerasHub's: longer sequences are an error."""

    def __init__(self, sequence_length, **kwargs):
        super().__init__(**kwargs)
        self.sequence_length = sequence_length

    def call(self, x):
        if x.shape[1] > self.sequence_length:
            raise ValueError(f"{x.shape[1]} positions")
        return x

    def compute_output_shape(self, input_shape):  # no backend traces with lengths of its own
        return input_shape


def crossed():
    """Attention to another sequence."""
    text, memory = (
        keras.Input((None,), dtype="int32", name=name) for name in ("query_ids", "memory")
    )
    x, y = layers.Embedding(12, 8)(text), layers.Embedding(12, 8)(memory)
    return keras.Model([text, memory], layers.MultiHeadAttention(4, 3, name="cross")(x, y))


def test_a_model_whose_padding_does_not_reach_its_layers():
    model = hm.apply_head_masks(padded(False), BY_SENTENCE)
    unread, missing = hm.lint(model)
    assert (unread.code, unread.severity) == ("input-never-read", "warning")
    assert "`padding_mask`" in unread.message
    assert (missing.code, missing.heads) == ("padding-missing", (0, 1, 2, 3))
    assert missing.layers == ("a", "b")
    assert str(missing).endswith("In a, b.")


def test_a_model_that_loses_the_mask_of_its_embedding():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(12, 8, mask_zero=True)(ids)
    x = layers.Add()([x, layers.Embedding(12, 8)(ids)])  # which has none
    model = keras.Model(ids, layers.MultiHeadAttention(4, 3)(x, x))
    (missing,) = hm.lint(hm.apply_head_masks(model, BY_SENTENCE))
    assert (missing.severity, missing.code) == ("warning", "padding-missing")
    assert "see where the model loses it" in missing.way_out


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (lambda: padded(True), BY_SENTENCE),
        (lambda: padded(False), BY_SENTENCE & recipes.padding()),
        (lambda: padded(True, longest=6), BY_SENTENCE),
        (one_layer, hm.Chunk(3)),  # by the Keras mask of its embedding
        (stack, CAUSAL),  # has none
    ],
)
def test_a_model_in_order(model, rule):
    assert hm.lint(hm.apply_head_masks(model(), rule, add_inputs=True)) == []


@pytest.mark.tensorflow
def test_cross_attention_is_looked_at_where_its_rule_matters():
    for rule, found in ((hm.Keys(90, 100), ["warning unseen-keys"]), (W(2, 2), []), (SELF, [])):
        assert codes(hm.apply_head_masks(crossed(), {"cross": rule})) == found
    (dead,) = hm.lint(hm.apply_head_masks(crossed(), {"cross": hm.Queries(1)}))
    assert (dead.code, dead.way_out) == ("dead-rows", "Open at least one key to each query.")


@pytest.mark.tensorflow
def test_a_rule_is_looked_at_where_the_model_has_positions():
    rule = hm.PerHead({0: hm.Queries(0, 20), 1: hm.Keys(20)})
    (off,) = hm.lint(hm.apply_head_masks(padded(True, longest=8), rule))
    assert (off.code, off.heads) == ("head-off", (1,))


@pytest.mark.tensorflow
def test_a_rule_that_shows_only_what_the_model_hides():
    rule = hm.PerHead({1: ~recipes.padding()})
    model = hm.apply_head_masks(padded(True), rule, add_inputs=True)
    (off,) = hm.lint(model)
    assert (off.severity, off.code, off.heads) == ("error", "head-off", (1,))
    # What is made up for a lint are ids 1, padded by 0.
    model = hm.apply_head_masks(padded(True), hm.PerHead({1: ~hm.KeyIn("token_ids", 1)}))
    assert hm.lint(model) == []
    ones = {"token_ids": np.array([[1, 1, 0]]), "padding_mask": np.array([[1, 1, 0]])}
    assert codes(model, mask_inputs=ones) == ["error head-off"]


@pytest.mark.tensorflow
def test_two_masks_that_mark_padding_are_both_read():
    assert codes(W(2, 2), mask_inputs=PAD | {"attention_mask": REAL}) == []
    whole = {"attention_mask": np.ones((1, 1, 4, 4), "bool")}
    (unread,) = hm.lint(W(2, 2), 4, mask_inputs=whole)
    assert (unread.code, "recipes" in unread.way_out) == ("input-never-read", False)


@pytest.mark.tensorflow  # the rest is the same on every backend
def test_a_model_with_examples():
    real = (TOKENS != 0).astype("int32")
    inputs = {"token_ids": TOKENS, "padding_mask": real}
    inverted = hm.apply_head_masks(padded(False), ~recipes.padding(), add_inputs=True)
    assert "error looks-inverted" in codes(inverted, mask_inputs=inputs)
    in_order = hm.apply_head_masks(padded(True), BY_SENTENCE)
    assert codes(in_order, mask_inputs=inputs) == []
    lost = hm.apply_head_masks(one_layer(mask_zero=False), CAUSAL)
    assert codes(lost, mask_inputs={"token_ids": TOKENS}) == []


@pytest.mark.tensorflow
def test_findings_name_the_layers_they_are_of():
    model = hm.apply_head_masks(stack(3), {"0": HALF, "1-2": CAUSAL})
    findings = hm.lint(model)
    assert {f.code for f in findings} == {"dead-rows", "never-self", "unseen-keys"}
    assert all(len(f.layers) == 1 and f.layers[0].startswith("block_0/") for f in findings)


@pytest.mark.tensorflow
def test_a_lint_leaves_a_model_as_it_is():
    model = hm.apply_head_masks(padded(True), BY_SENTENCE)
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    before = np.asarray(model(inputs))
    layers_before = [dict(vars(layer)) for layer in model._flatten_layers()]
    hm.lint(model)
    assert [dict(vars(layer)) for layer in model._flatten_layers()] == layers_before
    np.testing.assert_array_equal(np.asarray(model(inputs)), before)


def of_own_layers(reaches):
    """As `padded`, of layers that were built with the rule."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    real = keras.Input((None,), dtype="int32", name="padding_mask")
    x = layers.Embedding(12, 8)(ids)
    passed = {"mask_inputs": dict.fromkeys(BY_SENTENCE.inputs, ids)}
    passed |= {"attention_mask": real[:, None]} if reaches else {}
    for name in "ab":
        x = hm.PerHeadMaskedMultiHeadAttention(4, 3, mask_spec=BY_SENTENCE, name=name)(
            x, x, **passed
        )
    return keras.Model({"token_ids": ids, "padding_mask": real}, x)


@pytest.mark.tensorflow
def test_layers_built_with_a_rule_are_looked_at_with_the_masks_that_reach_them():
    model = of_own_layers(True)
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    before = np.asarray(model(inputs))
    assert codes(model) == []
    np.testing.assert_array_equal(np.asarray(model(inputs)), before)
    padded_inputs = inputs | {"padding_mask": TOKENS[:, -1:] != TOKENS}
    for examples in (None, padded_inputs):
        found = hm.lint(of_own_layers(False), mask_inputs=examples)
        (missing,) = [x for x in found if "padding" in x.code]
        assert (missing.code, missing.layers) == ("padding-missing", ("a", "b"))


@pytest.mark.tensorflow
def test_models_that_are_refused():
    model = hm.apply_head_masks(padded(True), BY_SENTENCE)
    with pytest.raises(TypeError, match="a model without"):
        hm.lint(one_layer())
    with pytest.raises(ValueError, match="follow from the model"):
        hm.lint(model, queries=8)
    with pytest.raises(ValueError, match="'padding_mask' is missing or unknown"):
        hm.lint(model, mask_inputs={"token_ids": TOKENS})
    with pytest.raises(TypeError, match="must be a dict from names to arrays"):
        hm.lint(model, mask_inputs=[TOKENS])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (W(before=2), "`after` open.*Window(before=2, after=2) or Window(before=2, after=0)"),
        (W(before=0), "`after` open.*Window(before=0, after=0), which is causal"),
        (W(after=3), "`before` open.*Window(before=3, after=3) or Window(after=0)"),
    ],
)
def test_an_open_side_names_what_may_be_meant(rule, words):
    (found,) = [f for f in hm.lint(rule) if f.code == "open-side"]
    parts = words.split(".*")
    assert parts[0] in found.message
    assert parts[1] in found.way_out


@pytest.mark.parametrize(
    "rule",
    [
        CAUSAL,
        W(None, -2),
        W(-2, None),
        W(2, 2),
        W(),
        CAUSAL & W(before=2),
        recipes.streaming(4, 8),
        recipes.sparse_transformer(4),
        hm.PerHead({0: W(before=2)}, default=CAUSAL) & CAUSAL,
        W(before=2) & W(after=3),
        W(after=2000) & W(before=2),
        hm.Chunk(4) & W(before=2),
        hm.Chunk(4, before=1, after=1) & W(after=3),
        (W(before=2) | hm.Keys(0, 1)) & W(after=3),
        (W(before=2) | SENTENCES) & (W(after=0) | (W(after=3) & SENTENCES)),
        hm.PerHead({0: W(before=2), 1: hm.Chunk(4)}) & W(2, 3),
    ],
    ids=repr,
)
def test_no_open_side(rule):
    assert "open-side" not in {f.code for f in hm.lint(rule)}


@pytest.mark.parametrize(
    "rule",
    [
        W(before=2) & W(before=5),
        W(before=2) & (W(after=3) | SENTENCES),
        W(before=2) | (W(before=1) & W(after=3)),
        (W(before=2) & W(after=3)) | (W(before=2) & SENTENCES),
        ~(W(before=2) & W(after=3)),
    ],
    ids=repr,
)
def test_an_open_side_that_nothing_closes_everywhere(rule):
    assert "open-side" in {f.code for f in hm.lint(rule)}


@pytest.mark.parametrize("causal", [False, True])
def test_a_side_that_the_model_itself_hides_is_not_open(causal):
    x = keras.Input((6, 8))
    stock = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model(x, stock(x, x, use_causal_mask=causal))
    found = hm.lint(hm.apply_head_masks(model, W(before=2)))
    assert ("open-side" in {f.code for f in found}) == (not causal)


def test_rules_by_head_joined_by_or_are_advised_to_use_and():
    a, b = hm.PerHead({0: hm.Window(2, 2)}), hm.PerHead({1: hm.Window(0, 0)})
    advised = [finding for finding in hm.lint(a | b, num_heads=3) if "with `&`" in finding.way_out]
    assert [(finding.code, finding.heads) for finding in advised] == [
        ("equals-default", (0,)),
        ("equals-default", (1,)),
    ]
    assert not hm.lint(a & b, num_heads=3)


def test_what_holds_of_every_head_is_said_plainly():
    (never,) = hm.lint(~hm.Window(0, 0), num_heads=3, queries=8)
    assert never.message == "No query may attend to itself in any head."
    (unseen,) = hm.lint(hm.Keys(0, 7), num_heads=3, queries=8)
    assert unseen.message == "Key 7 is seen by no query of any head."
