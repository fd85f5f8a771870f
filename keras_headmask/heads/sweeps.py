"""Metrics of many variants of a model: what they have in common."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_headmask import _keras
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.rule import spec_of
from keras_headmask.retrofit.select import specs_by_layer
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.positions import Keys


def digest(model: keras.Model, entries: Sequence[AttentionLayer], more: Any = None) -> str:
    """Of all that a value depends on, apart from the metric; `more` is plain JSON."""
    specs = [spec_of(entry.layer) for entry in entries]
    rules = [None if spec is None else spec.get_config() for spec in specs]
    parts: list[Any] = [
        (entry.path, entry.num_heads, rule) for entry, rule in zip(entries, rules, strict=True)
    ]
    made = hashlib.sha256(json.dumps(parts if more is None else [*parts, more]).encode())
    for weight in model.weights:
        made.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return made.hexdigest()


def check_metric(metric: Any) -> None:
    if not callable(metric):
        raise TypeError(
            "`metric` must be a function of a model that returns a number, such as `lambda model: "
            f"model.evaluate(x, y)[1]`. Received: {metric!r}."
        )


def variant(
    survey: Survey, entries: Sequence[AttentionLayer], rules: Mapping[str, Any] | None = None
) -> keras.Model:
    """What a metric gets: a copy of the model, with `rules` beside its own, and compiled as it is.

    Each of `entries` gets a rule, one that hides nothing if `rules` has none for it. For a query
    that sees no key, as at padding, stock Keras takes the mean of all values, and attention under a
    rule 0: all variants must agree in that.
    """
    from keras_headmask.retrofit.apply import masked_by  # needs all of retrofit/

    given: dict[str, MaskSpec] = {entry.path: Keys(0) for entry in entries}
    if rules:
        specs = specs_by_layer(rules, None, survey)
        given |= {survey.known[i].path: spec & Keys(0) for i, spec in specs.items()}
    by_layer = {f"^{re.escape(path)}$": spec for path, spec in given.items()}
    made = masked_by(survey, by_layer, existing="and")
    _keras.compile_alike(survey.model, made)
    return made


def finite(value: Any, of: str) -> float:
    """`value` as a number; `of` says of which model it is the metric."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"`metric` must return one finite number. Received for {of}: {_short(value)}. Of a "
            "list or dict, as `model.evaluate` returns, pick one; skip or clip batches of inf and "
            "NaN."
        )
    return number


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    shape = tuple(getattr(value, "shape", ()))
    return (f"shape {shape}, " if shape else "") + (text if len(text) < 80 else f"{text[:77]}...")


def file_of(save_to: Any) -> Path | None:
    """`save_to` as a path; raises unless a file may stand there."""
    if save_to is None:
        return None
    file = Path(save_to)
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(
            "`save_to` must be a file, there or not yet, in a folder that is there. Received: "
            f"{str(save_to)!r}."
        )
    return file


def keep_with(error: BaseException, name: str, result: Any, file: Path | None) -> None:
    """Let an exception that ends a sweep hold what was measured, as `file` does, and say so."""
    vars(error)[name] = result
    where = "." if file is None else f", and in {file}, from which a new call goes on."
    error.add_note(
        f"What was measured before is in the attribute `{name}` of this exception{where}"
    )


def check_own(file: Path | None, saved: float, own: float) -> None:
    """Raise if a saved metric of the model itself is not what it is now."""
    if not math.isclose(saved, own, rel_tol=1e-3, abs_tol=1e-9):
        raise ValueError(
            f"{file} is of another metric, or of other data: there the model's own is {saved}, "
            f"and now {own}. Pass another `save_to`, or delete the file."
        )


def write_whole(file: Path, text: str) -> None:
    """Write a file as a whole, so that an interrupt leaves it as it was."""
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    os.replace(written, file)
