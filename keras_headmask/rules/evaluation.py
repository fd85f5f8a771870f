"""A spec, positions and mask inputs become a boolean tensor.

`bind` does what needs whole sequences, once; `allowed_tile` then answers for any tile of the mask;
`make_mask` is the tile that is everything.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules.base import MaskSpec, check_spec, leaves
from keras_headmask.rules.fields import whole_number
from keras_headmask.rules.given import Lengths, as_int, as_pair, check_inputs
from keras_headmask.rules.heads import head_groups
from keras_headmask.rules.protocol import Sides

_MOST_OFFSET = 2**30  # positions are int32


class Bound(NamedTuple):
    """A spec's mask inputs, prepared for the whole sequences, and the positions they lie at."""

    query_positions: Tensor
    key_positions: Tensor
    leaf_inputs: dict[MaskSpec, dict[str, Any]]  # by the leaf that reads them


class Cuts(NamedTuple):
    """How to cut a tile out: functions of a tensor and its axis of queries, keys or examples."""

    queries: Callable[[Tensor, int], Tensor]
    keys: Callable[[Tensor, int], Tensor]
    batch: Callable[[Tensor, int], Tensor]


def _whole(tensor: Tensor, axis: int) -> Tensor:
    return tensor


WHOLE = Cuts(_whole, _whole, _whole)


def make_mask(
    spec: MaskSpec,
    queries: Length,
    keys: Length,
    num_heads: int = 1,
    mask_inputs: Mapping[str, Any] | None = None,
    query_offset: Length = 0,
) -> Mask:
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

    Returns:
        The mask, a tensor of the backend, or a symbolic Keras tensor if an input is one.

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
            whole_number(length, name, at_least=0)
    lengths = Lengths(None, num_heads, as_int(queries), as_int(keys))
    called = "hm.make_mask(spec, queries, keys, ...)"
    check_inputs(spec, mask_inputs, lengths, query_offset, called)
    return mask_of_all_heads(spec, bind(spec, mask_inputs, queries, keys, query_offset), num_heads)


def checked_offset(query_offset: Any) -> Length:
    """`query_offset` as an int, or as a scalar integer tensor."""
    if isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        offset = int(query_offset)
        if abs(offset) <= _MOST_OFFSET:
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


def given_offset(
    query_offset: Any, spec: MaskSpec | None, queries: int | None, keys: int | None
) -> Length:
    """`query_offset`, checked; 0 for `None`, with a warning if a cached step may have lost it."""
    if query_offset is not None:
        return checked_offset(query_offset)
    if queries is None or keys is None or queries >= keys:
        return 0
    if spec is not None and spec.reads_query_positions:
        last = queries - 1
        warnings.warn(
            f"The rule depends on the positions of the queries, and there are {queries} queries "
            f"for {keys} keys: without `query_offset` they are taken to stand at positions 0 to "
            f"{last}. In a step with a cache of keys pass `query_offset={keys - queries}`, the "
            f"position of the first query. If positions 0 to {last} are meant, as in "
            "cross-attention, pass `query_offset=0`.",
            UserWarning,
            stacklevel=3,
        )
    return 0


def bind(
    spec: MaskSpec,
    mask_inputs: Mapping[str, Any] | None,
    queries: Length | None,
    keys: Length | None,
    query_offset: Length = 0,
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
    bound = dict(beside.leaf_inputs)
    for leaf in leaves(spec):
        sides: dict[str, Any] = {}
        shared = set()  # one tensor of both sides: the queries stand in it at their positions
        for name, kind in leaf.inputs.items():
            value = (mask_inputs or {})[name]
            pair = as_pair(value)  # (AutoGraph reads this function, and no `:=`)
            if kind.rank is None:
                sides[name] = masks.lift(value)
            elif pair is not None:
                sides[name] = Sides(*(None if v is None else masks.as_mask_input(v) for v in pair))
            else:
                tensor = masks.as_mask_input(value)
                sides[name] = Sides(tensor, tensor)
                shared |= {name} if "query" in kind.sides else set()
        if sides:
            bound[leaf] = dict((prepared or {}).get(leaf) or leaf.prepare(sides))
            for name in shared if as_int(query_offset) != 0 else ():
                query, key = bound[leaf][name]
                if query.shape[1] is None or query.shape[1] != as_int(queries):
                    query = ops.take(query, beside.query_positions, axis=1)
                    bound[leaf][name] = Sides(query, key)
    return beside._replace(leaf_inputs=bound)


def allowed_tile(rule: MaskSpec, bound: Bound, heads: tuple[int, ...], cuts: Cuts = WHOLE) -> Mask:
    """What `rule`, free of `PerHead`, allows in one tile, for `heads`.

    Boolean, of rank 4 and broadcastable to `(batch, len(heads), queries, keys)`.
    """
    query_positions = cuts.queries(bound.query_positions, 0)[:, None]
    key_positions = cuts.keys(bound.key_positions, 0)[None, :]

    def of_leaf(leaf: MaskSpec) -> Tensor:
        prepared = bound.leaf_inputs.get(leaf, {})
        inputs = {name: _cut(value, heads, cuts) for name, value in prepared.items()}
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
    if value.shape[1] is None:  # 1 or all heads, known when the graph runs
        place = ops.minimum(ops.convert_to_tensor(heads, "int32"), ops.shape(value)[1] - 1)
        return ops.take(value, place, axis=1)
    return value if value.shape[1] in (1, len(heads)) else ops.take(value, list(heads), axis=1)


def _checked(spec: MaskSpec, result: Any) -> Tensor:
    dtype = None if isinstance(result, bool) else getattr(result, "dtype", None)
    if dtype is None or keras.backend.standardize_dtype(dtype) != "bool":
        received = repr(result) if dtype is None else f"dtype {dtype}"
        raise TypeError(
            f"`{type(spec).__name__}.allowed` must return a boolean tensor. Received: {received}. "
            "(`==` between symbolic Keras tensors compares objects: write `~(a != b)`.)"
        )
    return result


def mask_of_all_heads(spec: MaskSpec, bound: Bound, num_heads: int) -> Mask:
    """The whole mask, `(B or 1, H or 1, T, S)`."""
    groups = head_groups(spec, num_heads)
    # A positional rule may come back (1, S) or (T, 1): and it with ones of the full size.
    ones = ops.logical_and(
        (bound.query_positions >= bound.query_positions)[None, None, :, None],
        bound.key_positions >= bound.key_positions,
    )
    parts = [allowed_tile(rule, bound, heads) for rule, heads in groups]
    if len(parts) == 1:
        return ops.logical_and(parts[0], ones)
    for part in parts:  # rules with and without a batch axis are joined: each gets one
        first = part[:, :1, :1, :1]
        ones = ops.logical_and(ones, ops.logical_or(first, ops.logical_not(first)))
    of_head = {}
    for (_, heads), part in zip(groups, parts, strict=True):
        full = ops.logical_and(part, ones)
        for i, head in enumerate(heads):
            of_head[head] = full if full.shape[1] == 1 else full[:, i : i + 1]
    return ops.concatenate([of_head[head] for head in range(num_heads)], axis=1)
