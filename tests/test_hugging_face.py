"""`hm.hugging_face`: models of transformers under a rule, against masks made by hand."""

import copy
import itertools
import warnings

import keras
import numpy as np
import pytest
from fresh import run_fresh

import keras_headmask as hm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
hf = hm.hugging_face

needs_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="needs Keras on PyTorch"
)

END, WORDS, LENGTH, HEADS = 9, 50, 12, 4
RULE = hm.PerHead({0: hm.SameSentence(END), 1: hm.Window(2, 1), 2: hm.Keys(0, 2) | hm.Window(1, 1)})
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS}
SMALL |= {"intermediate_size": 32, "vocab_size": WORDS, "max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def encoder(name):
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**SMALL))


def decoder(name, **more):
    config = getattr(transformers, f"{name}Config")(**GROUPED, **SPECIAL, **more)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)


def distilbert():
    sizes = {"dim": 32, "n_layers": 3, "n_heads": HEADS, "hidden_dim": 32, "vocab_size": WORDS}
    return transformers.DistilBertModel(transformers.DistilBertConfig(**sizes))


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SPECIAL))


def gemma3():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return decoder("Gemma3Text", sliding_window=5, layer_types=kinds)


ENCODERS = {
    "BERT": lambda: encoder("Bert"),
    "RoBERTa": lambda: encoder("Roberta"),
    "DistilBERT": distilbert,
}
DECODERS = {
    "GPT-2": gpt2,
    "Llama": lambda: decoder("Llama"),
    "Mistral": lambda: decoder("Mistral", sliding_window=5),
    "Qwen 3": lambda: decoder("Qwen3"),
    "Gemma 2": lambda: decoder("Gemma2", sliding_window=5, attn_logit_softcapping=2.0),
    "Gemma 3": gemma3,
    "gpt-oss": lambda: decoder("GptOss", sliding_window=5, num_local_experts=4),
}


def made(name, models):
    torch.manual_seed(0)
    model = models[name]().eval()
    with torch.no_grad():  # far from the even attention that small weights give
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def texts(batch=2, length=LENGTH):
    rng = np.random.default_rng(3)
    ids = rng.integers(10, WORDS, (batch, length))
    ids[0, [3, 7]] = ids[1, 5] = END
    return torch.tensor(ids)


def by_hand(ids):
    """What RULE allows, `(B, H, T, T)`, by a loop."""
    ids = np.asarray(ids)
    length = ids.shape[1]
    mask = np.ones((len(ids), HEADS, length, length), bool)
    for b, row in enumerate(ids):
        for i in range(length):
            for j in range(length):
                low, high = sorted((i, j))
                mask[b, 0, i, j] = END not in row[low:high]
                mask[b, 1, i, j] = -2 <= j - i <= 1
                mask[b, 2, i, j] = j < 2 or -1 <= j - i <= 1
    return mask


def additive(mask):
    return torch.where(torch.as_tensor(mask), 0.0, torch.finfo(torch.float32).min)


def apart(a, b, where=None):
    difference = (a - b).abs()
    return float((difference if where is None else difference[where]).max())


def _close(found, wanted, plain, where=None):
    assert apart(found, wanted, where) < 2e-5
    assert apart(found, plain, where) > 1e-2  # the rule does something


@needs_torch
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_obeys_beside_its_padding(name):
    model, ids, real = made(name, ENCODERS), texts(), torch.ones(2, LENGTH, dtype=torch.long)
    real[1, 8:] = 0
    plain = model(ids, attention_mask=real)[0]
    hf.mask_heads(model, RULE)
    found = model(ids, attention_mask=real)[0]
    for _ in range(2):  # what is unmasked may be masked again
        assert torch.equal(hf.unmask(model)(ids, attention_mask=real)[0], plain)
        hf.mask_heads(model, RULE)
    hf.unmask(model).set_attn_implementation("eager")
    both = by_hand(ids) & (np.asarray(real) > 0)[:, None, None]
    wanted = model(ids, attention_mask=additive(both))[0]
    _close(found, wanted, plain, real > 0)


