"""A mask of its own for every attention head, in Keras 3."""

import importlib
import re
from typing import TYPE_CHECKING

from keras_headmask.rules import config, recipes
from keras_headmask.rules.algebra import PerHead
from keras_headmask.rules.base import MaskSpec, register_spec
from keras_headmask.rules.leaves import (
    Chunk,
    Full,
    KeyFlag,
    KeyIn,
    Keys,
    MaskInput,
    Nothing,
    Queries,
    QueryFlag,
    QueryIn,
    SameSegment,
    SameSentence,
    Window,
)
from keras_headmask.rules.protocol import Bounds, InputType, Sides, Span, Tiles

__version__ = "0.2.0"

__all__ = [
    "Bounds",
    "Chunk",
    "Explanation",
    "ExportReport",
    "Finding",
    "Full",
    "HeadReport",
    "InputType",
    "KeyFlag",
    "KeyIn",
    "Keys",
    "Leak",
    "LeakReport",
    "MaskInput",
    "MaskSpec",
    "Nothing",
    "PerHead",
    "PerHeadMaskedGroupedQueryAttention",
    "PerHeadMaskedMultiHeadAttention",
    "Queries",
    "QueryFlag",
    "QueryIn",
    "SameSegment",
    "SameSentence",
    "Sides",
    "Span",
    "Suggestion",
    "Tiles",
    "Window",
    "and_masks",
    "apply_head_masks",
    "attention_probabilities",
    "dense_scope",
    "dot_product_attention",
    "draw",
    "explain",
    "export_saved_model",
    "find_leaks",
    "flex_block_mask",
    "from_additive",
    "from_torch",
    "hugging_face",
    "lint",
    "make_mask",
    "mask_specs",
    "measure_heads",
    "not_mask",
    "or_masks",
    "plot",
    "plot_attention",
    "recipes",
    "register_spec",
    "suggest_rules",
    "summary_masks",
    "testing",
    "to_additive",
    "unmasked",
]

if TYPE_CHECKING:  # at run time `__getattr__` imports them on first use
    from keras_headmask.attention.api import dot_product_attention
    from keras_headmask.attention.flex_masks import flex_block_mask
    from keras_headmask.attention.scopes import dense_scope
    from keras_headmask.export.saved_model import ExportReport, export_saved_model
    from keras_headmask.heads import testing
    from keras_headmask.heads.leaks import Leak, LeakReport, find_leaks
    from keras_headmask.heads.measures import HeadReport, measure_heads
    from keras_headmask.heads.reading import attention_probabilities
    from keras_headmask.heads.suggest import Suggestion, suggest_rules
    from keras_headmask.layers.grouped_query import PerHeadMaskedGroupedQueryAttention
    from keras_headmask.layers.multi_head import PerHeadMaskedMultiHeadAttention
    from keras_headmask.linting.linter import Finding, lint
    from keras_headmask.look.drawing import draw
    from keras_headmask.look.explaining import Explanation, explain
    from keras_headmask.look.plotting import plot, plot_attention
    from keras_headmask.masks import (
        and_masks,
        from_additive,
        from_torch,
        not_mask,
        or_masks,
        to_additive,
    )
    from keras_headmask.retrofit import hugging_face
    from keras_headmask.retrofit.apply import (
        apply_head_masks,
        mask_specs,
        summary_masks,
        unmasked,
    )
    from keras_headmask.rules.evaluation import make_mask

_HOMES = {
    "attention.api": "dot_product_attention",
    "attention.flex_masks": "flex_block_mask",
    "attention.scopes": "dense_scope",
    "export.saved_model": "ExportReport export_saved_model",
    "heads": "testing",
    "heads.leaks": "Leak LeakReport find_leaks",
    "heads.measures": "HeadReport measure_heads",
    "heads.reading": "attention_probabilities",
    "heads.suggest": "Suggestion suggest_rules",
    "layers.grouped_query": "PerHeadMaskedGroupedQueryAttention",
    "layers.multi_head": "PerHeadMaskedMultiHeadAttention",
    "linting.linter": "Finding lint",
    "look.drawing": "draw",
    "look.explaining": "Explanation explain",
    "look.plotting": "plot plot_attention",
    "masks": "and_masks from_additive from_torch not_mask or_masks to_additive",
    "retrofit": "hugging_face",
    "retrofit.apply": "apply_head_masks mask_specs summary_masks unmasked",
    "rules.evaluation": "make_mask",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        home = importlib.import_module(f"{__name__}.{_HOME_OF[name]}")
        if not hasattr(home, name):  # a module of that folder
            importlib.import_module(f"{home.__name__}.{name}")
        globals()[name] = getattr(home, name)  # asked for once
        return globals()[name]
    if (call := config.RECIPES.get(name)) is not None:
        raise AttributeError(f"keras_headmask has no `{name}`. It is a recipe: {call}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))


def register_all() -> None:
    """Register every layer and model that a file may name; specs are registered by now."""
    _require_keras()
    for module in ("layers.grouped_query", "layers.multi_head", "generation.causal_lm"):
        importlib.import_module(f"{__name__}.{module}")


def _require_keras() -> None:
    """Raise for a Keras that `pyproject.toml` refuses: it would fail later, and not say why."""
    import keras

    oldest = "3.13.2"
    found, asked = (re.findall("[0-9]+", version)[:3] for version in (keras.__version__, oldest))
    if [*map(int, found)] < [*map(int, asked)]:
        raise ImportError(
            f"keras_headmask needs Keras {oldest} or later, and this is Keras {keras.__version__}. "
            "Update it: pip install --upgrade keras"
        )


register_all()
