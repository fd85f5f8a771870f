"""Rules in plain English: what is said, and that different rules read differently."""

import itertools
from dataclasses import dataclass

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

import keras_headmask as hm
from keras_headmask import recipes
from keras_headmask.rules import config
from keras_headmask.rules.algebra import And, Or
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.simplifying import simplified

pytestmark = pytest.mark.tensorflow  # the same on every backend

W = hm.Window
CAUSAL = "itself and every token before it"
STREAMING = "the first 4 tokens, itself and 255 tokens before it"

OF_STEP = "of these only those at a distance that is a multiple of"
SAID = [
    (hm.Full(), "every token"),
    (hm.Nothing(), "nothing"),
    (W(after=0), CAUSAL),
    (W(before=0), "itself and every token after it"),
    (W(0, 0), "itself alone"),
    (W(2, 2), "itself and 2 tokens on each side"),
    (W(2, 5), "itself, 2 tokens before it and 5 tokens after it"),
    (W(1, 0), "itself and 1 token before it"),
    (W(3, None), "every token after it, itself and 3 tokens before it"),
    (W(None, 1), "every token before it, itself and 1 token after it"),
    (W(1, -1), "the token 1 place before it"),
    (W(5, -2), "the tokens 2 to 5 places before it"),
    (W(None, -2), "every token 2 or more places before it"),
    (W(-2, 5), "the tokens 2 to 5 places after it"),
    (W(), "every token, at whatever distance"),
    (W(step=8), "every token at a distance that is a multiple of 8"),
    (
        W(8, 8, step=4),
        f"itself and 8 tokens on each side, {OF_STEP} 4",
    ),
    (hm.Chunk(64), "its own block of 64 tokens"),
    (hm.Chunk(64, 1, 1), "its own block of 64 tokens and 1 block on each side"),
    (hm.Chunk(64, 1, 2), "its own block of 64 tokens, 1 block before it and 2 blocks after it"),
    (hm.Keys(0, 4), "the first 4 tokens"),
    (hm.Keys(0, 1), "the first token"),
    (hm.Keys(2, 5), "the tokens at positions 2 to 4"),
    (hm.Keys(2), "every token from position 2 on"),
    (hm.Queries(0, 4), "every token, if it stands at positions 0 to 3"),
    (hm.SameSegment("doc"), "the tokens with its own id in `doc`"),
    (hm.SameSentence(102), "its own sentence (sentences end with token 102)"),
    (hm.SameSentence((3, 1, 2)), "its own sentence (sentences end with token 1, 2 or 3)"),
    (hm.SameSentence(9, "ids"), "its own sentence (sentences in `ids` end with token 9)"),
    (recipes.padding(), "every token that `padding_mask` does not hide"),
    (hm.KeyFlag("is_global"), "every token whose `is_global` is set"),
    (hm.QueryFlag("is_global"), "every token, if its own `is_global` is set"),
    (hm.KeyIn("ids", (1, 2)), "every token whose `ids` is 1 or 2"),
    (hm.QueryIn("ids", 1), "every token, if its own `ids` is 1"),
    (hm.MaskInput("m"), "what the mask `m` allows"),
    (~hm.KeyIn("ids", 1), "all but the tokens whose `ids` is 1"),
    (~hm.QueryFlag("x"), "every token, unless its own `x` is set"),
    (recipes.prefix_lm(4), f"the first 4 tokens, {CAUSAL}"),
    (
        recipes.longformer(2, "g"),
        (
            "itself and 2 tokens on each side; the tokens whose `g` is set see all and are "
            "seen by all"
        ),
    ),
    (recipes.streaming(4, 256), f"{STREAMING}; no token after it"),
    (
        recipes.streaming(4, 256) & recipes.padding(),
        (
            f"({STREAMING}; no token after it); of these only the tokens that `padding_mask` does "
            "not hide"
        ),
    ),
    (
        recipes.sentences(1012, (101, 102)),
        (
            "its own sentence (sentences end with token 1012); tokens 101 and 102 see all and are "
            "seen by all"
        ),
    ),
    (
        recipes.sentences(5, 7, "ids"),
        (
            "its own sentence (sentences in `ids` end with token 5); the tokens whose `ids` is 7 "
            "see all and are seen by all"
        ),
    ),
    (
        recipes.separate_documents("doc"),
        (
            f"{CAUSAL}; of these only (the tokens with its own id in `doc`; the tokens whose `doc` "
            "is 0 see all and are seen by all)"
        ),
    ),
    (
        recipes.sparse_transformer(8),
        f"itself and 7 tokens before it, plus ({CAUSAL}, {OF_STEP} 8)",
    ),
    (
        hm.KeyFlag("x") | hm.QueryFlag("x"),
        "every token whose `x` is set, plus every token, if its own `x` is set",
    ),
    (W(after=0) & W(3, 3) & W(5, None), "itself and 3 tokens before it"),
    (W(after=0) & W(-1, None), "nothing"),
    (W(2, 0) | W(5, 0) | hm.Nothing(), "itself and 5 tokens before it"),
    (hm.Full() & ~hm.Nothing() | W(5, 0), "every token"),
    (
        W(after=0) & recipes.padding(),
        f"{CAUSAL}; of these only the tokens that `padding_mask` does not hide",
    ),
    (
        W(after=0) & ~hm.Keys(0, 1) & hm.QueryFlag("x"),
        f"{CAUSAL}, but not the first token, but only if its own `x` is set",
    ),
    (
        ~(W(after=0) | hm.Keys(3)),
        f"all but (every token from position 3 on, {CAUSAL})",
    ),
    (
        ~hm.Keys(1) & ~hm.Chunk(2),
        "all but its own block of 2 tokens, and not the tokens from position 1 on",
    ),
    (
        hm.QueryFlag("x") & ~hm.QueryFlag("y"),
        "every token, if its own `x` is set, unless its own `y` is set",
    ),
    (
        ~hm.QueryFlag("x") & ~hm.Queries(0, 1),
        "every token, unless it stands at position 0 or its own `x` is set",
    ),
    (
        W(after=0) & ~hm.QueryFlag("x") & ~hm.Queries(0, 1),
        f"{CAUSAL}, but not if it stands at position 0 or its own `x` is set",
    ),
    (
        ~hm.QueryFlag("x") | hm.QueryFlag("y"),
        "(every token, unless its own `x` is set), plus every token, if its own `y` is set",
    ),
]


