"""JSON predict requests checked against a signature, in the dialects of TensorFlow Serving and V2.

Stricter than TensorFlow Serving where it lets a mistake pass: unknown names, numbers that are not
finite, and a mask of batch 1 beside a batch of 8 (which works there until batching is turned on).
"""

import dataclasses
import itertools
import math

import numpy as np

DEFAULT_SIGNATURE = "serving_default"

# What JSON may hold for a dtype of each kind; exact classes, for `bool` is an `int` in Python.
_JSON_TYPES = {
    "b": ({bool}, "true or false"),
    "i": ({int}, "integers"),
    "u": ({int}, "integers"),
    "f": ({int, float}, "numbers"),
    "S": ({str}, "strings"),
}
_V2_DATATYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "string": "BYTES",
}


class BadRequest(ValueError):
    """The request breaks a rule, which the message names: status 400."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or output of a signature; `None` in `shape` is any size, as `shape` any rank."""

    dtype: str  # as TensorFlow names it: "int32", "bool", "bfloat16", "string"
    shape: tuple | None

    @property
    def datatype(self):
        """The dtype's name in V2."""
        return _V2_DATATYPES.get(self.dtype, self.dtype.upper())


@dataclasses.dataclass(frozen=True)
class Signature:
    """What can be asked of a model under one name; `call` maps arrays by name to arrays by name."""

    name: str
    inputs: dict
    outputs: dict
    call: object = None


@dataclasses.dataclass(frozen=True)
class Predict:
    """A request that holds what its signature wants: NumPy arrays by input name."""

    signature: Signature
    arrays: dict
    rows: int | None = None  # how many `instances`; None where whole tensors were given


# --- TensorFlow Serving's dialect ---------------------------------------------------------------


