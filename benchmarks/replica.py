"""`python -m benchmarks.replica`: what one replica of the development server holds in memory.

The model is all-MiniLM-L6-v2 with a rule for head 0, its answer one embedding a row. A server is a
process of its own; `/proc` says how much it holds: before its first request (with a tiny model,
too); at most in requests of several sizes; with two and four of them in progress; and while a new
version takes over. No seconds are measured. Linux only.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from benchmarks import machine

RECORD = Path(__file__).parent / "results" / "replica.json"
EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = ((8, 128), (8, 256), (16, 256), (8, 512))  # rows and tokens of a request
AT_ONCE = (1, 2, 4)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--quick", action="store_true", help="tiny: the figures say nothing")
    options = parser.parse_args(arguments)
    record = machine.describe() | {
        "command": " ".join(["python -m benchmarks.replica", *sys.argv[1:]]),
        "quick": options.quick,
    }
    with tempfile.TemporaryDirectory() as folder:
        record |= measured(options.quick, Path(folder, "model"), Path(folder, "tiny"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["mib"], indent=2))


def measured(quick: bool, base: Path, base_of_tiny: Path) -> dict[str, Any]:
    """MiB by what the server does."""
    sys.path.insert(0, str(EXAMPLES))
    import serve_many

    import keras_headmask as hm

    sentence = hm.recipes.sentences(serve_many.END, special_ids=(serve_many.CLS, serve_many.SEP))
    bert = serve_many.backbone(quick)
    model = serve_many.encoder(bert, hm.PerHead({0: sentence}))
    tiny = serve_many.encoder(serve_many.backbone(quick=True), hm.PerHead({0: sentence}))
    for folder, exported in ((base, model), (base_of_tiny, tiny)):
        hm.export_saved_model(exported, folder, padded=False, check=False)
    with _server(base_of_tiny) as server:
        without = server.held()
    sizes = ((2, 16), (2, 32)) if quick else SIZES
    plain = sizes[0] if quick else (8, 256)
    added: dict[str, float] = {}
    for rows, tokens in sizes:  # a fresh server for each, which has kept nothing of others
        with _server(base) as server:
            idle = server.held()
            added[f"{rows} x {tokens}"] = server.peak_of(rows, tokens, at_once=1) - idle
    in_progress: dict[str, float] = {}
    for number in AT_ONCE:
        with _server(base) as server:
            idle = server.held()
            in_progress[str(number)] = server.peak_of(*plain, at_once=number) - idle
    with _server(base) as server:
        idle = server.held()
        hm.export_saved_model(model, base, padded=False, check=False)
        server.wait_for("Serving version 2")
        swap = server.peak() - idle
    return {
        "parameters": model.count_params(),
        "weights_mib": 4 * model.count_params() / 2**20,
        "mib": {
            "idle, a tiny model": without,
            "idle": idle,
            "a new version adds at most": swap,
            "a request adds at most": added,
            f"requests of {plain[0]} x {plain[1]} in progress add at most": in_progress,
        },
    }


class _Server:
    """A server process, and what `/proc` says of it."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self.url = self.wait_for("Listening on ").removeprefix("Listening on ")

    def wait_for(self, start: str) -> str:
        for line in self._process.stdout or ():
            if line.startswith(start):
                return line.strip()
        raise RuntimeError("The server ended; see above.")

    def held(self) -> float:
        """MiB; and the peak is counted from now on."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak(self) -> float:
        return self._status("VmHWM")

    def peak_of(self, rows: int, tokens: int, at_once: int) -> float:
        """The peak while so many requests are in progress all the time, each three times."""
        import requests
        import serve_many

        (request,) = serve_many.make_requests(1, tokens, rows)
        body = {"instances": serve_many.as_instances(request)}

        def ask(_: int) -> None:
            requests.post(f"{self.url}:predict", json=body, timeout=600).raise_for_status()

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(ask, range(3 * at_once)))
        return self.peak()

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def _server(base: Path) -> Iterator[_Server]:
    command = [sys.executable, "-m", "keras_headmask.server", str(base), "--name=bert", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _Server(process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
