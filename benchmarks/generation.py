"""`python -m benchmarks.generation`: the cache of `generate()` where most heads are streaming.

GPT-2's shape with random weights, greedy, one text. Three heads of twelve see every key before,
nine see the first 4 and the last 252. Stock is KerasHub's `generate()` as it comes.

- `bytes`: what the caches hold, and by how much tracing and a run of a few tokens raise what a
  fresh process holds above the weights. (Several texts at once for the shorter length: the graph
  alone takes some 200 MB.) Linux only.
- `seconds_per_token`: of the steps alone. Runs of a few tokens and of more take turns, medians; the
  difference holds neither the prompt's forward nor the start. A step costs the same at any place.
- `equal`: how many of the tokens that a cached run chose are the best of one forward without a
  cache over the whole text, and how far behind the best the others are.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

from benchmarks import machine, measure

RECORD = Path(__file__).parent / "results" / "generation.json"
OURS, STOCK = "ours", "stock"
PROMPT = 32


class Sizes(NamedTuple):
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    vocabulary: int = 50257
    lengths: tuple[int, ...] = (1024, 4096)
    texts: tuple[int, ...] = (8, 1)  # at once, where memory is measured
    sinks: int = 4
    window: int = 252
    full: int = 3  # heads of each layer
    few: int = 4  # tokens
    more: int = 36


QUICK = Sizes(2, 4, 8, 100, (64,), (1,), 2, 6, 1, 2, 4)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    parser.add_argument("--peak", nargs=2, metavar=("ARM", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    if options.peak:
        print(json.dumps(peak(options.peak[0], int(options.peak[1]), sizes)))
        return
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.generation", *sys.argv[1:]]),
        "quick": options.quick,
        "sizes": sizes._asdict(),
        "lengths": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for length in sizes.lengths:  # written each time: a kill loses one length at most
        record["lengths"][str(length)] = measured(length, sizes, options)
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["lengths"], indent=2))


def measured(length: int, sizes: Sizes, options: Any) -> dict[str, Any]:
    import keras_headmask as hm

    peaks = {arm: _peak_of_fresh_process(arm, length, options.quick) for arm in (OURS, STOCK)}
    models = {arm: build(arm, length, sizes) for arm in (OURS, STOCK)}
    held = hm.cache_bytes(models[OURS], length)
    per_token, runs = time_per_token(
        models, length, sizes, 1 if options.quick else options.repetitions
    )
    return {
        "bytes": {
            "cache": {OURS: held.total, STOCK: held.stock},
            "cache_ratio": held.total / held.stock,
            "raised": peaks,
        },
        "seconds_per_token": per_token,
        "runs": runs,
        "equal": equal(models[OURS], length, sizes),
    }


def time_per_token(
    models: dict[str, Any], length: int, sizes: Sizes, repetitions: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of a step of each model with their ratio, and the runs that say so, in turns."""
    runs = {
        f"{arm}, {tokens}": _steps(model, length, tokens, sizes)
        for arm, model in models.items()
        for tokens in (sizes.few, sizes.more)
    }
    result = measure.interleaved(runs, repetitions, warm_up=1)
    seconds = result["seconds"]
    per_token = {
        arm: (seconds[f"{arm}, {sizes.more}"] - seconds[f"{arm}, {sizes.few}"])
        / (sizes.more - sizes.few)
        for arm in models
    }
    return per_token | {"ratio": per_token[OURS] / per_token[STOCK]}, result


def build(arm: str, length: int, sizes: Sizes) -> Any:
    """GPT-2 that generates greedily."""
    import keras
    import keras_hub

    import keras_headmask as hm

    keras.utils.set_random_seed(0)
    width = sizes.heads * sizes.head_dim
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=sizes.vocabulary,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=length,
    )
    rng = np.random.default_rng(1)
    for weight in backbone.weights:  # livelier than fresh weights, which repeat one token for ever
        scale = 0.08 if len(weight.shape) > 1 else 0.02
        weight.assign_add(scale * rng.standard_normal(weight.shape, "float32"))
    task = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    if arm == OURS:
        streaming = hm.recipes.streaming(sizes.sinks, sizes.window)
        rule = hm.PerHead({f"{sizes.full}-{sizes.heads - 1}": streaming})
        task = hm.apply_head_masks(task, rule, copy=False)
    task.compile(sampler="greedy")
    return task


def prompt_of(length: int, sizes: Sizes) -> dict[str, np.ndarray]:
    ids = np.zeros((1, length), "int32")
    start = min(PROMPT, length // 4)
    ids[:, :start] = np.random.default_rng(0).integers(1, sizes.vocabulary, start)
    return {"token_ids": ids, "padding_mask": (np.arange(length) < start)[None].astype("int32")}


def _steps(task: Any, length: int, tokens: int, sizes: Sizes, texts: int = 1) -> Any:
    """A function that generates so many tokens, in a cache for `length`."""
    import keras_hub

    class Sampler(keras_hub.samplers.GreedySampler):
        def run_loop(self, *args: Any, maximum_iterations: Any, **kwargs: Any) -> Any:
            return super().run_loop(*args, maximum_iterations=tokens, **kwargs)

    given = {name: x.repeat(texts, 0) for name, x in prompt_of(length, sizes).items()}
    task.compile(sampler=Sampler())
    generate = task.make_generate_function()
    generate(given)  # traced now, while this is the model's sampler
    return lambda: generate(given)["token_ids"].numpy()


def equal(task: Any, length: int, sizes: Sizes) -> dict[str, Any]:
    """The first 1,024 generated tokens against one forward over them."""
    import keras

    given = prompt_of(length, sizes)
    tokens = min(length, 1024)
    start = int(given["padding_mask"].sum())
    ids = _steps(task, length, tokens - start, sizes)()[:, :tokens]
    logits = task({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    logits = keras.ops.convert_to_numpy(logits)[0, start - 1 : -1]
    chosen = logits[np.arange(len(logits)), ids[0, start:]]
    behind = logits.max(-1) - chosen
    return {
        "tokens": len(chosen),
        "best": int((behind == 0).sum()),
        "farthest_behind_best": float(behind.max()),
        "different_tokens": len(np.unique(ids[0, start:])),
    }


def _peak_of_fresh_process(arm: str, length: int, quick: bool) -> int:
    command = [sys.executable, "-m", "benchmarks.generation", "--peak", arm, str(length)]
    done = subprocess.run(command + ["--quick"] * quick, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak(arm: str, length: int, sizes: Sizes) -> int:
    """By how many bytes a few tokens raise what the process holds above the weights."""
    task = build(arm, length, sizes)
    gc.collect()
    before, seen, done = _held(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(_held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    _steps(task, length, sizes.few, sizes, sizes.texts[sizes.lengths.index(length)])
    done.set()
    watcher.join()
    return max(seen) - before


def _held() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
