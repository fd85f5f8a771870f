"""A corpus through Beam: the vectors of the Keras model, each record once, whatever was killed."""

import contextlib
import gzip
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("apache_beam")
pytest.importorskip("keras_hub")
pytest.importorskip("tokenizers")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.tensorflow

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "score_corpus.py"
sys.path.insert(0, str(SCRIPT.parent))
score_corpus = importlib.import_module("score_corpus")

WORDS = "the import of a module. Is it a class? The value of an object, in a loop! "
TEXTS = [WORDS[: 7 * count].strip() for count in (10, 1, 6, 3, 9, 2, 8, 4, 7, 5)]
TEXTS += [WORDS * count for count in (7, 2, 5)]
BAD = {  # a line of JSON, and what its reason says
    b"": "empty",
    b'{"text": " \\n"}': "empty",
    b"[1, 2]": "not text",
    b'{"text": null}': "not text",
    b'{"text": "\xff"}': "not UTF-8: byte 10",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": "cut': "not JSON",
    b"[" * 100_000: "not JSON",
    json.dumps({"text": "long " * 511}).encode(): "too long: 513 tokens, at most 512",
}
LONGEST = "long " * 510  # and two special tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two files; which id has which text, and which a reason."""
    folder = tmp_path_factory.mktemp("corpus")
    good = [json.dumps({"text": text}).encode() for text in [*TEXTS, LONGEST]]
    lines = [line for pair in zip(good, [*BAD, *BAD], strict=False) for line in pair]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    lines_of_text = [*TEXTS, "", " ", *TEXTS]  # what is there twice has two ids
    (folder / "b.txt").write_bytes("\r\n".join(lines_of_text).encode() + b"\r\n\xff\r\n")

    texts, reasons = {}, {}
    for number, line in enumerate(lines, 1):
        if line in BAD:
            reasons[f"a.jsonl.gz:{number}"] = BAD[line]
        else:
            texts[f"a.jsonl.gz:{number}"] = json.loads(line)["text"]
    for number, text in enumerate(lines_of_text, 1):
        kind, value = (texts, text.strip("\r\n")) if text.strip() else (reasons, "empty")
        kind[f"b.txt:{number}"] = value
    reasons[f"b.txt:{len(lines_of_text) + 1}"] = "not UTF-8: byte 0"
    return [str(folder / "a.jsonl.gz"), str(folder / "b.txt")], texts, reasons


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A masked BERT as Keras model, and its folder."""
    folder = tmp_path_factory.mktemp("model")
    return score_corpus.export(folder, quick=True), str(folder)


@pytest.fixture(scope="module")
def once(corpus, exported, tmp_path_factory):
    """A run in this process: its folder and its counts."""
    out = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_corpus, "BATCH_ROWS", 4)
        return out, score_corpus.score(corpus[0], exported[1], str(out))


def vectors_in(out):
    """Ids, texts and vectors, in the order of ids; an id that is there twice is a failure."""
    table = parquet.read_table(out / "vectors").sort_by("id")
    ids = table["id"].to_pylist()
    assert len(set(ids)) == len(ids)
    return ids, table["text"].to_pylist(), np.array(table["vector"].to_pylist())


def bad_in(out):
    lines = [line for path in out.glob("bad/*/*.jsonl") for line in path.read_text().splitlines()]
    return sorted((record["id"], record["reason"]) for record in map(json.loads, lines))


def check_same(out, other):
    ids, texts, vectors = vectors_in(out)
    other_ids, other_texts, other_vectors = vectors_in(other)
    assert (ids, texts) == (other_ids, other_texts)
    np.testing.assert_allclose(vectors, other_vectors, rtol=0, atol=1e-5)
    assert bad_in(out) == bad_in(other)


@pytest.mark.long
def test_a_vector_is_that_of_the_keras_model_on_the_text_alone(once, exported):
    model, folder = exported
    tokenize = score_corpus.tokenizer_of(folder)
    for text, vector in zip(*vectors_in(once[0])[1:], strict=True):
        ids = np.array([tokenize(text)], "int32")
        inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
        alone = np.asarray(model(inputs)["embedding"])[0]
        np.testing.assert_allclose(vector, alone, rtol=0, atol=1e-5, err_msg=text)


def test_each_record_is_there_once(once, corpus):
    out, counts = once
    _, texts, reasons = corpus
    ids, found, _ = vectors_in(out)
    assert dict(zip(ids, found, strict=True)) == texts
    bad = bad_in(out)
    assert [record_id for record_id, _ in bad] == sorted(reasons)
    assert [pair for pair in bad if reasons[pair[0]] not in pair[1]] == []
    assert counts == {"good": len(texts), "bad": len(reasons)}


@pytest.mark.long
def test_killed_and_started_again_two_processes_do_what_one_did(once, corpus, exported, tmp_path):
    """SIGKILL of all, amid the second part. The workers can import no Keras."""
    (tmp_path / "sitecustomize.py").write_text(NO_KERAS_IN_WORKERS)
    out = tmp_path / "out"
    command = [sys.executable, SCRIPT, "--model", exported[1], "--out", out, "--input", *corpus[0]]
    command += ["--direct_running_mode=multi_processing", "--direct_num_workers"]
    with running([*command, "1"], tmp_path) as run:
        wait_until(lambda: list(out.glob("vectors/b.txt/*")), run)
        assert list(out.glob("done/*")) == [out / "done" / "a.jsonl.gz.json"]
        before = next(out.glob("vectors/a.jsonl.gz/*.parquet")).stat()
    assert not out.joinpath("done", "b.txt.json").exists()
    with running([*command, "2"], tmp_path) as run:
        assert run.wait(300) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "a.jsonl.gz (1 of 2): done" in log
    assert "b.txt (2 of 2): start" in log
    assert next(out.glob("vectors/a.jsonl.gz/*.parquet")).stat() == before
    check_same(out, once[0])


NO_KERAS_IN_WORKERS = """
import sys

if any("sdk_worker_main" in argument for argument in sys.orig_argv):
    sys.modules |= dict.fromkeys(["keras", "keras_headmask", "keras_hub", "tf_keras"])  # no import
"""


class running:
    """A process and all that it starts, killed at the end."""

    def __init__(self, command, folder):
        self.command, self.folder = command, folder

    def __enter__(self):
        path = os.pathsep.join(map(str, (self.folder, ROOT)))
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | {"PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def wait_until(condition, run, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, "the run ended early"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_part_of_another_file_or_model_is_refused(corpus, exported, tmp_path):
    (inputs, _, _), (_, model) = corpus, exported
    parts = score_corpus.parts_of(inputs, model)
    score_corpus.mark_done(str(tmp_path), parts["b.txt"])
    assert score_corpus.is_done(str(tmp_path), parts["b.txt"])
    for key in ("bytes", "model"):
        with pytest.raises(ValueError, match=rf"from one file and one model.* in \['{key}'\]"):
            score_corpus.is_done(str(tmp_path), parts["b.txt"] | {key: "other"})
