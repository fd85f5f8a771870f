"""A spec, positions and mask inputs become a boolean tensor.

`check_inputs` refuses what does not fit; `bind` does what needs whole sequences, once; then
`mask_of_heads` answers for all pairs, and `mask_at` for those of some tiles.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_headmask import masks
from keras_headmask._keras import in_xla
from keras_headmask.masks import Length, Mask, Tensor
from keras_headmask.rules import graphs
from keras_headmask.rules.base import MaskSpec, check_spec, head_groups, leaves, whole_number
from keras_headmask.rules.config import did_you_mean
from keras_headmask.rules.graphs import made_once
from keras_headmask.rules.protocol import InputType, Places, Sides, Sizes
from keras_headmask.rules.words import counted

MOST_OFFSET = 2**30  # positions are int32
_PAIR = "pair (query_side, key_side)"

narrow: ContextVar[bool] = ContextVar("positions of 32 bits", default=False)


class Lengths(NamedTuple):
    """The sizes of the mask; `None` where a size is not known yet."""

    batch: int | None
    heads: int
    queries: int | None
    keys: int | None


class Bound(NamedTuple):
    """A spec's mask inputs, prepared for the whole sequences, and the positions they lie at."""

    query_positions: Tensor
    key_positions: Tensor
    leaf_inputs: dict[Any, dict[str, Any]]  # by the leaf that reads them
    sizes: Any = None  # `Sizes`

    def changed(self, change: Callable[[Any], Any]) -> "Bound":
        """With `change(value)` in place of each prepared mask input."""
        names, values = taken_apart(self.leaf_inputs)
        changed = [list(map(change, of_leaf)) for of_leaf in values]
        return self._replace(leaf_inputs=put_together(names, changed))


def taken_apart(leaf_inputs: Mapping[Any, Mapping[str, Any]]) -> tuple[tuple, list[list[Any]]]:
    """The names of prepared mask inputs, which can be a key, and the tensors of a function."""
    names = tuple((leaf, tuple(values)) for leaf, values in leaf_inputs.items())
    return names, [list(values.values()) for values in leaf_inputs.values()]


def put_together(names: tuple, values: Sequence[Sequence[Any]]) -> dict[Any, dict[str, Any]]:
    """The inverse of `taken_apart`."""
    return {
        leaf: dict(zip(of_leaf, tensors, strict=True))
        for (leaf, of_leaf), tensors in zip(names, values, strict=True)
    }


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
    >>> print(keras.ops.convert_to_numpy(mask[0, :2]).astype(int).tolist())
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


def as_int(number: Any) -> int | None:
    """A length or an offset as an int, if it is known now."""
    is_int = hasattr(type(number), "__index__") and not hasattr(number, "shape")
    return int(number) if is_int else None


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
    if spec is not None and any(leaf.reads_query_positions for leaf in leaves(spec)):
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
    if as_int(query_offset) == 0:
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
    inputs = mask_inputs or {}
    if missing := sorted(wanted.keys() - inputs.keys()):
        expected = "integer or boolean tensors of shape (batch, length)"
        if wanted[missing[0]].rank is None:
            expected = "a boolean tensor of shape (batch or 1, heads or 1, queries, keys)"
        call = called.replace("...", f"mask_inputs={{{missing[0]!r}: ...}}")
        if called.startswith("layer"):
            call += ". keras.Sequential cannot pass them on: use a functional or subclassed model"
        raise ValueError(
            f"`mask_inputs` must hold every input the mask spec reads; {missing} missing. "
            f"Received: {sorted(inputs)}. Pass {expected}: {call}."
        )
    if unknown := sorted(inputs.keys() - wanted.keys()):
        raise ValueError(
            f"`mask_inputs` holds {unknown}, which the mask spec does not read. "
            f"It reads: {sorted(wanted)}.{did_you_mean(unknown[0], wanted)}"
        )
    for name, kind in wanted.items():
        place, value = f"mask_inputs[{name!r}]", inputs[name]
        if kind.rank is None:
            batch = _check_whole_mask(place, value, lengths)
        else:
            batch = _check_sides(place, value, kind, lengths, query_offset)
            if spec is not None and as_pair(value) is not None:
                check_counted(spec, name, query_offset)
        if lengths.batch is None:
            lengths = lengths._replace(batch=batch)  # the inputs must agree among themselves


