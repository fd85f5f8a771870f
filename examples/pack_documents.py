# %% [markdown]
"""
# Pack documents: pre-training without padding

Documents have all lengths, a batch has one. So rows are filled up with padding, often most of each
row, and the model computes it all. *Packing* puts several documents into a row instead. Then two
things must not happen: a token must not attend to another document, and the last token of a
document must not be trained to predict the first of the next.

Here Grain, the library for data of the JAX family (it runs under Keras on any backend), packs; a
rule of one line keeps the documents apart; and each claim is checked: no document sees another, and
packed logits are those of each document alone. At the end both kinds of rows are timed.

    pip install -e ".[beyond]"
    python examples/pack_documents.py            # 1 to 4 CPU minutes
    python examples/pack_documents.py --quick    # seconds: short rows, a narrow model
"""

# %%
import argparse
import os
import pathlib
import re
import statistics
import time
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pydoc_data.topics import topics

import grain
import keras
import numpy as np
import tensorflow as tf

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="short rows and a narrow model")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models/pack_documents")
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

ROW, ROWS, VOCABULARY, WIDTH, HEADS, LAYERS, DOCUMENTS = 1024, 4, 1024, 64, 4, 2, 64
if options.quick:
    ROW, ROWS, VOCABULARY, WIDTH, HEADS, LAYERS, DOCUMENTS = 256, 4, 256, 16, 2, 1, 24


def show(figure, name):
    """Save a picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"pack_documents_{name}.png")
    return figure


# %% [markdown]
"""
## The documents

Python's own manual comes with every Python. Each of its sections is a document; words and
punctuation marks are the tokens. Grain refuses a document that is longer than a row; here such
documents are left out.
"""


# %%
def sections():
    """The sections of the manual, each once: a heading is a line above a line of `***` or `===`."""
    before_heading = re.compile(r"\n(?=[^\n]+\n[*=\-~^]{3,}\n)")
    found = (section for text in topics.values() for section in before_heading.split(text))
    return [re.findall(r"\w+|[^\w\s]", section) for section in dict.fromkeys(found)]


texts = sections()
frequent = Counter(word for text in texts for word in text).most_common(VOCABULARY - 2)
numbers = {word: number for number, (word, _) in enumerate(frequent, 2)}  # 0 pads, 1 is rare
ids = [np.array([numbers.get(word, 1) for word in text], "int32") for text in texts]
documents = [text for text in ids if len(text) <= ROW]
np.random.default_rng(0).shuffle(documents)
documents = documents[:DOCUMENTS]

lengths = [len(document) for document in documents]
print(f"{len(documents)} documents of {min(lengths)} to {max(lengths)} tokens,")
print(f"half of them of at most {statistics.median(lengths):.0f}; {sum(lengths)} tokens in all")

# %% [markdown]
"""
## Pack them

`FirstFitPackIterDataset` keeps some rows open, and puts each document into the first that it fits.
Beside the tokens it gives each token the number of its document in the row (`segment_ids`) and its
place in it (`positions`). With `max_sequences_per_bin=1` it pads instead: one document in a row.