@needs_torch
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_obeys_beside_its_own_masks(name):
    model, ids = made(name, DECODERS), texts()
    plain = model(ids).logits
    found = hf.mask_heads(model, RULE)(ids).logits
    hf.unmask(model).set_attn_implementation("eager")
    causal = by_hand(ids) & np.tri(LENGTH, dtype=bool)
    near = causal & ~np.tri(LENGTH, k=-5, dtype=bool)  # a window of 5 keys
    mask = additive(near if name == "Mistral" else causal)
    if name in ("Gemma 2", "Gemma 3", "gpt-oss"):  # layers of both kinds
        mask = {"full_attention": mask, "sliding_attention": additive(near)}
    _close(found, model(ids, attention_mask=mask).logits, plain)


@needs_torch
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.every_day("how0|Gemma 3")  # which has layers of both kinds
def test_generate_with_a_cache_obeys(name, how):
    model, ids = hf.mask_heads(made(name, DECODERS), RULE), texts()
    real = torch.ones_like(ids)
    real[1, :2] = 0  # padding on the left
    more = {"attention_mask": real, "max_new_tokens": 9, "do_sample": False, "output_logits": True}
    found = model.generate(ids, **more, **how, return_dict_in_generate=True)
    how = {k: v for k, v in how.items() if k == "num_beams"}
    wanted = model.generate(ids, **more, **how, use_cache=False, return_dict_in_generate=True)
    assert torch.equal(found.sequences, wanted.sequences)
    steps = zip(found.logits, wanted.logits, strict=True)
    assert max(apart(a, b) for a, b in steps) < 1e-4


def oracle(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attention by its formula, under RULE where the queries are the keys."""
    logits = query @ key.transpose(2, 3) * scaling
    if query.shape[2] == key.shape[2] and module.head_rule:
        mask = by_hand(np.zeros((1, query.shape[2])))  # without sentence ends
        logits += additive(mask)
    if attention_mask is not None:
        logits += attention_mask
    return (logits.softmax(-1) @ value).transpose(1, 2), None


POSITIONS = hm.PerHead({1: hm.Window(2, 1), 2: hm.Keys(0, 2) | hm.Window(1, 1)})


def vit():
    sizes = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    sizes |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    sizes |= {"vocab_size": WORDS, "max_source_positions": 10, "max_target_positions": 32}
    config = transformers.WhisperConfig(**sizes, **SPECIAL, decoder_start_token_id=1)
    return transformers.WhisperForConditionalGeneration(config)


@needs_torch
@pytest.mark.parametrize("build", [vit, whisper])
def test_models_of_images_and_sound_obey(build):
    model = made("it", {"it": build})
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if build is whisper:
        inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": texts()}
    plain = model(**inputs)[0]
    found = hf.mask_heads(model, POSITIONS)(**inputs)[0]
    masked = [path.strip("^$").replace("\\.", ".") for path in model.config.head_masks]
    assert not any("encoder_attn" in path for path in masked)
    hf.unmask(model)
    for path, module in model.named_modules():
        module.head_rule = path in masked
    transformers.AttentionInterface.register("oracle", oracle)
    transformers.AttentionMaskInterface.register("oracle", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("oracle")
    _close(found, model(**inputs)[0], plain)


@needs_torch
def test_an_encoder_and_decoder_generate_with_a_cache():
    model = hf.mask_heads(made("it", {"it": whisper}), POSITIONS)
    more = {"max_new_tokens": 9, "do_sample": False, "output_logits": True}
    sound = torch.randn(2, 8, 20)
    steps = [
        model.generate(sound, **more, use_cache=use, return_dict_in_generate=True).logits
        for use in (True, False)
    ]
    assert max(apart(a, b) for a, b in zip(*steps, strict=True)) < 1e-4


# --- Two sequences ---


def bart():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": WORDS}
    sizes |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(**sizes, **SPECIAL, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config)


def t5():
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": HEADS, "d_kv": 8, "d_ff": 32}
    config = transformers.T5Config(**sizes, **SPECIAL, vocab_size=WORDS, decoder_start_token_id=1)
    return transformers.T5ForConditionalGeneration(config)


TWO = {"BART": bart, "T5": t5}
CROSS = hm.PerHead({0: hm.KeyIn("encoder_token_ids", (END,)) | hm.Keys(0, 1)})


@needs_torch
@torch.no_grad()
@pytest.mark.parametrize("name", TWO)
def test_cross_attention_reads_no_ids_but_those_that_are_passed(name):
    """Found as a bug: it read the decoder's ids as those of the encoder's keys."""
    model, ids = made(name, TWO), texts()
    given = {"input_ids": ids, "decoder_input_ids": texts()[:, :5]}
    plain = model(**given).logits
    layers = "encoder_attn$|EncDecAttention$"
    hf.mask_heads(model, hm.PerHead({0: hm.KeyIn("token_ids", (END,))}), layers)
    with pytest.raises(RuntimeError, match=r"reads 'token_ids'.* Received: \{\}\. Pass it"):
        model(**given)
    hf.mask_heads(hf.unmask(model), CROSS, layers)
    with (
        hf.mask_inputs(encoder_token_ids=ids[:, :-1]),
        pytest.raises(ValueError, match="length 11"),
    ):
        model(**given)
    with (
        hf.mask_inputs(encoder_token_ids=ids[:1]),
        pytest.raises(ValueError, match="has 1 example"),
    ):
        model(**given)
    with hf.mask_inputs(encoder_token_ids=ids):
        found = model(**given).logits
        more = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        steps = [
            model.generate(ids, **more, output_logits=True, use_cache=use).logits
            for use in (True, False)
        ]
    assert max(apart(a, b) for a, b in zip(*steps, strict=True)) < 1e-4
    mask = torch.ones(2, HEADS, 1, LENGTH, dtype=torch.bool)
    mask[:, 0, 0, 1:] = (ids == END)[:, 1:]
    hf.unmask(model).set_attn_implementation("eager")
    given["encoder_outputs"] = model.get_encoder()(ids)
    given["attention_mask"] = additive(mask.expand(-1, -1, 5, -1))
    assert apart(found, model(**given).logits) < 1e-4  # of 20
    assert apart(found, plain) > 1e-2


@needs_torch
@torch.no_grad()
def test_a_decoder_does_not_read_the_encoders_padding():
    """Found as a bug: where the decoder had no mask of its own, it read the encoder's."""
    model, ids = made("BART", TWO), texts()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    hf.mask_heads(model, hm.PerHead({0: hm.recipes.padding()}), "decoder.*self_attn$")
    with pytest.raises(RuntimeError, match="reads 'padding_mask', which the call does not hold"):
        model(**given)
    real = torch.ones_like(ids)
    real[1, 8:] = 0
    found = model(**given, decoder_attention_mask=real).logits
    wanted = hf.unmask(model)(**given, decoder_attention_mask=real).logits
    assert apart(found, wanted) < 1e-4


# --- Probabilities, and what a step computes ---


def opt():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    sizes |= {"ffn_dim": 32, "vocab_size": WORDS, "word_embed_proj_dim": 32}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **SPECIAL))


