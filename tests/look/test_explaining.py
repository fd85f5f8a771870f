"""`hm.explain` says what runs, where its code is, and how much it computes."""

import keras
import pytest

import keras_headmask as hm
from keras_headmask.attention import kernels

BACKEND = keras.backend.backend()
RULE = hm.PerHead({0: hm.SameSentence(9), 1: hm.Window(3, 0)})
TILES = "loop" if BACKEND == "tensorflow" else "gathered"
ALL = "loop" if BACKEND == "tensorflow" else "fused"


def test_a_rule_at_given_sizes():
    found = hm.explain(hm.Window(31, 0), queries=1024, num_heads=2)
    file = kernels.FILES[getattr(kernels, TILES)]
    assert (found.kernel, found.file) == (TILES, file)
    assert 0.1 < found.share < 0.2
    assert str(found) == f"{TILES} ({file}), {found.share:.1%} of the pairs"
    few = hm.explain(hm.Window(31, 0), queries=64)
    assert (few.kernel, few.share) == (ALL, 1.0)
    assert hm.explain(hm.SameSegment("ids") & hm.MaskInput("m"), queries=8, keys=6).share == 1
    with hm.dense_scope():
        assert hm.explain(hm.Window(31, 0), queries=1024).kernel == "dense"


def test_a_layer_is_explained_as_it_is_called():
    layer = hm.PerHeadMaskedGroupedQueryAttention(8, 4, 2, mask_spec=RULE, dropout=0.5)
    assert hm.explain(layer, queries=30).kernel == ALL
    assert not layer.built
    trained = hm.explain(layer, queries=30, keys=20, training=True)
    assert trained.kernel == ("loop" if BACKEND == "tensorflow" else "dense")
    stock = hm.explain(hm.PerHeadMaskedMultiHeadAttention(4, 8), queries=30)
    assert str(stock) == "its class, all logits at once"


@pytest.mark.parametrize(
    ("what", "sizes", "error", "message"),
    [
        (
            keras.layers.MultiHeadAttention(2, 4),
            (4,),
            TypeError,
            "must be a rule.*explain the rule",
        ),
        (RULE, (0,), ValueError, "`queries`.*at least 1"),
        (RULE, (None,), TypeError, "`queries`"),
        (RULE, (4, 4, 1, 0), ValueError, "`num_heads`.*at least 1"),
    ],
)
def test_refused(what, sizes, error, message):
    with pytest.raises(error, match=message):
        hm.explain(what, *sizes)
