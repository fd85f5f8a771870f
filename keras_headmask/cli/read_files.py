"""Rules, tensors and models that commands read, as files or as text; and files to write.

Each error names the file, or the text, and what to do.
"""

import json
import os
import pathlib
import zipfile
from typing import TYPE_CHECKING, Any

import click
import numpy as np

import keras_headmask as hm
from keras_headmask.rules.base import MaskSpec

if TYPE_CHECKING:
    import keras


def read_json(source: str) -> Any:
    """The JSON in a file, on standard input for "-", or in `source` itself if it starts so."""
    if source.strip().startswith(("{", "[")):
        return _parsed(source, "the text")
    if source.lower().endswith(".keras"):
        raise ValueError(
            f"'{source}' is a model, where JSON is expected. For the rules in it use "
            f"`keras-headmask lint --model {source}`, or `keras-headmask info {source}`."
        )
    with _readable(source) as file:
        return _parsed(file.read(), "standard input" if source == "-" else f"'{source}'")


def read_rule(source: str) -> MaskSpec:
    """The rule in `source`: see `read_json`."""
    config = read_json(source)
    hm.register_all()
    return MaskSpec.from_config(config)


def read_tensors(source: str | None) -> dict[str, Any] | None:
    """Mask inputs by name: lists, of one example or of a batch; `{"query": ..., "key": ...}`."""
    if source is None:
        return None
    values = read_json(source)
    if not isinstance(values, dict):
        raise ValueError(
            'Mask inputs are an object of lists by name, such as {"token_ids": [5, 9, 4]}. '
            f"Received: {json.dumps(values):.80}."
        )
    return {name: _tensor(name, value) for name, value in values.items()}


def read_tokens(source: str | None) -> Any:
    """Labels: words, a JSON list, or a .json file of one; a pair of lists for queries and keys."""
    if source is None:
        return None
    is_json = source.strip().startswith(("[", "{")) or source.lower().endswith(".json")
    if not is_json and source != "-":
        return source.split()
    tokens = read_json(source)
    if not isinstance(tokens, list):
        raise ValueError(
            f"`--tokens` must be words, or a JSON list. Received: {json.dumps(tokens):.80}."
        )
    is_pair = len(tokens) == 2 and all(isinstance(side, list) for side in tokens)
    return tuple(tokens) if is_pair else tokens


def load_model(path: str, unsafe: bool = False) -> "keras.Model":
    """The model in a .keras file, not compiled."""
    saved_by(path)  # which also checks that it is such a file
    hm.register_all()
    import keras

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=not unsafe)
    except Exception as error:  # whatever the classes in a file raise
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
        raise ValueError(f"'{path}' does not load: {reason}") from error
    if not isinstance(model, keras.Model):
        raise ValueError(f"'{path}' holds a {type(model).__name__}, not a model.")
    return model


def saved_by(path: str) -> str:
    """The version of Keras that wrote a .keras file."""
    with _readable(path) as file:
        try:
            with zipfile.ZipFile(file) as parts:
                parts.getinfo("config.json")
                metadata = _parsed(parts.read("metadata.json"), "metadata.json")
            if not isinstance(metadata, dict) or not isinstance(metadata.get("keras_version"), str):
                raise ValueError(
                    "metadata.json must be an object with a text `keras_version`. Received: "
                    f"{json.dumps(metadata):.80}."
                )
            return metadata["keras_version"]
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise ValueError(
                f"'{path}' is not a .keras file, as `model.save(\"model.keras\")` of Keras 3 "
                f"writes it: {error}"
            ) from error


def check_output(path: str, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Raise for a file that is not writable, before work is done for it."""
    file = pathlib.Path(path)
    folder = file.absolute().parent
    for wrong, why in (
        (file.suffix.lower() not in suffixes, f" must end in {' or '.join(suffixes)}"),
        (not folder.is_dir(), f": there is no folder '{folder}'"),
        (file.is_dir(), " is a folder. Name a file"),
        (file.exists() and not file.is_file(), " is not a regular file, so it is not replaced"),
        (file.exists() and not overwrite, " exists. Name another file, or pass --force"),
        (not os.access(folder, os.W_OK), f": '{folder}' is read-only"),
    ):
        if wrong:
            raise ValueError(f"'{path}'{why}.")


# --- Files and JSON -------------------------------------------------------------------------------


def _readable(path: str) -> Any:
    try:
        return click.open_file(path, "rb")
    except OSError as error:
        raise OSError(f"Cannot read '{path}': {error.strerror}.") from error


def _parsed(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {name} as JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers keep the last of two: a head's rule would be gone in silence."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f'"{name}" stands twice in one object. Leave one of them out.')
        values[name] = value
    return values


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if not value or not value.keys() <= {"query", "key"}:
            raise ValueError(
                f'`{name}` has a list for queries and one for keys, {{"query": [...], "key": '
                f"[...]}}. Received: {json.dumps(sorted(value)):.80}."
            )
        return tuple(_tensor(name, value[x]) if x in value else None for x in ("query", "key"))
    try:
        array = np.array(value, ndmin=2)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "iubf" or not isinstance(value, list):
        raise ValueError(
            f"`{name}` must be a list of whole numbers or booleans, or of lists of one length. "
            f"Received: {json.dumps(value):.80}."
        )
    return array