@needs_torch
@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT-2", "OPT", "gpt-oss"])
def test_probabilities_are_returned(name):
    """Found as a bug: GPT-2 and OPT, which do not tell their attention, gave `()`."""
    model, ids = made(name, DECODERS | {"OPT": opt}), texts()
    if name == "OPT":
        model.set_attn_implementation("eager")
    rule = hm.PerHead({0: hm.SameSentence(END), 1: hm.Window(2, 1) & ~hm.Queries(4, 5)})
    hf.mask_heads(model, rule, layers="0,2")
    outputs = model(ids, output_attentions=True, use_cache=True)
    assert len(outputs.attentions) == 3
    assert apart(outputs.logits, model(ids).logits) < 1e-5
    restricted = outputs.attentions[0]
    allowed = torch.as_tensor(
        np.asarray(hm.make_mask(rule, LENGTH, LENGTH, HEADS, {"token_ids": ids}))
    )
    assert restricted[~(allowed & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())].max() == 0
    sums = restricted.sum(-1)
    assert sums[:, 1, 4].abs().max() == 0  # the row that sees nothing
    if name != "gpt-oss":  # whose sinks take a share
        sums[:, 1, 4] = 1
        assert apart(sums, torch.ones_like(sums)) < 1e-5


@needs_torch
@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_a_row_that_sees_nothing_adds_nothing_in_a_step(name):
    rule = hm.PerHead({0: hm.Nothing(), 1: hm.Queries(0, 6)})
    model, ids = hf.mask_heads(made(name, DECODERS), rule), texts()
    whole, cache = model(ids).logits, None
    for i in range(LENGTH):
        outputs = model(ids[:, i : i + 1], cache=cache, use_cache=True)
        cache = outputs.cache
        assert apart(outputs.logits, whole[:, i : i + 1]) < 1e-4


