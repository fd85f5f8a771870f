# %% [markdown]
"""
# One attention head that sees only its own sentence, trained on real text

A small BERT-like model learns to fill in masked words. In every layer, head 0 may attend only
within the sentence of the query; the other fifteen heads see the whole text. Beside it a twin, the
same model without that rule, is trained on the same data. Then: both on held-out text, the model
saved, reloaded and exported, and where "We" looks in "Drums, drums in the deep. We cannot get out.
They are coming."

    pip install -e ".[examples]"
    python examples/sentence_heads.py            # 6 to 10 CPU minutes
    python examples/sentence_heads.py --quick    # a tiny run, learns next to nothing
"""

# %%
import argparse
import os
import pathlib
import re
import string
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # the export below is TensorFlow's

from pydoc_data.topics import topics

import keras
import numpy as np
import pysbd
import tokenizers
from keras import layers, ops

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="a tiny run that shows it works")
options.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("saved_models/sentence_heads")
)
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

start = time.perf_counter()
NUM_LAYERS, NUM_HEADS = 2, 16
vocabulary_size, length, dim, copies = 2000, 96, 128, 10
if options.quick:
    vocabulary_size, length, dim, copies = 1000, 48, 32, 1
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # their ids are 0 to 4
PAD, UNK, CLS, SEP, MASK = range(5)
DRUMS = "Drums, drums in the deep. We cannot get out. They are coming."


def show(figure, name):
    """Save a picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"sentence_heads_{name}.png")
    return figure


# %% [markdown]
"""
## The rule

Head 0 reads the sentence of each token from a mask input, `sentence_ids`. Here pysbd finds the
sentences: it knows that "e.g." and "3.11" end none. `hm.SameSentence(end_ids)` would count them in
the graph from the token ids, one more after each full stop: coarser, but it needs no further input,
so it suits an exported model that must run without a sentence splitter beside it. The rule says
nothing of padding: the layer ANDs it with the Keras mask of `mask_zero=True` below.
"""

# %%
RULE = hm.PerHead({0: hm.SameSegment("sentence_ids")}, default=hm.Full())
print(RULE.describe(NUM_HEADS))

# %% [markdown]
"""
## Text

Python's own help texts are in English, and come with every Python.
"""


# %%
def read_sentences():
    """The sentences of the paragraphs that are prose."""
    paragraphs = {}  # a dict for its keys: some paragraphs stand under several topics
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            text = re.sub(r"^(\*|\d+\.) ", "", " ".join(paragraph.split()))  # no bullets
            is_prose = text[:1].isupper() and text[-1:] in ".:" and len(text.split()) >= 6
            is_markup = re.search(r"::=|>>>|\| |---|\*\*\*|===", text)  # grammar, tables, titles
            if is_prose and not is_markup:
                paragraphs[text] = None
    if options.quick:
        paragraphs = list(paragraphs)[:50]
    return [sentence for text in paragraphs for sentence in split_sentences(text)]


def split_sentences(text):
    return [s.strip() for s in pysbd.Segmenter(language="en", clean=False).segment(text)]


def hold_out(sentences):
    """Sentences to train on, and every tenth block of twenty, kept for the evaluation."""
    parts = [], []
    for n, sentence in enumerate(sentences):
        parts[n // 20 % 10 == 9].append(sentence)
    return parts


# %%
def train_tokenizer(sentences, vocabulary_size):
    """A WordPiece tokenizer, as BERT's; every punctuation mark is a token of its own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    # In the doubled alphabet each letter also stands inside a word ("##a"), so that any plain
    # English word can be spelled, whatever the corpus lacks.
    letters = string.ascii_lowercase + string.digits
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=list(letters + string.punctuation),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sentences, letters * 2], trainer)
    return tokenizer


def pack(sentences, tokenizer, length):
    """Whole sentences, in order, as rows `[CLS] s1 s2 ... [SEP]`: `token_ids` and `sentence_ids`.

    [CLS] belongs to the first sentence of its row and [SEP] to the last. Padding has sentence -1,
    which matches nothing, and is hidden by the padding mask in any case.
    """
    rows, row = [], []
    for encoding in tokenizer.encode_batch(sentences):
        sentence = encoding.ids[: length - 2]
        if row and sum(map(len, row)) + len(sentence) > length - 2:
            rows.append(row)
            row = []
        row.append(sentence)
    rows.append(row)

    token_ids = np.full((len(rows), length), PAD, "int32")
    sentence_ids = np.full((len(rows), length), -1, "int32")
    for i, row in enumerate(rows):
        tokens = [CLS, *(token for sentence in row for token in sentence), SEP]
        numbers = [n for n, sentence in enumerate(row) for _ in sentence]
        token_ids[i, : len(tokens)] = tokens
        sentence_ids[i, : len(tokens)] = [0, *numbers, len(row) - 1]
    return {"token_ids": token_ids, "sentence_ids": sentence_ids}


