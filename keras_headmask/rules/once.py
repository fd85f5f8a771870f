"""Masks and plans are computed once in a TensorFlow graph, and all layers of a model share them.

The graph holds the shared tensors, so they go with it, and no other graph, thread or call meets
them. A loop's body and a branch are graphs of their own. (XLA computes equal expressions once, and
so does PyTorch's compiler.)
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

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


def once(make: Callable[[], T], *key: Any) -> T:
    """`make()`, or its result for an equal `key` earlier in this graph.

    A key holds values and tensors. Two tensors are equal if the same pure operations compute them
    from the same tensors.
    """
    import keras

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
        # (`ref()` holds a tensor: once it is gone, another may have its `id`.)
        return value.ref() if hasattr(value, "numpy") else _tensor_key(value, _DEEPEST)
    if isinstance(value, Mapping):
        return tuple((k, _named(v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(_named, value)
    return type(value).__name__, value


def _tensor_key(tensor: Any, deepest: int) -> tuple[int, str, int]:
    """The graph of `tensor`, the first operation there that computes it, and which of its results.

    The graph belongs to the key: it may enclose the one that is traced, and the two may use equal
    names for different operations.
    """
    op, names = tensor.op, _held(tensor.graph, "headmask_names")
    if op.name not in names:
        names[op.name] = names.setdefault(_computed(op, deepest), op.name)
    return id(tensor.graph), names[op.name], tensor.value_index


def _computed(op: Any, deepest: int) -> Any:
    """A key that is the same for equal operations: type, attributes, device and inputs."""
    is_constant = op.type == "Const" and op.node_def.ByteSize() <= _LONGEST
    if op.control_inputs or not (is_constant or (_PURE.fullmatch(op.type) and deepest > 0)):
        return "itself", op.name
    attrs = op.node_def.attr
    how = tuple((k, attrs[k].SerializeToString(deterministic=True)) for k in sorted(attrs))
    return op.type, how, op.device, *(_tensor_key(x, deepest - 1) for x in op.inputs)
