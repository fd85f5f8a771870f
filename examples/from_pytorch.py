# %% [markdown]
"""
# From PyTorch and Hugging Face: weights and masks moved over

Attention is the same formula everywhere; masks are not. `nn.MultiheadAttention`,
`scaled_dot_product_attention` and Hugging Face's models each have their own polarity, shape and
dtype, and a mask in the wrong one mostly runs. Here the weights and the masks of each are brought
over in a few lines, and outputs are compared.

    pip install -e ".[examples]"
    python examples/from_pytorch.py                    # up to 1 CPU minute, most of it imports
"""

# %%
import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from keras.ops import convert_to_numpy
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertAttention

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="nothing is left out: it takes seconds")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/from_pytorch"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)


def compare(name, ours, theirs):
    """Print the largest difference between a result here and one of PyTorch."""
    ours, theirs = convert_to_numpy(ours), theirs.detach().numpy()
    assert ours.shape == theirs.shape
    print(f"{name:52}{np.abs(ours - theirs).max():.0e}")


# %% [markdown]
"""
## One mask, four notations

A look-ahead mask over three tokens, as each library wants to have it (dark: may attend):
"""

# %%
allowed = np.tri(3, dtype=bool)
additive = np.where(allowed, 0, -np.inf)
notations = {
    "nn.MultiheadAttention\n(bool)": ~allowed,
    "scaled_dot_product_attention\n(bool), and here": allowed,
    "scaled_dot_product_attention\n(float)": additive,
    "Hugging Face, 4-D\n(float)": np.where(allowed, 0, np.finfo("float32").min),
}
figure, panels = plt.subplots(1, 4, figsize=(10, 3.6), layout="constrained")
for panel, (name, mask) in zip(panels, notations.items(), strict=True):
    panel.imshow(np.where(allowed[..., None], (0.04, 0.24, 0.42), (0.96, 0.95, 0.91)))
    for (query, key), value in np.ndenumerate(mask):
        text = str(value) if mask.dtype == bool else f"{value:.2g}".replace("e+", "e")
        colour = "white" if allowed[query, key] else "black"
        panel.text(key, query, text, color=colour, ha="center", va="center", fontsize=9)
    panel.set_title(name, fontsize=9)
    panel.set(xticks=range(3), yticks=range(3), xlabel="key")
panels[0].set_ylabel("query")
figure.savefig(options.out / "from_pytorch_notations.png")

# %% [markdown]
"""
![Four times the same triangle: True = hidden in nn.MultiheadAttention, True = may attend in
scaled_dot_product_attention, 0 and -inf, 0 and -3.4e38](../docs/images/from_pytorch_notations.png)

## `nn.MultiheadAttention`: a mask per head is `(batch * heads, queries, keys)`

Two texts of six tokens, the second one padded by two. In PyTorch, head 0 sees its own sentence and
head 1 what came before; `attn_mask` and `key_padding_mask` are both `True` where something is
*hidden*.
"""

# %%
batch, length, heads, width = 2, 6, 4, 32
torch.manual_seed(0)
x = torch.randn(batch, length, width)
sentence_ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
is_padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

hidden = torch.zeros(batch, heads, length, length, dtype=torch.bool)
hidden[:, 0] = sentence_ids[:, :, None] != sentence_ids[:, None, :]
hidden[:, 1] = torch.ones(length, length, dtype=torch.bool).triu(1)
attn_mask = hidden.reshape(batch * heads, length, length)  # example by example, in each its heads

theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True).eval()
for parameter in theirs.parameters():
    torch.nn.init.normal_(parameter, std=0.2)  # its biases are 0 at first, which would hide errors
expected, _ = theirs(x, x, x, attn_mask=attn_mask, key_padding_mask=is_padding)

# %% [markdown]
"""
The weights: a `Linear` of PyTorch holds the transpose of a Keras kernel, the three input
projections are stacked in one matrix, and Keras has an axis for the heads.
"""


