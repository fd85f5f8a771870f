"""Rules and attention as figures: what the figures hold, not their pixels."""

import dataclasses
import gc
import sys
import weakref

import keras
import numpy as np
import pytest
from contract import numpy
from oracle import mask as mask_by_loops
from small_models import TOKENS, one_layer, stack

import keras_headmask as hm

pytest.importorskip("matplotlib")

from tolerance import assert_close

from keras_headmask.look.plotting import plot_heads

# A figure is the same on each backend; what it is made of is tested on each.
once = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs one backend")

CAUSAL, SELF = hm.Window(after=0), hm.Window(0, 0)
NAMES = ["one", ".", "$x$ two", "three", ".", "four", "[PAD]"]
SENTENCES = hm.PerHead({0: hm.SameSentence(9), 1: CAUSAL})


def cells(ax):
    return np.ma.getdata(ax.images[0].get_array())


def texts(parts):
    return [text.get_text() for text in parts]


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


# --- plot ----------------------------------------------------------------------------------------


@once
def test_a_panel_for_each_mask():
    """Heads that see everything come last."""
    spec = hm.PerHead({"1-2": hm.Full(), 0: CAUSAL, 3: CAUSAL, 5: SELF, 6: hm.Window(9, 9)})
    figure = hm.plot(spec, 3, 4, num_heads=8)
    assert titles(figure) == ["heads 0, 3", "head 5", "heads 1-2, ..."]
    expected = mask_by_loops(spec, 1, 8, 3, 4, {})[0]
    for ax, head in zip(figure.axes, (0, 5, 1), strict=True):
        np.testing.assert_array_equal(cells(ax), 2 * expected[head])
    said = figure.get_suptitle().split("\n")
    assert said[0] == "Heads 0 and 3: a token sees itself and every token before it."
    assert said[-1] == "Heads 1, 2, 4 and 7: every token."
    assert texts(figure.legends[0].get_texts()) == ["may attend", "hidden"]


@once
def test_tokens_name_queries_and_keys():
    inputs = {"token_ids": TOKENS}
    figure = hm.plot(SENTENCES, mask_inputs=inputs, tokens=NAMES)
    expected = mask_by_loops(SENTENCES, 2, 3, 7, 7, inputs)[0]
    for head, ax in enumerate(figure.axes):
        np.testing.assert_array_equal(cells(ax), 2 * expected[head])
        assert texts(ax.get_xticklabels()) == NAMES
        assert texts(ax.get_yticklabels()) == ([] if head else NAMES)  # once for a row of panels
        assert {x.get_rotation() for x in ax.get_xticklabels()} == {90}
        # A dollar sign is no formula.
        assert not any(text.get_parse_math() for text in ax.get_xticklabels())


LONG = [f"token_with_a_name_{i}" for i in range(60)]


@once
@pytest.mark.parametrize(
    ("count", "names", "rotation"), [(1, ["WW", *"9" * 9], 0), (2, LONG, 90), (16, LONG, 90)]
)
def test_nothing_overlaps(count, names, rotation):
    """Labels keep apart from each other and from all else, whatever the number of heads.

    Short names of keys stand upright where they fit: on end, a 9 reads as a 6.
    """
    spec = hm.PerHead({i: hm.Window(i, 0) for i in range(count - 1)})
    figure = hm.plot(spec, num_heads=count, tokens=names)
    labels = [label for ax in figure.axes for label in ax.get_xticklabels()]
    assert {label.get_rotation() for label in labels} == {rotation}
    assert_apart(figure)
    odd = hm.PerHead({tuple(range(1, 31, 2)): hm.Window(1, 1)})  # of names too long for a title
    assert_apart(hm.plot(spec & odd, num_heads=32, tokens=names))


def assert_apart(figure):
    figure.draw_without_rendering()
    parts = [figure._suptitle, figure.legends[0]]
    for ax in figure.axes:
        parts += [ax.title, ax.xaxis.label, ax.yaxis.label, ax.patch]
        parts += [*ax.get_xticklabels(), *ax.get_yticklabels()]
    parts = [x for x in parts if x.get_visible() and getattr(x, "get_text", lambda: "-")()]
    boxes = [part.get_window_extent() for part in parts]
    for i, (part, box) in enumerate(zip(parts, boxes, strict=True)):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, part
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, part
        # (Neighbouring labels may touch by their empty margins.)
        assert box.count_overlaps([x.padded(-1.5) for x in boxes[i + 1 :]]) == 0, part


@once
def test_nothing_is_kept():
    """A figure shows itself; pyplot does not know it, and it goes when it is let go."""
    from matplotlib import pyplot

    figure = hm.plot(CAUSAL, 2)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []
    gone = weakref.ref(figure)
    del figure
    gc.collect()
    assert gone() is None


@once
def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_headmask.look.figures", None)
    monkeypatch.delattr("keras_headmask.look.figures", raising=False)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        hm.plot(CAUSAL, 2)


