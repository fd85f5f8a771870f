"""`python -m benchmarks.block_masks`: a rule's `BlockMask` by us and by PyTorch, on this machine.

`hm.flex_block_mask` beside `create_block_mask`, plain and compiled, of the same `mask_mod`; of four
heads one looks at a window, the others at their document. Each case is a process of its own:
seconds of the second call (medians of five), and by how much the calls raise the process's memory.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

RECORD = Path(__file__).parent / "results" / "block_masks.json"
MAKERS = "ours", "plain", "compiled"
LENGTHS = 4096, 16384, 65536
_LONGEST = {"plain": 4096, "compiled": 16384}  # each pair is looked at: beyond, memory or minutes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short: does it run?")
    parser.add_argument("--one", nargs=2, metavar=("MAKER", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        return 0
    cases = {}
    for length in (256,) if options.quick else LENGTHS:
        for maker in MAKERS:
            if length > _LONGEST.get(maker, length):
                continue
            command = [sys.executable, "-m", "benchmarks.block_masks", "--one", maker, str(length)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            cases[f"{maker}, {length:,}"] = case = json.loads(printed.splitlines()[-1])
            print(f"{maker:9} {length:7,} {case['seconds']:9.4f} s {case['mebibytes']:8.0f} MiB")
    if not options.quick:
        from benchmarks import machine

        RECORD.write_text(json.dumps(machine.describe() | {"cases": cases}, indent=2) + "\n")
    return 0


def measured(maker: str, length: int) -> dict[str, float]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    import keras_headmask as hm

    heads = 4
    documents = torch.arange(length)[None] // 700
    rule = hm.PerHead({0: hm.Window(127, 127)}, hm.SameSegment("documents"))
    inputs = {"documents": documents}
    mask_mod = hm.flex_block_mask(rule, length, length, heads, inputs).mask_mod

    def call() -> None:
        if maker == "ours":
            hm.flex_block_mask(rule, length, length, heads, inputs)
        else:
            compiled = maker == "compiled"
            create_block_mask(mask_mod, 1, heads, length, length, device="cpu", _compile=compiled)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    seconds = []
    for _ in range(5 if maker == "ours" else 3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds), "mebibytes": (after - before) / 1024}


if __name__ == "__main__":
    sys.exit(main())
