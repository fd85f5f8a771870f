"""What a TensorFlow graph needs: each mask and plan once, and sizes checked when it runs.

All layers of a model share masks and plans. The graph holds the shared tensors, so they go with it,
and no other graph, thread or call meets them. A loop's body and a branch are graphs of their own.
(XLA computes equal expressions once, and so does PyTorch's compiler.)

`check_inputs` checks static shapes; here are the checks of operands and mask inputs whose sizes are
known only at the run. (JAX knows a varying size by its name; PyTorch and eager TensorFlow know all
sizes.)
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask._keras import are_as_long
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules.protocol import Sides, Sizes

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable)
_DEEPEST = 40  # operations between a tensor and those it is made of
_LONGEST = 1024  # bytes of a constant that are compared
# Operations that give equal results for equal inputs. (Not so a `PlaceholderWithDefault`, the loop
# variable of `tf.vectorized_map`, though TensorFlow does not call it stateful.)
_PURE = re.compile(
    r"Abs|Add|AddV2|All|Any|ArgMax|ArgMin|BroadcastTo|Cast|ConcatV2|Cumsum|EnsureShape|Equal"
    r"|ExpandDims|Fill|FloorDiv|FloorMod|GatherNd|GatherV2|Greater|GreaterEqual|Identity|Less"
    r"|LessEqual|LogicalAnd|LogicalNot|LogicalOr|MatrixBandPart|Max|Maximum|Min|Minimum|Mul|Neg"
    r"|NotEqual|OneHot|OnesLike|Pack|Pad|PadV2|Prod|Range|Rank|Reshape|ReverseV2|SelectV2|Shape"
    r"|Sign|Size|Slice|Split|SplitV|Squeeze|StridedSlice|Sub|Sum|Tile|Transpose|Unpack|ZerosLike"
)
OPERANDS = "`query` (B, T, H, D), `key` (B, S, Hk, D) and `value` (B, S, Hk, Dv) do not fit."


def once(make: Callable[[], T], *key: Any) -> T:
    """`make()`, or its result for an equal `key` earlier in this graph.

    A key holds values and tensors; a tensor is equal to itself alone.
    """
    if keras.backend.backend() != "tensorflow":
        return make()
    import tensorflow as tf

    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    values = _held(graph, "headmask_made")
    try:
        name = _named(key), tf.distribute.get_replica_context()
        hash(name)
    except TypeError:  # of a variable, or of a field of a user's own kind
        return make()
    if name not in values:
        values[name] = make()
    return values[name]


def made_once(function: Function) -> Function:
    """Decorator: let `function` share its result, by `once`, among calls with equal arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return once(lambda: function(*args, **kwargs), function.__name__, args, kwargs)

    return cast("Function", call)


def _held(graph: Any, name: str) -> dict:
    if not hasattr(graph, name):
        setattr(graph, name, {})
    return getattr(graph, name)