def _check_whole_mask(place: str, value: Any, lengths: Lengths) -> int | None:
    """Raise for what is wrong with a whole mask; else return its batch size, if known."""
    if as_pair(value) is not None:
        raise TypeError(f"`{place}` is a whole mask: one tensor, not a pair.")
    mask = masks.as_bool(value, place)
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
    if pair is not None and len(pair) != 2:
        raise ValueError(
            f"`{place}` must be one tensor, or a {_PAIR}. Received: {len(pair)} tensors."
        )
    batch = lengths.batch
    query, key = pair or (value, value)
    for side, tensor in (("key", key), ("query", query)):
        if side not in kind.sides:
            continue
        if tensor is None:
            raise ValueError(f"`{place}` lacks its {side} side, which the mask spec reads.")
        tensor = masks.as_mask_input(tensor, place)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype != "bool" and "int" not in dtype:
            raise TypeError(
                f"`{place}` must be integer or boolean. Received dtype {dtype}. Declare it as "
                f'keras.Input(..., dtype="{kind.dtype}") (ids: dtype="int32"), or cast it before '
                "the call: mixed precision would round floats, and in bfloat16 the ids 255 and 256 "
                "are equal."
            )
        shape = tuple(tensor.shape)
        if len(shape) != 2:
            raise ValueError(f"`{place}` must have shape (batch, length). Received: shape {shape}.")
        if None not in (shape[0], batch) and shape[0] != batch:
            hint = " To use the ids of one example for all, repeat them." if shape[0] == 1 else ""
            raise ValueError(
                f"`{place}` has {counted(shape[0], 'example')} where the batch has {batch}. "
                f"Received: shape {shape}.{hint}"
            )
        batch = shape[0] if batch is None else batch
        single = pair is None
        if not (single and side == "query" and _is_cut(place, shape[1], lengths, query_offset)):
            _check_length(place, shape, side, single and len(kind.sides) == 2, lengths)
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
            f"{lengths.queries} queries and {lengths.keys} keys pass a {_PAIR}."
        )
    if None in (as_int(shape[1]), as_int(expected)):
        hint += (
            " Sizes that JAX does not know are equal only if they have one name: in Keras' export "
            "give inputs of equal length one, as in jax2tf_kwargs={'polymorphic_shapes': "
            "[['(batch, t, 8)', '(batch, t)']]}."
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
            f"moves the queries on: pass a {_PAIR}."
        )
    if offset is not None and keys is not None and not 0 <= offset <= keys - (queries or 0):
        raise ValueError(
            f"query_offset={offset} puts the {queries} queries outside `{place}` of length {keys}: "
            f"pass a {_PAIR}."
        )
    return queries != keys


def position_dtype() -> str:
    """The dtype of positions and ids: int64 on TensorFlow, which has no int32 arithmetic on a GPU.

    (It computes int32 on the host. XLA does not; and LiteRT has no `//` of int64.)
    """
    if keras.backend.backend() != "tensorflow" or narrow.get() or in_xla():
        return "int32"
    return "int64"


