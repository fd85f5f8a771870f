"""`python -m benchmarks.own_windows`: a step of `generate()` where the model itself has windows.

Gemma 2 2B and Gemma 3 4B: six layers of their widths, a small vocabulary, random weights, float32,
one text, greedy. KerasHub's cache keeps the keys of the whole text in each layer; under
`hm.Full()`, which hides nothing, a layer with a window keeps those that a later token may see.

Seconds are of the steps alone, as in `benchmarks.generation`. KerasHub's forward of the prompt is
as long as the whole text, 8 GB of logits in a layer: here its cache is filled from the prompt.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ["KERAS_BACKEND"] = "tensorflow"

from benchmarks import generation, machine
from benchmarks.generation import OURS, PROMPT, QUICK, STOCK, Sizes

RECORD = Path(__file__).parent / "results" / "own_windows.json"
LAYERS, VOCABULARY = 6, 256
LENGTHS = 4096, 16384
WIDTHS = {  # of KerasHub's presets
    "Gemma 2 2B": {"hidden": 2304, "feedforward": 18432, "window": 4096},
    "Gemma 3 4B": {"hidden": 2560, "feedforward": 10240, "window": 1024},
}
HEADS, KEY_HEADS, HEAD_DIM = 8, 4, 256


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.own_windows", *sys.argv[1:]]),
        "quick": options.quick,
        "layers": LAYERS,
        "models": {name: {} for name in WIDTHS},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, of_lengths in record["models"].items():
        for length in QUICK.lengths if options.quick else LENGTHS:
            of_lengths[str(length)] = measured(name, length, options)
            options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["models"], indent=2))


def measured(name: str, length: int, options: Any) -> dict[str, Any]:
    import keras_headmask as hm

    masked = hm.apply_head_masks(build(name, options.quick), hm.Full(), copy=False)
    stock = build(name, options.quick)
    _start_from_prompt(stock)
    sizes = Sizes(vocabulary=VOCABULARY, few=QUICK.few, more=QUICK.more if options.quick else 20)
    repetitions = 1 if options.quick else options.repetitions
    models = {OURS: masked, STOCK: stock}
    seconds, runs = generation.time_per_token(models, length, sizes, repetitions)
    held = hm.cache_bytes(masked, length)
    cache = {OURS: held.total, STOCK: held.stock}
    return {"cache_bytes": cache, "seconds_per_token": seconds, "runs": runs}


def build(name: str, quick: bool) -> Any:
    """The model `name` with `LAYERS` layers; a tiny one for `quick`."""
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    widths = WIDTHS[name]
    of_both = {
        "vocabulary_size": VOCABULARY,
        "num_layers": LAYERS,
        "num_query_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "hidden_dim": 16 if quick else widths["hidden"],
        "intermediate_dim": 16 if quick else widths["feedforward"],
        "head_dim": 8 if quick else HEAD_DIM,
        "use_sliding_window_attention": True,
        "sliding_window_size": 8 if quick else widths["window"],
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
    }
    models = keras_hub.models
    if name.startswith("Gemma 2"):
        caps = {"final_logit_soft_cap": 30, "attention_logit_soft_cap": 50}
        return models.GemmaCausalLM(models.GemmaBackbone(**of_both, **caps), preprocessor=None)
    of_3 = {"image_size": None, "vision_encoder": None, "use_query_key_norm": True}
    return models.Gemma3CausalLM(None, models.Gemma3Backbone(**of_both, **of_3))


def _start_from_prompt(task: Any) -> None:
    """Let KerasHub fill its cache from the prompt alone; zeros stand for the rest."""
    import keras
    from keras import ops

    build_cache = task._build_cache

    def build_short(token_ids: Any, *others: Any, **named: Any) -> Any:
        length, prompt = token_ids.shape[1], min(PROMPT, token_ids.shape[1] // 4)

        def cut(x: Any) -> Any:
            return x if x is None else x[:, :prompt]

        def padded(x: Any, axis: int) -> Any:
            widths = [[0, 0] for _ in x.shape]
            widths[axis][1] = length - prompt
            return ops.pad(x, widths)

        named = {name: cut(x) for name, x in named.items()}
        hidden, cache = build_cache(cut(token_ids), *map(cut, others), **named)
        # (A tensor of all layers or a pair of each: the length stands before heads and sizes.)
        return padded(hidden, 1), keras.tree.map_structure(lambda x: padded(x, -3), cache)

    task._build_cache = build_short


if __name__ == "__main__":
    main()
