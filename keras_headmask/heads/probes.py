"""Inputs of a model that are changed at some positions, and what the outputs make of it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.attention.lost_masks import marks_padding
from keras_headmask.heads import outputs
from keras_headmask.heads.subject import Arrays, Subject, arrays_of_outputs, outputs_by_name
from keras_headmask.retrofit.adapters import walk


class Probe(NamedTuple):
    """Changed inputs: `places`, boolean `(batch, length)`, is where `name` has other values.

    With `in_embeddings` the ids stay, and what embeddings make of them is changed there.
    """

    name: str
    given: Arrays
    places: np.ndarray
    in_embeddings: bool = False


# --- What is changed ------------------------------------------------------------------------------


def is_changeable(name: str, values: np.ndarray, batch: int) -> bool:
    """Whether positions of an input are changed: not of masks, nor where one id is all there is."""
    has_positions = values.ndim >= 2 and len(values) == batch and values.shape[1] > 0
    is_mask = values.dtype.kind == "b" or marks_padding(name)
    is_number = values.dtype.kind not in "OSU" and (
        values.ndim == 2 or values.dtype.kind not in "iu"
    )
    return has_positions and is_number and not is_mask and _other_values(values) > 0


def why_kept(values: np.ndarray, is_fixed: bool) -> str:
    """Why positions of an input were not changed."""
    if is_fixed:
        return "it has a fixed length where others may have any, so it holds no positions"
    is_one = values.size > 0 and (values == values.flat[0]).all()
    if is_one:
        return "all its values are equal"
    return "it is a mask, or holds no numbers by position"


def _other_values(values: np.ndarray) -> int:
    """How many values can take the place of one: the ids that the inputs have are valid."""
    return len(np.unique(values)) - 1 if _are_ids(values) else 2**31


def _are_ids(values: np.ndarray) -> bool:
    """Whether they are ids or flags; Keras' own inputs hold ids as floats, if no dtype is said."""
    if values.dtype.kind in "iub":
        return True
    return values.ndim == 2 and bool((np.isfinite(values) & (values == np.round(values))).all())


def draws(values: np.ndarray, most: int) -> int:
    """How many replacements to try."""
    return min(most, _other_values(values))


def replaced(values: np.ndarray, places: np.ndarray, draw: int) -> np.ndarray:
    """`values` with others at `places`, boolean `(batch, length)`; each draw has its own."""
    places = places.reshape(places.shape + (1,) * (values.ndim - 2))
    if _are_ids(values):
        ids, index = np.unique(values, return_inverse=True)
        other = ids[(index.reshape(values.shape) + 1 + draw) % len(ids)]
    else:
        other = _moved(np.where(np.isfinite(values), values, 0), draw)
    return np.where(places, other, values)


def _moved(values: np.ndarray, draw: int) -> np.ndarray:
    """Floats that other positions hold, so that each stays what its column may be.

    Where these are the same, noise as large as the values is added.
    """
    of_places = values.astype("float64").reshape((*values.shape[:2], -1))
    of_places = of_places.reshape((-1, of_places.shape[-1]))
    other = np.roll(of_places, 1 + draw % max(len(of_places) - 1, 1), 0)
    spread = max(of_places.std(), 1e-4 * np.abs(of_places).max(initial=0.0)) or 1.0
    noise = spread * (1 + draw) * np.random.default_rng(draw).normal(size=of_places.shape)
    is_same = np.isclose(other, of_places, rtol=1e-3, atol=1e-3 * spread).all(-1, keepdims=True)
    return np.where(is_same, of_places + noise, other).astype(values.dtype).reshape(values.shape)


def another_example(given: Arrays, example: int, batch: int, draw: int) -> Arrays:
    """`given` with other values in one example, in masks and flags too."""
    rng, changed = np.random.default_rng([example, draw]), dict(given)
    for name, values in given.items():
        if not values.ndim or len(values) != batch or values.dtype.kind in "OSU":
            continue
        places = np.zeros(values.shape[:2], bool)
        places[example] = True
        if values.dtype.kind == "b" or set(np.unique(values)) <= {0, 1}:
            other = rng.permuted(values[example] == 0).astype(values.dtype)
            changed[name] = values.copy()
            changed[name][example] = other if (other != values[example]).any() else values[example]
        else:
            changed[name] = replaced(
                values, places, int(rng.integers(0, max(1, draws(values, 99))))
            )
    return changed


@contextlib.contextmanager
def applied(model: keras.Model | None, probe: Probe) -> Iterator[None]:
    """Change what embeddings make of the ids of a probe, if it says so."""
    with contextlib.ExitStack() as stack:
        if probe.in_embeddings:
            for layer in _embeddings(model):
                stack.enter_context(observers.overriding(layer, "call", _changed(probe)))
        yield


