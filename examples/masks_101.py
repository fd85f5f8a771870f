# %% [markdown]
"""
# Masks 101: what a mask says, and where it goes

Attention gives each query a weight for each key. A mask says which keys a query may attend to at
all. Nearly every mistake in it is silent: shapes fit, rows look like probabilities, the loss falls.
This page makes the usual mistakes on purpose and shows the number that gives each away.

    pip install -e ".[examples]"
    python examples/masks_101.py                        # seconds
    jupytext --to notebook examples/masks_101.py        # the same as a notebook
"""

# %%
import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from keras.ops import convert_to_numpy

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="nothing is left out: it takes seconds")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/masks_101"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)


# %% [markdown]
"""
## Three masks

Sequences of a batch differ in length, so the shorter ones are filled up. A **padding mask** hides
the filling from every query. A decoder writes one word after the other, so a **look-ahead mask**
(a *causal* mask) hides what comes after the query. A decoder that reads a padded batch needs
**both**: a pair is allowed if one mask *and* the other allows it.

Here one writes a rule, which makes the mask for any length and batch; rules are combined by
`& | ~`. Each head may have a rule of its own, so three heads show the three.
"""

# %%
tokens = ["We", "cannot", "get", "out", ".", "[PAD]", "[PAD]"]
padding_mask = np.array([[1, 1, 1, 1, 1, 0, 0]])  # 1 = a word, as tokenizers give it

padding = hm.recipes.padding("padding_mask")
look_ahead = hm.recipes.causal()
rule = hm.PerHead({0: padding, 1: look_ahead, 2: padding & look_ahead})

inputs = {"padding_mask": padding_mask}
masks = convert_to_numpy(hm.make_mask(rule, queries=7, keys=7, num_heads=3, mask_inputs=inputs))[0]
print("Pairs that are allowed, of 49")
for name, mask in zip(("padding", "look-ahead", "both"), masks, strict=True):
    print(f"{name:12}{mask.sum():3}")

# %%
figure = hm.plot(rule, num_heads=3, mask_inputs=inputs, tokens=tokens)
figure.savefig(options.out / "masks_101_three_masks.png")

# %% [markdown]
"""
![The padding mask hides two columns, the look-ahead mask the upper right triangle, and their
combination hides both](../docs/images/masks_101_three_masks.png)

Padding hides *columns*: what queries of [PAD] compute is thrown away later.

## Polarity: what does `True` mean?

There is no agreement.

| who | `True` or 1 means |
|---|---|
| Keras, this package, `scaled_dot_product_attention` of PyTorch | may attend |
| the `attention_mask` of a Hugging Face tokenizer | may attend |
| `torch.nn.MultiheadAttention` | hidden |
| many tutorials ("look-ahead mask = the upper triangle") | hidden |

An inverted mask is a mask: the weights of each row still sum to 1. They are just on the wrong keys.
"""

# %%
generator = np.random.default_rng(seed=0)
query, key = generator.normal(size=(2, 7, 16))
scores = query @ key.T / np.sqrt(16)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


print(f"{'padding mask':14}{'sum of a row':>14}{'weight on [PAD]':>17}")
for name, allowed in (("as meant", masks[0]), ("inverted", ~masks[0])):
    weights = softmax(np.where(allowed, scores, -1e9))
    row_sum, on_padding = weights.sum(axis=-1).mean(), weights[:, 5:].sum(axis=-1).mean()
    print(f"{name:14}{row_sum:14.3f}{on_padding:17.3f}")

# %% [markdown]
"""
What helps: one polarity in the whole program (here `True` always means *may attend*), a picture as
above, and `hm.lint`, which looks at real examples:
"""

# %%
print(hm.lint(~padding, queries=7, mask_inputs=inputs))

# %% [markdown]
"""
## Add before the softmax; do not multiply after it

The softmax divides by the sum over *all* keys. What is multiplied by 0 afterwards has already had
its share. Take four scores (*logits*), of which the last, the largest, belongs to a hidden key:
"""

# %%
scores = np.array([2.0, 1.0, 0.5, 7.0])
allowed = np.array([True, True, True, False])
ways = {
    "no mask": softmax,
    "multiplied after": lambda scores: softmax(scores) * allowed,
    "multiplied before": lambda scores: softmax(scores * allowed),
    "added before": lambda scores: softmax(scores + np.where(allowed, 0, -1e9)),
}
print(f"{'':19}{'weights':29}{'sum':>5}{'hidden key':>13}")
for name, way in ways.items():
    weights = way(scores)
    numbers = "".join(f"{weight:7.3f}" for weight in weights)
    print(f"{name:19}{numbers} {weights.sum():5.3f}{weights[3]:13.3f}")

# %% [markdown]
"""
- **Multiplied after**: the hidden key took 99 % and gave nothing back. The row sums to 0.011: this
  query hands on a hundredth of what it should.
- **Multiplied before**: a score of 0 is no "no": e^0 = 1. The hidden key keeps 8 %.
- **Added before**: e^(-1e9) = 0 exactly; the others share what there is.

## Combining masks: the maximum that is no AND

A tokenizer says 1 = *word*, an upper triangle says 1 = *hidden*. Both are arrays of 0 and 1, and an
element-wise maximum of them runs. It is right for two masks that both say 1 = hidden: hidden if one
*or* the other hides. For anything else it is not, and for one of each there is no reading of the
result that would be.
"""