# %%
def kernel_per_head(linear_weight):
    """(heads * size, width), as PyTorch has it, to (width, heads, size)."""
    return linear_weight.detach().numpy().T.reshape(width, heads, width // heads)


def layer_of(query, key, value, output, **arguments):
    """A layer with the weights of four pairs (weight, bias) of PyTorch's `Linear`."""
    layer = hm.PerHeadMaskedMultiHeadAttention(heads, width // heads, **arguments)
    layer.build((batch, length, width))
    weights = []
    for weight, bias in (query, key, value):
        weights += [kernel_per_head(weight), bias.detach().numpy().reshape(heads, width // heads)]
    weight, bias = (parameter.detach().numpy() for parameter in output)
    layer.set_weights([*weights, weight.T.reshape(heads, width // heads, width), bias])
    return layer


inputs = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
moved = [*inputs, (theirs.out_proj.weight, theirs.out_proj.bias)]
layer = layer_of(*moved)

# %% [markdown]
"""
The masks, in either of two ways: converted, or, better, said again as a rule that the model then
carries with it.
"""

# %%
mask = hm.from_torch(attn_mask, num_heads=heads)  # (2, 4, 6, 6), True = may attend
is_word = ~is_padding.numpy()
ours = layer(x.numpy(), attention_mask=mask, value_mask=is_word)
print(f"{'nn.MultiheadAttention: largest difference':52}")
compare("masks converted", ours, expected)

rule = hm.PerHead({0: hm.SameSegment("sentence_ids"), 1: hm.recipes.causal()})
with_rule = layer_of(*moved, mask_spec=rule)
mask_inputs = {"sentence_ids": sentence_ids.numpy()}
compare("a rule", with_rule(x.numpy(), value_mask=is_word, mask_inputs=mask_inputs), expected)

# %% [markdown]
"""
### What goes wrong without a word

Each of these runs:
"""

# %%
as_it_is = hidden.numpy()  # True = hidden, read as: may attend
wrong_order = attn_mask.reshape(heads, batch, length, length).transpose(0, 1)
wrong_order = hm.not_mask(wrong_order.numpy())
print(f"{'traps: largest difference':52}")
compare("attn_mask not inverted", layer(x.numpy(), attention_mask=as_it_is), expected)
not_inverted = layer(x.numpy(), attention_mask=mask, value_mask=~is_word)
compare("key_padding_mask not inverted", not_inverted, expected)
swapped = layer(x.numpy(), attention_mask=wrong_order, value_mask=is_word)
compare("batch * heads taken apart as heads * batch", swapped, expected)
compare("key_padding_mask forgotten", layer(x.numpy(), attention_mask=mask), expected)

# %% [markdown]
"""
## `scaled_dot_product_attention`: `True` = may attend

Here PyTorch has the polarity of this package: no conversion. The axes differ: (batch, heads,
tokens, size) there, (batch, tokens, heads, size) here. A float mask is *added* to the scores.
"""

# %%
query, key, value = torch.randn(3, batch, heads, length, 8)
allowed = ~hidden | torch.eye(length, dtype=torch.bool)  # each token sees itself at least
bias = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
q, k, v = (tensor.transpose(1, 2).numpy() for tensor in (query, key, value))


def sdpa(mask, **arguments):
    """Of PyTorch, in this package's order of axes."""
    return F.scaled_dot_product_attention(query, key, value, mask, **arguments).transpose(1, 2)


print("scaled_dot_product_attention: largest difference")
compare("bool", hm.dot_product_attention(q, k, v, mask=allowed.numpy()), sdpa(allowed))
read = hm.from_additive(bias.numpy())
compare("float, by from_additive", hm.dot_product_attention(q, k, v, mask=read), sdpa(bias))
look_ahead = hm.dot_product_attention(q, k, v, mask_spec=hm.recipes.causal())
compare("is_causal=True, as a rule", look_ahead, sdpa(None, is_causal=True))

# %% [markdown]
"""
## Hugging Face: additive masks of rank 4

A tokenizer's `attention_mask` is (batch, keys), 1 = word. With
`attn_implementation="eager"` a model makes an additive mask of it, (batch, 1, queries, keys), 0 or
the lowest number of the dtype, and an attention layer takes (batch, heads, queries, keys) just as
well. `BertAttention` below has random weights; a pretrained one is moved the same way.
"""

# %%
config = BertConfig(
    hidden_size=width, num_attention_heads=heads, initializer_range=0.2, attn_implementation="eager"
)
bert = BertAttention(config).eval()
for parameter in bert.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
projections = bert.self.query, bert.self.key, bert.self.value, bert.output.dense
layer = layer_of(*((linear.weight, linear.bias) for linear in projections))


def hugging_face(mask):
    """What `BertAttention` computes before its skip connection and LayerNorm."""
    return bert.output.dense(bert.self(x, mask)[0])


lowest = torch.finfo(torch.float32).min
tokenizer_mask = (~is_padding).int()  # (batch, keys), 1 = word
rank_4 = (1 - tokenizer_mask)[:, None, None, :] * lowest  # (batch, 1, 1, keys)
per_head = torch.zeros(allowed.shape).masked_fill(~allowed, lowest)  # (batch, heads, queries, keys)

print("Hugging Face: largest difference")
expected = hugging_face(rank_4)
compare("a tokenizer's mask", layer(x.numpy(), value_mask=tokenizer_mask.numpy()), expected)
ours = layer(x.numpy(), attention_mask=hm.from_additive(rank_4.numpy()))
compare("(batch, 1, 1, keys), by from_additive", ours, expected)
ours = layer(x.numpy(), attention_mask=hm.from_additive(per_head.numpy()))
compare("(batch, heads, queries, keys), by from_additive", ours, hugging_face(per_head))
# The other way: what a rule says, handed to Hugging Face.
mask = hm.make_mask(rule, length, length, num_heads=heads, mask_inputs=mask_inputs)
expected = hugging_face(torch.tensor(convert_to_numpy(hm.to_additive(mask))))
compare("a rule, by to_additive", layer(x.numpy(), attention_mask=mask), expected)

# %% [markdown]
"""
## In short

| from | to a mask of this package |
|---|---|
| `nn.MultiheadAttention`: `attn_mask` | `hm.from_torch(attn_mask, num_heads)` |
| `nn.MultiheadAttention`: `key_padding_mask` | `value_mask=~key_padding_mask` |
| `scaled_dot_product_attention`: bool | as it is |
| `scaled_dot_product_attention`: float 0 / -inf | `hm.from_additive(mask)` |
| Hugging Face: a tokenizer's `attention_mask` | `value_mask=attention_mask` |
| Hugging Face: 4-D additive | `hm.from_additive(mask)`; back: `hm.to_additive(mask)` |
"""
