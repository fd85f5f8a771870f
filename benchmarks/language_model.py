"""`python -m benchmarks.language_model`: what a rule per head gains, in loss and in time.

A small decoder reads rows of 2,048 tokens of Python's standard library. Its arms have the same
layers and the same initial weights; only the rules of their heads differ. By default the training
steps are timed, stock Keras beside them. `--train` trains the arms from several seeds instead, on
equal batches, and records their loss on held-out modules. It goes on where it was interrupted, and
several may run at once, each with seeds of its own.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, measure, report

FULL, WINDOWS = "all heads causal", "all heads a window"
MIXTURE, REPEATS = "windows, 1 head causal", "windows, 1 head repeats"
STOCK, STOCK_XLA = "stock Keras, causal", "stock Keras, causal, XLA"
RESULTS = Path(__file__).parent / "results"
LOSS, TIME = "language_model_loss.json", "language_model_time.json"
START, END = "<!-- language model:start -->", "<!-- language model:end -->"


class Sizes(NamedTuple):
    """What all arms share.

    `window` and `repeated` are tokens. Each of the `steps` sees one row; `held_out` rows measure
    the loss.
    """

    length: int = 2048
    width: int = 64
    heads: int = 8
    layers: int = 2
    vocabulary: int = 512
    window: int = 64
    repeated: int = 3
    steps: int = 400
    held_out: int = 40
    learning_rate: float = 1e-2


QUICK = Sizes(length=64, width=16, heads=4, layers=1, window=16, steps=1, held_out=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.language_model", description=__doc__.split("\n\n")[1]
    )
    add = parser.add_argument
    add("--train", action="store_true", help="train, and measure the loss in place of the time")
    add("--seeds", default="0,1,2", help="comma-separated, for --train")
    add("--repetitions", type=int, default=15, help="training steps that are timed, of each arm")
    add("--threads", type=int, default=os.cpu_count())
    add("--out", type=Path, default=RESULTS, help="folder of the two records")
    add("--page", type=Path, help="put the table into this page, docs/measurements.md")
    add("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if options.page:
        report.put_between(options.page, START, END, table(options.out))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (train if options.train else timed)(options)
    print(table(options.out))


def rules(sizes: Sizes) -> dict[str, Any]:
    """The rule of each arm that is trained.

    A head that repeats sees, of all tokens so far, those that followed the same `repeated` tokens
    as have just been read: what it may attend to is what may well come next.
    """
    import keras_headmask as hm

    causal = hm.Window(after=0)
    window = hm.Window(before=sizes.window - 1, after=0)
    repeats = hm.SameSegment("last_tokens") & causal
    return {
        FULL: causal,
        WINDOWS: window,
        REPEATS: hm.PerHead({0: repeats}, default=window),
        MIXTURE: hm.PerHead({0: causal}, default=window),
    }


def last_tokens(token_ids: Any, sizes: Sizes) -> tuple[Any, Any]:
    """One number for the last tokens up to each query, and one for those before each key."""
    from keras import ops

    def before(k: int) -> Any:  # the token ids, k positions later
        return ops.pad(token_ids, ((0, 0), (k, 0)))[:, : sizes.length]

    def number(first: int) -> Any:
        return sum(before(first + k) * sizes.vocabulary**k for k in range(sizes.repeated))

    return number(0), number(1)


def build(rule: Any, sizes: Sizes, seed: int, jit_compile: bool = False) -> Any:
    """The decoder, compiled; with stock attention, causal, if `rule` is None.

    A short causal convolution before each attention shows it the tokens before each token, in
    place of position embeddings.
    """
    import keras
    from keras import layers as kl

    import keras_headmask as hm

    keras.utils.set_random_seed(seed)
    size = sizes.width // sizes.heads
    ids = keras.Input((sizes.length,), dtype="int32", name="token_ids")
    embedding = kl.ReversibleEmbedding(sizes.vocabulary, sizes.width)
    x = embedding(ids)
    for _ in range(sizes.layers):
        near = kl.LayerNormalization()(x)
        shifted = kl.DepthwiseConv1D(4, use_bias=False)(kl.ZeroPadding1D((3, 0))(near))
        near = kl.Add()([near, shifted])
        if rule is None:
            attention = kl.MultiHeadAttention(sizes.heads, size)
            attended = attention(near, near, use_causal_mask=True)
        else:
            attention = hm.PerHeadMaskedMultiHeadAttention(sizes.heads, size, mask_spec=rule)
            numbers = {"last_tokens": last_tokens(ids, sizes)} if rule.inputs else None
            attended = attention(near, mask_inputs=numbers)
        x = kl.Add()([x, attended])
        hidden = kl.Dense(4 * sizes.width, activation="gelu")(kl.LayerNormalization()(x))
        x = kl.Add()([x, kl.Dense(sizes.width)(hidden)])
    model = keras.Model(ids, embedding(kl.LayerNormalization()(x), reverse=True))
    rate = keras.optimizers.schedules.CosineDecay(
        0.0,
        decay_steps=max(1, sizes.steps * 9 // 10),
        alpha=0.1,
        warmup_target=sizes.learning_rate,
        warmup_steps=max(1, sizes.steps // 10),
    )
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.95, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return model


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """The record of the time: every arm's step in turns, in one process."""
    pin_threads(options.threads)
    sizes = QUICK if options.quick else Sizes()
    models = {STOCK: build(None, sizes, 0), STOCK_XLA: build(None, sizes, 0, jit_compile=True)}
    models |= {name: build(rule, sizes, 0) for name, rule in rules(sizes).items()}
    row = _rows(sizes).train[:1]

    def step(model: Any) -> Callable[[], float]:
        return lambda: model.train_on_batch(row[:, :-1], row[:, 1:])

    steps = {name: step(model) for name, model in models.items()}
    # One step from equal weights: the loss before it must be equal, too.
    first = {name: float(step()) for name, step in steps.items()}
    result = measure.interleaved(steps, 2 if options.quick else options.repetitions)
    seconds = result["seconds"]
    stock = min(seconds[name] for name in (STOCK, STOCK_XLA) if name in seconds)
    record = _origin(options, sizes) | result
    record |= {
        "first_losses": first,
        "ratios": {name: seconds[name] / stock for name in seconds},  # to the faster stock
    }
    _write(options.out / TIME, record)
    return record


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The record of the losses; what it holds already is not trained again."""
    pin_threads(options.threads)
    sizes = QUICK if options.quick else Sizes()
    rows = _rows(sizes)
    record = _origin(options, sizes) | {"text": rows.digest, "runs": []}
    file = options.out / LOSS
    if before := _read(file):
        for field in ("sizes", "text", "versions"):
            if before[field] != record[field]:
                raise SystemExit(
                    f"The record in --out has another {field}: {before[field]}, not "
                    f"{record[field]}. Give another --out."
                )
        record = before
    done = {(run["arm"], run["seed"]) for run in record["runs"]}
    for seed in map(int, options.seeds.split(",")):
        for name, rule in rules(sizes).items():
            if (name, seed) not in done:
                run = _trained(name, rule, sizes, seed, rows)
                others = _read(file).get("runs", [])  # by another process, meanwhile
                record["runs"] = [*others, run]
                _write(file, record)
    return record


def _trained(name: str, rule: Any, sizes: Sizes, seed: int, rows: Any) -> dict[str, Any]:
    """One run: the same seed has the same initial weights and rows in each arm."""
    import numpy as np

    model = build(rule, sizes, seed)
    start = time.process_time()
    order = np.random.default_rng(seed).permutation(len(rows.train))
    for step in range(sizes.steps):
        row = rows.train[order[step % len(order)]][None]
        loss = model.train_on_batch(row[:, :-1], row[:, 1:])
        if step % 50 == 49:
            print(f"{name}, seed {seed}, step {step + 1}: {loss:.3f}", file=sys.stderr, flush=True)
            model.reset_metrics()
    seconds = time.process_time() - start
    held_out = np.linspace(0, len(rows.held_out) - 1, sizes.held_out).astype(int)
    losses = [_losses(model, row) for row in rows.held_out[held_out]]
    by_token = np.mean(losses, 0)
    half = sizes.length // 2
    return {
        "arm": name,
        "seed": seed,
        "loss": float(by_token.mean()),
        "loss_of_second_half": float(by_token[half:].mean()),
        "cpu_seconds": round(seconds, 1),
    }


def _losses(model: Any, row: Any) -> Any:
    """Nats of each token of a row, `(length,)`."""
    import numpy as np

    logits = model.predict_on_batch(row[None, :-1])[0].astype("float64")
    logits -= logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), row[1:]]


def losses_of(record: dict[str, Any]) -> dict[str, list[float]]:
    """The held-out losses of each arm, by seed."""
    found: dict[str, list[float]] = {}
    for run in sorted(record["runs"], key=lambda run: run["seed"]):
        found.setdefault(run["arm"], []).append(run["loss"])
    return found


def table(folder: Path) -> str:
    """Both records in one Markdown table; `-` for what is not measured."""
    losses, times = (_read(folder / name) for name in (LOSS, TIME))
    of_arm, ratios = losses_of(losses) if losses else {}, times.get("ratios", {})
    lines = ["| heads | held-out loss | by seed | time of a step |", "|---|---|---|---|"]
    for name in (STOCK, STOCK_XLA, FULL, WINDOWS, MIXTURE, REPEATS):
        cells = ["-", "-"]
        if name in of_arm:
            by_seed = ", ".join(f"{loss:.3f}" for loss in of_arm[name])
            cells = [f"{statistics.mean(of_arm[name]):.3f}", by_seed]
        ratio = f"{ratios[name]:.2f}" if name in ratios else "-"
        lines.append(f"| {' | '.join([name, *cells, ratio])} |")
    origins = [
        f"{what}: {report.where(record)}; {record['date']}; `{record['command']}`."
        for what, record in (("Loss", losses), ("Time", times))
        if record
    ]
    return "\n\n".join(["\n".join(lines), *origins])


def pin_threads(threads: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)


def _rows(sizes: Sizes) -> Any:
    from benchmarks import source_code

    return source_code.rows(sizes.length, sizes.vocabulary)


def _origin(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    return machine.describe() | {
        "threads": options.threads,
        "command": " ".join(["python -m benchmarks.language_model", *sys.argv[1:]]),
        "quick": options.quick,
        "sizes": sizes._asdict(),
    }


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _write(file: Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
