"""The command that looks for leaks: leaks."""

import pathlib
from collections.abc import Mapping
from typing import Any

import click
import numpy as np

from keras_headmask.cli import files
from keras_headmask.cli.frame import (
    AT_LEAST_ONE,
    FOUND,
    Answer,
    command,
    inputs_option,
    progress,
    unsafe_option,
)
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.words import in_one_line

# What imports Keras is imported inside the commands, so that `--help` and errors come at once.


@command
@click.argument("model")
@click.option(
    "--rule",
    metavar="RULE",
    help="What outputs may depend on: queries are output positions, keys are input positions. By "
    "default what MODEL's attention allows, over its layers.",
)
@inputs_option
@click.option("-b", "--batch", type=AT_LEAST_ONE, default=2, help="Examples to make up.")
@click.option("-l", "--length", type=AT_LEAST_ONE, default=16, help="Positions to make up.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=1e-5, show_default=True)
@unsafe_option
def leaks(
    model: str,
    rule: str | None,
    inputs: str | None,
    batch: int,
    length: int,
    tolerance: float,
    unsafe: bool,
) -> Answer:
    """Change what must not matter to MODEL, and see if outputs change.

    MODEL may also be the folder of a SavedModel; it needs --rule and --inputs. Without --inputs,
    random ones are made up. Exit code 1 if something leaks, or nothing could be tried.

    \b
    keras-headmask leaks masked.keras
    keras-headmask leaks served/1 --rule '{"kind": "window", "after": 0}' --inputs inputs.json
    """
    spec = None if rule is None else files.read_rule(rule)
    arrays: Any = files.read_tensors(inputs)
    progress("loading")
    if pathlib.Path(model).is_dir():
        if arrays is None or spec is None:
            raise ValueError(
                f"'{model}' is a folder, and a SavedModel needs --rule and --inputs: it has "
                "no layers to read."
            )
        loaded: Any = model
    else:
        loaded = files.load_model(model, unsafe)
        if arrays is None:
            arrays = _made_up(loaded, spec, batch, length)
    from keras_headmask.heads.leaks import find_leaks

    report = find_leaks(loaded, _as_int32(arrays), spec, tolerance=tolerance)
    text = "\n".join(map(in_one_line, str(report).split("\n")))
    return Answer(text, report.to_json(), FOUND if report or not report.tried else 0)


def _made_up(
    model: Any, spec: MaskSpec | None, batch: int, length: int
) -> Mapping[str, np.ndarray]:
    """Random inputs, with something for the rules of `model` and for `spec` to decide."""
    from keras_headmask.retrofit.made_up import made_up
    from keras_headmask.retrofit.survey import Survey

    survey = Survey(model)
    rules = [*survey.rules.values(), *([] if spec is None else [spec])]
    return made_up(survey, rules, batch, length)


def _as_int32(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Lists of JSON are int64."""
    return {name: x.astype("int32") if x.dtype == "int64" else x for name, x in arrays.items()}
