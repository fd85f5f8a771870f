"""A SavedModel in a process of its own, as a server has it: plain TensorFlow calls its signature.

What `workers.process` runs: `start` once, then the others. (`tests/support/loader.cc` is in C++.)
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import workers

WARM_UP = 3
_loaded: list[Any] = []  # the model, which must be kept while its signature is called


def run(saved_model: Path, request: dict[str, Any], calls: int) -> tuple[Any, list[float]]:
    """The outputs of `request`, and the seconds of so many calls in a row, in a fresh process."""
    with workers.process() as ask:
        ask(start, saved_model)
        ask(call, request, WARM_UP)
        return ask(call, request, calls)


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


def nodes() -> int:
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
