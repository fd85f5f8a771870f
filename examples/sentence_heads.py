# %% [markdown]
"""
# One attention head that sees only its own sentence, trained on real text

A small BERT-like model learns to fill in masked words. In every layer, head 0 may attend only
within the sentence of the query; the other fifteen heads see the whole text. Beside it a twin, the
same model without that rule, is trained on the same data. Then: both on held-out text, and where
"We" looks in "Drums, drums in the deep. We cannot get out. They are coming."

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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from pydoc_data.topics import topics

import keras
import numpy as np
import pysbd
import tokenizers
from keras import layers, ops

import keras_headmask as hm

options = argparse.ArgumentParser()
options.add_argument("--quick", action="store_true", help="a tiny run that shows it works")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/sentences"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

NUM_LAYERS, NUM_HEADS = 2, 16
vocabulary_size, length, dim, copies = 2000, 96, 128, 10
if options.quick:
    vocabulary_size, length, dim, copies = 1000, 48, 32, 1
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # their ids are 0 to 4
PAD, _, CLS, SEP, MASK = range(5)
DRUMS = "Drums, drums in the deep. We cannot get out. They are coming."


# %% [markdown]
"""
## The rule

Head 0 reads the sentence of each token from a mask input, `sentence_ids`. Here pysbd finds the
sentences. (`hm.SameSentence(end_ids)` would count them in the graph from the token ids, one more
after each full stop: coarser, but without a further input.) The rule says nothing of padding: the
layer ANDs it with the Keras mask of `mask_zero=True` below.
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
    found = (x for topic in topics.values() for x in re.split(r"\n\s*\n", topic))
    paragraphs = {}  # a dict for its keys: some paragraphs stand under several topics
    for paragraph in found:
        text = re.sub(r"^(\*|\d+\.) ", "", " ".join(paragraph.split()))  # no bullets
        is_prose = text[:1].isupper() and text[-1:] in ".:" and len(text.split()) >= 6
        is_markup = re.search(r"::=|>>>|\| |---|\*\*\*|===", text)  # grammar, tables, titles
        if is_prose and not is_markup:
            paragraphs[text] = None
    paragraphs = list(paragraphs)[: 50 if options.quick else None]
    return [sentence for text in paragraphs for sentence in split_sentences(text)]


def split_sentences(text):
    return [s.strip() for s in pysbd.Segmenter(language="en", clean=False).segment(text)]


def train_tokenizer(sentences, vocabulary_size):
    """A WordPiece tokenizer, as BERT's; every punctuation mark is a token of its own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    letters = string.ascii_lowercase + string.digits  # twice: each also inside a word ("##a")
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
    """Rows `[CLS] s1 s2 ... [SEP]` of whole sentences; padding has sentence -1."""
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
is_held_out = [n // 20 % 10 == 9 for n in range(len(sentences))]  # every tenth block of twenty
test_sentences = [text for text, is_out in zip(sentences, is_held_out, strict=True) if is_out]
train_sentences = [text for text, is_out in zip(sentences, is_held_out, strict=True) if not is_out]
tokenizer = train_tokenizer(train_sentences, vocabulary_size)
vocabulary_size = tokenizer.get_vocab_size()
parts = train_sentences, test_sentences, split_sentences(DRUMS)
train_rows, test_rows, drums = (pack(part, tokenizer, length) for part in parts)
in_train, in_test = (len(rows["token_ids"]) for rows in (train_rows, test_rows))
print(f"{in_train} rows of {length} tokens to train on, {in_test} held out")

drums = {name: ids[:, : np.sum(drums["token_ids"] != PAD)] for name, ids in drums.items()}


# %%
def mask_words(data, vocabulary_size, copies, seed):
    """BERT's task (Devlin et al. 2019) on copies of every row, as `x, y, sample_weight`."""
    rng = np.random.default_rng(seed)
    x = {name: np.tile(ids, (copies, 1)) for name, ids in data.items()}
    y = x["token_ids"]
    chosen = (rng.random(y.shape) < 0.15) & (y >= len(SPECIAL_TOKENS))
    fate = rng.random(y.shape)
    shown = np.where(chosen & (fate < 0.8), MASK, y)
    random_tokens = rng.integers(len(SPECIAL_TOKENS), vocabulary_size, y.shape)
    x["token_ids"] = np.where(chosen & (fate >= 0.9), random_tokens, shown).astype("int32")
    return x, y, chosen.astype("float32")


# %%
def build_model(rule, vocabulary_size, length, dim):
    """A masked-language model, and a second model of the same layers that gives their attention."""
    names = "token_ids", "sentence_ids"
    token_ids, sentence_ids = (keras.Input((None,), dtype="int32", name=name) for name in names)
    # Both embeddings carry the padding mask: `Add` drops it if one of its inputs has none.
    is_token = ops.cast(ops.not_equal(token_ids, PAD), "int32")
    positions = ops.cumsum(is_token, axis=1) * is_token
    token_vectors = layers.Embedding(vocabulary_size, dim, mask_zero=True)(token_ids)
    position_vectors = layers.Embedding(length + 1, dim, mask_zero=True)(positions)
    x = layers.Add()([token_vectors, position_vectors])
    mask_inputs = {} if rule is None else {"sentence_ids": sentence_ids}
    all_scores = []
    for _ in range(NUM_LAYERS):
        attention = hm.PerHeadMaskedMultiHeadAttention(NUM_HEADS, dim // NUM_HEADS, mask_spec=rule)
        given = {"mask_inputs": mask_inputs, "return_attention_scores": True}
        attended, scores = attention(layers.LayerNormalization()(x), **given)
        all_scores.append(scores)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(dim)(hidden)])
    logits = layers.Dense(vocabulary_size)(layers.LayerNormalization()(x))
    inputs = {"token_ids": token_ids, "sentence_ids": sentence_ids}
    return keras.Model(inputs, logits), keras.Model(inputs, all_scores)


def train(model, x, y, weight):
    loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="mean_with_sample_weight")
    adam = keras.optimizers.Adam(1e-3)
    # (A few steps take less time than to make a graph of them, and XLA gains nothing on a CPU.)
    quick = {"run_eagerly": options.quick, "jit_compile": False}
    model.compile(adam, loss, weighted_metrics=["accuracy"], **quick)
    model.fit(x, y, sample_weight=weight, batch_size=16)


def attention_inside(scores_model, data, query, head):
    """How much of the attention of token `query` stays in its sentence, for each layer."""
    inside = data["sentence_ids"][0] == data["sentence_ids"][0, query]
    of_layers = map(ops.convert_to_numpy, scores_model(data))  # (batch, heads, queries, keys) each
    return [float(scores[0, head, query, inside].sum()) for scores in of_layers]


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
words = [tokenizer.id_to_token(i) for i in drums["token_ids"][0]]
where = {"layer": NUM_LAYERS - 1, "heads": (0, 1), "tokens": words}
figure = hm.plot_attention(models["with the rule"], drums, **where)
figure.savefig(options.out / "sentence_heads_attention.png")

# %% [markdown]
"""
![The last layer's attention. Head 0 has probabilities in three squares along the diagonal, the rest
is hatched; head 1 has them everywhere](../docs/images/sentence_heads_attention.png)

The picture is drawn from what the trained model computes; hatched is what the rule hides. Head 1
looks into all three sentences: so could head 0, if it were not for the rule. `serve_bert.py`
exports a model with such a rule.
"""
