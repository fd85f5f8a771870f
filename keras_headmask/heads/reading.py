"""What the layers of a model attend to over many texts, with the texts' ids and padding."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_headmask.heads import texts
from keras_headmask.heads.probabilities import forward, in_numpy
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.select import selected
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules import fields


class Batch(NamedTuple):
    """One batch: `ids` `(texts, length)` or `None`, `real` boolean of that shape.

    `layers` yields the path of each layer and its probabilities, once, `(texts, heads, T, T)`.
    """

    ids: np.ndarray | None
    real: np.ndarray
    layers: Iterator[tuple[str, np.ndarray]]


class Reader:
    """Runs a model on batches, one held at a time."""

    def __init__(
        self, model: Any, inputs: Any, layers: Any, token_ids: Any, padding: Any, batch_size: int
    ):
        fields.whole_number(batch_size, "batch_size", at_least=1)
        self.model, self.survey = model, Survey(model)
        self.entries = _self_attention(self.survey, layers)
        given = {"token_ids": token_ids, "padding": padding}
        beside = {k: v for k, v in given.items() if v is not None and not isinstance(v, str)}
        self.named = {k: v for k, v in given.items() if k not in beside}
        self.batches: Iterable[tuple[Any, Mapping[str, Any]]]
        self.batches, self.count = texts.in_batches(inputs, beside, batch_size)
        self.padding = "none known"
        self.texts = self.tokens = self.longest = 0
        self._some_ids: set[int] = set()
        self._reads_ids = False
        self._wanted: dict[str, tuple[int, ...]] = {}

    def read(self, **wanted: Any) -> Iterator[Batch]:
        """Each batch; `wanted`: ids, or `None`, by the argument in which they were passed."""
        self._wanted = {k: fields.id_tuple(v, k) for k, v in wanted.items() if v is not None}
        absent = dict(self._wanted)
        for inputs, beside in self.batches:
            batch = self._batch(inputs, beside)
            yield batch
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
        if self._reads_ids and len(self._some_ids) < 2:
            raise ValueError(
                f"All token ids are equal ({self._some_ids.pop()}), so each token repeats all "
                "others and nothing sets heads apart. Pass texts of several words, or in "
                "`token_ids` the input that holds the ids."
            )
        if absent:
            name, ids = next(iter(absent.items()))
            raise ValueError(
                f"`{name}` must stand in the texts. Received: {ids}, and {count} "
                "without any of them. Pass the ids of this model's tokenizer, or leave out "
                f"`{name}`."
            )

    def _batch(self, inputs: Any, beside: Mapping[str, Any]) -> Batch:
        count = int(texts.arrays_in(inputs)[0].shape[0])
        if any(0 in x.shape[:2] for x in texts.arrays_in(inputs)):
            shapes = keras.tree.map_structure(lambda x: tuple(x.shape), inputs)
            missing = "tokens" if count else "texts"
            raise ValueError(f"`inputs` has a batch without {missing}: {shapes}. Leave it out.")
        ids, real = self._ids_and_padding(inputs, beside, count)
        seen = forward(self.survey, self.entries, inputs)
        if real is None and seen[0].query_mask is not None:
            self.padding = "the Keras mask"
            real = texts.as_array(seen[0].query_mask, "the Keras mask", count)
        if real is None:
            real = np.ones((count, seen[0].probabilities.shape[2]), bool)
        real = real != 0
        return Batch(ids, real, self._of_layers(seen, ids, real))

    def _of_layers(
        self, seen: list[Any], ids: np.ndarray | None, real: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        for number, (path, probabilities) in enumerate(in_numpy(seen)):
            _check_fits(path, probabilities, ids, real)
            if not number:
                self._count(ids, real)
            yield path, probabilities

    def _count(self, ids: np.ndarray | None, real: np.ndarray) -> None:
        self.texts += len(real)
        self.tokens += int(real.sum())
        self.longest = max(self.longest, int(real.sum(1).max()))
        if ids is not None and len(self._some_ids) < 2:
            self._some_ids.update(np.unique(ids[real])[:2].tolist())

    def _ids_and_padding(
        self, inputs: Any, beside: Mapping[str, Any], count: int
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        named = texts.by_name(self.model, inputs)
        texts.check_inputs(self.model, named)
        arrays = dict(beside)
        of_ids = None
        if "token_ids" not in beside:
            of_ids = texts.named_ids(named, self.named["token_ids"])
            arrays["token_ids"] = None if of_ids is None else named[of_ids]
        if "padding" not in beside:
            name = texts.named_padding(named, self.named["padding"], of_ids)
            arrays["padding"] = None if name is None else named[name]
            self.padding = self.padding if name is None else f"`{name}`"
        else:
            self.padding = "`padding`"
        self._reads_ids = arrays["token_ids"] is not None
        if self._wanted and not self._reads_ids:
            raise ValueError(
                f"{texts.listed(self._wanted)} must stand among token ids, and no input holds "
                f"them: {sorted(named)}. Pass `token_ids`, the name of an input or an array."
            )
        ids, real = (
            None if arrays[key] is None else texts.as_array(arrays[key], key, count)
            for key in ("token_ids", "padding")
        )
        return ids, real


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
