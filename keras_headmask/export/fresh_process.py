"""A SavedModel run in a process that has TensorFlow and nothing of this package.

A script: it takes the folder of the SavedModel, a file of requests and one for answers. Both files
hold arrays, by `<number of the request>/<name of the input or output>`.
"""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

_BLOCKED = "keras_headmask"


def write(file: str, numbered: Iterable[dict[str, np.ndarray]]) -> None:
    # `Any`: to mypy a key might be the name of an argument that takes no array.
    arrays: dict[str, Any] = {
        f"{i}/{name}": x for i, one in enumerate(numbered) for name, x in one.items()
    }
    np.savez(file, **arrays)


def read(file: str) -> list[dict[str, np.ndarray]]:
    numbered: dict[int, dict[str, np.ndarray]] = {}
    with np.load(file) as arrays:
        for key, value in arrays.items():
            number, _, name = key.partition("/")
            numbered.setdefault(int(number), {})[name] = value
    return [numbered[i] for i in sorted(numbered)]


def plain(array: np.ndarray) -> np.ndarray:
    """With a dtype that NumPy itself has: bfloat16 as float32, text as bytes."""
    return array.astype({"V": "float32", "O": "S"}.get(array.dtype.kind, array.dtype))


def main(folder: str, requests: str, answers: str) -> None:
    sys.modules[_BLOCKED] = None  # type: ignore[assignment]  # so that importing it is an error
    import tensorflow as tf

    loaded = tf.saved_model.load(folder)
    signature, found = loaded.signatures["serving_default"], []
    # By argument, not by the specs' own names, which TensorFlow writes in small letters.
    specs = signature.structured_input_signature[1]
    for request in read(requests):
        outputs = signature(**{name: tf.cast(x, specs[name].dtype) for name, x in request.items()})
        found.append({name: plain(np.asarray(x.numpy())) for name, x in outputs.items()})
    write(answers, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
