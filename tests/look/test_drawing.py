"""Rules drawn as text."""

import keras
import numpy as np
import pytest

import keras_headmask as hm

# Text is the same on each backend; the masks it is made of are tested on each.
once = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs one backend")

CAUSAL, SELF = hm.Window(after=0), hm.Window(0, 0)


def test_one_rule():
    assert hm.draw(CAUSAL, 2, 3) == "1 0 0\n1 1 0"
    assert hm.draw(CAUSAL, 2) == "1 0\n1 1"
    assert hm.draw(CAUSAL, 1, 4, query_offset=2) == "1 1 1 0"
    assert hm.draw(CAUSAL, 2, num_heads=8) == "1 0\n1 1"  # once for all heads


def test_heads_whose_masks_are_equal_are_drawn_together():
    spec = hm.PerHead({0: CAUSAL, 2: hm.Window(before=5, after=0), 3: CAUSAL, 5: SELF})
    assert hm.draw(spec, 2, num_heads=8) == "\n".join(
        ["heads 0, 2-3:", "1 0", "1 1", "head 5:", "1 0", "0 1", "heads 1, 4, 6-7:", "1 1", "1 1"]
    )


@pytest.mark.parametrize(
    ("spec", "titles"),
    [
        (hm.PerHead({0: SELF}), ["head 0:", "all other heads:"]),
        (hm.PerHead({2: SELF}), ["head 2:", "all other heads:"]),
        (hm.PerHead({1: hm.Full()}, SELF), ["all other heads:", "head 1:"]),
        (~hm.PerHead({0: hm.PerHead({0: hm.Full(), 1: SELF})}), []),  # of head 0 in both
    ],
    ids=repr,
)
def test_without_a_number_of_heads_all_that_the_rule_does_not_name_are_one(spec, titles):
    drawn = hm.draw(spec, 2).split("\n")
    assert [line for line in drawn if line.endswith(":")] == titles


def test_of_a_batch_the_first_example_is_drawn():
    inputs = {"x": np.array([[1, 0], [0, 1]])}
    assert hm.draw(hm.KeyFlag("x"), 2, mask_inputs=inputs) == "1 0\n1 0"


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: hm.draw(None, 2), TypeError, "`spec` must be a mask spec. Received: None"),
        (lambda: hm.draw({"kind": "full"}, 2), TypeError, "by `MaskSpec.from_config`"),
        (lambda: hm.draw(hm.KeyFlag("x"), 2), ValueError, r"\['x'\] missing"),
        (lambda: hm.draw(hm.PerHead({4: SELF}), 2, num_heads=4), ValueError, "there are 4 heads"),
        (lambda: hm.draw(CAUSAL), ValueError, "Give the number of `queries`, or `tokens`"),
        (lambda: hm.draw(CAUSAL, tokens="a b"), TypeError, r"must be a list of labels.*text.split"),
        (lambda: hm.draw(CAUSAL, 2, tokens=["a"]), ValueError, "1 of them for 2 queries"),
        (lambda: hm.draw(CAUSAL, 1, 2, tokens=["a"]), ValueError, "each key.*1 for 2 keys"),
        (lambda: hm.draw(CAUSAL, 2, tile_size=0), ValueError, "`tile_size` must be at least 1"),
        (lambda: hm.draw(CAUSAL, -1), ValueError, "`queries` must be at least 0"),
        (lambda: hm.draw(CAUSAL, 2**14), ValueError, "16384 x 16384 pairs are over 67108864"),
    ],
)
def test_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


@once
def test_tokens():
    inputs = {"token_ids": [[5, 9, 4, 9]]}
    drawn = hm.draw(hm.SameSentence(9), mask_inputs=inputs, tokens=["x" * 20, "\n", "no", b"."])
    assert drawn.split("\n") == [
        "                 xxxxxxxxxxx…xxxx \\n no .",
        "xxxxxxxxxxx…xxxx                1  1  0 0",
        "\\n                              1  1  0 0",
        "no                              0  0  1 1",
        ".                               0  0  1 1",
    ]
    drawn = hm.draw(CAUSAL, 1, 3, query_offset=1, tokens=["a", "b", "c"])
    assert drawn == "  a b c\nb 1 1 0"


@once
def test_many_long_tokens_stand_on_end():
    names = [f"token{i}" for i in range(20)]
    lines = hm.draw(CAUSAL, tokens=names).split("\n")
    assert ["".join(column).strip() for column in zip(*lines[:7], strict=False)][8::2] == names
    assert lines[7] == "token0  1" + " 0" * 19


IDS = np.arange(2 * 150).reshape(2, 150) // 40


@pytest.mark.parametrize(
    ("spec", "inputs"),
    [
        (hm.Window(40, 9), None),
        (hm.SameSegment("x") & hm.Window(70, 70), {"x": (IDS[:, 4:134], IDS)}),
        (hm.MaskInput("x"), {"x": np.random.default_rng(0).random((2, 1, 130, 150)) > 0.1}),
    ],
    ids=repr,
)
def test_long_sequences_are_tiles(spec, inputs):
    mask = np.array(hm.make_mask(spec, 130, 150, mask_inputs=inputs, query_offset=4))[0, 0]
    title, *lines = hm.draw(spec, 130, 150, mask_inputs=inputs, query_offset=4).split("\n")
    assert title == "tiles of 8 x 8 positions: 1 all, + some, 0 none"
    for i, line in enumerate(lines):
        for j, sign in enumerate(line.split()):
            tile = mask[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
            assert sign == ("1" if tile.all() else "+" if tile.any() else "0"), (i, j)
    assert (i, j) == (16, 18)


@once
def test_the_size_of_tiles():
    assert hm.draw(CAUSAL, 4, tile_size=2).split("\n")[1:] == ["+ 0", "1 +"]
    assert len(hm.draw(CAUSAL, 70, tile_size=1).split("\n")) == 70


@once
def test_masks_that_look_alike_as_tiles_stay_apart():
    spec = hm.PerHead({0: hm.Window(9, 1), 1: hm.Window(10, 1)}, default=hm.Window(9, 1))
    masks = np.ones((1, 3, 90, 90), bool)
    masks[:, 0, 5, 5] = masks[:, 1, 5, 6] = masks[:, 2, 5, 5] = False
    for rule, inputs in ((spec, None), (hm.MaskInput("x"), {"x": masks})):
        lines = hm.draw(rule, 90, num_heads=3, mask_inputs=inputs).split("\n")
        assert [x for x in lines if x.startswith("head")] == ["heads 0, 2:", "head 1:"]
