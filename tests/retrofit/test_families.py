"""KerasHub's backbones, held to one contract under rules, or refused by name.

For those whose attention is no class of Keras the oracle is a family's own code with another
softmax: one in NumPy, under the mask of each query head, drawn by plain loops. The sequences of an
encoder and its decoder have different lengths, so the logits of each kind of attention have their
own shape.
"""

import copy
import inspect
import sys
import types

import backbones
import decoders
import keras
import numpy as np
import pytest
from backbone_calls import ANSWER, TEXT, built, called, data, given_to, randomised
from backbones import COVERED
from contract import normal, numpy
from decoders import ENCODER_DECODERS, FAMILIES, T5_GEMMA
from fresh import reload_fresh
from own_attention import RULE, by_oracle, drawn
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit import observe
from keras_headmask.retrofit.adapters import adapter_of, attention
from keras_headmask.retrofit.find import Found
from keras_headmask.retrofit.frame import opened

keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)  # (or made for another Keras)
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask information.*")  # T5's own
OF_CROSS = hm.PerHead({1: hm.Window(before=1, after=2), 2: hm.Keys(0, stop=3), 3: hm.Nothing()})
ALL = {(n, m): np.ones((4, n, m), bool) for n in (TEXT, ANSWER) for m in (TEXT, ANSWER, TEXT + 1)}
SELF = ALL | {(n, n): drawn(RULE, n, n) for n in (TEXT, ANSWER)}
# (gpt-oss' sinks are behind.)
SELF[TEXT, TEXT + 1] = np.pad(SELF[TEXT, TEXT], ((0, 0), (0, 0), (0, 1)), constant_values=True)
CROSS = ALL | {(ANSWER, TEXT): drawn(OF_CROSS, ANSWER, TEXT)}


def each(*families, long=()):
    """Cases for `families`; those whose names are in `long` only in `make test-all`."""
    marks = dict.fromkeys(long, pytest.mark.long)
    cases = [pytest.param(x, marks=marks.get(x.name, ()), id=x.name) for x in families]
    return pytest.mark.parametrize("family", cases)


# Of KerasHub's encoder layer, as BERT and ALBERT.
LIKE_BERT = "RobertaBackbone", "XLMRobertaBackbone", "DistilBertBackbone", "ElectraBackbone"
ALIKE = "Mistral", "Qwen 2", "Phi-3", "Gemma"  # what is special in them, one of the others has
OF_TWO = tuple(family.name for family in ENCODER_DECODERS)
_made = {}


def models(family):
    """The stock model and the masked one, made once."""
    if family.name not in _made:
        keras.utils.set_random_seed(0)
        stock = randomised(built(family.backbone, family.arguments), 0.3)
        rule = hm.Chunk(4) if family in COVERED else RULE
        _made[family.name] = stock, hm.apply_head_masks(stock, rule, family.layers)
    return _made[family.name]


def outputs(model):
    return called(model, data(model))


def by_own_code(monkeypatch, stock, allowed, **how):
    made = by_oracle(monkeypatch, stock, data(stock), allowed, **how)
    return made if isinstance(made, dict) else {"only": made}


