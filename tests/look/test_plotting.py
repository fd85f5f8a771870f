"""Rules and attention as figures: what the figures hold, not their pixels."""

import dataclasses
import gc
import io
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

from matplotlib.colors import to_rgb
from tolerance import assert_close

from keras_headmask.look.figures import COLOURS

# A figure is the same on each backend; what it is made of is tested on each.
once = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs one backend")

CAUSAL, SELF = hm.Window(after=0), hm.Window(0, 0)
NAMES = ["one", ".", "$x$ two", "three", ".", "four", "[PAD]"]
SENTENCES = hm.PerHead({0: hm.SameSentence(9), 1: CAUSAL})


def cells(ax):
    return np.ma.getdata(ax.images[0].get_array())


def ticks(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


# --- plot ----------------------------------------------------------------------------------------


@once
def test_a_panel_for_each_mask():
    spec = hm.PerHead({0: CAUSAL, "2-3": CAUSAL, 5: SELF})
    figure = hm.plot(spec, 3, 4, num_heads=8)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["heads 0, 2-3", "head 5", "heads 1, 4, 6-7"]
    expected = mask_by_loops(spec, 1, 8, 3, 4, {})[0]
    for ax, head in zip(figure.axes, (0, 5, 1), strict=True):
        np.testing.assert_array_equal(cells(ax), 2 * expected[head])
    assert figure.get_suptitle().split("\n") == [
        "Heads 0, 2 and 3: a token sees itself and every token before it.",
        "Head 5: itself alone.",
        "Heads 1, 4, 6 and 7: every token.",
    ]


@once
@pytest.mark.parametrize(
    ("spec", "titles"),
    [
        (hm.PerHead({3: SELF}), ["head 3", "heads 0-2"]),
        (hm.PerHead({"0-2": hm.Full()}, default=SELF), ["head 3", "heads 0-2"]),
        # At this length head 0 sees everything, too.
        (hm.PerHead({0: hm.Window(9, 9), 3: SELF}), ["head 3", "heads 0-2"]),
    ],
    ids=repr,
)
def test_heads_that_see_everything_come_last(spec, titles):
    figure = hm.plot(spec, 7, num_heads=4)
    assert [ax.get_title() for ax in figure.axes] == titles


@once
def test_one_rule_for_all_heads():
    (ax,) = hm.plot(CAUSAL, 3).axes
    assert ax.get_title() == "every head"
    assert ax.get_xlabel() == "keys"
    assert ax.get_ylabel() == "queries"
    (ax,) = hm.plot(CAUSAL, 3, num_heads=12).axes
    assert ax.get_title() == "heads 0-11"


@once
def test_tokens_name_queries_and_keys():
    inputs = {"token_ids": TOKENS}
    figure = hm.plot(SENTENCES, mask_inputs=inputs, example=1, tokens=NAMES)
    expected = mask_by_loops(SENTENCES, 2, 3, 7, 7, inputs)[1]
    for head, ax in enumerate(figure.axes):
        np.testing.assert_array_equal(cells(ax), 2 * expected[head])
        assert ticks(ax.xaxis) == NAMES
        assert ticks(ax.yaxis) == ([] if head else NAMES)  # once for a row of panels
        # A dollar sign is no formula.
        assert not any(text.get_parse_math() for text in ax.get_xticklabels())


@once
def test_two_sequences():
    (ax,) = hm.plot(CAUSAL, tokens=(["a", "b"], NAMES), query_offset=3).axes
    assert (ticks(ax.yaxis), ticks(ax.xaxis)) == (["a", "b"], NAMES)
    assert ax.images[0].get_extent() == [-0.5, 6.5, 4.5, 2.5]
    assert cells(ax).tolist() == [[2, 2, 2, 2, 0, 0, 0], [2, 2, 2, 2, 2, 0, 0]]


@once
def test_long_sequences_are_tiles():
    inputs = {"x": np.repeat([[0, 1, 2]], 100)[None]}
    figure = hm.plot(hm.PerHead({1: hm.SameSegment("x")}), 300, mask_inputs=inputs)
    segments, everything = (cells(ax) for ax in figure.axes)
    assert everything.shape == (38, 38)
    assert (everything == 2).all()
    assert set(np.unique(segments)) == {0, 1, 2}
    assert segments[12].tolist() == [1] * 25 + [0] * 13  # the tile over the first border
    assert figure.axes[0].images[0].get_extent() == [-0.5, 303.5, 303.5, -0.5]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["may attend", "some pairs may", "hidden (tiles of 8 x 8 positions)"]


@once
@pytest.mark.parametrize(("count", "length"), [(1, 4), (2, 60), (5, 24), (16, 60)])
def test_nothing_overlaps(count, length):
    """Labels keep apart from each other and from all else, whatever the number of heads."""
    names = [f"token_with_a_name_{i}" for i in range(length)]
    spec = hm.PerHead({i: hm.Window(i, 0) for i in range(count - 1)})
    figure = hm.plot(spec, num_heads=count, tokens=names)
    assert_apart(figure)
    sizes = {text.get_fontsize() for text in figure.axes[-1].get_xticklabels()}
    assert sizes == {8}
    assert figure.get_figwidth() < 14


def test_names_of_many_heads_in_turns_are_shortened():
    even, odd = tuple(range(0, 32, 2)), tuple(range(1, 31, 2))
    spec = hm.PerHead({even: hm.Window(1, 0), odd: hm.Keys(0, 1)})
    figure = hm.plot(spec, 8, num_heads=32)
    figure.draw_without_rendering()
    boxes = [ax.title.get_window_extent() for ax in figure.axes]
    for i, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert box.count_overlaps(boxes[i + 1 :]) == 0
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["head 0 and 15 more", "head 1 and 14 more", "head 31"]


def assert_apart(figure):
    figure.draw_without_rendering()
    page = figure.bbox
    parts = [figure._suptitle, figure.legends[0]]
    for ax in figure.axes:
        parts += [ax.title, ax.xaxis.label, ax.yaxis.label, ax.patch]
        parts += [*ax.get_xticklabels(), *ax.get_yticklabels()]
    boxes = [p.get_window_extent() for p in parts if p.get_visible() and _says(p)]
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 < box.x1 <= page.x1, parts[i]
        assert page.y0 <= box.y0 < box.y1 <= page.y1, parts[i]
        # (Neighbouring labels may touch by their empty margins.)
        others = [b.padded(-1.5) for b in boxes[i + 1 :]]
        assert box.count_overlaps(others) == 0, parts[i]


def _says(part):
    return not hasattr(part, "get_text") or bool(part.get_text())


@once
def test_colours_differ_in_grey():
    def lightness(colour):  # L* of CIELAB
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return 116 * np.dot([0.2126, 0.7152, 0.0722], linear) ** (1 / 3) - 16

    none, some, every = (lightness(COLOURS[i]) for i in range(3))
    assert none - some > 20
    assert some - every > 40


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
    with pytest.raises(ImportError, match="plot"):
        hm.plot_attention(one_layer(), TOKENS)
    html = hm.PerHead({0: SELF})._repr_html_()
    assert "head 0:\n1 0 0" in html
    assert "<img" not in html


@once
def test_positions_are_whole_numbers():
    (ax,) = hm.plot(CAUSAL, 1, 2, query_offset=1).axes
    for axis, expected in ((ax.yaxis, [1]), (ax.xaxis, [0, 1])):
        low, high = sorted(axis.get_view_interval())
        assert [tick for tick in axis.get_majorticklocs() if low <= tick <= high] == expected


@once
def test_a_picture_of_nothing():
    with pytest.raises(ValueError, match="at least one query and one key"):
        hm.plot(CAUSAL, 0)


# --- plot_attention ------------------------------------------------------------------------------


def drawn_attention(figure, heads):
    """Probabilities and what is allowed, as the figure shows them."""
    shown = [ax.images[0].get_array() for ax in figure.axes[:heads]]
    return np.stack([x.data for x in shown]), ~np.stack([np.ma.getmaskarray(x) for x in shown])


def test_a_masked_model():
    model = one_layer()
    masked = hm.apply_head_masks(model, SENTENCES)
    before = numpy(masked(TOKENS))
    layer = masked.get_layer("attention")
    hook = vars(layer)["_compute_attention"]
    figure = hm.plot_attention(masked, TOKENS, example=1, tokens=NAMES)
    probabilities, allowed = drawn_attention(figure, 4)
    expected = mask_by_loops(SENTENCES, 2, 4, 7, 7, {"token_ids": TOKENS})[1]
    real = TOKENS[1] != 0
    expected = expected & real & real[:, None]
    np.testing.assert_array_equal(allowed, expected)
    assert_close(probabilities.sum(-1)[:, real], 1)
    assert not probabilities[~expected].any()
    x = numpy(model.get_layer("embedding")(TOKENS))[1]
    q, k = (
        np.einsum("td,dhe->the", x, numpy(dense.kernel)) + numpy(dense.bias)
        for dense in (layer._query_dense, layer._key_dense)
    )
    logits = np.where(expected, np.einsum("the,she->hts", q, k) / 3**0.5, -np.inf)[:, real]
    by_hand = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert_close(probabilities[:, real], by_hand, depth=3)
    assert [ax.get_title() for ax in figure.axes[:4]] == [f"head {i}" for i in range(4)]
    assert figure.get_suptitle().endswith(
        "attention, example 1; attention outside the mask: 0 pairs"
    )
    assert figure.get_suptitle().startswith(
        "Head 0: a token sees its own sentence (sentences end with token 9).\nHead 1: itself and"
    )
    # The model is as it was.
    assert vars(layer)["_compute_attention"] is hook
    np.testing.assert_array_equal(numpy(masked(TOKENS)), before)


@once
def test_restricted_heads_come_first():
    masked = hm.apply_head_masks(one_layer(), hm.PerHead({2: CAUSAL, 3: SELF}))
    figure = hm.plot_attention(masked, TOKENS)
    assert [ax.get_title() for ax in figure.axes[:4]] == ["head 2", "head 3", "head 0", "head 1"]
    _, allowed = drawn_attention(figure, 4)
    np.testing.assert_array_equal(allowed[0], np.tri(7) * (TOKENS[0] != 0)[:, None] > 0)
    assert figure.get_suptitle().split("\n")[:3] == [
        "Head 2: a token sees itself and every token before it.",
        "Head 3: itself alone.",
        "Heads 0 and 1: every token.",
    ]
    as_asked = hm.plot_attention(masked, TOKENS, heads=(0, 3))
    assert [ax.get_title() for ax in as_asked.axes[:2]] == ["head 0", "head 3"]


@once
def test_what_lies_outside_would_show(monkeypatch):
    """A layer that does not obey its rule: here, a masked model whose mask is not applied."""
    from keras_headmask.retrofit import call

    masked = hm.apply_head_masks(one_layer(mask_zero=False), hm.Window(before=0, after=0))
    attend = call.attend

    def unmasked(request):
        return attend(dataclasses.replace(request, rule=None, mask=None))

    monkeypatch.setattr(call, "attend", unmasked)
    for tile_size in (1, 2):
        figure = hm.plot_attention(masked, TOKENS, heads="0,2", tile_size=tile_size)
        assert figure.get_suptitle().endswith("outside the mask: 84 pairs")
        crosses = figure.axes[0].lines[0].get_xydata()
        assert len(crosses) == (42 if tile_size == 1 else 15)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == ["hidden by the mask", "attention outside it"]


@once
def test_the_colours_of_attention_are_those_of_the_rule():
    figure = hm.plot_attention(one_layer(mask_zero=False), TOKENS, heads=0)
    shades = figure.axes[0].images[0].cmap
    assert to_rgb(shades(0.0)) == to_rgb(COLOURS[0])
    assert to_rgb(shades(1.0)) == to_rgb(COLOURS[2])
    light = [sum(to_rgb(shades(x))) for x in np.linspace(0, 1, 9)]
    assert light == sorted(light, reverse=True)


@once
def test_without_a_mask_none_is_spoken_of():
    figure = hm.plot_attention(one_layer(mask_zero=False), TOKENS)
    assert figure.legends == []
    assert figure.get_suptitle() == "attention, example 0"
    padded = hm.plot_attention(one_layer(), TOKENS, example=1)
    assert len(padded.legends) == 1
    assert padded.get_suptitle().endswith("outside the mask: 0 pairs")


@once
@pytest.mark.parametrize("name", ["W", "il", "long_name "])
def test_titles_are_not_cut_at_any_dpi(name):
    name *= 90 // len(name)
    inputs = {name: np.ones((1, 3), "int32")}
    many = hm.SameSentence(tuple(range(60)), name)
    for rule in (many, hm.PerHead({(0, 2, 4): many, (1, 3): hm.KeyFlag(name)})):
        figure = hm.plot(rule, 3, num_heads=16, mask_inputs=inputs)
        for dpi in (72, 100, 150, 200):
            figure.set_dpi(dpi)
            figure.draw_without_rendering()
            for text in (figure._suptitle, *(ax.title for ax in figure.axes)):
                box = text.get_window_extent()
                assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def per_head_layer():
    x = keras.Input((None, 8))
    layer = hm.PerHeadMaskedMultiHeadAttention(2, 4, mask_spec=hm.PerHead({1: SELF}), tiled=None)
    return keras.Model(x, layer(x, use_causal_mask=True))


@once
def test_a_layer_with_a_rule_of_its_own():
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    figure = hm.plot_attention(per_head_layer(), x, heads="0-1")
    probabilities, allowed = drawn_attention(figure, 2)
    np.testing.assert_array_equal(allowed[0], np.tri(5, dtype=bool))
    np.testing.assert_array_equal(allowed[1], np.eye(5, dtype=bool))
    assert_close(probabilities[1], np.eye(5))


@once
def test_a_rule_over_a_rule():
    """Both hold: the layer's own, and that of the model."""
    masked = hm.apply_head_masks(per_head_layer(), hm.Window(before=1), existing="and")
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    _, allowed = drawn_attention(hm.plot_attention(masked, x), 2)
    np.testing.assert_array_equal(allowed[0], np.tri(5) - np.tri(5, k=-2) > 0)
    np.testing.assert_array_equal(allowed[1], np.eye(5, dtype=bool))
    masked = hm.apply_head_masks(per_head_layer(), hm.Window(before=1), existing="replace")
    _, allowed = drawn_attention(hm.plot_attention(masked, x), 2)
    np.testing.assert_array_equal(allowed[1], np.tri(5) - np.tri(5, k=-2) > 0)


def test_cross_attention():
    rng = np.random.default_rng(0)
    x, y = keras.Input((None, 8), name="x"), keras.Input((None, 8), name="y")
    out = keras.layers.MultiHeadAttention(2, 4, name="cross", flash_attention=False)(x, y)
    masked = hm.apply_head_masks(keras.Model([x, y], out), hm.Keys(0, 2), layers="cross")
    given = [rng.normal(size=(2, n, 8)).astype("float32") for n in (3, 5)]
    figure = hm.plot_attention(
        masked, given, layer="cross", tokens=(["a", "b", "c"], NAMES[:5]), heads=1
    )
    _, allowed = drawn_attention(figure, 1)
    assert allowed[0].tolist() == [[True, True, False, False, False]] * 3
    assert ticks(figure.axes[0].yaxis) == ["a", "b", "c"]


@once
def test_long_attention_is_tiles():
    x = np.random.default_rng(0).normal(size=(1, 140, 8)).astype("float32")
    figure = hm.plot_attention(per_head_layer(), x, heads="0-1")
    probabilities, allowed = drawn_attention(figure, 2)
    assert probabilities.shape == (2, 35, 35)
    np.testing.assert_array_equal(allowed[0], np.tri(35, dtype=bool))
    assert_close(np.diagonal(probabilities[1]), 1)
    assert figure.axes[-1].get_ylabel() == "largest probability of a tile"


@once
def test_each_layer_by_number_and_path():
    model = stack(2)
    first, second = (hm.plot_attention(model, TOKENS, layer=i, heads=0) for i in (0, 1))
    assert first.get_suptitle().startswith("block_0/")
    assert not np.array_equal(drawn_attention(first, 1)[0], drawn_attention(second, 1)[0])
    by_path = hm.plot_attention(model, TOKENS, layer="block_1", heads=0)
    np.testing.assert_array_equal(drawn_attention(by_path, 1)[0], drawn_attention(second, 1)[0])


@once
def test_each_call_of_a_layer():
    x = keras.Input((None, 8))
    layer = keras.layers.MultiHeadAttention(1, 4, name="shared")
    first = layer(x, x)
    model = keras.Model(x, layer(first, first, use_causal_mask=True))
    given = np.random.default_rng(0).normal(size=(1, 4, 8)).astype("float32")
    for call, expected in enumerate((np.ones((4, 4)), np.tri(4))):
        _, allowed = drawn_attention(hm.plot_attention(model, given, call=call), 1)
        np.testing.assert_array_equal(allowed[0], expected > 0)


def test_rematerialised_layers():
    """JAX runs them on tracers."""
    with keras.RematScope(mode="full"):
        model = one_layer()
    masked = hm.apply_head_masks(model, SENTENCES)
    figure = hm.plot_attention(masked, TOKENS, heads=1)
    _, allowed = drawn_attention(figure, 1)
    np.testing.assert_array_equal(allowed[0], np.tri(7) * (TOKENS[0] != 0)[:, None] > 0)
    assert masked.get_layer("attention")._remat_mode is not None


@once
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": 2}, ValueError, "no self-attention layer 2"),
        ({"layer": "block"}, ValueError, r"must name one attention layer; 'block' names 2"),
        ({"heads": 4}, ValueError, r"heads of the layer, 0 to 3. Received: 4"),
        ({"heads": "0-9"}, ValueError, r"heads of the layer, 0 to 3"),
        ({"heads": []}, ValueError, r"heads of the layer, 0 to 3"),
        ({"example": 2}, ValueError, "below the batch size 2"),
        ({"tokens": ["a"]}, ValueError, "1 for 7 queries"),
        ({"call": 1}, ValueError, "ran 1 times"),
        ({"model": 3}, TypeError, "`model` must be a Keras model"),
    ],
)
def test_refused(arguments, error, message):
    arguments = {"model": stack(2), "inputs": TOKENS} | arguments
    with pytest.raises(error, match=message):
        hm.plot_attention(**arguments)


