"""KerasHub's families whose attention is no class of Keras, held to one contract under rules.

The oracle is a family's own code with another softmax: one in NumPy, under the mask of each query
head, drawn by plain loops.
"""

import copy
import sys
import types

import decoders
import keras
import numpy as np
import pytest
from backbone_calls import randomised
from contract import normal, numpy
from decoders import FAMILIES
from fresh import reload_fresh
from own_attention import RULE, by_oracle, of_rule
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.adapters import adapter_of, attention
from keras_headmask.retrofit.frame import opened

keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)  # (or made for another Keras)
LENGTH = 8
ALLOWED = of_rule(LENGTH)
WITH_SINK = np.pad(ALLOWED, ((0, 0), (0, 0), (0, 1)), constant_values=True)
MASKS = {(LENGTH, LENGTH): ALLOWED, (LENGTH, LENGTH + 1): WITH_SINK}  # gpt-oss' sinks are behind


_made = {}


def models(family):
    """The stock model and the masked one, made once."""
    if family.name not in _made:
        keras.utils.set_random_seed(0)
        stock = randomised(getattr(keras_hub.models, family.backbone)(**family.arguments), 0.3)
        _made[family.name] = stock, hm.apply_head_masks(stock, RULE, family.layers)
    return _made[family.name]


def data(model=None):
    ids = np.random.default_rng(1).integers(2, 30, (2, LENGTH)).astype("int32")
    mask = np.ones((2, LENGTH), "int32")
    mask[1, LENGTH - 2 :] = 0
    return {"token_ids": ids, "padding_mask": mask} | positions(model)


def positions(model):
    """What Gemma 4 alone reads beside."""
    names = () if model is None else {tensor.name for tensor in model.inputs}
    ids = np.tile(np.arange(LENGTH, dtype="int32"), (2, 1))
    return {"position_ids": ids} if "position_ids" in names else {}


ALIKE = "Mistral", "Qwen 2", "Phi-3", "Gemma"  # what is special in them, one of the others has


# What is true of one of these is true of the others, since they share an adapter.


@pytest.fixture(
    params=[pytest.param(x, marks=pytest.mark.long if x.name in ALIKE else ()) for x in FAMILIES],
    ids=str,
)
def family(request):
    return request.param


def test_full_is_stock(family):
    stock, _ = models(family)
    full, given = hm.apply_head_masks(stock, hm.Full(), family.layers), data(stock)
    np.testing.assert_array_equal(numpy(full(given)), numpy(stock(given)))
    assert type(full).__name__ == family.backbone


def test_a_rule_is_the_familys_own_attention_under_a_mask(family, monkeypatch):
    stock, masked = models(family)
    given = data(stock)
    wanted = by_oracle(monkeypatch, stock, given, MASKS)
    assert abs(wanted - numpy(stock(given))).max() > 1e-2
    assert_close(numpy(masked(given)), wanted, depth=12)
    if keras.backend.backend() == "tensorflow":  # elsewhere Qwen's fused kernel ignores its window
        everything = {shape: np.ones_like(mask) for shape, mask in MASKS.items()}
        wanted = by_oracle(monkeypatch, stock, given, everything)
        assert_close(numpy(stock(given)), wanted, depth=12)


def test_gemmas_attention_without_a_backbone(monkeypatch):
    """Of a scale that no backbone has, and bidirectional windows."""
    from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

    more = {"use_sliding_window_attention": True, "use_bidirectional_attention": True}
    layer = CachedGemma3Attention(
        8, 4, 2, sliding_window_size=4, query_head_dim_normalize=False, logit_soft_cap=2.0, **more
    )
    x, mask = keras.Input((LENGTH, 64)), keras.Input((LENGTH, LENGTH), dtype="int32")
    model = randomised(keras.Model([x, mask], layer(x, attention_mask=mask)), 0.3)
    given = normal(2, LENGTH, 64), np.ones((2, LENGTH, LENGTH), "int32")
    wanted = by_oracle(monkeypatch, model, given, MASKS)
    masked = hm.apply_head_masks(model, RULE, copy=False)
    assert_close(numpy(masked(given)), wanted, depth=12)
    empty = (keras.ops.zeros((2, LENGTH, 2, 8)),) * 2
    with opened({masked: {}}):
        out, _ = layer(*given, cache=empty)  # from position 0, where its class starts by default
    assert_close(numpy(out), wanted, depth=12)


