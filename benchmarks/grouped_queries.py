"""`python -m benchmarks.grouped_queries`: the memory of grouped queries under a window.

16 query heads of size 64 share 2 key heads over 16,384 tokens; each query sees 255 keys on either
side. One forward by tiles, with the keys and values as they are, and with each repeated for the
query heads that share it, as Keras' layer does. Each runs in a process of its own, which says by
how much its peak of resident memory rises above the operands. The result, and the tiles that it is
joined of, are a part of that in both: a second ratio leaves them out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine, measure

RECORD = Path(__file__).parent / "results" / "grouped_queries.json"
ROOT = Path(__file__).parents[1]
HEADS, KEY_HEADS, SIZE, REACH = 16, 2, 64, 255
SHARED, REPEATED = "shared keys", "repeated keys"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="queries and keys")
    parser.add_argument("--repetitions", type=int, default=3, help="processes for each, the median")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--arm", choices=(SHARED, REPEATED), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    length, repetitions = (512, 1) if options.quick else (options.length, options.repetitions)
    if options.arm:
        print(json.dumps(peak_mib(options.arm, length)))
        return
    peaks = {
        arm: [_in_a_process(arm, length) for _ in range(repetitions)] for arm in (SHARED, REPEATED)
    }
    mib = {arm: statistics.median(of_arm) for arm, of_arm in peaks.items()}
    result = length * HEADS * SIZE * 4 / 2**20
    beside = {arm: peak - result for arm, peak in mib.items()}
    ratios = {
        "ratio": mib[SHARED] / mib[REPEATED] if mib[REPEATED] else None,
        "ratio beside the result": beside[SHARED] / beside[REPEATED] if beside[REPEATED] else None,
    }
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.grouped_queries", *sys.argv[1:]]),
        "quick": options.quick,
        "sizes": {"query heads": HEADS, "key heads": KEY_HEADS, "size": SIZE, "length": length},
        "peaks_mib": peaks,
        "mib": mib,
        "result_mib": result,
        **ratios,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({"mib": mib} | ratios, indent=2))


def _in_a_process(arm: str, length: int) -> float:
    command = [sys.executable, "-m", "benchmarks.grouped_queries", "--arm", arm]
    command += ["--length", str(length)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def operands(length: int) -> list[Any]:
    import numpy as np
    import tensorflow as tf

    # Made by NumPy: TensorFlow would keep what it needs to make them, and use it again.
    rng = np.random.default_rng(length)
    shapes = [(1, length, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [tf.constant(rng.standard_normal(shape, "float32")) for shape in shapes]


def attention(arm: str) -> Any:
    """A compiled function of queries, keys and values."""
    import tensorflow as tf

    import keras_headmask as hm

    @tf.function
    def attend(query: Any, key: Any, value: Any) -> Any:
        if arm == REPEATED:
            key, value = (tf.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (key, value))
        rule = hm.Window(REACH, REACH)
        return hm.dot_product_attention(query, key, value, mask_spec=rule, tiled=True)

    return attend


def peak_mib(arm: str, length: int) -> float:
    """By how much one forward raises the peak of this process above its operands, in MiB."""
    attention(arm)(*operands(512))  # TensorFlow sets itself up
    attend, given = attention(arm), operands(length)
    attend.get_concrete_function(*given)  # traced before
    return measure.peak_mib(lambda: attend(*given))


if __name__ == "__main__":
    main()
