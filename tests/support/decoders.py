"""KerasHub's modern families, tiny and random, whose attention is no class of Keras.

The table in docs/generate.md comes from these lists: `python tests/support/decoders.py` writes it.
"""

from pathlib import Path
from typing import NamedTuple

from backbones import written

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"

_TEXT = {"vocabulary_size": 32, "num_layers": 1, "hidden_dim": 32, "intermediate_dim": 16}
_HEADS = {"num_heads": 4}
_GROUPED = _TEXT | {"num_query_heads": 4, "num_key_value_heads": 2}
_SLIDING = {"use_sliding_window_attention": True, "sliding_window_size": 4}
_GEMMA_2 = (
    _GROUPED
    | _SLIDING
    | {
        "num_layers": 2,  # the second does not slide
        "head_dim": 8,
        "attention_logit_soft_cap": 2.0,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
    }
)
_GEMMA_3 = _GROUPED | _SLIDING | {"head_dim": 16, "image_size": 16, "attention_logit_soft_cap": 2.0}
_GEMMA_4 = _GEMMA_3 | {
    "num_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_kv_shared_layers": 1,  # the last reads the keys of the first
    "global_head_dim": 32,  # of the second, which does not slide
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 4,
}
_SMOLLM_3 = _TEXT | {
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, False],
    "layer_types": ["full_attention"] * 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
}
_LINEAR = _GROUPED | {  # linear attention, and then attention
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "sliding_window_size": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
_EXPERTS = {"num_experts": 2, "top_k": 2, "moe_intermediate_dim": 16}
_MISTRAL = _GROUPED | {"sliding_window": 4}
_QWEN_3 = _GROUPED | {"head_dim": 8, "sliding_window_size": 4}
_QWEN_MOE = _GROUPED | _SLIDING | _EXPERTS | {"shared_expert_intermediate_dim": 16}
_QWEN_3_5_MOE = _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 16}
del _QWEN_3_5_MOE["intermediate_dim"]
_GPT_OSS = _MISTRAL | {"num_layers": 2, "num_experts": 2}  # the second slides
_DEBERTA = _TEXT | _HEADS | {"max_sequence_length": 16, "bucket_size": 4}


class Family(NamedTuple):
    name: str
    backbone: str  # of the class in keras_hub.models
    attention: str  # of the class that computes
    arguments: dict
    key_heads: int = 2
    keeps: str = "-"  # of what it does by itself
    layers: str | None = None  # that a rule reaches, if the others have no mask

    def __str__(self):
        return self.name


_WINDOW, _CAPPED = "sliding window", "sliding window, soft cap"
_BESIDE_LINEAR = {
    "keeps": "sliding window; linear attention, which no rule reaches",
    "layers": "self_attention",
}
_ALIBI = {"key_heads": 4, "keeps": "bias by distance (ALiBi)"}

FAMILIES = [
    Family("Llama", "LlamaBackbone", "LlamaAttention", _GROUPED),
    Family("Mistral", "MistralBackbone", "CachedMistralAttention", _MISTRAL, keeps=_WINDOW),
    Family("Qwen 2", "QwenBackbone", "QwenAttention", _GROUPED | _SLIDING, keeps=_WINDOW),
    Family("Qwen 3", "Qwen3Backbone", "Qwen3Attention", _QWEN_3, keeps=_WINDOW),
    Family(
        "Mixtral",
        "MixtralBackbone",
        "CachedMixtralAttention",
        _MISTRAL | {"num_experts": 2},
        keeps=_WINDOW,
    ),
    Family("Qwen MoE", "QwenMoeBackbone", "QwenMoeAttention", _QWEN_MOE, keeps=_WINDOW),
    Family(
        "Qwen 3 MoE", "Qwen3MoeBackbone", "Qwen3MoeAttention", _QWEN_3 | _EXPERTS, keeps=_WINDOW
    ),
    Family("Qwen 3.5", "Qwen3_5Backbone", "Qwen3_5Attention", _LINEAR, **_BESIDE_LINEAR),
    Family(
        "Qwen 3.5 MoE", "Qwen3_5MoeBackbone", "Qwen3_5Attention", _QWEN_3_5_MOE, **_BESIDE_LINEAR
    ),
    Family("gpt-oss", "GptOssBackbone", "GptOssAttention", _GPT_OSS, keeps="sliding window, sinks"),
    Family("Phi-3", "Phi3Backbone", "Phi3Attention", _GROUPED),
    Family("SmolLM 3", "SmolLM3Backbone", "SmolLM3Attention", _SMOLLM_3),
    Family("Gemma", "GemmaBackbone", "CachedGemmaAttention", _GROUPED | {"head_dim": 16}),
    Family("Gemma 2", "GemmaBackbone", "CachedGemmaAttention", _GEMMA_2, keeps=_CAPPED),
    Family("Gemma 3, text", "Gemma3Backbone", "CachedGemma3Attention", _GEMMA_3, keeps=_CAPPED),
    Family(
        "Gemma 4, text",
        "Gemma4Backbone",
        "Gemma4TextAttention",
        _GEMMA_4,
        keeps=f"{_CAPPED}, keys of an earlier layer",
    ),
    Family("GPT-NeoX", "GPTNeoXBackbone", "GPTNeoXAttention", _TEXT | _HEADS, 4),
    Family(
        "Falcon", "FalconBackbone", "FalconAttention", _TEXT | {"num_attention_heads": 4}, **_ALIBI
    ),
    Family("BLOOM", "BloomBackbone", "BloomAttention", _TEXT | _HEADS, **_ALIBI),
    Family(
        "DeBERTa v3",
        "DebertaV3Backbone",
        "DisentangledSelfAttention",
        _DEBERTA,
        key_heads=4,
        keeps="disentangled bias",
    ),
]


