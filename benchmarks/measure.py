"""How it is measured: interleaved repetitions, medians, and the peak of resident memory."""

import contextlib
import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def interleaved(
    functions: dict[str, Callable[[], Any]], repetitions: int, warm_up: int = 2
) -> dict[str, Any]:
    """Median seconds of each function, called in turns so that a busy moment meets all alike.

    A function that fails is left out, its message under `errors`.
    """
    errors: dict[str, str] = {}
    for name, function in functions.items():
        try:
            for _ in range(warm_up):
                function()
        except Exception as error:  # whatever a peer raises belongs in the record
            errors[name] = message(error)
    running = {name: function for name, function in functions.items() if name not in errors}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    gc.collect()
    for _ in range(repetitions):
        for name, function in running.items():
            start = time.perf_counter()
            result = function()
            seconds[name].append(time.perf_counter() - start)
            del result
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "least_seconds": {name: min(times) for name, times in seconds.items()},
        "repetitions": repetitions,
        "errors": errors,
    }


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def peak_mib(function: Callable[[], Any]) -> float:
    """By how much a call raises the peak of resident memory above what was there before, in MiB."""
    gc.collect()
    _give_back()
    _forget_peak()
    before = _peak()
    result = function()
    after = _peak()
    del result
    return (after - before) / 2**20


def _give_back() -> None:
    """Memory freed but kept goes back to the system: else a second run would need none."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    """Let the kernel count the peak from now on, where it can: making inputs may have peaked."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