@pytest.mark.parametrize(("spec", "said"), SAID, ids=repr)
def test_one_rule(spec, said):
    assert spec.describe() == f"A token sees {said}."


HEADS = hm.PerHead({0: hm.SameSentence(102)}, default=recipes.padding())
FIRST = "Head 0: a token sees its own sentence (sentences end with token 102)."
PADDED = "every token that `padding_mask` does not hide."


def test_heads():
    assert HEADS.describe(12) == f"{FIRST} Heads 1 to 11: {PADDED}"
    assert HEADS.describe(2) == f"{FIRST} Head 1: {PADDED}"
    assert HEADS.describe() == f"{FIRST} All other heads: {PADDED}"
    spec = hm.PerHead({(0, 3, 5, 6, 7): W(0, 0), "1-2": hm.Nothing()}, default=W(0, 0))
    said = "Heads 0, 3 to 7: a token sees itself alone. Heads 1 and 2: nothing."
    assert spec.describe(8) == said.replace("0, 3 to 7", "0 and 3 to 7")
    nothing = "Heads 1 and 2: a token sees nothing. All other heads: itself alone."
    assert spec.describe() == nothing
    last = hm.PerHead({2: W(0, 0)})
    assert last.describe(4) == "Head 2: a token sees itself alone. Heads 0, 1 and 3: every token."
    assert hm.PerHead({0: W(0, 0)}, default=W(0, 0)).describe(4) == "A token sees itself alone."
    nested = ~HEADS
    assert nested.describe(2) == (
        f"{FIRST} Head 1: all but the tokens that `padding_mask` does not hide."
    ).replace("sees its own", "sees all but its own")


def test_heads_that_do_not_exist():
    with pytest.raises(ValueError, match="names head 4, but there are 4 heads, numbered 0 to 3"):
        hm.PerHead({4: W()}).describe(4)
    with pytest.raises(TypeError, match="`num_heads` must be a whole number"):
        W().describe("4")


def test_every_kind_has_words():
    ours = {
        kind for kind, cls in config.KINDS.items() if cls.__module__.startswith("keras_headmask.")
    }
    assert {part.kind for spec, _ in SAID for part in [spec, *spec.children]} == ours - {"per_head"}
    assert [spec for spec, _ in SAID if spec.in_words() is None] == []


