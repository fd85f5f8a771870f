# %% [markdown]
"""
# A window for each head: Longformer's attention on a long document

Full attention compares every token with every other, so a text twice as long costs four times as
much. Longformer (Beltagy et al. 2020) lets a token attend to a *window* around it, and lets a few
*global* tokens see everything and be seen by everything. Its paper gives layers different
windows and some heads dilated ones; the implementation in Hugging Face's transformers has one
window for all heads of a layer. Here a rule says the pattern, so each head may have its own.

The document is a chapter of Python's own manual, which comes with every Python. Its headings are
the global tokens: what stands under a heading can look up to it, and the heading reads the chapter.

    pip install -e ".[examples]"
    python examples/longformer_heads.py            # up to 1 CPU minute; 4 GiB of memory
    python examples/longformer_heads.py --quick    # seconds: a short text, a narrow layer
"""

# %%
import argparse
import os
import pathlib
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from pydoc_data.topics import topics

import keras
import numpy as np
import torch
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="a short text and a narrow layer")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/longformer"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

NUM_HEADS = 12
LENGTH, DIM, NARROW, MIDDLE, WIDE = 63 * 64, 768, 32, 128, 256  # as in longformer-base
if options.quick:
    LENGTH, DIM, NARROW, MIDDLE, WIDE = 7 * 64, 96, 4, 8, 16

# %% [markdown]
"""
## The document

Words and punctuation marks are the tokens. A heading is a line above a line of `***` or `===`.
"""


# %%
def read_document(topic):
    """The tokens of a help topic, and for each whether it belongs to a heading."""
    lines = topics[topic].splitlines()
    tokens, is_global = [], []
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if re.fullmatch(r"[*=\-~^]{3,}", line):
            continue
        found = re.findall(r"\w+|[^\w\s]", line)
        tokens += found
        is_global += [re.fullmatch(r"[*=\-~^]{3,}", next_line) is not None] * len(found)
    return tokens, np.array(is_global)


chapter, chapter_global = read_document("specialnames")
tokens, is_global = chapter[:LENGTH], chapter_global[None, :LENGTH]  # (batch, length)
print(f"{len(tokens)} tokens of {len(chapter)}, {is_global.sum()} of them in headings")
print(" ".join(tokens[:24]))

# %% [markdown]
"""
## The rule

`hm.recipes.longformer(each_side, "is_global")` is Longformer's pattern: a window, or the query is
global, or the key is. The flags are an input of the model, one for each token.
"""

# %%
one_window = hm.recipes.longformer(WIDE, "is_global")

# %% [markdown]
"""
Now a window for each head. Four heads look at the near neighbourhood, four farther, two as far as
Longformer's own window; the last two look farther still, but at each fourth token only: a *dilated*
window, which the paper has and transformers has not.
"""

# %%
headings = hm.QueryFlag("is_global") | hm.KeyFlag("is_global")
window_per_head = hm.PerHead(
    {
        "0-3": hm.recipes.longformer(NARROW, "is_global"),
        "4-7": hm.recipes.longformer(MIDDLE, "is_global"),
        "8-9": one_window,
        "10-11": hm.Window(2 * WIDE, 2 * WIDE, step=4) | headings,
    }
)
print(window_per_head.describe(NUM_HEADS))

# %% [markdown]
"""
## What is skipped

A long mask is drawn in tiles. Of a light tile no pair may attend: it is not computed. Of a dark one
all may, of an orange one some. (The rows and columns of the headings cost less than they look: the
few global tokens are gathered once, and every tile meets just them. A dilated window is computed
like one without gaps.)
"""

# %%
given = {"is_global": is_global}
figure = hm.plot(window_per_head, LENGTH, num_heads=NUM_HEADS, mask_inputs=given)
figure.savefig(options.out / "longformer_heads_tiles.png")