Grain counts documents from 1, and 0 is padding. A rule takes 0 for a document as well, and only a
negative id for none, so 1 is taken off: then padding attends to nothing, and is skipped.
"""


# %%
def pack(documents, length, most_in_a_row=None):
    """Rows of whole documents, as `fit` takes them: a Grain dataset, not yet in batches."""
    source = grain.MapDataset.source([{"tokens": document} for document in documents])
    rows = grain.experimental.FirstFitPackIterDataset(
        source.to_iter_dataset(),
        length_struct={"tokens": length},
        num_packing_bins=len(documents),  # all rows stay open: a large corpus needs fewer
        shuffle_bins=False,
        max_sequences_per_bin=most_in_a_row,
    )
    return rows.map(inputs_targets_weights)


def inputs_targets_weights(row):
    tokens, segments = row["tokens"], row["tokens_segment_ids"] - 1
    inputs = {"tokens": tokens, "positions": row["tokens_positions"], "segment_ids": segments}
    return inputs, *targets_and_weights(tokens, segments)


def targets_and_weights(tokens, segments):
    """The token after each token is its target; it counts where both are of one document."""
    counts = (segments[:-1] == segments[1:]) & (segments[:-1] >= 0)
    return np.append(tokens[1:], 0), np.append(counts, False).astype("float32")


def batched(rows, size):
    return list(rows.batch(size))


def padding_share(batches):
    empty = sum((inputs["segment_ids"] < 0).sum() for inputs, _, _ in batches)
    return empty / sum(inputs["segment_ids"].size for inputs, _, _ in batches)


packed = batched(pack(documents, ROW), ROWS)
padded = batched(pack(documents, ROW, most_in_a_row=1), ROWS)
for name, batches in (("padded", padded), ("packed", packed)):
    rows = sum(len(targets) for _, targets, _ in batches)
    print(f"{name}: {rows:4} rows of {ROW}, {padding_share(batches):6.1%} padding")

# %% [markdown]
"""
What one row says. A border has weight 0: what stands there is the last token of a document, and its
target would be the first of the next.
"""

# %%
inputs, targets, weights = next(iter(pack([np.arange(5, 9), np.array([20, 21, 22])], 9)))
for name, values in {**inputs, "targets": targets, "weights": weights.astype(int)}.items():
    print(f"{name:12}", *(f"{value:3}" for value in values))

# %% [markdown]
"""
## The rule

A token sees the tokens of its own document, up to itself.
"""

# %%
RULE = hm.SameSegment("segment_ids") & hm.recipes.causal()
print(RULE.describe())
print(hm.draw(RULE, 9, mask_inputs={"segment_ids": inputs["segment_ids"][None]}))

# %% [markdown]
"""
Drawn for the row with most documents, in tiles: what is light is not computed. So a row costs
attention within its documents alone, and not for all pairs of the row.
"""

# %%
row, _, _ = max(batched(pack(documents, ROW), 1), key=lambda row: row[0]["segment_ids"].max())
show(hm.plot(RULE, ROW, mask_inputs={"segment_ids": row["segment_ids"]}), "rule")

# %% [markdown]
"""
![A staircase of triangles along the diagonal, one for each document of the row; all else is light,
which is what is skipped](../docs/images/pack_documents_rule.png)

## A small language model

Its positions are those in the document, not those in the row; else a document would read
differently wherever it lands. The part after the embeddings is a model of its own, so that
gradients of embeddings can be asked for below. With `mean_with_sample_weight` the loss is the mean
over what is predicted; Keras' default would count padding and borders in the divisor.
"""


# %%
def build(rule=RULE):
    """A decoder with random weights, the same at each call."""
    keras.utils.set_random_seed(0)
    names = "tokens", "positions", "segment_ids"
    tokens, positions, segments = (keras.Input((None,), dtype="int32", name=n) for n in names)
    vectors = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    vectors += keras.layers.Embedding(ROW, WIDTH)(positions)
    embed = keras.Model([tokens, positions], vectors, name="embed")

    x = embedded = keras.Input((None, WIDTH))
    for _ in range(LAYERS):
        attention = hm.PerHeadMaskedMultiHeadAttention(HEADS, WIDTH // HEADS, mask_spec=rule)
        given = {"segment_ids": segments} if rule.inputs else None
        x += attention(keras.layers.LayerNormalization()(x), mask_inputs=given)
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        x += keras.layers.Dense(WIDTH)(hidden)
    logits = keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x))
    decoder = keras.Model([embedded, segments], logits, name="decoder")

    logits = decoder([embed([tokens, positions]), segments])
    model = keras.Model(dict(zip(names, (tokens, positions, segments), strict=True)), logits)
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        jit_compile=False,  # on a CPU, XLA compiles for seconds and then runs no faster
    )
    return model


model = build()
print(f"{model.count_params():,} weights")

# %% [markdown]
"""
## No document sees another

