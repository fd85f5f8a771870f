"""Requests, and what an export answers to them in a process without this package."""

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.export import fresh_process
from keras_headmask.export.signature import Signature
from keras_headmask.retrofit.made_up import Arrays, made_up

# (batch, length) of made-up requests: short, odd, and longer than a tile.
_SHAPES = ((1, 9), (3, 40), (2, 272))
# How far rounding may move outputs, as `distance` measures it.
_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
_LARGE = 1e4  # from here on an output's element is compared with itself alone


class Case(NamedTuple):
    """A request, and what the model in memory answers."""

    request: Arrays
    answer: Arrays


def cases(signature: Signature, check: Any) -> list[Case]:
    """Made-up requests for `check=True`, else those of `check`, each with its answer."""
    if check is True:
        return _made_up_cases(signature)
    items = [check] if isinstance(check, Mapping) else check
    if isinstance(items, (str, bool)) or not isinstance(items, Iterable):
        raise TypeError(
            f"`check` must be True, False, a dict of arrays by input name, or a list of such "
            f"dicts. Received: {check!r}."
        )
    requests = [_request(signature, item) for item in items]
    if not requests:
        raise ValueError(
            "`check` holds no request. Pass some, True for made-up ones, or False for no check."
        )
    return [Case(request, _answer(signature, request)) for request in requests]


def _made_up_cases(signature: Signature) -> list[Case]:
    survey, found = signature.survey, []
    longest = survey.longest_sequence or max(length for _, length in _SHAPES)
    for batch, length in _SHAPES:
        length = min(length, longest)
        while True:
            rules = survey.rules.values()
            request = made_up(survey, rules, batch, length, signature.inputs)
            try:
                found.append(Case(request, _answer(signature, request)))
                break
            except Exception as error:  # a table of positions ends, say
                if length <= 2:
                    raise ValueError(
                        f"The check cannot run the model on made-up inputs: {error} Pass inputs "
                        "that it takes, check=[{name: array, ...}, ...], or check=False."
                    ) from error
                longest = length = length // 2
    return found


def _request(signature: Signature, item: Any) -> Arrays:
    names = sorted(signature.inputs)
    if not isinstance(item, Mapping) or sorted(item) != names:
        received = sorted(item) if isinstance(item, Mapping) else repr(item)
        raise ValueError(
            f"`check` must hold dicts of arrays for the inputs {names}. Received: {received}."
        )
    request = {}
    for name, x in signature.inputs.items():
        array = np.asarray(item[name])
        if array.dtype.kind in "UO" and all(isinstance(text, (str, bytes)) for text in array.flat):
            texts = [text.encode() if isinstance(text, str) else text for text in array.flat]
            array = np.array(texts, "S").reshape(array.shape)
        dtype = {"string": "S", "bfloat16": "float32"}.get(x.dtype, x.dtype)
        sizes_fit = array.ndim == len(x.shape) and all(
            size in (None, have) for size, have in zip(x.shape, array.shape, strict=True)
        )
        is_text = dtype == "S" or array.dtype.kind == "S"
        same_kind = array.dtype.kind == dtype if is_text else np.can_cast(array, dtype, "same_kind")
        if not sizes_fit or not same_kind:
            raise ValueError(
                f"The input {name!r} of `check` must be {x.dtype} of shape {x.shape}. Received: "
                f"{array.dtype} of shape {array.shape}."
            )
        request[name] = array if is_text else array.astype(dtype)
    return request


def _answer(signature: Signature, request: Arrays) -> Arrays:
    """What the model answers, on the CPU like the fresh process."""
    dtypes = {name: x.dtype for name, x in signature.inputs.items()}
    with keras.device("cpu:0"):
        given = {name: ops.convert_to_tensor(x, dtypes[name]) for name, x in request.items()}
        outputs = signature.call(given)
    return {name: fresh_process.plain(ops.convert_to_numpy(x)) for name, x in outputs.items()}


def run_fresh(folder: pathlib.Path, requests: Iterable[Arrays]) -> list[Arrays]:
    """What the SavedModel in `folder` answers in a process of its own, on the CPU."""
    with tempfile.TemporaryDirectory() as place:
        files = f"{place}/requests.npz", f"{place}/answers.npz"
        fresh_process.write(files[0], requests)
        done = subprocess.run(
            [sys.executable, "-P", fresh_process.__file__, str(folder.resolve()), *files],
            capture_output=True,
            text=True,
            cwd=place,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["It died without a word."])[-1]
            raise RuntimeError(
                f"The export was not published: a process without this package could not run it. "
                f"{last}"
            )
        return fresh_process.read(files[1])


def differences(
    signature: Signature, cases: Sequence[Case], served: list[Arrays]
) -> dict[str, float]:
    """By output: how far what is `served` is from the answers of `cases`, at most.

    Raises:
        RuntimeError: where it is farther than rounding.
    """
    dtypes = {layer.compute_dtype for layer in _keras.layers_of(signature.survey.model)}
    tolerance = max(_TOLERANCES.get(dtype, 0.0) for dtype in {"float32", *dtypes})
    largest: dict[str, Any] = {}
    for (request, wanted), got in zip(cases, served, strict=True):
        if got.keys() != wanted.keys():
            raise RuntimeError(
                f"The export was not published: it has the outputs {sorted(got)} where the model "
                f"has {sorted(wanted)}."
            )
        for name, right in wanted.items():
            found = distance(got[name], right), request
            largest[name] = max(largest.get(name, found), found, key=lambda pair: pair[0])
    for name, (apart, request) in largest.items():
        if not apart <= tolerance:
            shapes = (f"{key} {x.dtype}{list(x.shape)}" for key, x in request.items())
            raise RuntimeError(
                f"The export was not published: its output {name!r} differs from the model's by "
                f"up to {apart:.2g} of the largest element ({tolerance:.0e} is rounding), on the "
                f"input {', '.join(shapes)}. Does the model draw random numbers, or read something "
                "that is no input?"
            )
    return {name: apart for name, (apart, _) in largest.items()}


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference; infinite where shapes or what is finite differ.

    Differences of floats are in units of the largest element of `wanted`, at least 1: what rounding
    grows with. Elements from 1e4 on, such as the -1e9 of masked logits, have their own size for a
    unit instead, and so do not widen what the others may differ by.
    """
    if got.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind == "S":
        return 0.0 if (got == wanted).all() else float("inf")
    one, other = got.astype("complex128"), wanted.astype("complex128")
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    size = np.abs(other)
    largest = size[size < _LARGE].max(initial=1)
    unit = 1 if wanted.dtype.kind in "biu" else np.where(size < _LARGE, largest, size)
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, np.abs(one - other) / unit)
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0))