def read_v1(body, signatures):
    """The request in `body`, parsed JSON: `instances` (by row) or `inputs` (by column).

    Raises:
        BadRequest: `body` breaks a rule.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"The request must be a JSON object. Received: {_kind(body)}.")
    if unknown := sorted(body.keys() - {"instances", "inputs", "signature_name"}):
        raise BadRequest(
            f"The request may hold `signature_name` and either `instances` or `inputs`. Received "
            f"also: {unknown}."
        )
    if ("instances" in body) == ("inputs" in body):
        raise BadRequest(
            "The request must hold either `instances` (a list of rows) or `inputs` (whole "
            f"tensors), not {'both' if 'inputs' in body else 'neither'}."
        )
    signature = _signature(signatures, body.get("signature_name", DEFAULT_SIGNATURE))
    rows = None
    if "instances" in body:
        columns = _columns(body["instances"], signature)
        rows = len(body["instances"])
    else:
        columns = body["inputs"]
    if not isinstance(columns, dict):
        columns = {_only_input(signature, "`inputs`"): columns}
    _check_names(columns, signature)
    return _predict(
        signature,
        {name: _array(name, value, signature.inputs[name]) for name, value in columns.items()},
        rows,
    )


def write_v1(predict, outputs):
    """The answer to `predict`; one output alone stands without its name.

    Raises:
        BadRequest: rows were asked for, and an output has none.
    """
    outputs = {name: _plain(array) for name, array in outputs.items()}
    if predict.rows is None:
        columns = {name: array.tolist() for name, array in outputs.items()}
        return {"outputs": columns if len(columns) > 1 else next(iter(columns.values()))}
    for name, array in outputs.items():
        if not array.ndim or array.shape[0] != predict.rows:
            raise BadRequest(
                f"Output `{name}` has shape {array.shape}, which is not one entry for each of the "
                f"{predict.rows} `instances`. Ask with `inputs`."
            )
    if len(outputs) == 1:
        return {"predictions": next(iter(outputs.values())).tolist()}
    lists = zip(*(array.tolist() for array in outputs.values()), strict=True)
    return {"predictions": [dict(zip(outputs, row, strict=True)) for row in lists]}


def _columns(instances, signature):
    """`instances` turned into one list for each name."""
    if not isinstance(instances, list) or not instances:
        raise BadRequest(
            f"`instances` must be a list of at least one row. Received: {_kind(instances)}."
        )
    if not any(isinstance(row, dict) for row in instances):
        return {_only_input(signature, "Each of `instances`"): instances}
    for i, row in enumerate(instances):
        if not isinstance(row, dict):
            raise BadRequest(
                f"`instances[{i}]` must be an object of inputs by name. Received: {_kind(row)}."
            )
        _check_names(row, signature, f"`instances[{i}]`")
    return {name: [row[name] for row in instances] for name in signature.inputs}


def _only_input(signature, what):
    if len(signature.inputs) != 1:
        raise BadRequest(
            f"{what} must be an object of inputs by name, since `{signature.name}` has "
            f"{len(signature.inputs)}: {sorted(signature.inputs)}."
        )
    return next(iter(signature.inputs))


# --- V2 -----------------------------------------------------------------------------------------


def read_v2(inputs, parameters, signatures):
    """The request in `inputs`, each with `name`, `datatype`, `shape` and `data` (flat or nested).

    `parameters` may hold `signature_name`.

    Raises:
        BadRequest: they break a rule.
    """
    signature = _signature(signatures, (parameters or {}).get("signature_name", DEFAULT_SIGNATURE))
    given = {tensor.name: tensor for tensor in inputs}
    if len(given) < len(inputs):
        raise BadRequest(
            f"Each input must have a name of its own. Received: {[t.name for t in inputs]}"
        )
    _check_names(given, signature)
    arrays = {}
    for name, tensor in given.items():
        wanted = signature.inputs[name]
        if tensor.datatype != wanted.datatype:
            raise BadRequest(
                f"Input `{name}` must have datatype {wanted.datatype}. Received: {tensor.datatype}."
            )
        shape = tuple(tensor.shape)
        if not all(0 <= size < 2**31 for size in shape):
            raise BadRequest(f"Input `{name}`: sizes must lie in [0, 2**31). Received: {shape}.")
        _check_shape(name, shape, wanted)
        flat = _flatten(name, tensor.data)
        if len(flat) != math.prod(shape):
            raise BadRequest(
                f"Input `{name}` of shape {shape} must hold {math.prod(shape)} elements. "
                f"Received: {len(flat)}."
            )
        arrays[name] = _convert(name, flat, wanted).reshape(shape)
    return _predict(signature, arrays)


def asked_outputs(names, signature):
    """`names`, or all outputs where none is named.

    Raises:
        BadRequest: the signature has no such output.
    """
    if unknown := sorted(set(names) - signature.outputs.keys()):
        raise BadRequest(
            f"`outputs` must be among {sorted(signature.outputs)}. Received also: {unknown}."
        )
    return names or list(signature.outputs)


def write_v2(array):
    """`array` and its V2 datatype, in a form that JSON can write: V2 has no float16 in JSON."""
    array = _plain(array)
    array = array.astype("float32") if array.dtype == "float16" else array
    return array, Tensor("string" if array.dtype.kind == "O" else array.dtype.name, None).datatype


def _flatten(name, data):
    """The elements of `data`, a list flat or nested."""
    if not isinstance(data, list):
        raise BadRequest(f"Input `{name}`: `data` must be a list. Received: {_kind(data)}.")
    while list in (kinds := set(map(type, data))):
        if len(kinds) > 1:
            raise BadRequest(f"Input `{name}` is ragged: lists and elements stand side by side.")
        data = list(itertools.chain.from_iterable(data))
    return data


# --- Rules both share -----------------------------------------------------------------------------


def _signature(signatures, name):
    if not isinstance(name, str) or name not in signatures:
        raise BadRequest(
            f"`signature_name` must be one of {sorted(signatures)}. Received: {name!r:.80}"
            + ("" if name != DEFAULT_SIGNATURE else ", which is what is asked where none is named.")
        )
    return signatures[name]


def _check_names(given, signature, where="The request"):
    wanted = signature.inputs.keys()
    lacks = {"missing": wanted - given.keys(), "unknown": given.keys() - wanted}
    if wrong := [f"{sorted(names)} {what}" for what, names in lacks.items() if names]:
        raise BadRequest(
            f"{where} must hold the inputs of `{signature.name}`, {sorted(wanted)}: "
            f"{', '.join(wrong)}."
        )


def _array(name, value, wanted):
    """Nested lists as an array; each level's lists must be of one length."""
    shape, level = [], [value]
    while list in (kinds := set(map(type, level))):
        if len(kinds) > 1:
            raise BadRequest(f"Input `{name}` is ragged: lists and elements stand side by side.")
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise BadRequest(
                f"Input `{name}` is ragged: rows of {sorted(lengths)[:4]} elements at axis "
                f"{len(shape)}. Pad them to one length."
            )
        shape += lengths
        level = list(itertools.chain.from_iterable(level))
    _check_shape(name, tuple(shape), wanted)
    return _convert(name, level, wanted).reshape(shape)


