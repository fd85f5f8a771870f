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
from fresh import reload_fresh, run_fresh
from own_attention import RULE, by_oracle, of_rule
from tolerance import assert_close

import keras_headmask as hm
from keras_headmask.retrofit.adapters import adapted, adapter_of, attention

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
OF_EACH_KIND = "Llama|Gemma 2|Gemma 3n|Gemma 4|GPT-NeoX|Falcon|DeBERTa|gpt-oss"


@pytest.fixture(
    params=[pytest.param(x, marks=pytest.mark.long if x.name in ALIKE else ()) for x in FAMILIES],
    ids=str,
)
def family(request):
    return request.param


@pytest.mark.every_day("Llama|Falcon|DeBERTa")
def test_full_is_stock(family):
    stock, _ = models(family)
    full, given = hm.apply_head_masks(stock, hm.Full(), family.layers), data(stock)
    np.testing.assert_array_equal(numpy(full(given)), numpy(stock(given)))
    assert type(full).__name__ == family.backbone


@pytest.mark.every_day(OF_EACH_KIND)
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
    out, _ = layer(*given, cache=empty)  # from position 0, where its class starts by default
    assert_close(numpy(out), wanted, depth=12)


def test_what_an_adapter_says(family):
    _, masked = models(family)
    for layer in attention(masked):
        adapter = adapted(layer)
        assert type(layer).__name__ == family.attention
        assert adapter.num_heads == 4
        assert adapter.num_key_heads == family.key_heads
        assert adapter.head_dim == family.arguments.get("head_dim", 8)


@pytest.mark.every_day("Llama|Falcon|DeBERTa")
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


OLDER = """
import sys, keras_hub
newer = "gemma3", "gemma4", "gpt_oss", "mixtral", "qwen3", "qwen3_5", "smollm3", "t5gemma2"
for name in [x for x in sys.modules if x.startswith("keras_hub.src.models.")]:
    if name.split(".")[3] in newer:
        sys.modules[name] = None  # importing it fails
for name in dir(keras_hub.models):
    if not name.startswith(("Llama", "Backbone", "CausalLM")):
        delattr(keras_hub.models, name)
import keras_headmask as hm
sizes = {"num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32}
llama = keras_hub.models.LlamaBackbone(vocabulary_size=30, intermediate_dim=16, **sizes)
hm.apply_head_masks(llama, hm.PerHead({3: hm.SameSentence(9)}))
task = keras_hub.models.LlamaCausalLM(llama, preprocessor=None)
assert hm.mask_specs(hm.apply_head_masks(task, hm.Window(2, 0)))
"""


@pytest.mark.long  # (half a minute)
def test_families_that_an_older_keras_hub_lacks_are_not_needed():
    run_fresh(OLDER)


@pytest.mark.every_day(OF_EACH_KIND)
def test_a_head_that_is_not_is_refused(family):
    """A rule names query heads, of which there are four, whatever the keys have."""
    stock, _ = models(family)
    heads = "4 heads"
    if family.key_heads != 4:
        heads = f"4 query heads, .* {family.key_heads} of keys and values"
    with pytest.raises(ValueError, match=rf"\({family.attention}\): .*{heads}"):
        hm.apply_head_masks(stock, hm.PerHead({4: hm.Window(1, 1)}), family.layers)


ONE_OF_EACH_HOOK = [x for x in FAMILIES if x.name in ("Llama", "Falcon", "DeBERTa v3")]


@pytest.mark.parametrize("family", ONE_OF_EACH_HOOK, ids=str)
@pytest.mark.every_day("Llama")
def test_rules_of_one_layer_are_joined(family):
    stock, masked = models(family)
    first = hm.apply_head_masks(stock, hm.PerHead({0: hm.Window(before=2, after=0)}))
    rest = hm.PerHead({1: hm.Window(0, 0), 3: ~hm.Window(before=1)})
    inner = keras.Model(first.input, first(first.input))
    outer = hm.apply_head_masks(inner, rest, existing="and")
    assert_close(numpy(outer(data(outer))), numpy(masked(data(masked))), depth=3)


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
@pytest.mark.every_day("Llama")
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


# --- Generation with a cache ----------------------------------------------------------------------

TASKS = {"Llama": "LlamaCausalLM", "Gemma 2": "GemmaCausalLM", "Falcon": "FalconCausalLM"}


def task_of(name):
    family = next(x for x in FAMILIES if x.name == name)
    backbone = copy.deepcopy(models(family)[0])
    table = backbone.token_embedding.embeddings
    table.assign(0.1 * table)  # else tied embeddings repeat the last token
    return getattr(keras_hub.models, TASKS[name])(backbone=backbone, preprocessor=None)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.every_day("Gemma 2")
def test_the_cache_index_is_the_offset(name):
    """Token by token, the logits of each step are those of the whole forward."""
    masked = hm.apply_head_masks(task_of(name), RULE)
    ids = data()["token_ids"]
    whole = numpy(masked({"token_ids": ids, "padding_mask": np.ones_like(ids)}))
    key_heads = next(x.key_heads for x in FAMILIES if x.name == name)
    cache = keras.ops.zeros((2, masked.backbone.num_layers, 2, LENGTH, key_heads, 8))
    for position in range(LENGTH):
        index = keras.ops.convert_to_tensor(position, "int32") if position % 2 else position
        logits, _, cache = masked.call_with_cache(ids[:, position : position + 1], cache, index)
        assert_close(numpy(logits)[:, 0], whole[:, position], depth=12)


