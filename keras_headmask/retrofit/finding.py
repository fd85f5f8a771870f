"""Which attention layers a model holds, in which order, and which are out of reach."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.families import adapter_of
from keras_headmask.retrofit.handwritten import softmaxes_of_attention
from keras_headmask.retrofit.nesting import walk
from keras_headmask.retrofit.survey import Call, Survey


class AttentionLayer(NamedTuple):
    """An attention layer and the names of the layers around it, outermost first.

    `kind` is "self", "cross", or "unclear". `runs_on_two`: it is called more than once, and not on
    one sequence after the other. `untracked`: a weight in it that Keras does not track. `ran`: a
    call of it was seen, in a graph or by running the layer around it for shapes.
    """

    layer: keras.Layer
    path: str
    kind: str
    runs_on_two: bool = False
    untracked: str = ""
    ran: bool = True

    @property
    def num_heads(self) -> Any:
        """The heads of the query; of a layer that no rule reaches, what it says, or `None`."""
        adapter = adapter_of(self.layer)
        return getattr(self.layer, "num_heads", None) if adapter is None else adapter.num_heads

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.layer).__name__})"


class Found(NamedTuple):
    """The attention layers of a model in forward order, and those that no rule reaches.

    `untracked`: the paths of weights that its layers read and Keras does not track.
    """

    known: list[AttentionLayer]
    unknown: list[AttentionLayer]
    untracked: list[str]


def find_attention(model: keras.Model) -> Found:
    """Every attention layer inside `model`, in nested layers and models too, each once."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: {model!r}.")
    survey = Survey(model)
    found = Found([], [], list(survey.untracked.values()))
    seen: set[int] = set()
    paths: dict[str, int] = {}
    calls: dict[int, list[Call]] = {}  # in forward order
    for call in survey.calls:
        calls.setdefault(id(call.layer), []).append(call)
    by_hand = survey.by_hand | {id(x) for x in softmaxes_of_attention(model)}
    for path, layer in walk(model):
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        paths[path] = paths.get(path, 0) + 1
        if paths[path] > 1:  # layers inside a layer may share a name
            path = f"{path}#{paths[path]}"
        adapter = adapter_of(layer)
        kind = _kind(layer.name.lower(), calls.get(id(layer), []))
        kind = "self" if adapter is not None and adapter.is_self else kind
        held = survey.untracked.get(id(layer), "")
        is_twice, ran = id(layer) in survey.on_two, id(layer) in calls
        entry = AttentionLayer(layer, path, kind, is_twice, held, ran)
        if id(layer) in by_hand or "attention" in held or _attends_by_its_name(layer):
            found.unknown.append(entry)
        elif adapter is not None:
            found.known.append(entry)
    # List attention classes before layers around them, which were seen to attend.
    found.unknown.sort(key=lambda entry: not _is_named_for_attention(entry.layer))
    if all(id(entry.layer) in calls for entry in found.known):
        order = {layer: number for number, layer in enumerate(calls)}
        found.known.sort(key=lambda entry: order[id(entry.layer)])
    return found


def _kind(name: str, calls: list[Call]) -> str:
    """Whether a layer attends to its own sequence: by its calls' tensors, then by its name."""
    if any(call.other_length for call in calls):
        return "cross"
    if calls and all(call.same for call in calls):
        return "self"
    if "cross" in name:
        return "cross"
    return "self" if "self" in name else "unclear"


def _attends_by_its_name(layer: Any) -> bool:
    """Whether its class is named for attention and leaves it to no layer inside."""
    return (
        adapter_of(layer) is None
        and _is_named_for_attention(layer)
        and not any(
            _is_named_for_attention(inner) or adapter_of(inner) is not None
            for _, inner in walk(layer)
        )
    )


def _is_named_for_attention(layer: Any) -> bool:
    name = type(layer).__name__.lower()
    _, found, rest = name.partition("attention")
    return bool(found) and "mask" not in rest  # one that makes attention masks does not attend


def longest_sequence(model: keras.Model) -> int | None:
    """How long a sequence may be, as far as the layers say (KerasHub's position embeddings)."""
    sizes = [getattr(layer, "sequence_length", None) for layer in _keras.layers_of(model)]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def numbered(found: Found) -> Iterator[tuple[int | None, AttentionLayer]]:
    """All attention layers, with the numbers by which `layers` names self-attention."""
    number = 0
    for entry in (*found.known, *found.unknown):
        counted = entry.kind == "self" and entry in found.known
        yield number if counted else None, entry
        number += counted


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]
