"""Each recipe against a matrix drawn by hand, and what it refuses."""

import numpy as np
import pytest

import keras_headmask as hm
from keras_headmask import recipes

FLAGS = {"g": np.array([[0, 0, 1, 0, 0, 0]])}
PADDING = {"padding_mask": np.array([[1, 1, 0]])}

# [CLS] a . b [SEP] [PAD], of which the model's own mask hides the last
IDS = {"token_ids": np.array([[101, 7, 9, 8, 102, 0]])}
TWO = {"ids": np.array([[5, 8, 6, 9, 6, 1]])}  # ends 8 and 9, special 1
RETRIEVED = {"doc": np.array([[0, 1, 1, 2, -1, 3]])}

DRAWN = [
    (recipes.causal(), "1000 1100 1110 1111", {}),
    (recipes.padding(), "110 110 110", PADDING),
    (recipes.prefix_lm(2), "11000 11000 11100 11110 11111", {}),
    (recipes.longformer(1, "g"), "111000 111000 111111 001110 001111 001011", FLAGS),
    (recipes.sentences(9, (101, 102)), "111111 111010 111010 100111 111111 100111", IDS),
    (recipes.sentences([8, 9], 1, input="ids"), "110001 110001 001101 001101 000011 111111", TWO),
    (recipes.streaming(1, 2), "10000 11000 11100 10110 10011", {}),
    (
        recipes.separate_documents("doc", shared=(0, 3)),
        "100000 110000 111000 100100 100000 111111",
        RETRIEVED,
    ),
    (recipes.sparse_transformer(3), "1000000 1100000 1110000 1111000 0111100 0011110 1001111", {}),
]


@pytest.mark.parametrize(("spec", "expected", "inputs"), DRAWN, ids=repr)
def test_as_drawn(spec, expected, inputs):
    queries, keys = len(expected.split()), len(expected.split()[0])
    drawn = hm.draw(spec, queries, keys, mask_inputs=inputs)
    assert drawn.replace(" ", "").split("\n") == expected.split()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: recipes.prefix_lm(0), ValueError, "`length` must be at least 1"),
        (lambda: recipes.longformer(-1, "g"), ValueError, "`each_side` must be at least 0"),
        (lambda: recipes.sentences(9, ()), ValueError, "`special_ids` must hold at least one"),
        (lambda: recipes.streaming(1, 0), ValueError, "`window` must be at least 1"),
        (lambda: recipes.streaming(-1, 1), ValueError, "`sinks` must be at least 0"),
        (lambda: recipes.separate_documents([1, 2]), TypeError, "`documents` is the name under"),
        (lambda: recipes.separate_documents("d", ()), ValueError, "`shared` must hold at least"),
        (lambda: recipes.sparse_transformer(0), ValueError, "`stride` must be at least 1"),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
