"""Sizes of mask inputs that only the run of a TensorFlow graph shows are checked there.

`check_inputs` refuses what static shapes show. (JAX knows sizes that vary by their names, PyTorch
and eager TensorFlow know them all.)
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from keras_headmask import masks
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules.once import once
from keras_headmask.rules.protocol import Sides, Sizes

REPEAT = "To use the ids of one example for all, repeat them."


def batch_of(given: Any) -> Length | None:
    """The number of examples that ids or flags show."""
    if not isinstance(given, Sides):
        return None
    return masks.sizes(given.query if given.key is None else given.key)[0]


def given_sizes(
    own: Sizes,
    name: str,
    given: Any,
    read: Iterable[str],
    is_cut: bool,
    is_self: bool,
    query: Tensor,
) -> tuple[Sizes, Tensor]:
    """The sizes of attention, read off a mask input where only the run shows them, and the query.

    `own` are those of the operands of a layer. Those of an input are the same tensors for all
    layers, so what is made of them is, too. The query is checked: the graph raises where the two
    differ. `is_self`: queries and keys are known to be equally many.
    """
    pair = given if isinstance(given, Sides) else Sides(given, given)
    found = own
    for side, plural in (("key", "keys"), ("query", "queries")):
        tensor = getattr(pair, side)
        is_other = side not in read or tensor is None or (side == "query" and is_cut)
        if is_other or len(tensor.shape) != 2:
            continue
        _, sizes = _shape_and_sizes(name, tensor)
        for field, axis in (("batch", 0), (plural, 1)):
            size = sizes[axis] if tensor.shape[axis] is None else tensor.shape[axis]
            of_layer = getattr(own, field)
            if not isinstance(of_layer, int) and getattr(found, field) is of_layer:
                found = found._replace(**{field: size})
    if is_self:
        length = found.keys if found.queries is own.queries else found.queries
        found = found._replace(queries=length, keys=length)
    if all(a is b for a, b in zip(found, own, strict=True)):
        return own, query
    axes = [(own[:2], found[:2]), (own[2:], found[2:])]
    if is_self:
        axes = axes[:1]
        if pair.query is pair.key:  # then either side says it
            read = ["key" if "key" in read else "query"]
    return found, _of_sizes(query, axes, checks(name, pair, read, own, is_cut))


def _shape_and_sizes(name: str, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Its shape, and the sizes by the node whose name says which input has another rank."""
    import tensorflow as tf

    def found() -> tuple[Tensor, list[Tensor]]:
        shape = tf.shape(tensor)
        return shape, tf.unstack(shape, name=_of_another_rank(name))

    return once(found, "sizes", name, tensor)


def _of_sizes(query: Tensor, axes: list[tuple[Any, Any]], checks: Sequence[Any]) -> Tensor:
    """`query`, or a graph that raises where two tuples of sizes differ.

    XLA leaves `checks` out, but not what computes a shape: where two tensors of these sizes would
    stand if they were joined along an axis more. That is 0 for the first.
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
    """The same node for all layers, outside of branches, which are graphs of their own."""
    import tensorflow as tf

    return once(lambda: tf.constant(value), "constant", value)


def _after(checks: Sequence[Any], tensor: Tensor) -> Tensor:
    """`tensor`, once `checks` have run."""
    if not checks:
        return tensor
    import tensorflow as tf

    with tf.control_dependencies(checks):
        return tf.identity(tensor)


def checks(
    name: str, given: Any, read: Iterable[str], sizes: Sizes, is_cut: bool = False
) -> list[Any]:
    """Operations that raise, in the words of `check_inputs`, where a graph runs on other sizes.

    `given` is a whole mask of rank 4, or `Sides`, of which the rule reads some. `is_cut` says that
    the ids of the queries are cut out of longer ones. There are no operations if all sizes are
    known. (What is wrong with a mask beside the rule, TensorFlow says where masks meet.)
    """
    if is_outside(name):
        return []
    place, has = f"`mask_inputs[{name!r}]` has", "where the attention has"
    if not isinstance(given, Sides):
        axes = (0, "examples", sizes.batch), (2, "queries", sizes.queries), (3, "keys", sizes.keys)
        return [
            _check(name, given, axis, size, place, f"{counted} {has}", broadcasts=True)
            for axis, counted, size in axes
            if given.shape[axis] != 1 and _is_open(given, axis, size)
        ]
    made = []
    for side, plural, length in (("key", "keys", sizes.keys), ("query", "queries", sizes.queries)):
        tensor = getattr(given, side) if side in read else None
        if tensor is None:
            continue
        is_seen = side == "query" and "key" in read and tensor is given.key
        if not is_seen and _is_open(tensor, 0, sizes.batch):
            between = "examples where the batch has"
            made.append(_check(name, tensor, 0, sizes.batch, place, between, hint=REPEAT))
        if not (is_cut and side == "query") and _is_open(tensor, 1, length):
            made.append(_check(name, tensor, 1, length, f"{place} length", has, plural))
    return made


def checked(
    name: str,
    given: Any,
    prepared: Any,
    read: Iterable[str],
    sizes: Sizes,
    checks: Sequence[Any],
) -> Any:
    """What a leaf prepared of what was `given`, for the graph to read once `checks` have run."""
    if not isinstance(prepared, Sides):
        return _after(checks, prepared)
    made = prepared
    for side, length in (("query", sizes.queries), ("key", sizes.keys)):
        tensor = getattr(prepared, side)
        if side in read and tensor is not None:
            if is_outside(name):
                tensor = _widened(tensor, sizes.batch, length)
            else:
                whole = getattr(given, side, None)
                tensor = _of_size(tensor, whole, sizes.batch, length, checks)
            made = made._replace(**{side: tensor})
    return made if is_outside(name) else _of_one_batch(made)


def _of_one_batch(sides: Sides) -> Sides:
    """`sides` with the batch size that one of them shows: `==` refuses others with no rank."""
    known = [x.shape[0] for x in sides if x is not None and x.shape[0] not in (None, 1)]

    def of_batch(side: Tensor | None) -> Tensor | None:
        if not known or side is None or not _is_open(side, 0, known[0]):
            return side
        import tensorflow as tf

        return tf.ensure_shape(side, (known[0], *side.shape[1:]))

    return Sides(*map(of_batch, sides))


def standing_at(name: str, ids: Tensor, positions: Tensor) -> Tensor:
    """The part of `ids`, (B, keys), at the `positions` of the queries, or an error that says why.

    XLA leaves the check out, and JAX has none: there the offset must be right.
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
        positions = positions if check is None else _after([check], positions)
    return ops.take(ids, positions, axis=1)


