"""Made-up inputs of a model: random ones for its rules to decide on, or plain and padded ones."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_headmask.retrofit.find import Found
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.leaves import ids_of, marks_padding
from keras_headmask.rules.protocol import InputType

Arrays = dict[str, np.ndarray]

_SIDES = ("", "query_", "key_", "decoder_", "encoder_")
# Sequences of queries are longer, so that cross-attention shows as such.
_OF_QUERIES, _LENGTH, _REAL = ("query", "decoder"), 24, 0.75


def made_up(
    found: Found,
    rules: Iterable[MaskSpec],
    batch: int,
    length: int,
    inputs: Mapping[str, Any],
) -> Arrays:
    """Random inputs by name: `batch` examples of `length` positions; fixed sizes stay.

    Ids stay below the sizes of the embeddings that read them, and include those that `rules` look
    for. Other inputs are what their name and dtype say: segments, flags, whole masks, numbers. What
    a rule reads by a name that no input has is taken to come from the first input of ids.

    Args:
        found: Of the model that reads them.
        rules: What is to have something to decide.
        batch: The number of examples.
        length: The number of positions.
        inputs: Shapes and dtypes by name.

    Raises:
        TypeError: for an input of text.
    """
    rng = np.random.default_rng([0, batch, length])
    all_leaves = [leaf for spec in rules for leaf in leaves(spec)]
    first_ids = next((name for name, x in inputs.items() if _holds_ids(name, x)), None)
    arrays: Arrays = {}
    for name, x in inputs.items():
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype == "string":
            raise TypeError(
                f"The input {name!r} holds text, of which no examples can be made up. Pass some, "
                "check=[{name: array, ...}, ...], or check=False."
            )
        batch = x.shape[0] or batch
        shape = [batch, *(length if size is None else size for size in x.shape[1:])]
        readers = []
        for leaf in all_leaves:
            # A leaf reads an input also under the name of one side of cross-attention.
            names = {side + read for side in _SIDES for read in leaf.inputs}
            if name in names or (name == first_ids and names.isdisjoint(inputs)):
                readers.append(leaf)
        below = min((layer.input_dim for layer in found.embeddings_of(name)), default=None)
        wanted = [i for leaf in readers for i in ids_of(leaf) if below is None or i < below]
        if "float" in dtype:
            value: np.ndarray = rng.normal(size=shape)
        elif len(shape) == 4:  # a whole mask: every query sees itself and about half of the rest
            value = (rng.random(shape) < 0.5) | np.eye(shape[2], shape[3], dtype=bool)
        elif marks_padding(name) and len(shape) == 2:
            keep = np.maximum(1, shape[1] - np.arange(batch) * shape[1] // (4 * batch))
            value = np.arange(shape[1])[None, :] < keep[:, None]
        elif dtype == "bool":
            value = rng.random(shape) < 0.5
        elif below is None and any(map(_numbers_parts, readers)):
            value = np.cumsum(rng.random(shape) < 0.25, axis=-1)
        else:
            value = rng.integers(0, 2 if below is None else below, shape)
            if wanted:
                value = np.where(rng.random(shape) < 0.2, rng.choice(wanted, shape), value)
        arrays[name] = value.astype(dtype if dtype != "bfloat16" else "float32")
    return arrays


def _numbers_parts(leaf: MaskSpec) -> bool:
    """Whether ids of queries and keys are compared, and none is looked for: those of segments."""
    return not ids_of(leaf) and all(kind == InputType() for kind in leaf.inputs.values())


def _holds_ids(name: str, x: Any) -> bool:
    is_whole = "int" in keras.backend.standardize_dtype(x.dtype)
    return is_whole and len(x.shape) == 2 and not marks_padding(name)


def plain(found: Found) -> Arrays:
    """Two examples with a padded tail: ids 1, masks true; 0 where padded."""
    arrays: Arrays = {}
    most = min(_LENGTH, found.longest_sequence or _LENGTH)
    for name, tensor in found.inputs.items():
        of_queries = name.split("_")[0] in _OF_QUERIES
        length = most if of_queries else max(1, most * 2 // 3)
        shape = [2, *(length if size is None else size for size in tensor.shape[1:])]
        value = np.ones(shape, keras.backend.standardize_dtype(tensor.dtype))
        if len(shape) == 2:
            value[:, int(shape[1] * _REAL) :] = 0
        arrays[name] = value
    return arrays
