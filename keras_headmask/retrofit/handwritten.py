"""Attention that steps spell out: a softmax, and then a product.

The steps are those of a functional model's graph, or what a backend shows of a layer's body.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.retrofit.steps import Step


def softmaxes_of_attention(model: keras.Model) -> Iterator[Any]:
    """The softmax of attention that a graph spells out: of (..., queries, keys), then a product."""
    for graph in _keras.layers_of(model):
        if isinstance(graph, _keras.Functional):
            nodes = _keras.nodes(graph)
            steps = (
                Step(_kind(x.operation), x.input_tensors, x.outputs, x.operation) for x in nodes
            )
            for step in softmaxes_among(steps):
                yield step.operation


def softmaxes_among(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps that are the softmax of attention, in whole or, as an `exp`, in part."""
    steps = list(steps)
    readers: dict[int, list[Step]] = {}
    makers: dict[int, Step] = {}
    for step in steps:
        makers.update((id(tensor), step) for tensor in step.outputs)
        for tensor in step.inputs:
            readers.setdefault(id(tensor), []).append(step)
    for step in steps:
        if (
            step.kind.endswith(("softmax", "exp"))  # the sum may be divided by before or after
            and any(map(_may_be_weights, step.outputs))
            and not _is_of_single_positions(step.outputs[0], makers, step.kind == "exp")
            and _meets_a_product(step, readers)
        ):
            yield step


_PRODUCTS = "Matmul", "Einsum", "Dot", "Tensordot"
_DENSE = "Dense", "EinsumDense"


def _kind(operation: Any) -> str:
    """The kind of step that an operation of a graph is."""
    name = type(operation).__name__
    named = getattr(getattr(operation, "activation", None), "__name__", "")
    if name in _DENSE:
        return "dense softmax" if named == "softmax" else "dense"
    if name in ("Softmax", "LogSoftmax") or named in ("softmax", "log_softmax"):
        return "softmax"
    if name == "Exp":
        return "exp"
    if name in _PRODUCTS:
        return "product"
    is_own = _keras.is_own(operation, "ops", "layers")
    runs_others = isinstance(operation, (keras.layers.Lambda, keras.layers.Wrapper))
    return "" if is_own and not runs_others else "hidden"


def _may_be_weights(tensor: Any) -> bool:
    """Whether it may be probabilities: the last axes are queries and keys, equally long.

    (One row of weights alone pools a sequence.)
    """
    shape = tuple(tensor.shape)
    return len(shape) > 2 and shape[-2] != 1 and (shape[-1] is None or shape[-1] == shape[-2])


def _meets_a_product(softmax: Step, readers: dict[int, list[Step]]) -> bool:
    waiting, seen = list(softmax.outputs), set()
    while waiting:
        for reader in readers.get(id(waiting.pop()), ()):
            if reader.kind == "product":
                return True
            if id(reader) not in seen and any(map(_may_be_weights, reader.outputs)):
                seen.add(id(reader))
                waiting += reader.outputs
    return False


def _is_of_single_positions(tensor: Any, makers: dict[int, Step], is_exp: bool) -> bool:
    """Whether numbers come from a Dense of one position each, as the shares of experts do.

    Those of attention come from pairs of positions: a product, a sum that broadcasts, or code that
    the graph does not show. An `exp` of an input is no softmax, nor is that of a logarithm of one,
    which is found by itself.
    """
    waiting, seen = [tensor], {id(tensor)}
    while waiting:
        tensor = waiting.pop()
        step = makers.get(id(tensor))
        if is_exp and (step is None or not step.inputs or step.kind.endswith("softmax")):
            continue
        if step is None or step.kind in ("product", "hidden"):
            return False
        if step.kind.startswith("dense") and _rank(step.inputs[0], makers) <= 3:
            continue
        inputs = step.inputs
        if len(inputs) > 1:
            inputs = [x for x in inputs if x.shape == tensor.shape]
        if not inputs or any(len(x.shape) > len(tensor.shape) for x in inputs):
            return False  # (a sum over features, say, of products of pairs)
        waiting += [x for x in inputs if id(x) not in seen]
        seen.update(map(id, inputs))
    return True


def _rank(tensor: Any, makers: dict[int, Step]) -> int:
    """The rank of a tensor before axes were merged, as TensorFlow does for a Dense."""
    rank = len(tensor.shape)
    step = makers.get(id(tensor))
    while step is not None and step.kind == "moved":
        rank = max(rank, len(step.inputs[0].shape))
        step = makers.get(id(step.inputs[0]))
    return rank
