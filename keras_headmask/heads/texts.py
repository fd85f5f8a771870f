"""Texts in batches: which positions are real tokens, and their ids."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.rules.examples import marks_padding, padding_inputs

_IDS = ("token_ids", "input_ids", "ids")


def in_batches(
    inputs: Any, beside: Mapping[str, Any], size: int
) -> tuple[Iterable[tuple[Any, Mapping[str, Any]]], int | None]:
    """Batches of `inputs` and of the arrays `beside` them; and how many, if that is known."""
    if not _is_nest(inputs):
        if not hasattr(inputs, "__iter__") or isinstance(inputs, (str, bytes)):
            raise TypeError(
                "`inputs` must be what the model is called on, or an iterable of batches of that. "
                f"Received: {inputs!r}."
            )
        if beside:
            raise TypeError(
                f"{listed(beside)} must be the name of an input where `inputs` are batches. "
                "Received: an array."
            )
        # As `fit` reads them: of a tuple, the first are the inputs.
        return ((x[0] if isinstance(x, tuple) else x, beside) for x in inputs), None
    leaves = arrays_in((inputs, dict(beside)))
    lengths = {int(x.shape[0]) for x in leaves}
    if len(lengths) != 1:
        raise ValueError(
            "All arrays of `inputs`, and those passed beside them, must hold as many texts. "
            f"Received: {sorted(lengths)}."
        )
    (texts,) = lengths

    def parts() -> Iterator[tuple[Any, Mapping[str, Any]]]:
        for i in range(0, texts, size):
            part = slice(i, i + size)
            yield keras.tree.map_structure(operator.itemgetter(part), (inputs, dict(beside)))

    return parts(), -(-texts // size)


def arrays_in(inputs: Any) -> list[Any]:
    """All arrays of a nest; raises for other values."""
    leaves = keras.tree.flatten(inputs)
    wrong = [type(x).__name__ for x in leaves if not getattr(x, "shape", ())]
    if wrong or not leaves:
        raise TypeError(
            "`inputs` must hold arrays whose first axis counts texts. "
            f"Received: {wrong[0] if wrong else 'nothing'} in it. Use np.array(...)."
        )
    return leaves


def _is_nest(inputs: Any) -> bool:
    return hasattr(inputs, "shape") or isinstance(inputs, (Mapping, list, tuple))


def by_name(model: Any, inputs: Any) -> dict[str, Any]:
    """The inputs by the names of the dict, or of the model, if that has a graph."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = list(inputs) if is_several(inputs) else [inputs]
    names = [tensor.name for tensor in getattr(model, "inputs", None) or ()]
    if len(names) != len(values):
        names = [f"inputs[{i}]" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


def declared(model: Any) -> dict[str, Any]:
    """The inputs that a model with a graph declares, by their names and by the keys of a dict."""
    graph = _keras.functional_of(model)
    if not isinstance(graph, _keras.Functional):
        return {}
    by_key = graph.input if isinstance(graph.input, Mapping) else {}
    inputs = {x.name: x for x in graph.inputs} | dict(by_key)
    return {name: x for name, x in inputs.items() if hasattr(x, "shape")}


def check_no_strings(model: Any, inputs: Any) -> None:
    """Raise for strings, unless an input of the model takes them."""
    takes = {str(x.dtype) for x in declared(model).values()}
    if takes and "string" not in takes and any(map(_is_string, keras.tree.flatten(inputs))):
        raise TypeError(
            f"`inputs` must be what '{model.name}' is called on: token ids. Received: strings. "
            "Pass what its preprocessor makes of them, `model.preprocessor(texts)`; where that is "
            "a tuple, its first part."
        )


def _is_string(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)  # (NumPy has strings as objects, too)
    is_array = getattr(dtype, "kind", " ") in "SUO" or "string" in str(dtype)
    return is_array or isinstance(x, (str, bytes))


def check_inputs(model: Any, named: Mapping[str, Any]) -> None:
    """Raise for more arrays than the model has inputs (perhaps batches), and for floats as ids.

    Keras would cast floats to the dtype of an input.
    """
    names = [tensor.name for tensor in getattr(model, "inputs", None) or ()]
    if names and len(named) > len(names):
        raise ValueError(
            f"The model has the inputs {names}. Received: {len(named)} arrays in `inputs`. Pass "
            "one array for each input, or batches as an iterator, `iter([batch, ...])`."
        )
    for name, x in declared(model).items():
        if name in named and not _is_float(x.dtype):
            check_ids(name, named[name])


def check_ids(name: str, values: Any) -> None:
    """Raise for floats where ids or flags are read."""
    dtype = getattr(values, "dtype", None)
    if dtype is not None and _is_float(dtype):
        raise TypeError(
            f"`{name}` must be integer or boolean. Received dtype "
            f'{keras.backend.standardize_dtype(dtype)}. Pass ids of dtype="int32": a cast would '
            "change them."
        )


def _is_float(dtype: Any) -> bool:
    return "float" in str(dtype)  # (of any framework; texts have dtypes that Keras lacks)


def is_several(inputs: Any) -> bool:
    """Whether it is a list of arrays, and not one array as a list."""
    return isinstance(inputs, (list, tuple)) and any(hasattr(x, "shape") for x in inputs)


def named_ids(inputs: Mapping[str, Any], name: str | None) -> str | None:
    """The input with the token ids: `name`, one of a usual name, or the only one of integers."""
    if name is not None:
        return _checked(inputs, name, "token_ids")
    whole = [
        key
        for key, x in inputs.items()
        if len(getattr(x, "shape", ())) == 2
        and "int" in keras.backend.standardize_dtype(x.dtype)
        and not marks_padding(key)
    ]
    usual = [key for key in whole if key in _IDS] or [key for key in whole if "token_ids" in key]
    names = usual or whole
    if len(names) > 1:
        raise ValueError(
            f"Cannot tell which input holds the token ids: {names}. Name it, for example "
            f"token_ids={names[0]!r}."
        )
    return names[0] if names else None


def named_padding(inputs: Mapping[str, Any], name: str | None, ids: str | None) -> str | None:
    """The input that is true at real tokens: `name`, or one that is named so."""
    if name is not None:
        return _checked(inputs, name, "padding")
    names = padding_inputs(inputs)
    if len(names) > 1:  # `decoder_padding_mask` belongs to `decoder_token_ids`
        names = [key for key in names if ids and key == ids.replace("token_ids", "padding_mask")]
        if not names:
            raise ValueError(
                "Cannot tell which input marks padding: several have such a name. Name it in "
                f"`padding`. Received: {sorted(inputs)}."
            )
    return names[0] if names else None


def _checked(inputs: Mapping[str, Any], name: str, argument: str) -> str:
    if name not in inputs:
        raise ValueError(
            f"`{argument}` must be the name of an input, one of {sorted(inputs)}, or an array. "
            f"Received: {name!r}."
        )
    return name


def as_array(values: Any, name: str, texts: int) -> np.ndarray:
    """`values` in NumPy; raises unless they are `(texts, length)`."""
    if name == "token_ids":
        check_ids(name, values)
    array = ops.convert_to_numpy(masks.as_tensor(values))
    if array.ndim != 2 or len(array) != texts:
        raise ValueError(
            f"`{name}` must have the shape (batch, length), with {texts} texts in this batch. "
            f"Received: shape {array.shape}."
        )
    return array


def listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def counted(texts: int) -> str:
    """ "1 text", "1,000 texts"."""
    return f"{texts:,} text{'s' * (texts != 1)}"
