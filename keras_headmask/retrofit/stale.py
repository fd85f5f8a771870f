"""Functions compiled from a model before it had a rule: they would silently run without it.

Not found are what `jax.jit` and `torch.compile` made, a concrete function kept without its
`tf.function`, and a `Dataset.map` that calls the model: those must be made anew.
"""

import contextlib
import gc
from typing import Any

import keras

from keras_headmask import _keras

_COMPILERS = {
    "tensorflow": "`tf.function`",
    "jax": "`jax.jit`, `keras.remat`, `ops.cond` or loop",  # JAX keeps what each of them traced
    "torch": "`torch.compile`",
}
# Those of Keras, which makes them again when they are needed.
_FUNCTIONS = "train_function", "test_function", "predict_function", "generate_function"


def drop_all_that_run(layers: list[keras.Layer]) -> None:
    """Drop Keras' compiled functions of every model that holds one of `layers`.

    Raises for a `tf.function` that has traced one of them: it belongs to the user, and only the
    user can make it anew.
    """
    if names := traced(layers):
        raise ValueError(
            "`copy=False` needs a model that no `tf.function` has traced: what was traced before "
            f"would go on without the rule. Received: a model whose attention is in {names}. Drop "
            "those functions (`del`) before this call and make them anew from its result; or pass "
            "copy=True, which leaves the model as it is."
        )
    sought = {id(layer) for layer in layers}
    for model in _alive(keras.Model):
        if sought & {id(layer) for layer in _keras.layers_of(model)}:
            vars(model).update(dict.fromkeys(vars(model).keys() & set(_FUNCTIONS)))


def traced(layers: list[keras.Layer]) -> list[str]:
    """The names of the functions whose traces read weights of `layers`."""
    if keras.backend.backend() != "tensorflow":
        return []
    if names := _reading(layers):
        gc.collect()  # reference cycles live until a collection: some may be gone
        names = _reading(layers)
    return names


def _reading(layers: list[keras.Layer]) -> list[str]:
    weights = {id(weight.value) for layer in layers for weight in layer.weights}
    functions = [f for f in _alive(_keras.tensorflow.function_type()) if not _is_of_keras(f)]
    return sorted({f.name for f in functions if _reads(f, weights)})


def _is_of_keras(function: Any) -> bool:
    """Whether a model's trainer or KerasHub made it: TensorFlow keeps what `drop` dropped alive."""
    return _keras.tensorflow.is_of_trainer(function) or function.name == "generate_step"


def _reads(function: Any, weights: set[int]) -> bool:
    for trace in _keras.tensorflow.traces(function):
        # (A trace whose variables are gone raises here, and cannot run.)
        with contextlib.suppress(AssertionError):
            if any(id(variable) in weights for variable in trace.variables):
                return True
    return False


def _alive(kind: type) -> list[Any]:
    # (By the type: `isinstance` reads `__class__`, at which lazy objects load something. There are
    # millions of objects, and few classes.)
    kinds = _with_subclasses(kind)
    return [x for x in gc.get_objects() if type(x) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*(_with_subclasses(each) for each in below))


def graph_being_built() -> Any:
    """The TensorFlow graph that is being built; `None` outside of graphs and on other backends."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def check_not_traced(layers: list[keras.Layer]) -> None:
    """Raise if a model that was just made has `tf.function`s of its own that call `layers`."""
    if traced(layers):
        name = next((layer.name for layer in layers if traced([layer])), layers[0].name)
        raise ValueError(in_own_function(name))


def check_not_in_own_function(name: str, bound_in: Any) -> None:
    """Raise if the layer runs in a `tf.function` inside of the forward whose graph is `bound_in`.

    Or inside Keras' inference of shapes: its trace would live on, too.
    """
    graph, inside = graph_being_built(), False
    while graph is not None and graph is not bound_in and hasattr(graph, "outer_graph"):
        if _keras.tensorflow.infers_shapes(graph):
            bound_in = graph
            break

        # Loops and branches have graphs of classes of their own, made anew for each forward.
        inside = inside or _keras.tensorflow.is_function_graph(graph)
        graph = graph.outer_graph
    if inside and (bound_in is None or graph is bound_in):
        raise RuntimeError(in_own_function(name))


def in_own_function(name: str) -> str:
    backend = keras.backend.backend()
    way_out = ""
    if backend == "jax":
        way_out = (
            " If it is no `jax.jit`, you can also define `compute_output_spec` in the layer that "
            "has it, and give it a new function in each call: then nothing is traced before the "
            "rule has its inputs."
        )
    return (
        f"The attention layer '{name}' is called in a {_COMPILERS[backend]} inside the model. Such "
        "a function keeps what it traced first: attention without the rule, or under the ids of "
        "another call. Call the layer outside of it; `compile`, `predict` and `export` make one "
        f"graph of the whole model.{way_out}"
    )
