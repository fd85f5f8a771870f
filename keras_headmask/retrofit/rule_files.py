"""Rules of layers as JSON, each with the places of its layers."""

import json
from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask.retrofit.families import adapted
from keras_headmask.retrofit.frames import LayerRule
from keras_headmask.rules.base import MaskSpec


def rules_config(rules: list[tuple[int, LayerRule]]) -> list[dict[str, Any]]:
    """JSON: each rule with the places of its layers, and the names of what it reads."""
    parts: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, rule in rules:
        part: dict[str, Any] = {"spec": rule.spec.get_config()}
        if rule.sources:
            part["inputs"] = dict(rule.sources)
        if rule.replaces:
            part["replaces"] = True
        if rule.is_cross:
            part["is_cross"] = True
        _, places = parts.setdefault(json.dumps(part, sort_keys=True), (part, []))
        places.append(place)
    return [{"layers": places} | part for part, places in parts.values()]


def rules_from_config(
    config: Any, attention: list[keras.Layer], name: str
) -> Iterator[tuple[keras.Layer, LayerRule]]:
    """The layers and rules of `rules_config`; the rules have no owner as yet."""
    for part in config:
        inputs = part.get("inputs", {}).items()
        sources = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in inputs}
        for place in part["layers"]:
            if place >= len(attention):
                raise ValueError(
                    f"The saved rules name attention layer {place}, but '{name}' has "
                    f"{len(attention)}. Was it saved with another version of its code?"
                )
            spec, layer = MaskSpec.from_config(part["spec"]), attention[place]
            flags = {name: part.get(name, False) for name in ("replaces", "is_cross")}
            yield layer, LayerRule(spec, adapted(layer).num_heads, sources, **flags)
