"""KerasHub's decoders, whose attention has other hooks than Keras' own: all tools read it."""

import keras
import numpy as np
import pytest
from decoders import FAMILIES

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
CAUSAL = hm.recipes.causal()
RULE = hm.PerHead({0: hm.Window(2, 0), 1: hm.Window(0, 0), 2: hm.Nothing()})
IDS = np.random.default_rng(1).integers(2, 30, (2, 10)).astype("int32")
TEXTS = {"token_ids": IDS, "padding_mask": np.ones((2, 10), "int32")}
TEXTS["padding_mask"][1, 8:] = 0
POSITIONS = {"position_ids": np.tile(np.arange(10), (2, 1))}
NAMED = {str(family): family for family in FAMILIES}
OF_EACH_HOOK = "Llama", "Falcon", "DeBERTa v3"
CASES = [pytest.param(NAMED[name], None, id=f"stock-{name}") for name in OF_EACH_HOOK]
for name, family in NAMED.items():
    marks = () if name in OF_EACH_HOOK else pytest.mark.long
    CASES.append(pytest.param(family, RULE, id=f"masked-{name}", marks=marks))


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_measured_and_sealed(family, rule):
    model = getattr(keras_hub.models, family.backbone)(**family.arguments)
    model = model if rule is None else hm.apply_head_masks(model, rule, family.layers)
    texts = TEXTS | (POSITIONS if "Gemma 4" in family.name else {})
    report = hm.find_leaks(model, texts, hm.Full() if "DeBERTa" in family.name else CAUSAL)
    assert not report
    assert report.tried == report.pairs > 0
    found = hm.measure_heads(model, texts, layers=family.layers)
    assert found.tokens == 18
    allowed = TEXTS["padding_mask"].astype(bool)[:, None, None]
    if rule is not None:
        codes = {finding.code for finding in hm.lint(model, mask_inputs=texts)}
        assert "sees-padding" not in codes
        allowed = allowed & keras.ops.convert_to_numpy(hm.make_mask(rule, 10, 10, 4))
        title = hm.plot_attention(model, texts, layer=0).get_suptitle()
        assert "attention outside the mask: 0 pairs" in " ".join(title.split())
    for probabilities in hm.attention_probabilities(model, texts, layers=family.layers).values():
        assert not probabilities[~np.broadcast_to(allowed, probabilities.shape)].any()
        sums = probabilities.sum(-1)[:, :, :8]  # of queries that are no padding
        sees = np.ones(4) if rule is None else np.array([1, 1, 0, 1])
        sees = np.broadcast_to(sees[:, None], sums.shape)
        if "sinks" in family.keeps:  # which take the rest
            assert ((sums < 1) & ((sums > 0) == (sees > 0))).all()
        else:
            np.testing.assert_allclose(sums, sees, atol=1e-5)
    if rule is not None:
        assert (found.scores["self"][:, 1] == 1).all()
        assert np.isnan(found.scores["self"][:, 2]).all()
