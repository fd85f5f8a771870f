"""Peak memory and time of the window rule by length; each length in a process of its own."""

import itertools
import math
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import cases, measure


class Job(NamedTuple):
    """One length of one peer: `ours`, `stock` or `flex`; `forward` or `training`."""

    peer: str
    step: str
    length: int


def memory_jobs(quick: bool) -> list[Job]:
    length = 512 if quick else 8192
    peers = ("ours", "stock") if quick else ("ours", "stock", "flex")
    return [Job(peer, "forward", length) for peer in peers]


def scaling_jobs(quick: bool) -> list[Job]:
    lengths = [256, 512] if quick else [2**n for n in range(10, 17)]
    ours = itertools.product(["ours"], ["forward", "training"], lengths)
    stock = [("stock", "forward", length) for length in lengths if length <= 8192]
    return [Job(*job) for job in [*ours, *stock]]


def needs_torch(job: Job) -> bool:
    return job.peer == "flex"


def measured(job: Job, dtype: str, quick: bool, repetitions: int) -> dict[str, Any]:
    """Peak memory above the inputs of a first and a second run, and the median time."""
    result: dict[str, Any] = job._asdict()
    case = cases.window_case(job.length, quick)
    try:
        function = (_in_torch if job.peer == "flex" else _in_keras)(job, case, dtype)
        start = time.perf_counter()
        result["first_peak_mib"] = measure.peak_mib(function)
        first = time.perf_counter() - start
        result["peak_mib"] = measure.peak_mib(function)
        # No less than 3, and about a minute at most.
        repetitions = max(2 if quick else 3, min(repetitions, int(60 / max(first, 1e-3))))
        timed = measure.interleaved({"time": function}, repetitions, warm_up=0)
        result["seconds"] = timed["seconds"]["time"]
        result["repetitions"] = repetitions
        result["probe_gflops"] = timed["probe_gflops"]
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
            attend = peers_keras.step(attend, of.shape, dtype, getattr(last, "shape", None))
        given = operands(of)
        return lambda: attend(*given, last)

    function_of(cases.window_case(256, quick=True))()  # TensorFlow sets itself up
    return function_of(case)


def _window_mask(case: cases.Case) -> Any:
    import tensorflow as tf

    positions = tf.range(case.length)
    near = tf.abs(positions - positions[:, None]) <= case.reach
    return tf.broadcast_to(near, (case.batch, case.heads, case.length, case.length))


def _in_torch(job: Job, case: cases.Case, dtype: str) -> Any:
    import torch

    from benchmarks import peers_torch

    operands = peers_torch.heads_first(case, dtype)
    blocks = peers_torch.block_mask(case)
    flex = peers_torch.compiled_flex()

    @torch.no_grad()
    def function() -> Any:
        return flex(*operands, block_mask=blocks)

    return function


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


def long(length: int, dtype: str) -> dict[str, Any]:
    """One layer with window heads over `length` positions: forward, then a training step."""
    import tensorflow as tf

    import keras_headmask as hm

    layer = hm.PerHeadMaskedMultiHeadAttention(16, 64, mask_spec=hm.Window(255, 255), dtype=dtype)
    x = tf.random.stateless_normal((1, length, 64), (0, 0))
    layer.build(x.shape)
    forward = tf.function(layer)

    @tf.function
    def training_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x, training=True)))
        gradients = tape.gradient(loss, layer.trainable_variables)
        for variable, gradient in zip(layer.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    result: dict[str, Any] = {"length": length, "heads": 16, "key_dim": 64, "dim": 64}
    for name, function in (("forward", forward), ("training step", training_step)):
        start = time.perf_counter()
        peak = measure.peak_mib(lambda function=function: function(x))
        result[name] = {"seconds": time.perf_counter() - start, "peak_mib": peak}
    result["peak_of_process_mib"] = measure.peak_of_process_mib()
    return result
