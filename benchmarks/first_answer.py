"""`python -m benchmarks.first_answer`: how long a model with rules takes to its first answer.

BERT models of 12 and 24 layers, tiny in width, since what is traced does not depend on it: stock;
with the first head of each layer held to its sentence; and with four rules in each layer. Every
measurement is a process of its own, and those of the arms take turns. `predict` is the first at a
length, `another length` the one after it, for which Keras traces anew with lengths unknown; `fit`
is the first step; `load` is the load of an export and its first answer. What it is made of is
measured apart: tracing in Python, and what TensorFlow does with the graph at its first run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

from benchmarks import machine

RECORD = Path(__file__).parent / "results" / "first_answer.json"
STOCK = "stock"
GOALS = {"one rule": 1.5, "four rules": 2.0}  # times stock's
STEPS = "predict", "another length", "fit", "load"
HEADS, END = 12, 3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each arm")
    parser.add_argument("--layers", default="12,24", help="how many, with commas between")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arm:
        print(json.dumps(measured(options.arm, int(options.layers))))
        return
    depths = [1] if options.quick else [int(n) for n in options.layers.split(",")]
    found = {n: compared(n, 1 if options.quick else options.repetitions) for n in depths}
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.first_answer", *sys.argv[1:]]),
        "quick": options.quick,
        "goals": GOALS,
        "layers": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for layers, of in found.items():
        for name, ratios in of["ratios"].items():
            shown = ", ".join(f"{step} {ratio:.2f}" for step, ratio in ratios.items())
            print(f"{layers} layers, {name}: {shown} of stock's time, goal {GOALS[name]}")


def compared(layers: int, repetitions: int) -> dict[str, Any]:
    """Medians over processes of each arm, in turns, and ratios to stock's."""
    made: dict[str, list[dict]] = {arm: [] for arm in (STOCK, *GOALS)}
    for _ in range(repetitions):
        for arm, runs in made.items():
            own = "--arm", arm, "--layers", str(layers)
            command = [sys.executable, "-m", "benchmarks.first_answer", *own]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        arm: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for arm, runs in made.items()
    }
    ratios = {arm: {s: medians[arm][s] / medians[STOCK][s] for s in STEPS} for arm in GOALS}
    return {"medians": medians, "ratios": ratios}


def measured(arm: str, layers: int) -> dict[str, float]:
    """Seconds of each step in this process, and what its graph holds."""
    import numpy as np
    import tensorflow as tf

    model = under(arm, bert(layers))
    ids = np.random.default_rng(0).integers(1, 50, (4, 64), dtype="int32")
    seconds = {"predict": timed(lambda: model.predict(inputs(ids), verbose=0))}
    seconds["another length"] = timed(lambda: model.predict(inputs(ids[:, :48]), verbose=0))

    learner = under(arm, bert(layers))
    learner.compile("sgd", "mse")
    target = np.zeros((4, 64, 24), "float32")
    seconds["fit"] = timed(lambda: learner.fit(inputs(ids), target, verbose=0))

    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)

        def load() -> None:
            loaded = tf.saved_model.load(folder)
            given = {k: tf.constant(x) for k, x in inputs(ids).items()}
            loaded.signatures["serving_default"](**given)

        seconds["load"] = timed(load)

    # What it is made of, at lengths that are not known.
    function = tf.function(lambda x: model(x, training=False))
    free = {k: tf.TensorSpec([None, None], "int32") for k in inputs(ids)}
    concrete: list[Any] = []
    seconds["traced"] = timed(lambda: concrete.append(function.get_concrete_function(free)))
    given = {k: tf.constant(x) for k, x in inputs(ids).items()}
    first, again = (timed(lambda: concrete[0](given)) for _ in range(2))
    graph = concrete[0].graph.as_graph_def()
    inside = graph.library.function
    return seconds | {
        "first run": first,
        "second run": again,
        "nodes": len(graph.node) + sum(len(f.node_def) for f in inside),
        "functions": len(inside),
    }


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def bert(layers: int) -> Any:
    import keras_hub

    return keras_hub.models.BertBackbone(
        vocabulary_size=60,
        num_layers=layers,
        num_heads=HEADS,
        hidden_dim=24,
        intermediate_dim=24,
        max_sequence_length=64,
    )


def under(arm: str, model: Any) -> Any:
    """`model`, or its sequence output under the rules of `arm`."""
    import keras

    import keras_headmask as hm

    model = keras.Model(model.input, model.output["sequence_output"])
    if arm == STOCK:
        return model
    sentence = hm.SameSentence(END, input="token_ids")
    rules = {"0": sentence}
    if arm == "four rules":
        rules |= {"1-3": hm.Window(8, 8), "4-7": hm.Keys(0, 1) | hm.Window(4, 4)}
    return hm.apply_head_masks(model, hm.PerHead(rules))


def inputs(ids: Any) -> dict[str, Any]:
    import numpy as np

    return {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }


if __name__ == "__main__":
    main()
