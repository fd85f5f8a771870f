"""A spec, positions and mask inputs become a boolean tensor.

`bind` does what needs whole sequences, once; `allowed_tile` then answers for any tile of the score
matrix; `make_mask` is the tile that is everything.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.rules import config
from keras_headmask.rules.base import MaskSpec, check_spec, leaves
from keras_headmask.rules.bound import WHOLE, Bound, Cuts, Lengths
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.protocol import InputType, Sides

_MOST_OFFSET = 2**30  # positions are int32


def make_mask(
    spec: MaskSpec,
    queries: Any,
    keys: Any,
    num_heads: int = 1,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: Any = 0,
) -> Any:
    """The mask that `spec` makes, boolean, `(B or 1, H or 1, queries, keys)`.

    Args:
        spec: A `MaskSpec`.
        queries: Number of queries, T; an int or a scalar integer tensor.
        keys: Number of keys, S; likewise.
        num_heads: Number of heads, H. The head axis has size 1 where all heads obey one rule.
        mask_inputs: A tensor for each name the spec reads: `(batch, length)`, integer or boolean,
            used for queries and keys, or a pair `(query_side, key_side)` for cross-attention; a
            whole mask for `MaskInput`.
        query_offset: Query i stands at position i + `query_offset`, key j at position j.

    Raises:
        TypeError: for a mask input of floats.
        ValueError: for a missing or unknown mask input, a wrong rank or length, or a head >= H.

    >>> from keras_headmask import Full, PerHead, Window
    >>> mask = make_mask(PerHead({0: Window(after=0)}, default=Full()), 2, 2, num_heads=3)
    >>> print(ops.convert_to_numpy(mask[0, :2]).astype(int).tolist())
    [[[1, 0], [1, 1]], [[1, 1], [1, 1]]]
    """
    check_spec(spec, "spec", "hm.make_mask(SPEC, queries, keys)")
    query_offset = checked_offset(query_offset)
    for name, length in (("queries", queries), ("keys", keys)):
        if isinstance(length, (bool, int, float, str)):  # else a tensor, or JAX's unknown size
            config.whole_number(length, name, at_least=0)
    lengths = Lengths(None, num_heads, _static(queries), _static(keys))
    called = "hm.make_mask(spec, queries, keys, ...)"
    check_inputs(spec, mask_inputs, lengths, query_offset, called)
    return mask_of_all_heads(spec, bind(spec, mask_inputs, queries, keys, query_offset), num_heads)


def checked_offset(query_offset: Any) -> Any:
    """`query_offset` as an int, or as a scalar integer tensor."""
    if isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        if abs(query_offset) <= _MOST_OFFSET:
            return int(query_offset)
    elif _is_scalar_tensor(query_offset):
        offset = masks.as_mask_input(query_offset)
        if "int" in keras.backend.standardize_dtype(offset.dtype):
            return offset
    raise ValueError(
        "`query_offset` must be a whole number within 30 bits, or a scalar integer tensor: one "
        "offset for the whole batch. (Examples at different positions: pass an `attention_mask`.) "
        f"Received: {query_offset!r}."
    )


def _is_scalar_tensor(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray)
    return hasattr(value, "dtype") and len(value.shape) == 0 and not is_array


def given_offset(
    query_offset: Any, spec: MaskSpec | None, queries: int | None, keys: int | None
) -> Any:
    """`query_offset`, checked; 0 for `None`, with a warning if a cached step may have lost it."""
    if query_offset is not None:
        return checked_offset(query_offset)
    fewer = None not in (queries, keys) and queries < keys
    if fewer and spec is not None and spec.reads_query_positions:
        warnings.warn(
            f"The rule depends on the positions of the queries, and there are {queries} queries "
            f"for {keys} keys: without `query_offset` they are taken to stand at positions 0 to "
            f"{queries - 1}. In a step with a cache of keys pass "
            f"`query_offset={keys - queries}`, the position of the first query. If positions 0 to "
            f"{queries - 1} are meant, as in cross-attention, pass `query_offset=0`.",
            UserWarning,
            stacklevel=3,
        )
    return 0


def as_pair(value: Any) -> tuple | None:
    """`(query_side, key_side)` if `value` is a pair; a saved model's is a list of tensors."""
    if isinstance(value, tuple):
        return value
    is_pair = isinstance(value, list) and len(value) == 2
    if is_pair and all(v is None or hasattr(v, "shape") for v in value):
        return tuple(value)
    return None


