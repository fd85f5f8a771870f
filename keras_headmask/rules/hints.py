"""What to write in place of a value that is no spec, for the error that refuses it."""

from collections.abc import Callable, Mapping
from typing import Any

from keras_headmask.rules import config


def hint_for(value: Any, call: str = "SPEC") -> str:
    """What to write in place of `value`."""

    def written(spec: str) -> str:
        return call.replace("SPEC", spec)

    if value is None:
        return f" The spec that hides nothing is Full(): {written('hm.Full()')}."
    if isinstance(value, bool):
        return " Write Full() for True and Nothing() for False."
    if (meant := config.call_of(value)) is not None:
        return f" Call it: {written(meant)}."
    if isinstance(value, str):
        return (
            f" {config.names_of_recipes()}: {written('hm.recipes.causal()')}. JSON text becomes a "
            "spec by `MaskSpec.from_config(json.loads(text))`."
        )
    if isinstance(value, Mapping):
        if config.names_heads(value):
            return f" Wrap rules by head in PerHead: {written(f'hm.PerHead({_first(value)})')}."
        return " A config becomes a spec by `MaskSpec.from_config`."
    if isinstance(value, (list, tuple)) and any(hasattr(part, "allowed") for part in value):
        return (
            " Combine specs by & or |, or give each head its own by PerHead: "
            f"{written('hm.PerHead({0: a, 1: b})')}."
        )
    if hasattr(type(value), "get_weights"):
        return _for_keras(type(value), written, call)
    return f" A mask tensor enters a spec by MaskInput(name): {written('hm.MaskInput(name)')}."


def _for_keras(cls: type, written: Callable[[str], str], call: str) -> str:
    """What to write in place of a model or a layer; Keras itself is not imported here."""
    if hasattr(cls, "mask_specs"):
        rule = written("model.mask_specs[path]")
        hint = f" The rules of a model are its `model.mask_specs`, by layer: {rule}."
    elif hasattr(cls, "mask_spec"):
        hint = f" The rule of a layer is `layer.mask_spec`: {written('layer.mask_spec')}."
    else:
        hint = " A model gets a rule by hm.apply_head_masks(model, spec)."
    if call.startswith(("hm.plot", "hm.draw")):
        hint += " What a model attends to: hm.plot_attention(model, inputs)."
    return hint


def _first(heads: Mapping[Any, Any]) -> str:
    return f"{{{next(iter(heads))!r}: ...}}"