# %%
is_word = np.broadcast_to(padding_mask, (7, 7))  # 1 = may attend
is_future = np.triu(np.ones((7, 7), int), k=1)  # 1 = hidden
right = (is_word == 1) & (is_future == 0)

combined = {
    "maximum, both 1 = hidden": np.maximum(1 - is_word, is_future) == 0,
    "minimum, both 1 = may attend": np.minimum(is_word, 1 - is_future) == 1,
    "maximum of one of each, read as 1 = hidden": np.maximum(is_word, is_future) == 0,
    "maximum of one of each, read as 1 = may attend": np.maximum(is_word, is_future) == 1,
}
print(f"{'':48}{'wrongly open':>13}{'wrongly hidden':>16}")
for name, mask in combined.items():
    print(f"{name:48}{(mask & ~right).sum():13}{(right & ~mask).sum():16}")

# %% [markdown]
"""
So: bring every mask to one polarity and to one rank, *then* combine. `hm.and_masks` does it for
arrays and tensors; in a rule it is `padding & look_ahead`, where no array can be taken for another.
"""

# %%
merged = hm.and_masks(padding_mask[:, None, None, :], 1 - is_future)  # (1, 1, 1, 7) and (7, 7)
difference = (convert_to_numpy(merged)[0, 0] != right).sum()
print(f"and_masks, shape {tuple(merged.shape)}: {difference} pairs differ from the right mask")
print(f"padding & look_ahead: {(masks[2] != right).sum()} pairs differ from the right mask")

# %% [markdown]
"""
## The number that is added, in float16

"Minus infinity" is mostly written -1e9. In float16, which ends at 65504, that *is* minus infinity,
and in a row of nothing else the largest score is taken from itself: NaN. A smaller number such as
-3e4 fits; but masks that are added one upon another leave the range again. Merged as booleans
first, they are added once.
"""

# %%
with np.errstate(over="ignore", invalid="ignore"):
    print(f"-1e9 in float16: {np.float16(-1e9)}")
    row = softmax(np.full(3, -1e9).astype("float16"))
    print(f"a row of it, after the softmax: {row}")
    print(f"-3e4 from three masks, added up in float16: {3 * np.float16(-3e4)}")
additive = convert_to_numpy(hm.to_additive(np.array([True, False]), "float16"))
print(f"to_additive in float16: {additive[0]:g} for allowed, {additive[1]:g} for hidden")
swallowed = np.float32(-1e9) + np.float32(3.7) == np.float32(-1e9)
print(f"-1e9 + 3.7 == -1e9 in float32: {swallowed}")

# %% [markdown]
"""
float32 has steps of 64 up there, so -1e9 swallows the score it is added to.

## The row that sees nothing

`Window(after=-1)`, keys strictly before the query, sounds harmless. The first query has no such
key. What should its weights be? Libraries differ:
"""

# %%
behind = hm.Window(after=-1)  # only keys before the query: the first query has none
hidden = ~np.tri(7, k=-1, dtype=bool)
x = generator.normal(size=(1, 7, 16)).astype("float32")
scores = generator.normal(size=(7, 7)).astype("float32")
with np.errstate(invalid="ignore"):
    infinite = softmax(np.where(hidden, -np.inf, scores))
finite = softmax(scores + np.where(hidden, -1e9, 0).astype("float32"))  # float32, as in models
print("Weights of the query that sees nothing")
print(f"{'-inf':20}{infinite[0].round(3)}")
print(f"{'-1e9, once':20}{finite[0].round(3)}")

rule_layer = hm.PerHeadMaskedMultiHeadAttention(2, 8, mask_spec=behind)
_, weights = rule_layer(x, return_attention_scores=True)
print(f"{'this package':20}{convert_to_numpy(weights)[0, 0, 0].round(3)}")

next_layer = softmax(scores) @ (infinite @ x[0])  # no mask in it at all
print(f"-inf, one layer on: {np.isnan(next_layer).all(axis=-1).sum()} of 7 positions are NaN")

# %% [markdown]
"""
One row of NaN is the whole sequence a layer later. With -1e9 the row looks healthy, and attends to
*every* key alike, though all of them are hidden. Here it is 0: no key, no message.

Better still is to know beforehand. `hm.lint` names the queries:
"""

# %%
print(hm.lint(behind, queries=7))

# %% [markdown]
"""
## In short

1. Say what `True` means, once. Here: *may attend*.
2. Bring masks to one polarity and one rank, and combine them as booleans, by AND.
3. Add one large negative number, once, before the softmax, in at least float32.
4. Decide what a row that sees nothing means. Here: exactly 0.
5. Look: `hm.draw`, `hm.plot`, `hm.lint`.

The layer does 2 to 4 by itself. Next: `multi_head_from_scratch.py`, where each head has its own.
"""
