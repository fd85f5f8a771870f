"""`python -m benchmarks.corpus`: records per second through Beam, and through a plain loop.

The model is the masked all-MiniLM-L6-v2 of `examples/score_corpus.py`, exported; the records are
the paragraphs of Python's own documentation, in one file. Each run is a command of its own: its
seconds start with the command and end with the last file, so they hold the start of the processes,
the import of TensorFlow and the loading of the model. `start_seconds` is what three records take;
without it is what a large corpus comes to. Beam runs with one worker process and with two, which
share the cores. The loops call the same SavedModel and write Parquet: all records by length, or as
they come (64 a batch); one process with all cores, and two at once with a half of the records each,
which is the most that two processes can give here. All runs take turns; medians.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "score_corpus.py"
RECORD = Path(__file__).parent / "results" / "corpus.json"
# Each run: by Beam or in which order by loops, and in how many processes.
RUNS = {
    "Beam, 1 process": ("beam", 1),
    "Beam, 2 processes": ("beam", 2),
    "loop, by length": ("length", 1),
    "2 loops at once, by length": ("length", 2),
    "loop, by arrival": ("arrival", 1),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=2, help="the paragraphs so often")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    # What the runs themselves call, each in a process of its own.
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loop", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare(options.prepare, options)
    elif options.loop:
        loop(*options.loop)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.corpus", *sys.argv[1:]]),
        "quick": options.quick,
    }
    with tempfile.TemporaryDirectory() as folder:
        record |= measured(Path(folder), options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['records']} records a run\n{'':26}  records/s  start seconds  without it")
    for name, row in record["runs"].items():
        per_second, started = row["records_per_second"], row["records_per_second_without_start"]
        print(f"{name:26} {per_second:10.1f} {row['start_seconds']:14.1f} {started:11.1f}")


def measured(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of each run, seconds and records per second; and how far its vectors differ."""
    quick = ["--quick"] if options.quick else []
    again = [sys.executable, "-m", "benchmarks.corpus", *quick, "--repeat", str(options.repeat)]
    finish([[*again, "--prepare", str(work)]])
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(1 if options.quick else options.repetitions):
        for name in RUNS:
            for file in ("few", "all"):
                seconds.setdefault((name, file), []).append(timed(work, name, file))
    vectors = {name: vectors_in(work, name) for name in RUNS}
    first = vectors["Beam, 1 process"]
    runs = {
        name: row(len(first), *(statistics.median(seconds[name, file]) for file in ("all", "few")))
        for name in RUNS
    }
    return {
        "records": len(first),
        "repetitions": len(seconds["Beam, 1 process", "all"]),
        "runs": runs,
        "over_beam_1_process": {
            key: {name: runs[name][key] / runs["Beam, 1 process"][key] for name in RUNS}
            for key in ("records_per_second", "records_per_second_without_start")
        },
        "padding": json.loads((work / "padding.json").read_text()),
        "differences": {name: difference(first, of_run) for name, of_run in vectors.items()},
    }


def row(records: int, seconds: float, start: float) -> dict[str, float | None]:
    return {
        "seconds": seconds,
        "start_seconds": start,
        "records_per_second": records / seconds,
        "records_per_second_without_start": records / max(seconds - start, 1e-3),
    }