def check_inputs(
    spec: MaskSpec | None,
    mask_inputs: Mapping[str, Any] | None,
    lengths: Lengths,
    query_offset: Any = 0,
    called: str = "layer(x, ...)",
) -> None:
    """All that names, dtypes and static shapes can tell is wrong with the mask inputs.

    `called` is the call that hands them in, with dots where they stand, for the hint.
    """
    wanted = {} if spec is None else spec.inputs
    if mask_inputs is not None and not isinstance(mask_inputs, Mapping):
        raise TypeError(
            "`mask_inputs` must be a dict that maps each name the mask spec reads to a tensor. "
            f"Received: {type(mask_inputs).__name__}."
        )
    given = {} if mask_inputs is None else mask_inputs
    if missing := sorted(wanted.keys() - given.keys()):
        of_models = ""
        if called.startswith("layer"):
            of_models = (
                " keras.Sequential cannot pass them on: a rule that reads inputs needs a "
                "functional or subclassed model."
            )
        raise ValueError(
            f"`mask_inputs` must hold every input the mask spec reads; {missing} missing. "
            f"Received: {sorted(given)}. Pass {_expected(wanted[missing[0]])}: "
            f"{called.replace('...', f'mask_inputs={{{missing[0]!r}: ...}}')}.{of_models}"
        )
    if unknown := sorted(given.keys() - wanted.keys()):
        raise ValueError(
            f"`mask_inputs` holds {unknown}, which the mask spec does not read. "
            f"It reads: {sorted(wanted)}."
        )
    for name, kind in wanted.items():
        batch = _check_input(name, given[name], kind, lengths, query_offset)
        if lengths.batch is None:
            lengths = lengths._replace(batch=batch)  # the inputs must agree among themselves


def _expected(kind: InputType) -> str:
    if kind.rank is None:
        return "a boolean tensor of shape (batch or 1, heads or 1, queries, keys)"
    return "integer or boolean tensors of shape (batch, length)"


def _check_input(
    name: str, value: Any, kind: InputType, lengths: Lengths, query_offset: Any
) -> int | None:
    """Raise for what is wrong with one mask input; else return its batch size, if known."""
    place = f"mask_inputs[{name!r}]"
    if kind.rank is None:
        if as_pair(value) is not None:
            raise TypeError(f"`{place}` is a whole mask: one tensor, not a pair.")
        value = masks.as_mask_input(value)
        _check_whole_numbers(value, place, "bool")
        masks.as_bool(value, place)
        masks.check_shape(value, place, *lengths)
        if len(value.shape) == 4 and value.shape[1] is None:
            raise ValueError(
                f"`{place}` must have a known head axis, 1 or {lengths.heads}. Received: shape "
                f"{tuple(value.shape)}."
            )
        # Of batch 1 it serves every example.
        return value.shape[0] if len(value.shape) > 2 and value.shape[0] != 1 else None
    pair = as_pair(value)
    if pair is not None and len(pair) != 2:
        raise ValueError(
            f"`{place}` must be one tensor, or a pair (query_side, key_side). "
            f"Received: {len(pair)} tensors."
        )
    query, key = (value, value) if pair is None else pair
    sides = {"query": query, "key": key}
    for side in sorted(kind.sides):
        tensor = sides[side]
        if tensor is None:
            raise ValueError(f"`{place}` lacks its {side} side, which the mask spec reads.")
        tensor = masks.as_mask_input(tensor)
        _check_whole_numbers(tensor, place, kind.dtype)
        shape = tuple(tensor.shape)
        if len(shape) != 2:
            raise ValueError(f"`{place}` must have shape (batch, length). Received: shape {shape}.")
        if None not in (shape[0], lengths.batch) and shape[0] != lengths.batch:
            hint = ""
            if shape[0] == 1:
                hint = (
                    " The ids of one example do not serve the others: repeat them, or pass the "
                    "tensor that has them for the whole batch."
                )
            raise ValueError(
                f"`{place}` has {shape[0]} examples where the batch has {lengths.batch}. "
                f"Received: shape {shape}.{hint}"
            )
        if lengths.batch is None:
            lengths = lengths._replace(batch=shape[0])
        _check_length(place, shape, side, pair is not None, kind, lengths, query_offset)
    return lengths.batch


