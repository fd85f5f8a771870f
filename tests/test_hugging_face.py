"""`hm.hugging_face`: models of transformers under a rule, against masks made by hand."""

import copy
import warnings

import keras
import numpy as np
import pytest
from fresh import run_fresh

import keras_headmask as hm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
hf = hm.hugging_face

is_torch = keras.backend.backend() == "torch"
pytestmark = pytest.mark.skipif(not is_torch, reason="needs Keras on PyTorch")

END, WORDS, LENGTH, HEADS = 9, 50, 12, 4
RULE = hm.PerHead({0: hm.SameSentence(END), 1: hm.Window(2, 1), 2: hm.Keys(0, 2) | hm.Window(1, 1)})
POSITIONS = hm.PerHead({1: hm.Window(2, 1), 2: hm.Keys(0, 2) | hm.Window(1, 1)})
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS}
SIZES |= {"intermediate_size": 32}
TEXT = SIZES | {"vocab_size": WORDS, "max_position_embeddings": 64}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "vocab_size": WORDS}
SLIDING = GROUPED | SPECIAL | {"sliding_window": 5}
OF_TWO = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1}
OF_TWO |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")} | SPECIAL
OF_TWO |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
SOUND = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": HEADS, "hidden_dim": 32, "vocab_size": WORDS}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": HEADS, "n_positions": 64} | SPECIAL
T5 = {"d_model": 32, "num_layers": 2, "num_heads": HEADS, "d_kv": 8, "d_ff": 32} | SPECIAL

# By name: the class of the model, the name of its config, and its sizes.
ENCODERS = {
    "BERT": ("BertModel", "Bert", TEXT),
    "DistilBERT": ("DistilBertModel", "DistilBert", DISTILBERT),
}
DECODERS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2", GPT2),
    "Llama": ("LlamaForCausalLM", "Llama", GROUPED | SPECIAL),
    "Mistral": ("MistralForCausalLM", "Mistral", SLIDING),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3", GROUPED | SPECIAL),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2", SLIDING | {"attn_logit_softcapping": 2.0}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3Text", SLIDING | KINDS),
    "gpt-oss": ("GptOssForCausalLM", "GptOss", SLIDING | {"num_local_experts": 4}),
}
OTHERS = {
    "ViT": ("ViTModel", "ViT", SIZES | {"image_size": 16, "patch_size": 4}),
    "Whisper": ("WhisperForConditionalGeneration", "Whisper", OF_TWO | SOUND),
    "BART": ("BartForConditionalGeneration", "Bart", OF_TWO | {"forced_eos_token_id": None}),
    "T5": ("T5ForConditionalGeneration", "T5", T5 | {"decoder_start_token_id": 1}),
}


def made(name):
    torch.manual_seed(0)
    cls, config, sizes = (ENCODERS | DECODERS | OTHERS)[name]
    model = getattr(transformers, cls)(getattr(transformers, f"{config}Config")(**sizes)).eval()
    with torch.no_grad():  # far from the even attention that small weights give
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def texts():
    ids = np.random.default_rng(3).integers(10, WORDS, (2, LENGTH))
    ids[0, [3, 7]] = ids[1, 5] = END
    return torch.tensor(ids)


def by_hand(ids):
    """What RULE allows, `(B, H, T, T)`, by a loop."""
    ids = np.asarray(ids)
    mask = np.ones((len(ids), HEADS, ids.shape[1], ids.shape[1]), bool)
    for b, _, i, j in np.ndindex(len(ids), 1, *mask.shape[2:]):
        is_one = END not in ids[b, min(i, j) : max(i, j)]
        mask[b, :3, i, j] = is_one, -2 <= j - i <= 1, j < 2 or -1 <= j - i <= 1
    return mask


def additive(mask):
    return torch.where(torch.as_tensor(mask), 0.0, torch.finfo(torch.float32).min)


def unmasked(model):
    """The model under masks made by hand, which "eager" attention adds."""
    hf.unmask(model).set_attn_implementation("eager")
    return model


def apart(a, b, where=None):
    difference = (a.detach() - b.detach()).abs()
    return float((difference if where is None else difference[where]).max())


