# %% [markdown]
"""
# Multi-head attention from scratch, each head under its own mask

The formula of "Attention Is All You Need" in a few lines of NumPy, with separate heads, so that one
sees where a mask per head goes. Then the proof that nothing else is going on: the same numbers from
`PerHeadMaskedMultiHeadAttention` and, without masks, from stock Keras. Last, the block that the
attention lives in: LayerNorm and the skip connection.

    pip install -e ".[examples]"
    python examples/multi_head_from_scratch.py                    # seconds
    jupytext --to notebook examples/multi_head_from_scratch.py    # the same as a notebook
"""

# %%
import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras.ops import convert_to_numpy, convert_to_tensor

import keras_headmask as hm

NAME = "multi_head_from_scratch"
options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="nothing is left out: it takes seconds")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models") / NAME, help="for pictures"
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)


def show(figure, name):
    """Save the picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"{NAME}_{name}.png")
    plt.close(figure)
    return figure


def difference(ours, theirs):
    """The largest difference between two arrays of one shape."""
    ours, theirs = convert_to_numpy(ours), convert_to_numpy(theirs)
    assert ours.shape == theirs.shape
    return f"{np.abs(ours - theirs).max():.0e}"


# %% [markdown]
"""
## One text, four heads, four rules

Head 0 sees its own sentence, head 1 what was written so far, head 2 the two neighbours, head 3
everything. The rule is one value; the mask that it makes for this text has shape
(batch, heads, queries, keys), `True` = this query may attend to this key.
"""

# %%
tokens = ["We", "cannot", "get", "out", ".", "They", "are", "coming", "."]
full_stop = 4
token_ids = np.array([[0, 1, 2, 3, full_stop, 5, 6, 7, full_stop]])
length, heads, head_size, width = len(tokens), 4, 8, 32

rules = {
    0: hm.SameSentence(full_stop),
    1: hm.recipes.causal(),
    2: hm.Window(before=1, after=1),
}
rule = hm.PerHead(rules, default=hm.Full())
print(rule.describe(num_heads=heads))
mask = hm.make_mask(rule, length, length, num_heads=heads, mask_inputs={"token_ids": token_ids})
mask = convert_to_numpy(mask)
print(f"mask {mask.shape}; allowed pairs of each head: {mask[0].sum(axis=(1, 2)).tolist()}")

# %% [markdown]
"""
## Weights

A layer of this package makes them, so that there is something to compare with. Keras keeps the
matrices of all heads in one array with an axis of heads; to take one apart is to index it.
The biases are 0 in a new layer. They get numbers here, or forgetting them would go unnoticed.
"""

# %%
keras.utils.set_random_seed(0)
generator = np.random.default_rng(seed=0)
x = generator.normal(size=(length, width)).astype("float32")  # one text, without its batch axis

layer = hm.PerHeadMaskedMultiHeadAttention(heads, head_size, mask_spec=rule)
layer.build((1, length, width))
layer.set_weights([w + 0.1 * generator.normal(size=w.shape) for w in layer.get_weights()])
W_q, b_q, W_k, b_k, W_v, b_v, W_o, b_o = layer.get_weights()
for name, weight in (("W_q, W_k, W_v", W_q), ("b_q, b_k, b_v", b_q), ("W_o", W_o), ("b_o", b_o)):
    print(f"{name:14}{weight.shape}")

# %% [markdown]
"""
## The formula

    head_h    = softmax(Q_h K_h^T / sqrt(head size) + M_h) V_h
    MultiHead = concatenate(head_0, ..., head_3) W_o + b_o