def _named(value: Any) -> Any:
    import tensorflow as tf

    if tf.is_tensor(value):
        if not isinstance(value, tf.Tensor):
            raise TypeError("A variable may have another value in the next layer.")
        return value.ref()  # (holds it: once it is gone, another may have its `id`)
    if isinstance(value, Mapping):
        return tuple((k, _named(v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(_named, value)
    return type(value).__name__, value


def first_equal(mask: Tensor) -> Tensor:
    """The first tensor of a graph that the same pure operations compute from the same tensors.

    For masks beside the rule: each block of KerasHub makes its own of one padding mask, and nobody
    but the graph knows that they are equal.
    """
    if keras.backend.backend() != "tensorflow":
        return mask
    import tensorflow as tf

    if not isinstance(mask, tf.Tensor) or hasattr(mask, "numpy"):
        return mask
    name, number = _first_operation(mask, _DEEPEST)
    return mask.graph.get_operation_by_name(name).outputs[number]


def _first_operation(tensor: Any, deepest: int) -> tuple[str, int]:
    """The first operation in the graph of `tensor` that computes it, and which of its results."""
    op, names = tensor.op, _held(tensor.graph, "headmask_names")
    if op.name not in names:
        names[op.name] = names.setdefault(_computed(op, deepest), op.name)
    return names[op.name], tensor.value_index


def _computed(op: Any, deepest: int) -> Any:
    """A key that is the same for equal operations: type, attributes, device and inputs."""
    is_constant = op.type == "Const" and op.node_def.ByteSize() <= _LONGEST
    if op.control_inputs or not (is_constant or (_PURE.fullmatch(op.type) and deepest > 0)):
        return "itself", op.name
    attrs = op.node_def.attr
    how = tuple((k, attrs[k].SerializeToString(deterministic=True)) for k in sorted(attrs))
    return op.type, how, op.device, *(_first_operation(x, deepest - 1) for x in op.inputs)


# --- Sizes that are known at the run --------------------------------------------------------------


def batch_of(mask_input: Any) -> Length | None:
    """The number of examples that ids or flags show."""
    if not isinstance(mask_input, Sides):
        return None
    return masks.sizes(mask_input.query if mask_input.key is None else mask_input.key)[0]


def sizes_from_input(
    sizes: Sizes,
    name: str,
    mask_input: Any,
    read: Iterable[str],
    is_cut: bool,
    is_self: bool,
    query: Tensor,
) -> tuple[Sizes, Tensor]:
    """Replace each size that is unknown until the run by that of a mask input; check the query.

    `sizes` come from the operands of one layer. A mask input is the same tensor for all layers, so
    a mask that is made of its sizes is shared, too. The graph raises where the two sizes differ.
    `is_self`: there are as many queries as keys.
    """
    pair = mask_input if isinstance(mask_input, Sides) else Sides(mask_input, mask_input)
    read_sizes = sizes
    for side, plural in (("key", "keys"), ("query", "queries")):
        tensor = getattr(pair, side)
        is_other = side not in read or tensor is None or (side == "query" and is_cut)
        if is_other or len(tensor.shape) != 2:
            continue
        _, input_sizes = _shape_and_sizes(name, tensor)
        for field, axis in (("batch", 0), (plural, 1)):
            size = input_sizes[axis] if tensor.shape[axis] is None else tensor.shape[axis]
            of_layer = getattr(sizes, field)
            if not isinstance(of_layer, int) and getattr(read_sizes, field) is of_layer:
                read_sizes = read_sizes._replace(**{field: size})
    if is_self:
        length = read_sizes.keys if read_sizes.queries is sizes.queries else read_sizes.queries
        read_sizes = read_sizes._replace(queries=length, keys=length)
    if all(a is b for a, b in zip(read_sizes, sizes, strict=True)):
        return sizes, query
    axes = [(sizes[:2], read_sizes[:2]), (sizes[2:], read_sizes[2:])]
    if is_self:
        axes = axes[:1]
        if pair.query is pair.key:  # then either side says it
            read = ["key" if "key" in read else "query"]
    return read_sizes, _checked_query(query, axes, checks(name, pair, read, sizes, is_cut))


def _shape_and_sizes(name: str, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The shape of a mask input, and its sizes, once for all layers."""
    import tensorflow as tf

    def found() -> tuple[Tensor, list[Tensor]]:
        shape = tf.shape(tensor)
        return shape, tf.unstack(shape)

    return once(found, "sizes", name, tensor)


def _checked_query(query: Tensor, axes: list[tuple[Any, Any]], checks: Sequence[Any]) -> Tensor:
    """`query`; the graph raises where two tuples of sizes differ.

    XLA drops assertions, but never the computation of a shape. So the check is `ConcatOffset`,
    which raises if two shapes do not fit; its first offset is 0, and 0 is added to the shape.
    """
    import tensorflow as tf

    differ = [pair for pair in axes if any(a is not b for a, b in zip(*pair, strict=True))]
    pairs = [[_four(*sizes) for sizes in pair] for pair in differ]
    shape, last = tf.shape(query), _constant(3)
    with tf.control_dependencies(checks):  # they say more
        for pair in pairs:
            name = "mask_input_of_another_shape"
            shape += tf.raw_ops.ConcatOffset(concat_dim=last, shape=pair, name=name)[0]
        checked = tf.reshape(query, shape)
    checked.set_shape(query.shape)
    return checked


def _four(*sizes: Length) -> Tensor:
    """A shape of rank 4 that begins with `sizes`."""
    import tensorflow as tf

    shape = [_constant(x) if isinstance(x, int) else x for x in (*sizes, 1, 1, 1)[:4]]
    return once(lambda: tf.stack(shape), "shape", *shape)


def _constant(value: Any) -> Tensor:
    """A constant that all layers share. (Each branch is a graph and has its own.)"""
    import tensorflow as tf

    return once(lambda: tf.constant(value), "constant", value)


def operand_checks(query: Tensor, key: Tensor, value: Tensor) -> list[Any]:
    """The operation that raises where sizes of the operands `(B, L, H, size)` do not fit.

    Operands of known sizes, or made of one tensor, need no check.
    """
    import tensorflow as tf

    def size(tensor: Tensor, axis: int) -> Length:
        return once(lambda: masks.sizes(tensor), "sizes of operand", tensor)[axis]

    pairs = [
        (size(one, axis), size(other, axis))
        for one, other, axes in ((query, key, (0,)), (key, value, (0, 1)))
        if not are_as_long(one, other)
        for axis in axes
        if None in (one.shape[axis], other.shape[axis])
    ]
    if not pairs:
        return []
    fits = tf.reduce_all(tf.equal(*map(tf.stack, zip(*pairs, strict=True))))
    data = [_constant(f"{OPERANDS} Received: shapes"), *map(tf.shape, (query, key, value))]
    return [tf.raw_ops.Assert(condition=fits, data=data, summarize=4)]


def after(checks: Sequence[Any], tensor: Tensor) -> Tensor:
    """`tensor`, computed after `checks`."""
    if not checks:
        return tensor
    import tensorflow as tf

    with tf.control_dependencies(checks):
        return tf.identity(tensor)


def checks(
    name: str,
    mask_input: Any,
    read: Iterable[str],
    sizes: Sizes,
    is_cut: bool = False,
    heads: int | None = None,
) -> list[Any]:
    """Operations that raise where a graph runs on other sizes; none if all sizes are known.

    `mask_input` is a whole mask of rank 4, or `Sides`, of which the rule reads some. `is_cut`: ids
    of the queries are cut out of longer ones. (What is wrong with flags beside the rule, TensorFlow
    says where they are broadcast.)
    """
    lengths = {"queries": sizes.queries, "keys": sizes.keys}
    if not isinstance(mask_input, Sides):
        wanted = {"examples": sizes.batch, "heads": heads} | lengths
        return [] if is_outside(name) and heads is None else _check(name, mask_input, wanted, True)
    operations = []
    for side, plural in (("key", "keys"), ("query", "queries")):
        tensor = getattr(mask_input, side)
        if is_outside(name) or side not in read or tensor is None:
            continue
        is_seen = side == "query" and "key" in read and tensor is mask_input.key
        wanted = {"examples": None if is_seen else sizes.batch}
        wanted[plural] = None if is_cut and side == "query" else lengths[plural]
        operations += _check(name, tensor, wanted)
    return operations


def _check(
    name: str, tensor: Tensor, wanted: Mapping[str, Length | None], broadcasts: bool = False
) -> list[Any]:
    """The operation that raises if the axes of `tensor` have other sizes, 1 too unless it fits."""
    axes = [
        (axis, counted, size)
        for axis, (counted, size) in enumerate(wanted.items())
        if _is_open(tensor, axis, size) and not (broadcasts and tensor.shape[axis] == 1)
    ]
    if not axes:
        return []
    import tensorflow as tf

    place = "`attention_mask` (or `mask`)" if is_outside(name) else f"`mask_inputs[{name!r}]`"
    names = ", ".join(counted for _, counted, _ in axes)
    shape, found = _shape_and_sizes(name, tensor)
    given, expected = [found[axis] for axis, *_ in axes], [size for *_, size in axes]
    if broadcasts:  # as vectors, which take fewer nodes here
        given, expected, note = [tf.stack(given)], [tf.stack(expected)], "(1 broadcasts)"
        fits = tf.reduce_all(tf.equal(given[0], expected[0]) | tf.equal(given[0], 1))
    else:
        note = "(1 does not broadcast: repeat it)"
        fits = functools.reduce(tf.logical_and, map(tf.equal, given, expected))
    data = [f"{place} has ({names}) =", *given, "where the attention has", *expected, note]
    data = [_constant(x) if isinstance(x, str) else x for x in (*data, "Received: shape")]
    return [tf.raw_ops.Assert(condition=fits, data=[*data, shape], summarize=4)]


def checked(
    name: str,
    mask_input: Any,
    prepared: Any,
    read: Iterable[str],
    sizes: Sizes,
    checks: Sequence[Any],
) -> Any:
    """The tensors that a leaf prepared from a mask input, computed after `checks`."""
    if not isinstance(prepared, Sides):
        return after(checks, prepared)
    sides = prepared
    for side, length in (("query", sizes.queries), ("key", sizes.keys)):
        tensor = getattr(prepared, side)
        if side in read and tensor is not None:
            if is_outside(name):
                tensor = _widened(tensor, sizes.batch, length)
            else:
                whole = getattr(mask_input, side, None)
                tensor = _checked_side(tensor, whole, sizes.batch, length, checks)
            sides = sides._replace(**{side: tensor})
    return sides if is_outside(name) else _with_known_batch(sides)


def _with_known_batch(sides: Sides) -> Sides:
    """`sides` with the static batch size of either: `==` refuses what might not broadcast."""
    known = [x.shape[0] for x in sides if x is not None and x.shape[0] not in (None, 1)]

    def with_batch(side: Tensor | None) -> Tensor | None:
        if not known or side is None or not _is_open(side, 0, known[0]):
            return side
        import tensorflow as tf

        return tf.ensure_shape(side, (known[0], *side.shape[1:]))

    return Sides(*map(with_batch, sides))


def standing_at(name: str, ids: Tensor, positions: Tensor) -> Tensor:
    """The ids of the queries, taken out of `ids` (B, keys) at `positions`, which must lie inside.

    XLA drops the check, and JAX has none: there the offset must be right.
    """
    are_symbolic = any(map(keras.backend.is_keras_tensor, (ids, positions)))
    if keras.backend.backend() == "tensorflow" and not are_symbolic:
        import tensorflow as tf

        first, dtype = positions[:1], positions.dtype
        length, queries = (tf.shape(x, dtype)[axis] for x, axis in ((ids, 1), (positions, 0)))
        fits = tf.reduce_all((first >= 0) & (first + queries <= length))
        data = ["query_offset =", first, "puts the queries outside", f"`mask_inputs[{name!r}]`"]
        data += ["of length", length, "Received: queries =", queries]
        check = tf.raw_ops.Assert(condition=fits, data=data)  # `None` outside of a graph
        positions = positions if check is None else after([check], positions)
    return ops.take(ids, positions, axis=1)


def is_outside(name: str) -> bool:
    """Whether `name` is a mask beside the rule, (B or 1, length or 1): `all_that_restricts`."""
    return name.startswith("(")


def _widened(side: Tensor, batch: Length | None, length: Length) -> Tensor:
    """`side` broadcast to `(batch, length)`; the graph raises where it does not fit.

    Without this, tiles would be cut out of a side that is too long as if it fitted.
    """
    wanted = batch, length
    if not any(_is_open(side, axis, size) for axis, size in enumerate(wanted)):
        return side
    pairs = zip(masks.sizes(side), wanted, strict=True)
    sizes = [
        known if size is None or side.shape[i] == 1 else size
        for i, (known, size) in enumerate(pairs)
    ]
    return ops.broadcast_to(side, sizes)


def _checked_side(
    side: Tensor,
    mask_input: Tensor | None,
    batch: Length | None,
    length: Length,
    checks: Sequence[Any],
) -> Tensor:
    """`side`; the graph raises if its shape is not `(batch, length)`.

    An axis of size 1 that the leaf made itself is allowed.

    XLA and other runtimes drop `checks`. Then ids that are too short would broadcast, and tiles
    would be cut out of longer ones. But every runtime refuses to concatenate tensors that differ
    in another axis. (TensorFlow optimizes a reshape, or a sum with zeros, away.)
    """
    if len(side.shape) != 2:
        return after(checks, side)
    shape = (None, None) if mask_input is None else mask_input.shape
    wanted = zip(side.shape, shape, (batch, length), strict=True)
    sizes = [1 if known == 1 and before != 1 else size for known, before, size in wanted]
    if not any(_is_open(side, axis, size) for axis, size in enumerate(sizes)):
        return after(checks, side)
    import tensorflow as tf

    with tf.control_dependencies(checks):
        # oneDNN logs where it must leave booleans to others.
        ids = tf.cast(side, "int32") if side.dtype == tf.bool else side
        beside = tf.zeros([*sizes, 1], ids.dtype)
        # The name stands in the errors of those runtimes.
        joined = tf.concat([tf.expand_dims(ids, 2), beside], 2, "mask_input_of_another_shape")
    sized, _ = tf.unstack(joined, axis=2)
    sized.set_shape(side.shape)
    return tf.cast(sized, side.dtype)


def _is_open(tensor: Tensor, axis: int, wanted: Length | None) -> bool:
    """Whether it is known only at the run if `axis` has the size `wanted`."""
    if keras.backend.backend() != "tensorflow" or keras.backend.is_keras_tensor(tensor):
        return False
    return wanted is not None and (tensor.shape[axis] is None or not isinstance(wanted, int))
