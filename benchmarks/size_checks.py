"""`python -m benchmarks.size_checks`: what it costs to check the sizes of mask inputs in a graph.

A model of 12 layers of 12 heads, head 0 of each under a rule that reads ids, in a `tf.function` of
any batch and length, as `predict` and exports trace it. The other side is the same graph without
the checks. Medians of interleaved forwards in one process.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine, measure

LAYERS, HEADS, SIZE = 12, 12, 32
SHAPES = (1, 16), (1, 128), (8, 256)
RECORD = Path(__file__).parent / "results" / "size_checks.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.size_checks", *sys.argv[1:]]),
        "quick": options.quick,
    }
    record |= measured(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print("nodes of the graph:", record["nodes"])
    for shape, ratio in record["ratios"].items():
        print(f"{shape}: {ratio:.3f} of the time without checks")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Nodes of both graphs, and the seconds of both for each batch x length."""
    import numpy as np
    import tensorflow as tf

    model = made(2 if options.quick else LAYERS)
    ids = [tf.TensorSpec((None, None), tf.int32)]
    functions = {"checked": tf.function(model, ids).get_concrete_function()}
    # Sizes that only the run shows are checked where they are open.
    with mock.patch("keras_headmask.rules.graph_shapes._is_open", return_value=False):
        functions["unchecked"] = tf.function(model, ids).get_concrete_function()
    rng, found = np.random.default_rng(0), {}
    for batch, length in SHAPES:
        given = tf.constant(rng.integers(1, 1000, (batch, length)), tf.int32)
        runs = {
            name: lambda function=function, given=given: function(given).numpy()
            for name, function in functions.items()
        }
        difference = abs(runs["checked"]() - runs["unchecked"]()).max()
        result = measure.interleaved(runs, 2 if options.quick else options.repetitions, warm_up=3)
        found[f"{batch} x {length}"] = result | {"difference": float(difference)}
    return {
        "nodes": {name: len(x.graph.get_operations()) for name, x in functions.items()},
        "shapes": found,
        "ratios": {
            shape: x["seconds"]["checked"] / x["seconds"]["unchecked"] for shape, x in found.items()
        },
    }


def made(layers: int) -> Any:
    """The model, of token ids."""
    import keras

    import keras_headmask as hm

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(1000, HEADS * SIZE, mask_zero=True)(ids)
    for _ in range(layers):
        attention = hm.PerHeadMaskedMultiHeadAttention(
            HEADS, SIZE, mask_spec=hm.PerHead({0: hm.SameSentence(9)})
        )
        x = keras.layers.Add()([x, attention(x, mask_inputs={"token_ids": ids})])
    return keras.Model(ids, x)


if __name__ == "__main__":
    main()