_ENCODER_AND_DECODER = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 32,
        "intermediate_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }.items()
}
T5_GEMMA = _ENCODER_AND_DECODER | {
    "vocabulary_size": 32,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
}


ENCODER_DECODERS = [
    Family(
        "T5",
        "T5Backbone",
        "T5MultiHeadAttention",
        _TEXT | _HEADS | {"num_layers": 2},
        key_heads=4,
        keeps="bias by distance",
    ),
    Family("T5Gemma", "T5GemmaBackbone", "T5GemmaAttention", T5_GEMMA, keeps=_CAPPED),
]


class Refused(NamedTuple):
    name: str
    backbone: str
    attention: str
    arguments: dict
    why: str


_VISION = {
    "image_size": 4,
    "vit_patch_size": 2,
    "vit_num_heads": 2,
    "vit_hidden_dim": 8,
    "vit_num_layers": 1,
    "vit_intermediate_dim": 8,
}
_MOONSHINE = {
    "vocabulary_size": 30,
    "filter_dim": 8,
    "encoder_num_layers": 1,
    "decoder_num_layers": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "encoder_num_heads": 2,
    "decoder_num_heads": 2,
}


_GEMMA_3N = {
    "text_vocab_size": 32,
    "text_hidden_size": 32,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": [16] * 3,
    "hidden_activation": "gelu_approximate",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 4,
    "altup_num_inputs": 2,
    "laurel_rank": 2,
    "num_kv_shared_layers": 1,
}

REFUSED = [
    Refused(
        "Gemma 3n",
        "Gemma3nBackbone",
        "Gemma3nTextAttention",
        _GEMMA_3N,
        "its graph multiplies by values that no config holds, so that a copy computes otherwise",
    ),
    Refused(
        "PaliGemma",
        "PaliGemmaBackbone",
        "PaliGemmaVitAttention",
        _GROUPED | {"head_dim": 8} | _VISION,
        "its picture encoder attends by code of its own; name the decoder's layers in `layers`",
    ),
    Refused(
        "Moonshine",
        "MoonshineBackbone",
        "MoonshineMultiHeadAttention",
        _MOONSHINE,
        "rotates and pads in a `call` of its own",
    ),
    Refused(
        "T5Gemma 2",
        "T5Gemma2Backbone",
        "T5Gemma2MergedAttention",
        T5_GEMMA,
        "its decoder has one softmax for the keys of both sequences; name the encoder's layers",
    ),
    Refused(
        "XLNet",
        "XLNetBackbone",
        "TwoStreamRelativeAttention",
        _TEXT | _HEADS,
        "two streams of queries, by code of its own",
    ),
]


def table():
    """The table of `PAGE`."""
    rows = {}
    for entry in (*FAMILIES, *ENCODER_DECODERS):
        rows.setdefault(entry.keeps, []).append(entry.name.removesuffix(", text"))
    lines = [f"| {', '.join(names)} | {keeps} |" for keeps, names in rows.items()]
    lines += [f"| {x.name} (`{x.attention}`) | refused: {x.why} |" for x in REFUSED]
    return "\n".join(["| family | keeps its own |", "|---|---|", *lines])


def page():
    return written(PAGE, "families", table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
