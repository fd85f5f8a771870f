"""A mask for every attention head, written as a value, in Keras 3."""

from typing import TYPE_CHECKING

from keras_headmask import starting

__version__ = "0.1.0"

__all__ = [
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
    "PerHead",
    "PerHeadMaskedMultiHeadAttention",
    "Queries",
    "QueryFlag",
    "QueryIn",
    "RandomBlocks",
    "SameSegment",
    "SameSentence",
    "Sides",
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
    from keras_headmask import config, notebook, recipes
    from keras_headmask.attention import dense_scope, dot_product_attention
    from keras_headmask.drawing import draw
    from keras_headmask.evaluation import make_mask
    from keras_headmask.export import ExportReport, export_saved_model
    from keras_headmask.input_leaves import (
        KeyFlag,
        KeyIn,
        MaskInput,
        QueryFlag,
        QueryIn,
        SameSegment,
        SameSentence,
    )
    from keras_headmask.json_schema import schema
    from keras_headmask.layer import PerHeadMaskedMultiHeadAttention
    from keras_headmask.linting import Finding, lint
    from keras_headmask.masks import (
        and_masks,
        from_additive,
        from_torch,
        not_mask,
        or_masks,
        to_additive,
    )
    from keras_headmask.per_head import PerHead
    from keras_headmask.plotting import plot, plot_attention
    from keras_headmask.position_leaves import (
        Chunk,
        Full,
        Keys,
        Nothing,
        Queries,
        RandomBlocks,
        Window,
    )
    from keras_headmask.retrofit import apply_head_masks
    from keras_headmask.serving import write_serving_config
    from keras_headmask.specs import InputType, MaskSpec, Sides, register_spec

    notebook.install()


def __getattr__(name: str) -> object:
    if starting.waiting and name in __all__:  # a command, which may end before it needs Keras
        starting.import_all()
        if name in globals():
            return globals()[name]
    if not starting.waiting and (call := config.known_recipes().get(name)) is not None:
        raise AttributeError(f"keras_headmask has no `{name}`. It is a recipe: {call}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