def check(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_close(got[name], wanted[name], depth=12)


@each(*FAMILIES, *ENCODER_DECODERS, *COVERED, long=ALIKE)
def test_full_is_stock(family):
    stock, _ = models(family)
    full = hm.apply_head_masks(stock, hm.Full(), family.layers)
    for name, output in outputs(full).items():
        np.testing.assert_array_equal(output, outputs(stock)[name])
    assert type(full).__name__ == family.backbone


@each(*COVERED, long=LIKE_BERT)
def test_nothing_leaks_through_a_rule(family):
    stock, masked = models(family)
    for leak in family.leaks:
        given = data(stock)
        changed = {key: value.copy() for key, value in given.items()}
        changed[leak.input][leak.place] = 1 if "token" in leak.input else 3.0

        def moved(model, leak=leak, given=given, changed=changed):
            before, after = (called(model, x) for x in (given, changed))
            output = leak.output if leak.output in before else "only"
            return abs(before[output] - after[output])[0, leak.rows].max()

        assert moved(stock) > 1e-3  # else the check could not fail
        assert moved(masked) == 0


@each(*FAMILIES, *ENCODER_DECODERS, long=ALIKE)
def test_a_rule_is_the_familys_own_attention_under_a_mask(family, monkeypatch):
    stock, masked = models(family)
    wanted, of_stock = by_own_code(monkeypatch, stock, SELF), outputs(stock)
    check(outputs(masked), wanted)
    assert all(abs(wanted[name] - x).max() > 1e-2 for name, x in of_stock.items())
    if keras.backend.backend() == "tensorflow":  # elsewhere Qwen's fused kernel ignores its window
        check(of_stock, by_own_code(monkeypatch, stock, ALL))


@each(*ENCODER_DECODERS)
def test_cross_attention_under_a_rule(family, monkeypatch):
    stock, _ = models(family)
    wanted = by_own_code(monkeypatch, stock, CROSS)
    check(outputs(hm.apply_head_masks(stock, OF_CROSS, layers="cross")), wanted)
    for name, output in outputs(stock).items():
        assert (abs(wanted[name] - output).max() > 1e-2) == ("decoder" in name)


@each(*ENCODER_DECODERS)
def test_a_rule_in_one_layer_alone(family, monkeypatch):
    """What one layer hands to the next, T5's bias, holds nothing of its rule."""
    stock, _ = models(family)
    wanted = by_own_code(monkeypatch, stock, SELF, first_alone=True)
    check(outputs(hm.apply_head_masks(stock, RULE, layers=0)), wanted)


@each(next(x for x in FAMILIES if x.name == "Falcon"))  # whose own code takes them one by one
def test_rules_of_a_model_and_of_one_inside_are_joined(family):
    stock, masked = models(family)
    around, more = keras.Model(masked.input, masked(masked.input)), hm.Window(before=1)
    both = hm.apply_head_masks(around, more, existing="and")
    check(outputs(both), outputs(hm.apply_head_masks(stock, RULE & more)))


@pytest.mark.long
def test_the_encoder_of_t5gemma_2_obeys(monkeypatch):
    """Its decoder is refused (see `decoders.REFUSED`) and stays as it is."""
    stock = randomised(keras_hub.models.T5Gemma2Backbone(**T5_GEMMA), 0.3)
    wanted = by_own_code(monkeypatch, stock, SELF)
    check(outputs(hm.apply_head_masks(stock, RULE, layers="encoder")), wanted)


def test_gemmas_attention_without_a_backbone(monkeypatch):
    """Of a scale that no backbone has, and bidirectional windows."""
    from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention

    more = {"use_sliding_window_attention": True, "use_bidirectional_attention": True}
    layer = CachedGemma3Attention(
        8, 4, 2, sliding_window_size=4, query_head_dim_normalize=False, logit_soft_cap=2.0, **more
    )
    x, mask = keras.Input((TEXT, 64)), keras.Input((TEXT, TEXT), dtype="int32")
    model = randomised(keras.Model([x, mask], layer(x, attention_mask=mask)), 0.3)
    given = normal(2, TEXT, 64), np.ones((2, TEXT, TEXT), "int32")
    wanted = by_oracle(monkeypatch, model, given, SELF)
    masked = hm.apply_head_masks(model, RULE, copy=False)
    assert_close(numpy(masked(given)), wanted, depth=12)
    empty = (keras.ops.zeros((2, TEXT, 2, 8)),) * 2
    with opened({masked: {}}):
        out, _ = layer(*given, cache=empty)  # from position 0, where its class starts by default
    assert_close(numpy(out), wanted, depth=12)


@each(*FAMILIES, *ENCODER_DECODERS, long=(*ALIKE, *OF_TWO))
def test_a_copy_obeys_and_trains(family):
    stock, masked = models(family)
    twin, bare = copy.deepcopy(masked), hm.unmasked(masked)
    for model, wanted in ((twin, masked), (bare, stock)):
        for name, output in outputs(model).items():
            np.testing.assert_array_equal(output, outputs(wanted)[name])
    assert set(hm.mask_specs(twin).values()) == {RULE}
    twin.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True, jit_compile=False)
    before = [numpy(w) for w in twin.trainable_weights]
    zeros = keras.tree.map_structure(keras.ops.zeros_like, twin(data(twin)))
    twin.train_on_batch(data(twin), zeros)
    after = [numpy(w) for w in twin.trainable_weights]
    assert all(np.isfinite(w).all() for w in after)
    assert sum((a != b).any() for a, b in zip(after, before, strict=True)) > len(after) / 2


