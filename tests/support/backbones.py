"""KerasHub's backbones, tiny and random: which ones a rule reaches, and which are refused.

Those with attention of their own are in decoders.py. The table in docs/retrofit.md comes from these
lists: `python tests/support/backbones.py` writes it.
"""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "retrofit.md"

_TEXT = {
    "vocabulary_size": 30,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_TEXT_SHORT = _TEXT | {"dropout": 0.0, "max_sequence_length": 16}
_ELECTRA = {k: v for k, v in _TEXT_SHORT.items() if k != "vocabulary_size"}
_WHISPER = _TEXT | {
    "num_mels": 4,
    "max_encoder_sequence_length": 16,
    "max_decoder_sequence_length": 8,
}
_VIT = {
    "image_shape": (8, 8, 3),
    "patch_size": (2, 2),
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "mlp_dim": 16,
}


_ED_REC = {
    "vocab_size": 30,
    "num_layers_enc": 2,
    "num_layers_dec": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "num_heads": 2,
}


class Leak(NamedTuple):
    """Under `Chunk(4)`, a change of `input` at `place` must not reach `rows` of `output`."""

    input: str
    place: tuple
    output: str | None
    rows: slice


_FROM_TOKEN_1 = Leak("token_ids", (slice(None), 1), "sequence_output", slice(4, 8))
_OF_ENCODER_AND_DECODER = tuple(
    Leak(f"{part}_token_ids", (slice(None), 1), f"{part}_sequence_output", slice(4, 8))
    for part in ("encoder", "decoder")
)
_CROSS = "encoder, decoder; cross-attention by name"


class Inside(NamedTuple):
    """A model of which another one is made."""

    name: str  # of the class in keras_hub.models
    arguments: dict


class Covered(NamedTuple):
    name: str
    arguments: dict
    leaks: tuple[Leak, ...] = (_FROM_TOKEN_1,)
    reached: str = "all self-attention"

    @property
    def backbone(self):
        return self.name

    layers = None  # that are named: see `decoders.Family`


_OPT = Inside("BLIP2CustomOPT", _TEXT_SHORT | {"num_query_tokens": 0, "qformer_hidden_dim": 8})
_PARSEQ = {
    "image_encoder": Inside("ViTBackbone", _VIT),
    "vocabulary_size": 30,
    "max_label_length": 8,
    "decoder_hidden_dim": 8,
    "num_decoder_layers": 2,
    "num_decoder_heads": 2,
    "decoder_mlp_dim": 16,
}
_RWKV_7 = {
    "hidden_size": 8,
    "head_size": 4,
    "num_layers": 1,
    "vocabulary_size": 30,
    "intermediate_dim": 16,
}

COVERED = [
    Covered("BertBackbone", _TEXT_SHORT),
    Covered("RobertaBackbone", _TEXT_SHORT),
    Covered("XLMRobertaBackbone", _TEXT_SHORT),
    Covered("DistilBertBackbone", _TEXT_SHORT),
    Covered("ElectraBackbone", _ELECTRA | {"vocab_size": 30, "embedding_dim": 8}),
    Covered("AlbertBackbone", _TEXT_SHORT | {"embedding_dim": 8}),
    Covered("GPT2Backbone", _TEXT_SHORT, reached="all self-attention; `generate()`"),
    Covered("OPTBackbone", _TEXT_SHORT, reached="all self-attention; `generate()`"),
    Covered(
        "BartBackbone",
        _TEXT_SHORT,
        _OF_ENCODER_AND_DECODER,
        f"{_CROSS}; `generate()`",
    ),
    Covered(
        "WhisperBackbone",
        _WHISPER,
        (
            # Two convolutions reach from frame 1 to position 1, of the eight that are left.
            Leak("encoder_features", (slice(None), 1), "encoder_sequence_output", slice(4, 8)),
            Leak("decoder_token_ids", (slice(None), 1), "decoder_sequence_output", slice(4, 8)),
        ),
        _CROSS,
    ),
    Covered("EdRecBackbone", _ED_REC, _OF_ENCODER_AND_DECODER, _CROSS),
    Covered(
        "BLIP2Backbone",
        {"vision_encoder": None, "qformer": None, "language_model": _OPT},
        (_FROM_TOKEN_1._replace(output=None),),
        "all self-attention, with OPT as the language model",
    ),
    Covered(
        "PARSeqBackbone",
        _PARSEQ,
        (_FROM_TOKEN_1._replace(output=None),),
        "picture encoder, decoder; cross-attention by name",
    ),
    Covered(
        "ViTBackbone",
        _VIT,
        (Leak("images", (slice(None), slice(0, 2)), None, slice(8, 17)),),  # patches 1 to 4
    ),
]

WITHOUT_ATTENTION = {
    "FNetBackbone": {k: v for k, v in _TEXT_SHORT.items() if k != "num_heads"},
    "RWKV7Backbone": _RWKV_7,
}


def table():
    """The table of `PAGE`."""
    rows = {entry.reached: [] for entry in COVERED}
    for entry in COVERED:
        rows[entry.reached].append(entry.name)
    rows["nothing: no attention"] = WITHOUT_ATTENTION
    names = {reach: f"`{'`, `'.join(of_row)}`" for reach, of_row in rows.items()}
    others = "those of [Llama, Gemma, T5, DeBERTa v3 and others](generate.md#which-families)"
    names["all attention, by query heads"] = others
    lines = [f"| {reach} | {backbones} |" for reach, backbones in names.items()]
    return "\n".join(["| a rule reaches | in the backbones |", "|---|---|", *lines])


def written(page, mark, table):
    """The text of `page` with `table` between its comments of that name."""
    marks = re.compile(rf"(<!-- {mark}:start -->\n).*(\n<!-- {mark}:end -->)", re.DOTALL)
    text, count = marks.subn(lambda x: x[1] + table + x[2], page.read_text(encoding="utf-8"))
    assert count == 1, f"{page.name} lacks the comments `{mark}`"
    return text


def page():
    return written(PAGE, "backbones", table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