# --- Against Hugging Face -------------------------------------------------------------------------

TINY = decoders.HUGGING_FACE | {
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",  # which takes additive masks of rank 4 as they are
}
NEAR = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-4, dtype=bool)
GEMMA_2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,  # KerasHub's decoder block takes no other than the head size
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_4 = {
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
}
# Kind, backbone, config, and what each type of layer adds to the causal mask.
PEERS = {
    "Llama": ("Llama", "LlamaBackbone", {}, None),
    "Mistral": ("Mistral", "MistralBackbone", {"sliding_window": 4, "head_dim": 8}, NEAR),
    "Qwen 2": ("Qwen2", "QwenBackbone", {}, {"full_attention": True}),
    "Qwen 3": ("Qwen3", "Qwen3Backbone", {"head_dim": 8}, {"full_attention": True}),
    "SmolLM 3": (
        "SmolLM3",
        "SmolLM3Backbone",
        {"no_rope_layers": [1, 0], "pad_token_id": 0},
        {"full_attention": True},
    ),
    "Gemma": ("Gemma", "GemmaBackbone", {"head_dim": 16}, None),
    "Gemma 2": (
        "Gemma2",
        "GemmaBackbone",
        GEMMA_2,
        {"full_attention": True, "sliding_attention": NEAR},
    ),
    "Gemma 4": (
        "Gemma4Text",
        "Gemma4Backbone",
        GEMMA_4,
        {"full_attention": True, "sliding_attention": NEAR},
    ),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.every_day("Llama|Gemma 2")
def test_windows_on_three_heads_are_those_of_hugging_face(name, tmp_path):
    """To 3 times what the conversion differs by without a rule, or 2e-5."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, backbone, config, types_of_layers = PEERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | config)
    peer = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in peer.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    peer.save_pretrained(tmp_path)
    stock = getattr(keras_hub.models, backbone).from_preset(str(tmp_path))
    windows = hm.PerHead({0: hm.Window(before=2), 1: hm.Window(0, 0), 3: hm.Window(before=1)})
    masked, ids = hm.apply_head_masks(stock, windows), data()["token_ids"]

    def of_peer(reaches):
        i, j = np.indices((LENGTH, LENGTH))
        allowed = np.stack([(j <= i) & (i - j <= reach) for reach in reaches])

        def additive(extra):
            mask = np.where(allowed & (True if extra is None else extra), 0.0, -1e9)
            return torch.tensor(np.tile(mask[None], (2, 1, 1, 1)), dtype=torch.float32)

        several = isinstance(types_of_layers, dict)
        mask = (
            {name: additive(extra) for name, extra in types_of_layers.items()}
            if several
            else additive(types_of_layers)
        )
        with torch.no_grad():
            out = peer.model(
                input_ids=torch.tensor(ids).long(), attention_mask=mask, use_cache=False
            )
        return out.last_hidden_state.numpy()

    given = {"token_ids": ids, "padding_mask": np.ones_like(ids)} | positions(stock)
    bare = abs(numpy(stock(given)) - of_peer([LENGTH] * 4)).max()
    differ = abs(numpy(masked(given)) - of_peer([2, 0, LENGTH, 1])).max()
    assert bare < 1e-2
    assert differ < max(3 * bare, 2e-5), f"{differ} under the rule, {bare} without"
    assert abs(numpy(masked(given)) - numpy(stock(given))).max() > 1e-2


def test_gpt_oss_attends_as_that_of_hugging_face_does():
    """The layer alone: KerasHub's converter takes experts of four bits, which nobody trains."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from keras_hub.src.models.gpt_oss.gpt_oss_attention import GptOssAttention
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**TINY | {"head_dim": 8, "rope_parameters": rope})
    peer = theirs.GptOssAttention(config, 1).eval()
    layer = GptOssAttention(4, 2, head_dim=8, sliding_window=None)
    x, mask = keras.Input((LENGTH, 32)), keras.Input((LENGTH, LENGTH), dtype="int32")
    model = randomised(keras.Model([x, mask], layer(x, attention_mask=mask)), 0.3)
    dense = {
        f"{name[0]}_proj": getattr(layer, f"{name}_dense")
        for name in ("query", "key", "value", "output")
    }
    with torch.no_grad():
        peer.sinks.copy_(torch.tensor(numpy(layer.sinks)))
        for name, part in dense.items():
            theirs_of_it = getattr(peer, name)
            theirs_of_it.bias.copy_(torch.tensor(numpy(part.bias).ravel()))
            kernel = numpy(part.kernel).reshape(theirs_of_it.weight.T.shape)
            theirs_of_it.weight.copy_(torch.tensor(kernel.T))
    given = normal(2, LENGTH, 32)
    causal = np.tri(LENGTH, dtype=bool)
    additive = np.where(ALLOWED & causal, 0.0, -1e9)[None].repeat(2, 0).astype("float32")
    states = torch.tensor(given)
    with torch.no_grad():
        turns = theirs.GptOssRotaryEmbedding(config)(states, torch.arange(LENGTH)[None])
        wanted, _ = peer(states, turns, torch.tensor(additive))
    masked = hm.apply_head_masks(model, RULE)
    got = numpy(masked([given, causal[None].repeat(2, 0).astype("int32")]))
    assert_close(got, wanted.numpy(), depth=12)


# --- The page -------------------------------------------------------------------------------------


def test_the_page_has_the_table():
    text = decoders.PAGE.read_text(encoding="utf-8")
    assert decoders.written(text) == text
