"""The commands on models: info, apply, export, leaks."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

import keras_headmask as hm
from keras_headmask.cli import read_files
from keras_headmask.cli.frame import (
    AT_LEAST_ONE,
    FOUND,
    Answer,
    CheckFailed,
    command,
    inputs_option,
    progress,
    unsafe_option,
)
from keras_headmask.export.report import installed_versions
from keras_headmask.export.tf_serving import check_installed
from keras_headmask.export.versions import written_whole
from keras_headmask.rules import words
from keras_headmask.rules.words import aligned, in_one_line

if TYPE_CHECKING:
    import keras

# What imports Keras is imported inside the commands, so that `--help` and errors come at once.


class _Pair(click.ParamType):
    name = "BATCHxLENGTH"

    def convert(self, value: Any, parameter: Any, context: Any) -> tuple[int, int]:
        try:
            batch, length = (int(size) for size in str(value).lower().split("x"))
        except ValueError:
            self.fail(f"{value!r} is not a pair such as 8x128.", parameter, context)
        return batch, length


@command
@click.argument("model")
@unsafe_option
def info(model: str, unsafe: bool) -> Answer:
    """List the attention layers in MODEL and their rules.

    Rules are given in words, with the inputs that they read. Layers are numbered as --layers of
    `apply` names them. The last line says whether TensorFlow computes by oneDNN here.

    \b
    keras-headmask info masked.keras
    """
    saved_by = read_files.saved_by(model)
    facts = information(read_files.load_model(model, unsafe))
    from keras_headmask.look import cpu

    text = in_one_line(f"{model}, saved by Keras {saved_by}") + f": {as_text(facts)}"
    if one_dnn := cpu.one_dnn():
        text += f"\n{one_dnn}"
    facts["onednn"] = one_dnn and dataclasses.asdict(one_dnn)
    return Answer(text, {"file": model, "saved_by_keras": saved_by, **facts})


@command
@click.argument("model")
@click.argument("rule")
@click.option("-o", "--output", required=True, metavar="OUT.keras", help="The file to write.")
@click.option(
    "--layers",
    multiple=True,
    metavar="SELECTOR",
    help='Which attention layers: "2", "0-3", or a regex on their paths; repeatable. All '
    "self-attention by default.",
)
@click.option(
    "--existing",
    type=click.Choice(["error", "and", "replace"]),
    default="error",
    help="What to do where a layer has a rule already.",
)
@click.option(
    "--add-inputs", is_flag=True, help="Add what RULE reads and MODEL lacks as new inputs."
)
@click.option("--force", is_flag=True, help="Overwrite OUT.keras.")
@unsafe_option
def apply(model: str, rule: str, output: str, force: bool, unsafe: bool, **given: Any) -> Answer:
    """Write MODEL under RULE to a new .keras file.

    RULE may also be an object of rules by layers: {"0-3": {...}, "decoder.*cross": {...}}.

    \b
    keras-headmask apply model.keras rule.json -o masked.keras
    keras-headmask apply model.keras rule.json --layers 0-3 -o masked.keras
    """
    read_files.check_output(output, (".keras",), overwrite=force)
    read_files.saved_by(model)
    rules = read_files.read_json(rule)
    progress("loading")
    loaded = read_files.load_model(model, unsafe)
    progress("applying")
    layers = given.pop("layers") or None
    try:
        masked = hm.apply_head_masks(loaded, rules, layers, copy=False, **given)
    except ValueError as error:  # in the words of the command
        raise ValueError(re.sub(r"existing='(\w+)'", r"`--existing=\1`", str(error))) from error
    progress("writing")
    with written_whole(output) as file:
        masked.save(file)
    facts = information(masked)
    return Answer(f"Wrote {in_one_line(output)}: {as_text(facts)}", {"file": output, **facts})


@command
@click.argument("model")
@click.argument("base")
@click.option("--version", type=click.IntRange(min=0), help="By default the next free number.")
@click.option(
    "--no-padded", "padded", flag_value=False, default=True, help="Leave serve_padded out."
)
@click.option("--scores", is_flag=True, help="Add serve_scores, the attention of each layer.")
@click.option(
    "--xla", "xla_buckets", type=_Pair(), multiple=True, help="Add an XLA signature for one shape."
)
@click.option("--warmup", type=_Pair(), multiple=True, help="Add a request to run on loading.")
@click.option("--precision", type=click.Choice(["float16", "bfloat16"]), help="Compute so.")
@click.option("--dense", is_flag=True, help="A graph without loops, as OpenVINO needs it.")
@click.option(
    "--no-check", "check", flag_value=False, default=True, help="Do not try it in a fresh process."
)
@unsafe_option
def export(model: str, base: str, dense: bool, unsafe: bool, **options: Any) -> Answer:
    """Write MODEL as a SavedModel, and check it.

    BASE/<version>/ is for TensorFlow Serving and other servers. Exit code 1 if the check fails;
    nothing is published then.

    \b
    keras-headmask export masked.keras saved_models/bert
    keras-headmask export masked.keras saved_models/bert --xla 8x128 --scores
    """
    if options["warmup"]:
        check_installed()
    read_files.saved_by(model)
    hm.register_all()
    import keras

    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Only the TensorFlow backend exports, and this process runs on {backend}: set "
            "KERAS_BACKEND=tensorflow."
        )
    progress("loading")
    loaded = read_files.load_model(model, unsafe)
    progress("exporting")
    try:
        with hm.dense_scope() if dense else contextlib.nullcontext():
            report = hm.export_saved_model(loaded, base, **options)
    except RuntimeError as error:  # what the check found
        raise CheckFailed(str(error)) from error
    return Answer(str(report), report)


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
    spec = None if rule is None else read_files.read_rule(rule)
    arrays: Any = read_files.read_tensors(inputs)
    progress("loading")
    if pathlib.Path(model).is_dir():
        if arrays is None or spec is None:
            raise ValueError(
                f"'{model}' is a folder, and a SavedModel needs --rule and --inputs: it has "
                "no layers to read."
            )
        loaded: Any = model
    else:
        loaded = read_files.load_model(model, unsafe)
        if arrays is None:  # random, with something for the rules to decide
            from keras_headmask.retrofit.made_up import made_up
            from keras_headmask.retrofit.survey import Survey

            survey = Survey(loaded)
            rules = [*survey.rules.values(), *([] if spec is None else [spec])]
            arrays = made_up(survey, rules, batch, length)
    from keras_headmask.heads.leaks import find_leaks

    # (Lists of JSON are int64.)
    arrays = {k: x.astype("int32") if x.dtype == "int64" else x for k, x in arrays.items()}
    report = find_leaks(loaded, arrays, spec, tolerance=tolerance)
    text = "\n".join(map(in_one_line, str(report).split("\n")))
    return Answer(text, report.to_json(), FOUND if report or not report.tried else 0)


# --- What a model holds ---------------------------------------------------------------------------


def information(model: "keras.Model") -> dict[str, Any]:
    """The attention layers of `model`, their heads and rules, as JSON has them."""
    from keras_headmask.retrofit.survey import Survey

    survey, layers = Survey(model), []
    for number, entry in survey.numbered():
        heads, spec = entry.num_heads, survey.rules.get(entry.path)
        layers.append(
            {
                "number": number,
                "reachable": entry in survey.known,
                "path": entry.path,
                "class": type(entry.layer).__name__,
                "heads": heads,
                "kind": entry.kind,
                "rule": spec,
                "words": None if spec is None else spec.describe(heads),
                "mask_inputs": [] if spec is None else sorted(spec.inputs),
            }
        )
    inputs = getattr(model, "inputs", None) or ()
    return {
        "name": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else None,
        "inputs": [{"name": x.name, "dtype": x.dtype, "shape": list(x.shape)} for x in inputs],
        "attention": layers,
        "versions": installed_versions(),
    }


def as_text(info: Mapping[str, Any]) -> str:
    """`information` in lines for a reader."""
    size = "" if info["parameters"] is None else f", {info['parameters']:,} parameters"
    lines = [f"{info['class']} '{info['name']}'{size}"]
    for x in info["inputs"]:
        shape = ", ".join("?" if size is None else str(size) for size in x["shape"])
        lines.append(f"  input {x['name']}: {x['dtype']} ({shape})")
    rows: list[tuple[str, ...]] = []
    by_rule: dict[Any, list[dict[str, Any]]] = {}
    for layer in info["attention"]:
        number = "-" if layer["number"] is None else str(layer["number"])
        heads = f"{layer['heads'] or '?'} heads"
        reach = "" if layer["reachable"] else "no rule reaches this class"
        path = in_one_line(layer["path"])
        rows.append((number, path, layer["class"], heads, layer["kind"], reach))
        if layer["reachable"]:
            by_rule.setdefault((layer["words"], layer["rule"]), []).append(layer)
    lines += aligned(rows) or ["No attention layers."]
    for layers in by_rule.values():
        numbers = [layer["number"] for layer in layers if layer["number"] is not None]
        names = [words.numbers_in_words(numbers)] if numbers else []
        names += [layer["path"] for layer in layers if layer["number"] is None]
        plural = "s" if len(layers) > 1 else ""
        lines.append(f"Layer{plural} {', '.join(names)}: {layers[0]['words'] or 'no rule'}")
        if layers[0]["mask_inputs"]:
            lines.append(f"  reads {', '.join(layers[0]['mask_inputs'])}")
    lines.append(", ".join(f"{name} {version}" for name, version in info["versions"].items()))
    return "\n".join(map(in_one_line, lines))
