"""`python -m benchmarks.language_model`: what a rule per head gains, in loss and in time.

A small decoder reads rows of 2,048 tokens of Python's standard library. Its arms have the same
layers and the same initial weights; only the rules of their heads differ. By default the training
steps are timed, stock Keras beside them. `--train` trains the arms from several seeds instead, on
equal batches, and records their loss on held-out modules.
"""

import argparse
import collections
import itertools
import os
import re
import string
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

from benchmarks import machine, measure

FULL, WINDOWS = "all heads causal", "all heads a window"
MIXTURE, REPEATS = "windows, 1 head causal", "windows, 1 head repeats"
STOCK, STOCK_XLA = "stock Keras, causal", "stock Keras, causal, XLA"
RESULTS = Path(__file__).parent / "results"
LOSS, TIME = "language_model_loss.json", "language_model_time.json"


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--train", action="store_true", help="train, and measure the loss in place of the time")
    add("--seeds", default="0,1,2", help="comma-separated, for --train")
    add("--repetitions", type=int, default=15, help="training steps that are timed, of each arm")
    add("--threads", type=int, default=os.cpu_count())
    add("--out", type=Path, default=RESULTS, help="folder of the two records")
    add("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    sizes = QUICK if options.quick else Sizes()
    record = machine.describe("benchmarks.language_model", options.quick)
    record |= {"threads": options.threads, "sizes": sizes._asdict()}
    record |= (trained if options.train else timed)(options, sizes)
    machine.write(options.out / (LOSS if options.train else TIME), record)


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


def timed(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Every arm's step in turns, in one process."""
    models = {STOCK: build(None, sizes, 0), STOCK_XLA: build(None, sizes, 0, jit_compile=True)}
    models |= {name: build(rule, sizes, 0) for name, rule in rules(sizes).items()}
    row = source_code(sizes.length, sizes.vocabulary)[0][:1]

    def step(model: Any) -> Callable[[], float]:
        return lambda: model.train_on_batch(row[:, :-1], row[:, 1:])

    steps = {name: step(model) for name, model in models.items()}
    # One step from equal weights: the loss before it must be equal, too.
    first = {name: float(step()) for name, step in steps.items()}
    result = measure.interleaved(steps, 2 if options.quick else options.repetitions)
    seconds = result["seconds"]
    stock = min(seconds[name] for name in (STOCK, STOCK_XLA) if name in seconds)
    ratios = {name: seconds[name] / stock for name in seconds}  # to the faster stock
    return result | {"first_losses": first, "ratios": ratios}


def trained(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """The held-out losses: the same seed has the same initial weights and rows in each arm."""
    rows, others = source_code(sizes.length, sizes.vocabulary)
    held_out = others[np.linspace(0, len(others) - 1, sizes.held_out).astype(int)]
    runs = []
    for seed in map(int, options.seeds.split(",")):
        for name, rule in rules(sizes).items():
            model = build(rule, sizes, seed)
            order = np.random.default_rng(seed).permutation(len(rows))
            for step in range(sizes.steps):
                row = rows[order[step % len(order)]][None]
                model.train_on_batch(row[:, :-1], row[:, 1:])
            loss = float(np.mean([_losses(model, row) for row in held_out]))
            print(f"{name}, seed {seed}: {loss:.3f}", file=sys.stderr, flush=True)
            runs.append({"arm": name, "seed": seed, "loss": loss})
    return {"runs": runs}


def _losses(model: Any, row: Any) -> Any:
    """Nats of each token of a row, `(length,)`."""
    logits = model.predict_on_batch(row[None, :-1])[0].astype("float64")
    logits -= logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), row[1:]]


def source_code(length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows `(rows, length + 1)` of token ids, to train on and held out, from Python's own modules.

    A token is a frequent word, line break or sign; what is not frequent is spelled. Each row
    predicts its successors, and holds text of one module; each tenth module is held out.
    """
    piece = re.compile(r"\w+|\n *|\W")
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [piece.findall(x.read_text(encoding="utf-8")) for x in sorted(folder.glob("*.py"))]
    train = [x for i, x in enumerate(modules) if i % 10 != 9]
    frequent = collections.Counter(itertools.chain.from_iterable(train)).most_common(vocabulary)
    pieces = list(dict.fromkeys([*string.printable, *(word for word, _ in frequent)]))
    ids = {word: number for number, word in enumerate(pieces[: vocabulary - 1], 1)}

    def cut(texts: list[list[str]]) -> np.ndarray:
        found = []
        for text in texts:
            parts = ([ids[x]] if x in ids else [ids.get(char, 0) for char in x] for x in text)
            tokens = list(itertools.chain.from_iterable(parts))
            starts = range(0, len(tokens) - length, length)
            found += [tokens[start : start + length + 1] for start in starts]
        return np.array(found, "int32")

    return cut(train), cut(modules[9::10])


def losses_of(record: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in sorted(record["runs"], key=lambda run: run["seed"]):
        found.setdefault(run["arm"], []).append(run["loss"])
    return found


if __name__ == "__main__":
    main()
