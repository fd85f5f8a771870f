"""The rules of an attention layer: the names of what each reads, and their JSON."""

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_headmask.retrofit.adapters import adapted
from keras_headmask.rules import base
from keras_headmask.rules.base import MaskSpec, check_heads, leaves
from keras_headmask.rules.protocol import Sides

Source = str | tuple[str | None, str | None]
Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRule:
    """A rule of one attention layer, and the names of the inputs that it reads.

    `sources` maps each name that the spec reads to an input of the model, or to a pair of them,
    `(query_side, key_side)`. `owner` is the masked model whose inputs these are. A rule that
    `replaces` ends that of a layer of ours. In cross-attention (`is_cross`) the positions of
    queries start at 0, however many keys there are.
    """

    spec: MaskSpec
    num_heads: int
    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    replaces: bool = False
    owner: Any = None
    is_cross: bool = False

    @functools.cached_property
    def restricts(self) -> bool:
        """Whether the rule hides any key from any head."""
        return base.restricts(self.spec, self.num_heads)

    @functools.cached_property
    def reads(self) -> list[str]:
        """The names of the inputs that a call of the model must have."""
        return sorted({name for source in self.sources.values() for name in names_in(source)})

    def inputs_from(self, tensors: Tensors) -> dict[str, Any]:
        """The mask inputs of the spec, taken from `tensors` by name."""

        def side(name: str | None) -> Any:
            return None if name is None else tensors[name]

        return {
            name: side(source) if isinstance(source, str) else tuple(map(side, source))
            for name, source in self.sources.items()
        }

    @functools.cached_property
    def _prepared_names(self) -> list[tuple[MaskSpec, dict[str, Sides]]]:
        return [
            (leaf, {name: prepared_names(leaf, name, self.sources) for name in leaf.inputs})
            for leaf in leaves(self.spec)
        ]

    def prepared(self, tensors: Tensors) -> dict[MaskSpec, dict[str, Sides]]:
        """By leaf of the spec, what the model prepared for it and `tensors` holds."""
        prepared = {}
        for leaf, names in self._prepared_names:
            sides = [side for pair in names.values() for side in pair if side is not None]
            if sides and all(side in tensors for side in sides):
                prepared[leaf] = {
                    name: Sides(*(None if side is None else tensors[side] for side in pair))
                    for name, pair in names.items()
                }
        return prepared


def names_in(source: Source) -> list[str]:
    return [name for name in ((source,) if isinstance(source, str) else source) if name is not None]


def whole_masks(rules: Iterable[LayerRule]) -> set[str]:
    """The names of what `rules` read that are masks of queries and keys."""
    return {
        place
        for rule in rules
        for name, source in rule.sources.items()
        if rule.spec.inputs[name].rank is None
        for place in names_in(source)
    }


def prepared_names(leaf: MaskSpec, name: str, sources: Mapping[str, Source]) -> Sides:
    """The names of the tensors that are prepared for an input of a leaf, one for each side."""
    source = sources[name]
    config = json.dumps(leaf.get_config(), sort_keys=True)  # (two classes may have one repr)
    if isinstance(source, str):
        return Sides(f"{config} of {source}", f"{config} of {source}")
    of_both = ", ".join(names_in(source))
    sides = zip(source, ("queries", "keys"), strict=True)
    return Sides(*(None if s is None else f"{config} of {of_both}: {side}" for s, side in sides))


# --- What an attention layer obeys ----------------------------------------------------------------

STATE = "headmask_state"  # the one attribute of ours on a layer or model; Keras does not track it


def is_masked(layer: Any) -> bool:
    """Whether it is a masked model or a part of one: its class was made for a stock class."""
    return hasattr(type(layer), "_stock_class")


def rules_of(layer: Any) -> tuple[LayerRule, ...]:
    """The rules that an attention layer obeys, that of the innermost model first."""
    return getattr(vars(layer)[STATE], "rules", ()) if is_masked(layer) else ()


def spec_of(layer: Any) -> MaskSpec | None:
    """All that an attention layer obeys: its own `mask_spec`, unless replaced, and its rules."""
    rules, own = rules_of(layer), getattr(layer, "mask_spec", None)
    specs = [] if own is None or any(rule.replaces for rule in rules) else [own]
    specs += [rule.spec for rule in rules]
    return functools.reduce(operator.and_, specs) if specs else None


# --- Files ----------------------------------------------------------------------------------------

_FORMAT = 1  # of the configs of masked models
_WAY_OUT = "Was it edited, or saved with another version of its code? Save the masked model again."


def rules_config(rules: list[tuple[int, LayerRule]]) -> list[dict[str, Any]]:
    """The rules as JSON, each with the numbers of its layers and the names of what it reads."""
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
    """The layers and rules of what `rules_config` returned; the rules have no owner yet."""
    for part in config:
        of_spec, places = entries(part, "spec", "layers")
        read = part.get("inputs", {}).items()
        sources = {k: x if isinstance(x, str) else tuple(x) for k, x in read}
        wrong = [x for x in places if type(x) is not int or not 0 <= x < len(attention)]
        if wrong or not places:
            raise ValueError(
                f"A saved rule must name attention layers of '{name}', which has "
                f"{len(attention)}, numbered from 0. Received: {places}. {_WAY_OUT}"
            )
        for layer in (attention[place] for place in places):
            spec, num_heads = MaskSpec.from_config(of_spec), adapted(layer).num_heads
            check_heads(spec, num_heads)
            flags = {flag: part.get(flag, False) for flag in ("replaces", "is_cross")}
            yield layer, LayerRule(spec, num_heads, sources, **flags)


def entries(config: Any, *keys: str) -> list[Any]:
    """The values of `keys`, each of which a file must hold."""
    values = dict(config) if isinstance(config, Mapping) else {}
    if lacking := [key for key in keys if key not in values]:
        raise ValueError(
            f"The file of a masked model lacks {lacking}, which format {_FORMAT} of "
            f"keras_headmask has. Received: {sorted(values)}. {_WAY_OUT}"
        )
    return [values[key] for key in keys]


def stock_and_rules(config: Any, custom_objects: Any) -> tuple[Any, list[Any]]:
    """The stock model in the config of a masked one, and the configs of its rules."""
    of_stock, of_rules = entries(config, "model", "rules")
    if not isinstance(of_rules, (list, tuple)) or not of_rules:
        raise ValueError(
            "The file of a masked model has no rule in 'rules', so the model would run without "
            f"its mask. Received: {of_rules!r}. {_WAY_OUT}"
        )
    model = keras.saving.deserialize_keras_object(of_stock, custom_objects=custom_objects)
    return model, list(of_rules)
