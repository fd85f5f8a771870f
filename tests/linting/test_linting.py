"""Lint: for each kind of finding a case that has it, and one near it that has not."""

import functools
import operator
import re
from dataclasses import dataclass

import keras
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import assume, given
from keras import layers
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm
from keras_headmask import recipes

W, SELF, CAUSAL = hm.Window, hm.Window(0, 0), hm.Window(after=0)
SENTENCES = hm.SameSentence(9)
BY_SENTENCE = hm.PerHead({0: SENTENCES})
REAL = np.array([[1] * 24 + [0] * 8, [1] * 32])
IDS = np.where(REAL == 1, np.arange(32) % 7 + 3, 0)  # 9 among them; 0 pads
FLAGS = np.array([[1] + [0] * 31] * 2)
PAD = {"padding_mask": REAL}


@hm.register_spec("test_lint_far")
@dataclass(frozen=True)
class Far(hm.MaskSpec):
    least: int

    def allowed(self, query_positions, key_positions, inputs):
        return key_positions - query_positions >= self.least


def found(*args, **kwargs):
    return [(finding.code, finding.heads) for finding in hm.lint(*args, **kwargs)]


X, Y = hm.KeyFlag("x"), hm.KeyFlag("y")
TOKENS_OF = {"token_ids": IDS}
OF_ZERO, OF_REAL = ({"mask_inputs": {"x": x}} for x in (0 * REAL, REAL))
PADDED = {"mask_inputs": PAD | TOKENS_OF}
OUTSIDE, KNOWN = ({"mask_inputs": {"d": REAL - 1} | more} for more in ({}, PAD))
HEADS = {"num_heads": 3}
AT_32 = {"queries": 32}
# (code, heads, rule that has it, its arguments, one near it that has not, its arguments)
PLANTED = [
    ("dead-rows", (1,), hm.PerHead({1: W(3, -1)}), {}, hm.PerHead({1: hm.Nothing()}), {}),
    ("dead-rows", (0,), X & ~X, {}, X & ~Y, {}),  # whatever they hold
    ("dead-rows", (0,), X, OF_ZERO, X, OF_REAL),
    ("dead-rows", (0,), hm.SameSegment("d"), OUTSIDE, hm.SameSegment("d"), KNOWN),
    ("equal-heads", (0, 1), hm.PerHead({0: W(9, 9), 1: W(9, 9) & W(10, 10)}), {},
     hm.PerHead({0: W(9, 9), 1: W(9, 9) & W(8, 10)}), {}),
    ("equal-heads", (0, 2), hm.PerHead({0: X & Y, 2: ~(~X | ~Y)}), {},
     hm.PerHead({0: X & Y, 2: ~(~X & ~Y)}), {}),
    ("equal-heads", (0, 1), hm.PerHead({0: Far(0), 1: W(before=0)}), {},
     hm.PerHead({(0, 1): Far(0)}), {}),  # written once, so meant
    ("hides-nothing", (0,), X | ~X, {}, X | Y, {}),
    ("hides-nothing", (0,), W(40, 40), AT_32, W(40, 40), {}),
    ("hides-nothing", (0,), Far(-40), AT_32, Far(-40), {}),
    ("input-changes-nothing", (), CAUSAL, OF_REAL, CAUSAL & X, OF_REAL),
    ("input-changes-nothing", (), CAUSAL | (CAUSAL & X), {}, CAUSAL | X, {}),
    ("input-changes-nothing", (), Far(0) | (Far(2) & X), {}, Far(0) | X, {}),
    ("sees-padding", (0,), ~recipes.padding(), PADDED,
     recipes.padding() & (hm.KeyFlag("attention_mask") | W(before=0)),  # one of two is obeyed
     {"mask_inputs": PAD | {"attention_mask": FLAGS}}),
    ("sees-padding", (1, 2), hm.PerHead({0: recipes.padding()}), HEADS | PADDED,
     BY_SENTENCE, PADDED),  # the layer may be given its padding beside the rule
    ("end-id-pads", (), hm.SameSentence(0), PADDED, hm.SameSentence((0, 9)), PADDED),
]  # fmt: skip