The row of the picture. Change every token of one document: of all logits, only its own change.
Below, each line changes one document, each column shows by how much the logits of one differ. (The
first eight documents; what stands below counts all.)
"""


# %%
def changed(inputs, document):
    """The same row with other tokens in one document."""
    there = inputs["segment_ids"] == document
    other = 1 + inputs["tokens"] % (VOCABULARY - 1)  # differs from each token, and is no padding
    return inputs | {"tokens": np.where(there, other, inputs["tokens"])}


def by_document(values, segments):
    """The largest absolute value in each document of a row."""
    values = np.abs(values).max(-1)
    return [values[segments == document].max() for document in range(segments.max() + 1)]


def effects(model, inputs):
    """A row for each document that is changed: how far the logits of each document move."""
    segments = inputs["segment_ids"][0]
    before = model(inputs)
    return np.array(
        [
            by_document((model(changed(inputs, document)) - before)[0], segments)
            for document in range(segments.max() + 1)
        ]
    )


def print_by_document(table):
    for number, row in enumerate(table):
        print(f"document {number}", *(f"{value:8.1e}" if value else "       0" for value in row))


def apart(table):
    """The largest entry that is of two documents."""
    return np.where(np.eye(len(table), dtype=bool), 0, table).max()


moved = effects(model, row)
print_by_document(moved[:8, :8])
print(f"\nlargest difference in another document   {apart(moved):.1e}")

# %% [markdown]
"""
The same of training: the loss of one document has no gradient in the embeddings of another. A line
is the loss of a document, a column the embeddings of one. Not small numbers, but 0.
"""


# %%
def gradients(model, inputs):
    """A row for the loss of each document: the largest gradient in the embeddings of each."""
    segments = inputs["segment_ids"][0]
    targets, weights = targets_and_weights(inputs["tokens"][0], segments)
    vectors = model.get_layer("embed")([inputs["tokens"], inputs["positions"]])
    of_each, found = tf.constant(inputs["segment_ids"]), []
    for document in range(segments.max() + 1):
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            logits = model.get_layer("decoder")([vectors, of_each])[0]
            losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
            loss = keras.ops.sum(losses * weights * (segments == document))
        found.append(by_document(tape.gradient(loss, vectors)[0], segments))
    return np.array(found)


slopes = gradients(model, row)
print_by_document(slopes[:8, :8])
print(f"\nlargest gradient in another document   {apart(slopes):.1e}")

# %% [markdown]
"""
## As if each were alone

Each document by itself, in a row of its own length, gives the logits that it has in the packed row.
Without the rule it would not, and neither with positions counted along the row.
"""


# %%
def from_alone(model, inputs):
    """How far the logits of a packed row are from those of each document alone."""
    logits, segments = np.array(model(inputs))[0], inputs["segment_ids"][0]
    largest = 0
    for document in range(segments.max() + 1):
        there = segments == document
        tokens = inputs["tokens"][:, there]
        positions = np.arange(tokens.shape[1])[None]
        alone = model(
            {"tokens": tokens, "positions": positions, "segment_ids": np.zeros_like(tokens)}
        )
        largest = max(largest, np.abs(logits[there] - np.array(alone)[0]).max())
    return largest


causal_alone = build(hm.recipes.causal())
along_the_row = row | {"positions": np.arange(ROW)[None]}
print(f"packed, as here                   {from_alone(model, row):.1e}")
print(f"packed, but the rule causal alone {from_alone(causal_alone, row):.1e}")
print(f"packed, but positions of the row  {from_alone(model, along_the_row):.1e}")

# %% [markdown]
"""
So one training step does the same, packed and padded: the same loss, and the same gradients of all
weights. (Of the same documents; where a batch is so many rows, a packed one holds more documents.)
"""


# %%
def loss_and_gradients(model, batch):
    inputs, targets, weights = batch
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=targets, y_pred=model(inputs), sample_weight=weights)
    gradients = tape.gradient(loss, model.trainable_variables)
    return float(loss), [np.array(tf.convert_to_tensor(gradient)) for gradient in gradients]


some = documents[:6]
(one_packed,) = batched(pack(some, ROW), len(some))
(one_padded,) = batched(pack(some, ROW, most_in_a_row=1), len(some))
packed_loss, packed_gradients = loss_and_gradients(model, one_packed)
padded_loss, padded_gradients = loss_and_gradients(model, one_padded)
differences = zip(packed_gradients, padded_gradients, strict=True)
print(f"loss of {len(some)} documents, packed   {packed_loss:.5f}")
print(f"loss of {len(some)} documents, padded   {padded_loss:.5f}")
print(f"largest difference of gradients   {max(np.abs(a - b).max() for a, b in differences):.1e}")
print(f"largest gradient   {max(np.abs(gradient).max() for gradient in padded_gradients):.1e}")

# %% [markdown]
"""
## Train