M_h is the mask of head h as a number to add: 0 where it allows, -1e9 where it hides. (Why added,
why there: `masks_101.py`.) It is the only thing that makes one head's rule differ from another's.
"""


# %%
def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def one_head(x, h, allowed):
    """What head `h` returns, (queries, head size), and its weights (queries, keys)."""
    query, key, value = (
        x @ kernel[:, h] + bias[h] for kernel, bias in ((W_q, b_q), (W_k, b_k), (W_v, b_v))
    )
    scores = query @ key.T / head_size**0.5
    weights = softmax(scores + np.where(allowed, 0, -1e9).astype("float32"))
    return weights @ value, weights


def multi_head(x, mask):
    """`mask` has shape (heads, queries, keys)."""
    per_head = [one_head(x, h, mask[h])[0] for h in range(heads)]
    concatenated = np.concatenate(per_head, axis=-1)  # (queries, heads * head size)
    return concatenated @ W_o.reshape(heads * head_size, width) + b_o


from_scratch = multi_head(x, mask[0])
output, scores = layer(x[None], mask_inputs={"token_ids": token_ids}, return_attention_scores=True)
print("Largest difference from scratch")
print(f"{'the layer under its rule':44}{difference(from_scratch[None], output):>8}")
for h in range(heads):
    weights = one_head(x, h, mask[0, h])[1]
    print(f"{f'   its weights of head {h}':44}{difference(weights, scores[0, h]):>8}")

# %% [markdown]
"""
Stock Keras has the same weights in the same order, and its `attention_mask` may be of rank 4. What
the layer adds is the rule as a part of the model: nobody has to build and send that mask.
"""

# %%
stock = keras.layers.MultiHeadAttention(heads, head_size)
stock.build((1, length, width), (1, length, width))
stock.set_weights(layer.get_weights())
plain = multi_head(x, np.ones_like(mask[0]))
with_mask = stock(x[None], x[None], attention_mask=mask)
print(f"{'stock Keras without a mask':44}{difference(plain[None], stock(x[None], x[None])):>8}")
print(
    f"{'stock Keras with the mask (1, 4, 9, 9)':44}{difference(from_scratch[None], with_mask):>8}"
)
print(f"{'(with and without masks, from scratch)':44}{difference(from_scratch, plain):>8}")

# %% [markdown]
"""
The last line is the size of what the masks do, so that the small numbers above mean something.

## Concatenation and W_o, said otherwise

W_o has a slice for each head, and a product with a concatenation is a sum of products: each head
adds its own message to the result. So a head that is switched off is one message less, and nothing
else changes.
"""

# %%
messages = [one_head(x, h, mask[0, h])[0] @ W_o[h] for h in range(heads)]
print(f"{'sum of messages':44}{difference(sum(messages) + b_o, from_scratch):>8}")

head_3_off = hm.PerHead(rules, default=hm.Nothing())
off = hm.PerHeadMaskedMultiHeadAttention(heads, head_size, mask_spec=head_3_off)
off.build((1, length, width))
off.set_weights(layer.get_weights())
off_output = off(x[None], mask_inputs={"token_ids": token_ids})[0]
print(f"{'head 3 under Nothing()':44}{difference(sum(messages[:3]) + b_o, off_output):>8}")

# %% [markdown]
"""
## The weights, drawn over the masks

`hm.plot_attention` runs a model and draws what a layer attends to. What a rule hides is hatched;
attention on a hidden pair would get a red cross, and is counted in the caption.
"""

# %%
vectors, ids = keras.Input((length, width)), keras.Input((length,), dtype="int32")
model = keras.Model([vectors, ids], layer(vectors, mask_inputs={"token_ids": ids}))
show(hm.plot_attention(model, [x[None], token_ids], tokens=tokens), "heads")

# %% [markdown]
"""
![Attention of four heads over nine tokens: two blocks of sentences, a lower triangle, a band of
three, and one head without hatching](../docs/images/multi_head_from_scratch_heads.png)

## The block around it

Attention comes with a skip connection (`x +`, so that a block starts as a small change of what it
is given) and a LayerNorm: each token's vector to mean 0 and variance 1, then times gamma plus beta.
The original paper and BERT normalise after the sum, most later models before the attention:

    post-norm:  LayerNorm(x + Attention(x))
    pre-norm:   x + Attention(LayerNorm(x))

Mind epsilon, which is added to the variance: 1e-3 in Keras, 1e-5 in PyTorch, 1e-12 in BERT.
"""


# %%
def layer_norm(x, gamma, beta, epsilon):
    mean = x.mean(axis=-1, keepdims=True)
    variance = x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta


norm = keras.layers.LayerNormalization()
norm.build((1, length, width))
norm.set_weights([w + 0.1 * generator.normal(size=w.shape) for w in norm.get_weights()])
gamma, beta = norm.get_weights()
inputs = {"token_ids": token_ids}

text = convert_to_tensor(x[None])
post_norm = norm(text + layer(text, mask_inputs=inputs))[0]
pre_norm = (text + layer(norm(text), mask_inputs=inputs))[0]
post_scratch = layer_norm(x + multi_head(x, mask[0]), gamma, beta, 1e-3)
pre_scratch = x + multi_head(layer_norm(x, gamma, beta, 1e-3), mask[0])
print(f"{'post-norm block':44}{difference(post_scratch, post_norm):>8}")
print(f"{'pre-norm block':44}{difference(pre_scratch, pre_norm):>8}")

other = layer_norm(x + multi_head(x, mask[0]), gamma, beta, 1e-12)
print(f"{'post-norm block, epsilon of BERT':44}{difference(other, post_norm):>8}")

# %% [markdown]
"""
That is all of it: a mask for each head is one added number in one line of the formula. Next:
`two_berts.py`, where the heads of two models live in one layer, kept apart by a rule.
"""
