"""What attention layers attend to: in one forward, and over many texts with ids and padding."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention import scopes
from keras_headmask.retrofit.adapters import AttentionLayer, without_remat
from keras_headmask.retrofit.find import Found, selected
from keras_headmask.rules import evaluation
from keras_headmask.rules.base import MaskSpec, id_tuple, whole_number
from keras_headmask.rules.leaves import padding_inputs

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
    check_named(model, by_name(model, inputs))
    survey = Found(model)
    entries = survey.known  # by default all, if none is out of reach
    if layers is not None or not survey.known or survey.unknown:
        entries = selected(survey, layers)
    return dict(_in_numpy(_forward(model, entries, inputs)))


def _forward(model: keras.Model, entries: list[AttentionLayer], inputs: Any) -> list[Any]:
    """Run the model once, as in inference; each run of an attention layer as a `Seen`."""
    from keras_headmask.retrofit.observe import watched  # needs all of retrofit/

    with watched(entries) as seen, without_remat(model), scopes.without_gradients():
        model(inputs, training=False)
    if not seen:
        raise ValueError(
            f"None of the attention layers {[entry.path for entry in entries]} ran when the model "
            "was called with training=False. Pass inputs with which it attends."
        )
    return seen


def _in_numpy(seen: list[Any], *texts: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """Path and probabilities of each, which is then freed; within `texts`, `(count, length)`."""
    shapes = [x.shape for x in texts if x is not None]
    while seen:
        one = seen.pop(0)
        values = masks.known_values(one.probabilities)
        if values is None:
            raise ValueError(
                f"The attention layer '{one.path}' runs inside a `tf.function` or `jit`, where its "
                "probabilities have no values. Call the layers around it without that."
            )
        ends = [values.shape[::3], values.shape[::2]] if values.ndim == 4 else []
        if not ends or (shapes and len({*ends, *shapes}) > 1):
            raise ValueError(
                f"The attention layer '{one.path}' must attend over one axis, of the texts. "
                f"Received: probabilities of the shape {values.shape}, padding and ids of {shapes}."
                " Leave it out: name the other layers in `layers`."
            )
        yield one.path, values.astype("float32", copy=False)


class Layer:
    """Sums over the queries of one layer that see something.

    `sums` `(3, kinds of pairs, heads)`: shares of attention, the same of even attention, and how
    many queries have such a key.
    """

    def __init__(self, heads: int, kinds: int):
        self.queries, self.sums, self.is_causal = np.zeros(heads), np.zeros((3, kinds, heads)), True

    def add(self, probabilities: np.ndarray, pairs: np.ndarray, real: np.ndarray) -> None:
        """Of one text: `(heads, T, T)`, the pairs of each kind `(kinds, T, T)`, real tokens."""
        shares = np.where(real, probabilities.astype("float64"), 0)
        total = shares.sum(-1)
        sees = (total > 0) & real
        shares /= np.where(sees, total, np.inf)[..., None]
        measured = np.tensordot(pairs.astype("float64"), shares, ([1, 2], [1, 2]))
        even = pairs.sum(-1) / max(1, real.sum())
        self.sums += np.stack([measured, even @ sees.T, pairs.any(-1).astype("float64") @ sees.T])
        self.queries += sees.sum(1)
        self.is_causal &= not np.triu(shares, 1).any()


class Reading(NamedTuple):
    """What `read` finds in so many texts and tokens."""

    layers: dict[str, Layer]  # by path, in the order in which they run
    kinds: list[Any]
    pairs: np.ndarray  # (kinds, 2): how many of each kind, and of those that do not look ahead
    texts: int
    tokens: int
    padding: str  # what marks it


Kinds = Callable[[np.ndarray | None, np.ndarray], Iterable[dict[Any, np.ndarray]]]


def allowed_pairs(
    rules: Mapping[Any, MaskSpec], ids: np.ndarray | None, real: np.ndarray
) -> Iterator[dict[Any, np.ndarray]]:
    """Of each text the pairs of tokens `(T, T)` that each of `rules` allows, by its name."""
    (texts, length), by_name = real.shape, {}
    for name, spec in rules.items():
        inputs = dict.fromkeys(spec.inputs, ids)  # (none reads anything else)
        mask = ops.convert_to_numpy(evaluation.make_mask(spec, length, length, 1, inputs))
        by_name[name] = np.broadcast_to(mask[:, 0], (texts, length, length))
    for i in range(texts):
        yield {name: mask[i] for name, mask in by_name.items()}


def read(
    model: Any,
    inputs: Any,
    layers: Any,
    batch_size: int,
    kinds: Kinds,
    run_path: Callable[[str], str] = str,
    **looked_for: Any,
) -> Reading:
    """Run a model on batches, one held at a time, and sum up what its heads attend to.

    `kinds` gives the pairs of each text of a batch by kind, from its ids and real tokens;
    `run_path` the path under which a run of a layer counts. `looked_for`: ids, or `None`, by the
    argument that passes them. They must stand in the texts.
    """
    whole_number(batch_size, "batch_size", at_least=1)
    entries = selected(Found(model), layers)
    if others := [entry for entry in entries if entry.kind == "cross"]:
        raise ValueError(
            f"The layer {others[0]} attends to another sequence; heads are measured within one. "
            "Leave it out of `layers`, or use `attention_probabilities`."
        )
    named = by_name(model, inputs)
    check_named(model, named)
    shapes = [tuple(getattr(x, "shape", ())) for x in keras.tree.flatten(inputs)]
    if () in shapes or len({x[0] for x in shapes}) != 1 or any(0 in x for x in shapes):
        raise ValueError(
            "`inputs` must hold arrays, each with as many texts, and no empty ones. Received: "
            f"{shapes}."
        )
    of_ids, of_padding = _ids_and_padding(named)
    stand = np.zeros(0) if of_ids is None else as_numpy(named[of_ids])
    if stand.size and of_padding is not None:
        stand = stand[as_numpy(named[of_padding]) != 0]
    for name, wanted in looked_for.items():
        if wanted is not None and not np.isin(stand, id_tuple(wanted, name)).any():
            raise ValueError(
                f"`{name}` must stand among the token ids of the texts. Received: {wanted}. Pass "
                "ids of the model's tokenizer, and texts in an input named `token_ids`, or leave "
                f"out `{name}`."
            )
    found: dict[str, Layer] = {}
    counts, tokens = np.zeros(2), 0
    for start in range(0, shapes[0][0], batch_size):
        part = slice(start, start + batch_size)
        ids = None if of_ids is None else as_numpy(named[of_ids][part])
        runs = _forward(model, entries, keras.tree.map_structure(operator.itemgetter(part), inputs))
        padding, real = "none known", np.ones(runs[0].probabilities.shape[::2], bool)
        if of_padding is not None:
            padding, real = f"`{of_padding}`", as_numpy(named[of_padding][part]) != 0
        elif runs[0].query_mask is not None:
            padding, real = "the Keras mask", as_numpy(runs[0].query_mask)
        pairs: list[np.ndarray] = []  # of each text, by kind
        for path, probabilities in _in_numpy(runs, real, ids):
            if not pairs:
                by_kind = list(kinds(ids, real))
                both = real[:, :, None] & real[:, None]
                pairs = [np.stack([*x.values()]) & y for x, y in zip(by_kind, both, strict=True)]
            layer = found.setdefault(run_path(path), Layer(probabilities.shape[1], len(pairs[0])))
            for of_text in zip(probabilities, pairs, real, strict=True):
                layer.add(*of_text)
        counts = counts + sum(np.stack([x, np.tril(x)], -1).sum((1, 2)) for x in pairs)
        tokens += int(real.sum())
    if not tokens:
        raise ValueError(f"`inputs` must hold real tokens. Received: padding alone, by {padding}.")
    return Reading(found, list(by_kind[0]), counts, shapes[0][0], tokens, padding)


def _ids_and_padding(named: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The inputs with the token ids and with true at real tokens, if there are such."""
    padding = padding_inputs(named)
    kinds = {x: keras.backend.standardize_dtype(named[x].dtype) for x in named if x not in padding}
    whole = [x for x, dtype in kinds.items() if "int" in dtype and len(named[x].shape) == 2]
    ids = [x for x in whole if x in _IDS] or [x for x in whole if "token_ids" in x] or whole
    # `decoder_padding_mask` belongs to `decoder_token_ids`.
    own = [x.replace("token_ids", "padding_mask") for x in ids]
    padding = [x for x in padding if x in own] or padding
    for names, what in ((ids, "holds the token ids"), (padding, "marks padding")):
        if len(names) > 1:
            raise ValueError(
                f"Cannot tell which input {what}: {names}. Pass a model of one such input."
            )
    return ids[0] if ids else None, padding[0] if padding else None


def as_numpy(array: Any) -> np.ndarray:
    """An array of any framework in NumPy, off its graph and device."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float() if "bfloat16" in str(array.dtype) else array  # NumPy lacks it
    return np.asarray(array)


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


def check_named(model: Any, named: Mapping[str, Any]) -> None:
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
