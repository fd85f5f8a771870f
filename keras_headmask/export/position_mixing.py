"""What layers say of positions: whether only attention mixes them.

If only attention carries something from one to another, padding that a server puts behind an
example does no harm where it is not attended. What is not known to keep positions apart counts as
mixing them.
"""

import keras
from keras import layers

from keras_headmask import _keras
from keras_headmask.retrofit.find import Found, find_attention
from keras_headmask.retrofit.graph import HeadMaskInputs

# fmt: off
# Each position by itself, exactly these classes: a subclass may do what it likes.
_APART = {
    layers.InputLayer, layers.Embedding, layers.Dense, layers.Dropout, layers.GaussianDropout,
    layers.GaussianNoise, layers.Activation, layers.ReLU, layers.LeakyReLU, layers.PReLU,
    layers.ELU, layers.Identity, layers.Masking, layers.Rescaling, layers.Add, layers.Subtract,
    layers.Multiply, layers.Average, layers.Maximum, layers.Minimum, HeadMaskInputs,
}
# Along the last axis alone, if that is the one they were given.
_ALONG_AN_AXIS = {
    layers.LayerNormalization, layers.RMSNormalization, layers.BatchNormalization,
    layers.Softmax, layers.Concatenate,
}
# Functions of `keras.ops` as they stand in a graph, by class name. A running sum looks back only,
# and padding comes last.
_OPS = {
    "Absolute", "Add", "Cast", "Clip", "Cumsum", "Divide", "Elu", "Equal", "Exp", "Gelu",
    "Greater", "GreaterEqual", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot",
    "LogicalOr", "Maximum", "Minimum", "Multiply", "Negative", "NotEqual", "Power", "Relu",
    "Rsqrt", "Sigmoid", "Sign", "Silu", "Softplus", "Sqrt", "Square", "Subtract", "Tanh",
    "TrueDivide", "Where",
}
# fmt: on


def what_mixes(model: keras.Model) -> str | None:
    """The first thing in `model` that may mix positions, in words; `None` if all is known."""
    found = find_attention(model)
    if found.unknown:
        return f"the attention layer {found.unknown[0]} is out of reach"
    if not isinstance(model, (_keras.Functional, keras.Sequential)):
        return f"`{type(model).__name__}` is a subclassed model, without a graph"
    if cross := [entry for entry in found.known if entry.kind != "self"]:
        return f"{cross[0]} attends, or may attend, to another sequence, which has its own lengths"
    return _of_graph(model, found)


def _of_graph(model: keras.Model, found: Found) -> str | None:
    graph = _keras.functional_of(model)
    attention = {id(entry.layer) for entry in found.known}
    for operation in graph.operations:
        if isinstance(operation, (_keras.Functional, keras.Sequential)):
            if reason := _of_graph(operation, found):
                return reason
        elif id(operation) not in attention and not _keeps_apart(operation):
            return f"'{operation.name}' ({type(operation).__name__}) may mix positions"
    return None


def _keeps_apart(operation: keras.Operation) -> bool:
    cls = type(operation)
    if cls in _ALONG_AN_AXIS:
        axis = operation.axis
        rank = len(_keras.calls_of(operation)[0].input_tensors[0].shape)
        last = [axis] if isinstance(axis, int) else list(axis)
        return rank > 2 and all(a in (-1, rank - 1) for a in last)
    if isinstance(operation, keras.Layer):
        return cls in _APART
    return _keras.is_own(operation, "ops") and cls.__name__ in _OPS