def _check_length(
    place: str,
    shape: tuple,
    side: str,
    pair: bool,
    kind: InputType,
    lengths: Lengths,
    query_offset: Any,
) -> None:
    """The key side is as long as the keys, the query side as the queries (or is cut from them)."""
    queries, keys = lengths.queries, lengths.keys
    expected = queries if side == "query" else keys
    if side == "query" and not pair and not _is_zero(query_offset):
        if shape[1] == keys and queries != keys:  # the queries' part is cut out
            if _is_int(query_offset) and not 0 <= query_offset <= keys - (queries or 0):
                raise ValueError(
                    f"query_offset={query_offset} puts the {queries} queries outside `{place}` of "
                    f"length {keys}: pass a pair (query_side, key_side)."
                )
            return
        if _is_int(query_offset) and queries is not None and shape[1] == queries == keys:
            raise ValueError(
                f"`{place}` has the length of the queries and of the keys, yet query_offset="
                f"{query_offset} moves the queries on: pass a pair (query_side, key_side)."
            )
    if None in (shape[1], expected) or shape[1] == expected:
        return
    hint = ""
    if not pair and kind.sides == {"query", "key"} and lengths.queries != lengths.keys:
        hint = (
            " One tensor serves both sides only where they are equally long; for "
            f"{lengths.queries} queries and {lengths.keys} keys pass a pair (query_side, key_side)."
        )
    plural = "queries" if side == "query" else "keys"
    raise ValueError(
        f"`{place}` has length {shape[1]} where the attention has {expected} {plural}. "
        f"Received: shape {shape}.{hint}"
    )


def _check_whole_numbers(tensor: Any, place: str, dtype: str) -> None:
    received = keras.backend.standardize_dtype(tensor.dtype)
    if received != "bool" and "int" not in received:
        raise TypeError(
            f"`{place}` must be integer or boolean. Received dtype {received}. Declare it as "
            f'keras.Input(..., dtype="{dtype}") (ids: dtype="int32"), or cast it before the call: '
            "mixed precision would round floats, and in bfloat16 the ids 255 and 256 are equal."
        )


def bind(
    spec: MaskSpec,
    mask_inputs: Mapping[str, Any] | None,
    queries: Any,
    keys: Any,
    query_offset: Any = 0,
    beside: Bound | None = None,
    prepared: Mapping[MaskSpec, Mapping[str, Any]] | None = None,
) -> Bound:
    """Prepare `mask_inputs`, which `check_inputs` has passed, for every leaf of `spec`.

    `beside` is what was bound for the same sequences before, and is a part of the result.
    `prepared` is what leaves prepared before for the whole sequences.
    """
    if queries is None or keys is None:
        raise ValueError(
            "`queries` and `keys` must be lengths; a symbolic Keras tensor of unknown length has "
            f"none yet. Received: queries={queries}, keys={keys}. Give `keras.Input` its length, "
            "or use PerHeadMaskedMultiHeadAttention: it makes the mask when the model is called."
        )
    if beside is None:
        query_positions = ops.arange(queries, dtype="int32") + ops.cast(query_offset, "int32")
        beside = Bound(query_positions, ops.arange(keys, dtype="int32"), {})
    query_positions, key_positions, done = beside
    bound = dict(done)
    for leaf in leaves(spec):
        sides, shared = {}, set()
        for name, kind in leaf.inputs.items():
            value = mask_inputs[name]
            pair = as_pair(value)
            if kind.rank is None:
                sides[name] = masks.lift(value)
            elif pair is not None:
                sides[name] = Sides(*(None if v is None else masks.as_mask_input(v) for v in pair))
            else:
                tensor = masks.as_mask_input(value)
                sides[name] = Sides(tensor, tensor)
                shared.add(name)
        if sides:
            ready = dict((prepared or {}).get(leaf) or leaf.prepare(sides))
            for name in shared & {n for n, kind in leaf.inputs.items() if "query" in kind.sides}:
                query, key = ready[name]
                query = _query_side(query, query_positions, queries, query_offset)
                ready[name] = Sides(query, key)
            bound[leaf] = ready
    return Bound(query_positions, key_positions, bound)


def _query_side(tensor: Any, positions: Any, queries: Any, query_offset: Any) -> Any:
    """The part of a tensor, given for queries and keys at once, that lies at the queries."""
    length = tensor.shape[1]
    if _is_zero(query_offset) or (length is not None and length == _static(queries)):
        return tensor
    return ops.take(tensor, positions, axis=1)


