"""What attention layers attend to: in one forward, and over many texts with ids and padding."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.attention import observers
from keras_headmask.heads import texts
from keras_headmask.heads.progress import Progress
from keras_headmask.retrofit.adapters import AttentionLayer, without_remat
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import evaluation, fields
from keras_headmask.rules.base import MaskSpec


def attention_probabilities(
    model: keras.Model, inputs: Any, layers: Any = None
) -> dict[str, np.ndarray]:
    """What every attention layer of `model` attends to, in one forward without dropout.

    It needs `batch * heads * queries * keys` numbers for each layer: pass a few texts, and use
    `measure_heads` for many. Other tools take a list of these arrays, BertViz's `head_view` for
    one: `[torch.tensor(x) for x in probabilities.values()]`.

    Args:
        model: A model that `apply_head_masks` understands, with or without a rule.
        inputs: What the model is called on: arrays, in a dict or list where it has several inputs.
        layers: Which layers, as in `apply_head_masks`. By default all, cross-attention too.

    Returns:
        Probabilities by the path of the layer, float32 `(batch, heads, queries, keys)`, in the
        order in which the layers run. A layer that runs again has another entry, `"path[1]"`. Each
        row sums to 1, or to 0 where a query sees nothing.

    Raises:
        TypeError: if `model` is not a Keras model, or for floats where it takes ids.
        ValueError: if attention is out of reach, does not run, runs inside a `tf.function` or
            `jit`, or attends over several axes; or if `layers` names no layer.

    >>> from keras_headmask import Window, apply_head_masks
    >>> x = keras.Input((3, 8))
    >>> model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    >>> masked = apply_head_masks(model, Window(0, 0))
    >>> attention_probabilities(masked, np.ones((1, 3, 8)))["attention"][0, 0]
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    texts.check_no_strings(model, inputs)
    texts.check_inputs(model, texts.by_name(model, inputs))
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


class Batch(NamedTuple):
    """One batch: `ids` `(texts, length)` or `None`, `real` boolean of that shape.

    `layers` yields the path of each layer and its probabilities, once, `(texts, heads, T, T)`.
    """

    ids: np.ndarray | None
    real: np.ndarray
    layers: Iterator[tuple[str, np.ndarray]]


def allowed_pairs(specs: Sequence[MaskSpec], batch: Batch) -> Iterator[np.ndarray]:
    """The pairs of real tokens that each of `specs` allows, `(specs, T, T)`, for each text."""
    length = batch.real.shape[1]
    by_spec = []
    for spec in specs:
        inputs = dict.fromkeys(spec.inputs, batch.ids)  # (none reads anything else)
        mask = ops.convert_to_numpy(evaluation.make_mask(spec, length, length, 1, inputs))
        by_spec.append(np.broadcast_to(mask[:, 0], (len(batch.real), length, length)))
    for i, real in enumerate(batch.real):
        yield np.stack([mask[i] for mask in by_spec]) & real & real[:, None]


