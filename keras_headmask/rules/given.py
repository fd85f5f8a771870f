"""What is given as mask inputs: pairs and single tensors, checked by names, dtypes and shapes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from keras_headmask import masks
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.protocol import InputType


class Lengths(NamedTuple):
    """The sizes of the mask; `None` where a size is not known yet."""

    batch: int | None
    heads: int
    queries: int | None
    keys: int | None


def as_int(number: Any) -> int | None:
    """A length or an offset as an int, if it is known now."""
    is_int = hasattr(type(number), "__index__") and not hasattr(number, "shape")
    return int(number) if is_int else None


def as_pair(value: Any) -> tuple[Tensor, ...] | None:
    """`(query_side, key_side)` if `value` is a pair; a saved model's is a list of tensors."""
    if isinstance(value, list) and len(value) == 2:
        return tuple(value) if all(v is None or hasattr(v, "shape") for v in value) else None
    return value if isinstance(value, tuple) else None


def check_inputs(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None,
    lengths: Lengths,
    query_offset: Length = 0,
    called: str = "layer(x, ...)",
) -> None:
    """Raise for all that names, dtypes and static shapes show to be wrong with the mask inputs.

    `called` is the call that receives them, with dots where they stand, for the hint.
    """
    wanted = {} if spec is None else spec.inputs
    if mask_inputs is not None and not isinstance(mask_inputs, Mapping):
        raise TypeError(
            "`mask_inputs` must be a dict that maps each name the mask spec reads to a tensor. "
            f"Received: {type(mask_inputs).__name__}."
        )
    given = mask_inputs or {}
    if missing := sorted(wanted.keys() - given.keys()):
        expected = "integer or boolean tensors of shape (batch, length)"
        if wanted[missing[0]].rank is None:
            expected = "a boolean tensor of shape (batch or 1, heads or 1, queries, keys)"
        of_models = ""
        if called.startswith("layer"):
            of_models = (
                " keras.Sequential cannot pass them on: a rule that reads inputs needs a "
                "functional or subclassed model."
            )
        raise ValueError(
            f"`mask_inputs` must hold every input the mask spec reads; {missing} missing. "
            f"Received: {sorted(given)}. Pass {expected}: "
            f"{called.replace('...', f'mask_inputs={{{missing[0]!r}: ...}}')}.{of_models}"
        )
    if unknown := sorted(given.keys() - wanted.keys()):
        raise ValueError(
            f"`mask_inputs` holds {unknown}, which the mask spec does not read. "
            f"It reads: {sorted(wanted)}."
        )
    for name, kind in wanted.items():
        place, value = f"mask_inputs[{name!r}]", given[name]
        if kind.rank is None:
            batch = _check_whole_mask(place, value, lengths)
        else:
            batch = _check_sides(place, value, kind, lengths, query_offset)
        if lengths.batch is None:
            lengths = lengths._replace(batch=batch)  # the inputs must agree among themselves


def _check_whole_mask(place: str, value: Any, lengths: Lengths) -> int | None:
    """Raise for what is wrong with a whole mask; else return its batch size, if known."""
    if as_pair(value) is not None:
        raise TypeError(f"`{place}` is a whole mask: one tensor, not a pair.")
    mask = masks.as_mask_input(value)
    _check_whole_numbers(mask, place, "bool")
    masks.as_bool(mask, place)
    masks.check_shape(mask, place, *lengths)
    shape = tuple(mask.shape)
    if len(shape) == 4 and shape[1] is None:
        raise ValueError(
            f"`{place}` must have a known head axis, 1 or {lengths.heads}. Received: shape {shape}."
        )
    return shape[0] if len(shape) > 2 and shape[0] != 1 else None  # 1 serves every example


def _check_sides(
    place: str, value: Any, kind: InputType, lengths: Lengths, query_offset: Length
) -> int | None:
    """Raise for what is wrong with ids or flags; else return their batch size, if known."""
    pair = as_pair(value)
    sides = (value, value) if pair is None else pair
    if len(sides) != 2:
        raise ValueError(
            f"`{place}` must be one tensor, or a pair (query_side, key_side). "
            f"Received: {len(sides)} tensors."
        )
    batch = lengths.batch
    for side in sorted(kind.sides):
        tensor = sides[("query", "key").index(side)]
        if tensor is None:
            raise ValueError(f"`{place}` lacks its {side} side, which the mask spec reads.")
        tensor = masks.as_mask_input(tensor)
        _check_whole_numbers(tensor, place, kind.dtype)
        shape = tuple(tensor.shape)
        if len(shape) != 2:
            raise ValueError(f"`{place}` must have shape (batch, length). Received: shape {shape}.")
        if None not in (shape[0], batch) and shape[0] != batch:
            hint = ""
            if shape[0] == 1:
                hint = (
                    " The ids of one example do not serve the others: repeat them, or pass the "
                    "tensor that has them for the whole batch."
                )
            raise ValueError(
                f"`{place}` has {shape[0]} examples where the batch has {batch}. "
                f"Received: shape {shape}.{hint}"
            )
        batch = shape[0] if batch is None else batch
        if pair is None and side == "query" and _is_cut(place, shape[1], lengths, query_offset):
            continue
        _check_length(place, shape, side, pair is None and len(kind.sides) == 2, lengths)
    return batch


def _check_length(place: str, shape: tuple, side: str, serves_both: bool, lengths: Lengths) -> None:
    plural = "queries" if side == "query" else "keys"
    expected = getattr(lengths, plural)
    if None in (shape[1], expected) or shape[1] == expected:
        return
    hint = ""
    if serves_both and lengths.queries != lengths.keys:
        hint = (
            " One tensor serves both sides only where they are equally long; for "
            f"{lengths.queries} queries and {lengths.keys} keys pass a pair (query_side, key_side)."
        )
    raise ValueError(
        f"`{place}` has length {shape[1]} where the attention has {expected} {plural}. "
        f"Received: shape {shape}.{hint}"
    )


def _is_cut(place: str, length: int | None, lengths: Lengths, query_offset: Length) -> bool:
    """Whether the part at the queries is cut out of one tensor that is as long as the keys."""
    queries, keys, offset = lengths.queries, lengths.keys, as_int(query_offset)
    if offset == 0 or length != keys:
        return False
    if offset is not None and keys is not None and queries == keys:
        raise ValueError(
            f"`{place}` has the length of the queries and of the keys, yet query_offset={offset} "
            "moves the queries on: pass a pair (query_side, key_side)."
        )
    if offset is not None and keys is not None and not 0 <= offset <= keys - (queries or 0):
        raise ValueError(
            f"query_offset={offset} puts the {queries} queries outside `{place}` of length {keys}: "
            "pass a pair (query_side, key_side)."
        )
    return queries != keys


def _check_whole_numbers(tensor: Tensor, place: str, dtype: str) -> None:
    received = keras.backend.standardize_dtype(tensor.dtype)
    if received != "bool" and "int" not in received:
        raise TypeError(
            f"`{place}` must be integer or boolean. Received dtype {received}. Declare it as "
            f'keras.Input(..., dtype="{dtype}") (ids: dtype="int32"), or cast it before the call: '
            "mixed precision would round floats, and in bfloat16 the ids 255 and 256 are equal."
        )