def check(found, wanted, plain, where=None):
    assert apart(found, wanted, where) < 2e-5
    assert apart(found, plain, where) > 1e-2  # the rule does something


def check_generated(model, ids, **how):
    """With a cache as without."""
    how |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, wanted = (model.generate(ids, use_cache=use, **how) for use in (True, False))
    assert torch.equal(found.sequences, wanted.sequences)
    steps = zip(found.logits, wanted.logits, strict=True)
    assert max(apart(a, b) for a, b in steps) < 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_obeys_beside_its_padding(name):
    model, ids, real = made(name), texts(), torch.ones(2, LENGTH, dtype=torch.long)
    real[1, 8:] = 0
    plain = model(ids, attention_mask=real)[0]
    hf.mask_heads(model, RULE)
    found = model(ids, attention_mask=real)[0]
    for _ in range(2):  # what is unmasked may be masked again
        assert torch.equal(hf.unmask(model)(ids, attention_mask=real)[0], plain)
        hf.mask_heads(model, RULE)
    both = by_hand(ids) & (np.asarray(real) > 0)[:, None, None]
    check(found, unmasked(model)(ids, attention_mask=additive(both))[0], plain, real > 0)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_obeys_beside_its_own_masks(name):
    model, ids = made(name), texts()
    plain = model(ids).logits
    found = hf.mask_heads(model, RULE)(ids).logits
    causal = by_hand(ids) & np.tri(LENGTH, dtype=bool)
    near = causal & ~np.tri(LENGTH, k=-5, dtype=bool)  # a window of 5 keys
    mask = additive(near if name == "Mistral" else causal)
    if name in ("Gemma 2", "Gemma 3", "gpt-oss"):  # layers of both kinds
        mask = {"full_attention": mask, "sliding_attention": additive(near)}
    check(found, unmasked(model)(ids, attention_mask=mask).logits, plain)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_a_cache_obeys(name, how):
    model, ids = hf.mask_heads(made(name), RULE), texts()
    real = torch.ones_like(ids)
    real[1, :2] = 0  # padding on the left
    check_generated(model, ids, attention_mask=real, max_new_tokens=9, **how)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_padding_is_read_in_generate_and_other_caches_are_refused(name):
    rule = hm.PerHead({0: hm.SameSentence(END), 1: hm.recipes.padding() & hm.Window(2, 0)})
    model, ids = hf.mask_heads(made(name), rule), texts()
    how = {"attention_mask": (ids != ids[1, 0]).long(), "max_new_tokens": 4}
    check_generated(model, ids, **how)
    with pytest.raises(RuntimeError, match=r"reads 'token_ids', .* 5 queries and 10 keys"):
        model.generate(ids, prefill_chunk_size=5, **how)
    hf.mask_heads(hf.unmask(model), POSITIONS)
    with pytest.raises(RuntimeError, match=r"to 15 keys, .*`cache=transformers\.DynamicCache\(\)"):
        model.generate(ids, cache_implementation="static", **how)


