"""JSON predict requests checked against a signature, in the dialects of TensorFlow Serving and V2.

Stricter than TensorFlow Serving where it accepts a mistake: unknown names, numbers that are not
finite, and a mask of batch 1 beside a batch of 8 (which works there until batching is turned on).
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy then knows bfloat16
import numpy as np

DEFAULT_SIGNATURE = "serving_default"

Arrays = dict[str, np.ndarray]
# What JSON may hold for each kind of dtype; exact classes, since `bool` is an `int` in Python.
_JSON_TYPES: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "iu": ({int}, "integers"),
    "fV": ({int, float}, "numbers"),  # bfloat16 is of kind V
    "O": ({str}, "strings"),
}


class BadRequest(ValueError):
    """The request breaks a rule, which the message names: status 400."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or output of a signature; `None` in `shape` is any size, as `shape` any rank."""

    dtype: str  # as TensorFlow names it: "int32", "bool", "bfloat16", "string"
    shape: tuple[int | None, ...] | None

    @property
    def datatype(self) -> str:
        """The dtype's name in V2."""
        odd = {"string": "BYTES", "bfloat16": "BF16"}
        return odd.get(self.dtype) or self.dtype.upper().replace("FLOAT", "FP")


@dataclasses.dataclass(frozen=True)
class Signature:
    """What can be asked of a model under one name; `call` computes the outputs, by name."""

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    call: Callable[[Arrays], Arrays] = dict


@dataclasses.dataclass(frozen=True)
class Predict:
    """A request that fits its signature."""

    signature: Signature
    arrays: Arrays  # by input
    rows: int | None = None  # how many `instances`; None for whole tensors
    outputs: list[str] | None = None  # the ones asked for; None for all

    def answer(self) -> Arrays:
        found = self.signature.call(self.arrays)
        return {name: found[name] for name in self.outputs or self.signature.outputs}


# --- TensorFlow Serving's dialect ---------------------------------------------------------------


