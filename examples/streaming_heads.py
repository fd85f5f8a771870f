# %% [markdown]
"""
# Streaming heads: a cache that keeps what each head still looks at

A decoder keeps the keys and values of all earlier tokens, and for long texts this cache is what
fills the memory. Most heads need little of it: DuoAttention (Xiao et al. 2024) finds that a part of
the heads reads far back, and the others the first tokens (*attention sinks*) and the last ones
alone. A mask says which head is which. But a mask only hides: the cache stays whole, for all heads.

Here the rule is a value, so it can say how far back each head looks, and `generate()` keeps just
that. The model has the sizes of GPT-2 and random weights: what it costs is real, what it writes is
noise.

    pip install -e ".[pretrained]"
    python examples/streaming_heads.py            # 2 to 4 CPU minutes; 5 GiB of memory
    python examples/streaming_heads.py --quick    # seconds: a narrow model
"""

# %%
import argparse
import os
import pathlib
import re
import statistics
import time

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
options.add_argument("--quick", action="store_true", help="a narrow model and a short text")
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


LAYERS, HEADS, HEAD_DIM, VOCABULARY = 12, 12, 64, 50257  # as in GPT-2
LENGTH, SINKS, WINDOW, PROMPT = 1024, 4, 252, 64
if options.quick:
    LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 8, 500
    LENGTH, SINKS, WINDOW, PROMPT = 64, 2, 10, 16
FULL = HEADS // 4  # heads that read far back

# %% [markdown]
"""
## The rule

Three of twelve heads see all that came before; nine see the first four tokens and the last 252.
(For a real model the split is measured.)
"""

# %%
streaming = hm.recipes.streaming(SINKS, WINDOW)
rule = hm.PerHead({f"{FULL}-{HEADS - 1}": streaming})
print(rule.describe(HEADS))
print("\nhow far back:", hm.reach(rule.for_head(0)), "and", hm.reach(rule.for_head(FULL)))

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
    weight.assign_add(noise * (0.08 if len(weight.shape) > 1 else 0.02))
stock = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
masked = hm.apply_head_masks(stock, rule)
print(f"{stock.count_params():,} weights")

# %% [markdown]
"""
## What is kept

A row is a head; a column is a place in a text of full length. A dark place is kept for the tokens
to come.
"""

# %%
kept = np.zeros((HEADS, LENGTH), bool)
for head in range(HEADS):
    reach = hm.reach(rule.for_head(head))
    if not reach.is_bounded:
        kept[head] = True
        continue
    kept[head, LENGTH - 1 - reach.before :] = True
    for start, stop in reach.fixed:
        kept[head, start:stop] = True

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.imshow(kept, aspect="auto", cmap="Blues", vmin=0, vmax=1.2, interpolation="nearest")
axes.set(xlabel="position of the key", ylabel="head", yticks=range(HEADS))
axes.set_title(f"keys that are kept after {LENGTH:,} tokens: {kept.mean():.0%}")
show(figure, "kept")

# %% [markdown]
"""
![Twelve rows: three are dark from end to end; nine are dark at the right quarter, and have a thin
dark line at the left edge](../docs/images/streaming_heads_kept.png)

`hm.cache_bytes` counts what the cache takes, by layer, beside KerasHub's own:
"""

# %%
held = hm.cache_bytes(masked, LENGTH)
print(held)

# %% [markdown]
"""
## It chooses the same tokens

The prompt is a piece of Python's manual. The masked model continues it with its small cache. Then
one forward *without* a cache goes over the whole text: at each place, the token that was chosen
must be the best one there.
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

masked.compile(sampler="greedy")
start = time.perf_counter()
written = masked.generate(prompt, stop_token_ids=None)["token_ids"]
print(f"{LENGTH - PROMPT} tokens in {time.perf_counter() - start:.0f} s")

logits = masked({"token_ids": written, "padding_mask": np.ones_like(written)})
logits = keras.ops.convert_to_numpy(logits)[0, PROMPT - 1 : -1]
chosen = logits[np.arange(len(logits)), written[0, PROMPT:]]
behind = logits.max(-1) - chosen
assert (behind < 1e-3).all(), behind.max()  # (two logits may be equal but for rounding)
print(f"{(behind == 0).sum()} of {len(behind)} are the best without a cache")
print(f"{len(np.unique(written[0, PROMPT:]))} different tokens")

# %% [markdown]
"""
## Time for a token

A run of a few tokens is taken from a run of more, so the prompt's forward and the start are left
out. Both go by KerasHub's own loop; its own cache is one tensor that is put together anew at every
step, here only the new keys are written.
"""


# %%
class Stops(keras_hub.samplers.GreedySampler):
    """Ends after so many tokens."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def run_loop(self, *args, maximum_iterations, **kwargs):
        return super().run_loop(*args, maximum_iterations=self.tokens, **kwargs)


def run_of(model, tokens):
    """A compiled function that generates so many tokens."""
    model.compile(sampler=Stops(tokens))
    generate = model.make_generate_function()
    generate(prompt)  # traced now, while this is the model's sampler
    return lambda: keras.ops.convert_to_numpy(generate(prompt)["token_ids"])


few, more = 2, 18
models = {"stock": stock, "masked": masked}
runs = {(name, n): run_of(model, n) for name, model in models.items() for n in (few, more)}
seconds = {key: [] for key in runs}
for _ in range(3):  # in turns, so that a busy moment meets all alike
    for key, run in runs.items():
        start = time.perf_counter()
        run()
        seconds[key].append(time.perf_counter() - start)
median = {key: statistics.median(times) for key, times in seconds.items()}
for name in models:
    per_token = (median[name, more] - median[name, few]) / (more - few)
    print(f"{name:8} {per_token * 1000:6.1f} ms for each token")

# %% [markdown]
"""
Longer texts gain more: `docs/measurements.md` has 4,096 tokens, and the memory of the process.
`docs/generate.md` says what `generate()` does with rules that read ids, `docs/decoders.md` which
models take a rule.
"""