`fit` takes Grain's dataset as it is. This is one epoch. For several, leave `steps_per_epoch` out,
or repeat the documents before they are packed: with it, Keras finds no rows in every second epoch.
"""

# %%
model.fit(
    pack(documents, ROW).batch(ROWS),
    steps_per_epoch=len(packed),  # which Grain does not know before it has packed
    shuffle=False,  # that is Grain's business
    verbose=0,
)
after, _ = loss_and_gradients(model, one_packed)
print(f"loss of {len(some)} documents, after an epoch   {after:.5f}")

# %% [markdown]
"""
## What it gains

An epoch of the same documents, in three kinds of rows: padded to the length of a row; sorted by
length, and padded to the longest of the batch; packed. Each batch has as many positions, so that a
step needs as much memory. Sorting pads little too, but then a batch holds documents of one length
alone, in no random order. One model trains on all three, under the same rule, and the epochs take
turns. A *real* token is one of a document. What is compared is the whole step: the rule skips
attention of padding in each kind of row, and all else is computed for each position.
"""


# %%
def by_length(documents, positions):
    """Batches of documents of about one length, with at most so many positions."""
    batches, batch = [], []
    for document in sorted(documents, key=len):
        if batch and (len(batch) + 1) * len(document) > positions:
            batches.append(batch)
            batch = []
        batch.append(document)
    return [
        batched(pack(batch, len(batch[-1]), most_in_a_row=1), len(batch))[0]
        for batch in [*batches, batch]
    ]


def seconds_of_epoch(batches):
    start = time.perf_counter()
    for inputs, targets, weights in batches:
        model.train_on_batch(inputs, targets, weights)
    return time.perf_counter() - start


kinds = {"padded": padded, "by length": by_length(documents, ROW * ROWS), "packed": packed}
seconds = {name: [] for name in kinds}
for _ in range(1 + (1 if options.quick else 3)):  # the first traces the graph
    for name, batches in kinds.items():
        seconds[name].append(seconds_of_epoch(batches))
medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}

print(f"{'':12}{'steps':>7}{'padding':>9}{'seconds':>9}{'real tokens/s':>15}{'times padded':>14}")
for name, batches in kinds.items():
    rate, gain = sum(lengths) / medians[name], medians["padded"] / medians[name]
    padding = f"{padding_share(batches):9.3f}"
    print(f"{name:12}{len(batches):7}{padding}{medians[name]:9.2f}{rate:15,.0f}{gain:14.2f}")

# %% [markdown]
"""
The rule may differ from head to head, as anywhere: some heads may see a window of their document
only, `hm.PerHead({"0-1": RULE & hm.Window(before=63, after=0)}, default=RULE)`. See
`docs/packing.md` for what to keep in mind, and `longformer_heads.py` for documents that are too
long for a row.
"""
