"""Private names of TensorFlow, and why each is touched."""

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

# Attributes of a function in a graph: stays one function; XLA compiles it.
NOT_INLINED = {"_noinline": True}
XLA_MUST_COMPILE = "_XlaMustCompile"


def exempt_from_autograph(package: str) -> None:
    """Let AutoGraph leave the functions of `package` as they are written, as it leaves Keras' own.

    In a user's `tf.function` it would rewrite 200 of them before the first call, for seconds; and
    `do_not_convert` would have to stand at each public function and at each layer's `call`.
    """
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert(package), *config.CONVERSION_RULES)


def custom_gradient(function: Callable) -> Callable:
    """`tf.custom_gradient` for a `function` of tensors, whose graph can be freed.

    `function` returns a tensor, and a function that gives the gradients of the operands. In a graph
    TensorFlow registers that one under a name for good: it holds the graph, and that the variables.
    Here the operation holds it, as the call of a `tf.function` holds its gradient.
    """

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        import tensorflow as tf

        if tf.executing_eagerly():
            return tf.custom_gradient(function)(*operands)
        operands = tuple(map(tf.convert_to_tensor, operands))
        result, gradient = function(*operands)
        rest = lambda upstream, *_: [None, *gradient(upstream)]  # noqa: E731
        return _with_gradient(function.__name__, [result, *operands], rest)[0]

    return call


def _with_gradient(name: str, tensors: list[Any], gradients: Callable) -> list[Any]:
    """`tensors`, whose gradients are `gradients(*upstream)`."""
    import tensorflow as tf
    from tensorflow.python.eager import record

    graph = tf.compat.v1.get_default_graph()
    of_operation = {"IdentityN": lambda _, *upstream: gradients(*upstream)}
    # (A `ForwardAccumulator` would ask for the gradient within, where another may not be held.)
    with unrecorded(), graph._override_gradient_function(of_operation):
        identities = tf.identity_n(tensors)
    record.record_operation(name, identities, tensors, gradients)  # for a `GradientTape`
    return identities


def for_branches(condition: Any, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """`tensors` for each of two branches, of which the second runs where `condition` is false.

    Their gradient is what that branch gives: TensorFlow would add the zeros of the other.
    """
    import tensorflow as tf

    count = len(tensors)

    def gradients(*upstream: Any) -> list[Any]:
        first, second = upstream[:count], upstream[count : 2 * count]
        return [*tf.cond(condition, lambda: first, lambda: second), *[None] * count]

    copies = _with_gradient("for_branches", [*tensors, *tensors], gradients)
    return copies[:count], copies[count:]


def unrecorded() -> AbstractContextManager[None]:
    """A context without derivatives, for any tape or `ForwardAccumulator`."""
    from tensorflow.python.eager import record

    return record.stop_recording()


def in_forward_mode(*tensors: Any) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of `tensors`.

    It raises for a `tf.cond` in a branch of another.
    """
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def in_vectorized_map() -> bool:
    """Whether `tf.vectorized_map` traces, or a function inside: it has no gradient of `tf.cond`."""
    import tensorflow as tf

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if re.search(r"(^|/)loop_body(_\d+)?(/|$)", graph.get_name_scope()):  # the second: `_1`
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def outermost_graph() -> Any:
    """The graph of the function that is traced, whatever function, loop or branch it is now in."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        graph = outer
    return graph


def in_xla() -> bool:
    """Whether XLA compiles what TensorFlow traces now: it cuts no slice of unknown length."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def checks_numerics() -> bool:
    """Whether TensorFlow raises for inf and NaN: `tf.debugging.enable_check_numerics`."""
    if keras.backend.backend() != "tensorflow":
        return False
    from tensorflow.python.debug.lib import check_numerics_callback as checks

    return getattr(checks._state, "check_numerics_callback", None) is not None


def are_as_long(one: Any, other: Any) -> bool:
    """Whether two tensors of a graph have one batch and one length, as made of one tensor.

    So are the projections of one sequence: no operation between changes its first two axes.
    """

    def source(tensor: Any) -> Any:
        if hasattr(tensor, "numpy"):  # of no graph
            return tensor
        while (operation := tensor.op).inputs:
            first, *others = operation.inputs
            keeps = operation.type in ("Identity", "Cast", "BiasAdd")
            if operation.type == "Einsum":
                letters = operation.get_attr("equation").decode().replace("->", ",").split(",")
                keeps = "." not in letters[0] and letters[0][:2] == letters[-1][:2]
            elif operation.type in ("AddV2", "Mul", "Sub"):
                ranks = [x.shape.rank for x in (first, *others)]
                keeps = None not in ranks and ranks[1] <= ranks[0] - 2
            if not keeps:
                break
            tensor = first
        return operation.outputs[tensor.value_index]

    return source(one) is source(other)


def in_function(inside: Any = None) -> bool:
    """Whether a `tf.function` is traced now, inside of the graph `inside` if that is given.

    Those around Keras' inference of shapes do not count, nor do loops and branches: their graphs
    have classes of their own.
    """
    import tensorflow as tf

    found, graph = False, None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph not in (None, inside):
        if getattr(graph, "name", "").startswith("scratch_graph"):  # Keras infers shapes
            break
        found = found or type(graph).__name__ == "FuncGraph"
        graph = getattr(graph, "outer_graph", None)
    return found and (inside is None or graph is not None)


def without_number(name: str) -> str:
    """The name of a layer or a scope as it was before it got a number, since another had it."""
    return re.sub(r"_\d+$", "", name)


def scopes_in_traces(holder: Any) -> set[str]:
    """The scopes, as of layers, in what `tf.function`s among the attributes of an object traced."""
    import tensorflow as tf

    kind = tf.types.experimental.PolymorphicFunction
    attributes = [x for place in (holder, *type(holder).__mro__) for x in vars(place).items()]
    functions = [getattr(holder, name) for name, value in attributes if isinstance(value, kind)]
    # (A subclass may override one by what is none.)
    of_all = [x._list_all_concrete_functions() for x in functions if isinstance(x, kind)]
    operations = [op for traces in of_all for x in traces for op in x.graph.get_operations()]
    return {without_number(scope) for op in operations for scope in op.name.split("/")[:-1]}