@each(*FAMILIES, *ENCODER_DECODERS, long=ALIKE)
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
    made = {x.name: models(x)[1] for x in (*FAMILIES, *ENCODER_DECODERS, *COVERED)}
    reload_fresh(tmp_path, {k: (x, given_to(x)) for k, x in made.items()}, "keras_hub")


# --- What runs with the model ---------------------------------------------------------------------


@pytest.mark.long
@each(*ENCODER_DECODERS)
def test_what_an_observer_sees(family):
    """Probabilities of each head: 0 where hidden, of sum 1 or 0; with a rule and without."""
    stock, masked = models(family)
    hidden = ~data(stock)["encoder_padding_mask"].astype(bool)[:, None, None, :]
    for model in (masked, stock):
        for number, length in ((1, TEXT), (3, ANSWER)):
            seen = observe.observe(Found(model), data(model), number)
            assert seen.probabilities.shape == (2, 4, length, length)
            assert not seen.probabilities[~seen.allowed].any()
            if model is masked:
                assert not (seen.allowed & ~SELF[length, length]).any()
            if length == TEXT:
                assert not (seen.allowed & hidden).any()
            total = seen.probabilities[seen.allowed.any(-1)].sum(-1)
            np.testing.assert_allclose(total, 1, rtol=1e-5)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", decoders.REFUSED, ids=lambda entry: entry.name)
def test_other_families_are_refused_by_name(entry):
    model = getattr(keras_hub.models, entry.backbone)(**entry.arguments)
    with pytest.raises(ValueError, match=rf"\({entry.attention}\)"):
        hm.apply_head_masks(model, hm.Full())


@pytest.mark.parametrize("name", backbones.WITHOUT_ATTENTION)
def test_a_backbone_without_attention_is_refused(name):
    model = built(name, backbones.WITHOUT_ATTENTION[name])
    with pytest.raises(ValueError, match="holds no self-attention"):
        hm.apply_head_masks(model, hm.Full())


def test_no_decoder_of_keras_hub_is_missing():
    """Each backbone of a model that generates text is reached by a rule, or refused with why."""
    tasks = keras_hub.models.CausalLM, keras_hub.models.Seq2SeqLM
    classes = [x for x in vars(keras_hub.models).values() if inspect.isclass(x)]
    decoding = {x.backbone_cls for x in classes if issubclass(x, tasks)} - {None}
    entries = *COVERED, *FAMILIES, *ENCODER_DECODERS, *decoders.REFUSED
    names = {entry.backbone for entry in entries} | {*backbones.WITHOUT_ATTENTION}
    listed = tuple(getattr(keras_hub.models, name) for name in names)
    missing = [x.__name__ for x in decoding if not issubclass(x, listed)]
    assert not missing, "add them to `decoders` or `backbones` in tests/support"
    assert len(decoding) > 25
    assert all(entry.why for entry in decoders.REFUSED)


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


@each(*IN_VLLM)
def test_a_class_that_returns_before_the_hook_is_refused(family, monkeypatch):
    masked = hm.apply_head_masks(models(family)[0], RULE)
    module = sys.modules[type(attention(masked)[0])._stock_class.__module__]
    context = types.SimpleNamespace(paged_attention_func=print)
    monkeypatch.setattr(module, "get_vllm_context", lambda: context)
    cls = getattr(module, family.attention)
    monkeypatch.setattr(cls, "_compute_vllm_attention", lambda self, x, cache, vllm_context: x)
    with pytest.raises(RuntimeError, match=r"was not used in this call.*inside vLLM"):
        masked(data(masked))


# --- The page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [backbones, decoders])
def test_the_page_has_the_table(tables):
    assert tables.page() == tables.PAGE.read_text(encoding="utf-8")
