"""Rules in plain English: what is said, and that different rules read differently."""

from dataclasses import dataclass

import pytest

import keras_headmask as hm
from keras_headmask import recipes
from keras_headmask.rules import config

pytestmark = pytest.mark.tensorflow  # the same on every backend

W = hm.Window
CAUSAL = "itself and every token before it"

OF_STEP = "of these only those at a distance that is a multiple of"
SAID = [
    (hm.Full(), "every token"),
    (hm.Nothing(), "nothing"),
    (W(after=0), CAUSAL),
    (W(2, 2), "itself and 2 tokens on each side"),
    (W(None, 1), "every token before it, itself and 1 token after it"),
    (W(1, -1), "the token 1 place before it"),
    (W(-2, 5), "the tokens 2 to 5 places after it"),
    (W(), "every token before it, itself and every token after it"),
    (W(8, 8, step=4), f"itself and 8 tokens on each side, {OF_STEP} 4"),
    (hm.Chunk(64, 1, 2), "its own block of 64 tokens, 1 block before it and 2 blocks after it"),
    (hm.Keys(0, 4), "the first 4 tokens"),
    (hm.Keys(2, 5), "the tokens at positions 2 to 4"),
    (hm.Keys(2), "every token from position 2 on"),
    (hm.Queries(0, 4), "every token, if it stands at positions 0 to 3"),
    (hm.SameSegment("doc"), "the tokens with its own id in `doc`"),
    (hm.SameSentence((3, 1, 2)), "its own sentence (sentences end with token 1, 2 or 3)"),
    (recipes.padding(), "every token that `padding_mask` does not hide"),
    (hm.QueryFlag("is_global"), "every token, if its own `is_global` is set"),
    (hm.KeyIn("ids", (1, 2)), "every token whose `ids` is 1 or 2"),
    (hm.QueryIn("ids", 1), "every token, if its own `ids` is 1"),
    (hm.MaskInput("m"), "what the mask `m` allows"),
    (~hm.KeyIn("ids", 1), "all but every token whose `ids` is 1"),
    (
        recipes.sentences(5, 7, "ids"),
        (
            "its own sentence (sentences in `ids` end with token 5), plus every token, if its own "
            "`ids` is 7, plus every token whose `ids` is 7"
        ),
    ),
    (
        recipes.streaming(4, 256),
        (
            f"{CAUSAL}; of these only (the first 4 tokens, plus every token after it, itself and "
            "255 tokens before it)"
        ),
    ),
    (
        W(after=0) & ~(hm.Keys(0, 1) | hm.QueryFlag("x")),
        (
            f"{CAUSAL}; of these only (all but (the first token, plus every token, if its own `x` "
            "is set))"
        ),
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
    assert (~HEADS).describe(2) == (
        f"{FIRST} Head 1: all but {PADDED}".replace("sees its own", "sees all but its own")
    )


def test_every_kind_has_words():
    ours = {
        kind for kind, cls in config.KINDS.items() if cls.__module__.startswith("keras_headmask.")
    }
    assert {part.kind for spec, _ in SAID for part in [spec, *spec.children]} == ours - {"per_head"}


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
