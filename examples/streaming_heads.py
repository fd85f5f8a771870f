# %% [markdown]
"""
# Streaming heads: text from a decoder whose heads look at the start and the end

Most heads of a decoder need little of a long text: DuoAttention (Xiao et al. 2024) finds that a
part of the heads reads far back, and the others the first tokens (*attention sinks*) and the last
ones alone. Here the rule is given to the model, and `generate()` obeys it at every step: the tokens
are those that whole forwards under the mask would choose. The model is small and has random
weights, so what it writes is noise.

A mask hides keys, and removes none: KerasHub's cache holds the keys of all tokens for all heads.

    pip install -e ".[pretrained]"
    python examples/streaming_heads.py            # CPU seconds
    python examples/streaming_heads.py --quick    # fewer: a short text
"""

# %%
import argparse
import os
import pathlib
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from pydoc_data.topics import topics

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="a short text")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models/streaming_heads")
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)


def show(figure, name):
    """Save the picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"streaming_heads_{name}.png")
    plt.close(figure)
    return figure


LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 8, 16, 1000
LENGTH, SINKS, WINDOW, PROMPT = (64, 2, 10, 16) if options.quick else (256, 4, 60, 64)
FULL = HEADS // 4  # heads that read far back

# %% [markdown]
"""
## The rule

Two of eight heads see all that came before; six see the first four tokens and the last 60. (For a
real model the split is measured.)
"""

# %%
streaming = hm.recipes.streaming(SINKS, WINDOW)
rule = hm.PerHead({f"{FULL}-{HEADS - 1}": streaming}, default=hm.recipes.causal())
print(rule.describe(HEADS))

# %%
keras.utils.set_random_seed(0)
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=VOCABULARY,
    num_layers=LAYERS,
    num_heads=HEADS,
    hidden_dim=HEADS * HEAD_DIM,
    intermediate_dim=4 * HEADS * HEAD_DIM,
    max_sequence_length=LENGTH,
)
for weight in backbone.weights:  # livelier than fresh ones, which write one word for ever
    noise = np.random.default_rng(1).normal(size=weight.shape).astype("float32")
    weight.assign_add(noise * (0.2 if len(weight.shape) > 1 else 0.02))
stock = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
masked = hm.apply_head_masks(stock, rule)

# %% [markdown]
"""
## It chooses the tokens of whole forwards

The prompt is a piece of Python's manual, which the masked model continues. Then one forward
*without* a cache goes over the whole text: at each place, the token that was chosen must be the
best one there.
"""

# %%
words = re.findall(r"\w+|[^\w\s]", topics["specialnames"])
numbers = {word: i + 1 for i, word in enumerate(dict.fromkeys(words[:PROMPT]))}
token_ids = np.zeros((1, LENGTH), "int32")
token_ids[0, :PROMPT] = [numbers[word] for word in words[:PROMPT]]
prompt = {
    "token_ids": token_ids,
    "padding_mask": (np.arange(LENGTH) < PROMPT)[None].astype("int32"),
}


def text_of(model):
    model.compile(sampler="greedy")
    return model.generate(dict(prompt), stop_token_ids=None)["token_ids"]


written = text_of(masked)
logits = masked({"token_ids": written, "padding_mask": np.ones_like(written)})
logits = keras.ops.convert_to_numpy(logits)[0, PROMPT - 1 : -1]
chosen = logits[np.arange(len(logits)), written[0, PROMPT:]]
behind = logits.max(-1) - chosen
assert (behind < 1e-3).all(), behind.max()  # (two logits may be equal but for rounding)
print(f"{(behind == 0).sum()} of {len(behind)} are the best without a cache")
print(f"{len(np.unique(written[0, PROMPT:]))} different tokens")

# %% [markdown]
"""
The stock model reads the same prompt with all heads open:
"""

# %%
first = int((text_of(stock) != written)[0].argmax()) - PROMPT
print(f"the stock model writes the same {first} tokens, and then another one")

# %% [markdown]
"""
## What the last token sees

A row is a head; a column is a place in a text of full length.
"""

# %%
seen = keras.ops.convert_to_numpy(hm.make_mask(rule, LENGTH, LENGTH, HEADS))[0, :, -1]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.imshow(seen, aspect="auto", cmap="Blues", vmin=0, vmax=1.2, interpolation="nearest")
axes.set(xlabel="position of the key", ylabel="head", yticks=range(HEADS))
axes.set_title(f"keys that token {LENGTH:,} sees: {seen.mean():.0%}")
print(f"Of all keys, the heads let the last token see {seen.mean():.0%}")
show(figure, "seen")

# %% [markdown]
"""
![Eight rows: two are dark from end to end; six are dark at the right quarter, and have a thin dark
line at the left edge](../docs/images/streaming_heads_seen.png)

`docs/generate.md` says what `generate()` does with rules that read ids, what it costs, and which
models take a rule.
"""
