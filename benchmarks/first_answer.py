"""`python -m benchmarks.first_answer`: how long a model with rules takes to its first answer.

BERT models of 12 and 24 layers, tiny in width, since what is traced does not depend on it: stock;
with the first head of each layer held to its sentence; and with four rules in each layer. Every
measurement is a process of its own, and those of the arms take turns. `predict` is the first at a
length, `another length` the one after it, for which Keras traces anew with lengths unknown; `fit`
is the first step; `load` is the load of an export and its first answer; `..., known length` the
same for a model whose inputs have a length. What it is made of is measured apart: tracing in
Python, and what TensorFlow does with the graph at its first run.

Last, calls in a user's own `tf.function`, whose first answer with AutoGraph is compared with that
of `autograph=False`: CPU seconds, since they are short. The stock layer shows what AutoGraph takes
for the user's function itself.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

from benchmarks import machine, workers

RECORD = Path(__file__).parent / "results" / "first_answer.json"
STOCK = "stock"
GOALS = {"one rule": 1.2, "four rules": 1.4}  # times stock's
GOAL_KNOWN = 1.1  # times stock's, of either
GOAL_AUTOGRAPH = 1.1  # times that of `autograph=False`
STEPS = "predict", "another length", "fit", "load"
KNOWN = ", known length"
STEPS_KNOWN = tuple(step + KNOWN for step in ("predict", "fit", "load"))
CALLS = "operands alone", "with ids", "make_mask", "masked layer", "stock layer"
HEADS, END, LENGTH = 12, 3, 64


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each arm")
    parser.add_argument("--layers", default="12,24", help="how many, with commas between; or none")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    depths = [1] if options.quick else [int(n) for n in options.layers.split(",") if n]
    calls = CALLS[:1] if options.quick else CALLS
    repetitions = 1 if options.quick else options.repetitions
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.first_answer", *sys.argv[1:]]),
        "quick": options.quick,
        "goals": GOALS | {"known length": GOAL_KNOWN, "autograph": GOAL_AUTOGRAPH},
        "layers": {n: compared(n, repetitions) for n in depths},
        "autograph": {name: with_autograph(name, repetitions) for name in calls},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for layers, of in record["layers"].items():
        for name, ratios in of["ratios"].items():
            for step, ratio in ratios.items():
                goal = GOAL_KNOWN if step in STEPS_KNOWN else GOALS[name]
                print(f"{layers} layers, {name}, {step}: {told(ratio, goal)}")
    for name, of in record["autograph"].items():
        print(f"autograph, {name}: {told(of['ratio'], GOAL_AUTOGRAPH)}")


def told(ratio: float, goal: float) -> str:
    return f"{ratio:.2f}, goal {goal} {'met' if ratio <= goal else 'missed'}"


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with workers.process() as ask:
        return ask(function, *arguments)


def compared(layers: int, repetitions: int) -> dict[str, Any]:
    """Medians over processes of each arm, in turns, and ratios to stock's."""
    made: dict[str, list[dict]] = {arm: [] for arm in (STOCK, *GOALS)}
    for _ in range(repetitions):
        for arm, runs in made.items():
            measures = measured, measured_at_known_length
            of_any, of_known = (in_fresh_process(x, arm, layers) for x in measures)
            runs.append(of_any | of_known)
    medians = {
        arm: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for arm, runs in made.items()
    }
    steps = (*STEPS, *STEPS_KNOWN)
    ratios = {arm: {s: medians[arm][s] / medians[STOCK][s] for s in steps} for arm in GOALS}
    return {"medians": medians, "ratios": ratios}


