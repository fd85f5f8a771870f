"""The positions that an output may depend on, by a rule or by a model's attention layers.

What one layer allows is a boolean mask of each head. A position keeps what it has, since blocks
have residual connections, so a layer lets query i depend on key j if i = j or any head allows it.
Over layers these are multiplied as boolean matrices: a window of 3 reaches 6 in two layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.heads.tested import outputs_by_name
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.words import enough_heads


def composed(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The inputs `(B, T, S)` that each output may depend on, by the masks in forward order.

    A mask is boolean `(B, H, T, S)`, where each position sees itself.

    >>> window = np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool)
    >>> print(composed([window[None, None]] * 2)[0].astype(int))
    [[1 0 0 0]
     [1 1 0 0]
     [1 1 1 0]
     [0 1 1 1]]
    """
    reach: Any = masks[0].any(1)
    for mask in masks[1:]:
        reach = mask.any(1).astype("float32") @ reach.astype("float32") > 0
    return reach


def may_change(
    changed: np.ndarray, before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> np.ndarray:
    """Where an output may change, `(B, T)`, if the inputs change where `changed`, `(B, S)`.

    The masks of layers, as for `composed`, may change with the inputs: a query may change if it
    sees what changed, or if its row of the mask is another one.
    """
    if [mask.shape for mask in before] != [mask.shape for mask in after]:
        return np.ones((len(changed), before[-1].shape[2]), bool)
    for one, other in zip(before, after, strict=True):
        moved = (one != other).any((1, 3))
        changed = moved | (one.any(1) & changed[:, None, :]).any(-1)
    return changed


# --- By a rule, or by layers ----------------------------------------------------------------------


def by_rule(
    rule: MaskSpec,
    heads: int | None,
    inputs: Mapping[str, np.ndarray],
    rows: int | None,
    columns: int,
) -> np.ndarray:
    """The mask of a rule between inputs and outputs, `(batch or 1, 1, rows, columns)`.

    `rows` is `None` for an output without positions: it may depend on what any position may.
    """
    heads = enough_heads(rule) if heads is None else heads
    queries = columns if rows is None else rows
    mask = make_mask(rule, queries, columns, heads, {name: inputs[name] for name in rule.inputs})
    allowed = ops.convert_to_numpy(mask).any(1, keepdims=True)
    return allowed.any(2, keepdims=True) if rows is None else allowed


def by_layers(
    model: keras.Model, entries: list[AttentionLayer], inputs: Any, length: int
) -> list[tuple[Any, np.ndarray]]:
    """Each attention layer as it runs, with its mask, `(batch or 1, heads or 1, length, length)`.

    Args:
        model: A model whose attention layers are `entries`.
        inputs: What the model is called on.
        length: The number of positions.

    Raises:
        ValueError: if no layer runs, or one attends to another number of positions.
    """
    from keras_headmask.retrofit.observe import masks_in_force  # needs all of retrofit/

    masks = masks_in_force(model, entries, inputs)
    for _, mask in masks:
        if mask.shape[2:] != (length, length):
            raise ValueError(
                f"Attention has {mask.shape[2]} queries and {mask.shape[3]} keys, and the inputs "
                f"{length} positions."
            )
    if not masks:
        raise ValueError(f"None of the attention layers {[x.path for x in entries]} ran.")
    return masks


def why_not_by_layers(survey: Survey) -> str | None:
    """Why the layers do not say what an output may depend on; `None` if they do.

    Layers that are not known are taken to keep positions apart: if they do not, it shows.
    """
    if survey.unknown:
        return f"the attention layer {survey.unknown[0]} is out of reach"
    for entry in survey.known:
        if entry.kind == "cross":
            return f"the attention layer {entry} attends to another sequence"
    layers: Iterable[Any] = _keras.layers_of(survey.model)
    if survey.graph is not None:  # outputs without an axis of positions may be made of anything
        outputs = survey.graph.outputs
        layers = _behind([x for x in outputs if len(x.shape) > 2 or None in x.shape[1:]])
    behind = {id(layer) for layer in layers}
    for one in survey.mixing:
        if one.is_certain and id(one.operation) in behind:
            return f"the layer {one}"
    return None if survey.known else "the model has no attention layer, which would say it"


def layers_behind_outputs(survey: Survey) -> dict[str, set[int]]:
    """The ids of the layers that each output is made of, by its name; nothing without a graph."""
    outputs = {} if survey.graph is None else outputs_by_name(survey.graph.output)
    return {name: {id(layer) for layer in _behind([x])} for name, x in outputs.items()}


def _behind(tensors: list[Any]) -> list[Any]:
    """The layers that tensors are made of, and those inside of them."""
    makers = {_keras.made_by(x)[0] for x in _keras.made_of(tensors)}
    layers = [x for x in makers if isinstance(x, keras.Layer)]
    return [inner for layer in layers for inner in _keras.layers_of(layer)]
