"""Attention that the graph of a functional model spells out: a softmax, and then a product."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_headmask import _keras


def softmaxes_of_attention(model: keras.Model) -> Iterator[Any]:
    """The softmax of attention that a graph spells out: of (..., queries, keys), then a product."""
    for graph in _keras.layers_of(model):
        if not isinstance(graph, _keras.Functional):
            continue
        nodes = list(_keras.nodes(graph))
        readers: dict[int, list[Any]] = {}
        for node in nodes:
            for tensor in node.input_tensors:
                readers.setdefault(id(tensor), []).append(node)
        for node in nodes:
            if (
                _is_softmax(node.operation)
                and any(map(_may_be_weights, node.outputs))
                and not _is_of_single_positions(node.outputs[0])
            ):
                waiting, seen = list(node.outputs), set()
                while waiting:
                    tensor = waiting.pop()
                    for reader in readers.get(id(tensor), ()):
                        if type(reader.operation).__name__ in _PRODUCTS:
                            yield node.operation
                            waiting = []
                            break
                        if id(reader) not in seen and any(map(_may_be_weights, reader.outputs)):
                            seen.add(id(reader))
                            waiting += reader.outputs


_PRODUCTS = "Matmul", "Einsum", "Dot", "Tensordot"


def _is_softmax(operation: Any) -> bool:
    named = getattr(getattr(operation, "activation", None), "__name__", "")
    return type(operation).__name__ == "Softmax" or named == "softmax"


def _may_be_weights(tensor: Any) -> bool:
    """Whether it may be probabilities: the last axes are queries and keys, equally long.

    (One row of weights alone pools a sequence.)
    """
    shape = tuple(tensor.shape)
    return len(shape) > 2 and shape[-2] != 1 and (shape[-1] is None or shape[-1] == shape[-2])


_DENSE = "Dense", "EinsumDense"


def _is_of_single_positions(tensor: Any) -> bool:
    """Whether numbers come from a Dense of one position each, as the shares of experts do.

    Those of attention come from pairs of positions: a product, a sum that broadcasts, or code that
    the graph does not show.
    """
    waiting, seen = [tensor], {id(tensor)}
    while waiting:
        tensor = waiting.pop()
        operation, inputs = _keras.made_by(tensor)
        name = type(operation).__name__
        if name in _DENSE and len(inputs[0].shape) <= 3:
            continue
        if name in _PRODUCTS or not _is_shown(operation):
            return False
        if len(inputs) > 1:
            inputs = [x for x in inputs if x.shape == tensor.shape]
        if not inputs or any(len(x.shape) > len(tensor.shape) for x in inputs):
            return False  # (a sum over features, say, of products of pairs)
        waiting += [x for x in inputs if id(x) not in seen]
        seen.update(map(id, inputs))
    return True


def _is_shown(operation: Any) -> bool:
    """Whether it is one of Keras' own, which runs no code of others."""
    is_own = _keras.is_own(operation, "ops", "layers")
    return is_own and not isinstance(operation, (keras.layers.Lambda, keras.layers.Wrapper))