@pytest.mark.parametrize(("code", "heads", "rule", "given", "near", "near_given"), PLANTED)
def test_planted(code, heads, rule, given, near, near_given):
    assert (code, heads) in found(rule, **given)
    assert code not in dict(found(near, **near_given))


def test_every_code_is_planted_and_documented():
    listed = hm.lint.__doc__.partition("Codes: ")[2].partition("Raises:")[0]
    assert {code for code, *_ in PLANTED} == set(re.findall("`([a-z-]+)`", listed))


AS_MEANT = [
    (recipes.causal() & recipes.padding(), PAD),
    (recipes.longformer(2, "g") & recipes.padding(), {"g": FLAGS} | PAD),
    (recipes.streaming(4, 4096), {}),
    (hm.Chunk(4, 3, 3), {}),  # it sees blocks, so 12 positions
    (recipes.sentences(9, (3, 4)), TOKENS_OF),
    (recipes.separate_documents("d"), {}),
    (hm.PerHead({0: SENTENCES}, default=recipes.padding()) & recipes.padding(), {}),
    (hm.PerHead({"0-3": recipes.streaming(4, 256)}, default=CAUSAL), {}),
    (~hm.KeyFlag("key_padding_mask"), {"key_padding_mask": 1 - REAL[:1]}),  # as PyTorch has it
    (~hm.KeyIn("token_ids", 0), TOKENS_OF | PAD),
]


@pytest.mark.tensorflow
@pytest.mark.parametrize(("spec", "inputs"), AS_MEANT, ids=repr)
def test_recipes_used_as_meant(spec, inputs):
    assert hm.lint(spec, mask_inputs=inputs) == hm.lint(spec) == []