@needs_torch
@torch.no_grad()
def test_a_mask_of_floats_stays_beside_the_rule():
    model, ids = made("BERT", ENCODERS), texts()
    bias = torch.randn(2, 1, LENGTH, LENGTH)
    bias[..., 3] = torch.finfo(torch.float32).min
    plain = model(ids, attention_mask=bias)[0]
    found = hf.mask_heads(model, RULE)(ids, attention_mask=bias)[0]
    hf.unmask(model).set_attn_implementation("eager")
    wanted = model(ids, attention_mask=bias.masked_fill(~torch.as_tensor(by_hand(ids)), -1e38))[0]
    _close(found, wanted, plain)


@needs_torch
@torch.no_grad()
@pytest.mark.parametrize("how", [{"prefill_chunk_size": 5}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_a_prompt_in_chunks_and_padding_in_a_static_cache_are_read(name, how):
    """Found as a bug: a chunk's ids were taken for those of the whole prompt."""
    rule = hm.PerHead({0: hm.SameSentence(END), 1: hm.recipes.padding() & hm.Window(2, 0)})
    model, ids = hf.mask_heads(made(name, DECODERS), rule), texts()
    more = {"attention_mask": (ids != ids[1, 0]).long(), "max_new_tokens": 4, "do_sample": False}
    more |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, **more, **how).logits
    wanted = model.generate(ids, **more, use_cache=False).logits
    assert max(apart(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-4


def test_apply_head_masks_names_the_function_for_such_a_model():
    config = transformers.BertConfig(**SMALL)
    message = r"PyTorch model.*hm\.hugging_face\.mask_heads\(model, rule\)`\.$"
    with pytest.raises(TypeError, match=message) as raised:
        hm.apply_head_masks(transformers.BertModel(config), RULE)
    assert len(str(raised.value)) < 200


# --- What else users do ---


@needs_torch
@torch.no_grad()
def test_a_step_by_hand_needs_the_whole_sequence():
    model, ids = hf.mask_heads(made("GPT-2", DECODERS), RULE), texts()
    whole = model(ids).logits
    cache = model(ids[:, :8], use_cache=True).cache
    with pytest.raises(
        RuntimeError,
        match=r"reads 'token_ids'.* 1 queries and 9 keys.*'token_ids': \(2, 1\).*mask_inputs",
    ):
        model(ids[:, 8:9], cache=copy.deepcopy(cache))
    with hf.mask_inputs(token_ids=ids[:, :9]):
        step = model(ids[:, 8:9], cache=cache).logits
    assert apart(step, whole[:, 8:9]) < 1e-4
    cache = transformers.DynamicCache()
    known = model.generate(ids, cache=cache, max_new_tokens=1, do_sample=False)
    cache.reset()
    model(known[:, :8].flip(1), cache=cache)
    with pytest.raises(RuntimeError, match="1 queries and 9 keys"):  # not those of before
        model(known[:, 8:9], cache=cache)


@needs_torch
def test_what_a_call_does_not_hold_is_passed_beside_it():
    model, ids = made("BERT", ENCODERS), texts()
    speakers = torch.arange(LENGTH).expand(2, -1) // 5
    hf.mask_heads(model, hm.PerHead({0: hm.SameSegment("speakers")}))
    lacks = (
        r"reads 'speakers', which the call does not hold.* Received: \{.*'input_ids': \(2, 12\).*\}"
    )
    with pytest.raises(RuntimeError, match=lacks):
        model(ids)
    with (
        hf.mask_inputs(speakers=speakers[0]),
        pytest.raises(RuntimeError, match=r"'speakers': \(12,\).*`\(batch, length\)`"),
    ):
        model(ids)
    with hf.mask_inputs(speakers=speakers):
        found = model(ids)[0]
    hf.unmask(model)
    hf.mask_heads(model, hm.PerHead({0: hm.Chunk(5)}))
    assert apart(found, model(ids)[0]) < 1e-5


@needs_torch
@torch.no_grad()
def test_models_that_were_made_from_one_config_are_masked_apart():
    """Found as a bug: a mask on one, and taking it off, changed how the other attends."""
    config, ids = transformers.BertConfig(**SMALL), texts()
    one, other = (transformers.BertModel(config).eval() for _ in range(2))
    hf.mask_heads(one, RULE)
    assert (config._attn_implementation, other.config._attn_implementation) == ("sdpa", "sdpa")
    hf.mask_heads(other, RULE)
    under_rule = other(ids)[0]
    hf.unmask(one)(ids)
    assert torch.equal(other(ids)[0], under_rule)
    hf.unmask(other)
    assert (one.config._attn_implementation, other.config._attn_implementation) == ("sdpa", "sdpa")


@needs_torch
@pytest.mark.filterwarnings("error:.*always_call")
def test_another_implementation_over_ours_raises_at_the_next_call():
    model, ids = hf.mask_heads(made("BERT", ENCODERS), RULE), texts()
    found = model(ids)[0]
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="is 'sdpa', which knows no head masks"):
        model(ids)
    assert hf._thread.calls == []
    model.set_attn_implementation(hf.IMPLEMENTATION)
    assert torch.equal(model(ids)[0], found)


@needs_torch
def test_rules_by_layer_are_written_beside_the_weights_and_read_again(tmp_path):
    model, ids = made("BERT", ENCODERS), texts()
    hf.mask_heads(model, {"0-1": RULE, "layer.2": hm.Window(1, 1)})
    found = model(ids)[0]
    with pytest.warns(
        UserWarning, match="do not hold its head masks.*writes them with its config"
    ) as warned:
        model.save_pretrained(tmp_path)
    assert len(warned) == 1
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert apart(again(ids)[0], found) > 1e-2
    hf.mask_heads(again, again.config.head_masks)
    assert torch.equal(again(ids)[0], found)
    rules = [hm.MaskSpec.from_config(rule) for rule in again.config.head_masks.values()]
    assert rules == [RULE, RULE, hm.Window(1, 1)]
    assert not hasattr(hf.unmask(again).config, "head_masks")


@needs_torch
def test_saving_a_model_around_one_with_rules_says_that_they_are_not_written(tmp_path):
    config = transformers.BertConfig(**SMALL, num_labels=2)
    outer = transformers.BertForSequenceClassification(config)
    hf.mask_heads(outer.bert, RULE)
    with pytest.warns(UserWarning, match="BertModel do not hold its head masks"):
        outer.save_pretrained(tmp_path)
    assert "head_masks" not in (tmp_path / "config.json").read_text()
    hf.unmask(outer.bert)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer.save_pretrained(tmp_path)


ALONE = """
import sys, keras_headmask as hm, torch, transformers
config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=4)
model = hm.hugging_face.mask_heads(transformers.BertModel(config), hm.Window(1, 1))
model(torch.ones((1, 4), dtype=torch.long))
assert "tensorflow" not in sys.modules
"""


@needs_torch
def test_tensorflow_is_not_imported():
    run_fresh(ALONE)


@needs_torch
def test_a_copy_obeys_and_is_unmasked_alone():
    model, ids = hf.mask_heads(made("BERT", ENCODERS), RULE), texts()
    found, twin = model(ids)[0], copy.deepcopy(model)
    assert torch.equal(twin(ids)[0], found)
    hf.unmask(twin)
    assert torch.equal(model(ids)[0], found)
    assert apart(twin(ids)[0], found) > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.state_dict()
    with pytest.warns(UserWarning, match="BertModel do not hold its head masks"):
        model.state_dict()
    with pytest.raises(ValueError, match="has no rules by `mask_heads`"):
        hf.unmask(twin)


@needs_torch
def test_gradients_and_probabilities_are_those_of_the_masks_made_by_hand():
    model, ids = made("BERT", ENCODERS), texts()
    model.embeddings.requires_grad_(False)

    def gradients(**inputs):
        outputs = model(ids, output_attentions=True, **inputs)
        outputs[0].square().sum().backward()
        each = [p.grad.clone() for p in model.encoder.parameters()]
        model.zero_grad()
        return outputs.attentions, each

    hf.mask_heads(model, RULE)
    found = gradients()
    hf.unmask(model).set_attn_implementation("eager")
    wanted = gradients(attention_mask=additive(by_hand(ids)))
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert apart(ours, theirs) <= 1e-4 * max(1.0, float(theirs.abs().max()))


@needs_torch
@pytest.mark.parametrize("name", ["RoFormer", "XLNet"])
def test_attention_that_does_not_ask_is_refused_by_name(name):
    sizes = {"n_layer": 1, "n_head": 4, "d_model": 32} if name == "XLNet" else SMALL
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config)
    with pytest.raises(ValueError, match=rf"{name}\w*Attention.*computes its attention"):
        hf.mask_heads(model, RULE)
    assert not hasattr(model.config, "head_masks")


@needs_torch
def test_wrong_arguments_are_refused_before_anything_changes():
    model = made("BERT", ENCODERS)
    with pytest.raises(TypeError, match="must be a Hugging Face model"):
        hf.mask_heads(torch.nn.Linear(2, 2), RULE)
    with pytest.raises(ValueError, match="names head 4, but there are 4 heads"):
        hf.mask_heads(model, hm.PerHead({4: hm.Window(1, 1)}))
    grouped = "names head 12, but there are 4 query heads, .* 2 of keys and values"
    with pytest.raises(ValueError, match=grouped):
        hf.mask_heads(made("Llama", DECODERS), hm.PerHead({12: hm.Window(1, 1)}))
    with pytest.raises(ValueError, match="There is no self-attention layer 3"):
        hf.mask_heads(model, RULE, layers=3)
    assert model.config._attn_implementation == "sdpa"
    hf.mask_heads(model, RULE)
    with pytest.raises(ValueError, match="has rules already"):
        hf.mask_heads(model, RULE)


@needs_torch
@pytest.mark.parametrize("version", ["4.57.1", "4.28.0.dev0"])
def test_an_older_transformers_is_refused(monkeypatch, version):
    model = made("BERT", ENCODERS)
    monkeypatch.setattr("transformers.__version__", version)
    message = f"need transformers 5, .* Received: transformers {version}, Keras on torch"
    with pytest.raises(RuntimeError, match=message):
        hf.mask_heads(model, RULE)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="needs another backend")
