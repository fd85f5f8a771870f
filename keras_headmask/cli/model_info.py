"""The attention layers of a model, their heads, and their rules in words."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_headmask.export.report import installed_versions
from keras_headmask.retrofit.finding import (
    AttentionLayer,
    aligned,
    find_attention,
    numbered,
)
from keras_headmask.retrofit.report import mask_specs
from keras_headmask.rules import words
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.terminal import in_one_line


def information(model: keras.Model) -> dict[str, Any]:
    """Everything that `as_text` says, as plain JSON."""
    found, rules = find_attention(model), mask_specs(model)
    layers = [
        {"number": number, "reachable": entry in found.known} | _layer(entry, rules.get(entry.path))
        for number, entry in numbered(found)
    ]
    inputs = getattr(model, "inputs", None) or ()
    return {
        "name": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else None,
        "inputs": [{"name": x.name, "dtype": x.dtype, "shape": list(x.shape)} for x in inputs],
        "attention": layers,
        "versions": installed_versions(),
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


def as_text(info: Mapping[str, Any]) -> str:
    """What `information` holds, for a reader."""
    size = "" if info["parameters"] is None else f", {info['parameters']:,} parameters"
    lines = [f"{info['class']} '{info['name']}'{size}"]
    for x in info["inputs"]:
        shape = ", ".join("?" if size is None else str(size) for size in x["shape"])
        lines.append(f"  input {x['name']}: {x['dtype']} ({shape})")
    lines += _table(info["attention"]) or ["No attention layers."]
    for layers in _by_rule(info["attention"]):
        lines.append(f"{_named(layers)}: {layers[0]['words'] or 'no rule'}")
        if layers[0]["mask_inputs"]:
            lines.append(f"  reads {', '.join(layers[0]['mask_inputs'])}")
    lines.append(", ".join(f"{name} {version}" for name, version in info["versions"].items()))
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
    return aligned(rows)


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
