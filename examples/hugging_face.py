# %% [markdown]
"""
# Hugging Face: one head of every layer sees only its own sentence

The question that this package began with was asked about a BERT of Hugging Face's transformers: 16
heads, and the first head of every layer should see only its own sentence. Attention masks there are
the same for all heads, and a head mask switches a head off.

The model stays what it is: a PyTorch model of transformers. It asks a registry for its attention,
and finds the attention of Keras under a rule. The weights here are random, so that the example
needs no download; `BertModel.from_pretrained(...)` in their place changes no other line.

    pip install -e ".[examples]" && pip install torch "transformers>=5"
    python examples/hugging_face.py            # up to 1 CPU minute
    python examples/hugging_face.py --quick    # seconds: two layers
"""

# %%
import argparse
import os
import pathlib

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import matplotlib.pyplot as plt
import torch
import transformers

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="two layers in place of twelve")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/hugging_face"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
"""
## A BERT with 16 heads

The words are numbered by hand: 2 begins a text, 3 ends a sentence, 0 is padding.
"""

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 256, "num_attention_heads": 16, "intermediate_size": 512, "vocab_size": 60}
layers = 2 if options.quick else 12
config = transformers.BertConfig(**sizes, num_hidden_layers=layers)
config._attn_implementation = "eager"  # which gives the weights, to compare
model = transformers.BertModel(config).eval()
sentences = "[CLS] masks hide keys . each head has one . no head needs all . [PAD] [PAD]"
text = sentences.split()
words = {"[PAD]": 0, "[CLS]": 2, ".": 3}
token_ids = [words.setdefault(word, len(words) + 10) for word in text]
inputs = {"input_ids": torch.tensor([token_ids]), "output_attentions": True}
inputs["attention_mask"] = (inputs["input_ids"] != 0).long()

with torch.no_grad():
    before = model(**inputs)

# %% [markdown]
"""
## The rule

`SameSentence(3)` reads the ids of the call, which the rule names `token_ids`. All other heads keep
what they had: every key that the model's own padding mask does not hide.
"""

# %%
rule = hm.PerHead({0: hm.SameSentence(3)})
hm.hugging_face.mask_heads(model, rule)
with torch.no_grad():
    after = model(**inputs)

print(rule.describe(num_heads=16))

# %% [markdown]
"""
## Files

`save_pretrained` writes the weights as ever, and the rule with the config, as JSON.
"""

# %%
model.save_pretrained(options.out / "model")
again = transformers.BertModel.from_pretrained(
    options.out / "model", attn_implementation="eager"
).eval()
hm.hugging_face.mask_heads(again, again.config.head_masks)
with torch.no_grad():
    same = torch.equal(again(**inputs).last_hidden_state, after.last_hidden_state)
print(f"loaded, with its rule read again: {'the same' if same else 'other'} outputs")

# %% [markdown]
"""
## Head 0 before and after

Each row is a token that attends, each column a token that it sees. The pictures are of the last
layer. Above, head 0 attends to all tokens but padding; below, to its own sentence alone, and head 1
attends as widely as before.

![Head 0 attends to all tokens before, to its sentence after](../docs/images/hugging_face_heads.png)
"""


# %%
def picture():
    figure, axes = plt.subplots(2, 2, figsize=(7, 7.4), layout="constrained")
    for row, (when, outputs) in enumerate((("before", before), ("after", after))):
        for head in (0, 1):
            panel = axes[row, head]
            panel.imshow(outputs.attentions[-1][0, head], cmap="magma", vmin=0, vmax=0.25)
            panel.set_title(f"head {head}, {when}")
            panel.set_xticks(range(len(text)), text, rotation=90, fontsize=7)
            panel.set_yticks(range(len(text)), text if not head else [], fontsize=7)
    figure.savefig(options.out / "hugging_face_heads.png", dpi=80)
    plt.close(figure)
    return figure


picture()

# %% [markdown]
"""
## What a rule hides has no weight at all

Between sentences, the weights of head 0 are 0 in every layer. Those of the other heads are not.
"""

# %%
ends = (inputs["input_ids"] == 3).long()
sentence = ends.cumsum(1) - ends  # the number of the sentence of each token
apart = (sentence[0, :, None] != sentence[0]) & (inputs["input_ids"][0] != 0)
weights = torch.stack(after.attentions)[:, 0]  # (layers, heads, queries, keys)
print(f"largest weight between sentences: head 0 {weights[:, 0, apart].max():.3f}, ", end="")
print(f"others {weights[:, 1:, apart].max():.3f}")

# %% [markdown]
"""
`hm.hugging_face.unmask(model)` takes the rule off. `generate` with a cache obeys, and so does
training: `docs/hugging_face.md`.
"""
