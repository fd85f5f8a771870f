"""DuoAttention's published patterns: what their files mean, and what is refused."""

import json

import keras
import numpy as np
import pytest
from contract import normal, numpy
from hypothesis import given
from hypothesis import strategies as st
from oracle import picture
from strategies import FEW

import keras_headmask as hm
from keras_headmask.rules.duo_attention import DuoAttentionFiles

GATES = [[0.9, 0.1], [0.8, 0.7], [0.2, 1.0]]  # 3 layers, 2 key heads
CONFIG = {"model_name": "tiny", "sink_size": 1, "recent_size": 2}


@pytest.fixture
def folder(tmp_path):
    """Written as DuoAttention does."""
    np.savetxt(tmp_path / "full_attention_heads.tsv", np.array(GATES), delimiter="\t")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def duo_attention(folder, sparsity=0.5, num_layers=3, num_heads=2):
    return hm.recipes.duo_attention(folder, sparsity, num_layers, num_heads)


STREAMING = hm.recipes.streaming(1, 2)


def test_the_least_of_all_layers_stream(folder):
    assert duo_attention(folder, 0) == {"0": hm.Full(), "1": hm.Full(), "2": hm.Full()}
    some = hm.PerHead({1: STREAMING}), hm.Full(), hm.PerHead({0: STREAMING})
    assert duo_attention(folder, 0.25) == duo_attention(str(folder), 0.4)
    assert duo_attention(folder, 0.25) == dict(zip("012", some, strict=True))
    both = hm.PerHead({0: STREAMING, 1: STREAMING})
    assert list(duo_attention(folder, 0.75).values()) == [some[0], both, some[2]]
    assert set(duo_attention(folder, 1).values()) == {both}


def test_neighbouring_query_heads_share_a_key_head(folder):
    rules = duo_attention(folder, 0.25, num_heads=6)
    assert rules["0"] == hm.PerHead({"3-5": STREAMING})
    assert rules["2"] == hm.PerHead({"0-2": STREAMING})


def test_rules_of_layers_are_not_taken_for_heads(folder):
    with pytest.raises(TypeError, match=r"the rules of 3 layers.*apply_head_masks\(model, rules\)"):
        hm.PerHead(duo_attention(folder, 1))


def test_as_drawn(folder):
    mask = numpy(hm.make_mask(duo_attention(folder, 0.25)["0"], 5, 5, num_heads=2))[0]
    assert picture(mask[1]) == "10000 11000 11100 10110 10011"
    assert mask[0].all()
    assert hm.reach(duo_attention(folder, 1)["1"], num_heads=2) == hm.Reach(1, ((0, 1),))


