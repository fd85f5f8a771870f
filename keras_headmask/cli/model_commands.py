"""The commands on models: info, apply, export."""

import contextlib
import re
from typing import Any

import click

from keras_headmask.cli import files
from keras_headmask.cli.frame import Answer, CheckFailed, command, progress, unsafe_option
from keras_headmask.export.versions import written_whole
from keras_headmask.export.warmup import check_installed
from keras_headmask.rules.words import in_one_line

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
    `apply` names them.

    \b
    keras-headmask info masked.keras
    """
    saved_by = files.saved_by(model)
    loaded = files.load_model(model, unsafe)
    from keras_headmask.cli import model_info

    found = model_info.information(loaded)
    source = in_one_line(f"{model}, saved by Keras {saved_by}")
    text = f"{source}: {model_info.as_text(found)}"
    return Answer(text, {"file": model, "saved_by_keras": saved_by, **found})


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
def apply(
    model: str,
    rule: str,
    output: str,
    layers: tuple[str, ...],
    force: bool,
    unsafe: bool,
    **options: Any,
) -> Answer:
    """Write MODEL under RULE to a new .keras file.

    RULE may also be an object of rules by layers: {"0-3": {...}, "decoder.*cross": {...}}.

    \b
    keras-headmask apply model.keras rule.json -o masked.keras
    keras-headmask apply model.keras rule.json --layers 0-3 -o masked.keras
    """
    files.check_output(output, (".keras",), overwrite=force)
    files.saved_by(model)
    rules = files.read_rules(rule)
    from keras_headmask.cli import model_info
    from keras_headmask.retrofit.apply import apply_head_masks

    progress("loading")
    loaded = files.load_model(model, unsafe)
    progress("applying")
    try:
        masked = apply_head_masks(loaded, rules, layers or None, copy=False, **options)
    except ValueError as error:  # in the words of the command
        raise ValueError(re.sub(r"existing='(\w+)'", r"--existing \1", str(error))) from error
    progress("writing")
    with written_whole(output) as file:
        masked.save(file)
    found = model_info.information(masked)
    text = f"Wrote {in_one_line(output)}: {model_info.as_text(found)}"
    return Answer(text, {"file": output, **found})


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
    files.saved_by(model)
    files.import_keras()
    import keras

    from keras_headmask.attention.attend import dense_scope
    from keras_headmask.export.saved_model import export_saved_model

    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Only the TensorFlow backend exports, and this process runs on {backend}: set "
            "KERAS_BACKEND=tensorflow."
        )
    progress("loading")
    loaded = files.load_model(model, unsafe)
    progress("exporting")
    try:
        with dense_scope() if dense else contextlib.nullcontext():
            report = export_saved_model(loaded, base, **options)
    except RuntimeError as error:  # what the check found
        raise CheckFailed(str(error)) from error
    return Answer(str(report), report)
