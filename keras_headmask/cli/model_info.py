"""What a model holds in the way of attention: its layers, their heads, their rules in words."""

import contextlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask.retrofit.observing import rules_of
from keras_headmask.retrofit.selectors import AttentionLayer, find_attention
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.terminal import in_one_line

_PACKAGES = ("keras", "tensorflow", "jax", "torch", "keras-hub", "numpy")


def information(model: keras.Model) -> dict[str, Any]:
    """Everything that `as_text` tells, as plain JSON."""
    found, rules = find_attention(model), rules_of(model)
    layers, number = [], 0
    for entry in (*found.known, *found.unknown):
        counted = entry.kind == "self" and entry in found.known
        told = _layer(entry, rules.get(entry.path))
        layers.append(
            {"number": number if counted else None, "reachable": entry in found.known} | told
        )
        number += counted
    inputs = getattr(model, "inputs", None) or ()
    return {
        "name": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else None,
        "inputs": [{"name": x.name, "dtype": x.dtype, "shape": list(x.shape)} for x in inputs],
        "attention": layers,
        "versions": versions(),
    }


def _layer(entry: AttentionLayer, spec: MaskSpec | None) -> dict[str, Any]:
    heads = getattr(entry.layer, "num_heads", None)
    return {
        "path": entry.path,
        "class": type(entry.layer).__name__,
        "heads": heads,
        "kind": entry.kind,
        "rule": None if spec is None else spec.get_config(),
        "words": None if spec is None else spec.describe(heads),
        "mask_inputs": [] if spec is None else sorted(spec.inputs),
    }


def versions() -> dict[str, str]:
    """Installed versions, this package's first."""
    import keras_headmask

    found = {"keras_headmask": keras_headmask.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def as_text(told: Mapping[str, Any]) -> str:
    """What `information` tells, for a reader."""
    size = "" if told["parameters"] is None else f", {told['parameters']:,} parameters"
    lines = [f"{told['class']} '{told['name']}'{size}"]
    for x in told["inputs"]:
        shape = ", ".join("?" if size is None else str(size) for size in x["shape"])
        lines.append(f"  input {x['name']}: {x['dtype']} ({shape})")
    lines += _table(told["attention"]) or ["No attention layers."]
    for layers in _by_rule(told["attention"]):
        lines.append(f"{_named(layers)}: {layers[0]['words'] or 'no rule'}")
        if layers[0]["mask_inputs"]:
            lines.append(f"  reads {', '.join(layers[0]['mask_inputs'])}")
    lines.append(", ".join(f"{name} {version}" for name, version in told["versions"].items()))
    return "\n".join(map(in_one_line, lines))


def _table(layers: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            "-" if layer["number"] is None else str(layer["number"]),
            in_one_line(layer["path"]),
            layer["class"],
            f"{'?' if layer['heads'] is None else layer['heads']} heads",
            layer["kind"],
            "" if layer["reachable"] else "no rule reaches this class",
        )
        for layer in layers
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def _by_rule(layers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for layer in layers:
        if layer["reachable"]:
            groups.setdefault((layer["words"], str(layer["rule"])), []).append(layer)
    return list(groups.values())


def _named(layers: list[dict[str, Any]]) -> str:
    numbers = [layer["number"] for layer in layers if layer["number"] is not None]
    names = [layer["path"] for layer in layers if layer["number"] is None]
    if numbers:
        names.insert(0, words.numbers_in_words(numbers))
    return f"Layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"
