"""What attention layers attend to: in one forward, and over many texts with ids and padding."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import observers
from keras_headmask.retrofit.adapters import AttentionLayer, without_remat
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import evaluation, fields
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.examples import marks_padding, padding_inputs

_IDS = ("token_ids", "input_ids", "ids")


def attention_probabilities(
    model: keras.Model, inputs: Any, layers: Any = None
) -> dict[str, np.ndarray]:
    """What every attention layer of `model` attends to, in one forward without dropout.

    It needs `batch * heads * queries * keys` numbers for each layer: pass a few texts, and use
    `measure_heads` for many.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
        layers: Which layers, as in `apply_head_masks`. By default all, cross-attention too.

    Returns:
        Probabilities by the path of the layer, float32 `(batch, heads, queries, keys)`, in the
        order in which the layers run. A layer that runs again has another entry, `"path[1]"`. Each
        row sums to 1, or to 0 where a query sees nothing.

    Raises:
        TypeError, ValueError: if attention is out of reach, does not run, runs inside a
            `tf.function` or `jit`, or attends over several axes; or for floats as ids.

    >>> from keras_headmask import Window, apply_head_masks
    >>> x = keras.Input((3, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, Window(0, 0))
    >>> attention_probabilities(masked, np.ones((1, 3, 8)))["attention"][0, 0]
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    check_inputs(model, by_name(model, inputs))
    survey = Survey(model)
    entries = survey.known  # by default all, if none is out of reach
    if layers is not None or not survey.known or survey.unknown:
        entries = selected(survey, layers)
    return dict(_in_numpy(_forward(model, entries, inputs)))


def _forward(model: keras.Model, entries: list[AttentionLayer], inputs: Any) -> list[Any]:
    """Run the model once, as in inference; each run of an attention layer as a `Seen`."""
    from keras_headmask.retrofit.observe import watched  # needs all of retrofit/

    with watched(entries) as seen, without_remat(model), observers.without_gradients():
        model(inputs, training=False)
    if not seen:
        raise ValueError(
            f"None of the attention layers {[entry.path for entry in entries]} ran when the model "
            "was called with training=False. Pass inputs with which it attends."
        )
    return seen


def _in_numpy(seen: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Path and probabilities of each, which is then freed."""
    while seen:
        one = seen.pop(0)
        values = masks.known_values(one.probabilities)
        if values is None:
            raise ValueError(
                f"The attention layer '{one.path}' runs inside a `tf.function` or `jit`, where its "
                "probabilities have no values. Call the layers around it without that."
            )
        if values.ndim != 4:
            raise ValueError(
                f"The attention layer '{one.path}' attends over several axes: its probabilities "
                f"have the shape {values.shape}, not (batch, heads, queries, keys). Leave it out: "
                "name the other layers in `layers`."
            )
        yield one.path, values.astype("float32", copy=False)


# --- Many texts ----------------------------------------------------------------------------------


def real_shares(probabilities: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of one text, `(heads, T, T)`: shares of the attention that goes to real tokens.

    And which queries have any, `(heads, T)`: the shares of others, and of padding, are 0.
    """
    shares = np.where(real, probabilities, 0)
    total = shares.sum(-1)
    sees = (total > 0) & real
    shares *= np.where(sees, 1 / np.where(sees, total, 1), 0).astype(shares.dtype)[..., None]
    return shares, sees


def allowed_pairs(specs: Sequence[MaskSpec], batch: "Batch") -> Iterator[np.ndarray]:
    """The pairs of real tokens that each of `specs` allows, `(specs, T, T)`, for each text."""
    length = batch.real.shape[1]
    by_spec = []
    for spec in specs:
        inputs = dict.fromkeys(spec.inputs, batch.ids)  # (none reads anything else)
        mask = ops.convert_to_numpy(evaluation.make_mask(spec, length, length, 1, inputs))
        by_spec.append(np.broadcast_to(mask[:, 0], (len(batch.real), length, length)))
    for i, real in enumerate(batch.real):
        yield np.stack([mask[i] for mask in by_spec]) & real & real[:, None]


class Batch(NamedTuple):
    """One batch: `ids` `(texts, length)` or `None`, `real` boolean of that shape.

    `padding` says what marks it. `layers` yields the path of each layer and its probabilities,
    once, `(texts, heads, T, T)`.
    """

    ids: np.ndarray | None
    real: np.ndarray
    padding: str
    layers: Iterator[tuple[str, np.ndarray]]


def read(
    model: Any, inputs: Any, layers: Any, batch_size: int, **looked_for: Any
) -> Iterator[Batch]:
    """Run a model on batches, one held at a time.

    `looked_for`: ids, or `None`, by the argument that passes them. They must stand in the texts.
    """
    fields.whole_number(batch_size, "batch_size", at_least=1)
    entries = selected(Survey(model), layers)
    if others := [entry for entry in entries if entry.kind == "cross"]:
        raise ValueError(
            f"The layer {others[0]} attends to another sequence; heads are measured within one. "
            "Leave it out of `layers`, or use `attention_probabilities`."
        )
    named = by_name(model, inputs)
    check_inputs(model, named)
    shapes = [tuple(getattr(x, "shape", ())) for x in keras.tree.flatten(inputs)]
    if () in shapes or len({x[0] for x in shapes}) != 1 or any(0 in x for x in shapes):
        raise ValueError(
            "`inputs` must hold arrays, each with as many texts, and no empty ones. Received: "
            f"{shapes}."
        )
    of_ids, of_padding = _ids_and_padding(named)
    stand = np.zeros(0) if of_ids is None else _as_array(named[of_ids])
    if stand.size and of_padding is not None:
        stand = stand[_as_array(named[of_padding]) != 0]
    for name, wanted in looked_for.items():
        if wanted is not None and not np.isin(stand, fields.id_tuple(wanted, name)).any():
            raise ValueError(
                f"`{name}` must stand among the token ids of the texts. Received: {wanted}. Pass "
                "ids of the model's tokenizer, and texts in an input named `token_ids`, or leave "
                f"out `{name}`."
            )
    tokens = 0
    for start in range(0, shapes[0][0], batch_size):
        part = slice(start, start + batch_size)
        ids = None if of_ids is None else _as_array(named[of_ids][part])
        runs = _forward(model, entries, keras.tree.map_structure(operator.itemgetter(part), inputs))
        padding, real = "none known", np.ones(runs[0].probabilities.shape[::2], bool)
        if of_padding is not None:
            padding, real = f"`{of_padding}`", _as_array(named[of_padding][part])
        elif runs[0].query_mask is not None:
            padding, real = "the Keras mask", _as_array(runs[0].query_mask)
        tokens += int((real != 0).sum())
        yield Batch(ids, real != 0, padding, _checked(runs, ids, real))
    if not tokens:
        raise ValueError(f"`inputs` must hold real tokens. Received: padding alone, by {padding}.")


def _ids_and_padding(named: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The inputs with the token ids and with true at real tokens, if there are such."""
    whole = [
        name
        for name, x in named.items()
        if len(x.shape) == 2
        and "int" in keras.backend.standardize_dtype(x.dtype)
        and not marks_padding(name)
    ]
    usual = [x for x in whole if x in _IDS] or [x for x in whole if "token_ids" in x] or whole
    if len(usual) > 1:
        raise ValueError(
            f"Cannot tell which input holds the token ids: {usual}. Pass a model of one such input."
        )
    ids, padding = usual[0] if usual else None, padding_inputs(named)
    if len(padding) > 1:  # `decoder_padding_mask` belongs to `decoder_token_ids`
        own = [x for x in padding if ids and x == ids.replace("token_ids", "padding_mask")]
        if not own:
            raise ValueError(f"Cannot tell which input marks padding. Received: {padding}.")
        padding = own
    return ids, padding[0] if padding else None


def _as_array(values: Any) -> np.ndarray:
    return ops.convert_to_numpy(masks.as_tensor(values))


def _checked(
    runs: list[Any], ids: np.ndarray | None, real: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Path and probabilities of each layer; raises unless it attends within the texts."""
    for path, probabilities in _in_numpy(runs):
        count, _, queries, keys = probabilities.shape
        known = [x.shape for x in (real, ids) if x is not None]
        if {(count, queries), *known} != {(count, keys)}:
            raise ValueError(
                f"The layer '{path}' must attend within the texts. Received: {queries} queries and "
                f"{keys} keys, and padding and ids of the shapes {known}. Name others in `layers`."
            )
        yield path, probabilities


# --- Inputs ---------------------------------------------------------------------------------------


def by_name(model: Any, inputs: Any) -> dict[str, Any]:
    """The inputs by the names of the dict, or of the model, if that has a graph."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = list(inputs) if is_several(inputs) else [inputs]
    names = [tensor.name for tensor in getattr(model, "inputs", None) or ()]
    if len(names) != len(values):
        names = [f"inputs[{i}]" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


def is_several(inputs: Any) -> bool:
    """Whether it is a list of arrays, and not one array as a list."""
    return isinstance(inputs, (list, tuple)) and any(hasattr(x, "shape") for x in inputs)


def check_inputs(model: Any, named: Mapping[str, Any]) -> None:
    """Raise for more arrays than the model has inputs; and for floats, which Keras would cast."""
    declared = list(getattr(model, "inputs", None) or ())
    if declared and len(named) > len(declared):
        raise ValueError(
            f"The model has the inputs {[x.name for x in declared]}. Received: {len(named)} arrays "
            "in `inputs`. Pass one array for each input."
        )
    by_key = getattr(_keras.functional_of(model), "input", None)
    names = {x.name: x for x in declared} | dict(by_key if isinstance(by_key, Mapping) else {})
    for name, x in names.items():
        dtype = getattr(named.get(name), "dtype", None)
        if "float" in str(dtype) and "float" not in str(getattr(x, "dtype", "float")):
            raise TypeError(
                f"`{name}` must be integer or boolean. Received dtype "
                f'{keras.backend.standardize_dtype(dtype)}. Pass ids of dtype="int32": a cast '
                "would change them."
            )
