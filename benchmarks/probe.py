"""The machine's own speed beside a case: how much of it the neighbours left.

It is that of one float32 product in NumPy, of one size, so it can be compared between cases,
frameworks and records of one kind of machine. On a quiet machine it is the same throughout.
"""

import statistics
import time
from typing import Any

import numpy as np

_BATCH, _SIDE, _RUNS = 8, 512, 5


def gigaflops() -> float:
    """Of a batched product, 10^9 operations a second, the median of five."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((_BATCH, _SIDE, _SIDE), "float32") for _ in range(2))
    product = np.matmul(left, right)  # what follows touches no fresh memory
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        np.matmul(left, right, out=product)
        seconds.append(time.perf_counter() - start)
    return round(2 * _BATCH * _SIDE**3 / statistics.median(seconds) / 1e9, 1)


def of_record(record: dict[str, Any]) -> list[float]:
    """All that a record holds; records of before have none."""
    runs = [run for case in record["cases"].values() for run in case.values()]
    return [speed for run in runs for speed in run.get("probe_gflops", ())]


def in_words(speeds: list[float]) -> str:
    """The range of what was probed."""
    return f"{min(speeds):.0f} to {max(speeds):.0f} GFLOP/s" if speeds else ""
