"""Rules as text, to look at."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_headmask import evaluation
from keras_headmask.per_head import PerHead
from keras_headmask.specs import MaskSpec, check_spec


def draw(
    spec: MaskSpec,
    queries: int,
    keys: int | None = None,
    num_heads: int | None = None,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: int = 0,
    example: int = 0,
) -> str:
    """The mask that `spec` makes, a row for each query: 1 = may attend, 0 = hidden.

    Args:
        spec: A `MaskSpec`.
        queries: Number of queries.
        keys: Number of keys; as many as queries by default.
        num_heads: Number of heads. Heads with equal masks are drawn once, under their numbers. By
            default one head for a rule that all heads share, else one more than `spec` names, so
            that the last stands for the rest.
        mask_inputs: The tensors `spec` reads, by name.
        query_offset: Query i stands at position i + `query_offset`.
        example: Which example of the batch to draw.

    >>> from keras_headmask import PerHead, Window
    >>> print(draw(PerHead({0: Window(before=0, after=0)}), queries=2, num_heads=4))
    head 0:
    1 0
    0 1
    heads 1-3:
    1 1
    1 1
    """
    check_spec(spec, "spec")
    if num_heads is None:
        num_heads = _heads_named(spec) + 1
    keys = queries if keys is None else keys
    mask = evaluation.make_mask(spec, queries, keys, num_heads, mask_inputs, query_offset)
    mask = ops.convert_to_numpy(mask)
    if not 0 <= example < max(mask.shape[0], 1) and mask.shape[0] > 1:
        raise ValueError(
            f"`example` must be at least 0 and below the batch size {mask.shape[0]}. "
            f"Received: {example}."
        )
    mask = mask[example if mask.shape[0] > 1 else 0]
    if mask.shape[0] == 1:
        return _grid(mask[0])
    groups: dict[bytes, list[int]] = {}
    for head, grid in enumerate(mask):
        groups.setdefault(grid.tobytes(), []).append(head)
    return "\n".join(f"{_title(heads)}:\n{_grid(mask[heads[0]])}" for heads in groups.values())


def _grid(mask: np.ndarray) -> str:
    return "\n".join(" ".join("1" if allowed else "0" for allowed in row) for row in mask)


def _title(heads: list[int]) -> str:
    """Head numbers with neighbours folded: `heads 0, 2-5`."""
    runs: list[list[int]] = []
    for head in heads:
        if runs and runs[-1][-1] == head - 1:
            runs[-1][1:] = [head]
        else:
            runs.append([head])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"head{'s' if len(heads) > 1 else ''} {text}"


def _heads_named(spec: MaskSpec) -> int:
    """How many heads `spec` numbers: one more than the largest, or 0."""
    own = [head + 1 for head, _ in spec.heads] if isinstance(spec, PerHead) else []
    return max(own + [_heads_named(child) for child in spec.children], default=0)
