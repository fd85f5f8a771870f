"""`python -m benchmarks.packing`: packed rows against padded ones, in real tokens per second.

A small causal language model trains on the CPU: every arm makes an epoch over the same documents
(the sections of Python's manual) in batches of as many positions. Rows are padded to one length,
sorted by length and padded to the longest of a batch, or packed by Grain. Ours obeys
`SameSegment & causal`, by tiles that skip what it hides, or dense. Stock Keras is causal where
each row holds one document, and gets the mask `(batch, queries, keys)` where rows are packed.
Medians of interleaved epochs, in one process; ratios are to ours, padded.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np

from benchmarks import machine, measure

RECORD = Path(__file__).parent / "results" / "packing.json"
OURS, DENSE, STOCK = "ours", "ours, dense", "stock Keras"
PADDED, BY_LENGTH, PACKED = "padded", "by length", "packed"
AGAINST = f"{OURS}, {PADDED}"


class Sizes(NamedTuple):
    """`length` of a row and `tokens` of all documents in tokens; `rows` of it make a batch."""

    length: int = 1024
    rows: int = 8
    tokens: int = 24_000
    vocabulary: int = 2048
    width: int = 128
    heads: int = 8
    layers: int = 2


QUICK = Sizes(length=256, rows=2, tokens=1200, vocabulary=128, width=16, heads=2, layers=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.packing", *sys.argv[1:]]),
        "threads": options.threads,
        "quick": options.quick,
        "sizes": sizes._asdict(),
    }
    record |= measured(sizes, options.threads, 1 if options.quick else options.repetitions)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for arm, rate in record["tokens_per_second"].items():
        padding = record["padding"][arm.split(", ")[-1]]
        ratio = record["ratios"][arm]
        print(f"{arm:24} padding {padding:.3f} {rate:10,.0f} real tokens/s, time x {ratio:.3f}")


def measured(sizes: Sizes, threads: int, repetitions: int) -> dict[str, Any]:
    """Seconds of an epoch by arm, ratios, shares of padding, and losses before training."""
    import grain
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    documents = documents_of(sizes)
    real = sum(map(len, documents))
    kinds = {
        PADDED: batches(documents, sizes, most_in_a_row=1),
        BY_LENGTH: sorted_by_length(documents, sizes),
        PACKED: batches(documents, sizes),
    }
    # Which arms: the model, and the rows that it trains on.
    arms = [(model, kind) for model in (OURS, DENSE, STOCK) for kind in kinds]
    models = {f"{model}, {kind}": build(model, kind, sizes) for model, kind in arms}
    functions = {
        f"{model}, {kind}": epoch_of(models[f"{model}, {kind}"], kinds[kind])
        for model, kind in arms
    }
    losses = {f"{m}, {kind}": loss(models[f"{m}, {kind}"], kinds[kind]) for m, kind in arms}
    result = measure.interleaved(functions, repetitions, warm_up=1)
    seconds = result["seconds"]
    return result | {
        "grain": grain.__version__,
        "documents": len(documents),
        "real_tokens": real,
        "steps": {kind: len(of) for kind, of in kinds.items()},
        "padding": {kind: padding_share(of) for kind, of in kinds.items()},
        "tokens_per_second": {arm: real / taken for arm, taken in seconds.items()},
        "ratios": {arm: taken / seconds[AGAINST] for arm, taken in seconds.items()},
        "first_losses": losses,
    }


def documents_of(sizes: Sizes) -> list[np.ndarray]:
    """Sections of the manual, shuffled, none longer than a row, up to so many tokens."""
    from pydoc_data.topics import topics

    before_heading = re.compile(r"\n(?=[^\n]+\n[*=\-~^]{3,}\n)")
    sections = dict.fromkeys(s for text in topics.values() for s in before_heading.split(text))
    texts = [re.findall(r"\w+|[^\w\s]", section) for section in sections]
    numbers: dict[str, int] = {}
    for text in texts:
        for word in text:  # 0 pads, 1 is whatever comes after the vocabulary is full
            numbers.setdefault(word, min(len(numbers) + 2, sizes.vocabulary - 1))
    texts = [text for text in texts if 1 < len(text) <= sizes.length]
    np.random.default_rng(0).shuffle(texts)
    ends = np.cumsum([len(text) for text in texts])
    kept = texts[: np.searchsorted(ends, sizes.tokens)]
    return [np.array([numbers[word] for word in text], "int32") for text in kept]


def batches(
    documents: list[np.ndarray], sizes: Sizes, most_in_a_row: int | None = None
) -> list[Any]:
    return _rows(documents, sizes.length, sizes.rows, most_in_a_row)


def sorted_by_length(documents: list[np.ndarray], sizes: Sizes) -> list[Any]:
    """As many documents in a batch as fit into its positions, padded to the longest."""
    groups: list[list[np.ndarray]] = [[]]
    for document in sorted(documents, key=len):
        if (len(groups[-1]) + 1) * len(document) > sizes.length * sizes.rows:
            groups.append([])
        groups[-1].append(document)
    return [_rows(group, len(group[-1]), len(group), 1)[0] for group in groups]


def _rows(documents: list[np.ndarray], length: int, rows: int, most: int | None) -> list[Any]:
    import grain

    packed = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source([{"tokens": d} for d in documents]).to_iter_dataset(),
        length_struct={"tokens": length},
        num_packing_bins=len(documents),
        shuffle_bins=False,
        max_sequences_per_bin=most,
    )
    return list(packed.map(_inputs_targets_weights).batch(rows))


def _inputs_targets_weights(row: dict[str, np.ndarray]) -> tuple[Any, np.ndarray, np.ndarray]:
    tokens, segments = row["tokens"], row["tokens_segment_ids"] - 1  # padding: -1
    counts = (segments[:-1] == segments[1:]) & (segments[:-1] >= 0)
    inputs = {"tokens": tokens, "positions": row["tokens_positions"], "segment_ids": segments}
    return inputs, np.append(tokens[1:], 0), np.append(counts, False).astype("float32")


def padding_share(of: list[Any]) -> float:
    segments = [inputs["segment_ids"] for inputs, _, _ in of]
    return float(sum((s < 0).sum() for s in segments) / sum(s.size for s in segments))


def build(name: str, kind: str, sizes: Sizes) -> Any:
    """The decoder, compiled, with the same initial weights in every arm."""
    import keras
    from keras import layers as kl
    from keras import ops

    import keras_headmask as hm

    keras.utils.set_random_seed(0)
    names = "tokens", "positions", "segment_ids"
    tokens, positions, segments = (keras.Input((None,), dtype="int32", name=n) for n in names)
    x = kl.Embedding(sizes.vocabulary, sizes.width)(tokens)
    x += kl.Embedding(sizes.length, sizes.width)(positions)
    rule = hm.SameSegment("segment_ids") & hm.recipes.causal()
    size = sizes.width // sizes.heads
    same = ops.equal(segments[:, :, None], segments[:, None, :])
    for _ in range(sizes.layers):
        near = kl.LayerNormalization()(x)
        if name == STOCK:
            mask = same if kind == PACKED else None  # padding stands behind all that is real
            attention = kl.MultiHeadAttention(sizes.heads, size)
            x += attention(near, near, attention_mask=mask, use_causal_mask=True)
        else:
            tiled = False if name == DENSE else None
            attention = hm.PerHeadMaskedMultiHeadAttention(
                sizes.heads, size, mask_spec=rule, tiled=tiled
            )
            x += attention(near, mask_inputs={"segment_ids": segments})
        hidden = kl.Dense(4 * sizes.width, activation="gelu")(kl.LayerNormalization()(x))
        x += kl.Dense(sizes.width)(hidden)
    logits = kl.Dense(sizes.vocabulary)(kl.LayerNormalization()(x))
    model = keras.Model(dict(zip(names, (tokens, positions, segments), strict=True)), logits)
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        jit_compile=False,
    )
    return model


def epoch_of(model: Any, of: list[Any]) -> Any:
    def run() -> None:
        for inputs, targets, weights in of:
            model.train_on_batch(inputs, targets, weights)

    return run


def loss(model: Any, of: list[Any]) -> float:
    """The mean over all predictions of all batches."""
    counts = [weights.sum() for _, _, weights in of]
    losses = [float(model.loss(targets, model(inputs), weights)) for inputs, targets, weights in of]
    return float(np.average(losses, weights=counts))


if __name__ == "__main__":
    main()