@FEW
@given(
    st.lists(st.lists(st.integers(-2, 12), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_as_many_as_numpys_quantile_says(gates, eighths):
    """Heads at or above the quantile are full; values beyond 0 and 1 count as these."""
    files = DuoAttentionFiles("file", [[g / 10 for g in row] for row in gates], 1, 2)
    sparsity = eighths / 8
    streaming = np.zeros((len(gates), 3), bool)
    for layer, heads in enumerate(files.streaming_heads(sparsity)):
        streaming[layer, list(heads)] = True
    values = np.clip(np.array(files.gates), 0, 1)
    ranks = values.ravel().argsort(kind="stable").argsort().astype(float)  # all different
    expected = (ranks < np.quantile(ranks, sparsity)).sum() if sparsity < 1 else ranks.size
    assert streaming.sum() == expected
    if streaming.any() and not streaming.all():
        assert values[streaming].max() <= values[~streaming].min()


def test_ties_are_broken_in_order(tmp_path):
    files = DuoAttentionFiles("file", [[1.0, 0.5], [0.5, 0.5]], 1, 2)
    assert files.streaming_heads(0.3) == [{1}, set()]
    assert files.streaming_heads(0.6) == [{1}, {0}]


def decoder(num_layers, num_heads):
    x = inputs = keras.Input((None, 8))
    for _ in range(num_layers):
        x = x + keras.layers.MultiHeadAttention(num_heads, 4)(x, x, use_causal_mask=True)
    return keras.Model(inputs, x)


def test_a_model_takes_the_mapping(folder):
    rules = duo_attention(folder, 0.25, num_heads=4)
    model = decoder(num_layers=3, num_heads=4)
    masked = hm.apply_head_masks(model, rules)
    assert list(hm.mask_specs(masked).values()) == list(rules.values())
    x = normal(1, 9, 8)
    difference = np.abs(numpy(masked(x)) - numpy(model(x))).max(axis=(0, 2))
    assert (difference[:3] < 1e-5).all()  # one sink and two keys: as many as there are
    assert (difference[3:] > 1e-5).all()


@pytest.mark.parametrize(("num_layers", "num_heads"), [(2, 2), (12, 2), (3, 3), (3, 1)])
def test_sizes_that_do_not_fit_the_model(folder, num_layers, num_heads):
    sizes = (
        rf"full_attention_heads.tsv is of another model: it has 3 layers of 2 key heads, and yours "
        rf"{num_layers} layers of {num_heads} query heads"
    )
    with pytest.raises(ValueError, match=sizes):
        duo_attention(folder, 0.5, num_layers, num_heads)


def test_a_model_of_another_size_refuses_the_mapping(folder):
    """Where the sizes that were given are not the model's."""
    with pytest.raises(ValueError, match="no self-attention layer 2: the model has 2"):
        hm.apply_head_masks(decoder(2, 2), duo_attention(folder))
    with pytest.raises(ValueError, match="names head 2, but there are 2 heads"):
        hm.apply_head_masks(decoder(3, 2), duo_attention(folder, num_heads=4))


HEADS, SIZES = "full_attention_heads.tsv", "config.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (HEADS, "", "is empty: it must hold a line of numbers"),
        (HEADS, "\n\n", "is empty"),
        (HEADS, "0.1\t0.2\n\n0.3\tx", "line 3: could not convert string to float: 'x'"),
        (HEADS, "0.1,0.2", r"line 1: could not convert .* '0.1,0.2'. Each line is a layer.* tabs"),
        (HEADS, "0.1\t0.2\n0.3", "line 2: found 1 values, and 2 on the line before"),
        (HEADS, "0.1\tnan", r"line 1: found \['0.1', 'nan'\], which is not finite"),
        (HEADS, b"\xff\xfe", "is not a text in UTF-8"),
        (SIZES, "{", "is not JSON: .* Found: '{'"),
        (SIZES, "[1]", r"must hold a JSON object. Found: '\[1\]'"),
        (SIZES, "{}", r"lacks `sink_size`. Found: \[\]"),
        (SIZES, '{"sink_size": 4, "window": 8}', r"lacks `recent_size`. Found: \['sink_size', 'w"),
        (SIZES, '{"sink_size": 4, "recent_size": 0}', ": `recent_size` must be at least 1. .* 0"),
        (SIZES, '{"sink_size": "4", "recent_size": 8}', "`sink_size` must be a whole number.*'4'"),
        (SIZES, '{"sink_size": -1, "recent_size": 8}', "`sink_size` must be at least 0"),
    ],
)
def test_a_broken_file(folder, name, content, message):
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"(?s){name}.*{message}"):
        duo_attention(folder)


@pytest.mark.parametrize("name", [HEADS, SIZES])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no file .*{name}. `folder` must hold full_att"):
        duo_attention(folder)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sparsity": 1.5}, ValueError, "`sparsity` must lie between 0 and 1. Received: 1.5"),
        ({"sparsity": "0.5"}, TypeError, "`sparsity` must be a number from 0 to 1"),
        ({"num_layers": 0}, ValueError, "`num_layers` must be at least 1"),
        ({"num_heads": 2.0}, TypeError, "`num_heads` must be a whole number"),
    ],
)
def test_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        duo_attention(folder, **arguments)