# %%
mask = hm.make_mask(window_per_head, LENGTH, LENGTH, num_heads=NUM_HEADS, mask_inputs=given)
mask = np.array(mask)
print(f"The whole mask, {mask.shape}, has {mask.nbytes / 2**20:.0f} MiB. Of its pairs, and tiles:")
for name, head in (("0-3", 0), ("4-7", 4), ("8-9", 8), ("10-11", 10)):
    tiles = mask[0, head].reshape(LENGTH // 64, 64, LENGTH // 64, 64).any((1, 3))
    print(
        f"heads {name:6} {mask[0, head].mean():6.1%} of the pairs may attend, "
        f"{(~tiles).mean():6.1%} of the tiles of 64 x 64 are empty"
    )

# %% [markdown]
"""
![Four panels, one for each group of heads: a band along the diagonal, wider from panel to panel,
and thin rows and columns where headings stand; most of each panel is light, which is what is
skipped](../docs/images/longformer_heads_tiles.png)

## Against full attention with the same mask

Stock Keras takes a mask of rank 4 too, and then computes all pairs to throw most of them away. The
layer below has the rule, and stock Keras the same weights. (The output projection is the identity,
so that the outputs are the heads, side by side.)
"""


# %%
def embed(tokens):
    """Random vectors, the same for the same token: `(1, length, DIM)`."""
    numbers = {token: i for i, token in enumerate(dict.fromkeys(chapter))}
    table = np.random.default_rng(0).normal(size=(len(numbers), DIM))
    return table[[numbers[token] for token in tokens]][None].astype("float32")


keras.utils.set_random_seed(0)
x = embed(tokens)
sizes = NUM_HEADS, DIM // NUM_HEADS
ours = hm.PerHeadMaskedMultiHeadAttention(*sizes, mask_spec=window_per_head)
one = hm.PerHeadMaskedMultiHeadAttention(*sizes, mask_spec=one_window)
stock = keras.layers.MultiHeadAttention(*sizes)
for layer in (ours, one, stock):
    layer.build(x.shape, x.shape)
identity = np.eye(DIM, dtype="float32").reshape(NUM_HEADS, -1, DIM)
weights = [*ours.get_weights()[:-2], identity, np.zeros(DIM, "float32")]
for layer in (ours, one, stock):
    layer.set_weights(weights)


def difference(a, b):
    return np.abs(keras.ops.convert_to_numpy(a) - keras.ops.convert_to_numpy(b)).max()


outputs, one_outputs = ours(x, mask_inputs=given), one(x, mask_inputs=given)
largest = difference(outputs, stock(x, x, attention_mask=mask))
print(f"\nLargest difference from stock Keras, a window for each head: {largest:.1e}")
print(f"With one window for all heads instead: {difference(outputs, one_outputs):.1e}")

# %% [markdown]
"""
## Against Hugging Face's implementation

`LongformerSelfAttention` projects global tokens by weights of their own. Where these equal those of
the other tokens, it says the same as one layer under the rule. Its length must be a multiple of its
window, counted over both sides, so what is missing is padded; here a text is as long as it is.
"""


# %%
def to_hugging_face(weights, each_side):
    """A `LongformerSelfAttention` with the projections of the Keras layer, all of them shared."""
    attention = LongformerSelfAttention(
        LongformerConfig(
            hidden_size=DIM,
            num_attention_heads=NUM_HEADS,
            num_hidden_layers=1,
            attention_window=[2 * each_side],
            attention_probs_dropout_prob=0.0,
        ),
        layer_id=0,
    )
    for i, name in enumerate(("query", "key", "value")):
        kernel, bias = weights[2 * i : 2 * i + 2]  # (DIM, heads, size of a head) and without DIM
        state = {"weight": kernel.reshape(DIM, DIM).T.copy(), "bias": bias.reshape(DIM)}
        state = {key: torch.tensor(value) for key, value in state.items()}
        getattr(attention, name).load_state_dict(state)
        getattr(attention, f"{name}_global").load_state_dict(state)
    return attention.eval()


def as_hugging_face(x, is_global, each_side):
    """The arguments that `LongformerModel` gives its layers: -10000 hides, 10000 is global."""
    missing = -x.shape[1] % (2 * each_side)
    mask = np.pad(10000.0 * is_global, ((0, 0), (0, missing)), constant_values=-10000.0)
    mask = torch.tensor(mask, dtype=torch.float32)
    return {
        "hidden_states": torch.tensor(np.pad(x, ((0, 0), (0, missing), (0, 0)))),
        "attention_mask": mask,
        "is_index_masked": mask < 0,
        "is_index_global_attn": mask > 0,
        "is_global_attn": True,
    }


def run_hugging_face(each_side):
    with torch.no_grad():
        attention = to_hugging_face(weights, each_side)
        return attention(**as_hugging_face(x, is_global, each_side))[0][:, : len(tokens)].numpy()


largest = difference(one_outputs, run_hugging_face(WIDE))
print(f"\nLargest difference from transformers, one window for all heads: {largest:.1e}")

# %% [markdown]
"""
A window for each head takes transformers one run for each window, of which most heads are thrown
away; and of a dilated window it has none. Head by head the outputs are the same as those of the one
layer here:
"""

# %%
by_head = keras.ops.reshape(outputs, (1, len(tokens), NUM_HEADS, -1))
for first, stop, each_side in ((0, 4, NARROW), (4, 8, MIDDLE), (8, 10, WIDE)):
    theirs = run_hugging_face(each_side).reshape(by_head.shape)
    largest = difference(by_head[:, :, first:stop], theirs[:, :, first:stop])
    print(f"heads {first}-{stop - 1}: largest difference from {2 * each_side}: {largest:.1e}")

# %% [markdown]
"""
What windows cost grows with the length, what full attention costs with its square.
`pretrained_bert.py` shows how a model that you have gets such a rule: `hm.apply_head_masks(model,
rule)`.
"""
