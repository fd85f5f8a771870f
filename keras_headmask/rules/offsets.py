"""The position of the first query, as callers give it."""

import warnings
from typing import Any

import keras
import numpy as np

from keras_headmask import masks
from keras_headmask.masks import Length
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import InputType

MOST_OFFSET = 2**30  # positions are int32


def checked_offset(query_offset: Any) -> Length:
    """`query_offset` as an int, or as a scalar integer tensor."""
    if isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        offset = int(query_offset)
        if abs(offset) <= MOST_OFFSET:
            return offset
    elif hasattr(query_offset, "dtype") and not isinstance(query_offset, np.ndarray):
        offset = masks.as_mask_input(query_offset)
        if len(offset.shape) == 0 and "int" in keras.backend.standardize_dtype(offset.dtype):
            return offset
    raise ValueError(
        "`query_offset` must be a whole number within 30 bits, or a scalar integer tensor: one "
        "offset for the whole batch. (Examples at different positions: pass an `attention_mask`.) "
        f"Received: {query_offset!r}."
    )


def checked_or_default_offset(
    query_offset: Any, spec: MaskSpec | None, queries: int | None, keys: int | None
) -> Length:
    """`query_offset`, checked; 0 for `None`, with a warning if a cached step may have lost it."""
    if query_offset is not None:
        return checked_offset(query_offset)
    if queries is None or keys is None or queries >= keys:
        return 0
    if spec is not None and spec.reads_query_positions:
        last = f"0 to {queries - 1}"
        warnings.warn(
            f"The rule depends on the positions of the queries, and the call has {queries} of them "
            f"for {keys} keys: without `query_offset` they are taken to stand at positions {last}. "
            f"In a step with a cache of keys pass `query_offset={keys - queries}`, the position of "
            f"the first query. If positions {last} are meant, as in cross-attention, pass "
            "`query_offset=0`.",
            UserWarning,
            stacklevel=3,
        )
    return 0


def check_counted(spec: MaskSpec, name: str, query_offset: Length) -> None:
    """Refuse a pair `(query_side, key_side)` at an offset for a rule that counts from the start.

    The values cannot show whether the start of the query side was cut off.
    """
    if isinstance(query_offset, int) and query_offset == 0:
        return
    for leaf in leaves(spec):
        if leaf.counts and "query" in leaf.inputs.get(name, InputType(sides=frozenset())).sides:
            raise ValueError(
                f"{leaf!r} counts from the first token of a sequence, so with a `query_offset` it "
                f"needs the ids of the whole sequence. Received: `mask_inputs[{name!r}]` is a pair "
                f"(query_side, key_side), with query_offset={query_offset}. Pass one tensor as "
                f"long as the keys, mask_inputs={{{name!r}: ids}}. If queries and keys are of two "
                "sequences, count before the call and let SameSegment compare the numbers."
            )