@once
def test_a_model_that_fails_is_left_as_it_was():
    model = stack(1)
    layer = model.get_layer("block_0").attention
    with pytest.raises(Exception, match=r"(?i)rank|dim|shape|index"):
        hm.plot_attention(model, np.zeros((2, 3, 4, 5), "int32"))
    assert "_compute_attention" not in vars(layer)
    assert vars(layer)["_flash_attention"] == keras.layers.MultiHeadAttention(1, 1)._flash_attention


# --- In a notebook -------------------------------------------------------------------------------


@once
def test_a_spec_shows_itself():
    html = hm.PerHead({0: hm.SameSegment("<ids>"), 1: hm.Window(100, 0)})._repr_html_()
    assert "its own id in `&lt;ids&gt;`" in html
    assert "<ids>" not in html
    html = hm.PerHead({1: hm.Window(100, 0)})._repr_html_()
    assert html.count('<img alt="PerHead({1:') == 1


@pytest.fixture
def shown(monkeypatch):
    """The figures that values show of themselves."""
    from keras_headmask.look import figures

    seen = []
    make = figures.masks_figure
    monkeypatch.setattr(figures, "masks_figure", lambda *a: seen.append(make(*a)) or seen[-1])
    return seen


@once
def test_what_a_spec_shows(shown):
    hm.PerHead({0: hm.Window(100, 0)})._repr_html_()
    hm.Chunk(3)._repr_html_()
    long, short = shown
    assert [ax.get_title() for ax in long.axes] == ["head 0", "all other heads"]
    assert long.get_suptitle() == "over 202 positions"  # so that the window is seen
    assert short.get_suptitle() == "over 12 positions"
    expected = mask_by_loops(hm.Chunk(3), 1, 1, 12, 12, {})[0, 0]
    np.testing.assert_array_equal(cells(short.axes[0]), 2 * expected)


