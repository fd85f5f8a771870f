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


def test_a_rule_that_all_heads_share_is_drawn_once():
    assert hm.draw(CAUSAL, 2, num_heads=8) == "1 0\n1 1"


def test_heads_are_folded():
    spec = hm.PerHead({0: CAUSAL, "2-3": CAUSAL, 5: SELF})
    assert hm.draw(spec, 2, num_heads=8) == "\n".join(
        ["heads 0, 2-3:", "1 0", "1 1", "head 5:", "1 0", "0 1", "heads 1, 4, 6-7:", "1 1", "1 1"]
    )


def test_heads_whose_masks_are_equal_are_drawn_together():
    """Different rules, one drawing: at this length they allow the same."""
    spec = hm.PerHead({0: CAUSAL, 1: hm.Window(before=5, after=0)}, default=SELF)
    expected = "heads 0-1:\n1 0\n1 1\nhead 2:\n1 0\n0 1"
    assert hm.draw(spec, 2, num_heads=3) == expected


@pytest.mark.parametrize(
    ("spec", "titles"),
    [
        (hm.PerHead({0: SELF}), ["head 0:", "head 1:"]),
        (hm.PerHead({2: SELF}), ["head 2:", "heads 0-1, 3:"]),
        (~hm.PerHead({0: hm.PerHead({0: hm.Full(), 1: SELF})}), None),  # of head 0 in both
        (hm.Full() & hm.PerHead({1: SELF}), ["head 1:", "heads 0, 2:"]),
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


@once
def test_tokens():
    inputs = {"token_ids": [[5, 9, 4, 9]]}
    drawn = hm.draw(hm.SameSentence(9), mask_inputs=inputs, tokens=["yes", ".", "no", b"."])
    assert drawn.split("\n") == [
        "    yes . no .",
        "yes   1 1  0 0",
        ".     1 1  0 0",
        "no    0 0  1 1",
        ".     0 0  1 1",
    ]


@once
def test_tokens_of_two_sequences():
    drawn = hm.draw(CAUSAL, tokens=(["a", "b"], ["c", "\n", "x" * 20]))
    assert drawn.split("\n") == [
        "  c \\n xxxxxxxxxxx…xxxx",
        "a 1  0                0",
        "b 1  1                0",
    ]
    assert hm.draw(CAUSAL, 2, tokens=(None, ["a", "b"])) == "a b\n1 0\n1 1"


@once
def test_tokens_at_an_offset():
    drawn = hm.draw(CAUSAL, 1, 3, query_offset=1, tokens=["a", "b", "c"])
    assert drawn == "  a b c\nb 1 1 0"


@once
def test_many_long_tokens_stand_on_end():
    names = [f"token{i}" for i in range(20)]
    lines = hm.draw(CAUSAL, tokens=names).split("\n")
    assert ["".join(column).strip() for column in zip(*lines[:7], strict=False)][8::2] == names
    assert lines[7] == "token0  1" + " 0" * 19


SPECS = {
    "window": hm.Window(40, 9),
    "joined": hm.recipes.sparse_transformer(30) | ~hm.Chunk(50),
    "ids": hm.SameSegment("x") & hm.Window(70, 70),
    "whole mask": hm.MaskInput("x"),
}
IDS = np.arange(2 * 150).reshape(2, 150) // 40


@pytest.mark.parametrize(
    "name", ["ids", *(pytest.param(name, marks=once) for name in SPECS if name != "ids")]
)
def test_long_sequences_are_tiles(name):
    spec, inputs = SPECS[name], None
    if name == "ids":
        inputs = {"x": (IDS[:, 4:134], IDS)}
    elif name == "whole mask":
        inputs = {"x": np.random.default_rng(0).random((2, 1, 130, 150)) > 0.1}
    mask = np.array(hm.make_mask(spec, 130, 150, mask_inputs=inputs, query_offset=4))
    mask = np.broadcast_to(mask, (2, 1, 130, 150))[1, 0]
    title, *lines = hm.draw(spec, 130, 150, mask_inputs=inputs, query_offset=4, example=1).split(
        "\n"
    )
    assert title == "tiles of 8 x 8 positions: 1 all, + some, 0 none"
    for i, line in enumerate(lines):
        for j, sign in enumerate(line.split()):
            tile = mask[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
            assert sign == ("1" if tile.all() else "+" if tile.any() else "0"), (i, j)
    assert (i, j) == (16, 18)


@once
def test_tiles_are_evaluated_in_pieces(monkeypatch):
    """However many pairs are evaluated at once, the drawing is the same."""
    from keras_headmask.look import panels

    inputs = {"x": IDS}
    whole = hm.draw(SPECS["ids"], 150, mask_inputs=inputs)
    for most in (6000, 300, 1):
        monkeypatch.setattr(panels, "_MOST_PAIRS", most)
        assert hm.draw(SPECS["ids"], 150, mask_inputs=inputs) == whole


@once
def test_masks_that_look_alike_as_tiles_stay_apart():
    spec = hm.PerHead({0: hm.Window(9, 1), 1: hm.Window(10, 1)}, default=hm.Window(9, 1))
    titles = [x for x in hm.draw(spec, 90, num_heads=3).split("\n") if x.startswith("head")]
    assert titles == ["heads 0, 2:", "head 1:"]
    masks = np.ones((1, 3, 90, 90), bool)
    masks[:, 0, 5, 5] = masks[:, 1, 5, 6] = masks[:, 2, 5, 5] = False
    drawn = hm.draw(hm.MaskInput("x"), 90, num_heads=3, mask_inputs={"x": masks})
    titles = [x for x in drawn.split("\n") if x.startswith("head")]
    assert titles == ["heads 0, 2:", "head 1:"]


@once
def test_the_size_of_tiles():
    assert hm.draw(CAUSAL, 4, tile_size=2).split("\n")[1:] == ["+ 0", "1 +"]
    assert len(hm.draw(CAUSAL, 70, tile_size=1).split("\n")) == 70
    assert hm.draw(CAUSAL, 2, 70).split("\n")[0].startswith("tiles of 1 x 4 positions")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "Give the number of `queries`, or `tokens`"),
        ({"tokens": "a b"}, TypeError, r"`tokens` must be a list of labels.*text.split"),
        ({"tokens": [np.array(["a", "b"])]}, TypeError, "of one example"),
        ({"queries": 2, "tokens": ["a"]}, ValueError, "1 for 2 queries"),
        ({"queries": 1, "keys": 2, "tokens": ["a"]}, ValueError, "1 for 2 keys.*pass a pair"),
        ({"queries": 2, "tile_size": 0}, ValueError, "tile_size"),
        ({"queries": -1}, ValueError, "queries"),
        (
            {"queries": 2**20},
            ValueError,
            "32768 x 32768 pairs of positions are too many",
        ),
    ],
)
def test_refused_by_its_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        hm.draw(CAUSAL, **arguments)
