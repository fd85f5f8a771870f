# %% [markdown]
"""
# Two BERTs in one: heads kept apart by a rule

There are two narrow encoders, each with its own weights. In `sentence` every head sees its own
sentence alone; in `text` every head sees everything but padding. Both read the same tokens, and
what they return is concatenated. With a rule per head one wide model can hold both: the heads of
the one beside the heads of the other, equal outputs, half as many calls.

    pip install -e ".[examples]"
    python examples/two_berts.py                    # seconds
    jupytext --to notebook examples/two_berts.py    # the same as a notebook
"""

# %%
import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import layers, ops
from keras.ops import convert_to_numpy

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="nothing is left out: it takes seconds")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models/two_berts"), help="for pictures"
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)


def show(figure, name):
    """Save the picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"two_berts_{name}.png")
    plt.close(figure)
    return figure


# %% [markdown]
"""
## The two rules, and both in one

Padding is hidden by the rule itself here: `~KeyIn("token_ids", PAD)`, every key but token 0. The
wide model has the heads of `sentence` first, then those of `text`.
"""

# %%
PAD, FULL_STOP, VOCABULARY = 0, 1, 50
BLOCKS, HEADS, HEAD_SIZE, WIDTH, LONGEST = 2, 4, 16, 64, 128  # of each narrow model

not_padding = ~hm.KeyIn("token_ids", PAD)
rules = {"sentence": hm.SameSentence(FULL_STOP) & not_padding, "text": not_padding}
rule = hm.PerHead({"0-3": rules["sentence"], "4-7": rules["text"]})
print(rule.describe(num_heads=2 * HEADS))

# %% [markdown]
"""
## One function for all three

