"""In a TensorFlow graph, layers with the same rule share one function.

A model of 24 layers holds, exports and loads each loop once.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention.tiled_python import Part, is_forward_only
from keras_headmask.rules.evaluation import Bound


def call(how: Callable, part: Part, *operands: Any) -> Any:
    """`how(part, *operands)`."""
    if tf.executing_eagerly() or part.dropout is not None:
        return how(part, *operands)
    bound = part.bound
    names = tuple((leaf, tuple(values)) for leaf, values in bound.leaf_inputs.items())
    values = [list(values.values()) for values in bound.leaf_inputs.values()]
    shared = _shared(how, part._replace(bound=None), names, is_forward_only())
    return shared(bound.query_positions, bound.key_positions, values, *operands)


@functools.lru_cache(maxsize=128)
def _shared(how: Callable, part: Part, names: tuple, forward_only: bool) -> Callable:
    """`how` as a function of tensors alone, for a part without its `bound`.

    `forward_only` is part of the key: what was traced with gradients is not for an export.
    """

    # Not inlined, or the graph would hold a copy for each call again, and be optimised as many.
    @tf.function(autograph=False, experimental_attributes=_keras.NOT_INLINED)
    def attend(queries: Any, keys: Any, values: list, *operands: Any) -> Any:
        inputs = {
            leaf: dict(zip(of_leaf, given, strict=True))
            for (leaf, of_leaf), given in zip(names, values, strict=True)
        }
        return how(part._replace(bound=Bound(queries, keys, inputs)), *operands)

    return attend
