# %% [markdown]
"""
# Pack documents: pre-training without padding

Documents have all lengths, a batch has one. So rows are filled up with padding, often most of each
row, and the model computes it all. *Packing* puts several documents into a row instead. Then two
things must not happen: a token must not attend to another document, and the last token of a
document must not be trained to predict the first of the next.

Here Grain, the library for data of the JAX family (it runs under Keras on any backend), packs; a
rule of one line keeps the documents apart; and each claim is checked: no document sees another, and
packed logits are those of each document alone.

    pip install -e ".[beyond]"
    python examples/pack_documents.py            # up to 1 CPU minute
    python examples/pack_documents.py --quick    # seconds: short rows, a narrow model
"""

# %%
import argparse
import os
import pathlib
import re
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pydoc_data.topics import topics

import grain
import keras
import numpy as np

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="short rows and a narrow model")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/packed"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

ROW, ROWS, VOCABULARY, WIDTH, HEADS, LAYERS, DOCUMENTS = 1024, 4, 1024, 64, 4, 2, 64
if options.quick:
    ROW, ROWS, VOCABULARY, WIDTH, HEADS, LAYERS, DOCUMENTS = 256, 4, 256, 16, 2, 1, 24

# %% [markdown]
"""
## The documents

Python's own manual comes with every Python. Each of its sections is a document (those longer than a
row are left out); words and punctuation marks are the tokens.
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
print(f"{len(documents)} documents of at most {max(map(len, documents))} tokens")

# %% [markdown]
"""
## Pack them

`FirstFitPackIterDataset` keeps some rows open, and puts each document into the first that it fits.
Beside the tokens it gives each token the number of its document in the row (`segment_ids`) and its
place in it (`positions`). With `max_sequences_per_bin=1` it pads instead: one document in a row.

Grain counts documents from 1, and 0 is padding. To a rule a negative id is none, so 1 is taken off.
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
    """The token after each token is its target; it counts where both are of one document."""
    tokens, segments = row["tokens"], row["tokens_segment_ids"] - 1
    inputs = {"tokens": tokens, "positions": row["tokens_positions"], "segment_ids": segments}
    counts = (segments[:-1] == segments[1:]) & (segments[:-1] >= 0)
    return inputs, np.append(tokens[1:], 0), np.append(counts, False).astype("float32")


packed = list(pack(documents, ROW).batch(ROWS))
padded = list(pack(documents, ROW, most_in_a_row=1).batch(ROWS))
for name, batches in (("padded", padded), ("packed", packed)):
    segments = np.concatenate([inputs["segment_ids"] for inputs, _, _ in batches])
    print(f"{name}: {len(segments):4} rows of {ROW}, {np.mean(segments < 0):6.1%} padding")

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

A token sees the tokens of its own document, up to itself. Drawn for the row with most documents, in
tiles: what is light is not computed.
"""

# %%
RULE = hm.SameSegment("segment_ids") & hm.recipes.causal()
print(RULE.describe())
print(hm.draw(RULE, 9, mask_inputs={"segment_ids": inputs["segment_ids"][None]}))
row, _, _ = max(pack(documents, ROW).batch(1), key=lambda row: row[0]["segment_ids"].max())
figure = hm.plot(RULE, ROW, mask_inputs={"segment_ids": row["segment_ids"]})
figure.savefig(options.out / "pack_documents_rule.png")

# %% [markdown]
"""
![A staircase of triangles along the diagonal, one for each document of the row; all else is light,
which is what is skipped](../docs/images/pack_documents_rule.png)

## A small language model

Its positions are those in the document, not those in the row; else a document would read
differently wherever it lands. With `mean_with_sample_weight` the loss is the mean over what is
predicted; Keras' default would count padding and borders in the divisor.
"""


# %%
def build(rule=RULE):
    """A decoder with random weights, the same at each call."""
    keras.utils.set_random_seed(0)
    names = "tokens", "positions", "segment_ids"
    tokens, positions, segments = (keras.Input((None,), dtype="int32", name=n) for n in names)
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x += keras.layers.Embedding(ROW, WIDTH)(positions)
    for _ in range(LAYERS):
        attention = hm.PerHeadMaskedMultiHeadAttention(HEADS, WIDTH // HEADS, mask_spec=rule)
        given = {"segment_ids": segments} if rule.inputs else None
        x += attention(keras.layers.LayerNormalization()(x), mask_inputs=given)
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        x += keras.layers.Dense(WIDTH)(hidden)
    logits = keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x))
    model = keras.Model({x.name: x for x in (tokens, positions, segments)}, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False)
    return model


model = build()

# %% [markdown]
"""
## No document sees another

The row of the picture. Change every token of one document: of all logits, only its own change.
"""


# %%
def moved_elsewhere(model, inputs):
    """Change every token of one document after the other: how far logits of others move at most."""
    tokens, segments, before = inputs["tokens"], inputs["segment_ids"], model(inputs)
    found = []
    for document in range(segments.max() + 1):
        there = segments == document
        other = np.where(there, 1 + tokens % (VOCABULARY - 1), tokens)  # differs, and is no padding
        moved = np.abs(model(inputs | {"tokens": other}) - before).max(-1)
        found.append(moved[~there].max())
    return max(found)


print(f"largest difference in another document   {moved_elsewhere(model, row):.1e}")

# %% [markdown]
"""
## As if each were alone

Each document by itself gives the logits that it has in the packed row. Without the rule it would
not, and neither with positions counted along the row.
"""


# %%
def from_alone(model, inputs):
    """How far the logits of a packed row are from those of each document alone."""
    logits, segments = np.array(model(inputs))[0], inputs["segment_ids"][0]
    largest = 0
    for document in range(segments.max() + 1):
        there = segments == document
        tokens = inputs["tokens"][:, there]
        alone = {"tokens": tokens, "segment_ids": np.zeros_like(tokens)}
        alone["positions"] = np.arange(tokens.shape[1])[None]
        largest = max(largest, np.abs(logits[there] - np.array(model(alone))[0]).max())
    return largest


causal_alone = build(hm.recipes.causal())
along_the_row = row | {"positions": np.arange(ROW)[None]}
print(f"packed, as here                   {from_alone(model, row):.1e}")
print(f"packed, but the rule causal alone {from_alone(causal_alone, row):.1e}")
print(f"packed, but positions of the row  {from_alone(model, along_the_row):.1e}")

# %% [markdown]
"""
## Train

`fit` takes Grain's dataset as it is. This is one epoch. For several, leave `steps_per_epoch` out,
or repeat the documents before they are packed: with it, Keras finds no rows in every second epoch.
"""

# %%
told = model.fit(
    pack(documents, ROW).batch(ROWS),
    steps_per_epoch=len(packed),  # which Grain does not know before it has packed
    shuffle=False,  # that is Grain's business
    verbose=0,
)
print(f"loss, mean over an epoch: {told.history['loss'][0]:.3f}")

# %% [markdown]
"""
`docs/beyond.md` says what to keep in mind, `longformer_heads.py` what to do with documents that
are too long for a row.
"""