def is_outside(name: str) -> bool:
    """Whether that is a mask beside the rule, (B or 1, length or 1): `all_that_restricts`."""
    return name.startswith("(")


def _widened(side: Tensor, batch: Length | None, length: Length) -> Tensor:
    """`side` of that size, if it has it or 1; else the graph raises.

    Cut into tiles, one that is too long would be read as if it fitted.
    """
    wanted = batch, length
    if not any(_is_open(side, axis, size) for axis, size in enumerate(wanted)):
        return side
    pairs = zip(masks.sizes(side), wanted, strict=True)
    sizes = [
        own if size is None or side.shape[i] == 1 else size for i, (own, size) in enumerate(pairs)
    ]
    return ops.broadcast_to(side, sizes)


def _of_size(
    side: Tensor,
    given: Tensor | None,
    batch: Length | None,
    length: Length,
    checks: Sequence[Any],
) -> Tensor:
    """`side` of shape `(batch, length)`, or a graph that raises.

    An axis that a leaf made 1 of what was `given` may stay.

    XLA and other runtimes leave `checks` out: ids that are too short would be broadcast, and those
    too long cut into tiles as if they fitted. All refuse to join tensors that differ in another
    axis. (TensorFlow removes a reshape, or a sum with zeros.)
    """
    if len(side.shape) != 2:
        return _after(checks, side)
    shape = (None, None) if given is None else given.shape
    wanted = zip(side.shape, shape, (batch, length), strict=True)
    sizes = [1 if known == 1 and before != 1 else size for known, before, size in wanted]
    if not any(_is_open(side, axis, size) for axis, size in enumerate(sizes)):
        return _after(checks, side)
    import tensorflow as tf

    with tf.control_dependencies(checks):
        # oneDNN logs where it must leave booleans to others.
        ids = tf.cast(side, "int32") if side.dtype == tf.bool else side
        beside = tf.zeros([*sizes, 1], ids.dtype)
        # The name stands in the errors of those runtimes.
        joined = tf.concat([tf.expand_dims(ids, 2), beside], 2, "mask_input_of_another_shape")
    own, _ = tf.unstack(joined, axis=2)
    own.set_shape(side.shape)
    return tf.cast(own, side.dtype)


def _is_open(tensor: Tensor, axis: int, wanted: Length | None) -> bool:
    """Whether only the run shows if that axis has the wanted size."""
    if keras.backend.backend() != "tensorflow" or keras.backend.is_keras_tensor(tensor):
        return False
    return wanted is not None and (tensor.shape[axis] is None or not isinstance(wanted, int))


def _check(
    name: str,
    tensor: Tensor,
    axis: int,
    wanted: Length | None,
    before: str,
    between: str,
    behind: str = "",
    hint: str = "",
    broadcasts: bool = False,
) -> Any:
    """An operation that raises if the size of `axis` is not `wanted`; its text holds both sizes."""
    import tensorflow as tf

    shape, sizes = _shape_and_sizes(name, tensor)
    size = sizes[axis]
    fits = tf.equal(size, wanted)
    if broadcasts:
        fits, behind = tf.logical_or(fits, tf.equal(size, 1)), "(1 broadcasts)"
    received = f"{behind}. Received: shape".removeprefix(". ")
    data = [before, size, between, wanted, received, shape, *([hint] if hint else [])]
    data = [_constant(x) if isinstance(x, str) else x for x in data]
    return tf.raw_ops.Assert(condition=fits, data=data, summarize=len(tensor.shape))


def _of_another_rank(name: str) -> str:
    """The name of a node. Servers do not check ranks: it fails, and the error shows its name."""
    named = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"mask_input_{named}_of_another_rank"