@made_once
def bind(
    spec: MaskSpec,
    mask_inputs: Mapping[str, Any] | None,
    queries: Length | None,
    keys: Length | None,
    query_offset: Length = 0,
    prepared: Mapping[MaskSpec, Mapping[str, Any]] | None = None,
    batch: Length | None = None,
    heads: int | None = None,
) -> Bound:
    """Prepare `mask_inputs`, which `check_inputs` has passed, for every leaf of `spec`.

    `prepared` is what leaves prepared before for the whole sequences. Without `batch`, the inputs
    agree with the first of them. With `heads`, a graph also checks a mask beside the rule.
    """
    if queries is None or keys is None:
        raise ValueError(
            "`queries` and `keys` must be lengths; a symbolic Keras tensor of unknown length has "
            f"none yet. Received: queries={queries}, keys={keys}. Give `keras.Input` its length, "
            "or use PerHeadMaskedMultiHeadAttention: it makes the mask when the model is called."
        )
    dtype = position_dtype()
    query_positions = ops.arange(queries, dtype=dtype)
    if as_int(query_offset) != 0:
        query_positions += ops.cast(query_offset, dtype)
    bound: dict[MaskSpec, dict[str, Any]] = {}
    sizes = Sizes(batch, queries, keys)
    for leaf in leaves(spec):
        given: dict[str, Any] = {}
        cut = set()  # of one tensor for both sides: the queries stand in it at their positions
        checks: list[Any] = []  # operations of a graph
        for name, kind in leaf.inputs.items():
            value = (mask_inputs or {})[name]
            given[name] = masks.lift(value) if kind.rank is None else as_sides(value)
            if kind.rank is not None and as_int(query_offset) != 0 and as_pair(value) is None:
                cut.add(name)
            if sizes.batch is None:
                sizes = sizes._replace(batch=graphs.batch_of(given[name]))
            checks += graphs.checks(name, given[name], kind.sides, sizes, name in cut, heads)
        if given:
            bound[leaf] = {}
            for name, values in ((prepared or {}).get(leaf) or leaf.prepare(given)).items():
                values, read = _as_wide(values), leaf.inputs.get(name, InputType()).sides
                if name in cut and "query" in read:
                    query, key = values
                    if query.shape[1] is None or query.shape[1] != as_int(queries):
                        values = Sides(graphs.standing_at(name, query, query_positions), key)
                values = graphs.checked(name, given.get(name), values, read, sizes, checks)
                bound[leaf][name] = values
    return Bound(query_positions, ops.arange(keys, dtype=dtype), bound, sizes)


def as_pair(value: Any) -> tuple[Tensor, ...] | None:
    """`(query_side, key_side)` if `value` is a pair; a saved model's is a list of tensors."""
    if isinstance(value, list) and len(value) == 2:
        return tuple(value) if all(v is None or hasattr(v, "shape") for v in value) else None
    return value if isinstance(value, tuple) else None


def as_sides(value: Any) -> Sides:
    """Ids or flags at queries and keys, of a pair or of one tensor that serves both."""
    if (pair := as_pair(value)) is not None:
        return Sides(*(None if side is None else masks.as_mask_input(side) for side in pair))
    return Sides(*[masks.as_mask_input(value)] * 2)


def side_of(value: Any, side: int) -> np.ndarray | None:
    """The side of the queries (0) or of the keys (-1) of a mask input, in NumPy."""
    pair = as_pair(value)
    tensor = value if pair is None else pair[side]
    return None if tensor is None else ops.convert_to_numpy(tensor)


def length_of(spec: MaskSpec, mask_inputs: Mapping[str, Any], side: int) -> int | None:
    """How many queries (side 0) or keys (side -1) the examples that `spec` reads speak of."""
    for name, kind in spec.inputs.items():
        tensor = side_of(mask_inputs[name], side) if name in mask_inputs else None
        if tensor is not None and (kind.rank is None or tensor.ndim == 2):
            size = tensor.shape[-2 - side if kind.rank is None else 1]
            if size > 1 or kind.rank is not None:
                return size
    return None


def _as_wide(value: Any) -> Any:
    """Ids of 32 bits in the dtype of positions; others, flags and whole masks as they are."""
    if not isinstance(value, Sides):
        return value

    def wide(ids: Tensor | None) -> Tensor | None:
        is_int32 = ids is not None and keras.backend.standardize_dtype(ids.dtype) == "int32"
        return ops.cast(ids, position_dtype()) if is_int32 else ids

    query = wide(value.query)
    return Sides(query, query if value.key is value.query else wide(value.key))


def checked_answer(leaf: MaskSpec, result: Any) -> Tensor:
    """Check that `leaf.allowed` returned booleans."""
    dtype = getattr(result, "dtype", None)
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name != "bool":
        received = repr(result) if dtype is None else f"dtype {name}"
        raise TypeError(
            f"`{type(leaf).__name__}.allowed` must return a boolean tensor. Received: "
            f"{received}. (`==` between symbolic Keras tensors compares objects: write "
            "`~(a != b)`.)"
        )
    return result