def test_a_spec_of_ones_own():
    @dataclass(frozen=True)
    class Silent(hm.MaskSpec):
        seconds: int

    @dataclass(frozen=True)
    class Speaking(Silent):
        def in_words(self):
            return f"the tokens spoken within {self.seconds} seconds"

    @dataclass(frozen=True, repr=False)
    class Odd(hm.Window):  # has no kind of its own, and may mean anything
        pass

    assert Silent(5).describe().endswith("Silent(seconds=5) allows.")
    assert (~Speaking(5)).describe() == "A token sees all but the tokens spoken within 5 seconds."
    assert Odd(1, 0).describe() == "A token sees what Odd(before=1, after=0) allows."


@strategies.MANY
@given(strategies.any_specs, strategies.any_specs)
def test_rules_read_alike_where_they_are_equal(a, b):
    heads = strategies.NUM_HEADS

    def rules(spec):
        return {head: simplified(rule) for rule, of in head_groups(spec, heads) for head in of}

    assert (a.describe(heads) == b.describe(heads)) == (rules(a) == rules(b))
    for join in (And, Or):
        joined = [
            hm.MaskSpec.from_config({"kind": join.kind, "specs": [x.get_config(), y.get_config()]})
            for x, y in ((a, b), (b, a))
        ]
        assert joined[0].describe() == joined[1].describe()


# Windows, joined by & and |, are what is simplified most.
WINDOWS = strategies.specs(strategies.windows(), per_head=False).filter(lambda spec: spec.children)


@pytest.mark.parametrize("specs", [WINDOWS, strategies.any_specs], ids=["windows", "any"])
@strategies.FEW
@given(data=st.data())
def test_a_simplified_rule_allows_the_same_pairs(specs, data):
    case = data.draw(strategies.cases(specs))
    spec, inputs, _, heads, queries, keys, offset = case
    for rule, _ in head_groups(spec, heads):
        masks = []
        for shown in (rule, simplified(rule)):
            read = {name: inputs[name] for name in shown.inputs}
            mask = hm.make_mask(shown, queries, keys, heads, read, offset)
            masks.append(ops.convert_to_numpy(mask))
        assert (masks[0] == masks[1]).all()


@pytest.mark.parametrize("parts", itertools.permutations([W(None, 0), W(-1), W(step=2)]))
def test_windows_that_hold_no_distance_together_allow_nothing(parts):
    assert simplified(And.of(parts)) == hm.Nothing()


def test_rules_by_head_are_joined_head_by_head():
    a, b = hm.PerHead({0: W(2, 2)}), hm.PerHead({1: W(0, 0)})
    assert (a | b).describe() == "A token sees every token."
    assert (a & b).describe(4) == (
        "Head 0: a token sees itself and 2 tokens on each side. Head 1: itself alone. "
        "Heads 2 and 3: every token."
    )


def test_no_two_rules_of_a_large_sample_read_alike():
    distances = (None, -2, -1, 0, 1, 2)
    windows = []
    for before, after, step in itertools.product(distances, distances, (1, 2)):
        try:
            windows.append(W(before, after, step=step))
        except ValueError:  # holds no distance
            continue
    ranges = [(0, 1), (0, 2), (1, 2), (1, 3), (0, None), (1, None)]
    leaves = [
        *windows,
        *(kind(*r) for kind in (hm.Keys, hm.Queries) for r in ranges),
        *(hm.Chunk(*args) for args in itertools.product((1, 2), (0, 1, 2), (0, 1, 2))),
        *(spec for spec, _ in SAID if not spec.children),
        *(kind(name) for kind in (hm.KeyFlag, hm.QueryFlag, hm.MaskInput) for name in "xy"),
    ]
    leaves = list(dict.fromkeys(leaves))
    few = [hm.Full(), W(after=0), W(), hm.Keys(2), hm.KeyFlag("x"), hm.QueryFlag("x")]
    few += [~leaf for leaf in few]
    pairs = [join(a, b) for a in few for b in few for join in (hm.MaskSpec.__and__, _or)]
    triples = [join(p, c) for p in pairs for c in few for join in (hm.MaskSpec.__and__, _or)]
    specs = {*leaves, *(~leaf for leaf in leaves), *pairs, *triples, *(~t for t in triples)}
    said = {}
    for spec in specs:
        simple = simplified(spec)
        assert said.setdefault(spec.describe(), simple) == simple
    assert len(said) > 1500


def _or(a, b):
    return a | b