A BERT encoder: embeddings, then blocks of attention and of two dense layers, each with its skip
connection and a LayerNorm after the sum. Everything but one part of it can be carried block by
block into a wider model. The exception is LayerNorm, which takes the mean over the whole vector of
a token: in the wide model that vector is two, and each must have its own mean. So the wide model
normalises its two halves apart.
"""


# %%
class HalvesNormalization(layers.Layer):
    """LayerNorm of the first and of the second half of the last axis, each by itself."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")
        self.beta = self.add_weight(shape=shape[-1:], initializer="zeros", name="beta")
        self.normalise = layers.LayerNormalization(center=False, scale=False)

    def call(self, x):
        batch, length, width = ops.shape(x)
        halves = ops.reshape(x, (batch, length, 2, width // 2))
        return ops.reshape(self.normalise(halves), (batch, length, width)) * self.gamma + self.beta


def build(width, heads, rule, normalisation=layers.LayerNormalization):
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    positions = ops.cumsum(ops.ones_like(token_ids), axis=1) - 1
    x = layers.Embedding(VOCABULARY, width)(token_ids) + layers.Embedding(LONGEST, width)(positions)
    x = normalisation()(x)
    for i in range(BLOCKS):
        attention = hm.PerHeadMaskedMultiHeadAttention(
            heads, HEAD_SIZE, mask_spec=rule, name=f"attention_of_block_{i}"
        )
        x = normalisation()(x + attention(x, mask_inputs={"token_ids": token_ids}))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = normalisation()(x + layers.Dense(width)(hidden))
    return keras.Model(token_ids, x)


keras.utils.set_random_seed(0)
generator = np.random.default_rng(seed=0)
narrow = {name: build(WIDTH, HEADS, rules[name]) for name in ("sentence", "text")}
for model in narrow.values():  # as if trained: no bias is 0, no gamma 1
    model.set_weights([w + 0.1 * generator.normal(size=w.shape) for w in model.get_weights()])
wide = build(2 * WIDTH, 2 * HEADS, rule, HalvesNormalization)

# %% [markdown]
"""
## Moving the weights

Each weight of the wide model is twice as long as a narrow one along some of its axes. On one such
axis (embeddings, biases, gamma and beta) the two stand one after the other. On two (what maps the
width, or the heads, to something that is doubled as well) they stand on the diagonal, with zeros
beside them: the first half of a vector never meets the second.
"""


# %%
def put_together(first, second, shape):
    """Both in an array of zeros: one at the beginning of every axis, the other at the end."""
    whole = np.zeros(shape, first.dtype)
    whole[tuple(slice(size) for size in first.shape)] = first
    ends = zip(shape, second.shape, strict=True)
    whole[tuple(slice(size - part, size) for size, part in ends)] = second
    return whole


def carry_both(model):
    """Give `model` the weights of both narrow ones."""
    pairs = zip(narrow["sentence"].get_weights(), narrow["text"].get_weights(), strict=True)
    both = zip(pairs, model.get_weights(), strict=True)
    model.set_weights([put_together(*pair, weight.shape) for pair, weight in both])


carry_both(wide)
query_kernel, *_, output_kernel, _ = wide.get_layer("attention_of_block_0").get_weights()
print(f"W_q of the wide layer: {query_kernel.shape}, zeros {np.mean(query_kernel == 0):.0%}")
print(f"W_o of the wide layer: {output_kernel.shape}, zeros {np.mean(output_kernel == 0):.0%}")

# %%
side = 2 * WIDTH  # and 2 * HEADS * HEAD_SIZE, which is as much
middles = HEAD_SIZE * (np.arange(2 * HEADS) + 0.5) / 8 - 0.5
per_head = middles, range(2 * HEADS)
per_half = [3.5, 11.5], ["sentence", "text"]
figure, panels = plt.subplots(1, 2, figsize=(8.5, 4), layout="constrained")
for panel, kernel in zip(panels, (query_kernel, output_kernel), strict=True):
    tiles = np.abs(kernel.reshape(side // 8, 8, side // 8, 8)).mean(axis=(1, 3))
    image = panel.imshow(tiles, cmap="Blues", vmin=0)
    panel.axhline(7.5, color="black", linewidth=0.8)
    panel.axvline(7.5, color="black", linewidth=0.8)
panels[0].set(
    title="W_q: from a token's vector to heads", xlabel="head", ylabel="half of the vector"
)
panels[0].set_xticks(*per_head)
panels[0].set_yticks(*per_half, rotation=90, va="center")
panels[1].set(
    title="W_o: from heads to a token's vector", xlabel="half of the vector", ylabel="head"
)
panels[1].set_xticks(*per_half)
panels[1].set_yticks(*per_head)
figure.colorbar(image, ax=panels, label="mean size of 8 x 8 weights", shrink=0.8)
show(figure, "kernels")

# %% [markdown]
"""
![Two square matrices with weights in two blocks on the diagonal, heads 0 to 3 and heads 4 to 7, and
zeros elsewhere](../docs/images/two_berts_kernels.png)

## Equal outputs

Two texts, one of them padded. The wide model's first half is to be what `sentence` returns, its
second half what `text` returns.
"""

# %%
texts = [
    "drums drums in the deep . we cannot get out . they are coming .",
    "we cannot get out .",
]
words = {"[PAD]": PAD, ".": FULL_STOP}
token_ids = np.full((2, 15), PAD, "int32")
for row, text in zip(token_ids, texts, strict=True):
    ids = [words.setdefault(word, len(words)) for word in text.split()]
    row[: len(ids)] = ids

separate = {name: convert_to_numpy(model(token_ids)) for name, model in narrow.items()}
expected = np.concatenate([separate["sentence"], separate["text"]], axis=-1)


def compare(name, model):
    halves = np.split(np.abs(convert_to_numpy(model(token_ids)) - expected), 2, axis=-1)
    print(f"{name:36}{halves[0].max():>10.0e}{halves[1].max():>10.0e}")


print(f"{'Largest difference from':36}{'sentence':>10}{'text':>10}")
compare("the wide model", wide)

# %% [markdown]
"""
To see that this is no accident, take away what keeps the two apart. Without the rule (every head
sees all but padding) the first half is no more what it was; the second half, whose heads had that
rule anyway, is untouched. With an ordinary LayerNorm over the whole vector both halves are wrong.
"""

# %%
no_rule = build(2 * WIDTH, 2 * HEADS, rules["text"], HalvesNormalization)
one_norm = build(2 * WIDTH, 2 * HEADS, rule, layers.LayerNormalization)
for name, model in (("without the rule", no_rule), ("with one LayerNorm over both", one_norm)):
    carry_both(model)
    compare(name, model)

# %% [markdown]
"""
## Fewer calls

Half as many layers are called. In exchange the kernels have twice the numbers of the two narrow
models together, half of them zeros that are multiplied like any other. (The attention itself,
scores and weighted sums, is the same work: as many heads as before.)
"""


# %%
def counts(models):
    inner = [layer for model in models for layer in model.layers]
    kernels = [convert_to_numpy(w) for x in inner for w in x.weights if w.name == "kernel"]
    attention = [layer for layer in inner if isinstance(layer, layers.MultiHeadAttention)]
    return {
        "models called": len(models),
        "attention layers called": len(attention),
        "layers with weights called": sum(bool(layer.weights) for layer in inner),
        "numbers in kernels": sum(w.size for w in kernels),
        "   of these not 0": sum(np.count_nonzero(w) for w in kernels),
    }


two, one = counts(list(narrow.values())), counts([wide])
print(f"{'':30}{'two narrow':>12}{'one wide':>12}")
for name in two:
    print(f"{name:30}{two[name]:12,}{one[name]:12,}")

# %% [markdown]
"""
It is one file, one export and one server, and a model that can be trained on as
a whole, in which the zeros are weights like any other.
"""