def test_a_copy_obeys_and_trains(family):
    stock, masked = models(family)
    given = data(masked)
    np.testing.assert_array_equal(numpy(hm.unmasked(masked)(given)), numpy(stock(given)))
    masked = copy.deepcopy(masked)
    np.testing.assert_array_equal(numpy(masked(given)), numpy(models(family)[1](given)))
    assert set(hm.mask_specs(masked).values()) == {RULE}
    masked.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True, jit_compile=False)
    before = [numpy(w) for w in masked.trainable_weights]
    masked.train_on_batch(given, np.zeros((2, LENGTH, 32), "float32"))
    after = [numpy(w) for w in masked.trainable_weights]
    assert all(np.isfinite(w).all() for w in after)
    assert sum((a != b).any() for a, b in zip(after, before, strict=True)) > len(after) / 2


def test_a_head_that_is_not_is_refused(family):
    """A rule names query heads, of which there are four, whatever the keys have."""
    stock, _ = models(family)
    heads = "4 heads"
    if family.key_heads != 4:
        heads = f"4 query heads, .* {family.key_heads} of keys and values"
    with pytest.raises(ValueError, match=rf"\({family.attention}\): .*{heads}"):
        hm.apply_head_masks(stock, hm.PerHead({4: hm.Window(1, 1)}), family.layers)


@pytest.mark.long  # (`test_examples` does it every day)
def test_all_reload_in_a_fresh_process(tmp_path):
    made = {family.name: models(family)[1] for family in FAMILIES}
    reload_fresh(tmp_path, {k: (x, data(x)) for k, x in made.items()}, "keras_hub")


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", decoders.REFUSED, ids=lambda entry: entry.name)
def test_other_families_are_refused_by_name(entry):
    model = getattr(keras_hub.models, entry.backbone)(**entry.arguments)
    with pytest.raises(ValueError, match=rf"\({entry.attention}\)"):
        hm.apply_head_masks(model, hm.Full())


def test_linear_attention_is_refused_by_name():
    stock, masked = models(next(x for x in FAMILIES if x.name == "Qwen 3.5"))
    others = r"name the others in `layers`: 'transformer_layer_1/self_attention'"
    of_layer = r"'transformer_layer_0/linear_attn' \(Qwen3_5GatedDeltaNet\)"
    with pytest.raises(ValueError, match=rf"{of_layer} may attend without the rule.*{others}"):
        hm.apply_head_masks(stock, hm.Full())
    with pytest.raises(ValueError, match=rf"{of_layer}, which 'layer_0' names, may attend"):
        hm.apply_head_masks(stock, hm.Full(), "layer_0")
    lines = []
    hm.summary_masks(masked, lines.append)
    assert any(line.startswith("-") and "Qwen3_5GatedDeltaNet" in line for line in lines)


def test_a_subclass_that_computes_by_itself_is_not_taken_for_the_class():
    from keras_hub.src.models.llama.llama_attention import LlamaAttention

    class Named(LlamaAttention):
        """Nothing of its own."""

    class Doubled(LlamaAttention):
        def _masked_softmax(self, attention_scores, attention_mask=None):
            return 2 * super()._masked_softmax(attention_scores, attention_mask)

    assert adapter_of(Named(2, 1)) is not None

    class Crossed(LlamaAttention):
        def call(self, hidden_states, memory, **kwargs):
            return super().call(hidden_states + memory, **kwargs)

    assert adapter_of(Doubled(2, 1)) is None
    assert adapter_of(Crossed(2, 1)) is None


IN_VLLM = [x for x in FAMILIES if x.name in ("Llama", "Mistral", "Qwen 2", "Qwen 3", "Gemma")]


@pytest.mark.parametrize("family", IN_VLLM, ids=str)
def test_a_class_that_returns_before_the_hook_is_refused(family, monkeypatch):
    masked = hm.apply_head_masks(models(family)[0], RULE)
    layer = attention(masked)[0]
    module = sys.modules[adapter_module(layer)]
    context = types.SimpleNamespace(paged_attention_func=print)
    monkeypatch.setattr(module, "get_vllm_context", lambda: context)
    cls = getattr(module, family.attention)
    monkeypatch.setattr(cls, "_compute_vllm_attention", lambda self, x, cache, vllm_context: x)
    with pytest.raises(RuntimeError, match=r"was not used in this call.*inside vLLM"):
        masked(data())


def adapter_module(layer):
    """The module of a masked layer's stock class."""
    return type(layer)._stock_class.__module__


# --- The page -------------------------------------------------------------------------------------


def test_the_page_has_the_table():
    text = decoders.PAGE.read_text(encoding="utf-8")
    assert decoders.written(text) == text