@pytest.mark.parametrize("name", ["ViT", "Whisper", "GPT-2", "gpt-oss"])
def test_probabilities_of_the_models_eager_attention_are_0_where_a_rule_hides(name):
    sound = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": texts()}
    given = {"ViT": {"pixel_values": torch.randn(2, 3, 16, 16)}, "Whisper": sound}
    model, inputs = made(name), given.get(name, {"input_ids": texts()})
    model.set_attn_implementation("eager")
    rule = POSITIONS & hm.PerHead({1: ~hm.Queries(4, 5)})
    outputs = hf.mask_heads(model, rule)(**inputs, output_attentions=True)
    sides = {"attentions", "encoder_attentions", "decoder_attentions"} & outputs.keys()
    for side, probabilities in [(s, x) for s in sides for x in outputs[s]]:
        mask = by_hand(np.zeros((2, probabilities.shape[2])))  # without sentence ends
        mask[:, 1, 4] = False  # the row that sees nothing
        mask &= np.tri(mask.shape[2], dtype=bool) | (name == "ViT" or side[0] == "e")
        mask = torch.as_tensor(mask)
        assert probabilities[~mask].max() == 0
        assert torch.equal(probabilities.sum(-1) > 0, mask.any(-1))
    outputs[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if name == "Whisper":
        model.set_attn_implementation("sdpa")
        check_generated(model, inputs["input_features"], max_new_tokens=9)


@pytest.mark.parametrize("name", ["BART", "T5"])
def test_cross_attention_reads_no_ids_but_those_that_are_passed(name):
    """Found as a bug: it read the decoder's ids as those of the encoder's keys."""
    model, ids = made(name), texts()
    given = {"input_ids": ids, "decoder_input_ids": texts()[:, :5]}
    plain = model(**given).logits
    layers = "encoder_attn$|EncDecAttention$"
    hf.mask_heads(model, hm.PerHead({0: hm.KeyIn("token_ids", (END,))}), layers)
    with pytest.raises(RuntimeError, match=r"reads 'token_ids'.* Received: \{\}\. Pass it"):
        model(**given)
    rule = hm.PerHead({0: hm.KeyIn("encoder_token_ids", (END,)) | hm.Keys(0, 1)})
    hf.mask_heads(hf.unmask(model), rule, layers)
    for wrong, message in ((ids[:, :-1], "length 11"), (ids[:1], "has 1 example")):
        with pytest.raises(ValueError, match=message):
            model(**given, encoder_token_ids=wrong)
    found = model(**given, encoder_token_ids=ids).logits
    check_generated(model, ids, max_new_tokens=5, encoder_token_ids=ids)
    mask = torch.ones(2, HEADS, 1, LENGTH, dtype=torch.bool)
    mask[:, 0, 0, 1:] = (ids == END)[:, 1:]
    given["encoder_outputs"] = unmasked(model).get_encoder()(ids)
    given["attention_mask"] = additive(mask.expand(-1, -1, 5, -1))
    assert apart(found, model(**given).logits) < 1e-4  # of 20
    assert apart(found, plain) > 1e-2


def test_a_decoder_does_not_read_the_encoders_padding():
    """Found as a bug: where the decoder had no mask of its own, it read the encoder's."""
    model, ids = made("BART"), texts()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    hf.mask_heads(model, hm.PerHead({0: hm.recipes.padding()}), "decoder.*self_attn$")
    with pytest.raises(RuntimeError, match="reads 'padding_mask', which the call does not hold"):
        model(**given)
    real = torch.ones_like(ids)
    real[1, 8:] = 0
    found = model(**given, decoder_attention_mask=real).logits
    assert apart(found, hf.unmask(model)(**given, decoder_attention_mask=real).logits) < 1e-4


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_a_row_that_sees_nothing_adds_nothing_in_a_step(name):
    rule = hm.PerHead({0: hm.Nothing(), 1: hm.Queries(0, 6)})
    model, ids = hf.mask_heads(made(name), rule), texts()
    whole, cache = model(ids).logits, None
    for i in range(LENGTH):
        outputs = model(ids[:, i : i + 1], cache=cache, use_cache=True)
        cache = outputs.cache
        assert apart(outputs.logits, whole[:, i : i + 1]) < 1e-4


def test_a_mask_of_floats_stays_beside_the_rule():
    """Where it holds the lowest number, it hides: a row that then sees nothing is 0."""
    model, ids = made("BERT"), texts()
    bias = torch.randn(2, 1, LENGTH, LENGTH)
    bias[..., 3] = torch.finfo(torch.float32).min
    plain = model(ids, attention_mask=bias)[0]
    found = hf.mask_heads(model, RULE)(ids, attention_mask=bias)[0]
    both = bias.masked_fill(~torch.as_tensor(by_hand(ids)), -1e38)
    check(found, unmasked(model)(ids, attention_mask=both)[0], plain)
    hf.mask_heads(model, hm.PerHead({0: hm.Keys(3, 4)}))
    attentions = model(ids, attention_mask=bias, output_attentions=True).attentions
    assert attentions[0][:, 0].abs().max() == 0


def test_a_model_that_is_not_keras_is_refused_with_the_function_for_it():
    message = r"PyTorch model.{,100}hm\.hugging_face\.mask_heads\(model, rule\)`\.$"
    with pytest.raises(TypeError, match=message):
        hm.apply_head_masks(made("BERT"), RULE)


@torch.no_grad()
def test_a_step_by_hand_needs_the_whole_sequence():
    model, ids = hf.mask_heads(made("GPT-2"), RULE), texts()
    whole = model(ids).logits
    cache = model(ids[:, :8], use_cache=True).cache
    lacks = r"reads 'token_ids'.* 1 queries and 9 keys.*'token_ids': .*\[2, 1\].*token_ids=tensor"
    with pytest.raises(RuntimeError, match=lacks):
        model(ids[:, 8:9], cache=copy.deepcopy(cache))
    step = model(ids[:, 8:9], cache=cache, token_ids=ids[:, :9]).logits
    assert apart(step, whole[:, 8:9]) < 1e-4


def test_what_a_call_does_not_hold_is_passed_by_name():
    model, ids = made("BERT"), texts()
    speakers = torch.arange(LENGTH).expand(2, -1) // 5
    hf.mask_heads(model, hm.PerHead({0: hm.SameSegment("speakers")}))
    lacks = "reads 'speakers', which the call does not hold.* Received: {.*'input_ids': "
    for wrong in ({}, {"speakers": speakers[0]}, {"speakers": (speakers, speakers)}):
        with pytest.raises(RuntimeError, match=lacks):
            model(ids, **wrong)
    found = model(ids, speakers=speakers)[0]
    hf.mask_heads(hf.unmask(model), hm.PerHead({0: hm.Chunk(5)}))
    assert apart(found, model(ids)[0]) < 1e-5


def test_models_that_were_made_from_one_config_are_masked_apart():
    """Found as a bug: a mask on one, and taking it off, changed how the other attends."""
    config, ids = transformers.BertConfig(**TEXT), texts()
    one, other = (transformers.BertModel(config).eval() for _ in range(2))
    hf.mask_heads(one, RULE)
    assert not hasattr(other.config, "head_masks")
    hf.mask_heads(other, RULE)
    under_rule = other(ids)[0]
    unmasked(one)
    assert torch.equal(other(ids)[0], under_rule)


def test_another_implementation_obeys_or_raises():
    model, ids = hf.mask_heads(made("BERT"), RULE), texts()
    found = model(ids)[0]
    model.set_attn_implementation("eager")
    assert apart(model(ids)[0], found) < 2e-5
    transformers.AttentionInterface.register("other", lambda *_, **__: None)
    model.set_attn_implementation("other")
    with pytest.raises(RuntimeError, match="is 'other', under which no rule holds"):
        model(ids)
    assert hf._calls.get() == ()
    assert hf.unmask(model).config._attn_implementation == "other"


def test_rules_by_layer_are_written_beside_the_weights_and_read_again(tmp_path):
    model, ids = made("BERT"), texts()
    hf.mask_heads(model, {"0-1": RULE, "layer.2": hm.Window(1, 1)})
    found = model(ids)[0]
    with pytest.warns(UserWarning, match="do not hold its head masks.*with its config") as warned:
        model.save_pretrained(tmp_path)
    assert len(warned) == 1
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert apart(again(ids)[0], found) > 1e-2
    hf.mask_heads(again, again.config.head_masks)
    assert torch.equal(again(ids)[0], found)
    rules = [hm.MaskSpec.from_config(rule) for rule in again.config.head_masks.values()]
    assert rules == [RULE, RULE, hm.Window(1, 1)]
    assert not hasattr(hf.unmask(again).config, "head_masks")


def test_a_copy_obeys_and_is_unmasked_alone():
    model, ids = hf.mask_heads(made("BERT"), RULE), texts()
    found, twin = model(ids)[0], copy.deepcopy(model)
    assert torch.equal(twin(ids)[0], found)
    hf.unmask(twin)
    assert torch.equal(model(ids)[0], found)
    assert apart(twin(ids)[0], found) > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.state_dict()
    with pytest.warns(UserWarning, match="BertModel do not hold its head masks"):
        torch.nn.Sequential(model).state_dict()
    with pytest.raises(ValueError, match="has no rules by `mask_heads`"):
        hf.unmask(twin)


def test_gradients_are_those_of_the_masks_made_by_hand():
    model, ids = made("BERT"), texts()
    model.embeddings.requires_grad_(False)

    def gradients(**inputs):
        model(ids, **inputs)[0].square().sum().backward()
        each = [p.grad.clone() for p in model.encoder.parameters()]
        model.zero_grad()
        return each

    found = (hf.mask_heads(model, RULE), gradients())[1]
    unmasked(model)
    wanted = gradients(attention_mask=additive(by_hand(ids)))
    for ours, theirs in zip(found, wanted, strict=True):
        assert apart(ours, theirs) <= 1e-4 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["RoFormer", "XLNet"])
