"""Specs and masked models show themselves in a notebook."""

import keras
import numpy as np
import pytest
from oracle import mask as mask_by_loops
from small_models import stack

import keras_headmask as hm

pytest.importorskip("matplotlib")
# A figure is the same on each backend.
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="one is enough")

CAUSAL, SELF = hm.Window(after=0), hm.Window(0, 0)


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


@pytest.fixture
def shown(monkeypatch):
    """The figures that values show of themselves."""
    from keras_headmask.look import figures

    seen = []
    make = figures.figure_of
    monkeypatch.setattr(figures, "figure_of", lambda *a: seen.append(make(*a)) or seen[-1])
    return seen


def test_a_spec_shows_itself(shown):
    html = hm.PerHead({0: hm.SameSegment("<ids>"), 1: hm.Window(100, 0)})._repr_html_()
    assert "its own id in `&lt;ids&gt;`" in html
    assert "<ids>" not in html
    assert shown == []  # what positions do not decide
    html = hm.PerHead({2: hm.Window(100, 0)}, default=CAUSAL)._repr_html_()
    assert html.count('<img alt="PerHead({2:') == 1
    assert "All other heads: itself and every token" in html
    assert titles(shown[0]) == ["head 2", "all other heads"]
    assert shown[0].get_suptitle() == "over 202 positions"  # so that the window is seen
    hm.Chunk(3)._repr_html_()
    expected = mask_by_loops(hm.Chunk(3), 1, 1, 12, 12, {})[0, 0]
    np.testing.assert_array_equal(shown[1].axes[0].images[0].get_array(), 2 * expected)


def test_a_masked_model_shows_itself(shown):
    rules = {"0-1": hm.PerHead({2: SELF}), "2": hm.SameSentence(9)}
    html = hm.apply_head_masks(stack(3), rules)._repr_html_()
    said = "Head 2: a token sees itself alone.\nHeads 0, 1 and 3: every token."
    places = [html.index(x) for x in ("block_0/", "block_1/", said, "block_2/")]
    assert places == sorted(places)
    assert [titles(figure) for figure in shown] == [["head 2", "heads 0-1, 3"]]


def test_a_rule_is_shown_for_each_number_of_heads():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(12, 8)(ids)
    for heads in (2, 6):
        x = keras.layers.MultiHeadAttention(heads, 3, name=f"of_{heads}")(x, x)
    html = hm.apply_head_masks(keras.Model(ids, x), hm.PerHead({0: SELF}))._repr_html_()
    places = ["of_2</pre>", "Head 1: every token.", "of_6</pre>", "Heads 1 to 5: every token."]
    assert [html.count(place) for place in places] == [1] * 4
    assert sorted(places, key=html.index) == places


def test_showing_never_raises(monkeypatch):
    from keras_headmask.look import notebook

    monkeypatch.delattr(notebook, "grid_of")
    assert CAUSAL._repr_html_() is None  # IPython then prints its repr
    masked = hm.apply_head_masks(stack(1), CAUSAL, ignore="block")
    assert "<pre>Window(after=0)</pre>" in masked._repr_html_()
