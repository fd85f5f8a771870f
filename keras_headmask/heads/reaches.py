"""Which positions an output has, and which it may depend on: by a rule or by attention layers.

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
from keras_headmask.heads.changes import Arrays
from keras_headmask.heads.tested import Tested, outputs_by_name, shapes
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.evaluation import make_mask
from keras_headmask.rules.examples import padding_inputs
from keras_headmask.rules.words import enough_heads

# --- Which positions an output has ----------------------------------------------------------------


def rows_of_outputs(
    tested: Tested, inputs: Arrays, outputs: Arrays, names: Sequence[str], rule: MaskSpec | None
) -> tuple[dict[str, int | None], list[str]]:
    """How many positions each output has, `None` for one without; and notes on some.

    An axis as long as the inputs has their positions if it gets shorter with them; else it may be
    one of features. Without a rule, outputs that have no positions are left out.

    Args:
        tested, inputs, outputs: What is searched, its inputs, and the outputs on these.
        names: The inputs whose positions are changed.
        rule: What the outputs may depend on, if it was passed.

    Raises:
        ValueError: if no output is left.
    """
    lengths = {inputs[name].shape[1] for name in names}
    batch = len(inputs[names[0]])
    shorter = _on_shorter_inputs(tested, inputs, lengths)
    rows: dict[str, int | None] = {}
    notes = []
    for name, x in outputs.items():
        which = f"The output {name!r}, {x.shape},"
        if not x.ndim or len(x) != batch:
            notes.append(f"{which} was left out: its first axis does not count the examples.")
            continue
        has_positions = x.ndim > 1 and x.shape[1] in lengths
        if shorter is None:  # of one length, so that an axis as long may be features or heads
            is_unclear = x.ndim == 2 or bool(lengths & set(x.shape[2:]))
            has_positions &= rule is not None or not is_unclear or x.ndim == 3
            if has_positions and is_unclear:
                notes.append(f"{which} was taken to have the input's positions.")
        else:
            # By a rule on positions alone it may have any number of them.
            has_positions |= rule is not None and not rule.inputs
            is_less = [a < b for a, b in zip(shorter[name].shape, x.shape, strict=True)]
            has_positions &= is_less[1:2] == [True] and (rule is not None or not any(is_less[2:]))
        if has_positions or rule is not None:
            rows[name] = x.shape[1] if has_positions else None
        if not has_positions and rule is None:
            notes.append(
                f"{which} has no axis that is known to be the input's positions: pass `rule` to "
                "include it."
            )
        elif not has_positions and x.ndim > 2:  # (examples x features have none)
            notes.append(
                f"{which} was taken to have no positions: it may depend on what any position may."
            )
    if not rows:
        way_out = "The first axis of one at least must count the examples."
        if rule is None:
            way_out = (
                "Pass as `rule` which positions such an output may depend on, for example "
                f"`rule={_example(inputs)}`."
            )
        raise ValueError(
            f"No output has an axis known to be positions: {shapes(outputs)} from "
            f"{shapes(inputs)}. {way_out}"
        )
    return rows, notes


def _on_shorter_inputs(tested: Tested, inputs: Arrays, lengths: set[int]) -> Arrays | None:
    """The outputs on inputs without their last position; `None` if their length is fixed."""
    less = {}
    for name, x in inputs.items():
        axes = x.shape[1:3] if x.dtype.kind == "b" else x.shape[1:2]  # (pairs, in a mask)
        axes = () if tested.lengths.get(name) else axes
        cut = (slice(-1) if size in lengths else slice(None) for size in axes)
        less[name] = x[(slice(None), *cut)] if x.ndim else x
    if all(less[name].shape == x.shape for name, x in inputs.items()):
        return None
    try:
        return tested.run(less).outputs
    except Exception:  # whatever a model of a fixed length raises
        return None


def _example(inputs: Arrays) -> str:
    """A rule to propose for a pooled output: the real tokens, or the first positions."""
    if masks := padding_inputs(inputs):
        return f"hm.recipes.padding({masks[0]!r})"
    ids = [name for name, x in inputs.items() if x.dtype.kind in "iu"]
    return f"~hm.KeyIn({ids[0]!r}, 0)" if ids else "hm.Keys(0, 4)"


# --- What it may depend on ------------------------------------------------------------------------


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


def by_layers(survey: Survey, inputs: Any, length: int) -> list[tuple[Any, np.ndarray]]:
    """Each attention layer as it runs, with its mask, `(batch or 1, heads or 1, length, length)`.

    Raises:
        ValueError: if no layer runs, or one does not attend to the `length` positions of `inputs`.
    """
    from keras_headmask.retrofit.observe import masks_in_force  # needs all of retrofit/

    try:
        masks = masks_in_force(survey.model, survey.known, inputs)
        for _, mask in masks:
            if mask.shape[2:] != (length, length):
                raise ValueError(
                    f"Attention has {mask.shape[2]} queries and {mask.shape[3]} keys, and the "
                    f"inputs {length} positions."
                )
        if not masks:
            raise ValueError(f"None of the attention layers {[x.path for x in survey.known]} ran.")
    except ValueError as error:
        raise ValueError(f"{error} Pass as `rule` what the outputs may depend on.") from error
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