sentences = read_sentences()[: 100 if options.quick else None]
train_sentences, test_sentences = hold_out(sentences)
tokenizer = train_tokenizer(train_sentences, vocabulary_size)
vocabulary_size = tokenizer.get_vocab_size()
train_rows, test_rows, drums = (
    pack(part, tokenizer, length)
    for part in (train_sentences, test_sentences, split_sentences(DRUMS))
)
assert UNK not in drums["token_ids"]
counts = [len(rows["token_ids"]) for rows in (train_rows, test_rows)]
print(f"{counts[0]} rows of {length} tokens to train on, {counts[1]} held out")

# %% [markdown]
"""
The rule over two texts that are not among them, as text and as a picture. (Padding, which the rule
leaves to Keras, is cut off.)
"""


# %%
def labelled(row):
    """The only row of `row` without its padding: token ids, the rule's mask inputs, and tokens."""
    row = {name: ids[:, : np.sum(row["token_ids"] != PAD)] for name, ids in row.items()}
    tokens = [tokenizer.id_to_token(i) for i in row["token_ids"][0]]
    return row, {"sentence_ids": row["sentence_ids"]}, tokens


_, ids, tokens = labelled(pack(["Names are bound.", "Values are not."], tokenizer, length))
print(f"\n{RULE}\non: {' '.join(tokens)}")
print(hm.draw(RULE, num_heads=NUM_HEADS, tokens=tokens, mask_inputs=ids))

drums, drums_ids, drums_tokens = labelled(drums)
show(hm.plot(RULE, num_heads=NUM_HEADS, tokens=drums_tokens, mask_inputs=drums_ids), "rule")

# %% [markdown]
"""
![Two panels over the words of a text of three sentences. Head 0: three dark squares along the
diagonal, one for each sentence. Heads 1-15: all dark](../docs/images/sentence_heads_rule.png)

## The task
"""


# %%
def mask_words(data, vocabulary_size, copies, seed):
    """BERT's task (Devlin et al. 2019) on every row, as `x, y, sample_weight`.

    15 % of the tokens are to be found (weight 1, the others 0): of these 80 % are shown as [MASK],
    10 % as a random token, 10 % as they are. Each of the `copies` of a row is masked anew: the same
    holes in every epoch would soon be learnt by heart.
    """
    rng = np.random.default_rng(seed)
    x = {name: np.tile(ids, (copies, 1)) for name, ids in data.items()}
    y = x["token_ids"]
    chosen = (rng.random(y.shape) < 0.15) & (y >= len(SPECIAL_TOKENS))
    fate = rng.random(y.shape)
    shown = np.where(chosen & (fate < 0.8), MASK, y)
    random_tokens = rng.integers(len(SPECIAL_TOKENS), vocabulary_size, y.shape)
    x["token_ids"] = np.where(chosen & (fate >= 0.9), random_tokens, shown).astype("int32")
    return x, y, chosen.astype("float32")


# %% [markdown]
"""
## Model

Blocks of attention and a feed-forward network, normalised before each, as small as will train in
minutes.
"""


# %%
def build_model(rule, vocabulary_size, length, dim):
    """A masked-language model for texts of up to `length` tokens, and a second model of the same
    layers that gives their attention."""
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    sentence_ids = keras.Input((None,), dtype="int32", name="sentence_ids")

    # Positions count from 1 and are 0 at padding, so that both embeddings carry the padding mask:
    # `Add` drops the mask silently if one of its inputs has none.
    is_token = ops.cast(ops.not_equal(token_ids, PAD), "int32")
    positions = ops.cumsum(is_token, axis=1) * is_token
    token_vectors = layers.Embedding(vocabulary_size, dim, mask_zero=True)(token_ids)
    position_vectors = layers.Embedding(length + 1, dim, mask_zero=True)(positions)
    x = layers.Add()([token_vectors, position_vectors])
    # A layer takes just the mask inputs that its rule reads; the twin's has no rule.
    mask_inputs = {} if rule is None else {"sentence_ids": sentence_ids}
    all_scores = []
    for _ in range(NUM_LAYERS):
        attention = hm.PerHeadMaskedMultiHeadAttention(
            num_heads=NUM_HEADS, key_dim=dim // NUM_HEADS, mask_spec=rule
        )
        attended, scores = attention(
            layers.LayerNormalization()(x), mask_inputs=mask_inputs, return_attention_scores=True
        )
        all_scores.append(scores)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(dim)(hidden)])
    logits = layers.Dense(vocabulary_size)(layers.LayerNormalization()(x))

    inputs = {"token_ids": token_ids, "sentence_ids": sentence_ids}
    return keras.Model(inputs, logits), keras.Model(inputs, all_scores)