def test_attention_that_does_not_ask_is_refused_by_name(name):
    sizes = {"n_layer": 1, "n_head": 4, "d_model": 32} if name == "XLNet" else TEXT
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config)
    with pytest.raises(ValueError, match=rf"{name}\w*Attention.*computes its attention"):
        hf.mask_heads(model, RULE)
    assert not hasattr(model.config, "head_masks")


@pytest.mark.parametrize(
    ("name", "head", "layers", "message"),
    [
        ("BERT", 4, None, "names head 4, but there are 4 heads"),
        ("Llama", 12, None, "names head 12, .* 4 query heads, .* 2 of keys"),
        ("BERT", 0, 3, "There is no self-attention layer 3"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(name, head, layers, message):
    model = made(name)
    with pytest.raises(ValueError, match=message):
        hf.mask_heads(model, hm.PerHead({head: hm.Window(1, 1)}), layers)
    hf.mask_heads(model, RULE)
    with pytest.raises(ValueError, match="has rules already"):
        hf.mask_heads(model, RULE)
    with pytest.raises(TypeError, match="must be a Hugging Face model"):
        hf.mask_heads(torch.nn.Linear(2, 2), RULE)


@pytest.mark.parametrize(
    ("name", "value", "received"),
    [
        ("transformers.__version__", "4.28.0.dev0", r"transformers 4\.28\.0\.dev0, Keras on torch"),
        ("keras.backend.backend", lambda: "jax", "Keras on jax"),
    ],
)
def test_an_older_transformers_and_another_backend_are_refused(monkeypatch, name, value, received):
    model = made("BERT")
    monkeypatch.setattr(name, value)
    message = f"need transformers 5, .*KERAS_BACKEND=torch before .* Received: .*{received}"
    with pytest.raises(RuntimeError, match=message):
        hf.mask_heads(model, RULE)


ALONE = """
import sys, keras_headmask as hm, torch, transformers
config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=4)
model = hm.hugging_face.mask_heads(transformers.BertModel(config), hm.Window(1, 1))
model(torch.ones((1, 4), dtype=torch.long))
assert "tensorflow" not in sys.modules
"""


def test_tensorflow_is_not_imported():
    run_fresh(ALONE)


def test_a_position_bias_stays():
    model, ids = made("T5").get_encoder(), texts()
    model.set_attn_implementation("eager")
    wanted = model(ids)[0]
    # All keys, by a rule that hides none but has to be computed.
    assert apart(hf.mask_heads(model, hm.Window(LENGTH, LENGTH))(ids)[0], wanted) < 1e-4
    model.set_attn_implementation("sdpa")
    assert apart(model(ids)[0], wanted) < 1e-4
    assert apart(hf.mask_heads(hf.unmask(model), RULE)(ids)[0], wanted) > 1e-2


def test_what_runs_outside_of_a_call_of_the_model_raises():
    model, ids = hf.mask_heads(made("BERT"), RULE), texts()
    with pytest.raises(RuntimeError, match="runs outside of a call of its model"):
        model.encoder(model.embeddings(ids))
    model.train().gradient_checkpointing_enable()
    outputs = model(ids)[0]
    with pytest.raises(RuntimeError, match="switch off gradient checkpointing"):
        outputs.sum().backward()


def test_attention_with_a_mask_for_known_implementations_alone_is_refused():
    """Found as a bug: DeepSeek V3.2 makes its index mask for "eager" and "sdpa" alone."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    model = torch.nn.Module()
    model.inner = DeepseekV32Attention.__new__(DeepseekV32Attention)
    torch.nn.Module.__init__(model.inner)
    with pytest.raises(ValueError, match=r"'inner' \(DeepseekV32Attention\) computes .* a mask"):
        hf._attention(model)
