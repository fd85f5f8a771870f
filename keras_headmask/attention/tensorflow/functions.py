"""Functions of TensorFlow that a graph holds once, for all layers that call them."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention.tuning import functions_of_export, is_forward_only


def held() -> dict[tuple, Callable]:
    """By what makes them equal: the functions of what is traced now, or of all of an export.

    Kept for longer, they would be all that is left of models that are gone.
    """
    functions = functions_of_export()
    if functions is None:
        graph = _keras.outermost_graph()
        functions = getattr(graph, "headmask_functions", {})
        graph.headmask_functions = functions
    return functions


def for_equal_shapes(compute: Callable, *first: Any) -> Callable:
    """`compute`, after its `first` arguments, of tensors alone; traced once for equal shapes.

    TensorFlow puts it in place of each call. (What runs eagerly is not traced.)
    """
    if tf.executing_eagerly():
        return functools.partial(compute, *first)
    functions, key = held(), (compute, *first, is_forward_only(), _keras.checks_numerics())
    if key not in functions:
        functions[key] = tf.function(functools.partial(compute, *first), autograph=False)
    return functions[key]