def allowed_tile(rule: MaskSpec, bound: Bound, heads: tuple[int, ...], cuts: Cuts = WHOLE) -> Any:
    """What `rule`, free of `PerHead`, allows in one tile, for `heads`.

    Boolean, of rank 4 and broadcastable to `(batch, len(heads), queries, keys)`.
    """
    query_positions = cuts.queries(bound.query_positions, 0)[:, None]
    key_positions = cuts.keys(bound.key_positions, 0)[None, :]

    def of_leaf(leaf: MaskSpec) -> Any:
        inputs = {
            name: _cut(value, heads, cuts)
            for name, value in bound.leaf_inputs.get(leaf, {}).items()
        }
        return _checked(leaf, leaf.allowed(query_positions, key_positions, inputs))

    # Not & and |: a JAX array on their left cannot meet a symbolic Keras tensor.
    return masks.lift(rule.fold(of_leaf, ops.logical_and, ops.logical_or, ops.logical_not))


def _cut(value: Any, heads: tuple[int, ...], cuts: Cuts) -> Any:
    """A prepared mask input, cut to a tile and shaped to broadcast over it."""
    if isinstance(value, Sides):
        query, key = value
        if query is not None:  # of length 1 it serves every position
            query = cuts.batch(query, 0)
            query = query if query.shape[1] == 1 else cuts.queries(query, 1)
            query = ops.expand_dims(query, (1, 3))  # LiteRT has no slice with two new axes
        if key is not None:
            key = cuts.batch(key, 0)
            key = key if key.shape[1] == 1 else cuts.keys(key, 1)
            key = ops.expand_dims(key, (1, 2))
        return Sides(query, key)
    value = cuts.batch(value, 0)
    value = cuts.queries(value, 2) if value.shape[2] != 1 else value
    value = cuts.keys(value, 3) if value.shape[3] != 1 else value
    if value.shape[1] is None:  # 1 or all, as the run tells
        place = ops.minimum(ops.convert_to_tensor(heads, "int32"), ops.shape(value)[1] - 1)
        return ops.take(value, place, axis=1)
    return value if value.shape[1] in (1, len(heads)) else ops.take(value, list(heads), axis=1)


def _checked(spec: MaskSpec, result: Any) -> Any:
    if isinstance(result, bool) or not hasattr(result, "dtype"):
        raise TypeError(
            f"`{type(spec).__name__}.allowed` must return a boolean tensor. Received: {result!r}. "
            "(`==` between symbolic Keras tensors compares objects: write `~(a != b)`.)"
        )
    if keras.backend.standardize_dtype(result.dtype) != "bool":
        raise TypeError(
            f"`{type(spec).__name__}.allowed` must return booleans. Received dtype {result.dtype}."
        )
    return result


def mask_of_all_heads(spec: MaskSpec, bound: Bound, num_heads: int) -> Any:
    """The whole mask, `(B or 1, H or 1, T, S)`."""
    groups = head_groups(spec, num_heads)
    # A positional rule may come back (1, S) or (T, 1): and it with ones of the full size.
    ones = ops.logical_and(
        (bound.query_positions >= bound.query_positions)[None, None, :, None],
        bound.key_positions >= bound.key_positions,
    )
    if len(groups) > 1:
        ones = _batch_ones(bound, ones)
    parts = [ops.logical_and(allowed_tile(rule, bound, heads), ones) for rule, heads in groups]
    if len(parts) == 1:
        return parts[0]
    # Which slice of the stacked parts each head reads: a part has one for all its heads, or each.
    place, start = [0] * num_heads, 0
    for (_, heads), part in zip(groups, parts, strict=True):
        width = part.shape[1]
        for i, head in enumerate(heads):
            place[head] = start + (i if width == len(heads) else 0)
        start += width
    stacked = ops.concatenate(parts, axis=1)
    return stacked if place == list(range(start)) else ops.take(stacked, place, axis=1)


def _batch_ones(bound: Bound, ones: Any) -> Any:
    """`ones` with the batch axis of the mask inputs: rules with and without them can be stacked."""
    for inputs in bound.leaf_inputs.values():
        for value in inputs.values():
            for tensor in value if isinstance(value, Sides) else (value,):
                if tensor is not None:
                    first = tensor[(slice(None), *(slice(0, 1),) * (len(tensor.shape) - 1))]
                    first = ops.reshape(first, (-1, 1, 1, 1))
                    ones = ops.logical_and(ones, ~(first != first))
    return ones


def _static(length: Any) -> int | None:
    """A length as an int where it is known now."""
    return int(length) if _is_int(length) else None


def _is_int(value: Any) -> bool:
    return hasattr(type(value), "__index__") and not hasattr(value, "shape")


def _is_zero(offset: Any) -> bool:
    return _is_int(offset) and offset == 0
