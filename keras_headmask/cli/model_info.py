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
from keras_headmask.rules.words import in_one_line


def information(model: keras.Model) -> dict[str, Any]:
    """Everything that `as_text` says, as plain JSON."""
    found, rules = find_attention(model), mask_specs(model)
    inputs = getattr(model, "inputs", None) or ()
    return {
        "name": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else None,
        "inputs": [{"name": x.name, "dtype": x.dtype, "shape": list(x.shape)} for x in inputs],
        "attention": [
            {"number": number, "reachable": entry in found.known}
            | _layer(entry, rules.get(entry.path))
            for number, entry in numbered(found)
        ],
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
    rows: list[tuple[str, ...]] = []
    by_rule: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for layer in info["attention"]:
        number, heads = (
            other if layer[key] is None else str(layer[key])
            for key, other in (("number", "-"), ("heads", "?"))
        )
        reach = "" if layer["reachable"] else "no rule reaches this class"
        path = in_one_line(layer["path"])
        rows.append((number, path, layer["class"], f"{heads} heads", layer["kind"], reach))
        if layer["reachable"]:
            by_rule.setdefault((layer["words"], str(layer["rule"])), []).append(layer)
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