@once
def test_numbers_of_heads():
    values = {"a": np.array([[0.5, np.nan]]), "b": np.array([[0.25, 0.0]])}
    figure = plot_heads(values, "share of pairs", ["said"])
    assert titles(figure) == ["a", "b"]
    a, b, scale = figure.axes
    assert np.ma.getmaskarray(a.images[0].get_array()).tolist() == [[False, True]]
    assert a.patch.get_hatch() == "////"
    assert b.images[0].norm.vmax == 1
    axes = scale.get_ylabel(), a.get_ylabel(), b.get_xlabel()
    assert axes == ("share of pairs", "layers", "heads")


# --- plot_attention ------------------------------------------------------------------------------


def drawn_attention(figure, heads):
    """Probabilities and what is allowed, as the figure shows them."""
    shown = [ax.images[0].get_array() for ax in figure.axes[:heads]]
    return np.stack([x.data for x in shown]), ~np.stack([np.ma.getmaskarray(x) for x in shown])


def test_a_masked_model():
    masked = hm.apply_head_masks(one_layer(), SENTENCES)
    before, tokens = numpy(masked(TOKENS)), TOKENS[::-1]
    figure = hm.plot_attention(masked, tokens, tokens=NAMES)
    probabilities, allowed = drawn_attention(figure, 4)
    real = tokens[0] != 0
    expected = mask_by_loops(SENTENCES, 2, 4, 7, 7, {"token_ids": tokens})[0] & real & real[:, None]
    np.testing.assert_array_equal(allowed, expected)
    assert_close(probabilities.sum(-1)[:, real], 1)
    assert not probabilities[~expected].any()
    assert titles(figure) == [f"head {i}" for i in range(4)]
    first, *_, last = figure.get_suptitle().split("\n")
    assert first == "Head 0: a token sees its own sentence (sentences end with token 9)."
    assert last == "attention; attention outside the mask: 0 pairs"
    np.testing.assert_array_equal(numpy(masked(TOKENS)), before)


@once
def test_restricted_heads_come_first_and_chosen_ones_in_their_order():
    masked = hm.apply_head_masks(one_layer(), hm.PerHead({2: CAUSAL, 3: SELF}))
    figure = hm.plot_attention(masked, TOKENS)
    assert titles(figure) == ["head 2", "head 3", "head 0", "head 1"]
    _, allowed = drawn_attention(figure, 4)
    np.testing.assert_array_equal(allowed[0], np.tri(7) * (TOKENS[0] != 0)[:, None] > 0)
    assert titles(hm.plot_attention(masked, TOKENS, heads=(0, 3))) == ["head 0", "head 3"]


@once
@pytest.mark.parametrize("length", [7, 140])
def test_what_lies_outside_would_show(monkeypatch, length):
    """A layer that does not obey its rule: here, a masked model whose mask is not applied."""
    from keras_headmask.retrofit import masked_attention

    masked = hm.apply_head_masks(one_layer(mask_zero=False), SELF)
    attend = masked_attention.attend
    monkeypatch.setattr(
        masked_attention,
        "attend",
        lambda request: attend(dataclasses.replace(request, rule=None, mask=None)),
    )
    figure = hm.plot_attention(masked, np.ones((1, length), int), heads="0,2")
    pairs = 2 * length * (length - 1)
    assert figure.get_suptitle().endswith(f"outside the mask: {pairs} pairs")
    crosses = figure.axes[0].lines[0].get_xydata()
    assert len(crosses) == (42 if length == 7 else 35 * 35)  # of tiles of 4 x 4
    assert texts(figure.legends[0].get_texts())[-1] == "attention outside it"


@once
def test_without_a_mask_none_is_spoken_of():
    figure = hm.plot_attention(one_layer(mask_zero=False), TOKENS)
    assert (figure.legends, figure.get_suptitle()) == ([], "attention")
    padded = hm.plot_attention(one_layer(), TOKENS[::-1])
    assert texts(padded.legends[0].get_texts()) == ["hidden by the mask"]
    assert padded.get_suptitle().endswith("outside the mask: 0 pairs")


def test_rematerialised_layers():
    """JAX runs them on tracers."""
    with keras.RematScope(mode="full"):
        model = one_layer()
    masked = hm.apply_head_masks(model, SENTENCES)
    _, allowed = drawn_attention(hm.plot_attention(masked, TOKENS, heads=1), 1)
    np.testing.assert_array_equal(allowed[0], np.tri(7) * (TOKENS[0] != 0)[:, None] > 0)
    assert masked.get_layer("attention")._remat_mode is not None


@once
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": "block"}, ValueError, r"must name one attention layer; 'block' names 2"),
        ({"heads": 4}, ValueError, r"heads of the layer, 0 to 3. Received: 4"),
        ({"heads": []}, ValueError, r"heads of the layer, 0 to 3"),
        ({"tokens": ["a"]}, ValueError, "1 for 7 keys"),
        ({"model": 3}, TypeError, "`model` must be a Keras model"),
    ],
)
def test_refused(arguments, error, message):
    arguments = {"model": stack(2), "inputs": TOKENS} | arguments
    with pytest.raises(error, match=message):
        hm.plot_attention(**arguments)
