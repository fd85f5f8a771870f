"""`python -m benchmarks.first_answer`: how long a model with rules takes to its first answer.

BERT models of 12 and 24 layers, tiny in width, since what is traced does not depend on it: stock;
with the first head of each layer held to its sentence, or to a window; with four rules in each
layer. Every measurement is a process of its own, and those of the arms take turns. All are CPU
seconds of all threads. `predict` is the first at a length, `another length` the one after it, for
which Keras traces anew with lengths unknown; `fit` is the first step at another length; `load` is
the load of an export and its first answer.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

from benchmarks import machine, workers

RECORD = Path(__file__).parent / "results" / "first_answer.json"
STEPS = "predict", "another length", "fit", "load"
STOCK, ONE = "stock", {"predict": 1.1, "another length": 1.5, "fit": 1.25, "load": 1.35}
FOUR = {"predict": 1.1, "another length": 2.0, "fit": 1.5, "load": 1.5}
GOALS = {"one rule": ONE, "one window": ONE, "four rules": FOUR}  # times stock's
HEADS, END, LENGTH, SHORTER = 12, 3, 64, 48


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each arm")
    parser.add_argument("--layers", default="12,24", help="how many, with commas between; or none")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    depths = [1] if options.quick else [int(n) for n in options.layers.split(",") if n]
    repetitions = 1 if options.quick else options.repetitions
    record = machine.describe("benchmarks.first_answer", options.quick) | {
        "goals": GOALS,
        "layers": {n: compared(n, repetitions) for n in depths},
    }
    machine.write(options.out, record)
    for layers, of in record["layers"].items():
        for name, ratios in of["ratios"].items():
            for step, ratio in ratios.items():
                verdict = "met" if ratio <= GOALS[name][step] else "missed"
                print(f"{layers} layers, {name}, {step}: {ratio:.2f}, {verdict}")


def compared(layers: int, repetitions: int) -> dict[str, Any]:
    """Medians over processes of each arm, in turns, and ratios to stock's."""
    made: dict[str, list[dict]] = {arm: [] for arm in (STOCK, *GOALS)}
    for _ in range(repetitions):
        for arm, runs in made.items():
            with workers.process() as ask:
                runs.append(ask(measured, arm, layers))
    medians = {
        arm: {step: statistics.median(run[step] for run in runs) for step in STEPS}
        for arm, runs in made.items()
    }
    ratios = {arm: {s: medians[arm][s] / medians[STOCK][s] for s in STEPS} for arm in GOALS}
    return {"medians": medians, "ratios": ratios}


def measured(arm: str, layers: int) -> dict[str, float]:
    """Seconds of each step in this process."""
    model, given, shorter = under(arm, bert(layers)), inputs(), inputs(SHORTER)
    seconds = {"predict": timed(lambda: model.predict(given, verbose=0))}
    seconds["another length"] = timed(lambda: model.predict(shorter, verbose=0))
    return seconds | {"fit": fitted(under(arm, bert(layers))), "load": loaded(model)}


def fitted(model: Any) -> float:
    import numpy as np

    model.compile("sgd", "mse")
    target = np.zeros((4, LENGTH, 24), "float32")
    model.fit(inputs(), target, verbose=0)
    return timed(lambda: model.fit(inputs(SHORTER), target[:, :SHORTER], verbose=0))


def loaded(model: Any) -> float:
    import tensorflow as tf

    def load() -> None:
        served = tf.saved_model.load(folder)
        served.signatures["serving_default"](**{k: tf.constant(x) for k, x in inputs().items()})

    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        return timed(load)


def timed(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def bert(layers: int) -> Any:
    import keras_hub

    return keras_hub.models.BertBackbone(
        vocabulary_size=60,
        num_layers=layers,
        num_heads=HEADS,
        hidden_dim=24,
        intermediate_dim=24,
        max_sequence_length=LENGTH,
    )


def under(arm: str, model: Any) -> Any:
    """`model`, or its sequence output under the rules of `arm`."""
    import keras

    import keras_headmask as hm

    model = keras.Model(model.input, model.output["sequence_output"])
    if arm == STOCK:
        return model
    sentence = hm.SameSentence(END, input="token_ids")
    rules = {"0": hm.Window(8, 8) if arm == "one window" else sentence}
    if arm == "four rules":
        rules |= {"1-3": hm.Window(8, 8), "4-7": hm.Keys(0, 1) | hm.Window(4, 4)}
    return hm.apply_head_masks(model, hm.PerHead(rules))


def inputs(length: int = LENGTH) -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(0).integers(1, 50, (4, length), dtype="int32")
    return {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }


if __name__ == "__main__":
    main()