def read_v1(body: Any, signatures: Mapping[str, Signature]) -> Predict:
    """The request in `body`, parsed JSON: `instances` (by row) or `inputs` (by column).

    Raises:
        BadRequest: `body` breaks a rule.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"The request must be a JSON object. Received: {_shown(body)}.")
    if unknown := sorted(body.keys() - {"instances", "inputs", "signature_name"}):
        raise BadRequest(
            "The request may hold `signature_name` and either `instances` or `inputs`. Received "
            f"also: {unknown}."
        )
    if ("instances" in body) == ("inputs" in body):
        raise BadRequest(
            "The request must hold either `instances` (a list of rows) or `inputs` (whole "
            f"tensors), not {'both' if 'inputs' in body else 'neither'}."
        )
    signature = _signature(signatures, body.get("signature_name", DEFAULT_SIGNATURE))
    given, rows = body.get("inputs"), None
    if "instances" in body:
        given = body["instances"]
        if not isinstance(given, list) or not given:
            raise BadRequest(
                f"`instances` must be a list of at least one row. Received: {_shown(given)}."
            )
        rows = len(given)
        if any(isinstance(row, dict) for row in given):
            for i, row in enumerate(given):
                _check_names(row, signature, f"`instances[{i}]`")
            given = {name: [row[name] for row in given] for name in signature.inputs}
    if not isinstance(given, dict):
        if len(signature.inputs) != 1:
            raise BadRequest(
                f"The request must give inputs by name, since `{signature.name}` has "
                f"{len(signature.inputs)}: {sorted(signature.inputs)}."
            )
        given = dict.fromkeys(signature.inputs, given)
    _check_names(given, signature)
    return _predict(signature, {name: _elements(name, x) for name, x in given.items()}, rows)


def write_v1(predict: Predict, outputs: Arrays) -> dict[str, Any]:
    """The answer to `predict`; a single output has no name.

    Raises:
        BadRequest: rows were asked for, and an output has none.
    """
    outputs = {name: _plain(array) for name, array in outputs.items()}
    for name, array in outputs.items():
        if predict.rows is not None and array.shape[:1] != (predict.rows,):
            raise BadRequest(
                f"Output `{name}` has shape {array.shape}, not one entry for each of the "
                f"{predict.rows} `instances`. Ask with `inputs`."
            )
    lists: Any = {name: array.tolist() for name, array in outputs.items()}
    if len(lists) == 1:
        (lists,) = lists.values()
    elif predict.rows is not None:
        rows = zip(*lists.values(), strict=True)
        lists = [dict(zip(outputs, row, strict=True)) for row in rows]
    return {"outputs" if predict.rows is None else "predictions": lists}


# --- V2 -----------------------------------------------------------------------------------------


def read_v2(request: Any, signatures: Mapping[str, Signature]) -> Predict:
    """A `kserve.InferRequest`, whose `parameters` may hold `signature_name`.

    Raises:
        BadRequest: it breaks a rule.
    """
    parameters = request.parameters or {}
    signature = _signature(signatures, parameters.get("signature_name", DEFAULT_SIGNATURE))
    given = {tensor.name: tensor for tensor in request.inputs}
    if len(given) < len(request.inputs):
        names = [tensor.name for tensor in request.inputs]
        raise BadRequest(f"Each input must have a name of its own. Received: {names}")
    _check_names(given, signature)
    values = {}
    for name, tensor in given.items():
        datatype, shape = signature.inputs[name].datatype, tuple(tensor.shape)
        if tensor.datatype != datatype:
            raise BadRequest(
                f"Input `{name}` must have datatype {datatype}. Received: {tensor.datatype}."
            )
        if not all(0 <= size < 2**31 for size in shape):
            raise BadRequest(f"Input `{name}`: sizes must lie in [0, 2**31). Received: {shape}.")
        elements = _elements(name, tensor.data)
        if elements.size != math.prod(shape):
            raise BadRequest(
                f"Input `{name}` of shape {shape} must hold {math.prod(shape)} elements. "
                f"Received: {elements.size}."
            )
        values[name] = elements.reshape(shape)
    outputs = [output.name for output in request.request_outputs or ()]
    if unknown := sorted(set(outputs) - signature.outputs.keys()):
        raise BadRequest(
            f"`outputs` must be among {sorted(signature.outputs)}. Received also: {unknown}."
        )
    return _predict(signature, values, outputs=outputs)


def write_v2(array: np.ndarray) -> tuple[np.ndarray, str]:
    """`array` and its V2 datatype, in a form that JSON can write: V2 has no float16 in JSON."""
    array = _plain(array)
    array = array.astype("float32") if array.dtype == "float16" else array
    return array, Tensor("string" if array.dtype.kind == "O" else array.dtype.name, None).datatype


# --- Rules that both share ------------------------------------------------------------------------


def _signature(signatures: Mapping[str, Signature], name: Any) -> Signature:
    if not isinstance(name, str) or name not in signatures:
        raise BadRequest(
            f"`signature_name` must be one of {sorted(signatures)}; it is '{DEFAULT_SIGNATURE}' "
            f"where none is named. Received: {_shown(name)}."
        )
    return signatures[name]


def _check_names(given: Any, signature: Signature, where: str = "The request") -> None:
    if not isinstance(given, dict):
        raise BadRequest(f"{where} must be an object of inputs by name. Received: {_shown(given)}.")
    wanted = signature.inputs.keys()
    lacks = {"missing": wanted - given.keys(), "unknown": given.keys() - wanted}
    if wrong := [f"{sorted(names)} {what}" for what, names in lacks.items() if names]:
        raise BadRequest(
            f"{where} must hold the inputs of `{signature.name}`, {sorted(wanted)}: "
            f"{', '.join(wrong)}."
        )


def _elements(name: str, value: Any) -> np.ndarray:
    """Nested lists as an array of Python objects; the lists of each level must have one length."""
    values = np.array(value, dtype=object)
    if lengths := {len(item) for item in values.flat if isinstance(item, list)}:
        raise BadRequest(
            f"Input `{name}` is ragged: rows of {sorted(lengths)[:4]} elements at axis "
            f"{values.ndim}, or beside elements that are not lists. Pad them to one length."
        )
    return values


def _array(name: str, values: np.ndarray, wanted: Tensor) -> np.ndarray:
    """An array of the wanted shape and dtype; nothing is cut off or rounded to infinity."""
    if wanted.shape is not None and not (
        values.ndim == len(wanted.shape)
        and all(want in (None, size) for want, size in zip(wanted.shape, values.shape, strict=True))
    ):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted.shape)
        raise BadRequest(
            f"Input `{name}` must have rank {len(wanted.shape)}, shape ({sizes}). "
            f"Received: {values.shape}."
        )
    dtype = np.dtype("O" if wanted.dtype == "string" else wanted.dtype)
    allowed, words = next(types for kinds, types in _JSON_TYPES.items() if dtype.kind in kinds)
    rule = f"Input `{name}` is {wanted.dtype}: its elements must"
    if set(map(type, values.flat)) - allowed:
        found = next(item for item in values.flat if type(item) not in allowed)
        raise BadRequest(f"{rule} be {words}. Received: {_shown(found)}.")
    if words == "integers" and values.size:
        least, most, limits = values.min(), values.max(), np.iinfo(dtype)
        if not limits.min <= least <= most <= limits.max:
            raise BadRequest(
                f"{rule} lie in [{limits.min}, {limits.max}]. Received: {least} to {most}."
            )
    if words == "strings":
        return np.vectorize(str.encode, otypes=[object])(values)
    if words == "numbers":
        try:
            with np.errstate(over="ignore"):
                values = values.astype("float64").astype(dtype)
        except OverflowError:  # an integer of hundreds of digits
            values = np.array(np.inf)
        if not np.isfinite(values.astype("float64")).all():
            raise BadRequest(f"{rule} be finite in {wanted.dtype}.")
    return values.astype(dtype)


def _predict(
    signature: Signature, values: Arrays, rows: int | None = None, outputs: list[str] | None = None
) -> Predict:
    """Inputs whose batch is open must agree on it, or the server could not batch the request."""
    inputs = signature.inputs
    arrays = {name: _array(name, x, inputs[name]) for name, x in values.items()}
    sizes = {
        name: array.shape[0]
        for name, array in arrays.items()
        if array.ndim and (inputs[name].shape or (None,))[0] is None
    }
    if len(set(sizes.values())) > 1:
        raise BadRequest(
            "All inputs must have the same batch size, a mask too: one that broadcasts fails as "
            f"soon as requests are batched. Received: {sizes}."
        )
    if 0 in sizes.values():
        raise BadRequest("The batch must hold at least one row. Received: 0.")
    return Predict(signature, arrays, rows, outputs)


def _plain(array: Any) -> np.ndarray:
    """`array` in a dtype that JSON can write."""
    array = np.asarray(array)
    if array.dtype.kind == "V":  # bfloat16
        return array.astype("float32")
    if array.dtype.kind == "O":  # bytes
        return np.vectorize(lambda item: item.decode(errors="replace"), otypes=[object])(array)
    return array


def _shown(value: Any) -> str:
    """A value from JSON in a few words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:40]