def mask_of_heads(rule: MaskSpec, bound: Bound, heads: tuple[int, ...]) -> Mask:
    """The mask of `rule` (no `PerHead`) for `heads`.

    Boolean, of rank 4 and broadcastable to `(batch, len(heads), queries, keys)`.
    """

    def shaped(value: Any) -> Any:
        return _on_axes(value) if isinstance(value, Sides) else _select_heads(value, heads)

    positions = _on_axes(Sides(bound.query_positions, bound.key_positions))
    return _answers(rule, bound, heads, positions, shaped)


@made_once
def _on_axes(sides: Sides) -> Sides:
    """Positions as `(queries, 1)` and `(1, keys)`, or ids as `(B, 1, queries, 1)` and so on."""
    query, key = sides
    is_ids = len((key if query is None else query).shape) == 2
    query = None if query is None else ops.expand_dims(query, (1, 3) if is_ids else 1)
    return Sides(query, None if key is None else ops.expand_dims(key, (1, 2) if is_ids else 0))


def mask_at(rule: MaskSpec, bound: Bound, heads: tuple[int, ...], places: Places) -> Mask:
    """The mask of `rule` in n tiles at once: broadcastable to `(n, len(heads), queries, keys)`.

    Positions have shapes `(n, 1, queries, 1)` and `(n, 1, 1, keys)` in place of `(queries, 1)`
    and `(1, keys)`: code that compares them element-wise runs unchanged.
    """
    query_positions = places.take(bound.query_positions, places.queries)
    positions = query_positions, places.take(bound.key_positions, places.keys)
    return _answers(rule, bound, heads, positions, lambda value: _at(value, heads, places))


def _answers(
    rule: MaskSpec,
    bound: Bound,
    heads: tuple[int, ...],
    positions: tuple[Tensor, Tensor],
    at: Callable[[Any], Any],
) -> Mask:
    """Combine the answers of the leaves by `rule`, for queries and keys at `positions`.

    `at` takes what a mask input holds there.
    """
    sizes = (None, len(heads), positions[0].shape[-2], positions[1].shape[-1])

    def leaf_mask(leaf: MaskSpec) -> Tensor:
        prepared = bound.leaf_inputs.get(leaf, {})
        inputs = {name: at(value) for name, value in prepared.items()}
        result = checked_answer(leaf, leaf.allowed(*positions, inputs))
        shape = tuple(result.shape)
        if len(shape) not in (2, 4) or not all(map(masks.fits, shape, sizes[-len(shape) :])):
            raise ValueError(
                f"`{type(leaf).__name__}.allowed` must return a tensor of shape (queries or 1, "
                "keys or 1) or (batch or 1, heads or 1, queries or 1, keys or 1), here of "
                f"{sizes[2]} queries and {sizes[3]} keys. Received: shape {shape}. Compare "
                "`query_positions` (queries, 1), `key_positions` (1, keys) and the sides of "
                "`inputs` element-wise, which gives it."
            )
        return result

    # Not & and |: a JAX array on their left cannot meet a symbolic Keras tensor.
    return masks.lift(rule.fold(leaf_mask, ops.logical_and, ops.logical_or, ops.logical_not))


def heads_are_spread() -> bool:
    """Whether heads may live on several devices, as Keras' distribution in force says."""
    distribution = keras.distribution.distribution()
    is_jax = keras.backend.backend() == "jax"  # no other backend has it
    return is_jax and isinstance(distribution, keras.distribution.ModelParallel)


def by_head(
    groups: list[tuple[MaskSpec, tuple[int, ...]]], heads: int, of_groups: list[Mask]
) -> Mask:
    """For each of so many heads the mask of its group; `groups` come from `head_groups`.

    Nothing is cut or joined along the axis of heads: where they are spread over devices, each
    device makes the masks of its own heads, and none is sent.
    """
    if len(groups) == 1:
        return of_groups[0]
    is_member = [np.isin(range(heads), members)[:, None, None] for _, members in groups]
    return functools.reduce(ops.logical_or, map(ops.logical_and, is_member, of_groups))


