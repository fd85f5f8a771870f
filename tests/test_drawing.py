"""Rules drawn as text."""

import numpy as np
import pytest

import keras_headmask as hm

CAUSAL, SELF = hm.Window(after=0), hm.Window(0, 0)


def test_one_rule():
    assert hm.draw(CAUSAL, 2, 3) == "1 0 0\n1 1 0"
    assert hm.draw(CAUSAL, 2) == "1 0\n1 1"
    assert hm.draw(CAUSAL, 1, 4, query_offset=2) == "1 1 1 0"


def test_a_rule_that_all_heads_share_is_drawn_once():
    assert hm.draw(CAUSAL, 2, num_heads=8) == "1 0\n1 1"


def test_heads_are_folded():
    spec = hm.PerHead({0: CAUSAL, "2-3": CAUSAL, 5: SELF})
    assert hm.draw(spec, 2, num_heads=8) == "\n".join(
        ["heads 0, 2-3:", "1 0", "1 1", "heads 1, 4, 6-7:", "1 1", "1 1", "head 5:", "1 0", "0 1"]
    )


def test_heads_whose_masks_are_equal_are_drawn_together():
    """Different rules, one drawing: at this length nothing tells them apart."""
    spec = hm.PerHead({0: CAUSAL, 1: hm.Window(before=5, after=0)}, default=SELF)
    expected = "heads 0-1:\n1 0\n1 1\nhead 2:\n1 0\n0 1"
    assert hm.draw(spec, 2, num_heads=3) == expected


@pytest.mark.parametrize(
    ("spec", "titles"),
    [
        (hm.PerHead({0: SELF}), ["head 0:", "head 1:"]),
        (hm.PerHead({2: SELF}), ["heads 0-1, 3:", "head 2:"]),
        (~hm.PerHead({0: hm.PerHead({1: SELF})}), None),  # head 0 takes the inner default
        (hm.Full() & hm.PerHead({1: SELF}), ["heads 0, 2:", "head 1:"]),
    ],
    ids=repr,
)
def test_without_a_number_of_heads_one_more_than_the_rule_names(spec, titles):
    drawn = hm.draw(spec, 2).split("\n")
    assert [line for line in drawn if line.startswith("head")] == (titles or [])


def test_an_example_of_the_batch():
    inputs = {"x": np.array([[1, 0], [0, 1]])}
    spec = hm.PerHead({0: hm.KeyFlag("x")})
    one_head = [hm.draw(hm.KeyFlag("x"), 2, mask_inputs=inputs, example=i) for i in (0, 1)]
    assert one_head == ["1 0\n1 0", "0 1\n0 1"]
    two_heads = hm.draw(spec, 2, mask_inputs=inputs, num_heads=2, example=1)
    assert two_heads == "head 0:\n0 1\n0 1\nhead 1:\n1 1\n1 1"


# Found as a bug: -1 drew the last example.
@pytest.mark.parametrize("example", [2, -1])
def test_an_example_that_does_not_exist(example):
    inputs = {"x": np.array([[1, 0], [0, 1]])}
    with pytest.raises(ValueError, match=r"`example` must be .*batch size 2"):
        hm.draw(hm.KeyFlag("x"), 2, mask_inputs=inputs, example=example)


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: hm.draw(None, 2), TypeError, "`spec` must be a mask spec. Received: None"),
        (lambda: hm.draw({"kind": "full"}, 2), TypeError, "by `MaskSpec.from_config`"),
        (lambda: hm.draw(hm.KeyFlag("x"), 2), ValueError, r"\['x'\] missing"),
        (
            lambda: hm.draw(hm.PerHead({4: SELF}), 2, num_heads=4),
            ValueError,
            "names head 4, but there are 4 heads",
        ),
    ],
)
def test_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