def _check_shape(name, shape, wanted):
    if wanted.shape is None:
        return
    shown = "({})".format(", ".join("any" if n is None else str(n) for n in wanted.shape))
    if len(shape) != len(wanted.shape):
        raise BadRequest(
            f"Input `{name}` must have rank {len(wanted.shape)}, shape {shown}. Received shape: "
            f"{shape}."
        )
    if any(n is not None and n != m for n, m in zip(wanted.shape, shape, strict=True)):
        raise BadRequest(f"Input `{name}` must have shape {shown}. Received: {shape}.")


def _convert(name, flat, wanted):
    """A flat list as an array of the wanted dtype, with nothing cut off or rounded to infinity."""
    dtype = _numpy_dtype(wanted.dtype)
    allowed, words = _JSON_TYPES["f" if dtype.kind == "V" else dtype.kind]
    if strangers := set(map(type, flat)) - allowed:
        found = next(item for item in flat if type(item) in strangers)
        raise BadRequest(
            f"Input `{name}` is {wanted.dtype}: its elements must be {words}. Received: "
            f"{_json(found)}."
        )
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if flat and not bounds.min <= min(flat) <= max(flat) <= bounds.max:
            raise BadRequest(
                f"Input `{name}` is {wanted.dtype}: its elements must lie in "
                f"[{bounds.min}, {bounds.max}]. Received: {min(flat)} to {max(flat)}."
            )
    if dtype.kind == "S":
        return np.array([item.encode() for item in flat], dtype=object)
    if allowed == {int, float}:
        try:
            wide = np.array(flat, "float64")
        except OverflowError:  # an integer of hundreds of digits
            wide = np.array([np.inf])
        with np.errstate(over="ignore"):
            array = wide.astype(dtype)
        if not np.isfinite(array.astype("float64")).all():
            raise BadRequest(f"Input `{name}`: its elements must be finite in {wanted.dtype}.")
        return array
    return np.array(flat, dtype)


def _predict(signature, arrays, rows=None):
    """Inputs whose batch is open must agree on it, or the server could not batch the request."""
    sizes = {
        name: array.shape[0]
        for name, array in arrays.items()
        if array.ndim and (signature.inputs[name].shape or (None,))[0] is None
    }
    if len(set(sizes.values())) > 1:
        raise BadRequest(
            f"All inputs must have the same batch size, a mask too: one that broadcasts fails as "
            f"soon as requests are batched. Received: {sizes}."
        )
    if 0 in sizes.values():
        raise BadRequest("The batch must hold at least one row. Received: 0.")
    return Predict(signature, arrays, rows)


def _numpy_dtype(name):
    if name == "string":
        return np.dtype("S")
    if name == "bfloat16":
        import ml_dtypes  # which TensorFlow brings

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _plain(array):
    """`array` in a dtype that JSON can write."""
    array = np.asarray(array)
    if array.dtype.kind == "V":  # bfloat16
        return array.astype("float32")
    if array.dtype.kind == "O":  # bytes
        return np.vectorize(lambda item: item.decode(errors="replace"), otypes=[object])(array)
    return array


def _kind(value):
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _json(value):
    names = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool) or value is None:
        return names[value]
    return _kind(value) if isinstance(value, dict | list) else f"{value!r:.40}"