class Reader:
    """Runs a model on batches, one held at a time.

    `looked_for`: ids, or `None`, by the argument that passes them. They must stand in the texts.
    """

    def __init__(
        self,
        model: Any,
        inputs: Any,
        layers: Any,
        token_ids: Any,
        padding: Any,
        batch_size: int,
        **looked_for: Any,
    ):
        fields.whole_number(batch_size, "batch_size", at_least=1)
        self.model, self.survey = model, Survey(model)
        self.entries = _self_attention(self.survey, layers)
        self.looked_for = {
            name: fields.id_tuple(ids, name) for name, ids in looked_for.items() if ids is not None
        }
        arguments = {"token_ids": token_ids, "padding": padding}
        # An argument is the name of an input, or else an array beside the inputs.
        self.names = {k: v for k, v in arguments.items() if v is None or isinstance(v, str)}
        beside = {k: v for k, v in arguments.items() if k not in self.names}
        texts.check_no_strings(model, inputs)
        self.batches: Iterable[tuple[Any, Mapping[str, Any]]]
        self.batches, self.count = texts.in_batches(inputs, beside, batch_size)
        self.padding = "none known"
        self.texts = self.tokens = self.longest = 0
        self._some_ids: set[int] = set()

    def read(self, verbose: Any) -> Iterator[Batch]:
        """Each batch, with a bar of progress; then raises unless heads can be measured on them."""
        bar = Progress(self.count, "batches", verbose)
        absent = dict(self.looked_for)
        for inputs, beside in self.batches:
            batch = self._batch(inputs, beside)
            yield batch
            bar.step()
            if absent and batch.ids is not None:
                stand = batch.ids[batch.real]
                absent = {k: v for k, v in absent.items() if not np.isin(stand, v).any()}
        if not self.texts:
            raise ValueError("`inputs` holds no texts: nothing was measured. Pass some.")
        count = texts.counted(self.texts)
        if self.longest < 2:
            raise ValueError(
                "Heads are measured on texts of at least 2 tokens. Received: "
                f"{count}, the longest of {self.longest} (padding: {self.padding}). "
                "Pass longer ones, or in `padding` what is true at real tokens."
            )
        if len(self._some_ids) == 1:
            raise ValueError(
                f"All token ids are equal ({self._some_ids.pop()}), so each token repeats all "
                "others and nothing sets heads apart. Pass texts of several words, or in "
                "`token_ids` the input that holds the ids."
            )
        for name, ids in absent.items():
            raise ValueError(
                f"`{name}` must stand in the texts. Received: {ids}, and {count} "
                "without any of them. Pass the ids of this model's tokenizer, or leave out "
                f"`{name}`."
            )

    def _batch(self, inputs: Any, beside: Mapping[str, Any]) -> Batch:
        texts.check_no_strings(self.model, inputs)
        count = int(texts.arrays_in(inputs)[0].shape[0])
        if any(0 in x.shape[:2] for x in texts.arrays_in(inputs)):
            shapes = keras.tree.map_structure(lambda x: tuple(x.shape), inputs)
            missing = "tokens" if count else "texts"
            raise ValueError(f"`inputs` has a batch without {missing}: {shapes}. Leave it out.")
        ids, real = self._ids_and_padding(inputs, beside, count)
        runs = _forward(self.model, self.entries, inputs)
        if real is None and runs[0].query_mask is not None:
            self.padding = "the Keras mask"
            real = texts.as_array(runs[0].query_mask, "the Keras mask", count)
        if real is None:
            real = np.ones((count, runs[0].probabilities.shape[2]), bool)
        return Batch(ids, real != 0, self._checked(runs, ids, real != 0))

    def _checked(
        self, runs: list[Any], ids: np.ndarray | None, real: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        for number, (path, probabilities) in enumerate(_in_numpy(runs)):
            _check_fits(path, probabilities, ids, real)
            if not number:
                self.texts += len(real)
                self.tokens += int(real.sum())
                self.longest = max(self.longest, int(real.sum(1).max()))
                if ids is not None and len(self._some_ids) < 2:
                    self._some_ids.update(np.unique(ids[real])[:2].tolist())
            yield path, probabilities

    def _ids_and_padding(
        self, inputs: Any, beside: Mapping[str, Any], count: int
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        named = texts.by_name(self.model, inputs)
        texts.check_inputs(self.model, named)
        arrays, ids = dict(beside), None
        if "token_ids" in self.names:
            ids = texts.named_ids(named, self.names["token_ids"])
            arrays["token_ids"] = None if ids is None else named[ids]
        if "padding" in self.names:
            padding = texts.named_padding(named, self.names["padding"], ids)
            arrays["padding"] = None if padding is None else named[padding]
            self.padding = self.padding if padding is None else f"`{padding}`"
        else:
            self.padding = "`padding`"
        if self.looked_for and arrays["token_ids"] is None:
            raise ValueError(
                f"{texts.listed(self.looked_for)} must stand among token ids, and no input holds "
                f"them: {sorted(named)}. Pass `token_ids`, the name of an input or an array."
            )
        arrays = {k: None if x is None else texts.as_array(x, k, count) for k, x in arrays.items()}
        return arrays["token_ids"], arrays["padding"]


def _self_attention(survey: Survey, layers: Any) -> list[AttentionLayer]:
    entries = selected(survey, layers)
    if others := [entry for entry in entries if entry.kind == "cross"]:
        raise ValueError(
            f"The layer {others[0]} attends to another sequence; heads are measured within one. "
            "Leave it out of `layers`, or use `attention_probabilities`."
        )
    return entries


def _check_fits(
    path: str, probabilities: np.ndarray, ids: np.ndarray | None, real: np.ndarray
) -> None:
    """Raise unless the layer attends within the texts whose ids and padding are known."""
    count, _, queries, keys = probabilities.shape
    if queries != keys:
        raise ValueError(
            f"The layer '{path}' attends from {queries} queries to {keys} keys: not within one "
            "sequence. Name the others in `layers`."
        )
    for name, array in (("token_ids", ids), ("padding", real)):
        if array is not None and array.shape != (count, queries):
            raise ValueError(
                f"`{name}` must have a value for each position of the layer '{path}', shape "
                f"{(count, queries)}. Received: shape {array.shape}. Pass another input or array "
                f"in `{name}`, or name other layers in `layers`."
            )