def _embeddings(model: keras.Model | None) -> list[Any]:
    layers = () if model is None else _keras.layers_of(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]


def reads_by_embedding(subject: Subject, name: str, given: Arrays) -> bool:
    """Whether an embedding reads the ids of an input as they are."""
    places = np.zeros(given[name].shape, bool)
    seen: list[Any] = []
    probe = Probe(name, given, places, in_embeddings=True)
    with contextlib.ExitStack() as stack:
        for layer in _embeddings(subject.model):
            override = _changed(probe, seen.append)
            stack.enter_context(observers.overriding(layer, "call", override))
        if given[name].ndim == 2 and given[name].dtype.kind in "iu":
            subject.call(given)
    return bool(seen)


def _changed(probe: Probe, see: Callable[[Any], Any] | None = None) -> Callable:
    ids = probe.given[probe.name]

    def embedded(usual: Callable, read: Any, *args: Any, **kwargs: Any) -> Any:
        made = usual(read, *args, **kwargs)
        if tuple(read.shape) != ids.shape or (ops.convert_to_numpy(read) != ids).any():
            return made
        if see is not None:
            see(read)
        values = ops.convert_to_numpy(ops.cast(made, "float32"))
        noise = np.random.default_rng(0).normal(size=values.shape) * (values.std() or 1.0)
        return made + ops.cast(ops.convert_to_tensor(noise * probe.places[..., None]), made.dtype)

    return embedded


# --- A model that runs on it ----------------------------------------------------------------------


class Again(NamedTuple):
    """What a second run on the same inputs shows.

    `masks`: Keras' masks of the outputs, `(batch, T)`. `masked_ids`: inputs whose id 0 an embedding
    takes for padding.
    """

    outputs: Arrays
    masks: Arrays
    masked_ids: list[str]


def again(subject: Subject, given: Arrays) -> Again:
    """Run the model once more."""
    if subject.model is None:
        return Again(subject.call(given), {}, [])
    read: list[np.ndarray] = []

    def see(usual: Callable, ids: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(ops.convert_to_numpy(ids))
        return usual(ids, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for layer in _embeddings(subject.model):
            if layer.mask_zero:
                stack.enter_context(observers.overriding(layer, "call", see))
        made = subject.model(subject.pack(given), training=False)
    of_outputs = keras.tree.map_structure(_keras.get_keras_mask, made)
    masks = {
        name: ops.convert_to_numpy(mask) != 0
        for name, mask in outputs_by_name(of_outputs).items()
        if mask is not None and len(mask.shape) == 2
    }
    ids = [name for name, x in given.items() if any(map(functools.partial(_same, x), read))]
    return Again(arrays_of_outputs(made), masks, ids)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.ndim == 2 and one.shape == other.shape and bool((one == other).all())


def first_shown(
    subject: Subject, probe: Probe, before: Arrays, rows: np.ndarray, tolerance: float
) -> str | None:
    """The first layer whose output moves where it must not: at `rows`, boolean `(batch, T)`."""
    if subject.model is None:
        return None
    usual, other = _outputs_of_layers(subject, before), _outputs_of_layers(subject, None, probe)
    for (path, one), (_, two) in zip(usual, other, strict=False):
        if one.shape == two.shape and one.shape[:2] == rows.shape:
            limit = tolerance * outputs.scales(one, True)
            if outputs.difference(one, two, True, limit)[rows].any():
                return path
    return None


def _outputs_of_layers(
    subject: Subject, given: Arrays | None, probe: Probe | None = None
) -> list[tuple[str, np.ndarray]]:
    seen: list[tuple[str, np.ndarray]] = []

    def keep(path: str) -> Callable:
        def kept(usual: Callable, *args: Any, **kwargs: Any) -> Any:
            made = usual(*args, **kwargs)
            for x in keras.tree.flatten(made)[:1]:
                if len(getattr(x, "shape", ())) > 1:
                    seen.append((path, ops.convert_to_numpy(x).astype("float64")))
            return made

        return kept

    assert subject.model is not None
    with contextlib.ExitStack() as stack:
        if probe is not None:  # first, so that what is kept is changed already
            stack.enter_context(applied(subject.model, probe))
        for path, layer in walk(subject.model):
            if not isinstance(layer, keras.Model):
                named = f"'{path}' ({type(layer).__name__})"
                stack.enter_context(observers.overriding(layer, "call", keep(named)))
        subject.call(probe.given if probe is not None else given or {})
    return seen
