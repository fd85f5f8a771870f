"""`python -m benchmarks.serving`: what a rule costs an exported BERT, from Python and from C++.

The model has the shape of all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide), made of Keras' own
layers with random weights; a batch of 8 rows of 256 tokens. Head 0 of every layer obeys its
sentence. Peers: the same model without a rule, and one that takes the mask `(8, 12, 256, 256)` as
an input. All are exported alike. Python calls the loaded signature, C++ what
`tensorflow::LoadSavedModel` gives (needs g++, else left out); each model is called in a process of
its own, as a server has it, and the processes take turns.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine, served_calls

GOALS = {"stock": 0.9, "mask input": 0.88}
BATCH, LENGTH, LAYERS, HEADS, WIDTH, WORDS = 8, 256, 6, 12, 384, 30522
FULL_STOP, SENTENCE = 1012, 16
RECORD = Path(__file__).parent / "results" / "serving.json"
TESTS = Path(__file__).parents[1] / "tests" / "support"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=12, help="calls of a process")
    parser.add_argument("--rounds", type=int, default=8, help="of processes for each model")
    parser.add_argument("--python-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.serving", *sys.argv[1:]]),
        "quick": options.quick,
        "goals": GOALS,
    }
    with tempfile.TemporaryDirectory() as folder:
        record |= measured(options, Path(folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for language in ("python", "c++"):
        for way in ("rule", "rule, all scores"):
            for peer, goal in GOALS.items():
                ratio = record[language].get("ratios", {}).get(f"{way} / {peer}")
                if ratio is not None:
                    told = "met" if ratio <= goal else "missed"
                    print(f"{language}, {way}: {ratio:.3f} of {peer}, goal {goal} {told}")
    if "reason" in record["c++"]:
        print(f"c++ left out: {record['c++']['reason']}")


def encoder(with_mask: bool, layers: int, words: int) -> Any:
    """BERT's encoder; `with_mask`: the mask of every head is an input."""
    import keras
    from keras import layers as kl

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    padding = keras.Input((None,), dtype="int32", name="padding_mask")
    inputs = {"token_ids": ids, "padding_mask": padding}
    mask = padding[:, None, :]
    if with_mask:
        inputs["mask"] = keras.Input((HEADS, None, None), dtype="bool", name="mask")
        mask = keras.ops.logical_and(inputs["mask"], padding[:, None, None, :] > 0)
    x = kl.LayerNormalization(epsilon=1e-12)(kl.Embedding(words, WIDTH)(ids))
    for _ in range(layers):
        attended = kl.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x, attention_mask=mask)
        x = kl.LayerNormalization(epsilon=1e-12)(kl.Add()([x, attended]))
        hidden = kl.Dense(WIDTH)(kl.Dense(4 * WIDTH, activation="gelu")(x))
        x = kl.LayerNormalization(epsilon=1e-12)(kl.Add()([x, hidden]))
    return keras.Model(inputs, x)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_headmask as hm

    batch, length, layers = (2, 32, 1) if options.quick else (BATCH, LENGTH, LAYERS)
    words = 2000 if options.quick else WORDS
    rule = hm.PerHead({0: hm.SameSentence(FULL_STOP)})
    stock, fed = encoder(False, layers, words), encoder(True, layers, words)
    fed.set_weights(stock.get_weights())
    masked = hm.apply_head_masks(stock, rule)
    models = {"stock": stock, "mask input": fed, "rule": masked, "rule, all scores": masked}
    exports = {}
    for name, model in models.items():
        scope = hm.dense_scope if name == "rule, all scores" else contextlib.nullcontext
        with scope():
            base = folder / name.replace(" ", "_")
            exports[name] = hm.export_saved_model(model, base, check=False)
    rng = np.random.default_rng(0)
    ids = rng.integers(1100, min(20000, words), (batch, length)).astype("int32")
    ids[:, SENTENCE - 1 :: SENTENCE] = FULL_STOP
    inputs = {"token_ids": ids, "padding_mask": np.ones((batch, length), "int32")}
    mask = hm.make_mask(rule, length, length, HEADS, {"token_ids": ids})
    requests = {name: dict(inputs) for name in models}
    requests["mask input"]["mask"] = keras.ops.convert_to_numpy(mask)
    return {
        "batch": batch,
        "length": length,
        "exports": {
            name: {
                "seconds": report.seconds,
                "bytes": {
                    "graph": (report.path / "saved_model.pb").stat().st_size,
                    "total": sum(x.stat().st_size for x in report.path.rglob("*") if x.is_file()),
                },
            }
            for name, report in exports.items()
        },
        "python": _from_python(exports, requests, options),
        "c++": _from_cpp(exports, requests, options, folder),
    }


def _from_python(exports: dict, requests: dict, options: argparse.Namespace) -> dict[str, Any]:
    def run(name: str, calls: int) -> tuple[Any, list[float]]:
        answer, seconds = served_calls.run(exports[name].path, requests[name], calls)
        return answer["output_0"], seconds

    result, outputs = _in_turns(run, exports, options)
    apart = {
        name: float(abs(outputs[name] - outputs["mask input"]).max())
        for name in ("rule", "rule, all scores")
    }
    return result | {"differences": apart}


def _from_cpp(
    exports: dict, requests: dict, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    sys.path.insert(0, str(TESTS))
    import cpp

    if options.python_only:
        return {"reason": "--python-only"}
    if reason := cpp.why_not():
        return {"reason": reason}
    program = cpp.build(folder)

    def run(name: str, calls: int) -> tuple[Any, list[float]]:
        request = [("serving_default", requests[name])]
        ((answer, microseconds),) = cpp.run(program, exports[name].path, request, calls)
        return answer, (microseconds / 1e6).tolist()

    return _in_turns(run, exports, options)[0]


def _in_turns(
    run: Callable[[str, int], tuple[Any, list[float]]],
    names: Iterable[str],
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Medians over rounds of processes, in each of which every model has its own; and answers."""
    calls = 2 if options.quick else options.repetitions
    seconds: dict[str, list[float]] = {name: [] for name in names}
    answers = {}
    for _ in range(1 if options.quick else options.rounds):
        for name in seconds:
            answers[name], times = run(name, calls)
            seconds[name].extend(times)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {"seconds": medians, "calls": calls, "ratios": _ratios(medians)}, answers


def _ratios(seconds: dict[str, float]) -> dict[str, float]:
    return {
        f"{way} / {peer}": seconds[way] / seconds[peer]
        for way in ("rule", "rule, all scores")
        for peer in GOALS
    }


if __name__ == "__main__":
    main()