def test_a_finding_says_at_which_lengths():
    findings = hm.lint(hm.PerHead({(0, 2): W(4, -1)}), queries=6, keys=8, num_heads=4)
    said = "dead-rows, heads 0 and 2: Query 0 sees no key at 6 x 8 positions: the output is 0."
    assert str(findings) == str(findings[0]) == said
    assert "at 16 x 16 positions" in str(hm.lint(W(4, -1)))
    assert "at 82 x 82 positions" in str(hm.lint(W(40, -1)))
    assert str(hm.lint(CAUSAL)) == "No findings."


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones((2, 2)),), TypeError, "must be a mask spec"),
        ((CAUSAL, 0), ValueError, "must be at least 1"),
        ((CAUSAL, 20000), ValueError, "400000000 pairs of positions.*Pass fewer `queries`"),
        ((CAUSAL, 8, 8, 1, [1]), TypeError, "`mask_inputs` must be a dict"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        hm.lint(*arguments)


def test_a_rule_that_reads_much_is_looked_at_with_examples():
    much = functools.reduce(operator.and_, [hm.KeyFlag(name) for name in "abcdefg"])
    with pytest.raises(ValueError, match=r"7 parts of the rule.*`mask_inputs` beside a spec"):
        hm.lint(much)
    assert found(much, mask_inputs=dict.fromkeys("abcdefg", 0 * REAL)) == [("dead-rows", (0,))]


@strategies.FEW
@given(strategies.cases())
def test_what_is_found_agrees_with_the_mask(case):
    """With the inputs, and without, when it must hold for these, too."""
    spec, inputs, batch, heads, queries, keys, offset = case
    assume(not offset)
    mask = oracle.mask(spec, batch, heads, queries, keys, inputs, 0)
    meant = {head for head in range(heads) if spec.for_head(head) == hm.Nothing()}
    for given_inputs in (inputs, None):
        dead = set()
        for finding in hm.lint(spec, queries, keys, heads, given_inputs):
            of_heads = mask[:, list(finding.heads)]
            dead |= set(finding.heads) if finding.code == "dead-rows" else set()
            assert finding.code != "equal-heads" or (of_heads == of_heads[:, :1]).all()
            assert finding.code != "hides-nothing" or of_heads.all()
        truly = {head for head in range(heads) if (~mask[:, head].any(-1)).any()}
        assert dead <= truly
        assert given_inputs is None or dead | meant == truly | meant


def padded(reaches, rule=None):
    """Two layers on token ids, to which the padding mask gets, or not; stock, or with a rule."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    real = keras.Input((None,), dtype="int32", name="padding_mask")
    x = layers.Embedding(12, 8)(ids)
    mask = {"attention_mask": real[:, None]} if reaches else {}
    for name in "ab":
        if rule is None:
            x = layers.MultiHeadAttention(4, 3, name=name)(x, x, **mask)
        else:
            own = hm.PerHeadMaskedMultiHeadAttention(4, 3, mask_spec=rule, name=name)
            x = own(x, mask_inputs={"token_ids": ids}, **mask)
    return keras.Model({"token_ids": ids, "padding_mask": real}, x)


@pytest.mark.parametrize("own", [False, True], ids=["stock", "own"])
def test_a_model_whose_padding_does_not_reach_its_layers(own):
    lost, kept = (
        padded(x, BY_SENTENCE) if own else hm.apply_head_masks(padded(x), BY_SENTENCE)
        for x in (False, True)
    )
    unread, missing = hm.lint(lost)
    assert (unread.code, "`padding_mask`" in unread.message) == ("input-changes-nothing", True)
    assert (missing.code, *missing[2:]) == ("sees-padding", (0, 1, 2, 3), ("a", "b"))
    assert str(missing).endswith("In a, b.")
    assert hm.lint(kept) == []
    by_padding = hm.apply_head_masks(padded(False), recipes.padding(), add_inputs=True)
    assert hm.lint(by_padding) == []


@pytest.mark.tensorflow
def test_a_rule_that_shows_only_what_the_model_hides_or_ends_by_what_pads():
    rule = hm.PerHead({1: ~recipes.padding()})
    model = hm.apply_head_masks(padded(True), rule, add_inputs=True)
    assert found(model) == [("dead-rows", (1,))]
    # What is made up for a lint are ids 1, padded by 0.
    model = hm.apply_head_masks(padded(True), hm.PerHead({1: ~hm.KeyIn("token_ids", 1)}))
    assert hm.lint(model) == []
    ones = {"token_ids": np.array([[1, 1, 0]]), "padding_mask": np.array([[1, 1, 0]])}
    assert found(model, mask_inputs=ones) == [("dead-rows", (1,))]
    assert ("end-id-pads", ()) in found(
        hm.apply_head_masks(one_layer(), hm.PerHead({0: hm.SameSentence(0)}))
    )


@pytest.mark.tensorflow
def test_findings_name_their_layers_and_the_model_stays_as_it_is():
    model = hm.apply_head_masks(stack(3), {"0": hm.PerHead({0: W(3, -1)}), "1-2": CAUSAL})
    before = np.asarray(model(TOKENS))
    (dead,) = hm.lint(model)
    assert (dead.code, dead.heads, len(dead.layers)) == ("dead-rows", (0,), 1)
    assert dead.layers[0].startswith("block_0/")
    np.testing.assert_array_equal(np.asarray(model(TOKENS)), before)


@pytest.mark.tensorflow
def test_models_that_are_refused():
    with pytest.raises(TypeError, match="must be a functional model with rules"):
        hm.lint(one_layer())
    model = padded(True, BY_SENTENCE)
    with pytest.raises(ValueError, match="at the lengths of its inputs"):
        hm.lint(model, queries=8)
    with pytest.raises(ValueError, match=r"must hold each of them.*'padding_mask'"):
        hm.lint(model, mask_inputs={"token_ids": TOKENS})
