"""Peak memory and time of the window rule by length; each length in a process of its own."""

import itertools
import math
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import cases, measure


class Job(NamedTuple):
    """One length of one peer: `ours` or `stock`; `forward` or `training`."""

    peer: str
    step: str
    length: int


def memory_jobs(quick: bool) -> list[Job]:
    length = 512 if quick else 8192
    return [Job(peer, "forward", length) for peer in ("ours", "stock")]


def scaling_jobs(quick: bool) -> list[Job]:
    lengths = [256, 512] if quick else [2**n for n in range(10, 17)]
    ours = itertools.product(["ours"], ["forward", "training"], lengths)
    stock = [("stock", "forward", length) for length in lengths if length <= 8192]
    return [Job(*job) for job in [*ours, *stock]]


def measured(job: Job, dtype: str, quick: bool, repetitions: int) -> dict[str, Any]:
    """Peak memory above the inputs of a first and a second run, and the median time."""
    result: dict[str, Any] = job._asdict()
    case = cases.window_case(job.length, quick)
    try:
        function = _in_keras(job, case, dtype)
        start = time.perf_counter()
        result["first_peak_mib"] = measure.peak_mib(function)
        first = time.perf_counter() - start
        result["peak_mib"] = measure.peak_mib(function)
        repetitions = max(2 if quick else 3, min(repetitions, int(60 / max(first, 1e-3))))
        timed = measure.interleaved({"time": function}, repetitions, warm_up=0)
        result["seconds"] = timed["seconds"]["time"]
        result["repetitions"] = repetitions
    except Exception as error:  # above all, memory that does not suffice
        result["error"] = measure.message(error)
    return result


def _in_keras(job: Job, case: cases.Case, dtype: str) -> Any:
    import tensorflow as tf

    from benchmarks import peers_keras

    def operands(of: cases.Case) -> list[Any]:
        # Made by NumPy: TensorFlow would keep what it needs to make them, and use it again.
        count = 4 if job.step == "training" else 3
        rng = np.random.default_rng(job.length)
        return [
            tf.cast(tf.constant(rng.standard_normal(of.shape, "float32")), dtype)
            for _ in range(count)
        ]

    def function_of(of: cases.Case) -> Any:
        if job.peer == "ours":
            attend, last = peers_keras.ours(of, dtype, of.length), {}
        else:
            attend, last = peers_keras.stock, _window_mask(of)
        if job.step == "training":
            attend = peers_keras.step(attend, of.shape, dtype)  # (of ours alone)
        given = operands(of)
        return lambda: attend(*given, last)

    function_of(cases.window_case(256, quick=True))()  # TensorFlow sets itself up
    return function_of(case)


def _window_mask(case: cases.Case) -> Any:
    import tensorflow as tf

    positions = tf.range(case.length)
    near = tf.abs(positions - positions[:, None]) <= case.reach
    return tf.broadcast_to(near, (case.batch, case.heads, case.length, case.length))


def exponent(rows: list[dict], field: str, first: int = 4096) -> float | None:
    """The slope of log(field) over log(length) by least squares, from `first` positions on."""
    points = [
        (math.log(row["length"]), math.log(row[field]))
        for row in rows
        if row["length"] >= first and row.get(field, 0) > 0
    ]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)
