"""What a command is handed: rules, tensors and models, as files or as text; and files to write.

Each error names the file, or the text, and the way out.
"""

import json
import os
import pathlib
import sys
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_headmask.cli import starting
from keras_headmask.rules.base import MaskSpec

if TYPE_CHECKING:
    import keras

_STDIN = "standard input"
_PARTS_OF_A_MODEL = {"config.json", "metadata.json"}
_SIDES = ("query", "key")


def read_json(source: str) -> Any:
    """The JSON in a file, on standard input for "-", or in `source` itself if it starts so."""
    text = source.strip()
    if text.startswith(("{", "[")):
        return _parsed(text, "the text")
    return _parsed(_content(source), _STDIN if source == "-" else f"'{source}'")


def read_rule(source: str) -> MaskSpec:
    """The rule in `source`: see `read_json`."""
    return _spec(read_json(source))


def read_rules(source: str) -> Any:
    """The rule in `source`, or the rules by selectors of layers: `{"0-3": rule, "4": rule}`."""
    config = read_json(source)
    if isinstance(config, Mapping) and config and "kind" not in config:
        return {layers: _spec(rule) for layers, rule in config.items()}
    return _spec(config)


def read_tensors(source: str | None) -> dict[str, Any] | None:
    """Mask inputs by name: lists, of one example or of a batch; `{"query": ..., "key": ...}`."""
    if source is None:
        return None
    values = read_json(source)
    if not isinstance(values, dict):
        raise ValueError(
            'Mask inputs are an object of lists by name, such as {"token_ids": [5, 9, 4]}. '
            f"Received: {_shortened(values)}."
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
        raise ValueError(f"Tokens are a JSON list. Received: {_shortened(tokens)}.")
    is_pair = len(tokens) == 2 and all(isinstance(side, list) for side in tokens)
    return tuple(tokens) if is_pair else tokens


def load_model(path: str, unsafe: bool = False) -> "keras.Model":
    """The model in a .keras file, not compiled."""
    metadata_of(path)  # which also sees whether it is such a file
    starting.import_all()
    import keras

    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=not unsafe)
    except Exception as error:  # whatever the classes in a file raise
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
        raise ValueError(f"'{path}' does not load: {reason}{_way_out(reason)}") from error
    if not isinstance(model, keras.Model):
        raise ValueError(f"'{path}' holds no model, but a {type(model).__name__}.")
    return model


def metadata_of(path: str) -> dict[str, Any]:
    """What a .keras file says of itself: `keras_version`, `date_saved`."""
    with _readable(path) as file:
        try:
            with zipfile.ZipFile(file) as parts:
                is_model = set(parts.namelist()) >= _PARTS_OF_A_MODEL
                content = parts.read("metadata.json") if is_model else b""
        except Exception as error:  # whatever a damaged file makes the reader raise
            reason = "" if isinstance(error, zipfile.BadZipFile) else f" ({error})"
            raise ValueError(f"{_no_model(path)}{reason}") from error
    if pathlib.Path(path).suffix != ".keras" or not is_model:
        raise ValueError(_no_model(path))
    metadata = _parsed(content, f"metadata.json of '{path}'")
    version = metadata.get("keras_version") if isinstance(metadata, dict) else None
    if not isinstance(version, str):
        raise ValueError(
            f"metadata.json of '{path}' must be an object with a text `keras_version`. Received: "
            f'{_shortened(metadata)}. Save the model again by `model.save("model.keras")`.'
        )
    return metadata


def _no_model(path: str) -> str:
    return f"'{path}' is no .keras file, as `model.save(\"model.keras\")` of Keras 3 writes it."


def check_output(path: str, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Raise for a file that cannot be written, before work is done for it."""
    file = pathlib.Path(path)
    folder = file.absolute().parent
    if file.suffix.lower() not in suffixes:
        raise ValueError(f"'{path}' must end in {' or '.join(suffixes)}.")
    if not folder.is_dir():
        raise FileNotFoundError(f"'{path}' cannot be written: there is no folder '{folder}'.")
    if file.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder. Name a file.")
    if file.exists() and not file.is_file():
        raise ValueError(f"'{path}' is no regular file, and a file is put in place as a whole.")
    if file.exists() and not overwrite:
        raise FileExistsError(f"'{path}' exists. Name another file, or pass --force.")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"'{path}' cannot be written: '{folder}' is read-only.")


# --- Files and JSON -------------------------------------------------------------------------------


def _content(source: str) -> bytes:
    if source == "-":
        content = sys.stdin.buffer.read()
    else:
        with _readable(source) as file:
            content = file.read()
    if not content.strip():
        name = f"{_STDIN} (which is read once)" if source == "-" else f"'{source}'"
        raise ValueError(f"There is nothing in {name}.")
    return content


def _readable(path: str) -> Any:
    try:
        return open(path, "rb")
    except IsADirectoryError as error:
        raise IsADirectoryError(f"'{path}' is a folder. Name a file.") from error
    except OSError as error:
        raise OSError(f"'{path}' cannot be read: {error.strerror}.") from error


def _parsed(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"There is no JSON in {name}: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"There is no JSON in {name}, nor any text in UTF-8.") from error
    except RecursionError as error:
        raise ValueError(f"The JSON in {name} is nested too deeply to be read.") from error
    except ValueError as error:
        raise ValueError(f"The JSON in {name} cannot be read: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers keep the last of two: a head's rule would be gone in silence."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f'"{name}" stands twice in one object. Leave one of them out.')
        found[name] = value
    return found


def _spec(config: Any) -> MaskSpec:
    starting.import_all()  # which registers the kinds
    try:
        return MaskSpec.from_config(config)
    except ValueError as error:
        raise ValueError(f"{error}{_way_out(str(error))}") from error


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if not value or not value.keys() <= set(_SIDES):
            raise ValueError(
                f'`{name}` has a list for queries and one for keys, {{"query": [...], "key": '
                f"[...]}}. Received: {_shortened(sorted(value))}."
            )
        return tuple(_array(name, value[side]) if side in value else None for side in _SIDES)
    return _array(name, value)


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "iubf" or array.ndim == 0:
        raise ValueError(
            f"`{name}` must be a list of whole numbers or booleans, or of lists of one length. "
            f"Received: {_shortened(value)}."
        )
    return array[None] if array.ndim == 1 else array


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _way_out(reason: str) -> str:
    if "lambda" in reason.lower():
        return " If you trust the file: --unsafe."
    if "Could not locate" in reason or "unknown kind" in reason:
        return " Here: --import MODULE."
    return ""