@once
def test_a_spec_does_not_make_up_a_number_of_heads(shown):
    html = hm.PerHead({2: SELF}, default=CAUSAL)._repr_html_()
    assert [ax.get_title() for ax in shown[0].axes] == ["head 2", "all other heads"]
    assert "Head 2: a token sees itself alone.\nAll other heads: itself and every token" in html
    html = hm.PerHead({0: hm.SameSentence(9)})._repr_html_()
    assert "All other heads: every token." in html
    assert len(shown) == 1  # nothing that a full square would show


@once
def test_a_masked_model_shows_itself():
    masked = hm.apply_head_masks(stack(3), {"0-1": SELF, "2": hm.SameSentence(9)})
    html = masked._repr_html_()
    assert html.count("<img") == 1  # what positions decide
    places = [html.index(x) for x in ("block_0/", "block_1/", "Window(before=0", "block_2/")]
    assert places == sorted(places)


@once
def test_a_masked_model_shows_its_own_number_of_heads(shown):
    spec = hm.PerHead({2: SELF})
    html = hm.apply_head_masks(stack(1), spec)._repr_html_()
    assert "Head 2: a token sees itself alone.\nHeads 0, 1 and 3: every token." in html
    assert [ax.get_title() for ax in shown[0].axes] == ["head 2", "heads 0-1, 3"]
    assert [cells(ax).all() for ax in shown[0].axes] == [False, True]
    hm.apply_head_masks(one_layer(), hm.PerHead(dict.fromkeys(range(4), SELF)))._repr_html_()
    assert [ax.get_title() for ax in shown[1].axes] == ["heads 0-3"]


