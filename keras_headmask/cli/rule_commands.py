"""The commands on rules: draw, lint, describe, explain."""

import importlib.util
from typing import Any

import click

import keras_headmask as hm
from keras_headmask.cli import read_files
from keras_headmask.cli.frame import (
    AT_LEAST_ONE,
    FOUND,
    Answer,
    command,
    heads_option,
    inputs_option,
    unsafe_option,
)
from keras_headmask.export.versions import written_whole
from keras_headmask.rules.words import in_one_line

# What imports Keras is imported inside the commands, so that `--help` and errors come at once.
_PICTURES = (".png", ".svg", ".pdf")


def _lengths(function: Any) -> Any:
    for option in (
        click.option("--query-offset", type=int, default=0, help="Position of the first query."),
        inputs_option,
        heads_option,
        click.option("-k", "--keys", type=int, help="Number of keys; by default that of queries."),
        click.option("-q", "--queries", type=int, help="Number of queries (positions)."),
    ):
        function = option(function)
    return function


@command
@click.argument("rule")
@_lengths
@click.option(
    "--tokens",
    metavar="WORDS",
    help='Labels of the positions: words, a JSON list, or a .json file. A pair "[[...], [...]]" '
    "labels queries and keys.",
)
@click.option("--example", type=int, default=0, help="Which example of a batch to draw.")
@click.option("--tile", "tile_size", type=AT_LEAST_ONE, help="Positions to a side of a tile.")
@click.option(
    "-o", "--output", metavar="FILE", help=f"Draw a picture: a {', '.join(_PICTURES)} file."
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def draw(rule: str, inputs: str | None, output: str | None, force: bool, **given: Any) -> Answer:
    """Draw the mask that RULE makes: 1 may attend, 0 hidden.

    Sequences of more than 64 positions are drawn as tiles: 1 all pairs, + some, 0 none.

    \b
    keras-headmask draw rule.json --tokens "It rained . So what ?" \\
        --inputs '{"token_ids": [5, 6, 9, 7, 3, 9]}'
    keras-headmask draw rule.json --queries 2048 -o rule.png
    """
    if output is not None:
        read_files.check_output(output, _PICTURES, overwrite=force)
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError(
                "Pictures need matplotlib. Install it with `pip install matplotlib`, or leave "
                "out --output for a drawing in text."
            )
    spec = read_files.read_rule(rule)
    mask_inputs = read_files.read_tensors(inputs) or {}
    if missing := sorted(spec.inputs.keys() - mask_inputs.keys()):
        received = f" Received: {', '.join(mask_inputs)}." if mask_inputs else ""
        raise ValueError(
            f"RULE reads {', '.join(missing)}: pass it by --inputs "
            f"'{{\"{missing[0]}\": [...]}}', or a .json file of that.{received}"
        )
    given |= {"mask_inputs": mask_inputs, "tokens": read_files.read_tokens(given["tokens"])}
    from keras_headmask.look import drawing, panels, plotting

    try:
        drawn = panels.panels_of(spec, **given, called="hm.draw" if output is None else "hm.plot")
    except ValueError as error:
        message = str(error).replace("`tokens`", "`--tokens`")
        pair = "(query_tokens, key_tokens)"
        raise ValueError(message.replace(pair, '"[[...], [...]]"')) from error
    if output is None:
        text = drawing.text_of(drawn)
    else:
        figure = plotting.masks_figure(spec, drawn)
        with written_whole(output) as file:
            figure.savefig(file)
        text = f"Wrote {in_one_line(output)}"
    rows = [["".join(row) for row in drawing.SIGNS[x.cells]] for x in drawn.panels]
    shown = [{"heads": x.heads, "rows": y} for x, y in zip(drawn.panels, rows, strict=True)]
    data = {"heads": drawn.num_heads, "tile": drawn.tile, "panels": shown, "file": output}
    return Answer(text, data)


@command
@click.argument("rule", required=False)
@click.option("--model", metavar="MODEL", help="Check the rules of a model, or RULE in it.")
@_lengths
@click.option("--strict", is_flag=True, help="Fail on warnings, too.")
@unsafe_option
def lint(rule: str | None, model: str | None, strict: bool, unsafe: bool, **given: Any) -> Answer:
    """Say what is likely wrong with RULE or with a model's rules.

    --model MODEL alone checks the rules in that model; with RULE it checks RULE in that model.

    Exit code 1 if there is an error, with --strict also if there is a warning.

    \b
    keras-headmask lint rule.json --heads 12
    keras-headmask lint rule.json --inputs examples.json --strict
    keras-headmask lint --model masked.keras
    keras-headmask lint rule.json --model model.keras
    """
    subject: Any
    if model is not None:
        rules = None if rule is None else read_files.read_json(rule)
        subject = read_files.load_model(model, unsafe)
        if rules is not None:
            subject = hm.apply_head_masks(subject, rules, None, "replace", False, add_inputs=True)
    elif rule is not None:
        subject = read_files.read_rule(rule)
    else:
        raise click.UsageError("Give a RULE, or --model MODEL.")
    findings = hm.lint(subject, mask_inputs=read_files.read_tensors(given.pop("inputs")), **given)
    severities = ("error", "warning") if strict else ("error",)
    code = FOUND if any(finding.severity in severities for finding in findings) else 0
    return Answer(str(findings), {"findings": list(findings)}, code)


@command
@click.argument("rule")
@heads_option
def describe(rule: str, num_heads: int | None) -> Answer:
    """Say RULE in plain English.

    \b
    keras-headmask describe rule.json --heads 12
    echo '{"kind": "window", "after": 0}' | keras-headmask describe -
    """
    spec = read_files.read_rule(rule)
    words = spec.describe(num_heads)
    data = {"words": words, "mask_inputs": sorted(spec.inputs), "rule": spec}
    return Answer(in_one_line(words), data)


@command
@click.argument("rule", required=False)
@click.option("-q", "--queries", type=AT_LEAST_ONE, help="Number of queries; else not known.")
@click.option("-k", "--keys", type=AT_LEAST_ONE, help="Number of keys; by default that of queries.")
@click.option("--batch", type=AT_LEAST_ONE, help="Number of examples; else not known.")
@click.option("--head-dim", type=AT_LEAST_ONE, help="Size of a head; 64 by default.")
@click.option("--model", metavar="MODEL", help="A .keras file, in place of RULE.")
@heads_option
@unsafe_option
def explain(rule: Any, model: str | None, unsafe: bool, **given: Any) -> Answer:
    """Say which code computes attention under RULE, and why.

    --model MODEL says it of each attention layer of a model, on lengths that --queries gives.

    \b
    keras-headmask explain rule.json --queries 4096 --heads 16
    keras-headmask explain --model masked.keras
    """
    if (rule is None) == (model is None):
        raise click.UsageError("Give a RULE, or --model MODEL.")
    subject = read_files.read_rule(rule) if model is None else read_files.load_model(model, unsafe)
    explanation = hm.explain(subject, **given)
    return Answer(str(explanation), explanation)
