"""What all layers share of a rule's inputs, prepared once: a layer that `summary()` shows."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_headmask import masks
from keras_headmask.retrofit.frames import LayerRule, Source, names_in, prepared_names
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import Sides


@keras.saving.register_keras_serializable("keras_headmask")
class HeadMaskInputs(keras.layers.Layer):
    """Makes, of a model's ids, what its rules compare: the number of each token's sentence, say.

    `parts` are pairs of a leaf of a rule and the names of its inputs. It has no weights.
    """

    def __init__(self, parts: Iterable[Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.parts = [
            (leaf if isinstance(leaf, MaskSpec) else MaskSpec.from_config(leaf), _tuples(sources))
            for leaf, sources in parts
        ]
        self.supports_masking = True

    def call(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for leaf, sources in self.parts:
            sides = {name: _sides(source, tensors) for name, source in sources.items()}
            for name, pair in leaf.prepare(sides).items():
                names = prepared_names(leaf, name, sources)
                made |= {k: x for k, x in zip(names, pair, strict=True) if k is not None}
        return made

    def get_config(self) -> dict[str, Any]:
        parts = [[leaf.get_config(), sources] for leaf, sources in self.parts]
        return super().get_config() | {"parts": parts}


def _tuples(sources: Mapping[str, Any]) -> dict[str, Source]:
    """Pairs of names as tuples, which JSON makes lists."""
    return {k: v if isinstance(v, str) else tuple(v) for k, v in sources.items()}


def _sides(source: Source, tensors: Mapping[str, Any]) -> Sides:
    if isinstance(source, str):
        tensor = masks.as_mask_input(tensors[source])
        return Sides(tensor, tensor)
    return Sides(*(None if x is None else masks.as_mask_input(tensors[x]) for x in source))


def layer_for(rules: Iterable[LayerRule]) -> HeadMaskInputs | None:
    """The layer that prepares what `rules` read; `None` if none reads ids."""
    parts: dict[Any, Any] = {}
    for rule in rules:
        for leaf in leaves(rule.spec):
            if leaf.inputs and all(kind.rank is not None for kind in leaf.inputs.values()):
                sources = {name: rule.sources[name] for name in leaf.inputs}
                parts[leaf, tuple(sorted(sources.items()))] = leaf, sources
    return HeadMaskInputs(parts.values()) if parts else None


def names_read(layer: HeadMaskInputs) -> list[str]:
    return sorted({n for _, of in layer.parts for source in of.values() for n in names_in(source)})