def measured(arm: str, layers: int) -> dict[str, float]:
    """Seconds of each step in this process, and what its graph holds."""
    import tensorflow as tf

    model, given = under(arm, bert(layers)), inputs()
    seconds = {"predict": timed(lambda: model.predict(given, verbose=0))}
    shorter = {name: x[:, :48] for name, x in given.items()}
    seconds["another length"] = timed(lambda: model.predict(shorter, verbose=0))
    seconds |= {"fit": fitted(under(arm, bert(layers))), "load": loaded(model)}

    # What it is made of, at lengths that are not known.
    function = tf.function(lambda x: model(x, training=False))
    free = {name: tf.TensorSpec([None, None], "int32") for name in given}
    concrete: list[Any] = []
    seconds["traced"] = timed(lambda: concrete.append(function.get_concrete_function(free)))
    tensors = {name: tf.constant(x) for name, x in given.items()}
    first, again = (timed(lambda: concrete[0](tensors)) for _ in range(2))
    graph = concrete[0].graph.as_graph_def()
    inside = graph.library.function
    return seconds | {
        "first run": first,
        "second run": again,
        "nodes": len(graph.node) + sum(len(f.node_def) for f in inside),
        "functions": len(inside),
    }


def measured_at_known_length(arm: str, layers: int) -> dict[str, float]:
    """The same of models whose inputs have a length."""
    import keras

    def model() -> Any:
        fixed = {x: keras.Input((LENGTH,), dtype="int32", name=x) for x in inputs()}
        return keras.Model(fixed, under(arm, bert(layers))(fixed))

    answers, learns = model(), model()
    predict = timed(lambda: answers.predict(inputs(), verbose=0))
    seconds = predict, fitted(learns), loaded(answers)
    return dict(zip(STEPS_KNOWN, seconds, strict=True))


def fitted(model: Any) -> float:
    import numpy as np

    model.compile("sgd", "mse")
    target = np.zeros((4, LENGTH, 24), "float32")
    return timed(lambda: model.fit(inputs(), target, verbose=0))


def loaded(model: Any) -> float:
    import tensorflow as tf

    def load() -> None:
        served = tf.saved_model.load(folder)
        served.signatures["serving_default"](**{k: tf.constant(x) for k, x in inputs().items()})

    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        return timed(load)


def with_autograph(name: str, repetitions: int) -> dict[str, float]:
    """Medians over processes, in turns, and how many times that without AutoGraph."""
    runs = [
        [in_fresh_process(first_call, name, autograph) for autograph in (True, False)]
        for _ in range(repetitions)
    ]
    autograph, without = map(statistics.median, zip(*runs, strict=True))
    return {"cpu_seconds": autograph, "without": without, "ratio": autograph / without}


def first_call(name: str, autograph: bool) -> float:
    """CPU seconds of the first call of a `tf.function` that makes the call `name`."""
    import keras
    import tensorflow as tf

    import keras_headmask as hm

    sentence, window = (hm.PerHead({0: x}) for x in (hm.SameSentence(END), hm.Window(8, 8)))
    ids = tf.constant(inputs()["token_ids"])
    x, heads = tf.ones((4, LENGTH, 24)), tf.ones((4, LENGTH, HEADS, 2))
    model_input = keras.Input((LENGTH, 24))
    stock = keras.layers.MultiHeadAttention(HEADS, 2, name="attention")
    model = keras.Model(model_input, stock(model_input, model_input))
    masked = hm.apply_head_masks(model, window).get_layer("attention")

    def operands_alone() -> Any:
        return hm.dot_product_attention(heads, heads, heads, mask_spec=window)

    def with_ids() -> Any:
        given = {"token_ids": ids}
        return hm.dot_product_attention(heads, heads, heads, mask_spec=sentence, mask_inputs=given)

    def make_mask() -> Any:
        return hm.make_mask(sentence, LENGTH, LENGTH, HEADS, {"token_ids": ids})

    def masked_layer() -> Any:
        return masked(x, x)

    def stock_layer() -> Any:
        return stock(x, x)

    calls = operands_alone, with_ids, make_mask, masked_layer, stock_layer
    function = tf.function(dict(zip(CALLS, calls, strict=True))[name], autograph=autograph)
    return timed(function, time.process_time)


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


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
    rules = {"0": sentence}
    if arm == "four rules":
        rules |= {"1-3": hm.Window(8, 8), "4-7": hm.Keys(0, 1) | hm.Window(4, 4)}
    return hm.apply_head_masks(model, hm.PerHead(rules))


def inputs() -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(0).integers(1, 50, (4, LENGTH), dtype="int32")
    return {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }


if __name__ == "__main__":
    main()