def example() -> Any:
    """`examples/score_corpus.py` as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    return importlib.import_module("score_corpus")


def prepare(work: Path, options: argparse.Namespace) -> None:
    """The model; files of all records, of three, and of their halves; how much would be padding."""
    corpus = example()
    corpus.export(work / "model", options.quick)
    tokenize = corpus.tokenizer_of(str(work / "model"))
    lengths = {text: len(tokenize(text)) for text in corpus.paragraphs()}
    texts = [text for text, length in lengths.items() if length <= corpus.MAX_TOKENS]
    texts = texts[:: 50 if options.quick else 1] * options.repeat
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    for file, of_file in {"all": lines, "few": lines[:3]}.items():
        for half, part in (("", of_file), ("-0", of_file[::2]), ("-1", of_file[1::2])):
            (work / f"{file}{half}.jsonl").write_text("".join(part))
    records = [{"token_ids": [0] * lengths[text]} for text in texts]
    padding = {}
    for order in ("length", "arrival"):
        shapes = [corpus.padded(batch)["token_ids"].shape for batch in batches(records, order)]
        computed = sum(rows * length for rows, length in shapes)
        padding[order] = 1 - sum(map(corpus.number_of_tokens, records)) / computed
    (work / "padding.json").write_text(json.dumps(padding))


def batches(records: list[dict], order: str) -> list[list[dict]]:
    """By length, no more tokens in a batch than Beam's batches have; or 64 as they come."""
    corpus = example()
    if order == "length":
        records = sorted(records, key=corpus.number_of_tokens)
    result: list[list[dict]] = [[]]
    for record in records:
        tokens = sum(map(corpus.number_of_tokens, [*result[-1], record]))
        too_long = order == "length" and tokens > corpus.BATCH_TOKENS
        if result[-1] and (len(result[-1]) == corpus.BATCH_ROWS or too_long):
            result.append([])
        result[-1].append(record)
    return result


def loop(model: str, order: str, threads: str, path: str, out: str) -> None:
    """All that the pipeline does with good records, in one process and without Beam."""
    os.environ["TF_NUM_INTRAOP_THREADS"] = threads
    corpus = example()
    import pyarrow
    import pyarrow.parquet

    tokenize = corpus.tokenizer_of(model)
    handler = corpus.SavedModelHandler(model)
    loaded = handler.load_model()
    records = []
    for record_id, line in corpus.lines(path):
        text = corpus.text_of(line, is_json=True)
        records.append({"id": record_id, "text": text, "token_ids": tokenize(text)})
    Path(out).mkdir(parents=True, exist_ok=True)
    with pyarrow.parquet.ParquetWriter(f"{out}/part.parquet", corpus.SCHEMA) as writer:
        for batch in batches(records, order):
            rows = handler.run_inference(batch, loaded)
            writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, corpus.SCHEMA))


def timed(work: Path, name: str, file: str) -> float:
    """Seconds of one run over one file."""
    engine, processes = RUNS[name]
    out, model = work / "out" / name / file, str(work / "model")
    for done in out.glob("done/*"):
        done.unlink()
    if engine == "beam":
        mode = [f"--direct_num_workers={processes}", "--direct_running_mode=multi_processing"]
        where = ["--model", model, "--out", str(out), "--input", str(work / f"{file}.jsonl")]
        commands = [[sys.executable, str(SCRIPT), *where, *mode]]
    else:
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        halves = [""] if processes == 1 else ["-0", "-1"]
        itself = [sys.executable, "-m", "benchmarks.corpus", "--loop", model, engine, threads]
        commands = [
            [*itself, str(work / f"{file}{half}.jsonl"), str(out / "vectors" / f"half{half}")]
            for half in halves
        ]
    start = time.perf_counter()
    finish(commands)
    return time.perf_counter() - start


def finish(commands: list[list[str]]) -> None:
    """Run commands at once, to their end."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for command in commands
    ]
    errors = [process.communicate()[1] for process in started]  # waits for each
    for process, error in zip(started, errors, strict=True):
        if process.returncode:
            said = error.decode(errors="replace")[-3000:]
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{said}")


def vectors_in(work: Path, name: str) -> list[tuple[str, Any]]:
    """Texts and vectors, in the order of texts: ids differ between a file and its halves."""
    import numpy as np
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(work / "out" / name / "all" / "vectors").sort_by("text")
    return list(
        zip(table["text"].to_pylist(), map(np.array, table["vector"].to_pylist()), strict=True)
    )


def difference(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> float:
    if [text for text, _ in one] != [text for text, _ in other]:
        raise RuntimeError("Two runs have other texts.")
    return max(float(abs(a - b).max()) for (_, a), (_, b) in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
