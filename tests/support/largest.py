"""The largest tensor that a function makes: what must not be made whole shows by its size."""

import math

import keras


def largest_made(function, *arrays):
    """On the backend in use. On TensorFlow in a graph of known shapes."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return largest_in_tensorflow(function, *arrays)
    return (largest_in_jax if backend == "jax" else largest_in_torch)(function, *arrays)


def largest_in_tensorflow(function, *arrays):
    import tensorflow as tf

    given = [tf.TensorSpec(x.shape, x.dtype) for x in arrays]
    graph = tf.function(function).get_concrete_function(*given).graph
    return max(math.prod(size or 1 for size in shape) for _, shape in shapes_in(graph))


def shapes_in(graph, seen=None):
    """The static shape of every tensor in a graph and in the functions that it calls."""
    from tensorflow.python.framework import func_graph

    seen = set() if seen is None else seen
    if id(graph) in seen:
        return
    seen.add(id(graph))
    for op in graph.get_operations():
        for out in op.outputs:
            if out.shape.rank is not None:
                yield op.type, out.shape.as_list()
        for attribute in op.node_def.attr.values():
            if attribute.HasField("func"):
                inner = graph._get_function(attribute.func.name)
                if inner is not None and isinstance(inner.graph, func_graph.FuncGraph):
                    yield from shapes_in(inner.graph, seen)


def largest_in_jax(function, *arrays):
    """The size of the largest array that a traced function makes, in what it calls too."""
    import jax

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (math.prod(out.aval.shape) for out in equation.outvars)
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*arrays).jaxpr))


def largest_in_torch(function, *arrays):
    """The size of the largest tensor that any operation gives while the function runs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    with Watch():
        function(*arrays)
    return largest[0]