def train(model, x, y, weight):
    # The mean over the masked words, not over all tokens.
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    # On a CPU, XLA compiles for seconds and then runs these steps slower: hence no `jit_compile`.
    adam = keras.optimizers.Adam(1e-3)
    model.compile(
        adam,
        loss,
        weighted_metrics=["accuracy"],
        jit_compile=False,
        run_eagerly=options.quick,  # a few steps take less time than to make a graph of them
    )
    model.fit(x, y, sample_weight=weight, batch_size=16)


def attention_inside(scores_model, data, query, head):
    """How much of the attention of token `query` stays in its sentence, for each layer."""
    inside = data["sentence_ids"][0] == data["sentence_ids"][0, query]
    all_scores = scores_model(data)  # of each layer: (batch, heads, queries, keys)
    return [
        float(ops.convert_to_numpy(scores)[0, head, query, inside].sum()) for scores in all_scores
    ]


# %% [markdown]
"""
## Training

Two models from the same seed, on the same masked words; only the rule differs.
"""

# %%
train_data = mask_words(train_rows, vocabulary_size, copies, seed=1)
x, y, weight = mask_words(test_rows, vocabulary_size, copies, seed=2)
query = int(np.argmax(drums["sentence_ids"][0] == 1))  # "We" begins the second sentence
models, results, inside = {}, {}, {}
for name, rule in (("with the rule", RULE), ("twin without", None)):
    print(f"\nTraining: {name}")
    keras.utils.set_random_seed(0)
    models[name], scores_model = build_model(rule, vocabulary_size, length, dim)
    train(models[name], *train_data)
    results[name] = models[name].evaluate(x, y, sample_weight=weight, verbose=0)
    inside[name] = [attention_inside(scores_model, drums, query, head) for head in (0, 1)]

print("\nMasked words of held-out text (one seed each: a small gap says little)")
print(f"{'':15}{'loss':>8}{'accuracy':>10}")
for name, (loss, accuracy) in results.items():
    print(f"{name:15}{loss:8.3f}{accuracy:10.3f}")

# %% [markdown]
"""
## Where does "We" look?

Under the rule head 0 stays in its sentence, entirely and always. Head 1, which may look anywhere,
and the heads of the twin leave it.
"""

# %%
print(f"\nAttention of 'We' inside its own sentence: {DRUMS}")
print(f"{'':23}{'head 0':>8}{'head 1':>8}")
for name, heads in inside.items():
    for layer, (head_0, head_1) in enumerate(zip(*heads, strict=True)):
        print(f"{name:15}{f'layer {layer}':8}{head_0:8.3f}{head_1:8.3f}")
last = NUM_LAYERS - 1
show(
    hm.plot_attention(
        models["with the rule"], drums, layer=last, heads=(0, 1), tokens=drums_tokens
    ),
    "attention",
)

# %% [markdown]
"""
![The last layer's attention. Head 0 has probabilities in three squares along the diagonal, the rest
is hatched; head 1 has them everywhere](../docs/images/sentence_heads_attention.png)

The picture is drawn from what the trained model computes; hatched is what the rule hides. Head 1
looks into all three sentences: so could head 0, if it were not for the rule.

## Save, reload, export

Each file is read in a fresh Python process, which has nothing of this one but the file.
"""

# %%
CHECK_KERAS_FILE = """
import sys, keras, numpy as np
import keras_headmask  # makes the layer known to Keras; the rule itself is in the file
given = dict(np.load(sys.argv[2]))
model = keras.saving.load_model(sys.argv[1])
logits = model({name: given[name] for name in ("token_ids", "sentence_ids")})
print(np.abs(logits - given["logits"]).max())
"""
CHECK_SAVED_MODEL = """
import sys, numpy as np, tensorflow as tf
given = dict(np.load(sys.argv[2]))
model = tf.saved_model.load(sys.argv[1])  # to be kept in a variable while it is called
logits = model.serve({name: tf.constant(given[name]) for name in ("token_ids", "sentence_ids")})
assert "keras_headmask" not in sys.modules
print(np.abs(logits.numpy() - given["logits"]).max())
"""


def save_and_check(model, data, folder):
    """Write the model both ways; the largest difference of each from the model in memory."""
    model.save(folder / "model.keras")
    model.export(folder / "saved_model", verbose=False)
    np.savez(folder / "expected.npz", **data, logits=ops.convert_to_numpy(model(data)))
    differences = {}
    for name, program in (("model.keras", CHECK_KERAS_FILE), ("saved_model", CHECK_SAVED_MODEL)):
        command = [sys.executable, "-c", program, folder / name, folder / "expected.npz"]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        differences[name] = float(result.stdout.split()[-1])
    return differences


print("\nLargest difference of the logits, read from the file in a fresh process")
for name, difference in save_and_check(models["with the rule"], drums, options.out).items():
    print(f"{name:15}{difference:8.1e}")
print(f"\nSaved in {options.out}. Total time: {time.perf_counter() - start:.0f} s")