def test_keras_on_another_backend_is_refused():
    with pytest.raises(RuntimeError, match="set KERAS_BACKEND=torch before Keras is imported"):
        hf.mask_heads(made("BERT", ENCODERS), RULE)


@needs_torch
def test_a_position_bias_stays():
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": HEADS, "d_kv": 8, "d_ff": 32}
    build = {
        "T5": lambda: transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=WORDS))
    }
    model, ids = made("T5", build), texts()
    model.set_attn_implementation("eager")
    wanted = model(ids)[0]
    found = hf.mask_heads(model, hm.Full())(ids)[0]
    assert apart(found, wanted) < 1e-4
    hf.mask_heads(hf.unmask(model), RULE)
    assert apart(model(ids)[0], wanted) > 1e-2


@needs_torch
def test_what_runs_outside_of_a_call_of_the_model_raises():
    model, ids = hf.mask_heads(made("BERT", ENCODERS), RULE), texts()
    with pytest.raises(RuntimeError, match="runs outside of a call of its model"):
        model.encoder(model.embeddings(ids))
    model.train().gradient_checkpointing_enable()
    outputs = model(ids)[0]
    with pytest.raises(RuntimeError, match="switch off gradient checkpointing"):
        outputs.sum().backward()


@needs_torch
def test_attention_with_a_mask_for_known_implementations_alone_is_refused():
    """Found as a bug: DeepSeek V3.2 makes its index mask for "eager" and "sdpa" alone."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as home

    asks = home.DeepseekV32Attention
    assert hf._asks(asks.__new__(asks))
    assert hf._looks_for_another(asks.__new__(asks))
    assert not hf._looks_for_another(made("Llama", DECODERS).model.layers[0].self_attn)


@needs_torch
def test_a_class_whose_attention_transformers_does_not_set_stays_as_it_was(monkeypatch):
    """As a model written in a notebook."""
    model = made("BERT", ENCODERS)
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(RuntimeError, match=r"is 'sdpa', .* can be set where the class stands"):
        hf.mask_heads(model, RULE)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(x, "head_mask_spec") for x in model.modules())