def _at(value: Any, heads: tuple[int, ...], places: Places) -> Any:
    """A prepared mask input at the places of several tiles, shaped to broadcast over them."""

    def side(tensor: Tensor | None, of_one: Tensor, of_all: Tensor) -> Tensor | None:
        if tensor is None:
            return None
        of_examples, length = tensor.shape  # 1 serves every example, or position
        at = of_all if of_examples != 1 else of_one
        if length == 1:
            at = ops.zeros_like(places.examples) if of_examples == 1 else places.examples
        if places.by_example and of_examples != 1:  # no example leaves its device
            at = ops.zeros_like(places.examples) if length == 1 else of_one
            rows = ops.reshape(at, (masks.sizes(tensor)[0], -1))
            return ops.reshape(ops.take_along_axis(tensor, rows, axis=1), masks.sizes(at))
        return places.take(ops.reshape(tensor, (-1,)), at)

    if isinstance(value, Sides):
        of_query = side(value.query, places.queries, places.rows)
        return Sides(of_query, side(value.key, places.keys, places.columns))
    return _pairs_at(_select_heads(value, heads), places)


def _pairs_at(value: Tensor, places: Places) -> Tensor:
    """Cut n tiles `(n, h, queries or 1, keys or 1)` out of `(B or 1, h, T or 1, S or 1)`."""
    dtype = keras.backend.standardize_dtype(places.examples.dtype)
    (batch, heads, queries, keys), examples = masks.sizes(value, dtype), places.examples
    if value.shape[0] in (1, None):  # 1 serves every example, and may show when a graph runs
        examples = ops.minimum(examples, batch - 1)
    rows = examples * heads + ops.reshape(ops.arange(heads, dtype=dtype), (-1, 1, 1))
    rows = rows * queries  # of each tile and head the first
    rows = ops.squeeze(rows if value.shape[2] == 1 else rows + places.queries, 3)
    found = places.take(ops.reshape(value, (-1, keys)), rows)
    if value.shape[3] == 1:
        return found
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(found, places.keys[:, 0, 0], axis=3, batch_dims=1)
    return ops.take_along_axis(found, places.keys, axis=3)


def _select_heads(mask: Mask, heads: tuple[int, ...]) -> Mask:
    """A whole mask for some heads, or for any."""
    if mask.shape[1] is None:  # 1 or all heads, known when the graph runs
        place = ops.minimum(ops.convert_to_tensor(heads, "int32"), masks.sizes(mask)[1] - 1)
        return ops.take(mask, place, axis=1)
    return mask if mask.shape[1] in (1, len(heads)) else ops.take(mask, list(heads), axis=1)


@made_once
def mask_of_all_heads(spec: MaskSpec, bound: Bound, num_heads: int) -> Mask:
    """The whole mask, `(B or 1, H or 1, T, S)`."""
    groups = head_groups(spec, num_heads)
    # A positional rule may come back (1, S) or (T, 1): and it with ones of the full size.
    ones = ops.logical_and(
        (bound.query_positions >= bound.query_positions)[None, None, :, None],
        bound.key_positions >= bound.key_positions,
    )
    if heads_are_spread():
        every = tuple(range(num_heads))
        parts = [mask_of_heads(rule, bound, every) for rule, _ in groups]
        return ops.logical_and(by_head(groups, num_heads, parts), ones)
    parts = [mask_of_heads(rule, bound, heads) for rule, heads in groups]
    if len(parts) == 1:
        return ops.logical_and(parts[0], ones)
    for part in parts:  # rules with and without a batch axis are joined: each gets one
        first = part[:, :1, :1, :1]
        ones = ops.logical_and(ones, ops.logical_or(first, ops.logical_not(first)))
    of_head = [ones] * num_heads
    for (_, heads), part in zip(groups, parts, strict=True):
        full = ops.logical_and(part, ones)
        for i, head in enumerate(heads):
            of_head[head] = full if full.shape[1] == 1 else full[:, i : i + 1]
    return ops.concatenate(of_head, axis=1)
