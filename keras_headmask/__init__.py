"""A mask for every attention head, written as a value, in Keras 3."""

from typing import TYPE_CHECKING

from keras_headmask.cli import starting
from keras_headmask.rules import config

__version__ = "0.1.0"

__all__ = [
    "Bounds",
    "Chunk",
    "ExportReport",
    "Finding",
    "Full",
    "InputType",
    "KeyFlag",
    "KeyIn",
    "Keys",
    "MaskInput",
    "MaskSpec",
    "Nothing",
    "OpenSide",
    "PerHead",
    "PerHeadMaskedMultiHeadAttention",
    "Queries",
    "QueryFlag",
    "QueryIn",
    "RandomBlocks",
    "SameSegment",
    "SameSentence",
    "Sides",
    "Span",
    "Tiles",
    "Window",
    "and_masks",
    "apply_head_masks",
    "dense_scope",
    "dot_product_attention",
    "draw",
    "export_saved_model",
    "from_additive",
    "from_torch",
    "lint",
    "make_mask",
    "not_mask",
    "or_masks",
    "plot",
    "plot_attention",
    "recipes",
    "register_spec",
    "schema",
    "to_additive",
    "write_serving_config",
]

if TYPE_CHECKING or not starting.waiting:
    from keras_headmask.attention.attend import dense_scope, dot_product_attention
    from keras_headmask.export.saved_model import ExportReport, export_saved_model
    from keras_headmask.export.tf_serving import write_serving_config
    from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
    from keras_headmask.linting.linter import Finding, lint
    from keras_headmask.look import notebook
    from keras_headmask.look.drawing import draw
    from keras_headmask.look.plotting import plot, plot_attention
    from keras_headmask.masks import (
        and_masks,
        from_additive,
        from_torch,
        not_mask,
        or_masks,
        to_additive,
    )
    from keras_headmask.retrofit.apply import apply_head_masks
    from keras_headmask.rules import recipes
    from keras_headmask.rules.base import MaskSpec, register_spec
    from keras_headmask.rules.blocks import Chunk, RandomBlocks
    from keras_headmask.rules.evaluation import make_mask
    from keras_headmask.rules.inputs import (
        KeyFlag,
        KeyIn,
        MaskInput,
        QueryFlag,
        QueryIn,
        SameSegment,
        SameSentence,
    )
    from keras_headmask.rules.json_schema import schema
    from keras_headmask.rules.per_head import PerHead
    from keras_headmask.rules.positions import Full, Keys, Nothing, Queries, Window
    from keras_headmask.rules.protocol import (
        Bounds,
        InputType,
        OpenSide,
        Sides,
        Span,
        Tiles,
    )

    notebook.install()


def __getattr__(name: str) -> object:
    if starting.waiting and name in __all__:  # a command, which may end before it needs Keras
        starting.import_all()
        if name in globals():
            return globals()[name]
    if not starting.waiting and (call := config.known_recipes().get(name)) is not None:
        raise AttributeError(f"keras_headmask has no `{name}`. It is a recipe: {call}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