@once
def test_a_rule_is_shown_for_each_number_of_heads():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(12, 8)(ids)
    for heads in (2, 6):
        x = keras.layers.MultiHeadAttention(heads, 3, name=f"of_{heads}")(x, x)
    html = hm.apply_head_masks(keras.Model(ids, x), hm.PerHead({0: SELF}))._repr_html_()
    places = ["of_2</pre>", "Head 1: every token.", "of_6</pre>", "Heads 1 to 5: every token."]
    assert [html.count(place) for place in places] == [1] * 4
    assert sorted(places, key=html.index) == places


@once
@pytest.mark.parametrize("rule", [hm.SameSentence(9), hm.KeyFlag("token_ids")])
def test_a_rule_that_reads_inputs_is_said_and_not_drawn(rule, shown):
    html = hm.apply_head_masks(one_layer(), hm.PerHead({0: rule}))._repr_html_()
    assert "Heads 1 to 3: every token." in html
    assert shown == []


@once
def test_showing_never_raises(monkeypatch):
    from keras_headmask.look import panels

    def broken(*args, **kwargs):
        raise RuntimeError("no picture")

    monkeypatch.setattr(panels, "panels_of", broken)
    assert CAUSAL._repr_html_() is None  # IPython then prints its repr
    masked = hm.apply_head_masks(stack(1), CAUSAL)
    assert "<pre>Window(after=0)</pre>" in masked._repr_html_()


@once
def test_savefig():
    file = io.BytesIO()
    hm.plot(CAUSAL, 2).savefig(file, format="svg")
    assert b"</svg>" in file.getvalue()
