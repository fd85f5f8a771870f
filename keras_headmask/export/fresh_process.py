"""A SavedModel run in a process that has TensorFlow and nothing of this package.

A script: it reads `requests.npz` where it runs, arrays by `<number>/<input>`, takes the folder of
the SavedModel and each request's signature, writes `answers.npz` by `<number>/<output>`, and prints
milliseconds as JSON.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

_BLOCKED = "keras_headmask"
# What Python and TensorFlow need to start, and the switches that change what is computed.
_KEPT = re.compile(
    r"(CUDA|DNNL|KMP|LC|MKL|OMP|ONEDNN|TF|XLA)_.*|PYTHON.*|(LOCAL)?APPDATA|COMSPEC|CONDA_PREFIX|HOME"
    r"|LANG(UAGE)?|(DY)?LD_LIBRARY_PATH|LD_PRELOAD|PATH(EXT)?|SYSTEMROOT|TE?MP|TMPDIR|TZ|USERPROFILE"
    r"|VIRTUAL_ENV|WINDIR"
)
# TF_ is Terraform's prefix as well: its TF_TOKEN_<host> and TF_VAR_<name> hold secrets.
_SECRET = re.compile("CREDENTIAL|KEY|PASSW|SECRET|TF_VAR_|TOKEN")


def environment() -> dict[str, str]:
    """The variables that a process of the export's check gets: no secret of this one, no GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if _KEPT.fullmatch(name.upper()) and not _SECRET.search(name.upper())
    }
    # On the CPU: this process may hold all of an accelerator's memory.
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def write(file: str, numbered: Iterable[dict[str, np.ndarray]]) -> None:
    # `Any`: to mypy a key might be the name of an argument that takes no array.
    arrays: dict[str, Any] = {
        f"{i}/{name}": x for i, one in enumerate(numbered) for name, x in one.items()
    }
    np.savez(file, **arrays)


def read(file: str, count: int) -> list[dict[str, np.ndarray]]:
    numbered: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    with np.load(file) as arrays:
        for key, value in arrays.items():
            number, _, name = key.partition("/")
            numbered[int(number)][name] = value
    return numbered


def plain(array: np.ndarray) -> np.ndarray:
    """With a dtype that NumPy itself has: bfloat16 as float32, text as bytes."""
    return array.astype({"V": "float32", "O": "S"}.get(array.dtype.kind, array.dtype))


def milliseconds_since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def main(folder: str, *signatures: str) -> None:
    sys.modules[_BLOCKED] = None  # type: ignore[assignment]  # so that importing it is an error
    import tensorflow as tf

    start, milliseconds, answers = time.perf_counter(), [], []
    loaded = tf.saved_model.load(folder)
    load_milliseconds = milliseconds_since(start)
    for name, request in zip(signatures, read("requests.npz", len(signatures)), strict=True):
        function = loaded.signatures[name]
        # By argument, not by the specs' own names, which TensorFlow writes in small letters.
        specs = function.structured_input_signature[1]
        tensors = {key: tf.cast(x, specs[key].dtype) for key, x in request.items()}
        function(**tensors)  # the first call of a shape plans it
        start = time.perf_counter()
        outputs = {key: x.numpy() for key, x in function(**tensors).items()}
        milliseconds.append(milliseconds_since(start))
        answers.append({key: plain(np.asarray(x)) for key, x in outputs.items()})
    write("answers.npz", answers)
    print(json.dumps({"load_milliseconds": load_milliseconds, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
