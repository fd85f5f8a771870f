"""What the masked models that run now were called with, for the attention inside them to find.

A masked model opens a frame around its stock `call`. A frame belongs to one call in one thread, so
a model may run in many threads at once. Each model that runs, one inside another perhaps, has its
tensors there; each rule names the model that it belongs to.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention.tuning import holding
from keras_headmask.retrofit.rule import LayerRule

# In place of tensors, while Keras infers the shapes of a graph: these depend on no rule.
SHAPES: Any = "shapes alone"

ALONE = (
    "{what} of the masked model '{model}', where its rule would be lost. Mask last: build, cut or "
    "clone the stock model (`hm.unmasked(model)`), and mask the result; or call the masked model "
    "as a layer of the new one, `keras.Model(masked.input, head(masked.output))`."
)


class Frame(NamedTuple):
    """The state of the calls that run."""

    tensors: Mapping[int, Any]  # inputs by name, or `SHAPES`, by the id of each masked model
    offset: Any  # the position of the first query in a cache; `None` without a cache
    graph: Any  # TensorFlow's, in which the tensors were given
    used: set[int]  # the ids of the attention layers that have run


_frame: ContextVar[Frame | None] = ContextVar("frame", default=None)


def current_frame() -> Frame:
    return _frame.get() or Frame({}, None, graph_being_built(), set())


def in_frame(frame: Frame) -> AbstractContextManager[Any]:
    """Run in `frame`, which another call opened: a RematScope runs layers again, later."""
    return holding(_frame, frame)


@contextlib.contextmanager
def opened(by_model: Mapping[keras.Model, Any]) -> Iterator[Frame]:
    """Let attention read the tensors of each model, by name, beside those of models around it."""
    before = current_frame()
    held = {**before.tensors, **{id(model): tensors for model, tensors in by_model.items()}}
    frame = Frame(held, before.offset, graph_being_built(), set())
    with in_frame(frame):
        yield frame
    before.used.update(frame.used)


def moved(offset: Any) -> AbstractContextManager[Any]:
    """A frame whose queries start at `offset`, unless a layer around has said where they start."""
    frame = current_frame()
    return in_frame(frame if frame.offset is not None else frame._replace(offset=offset))


def tensors_of(rule: LayerRule) -> Mapping[str, Any] | None:
    """The inputs of the model that `rule` belongs to, in the running call; `None` if it rests."""
    return current_frame().tensors.get(id(rule.owner))


def tensors_for(rule: LayerRule, layer: keras.Layer) -> Mapping[str, Any] | None:
    """What attention `layer` finds for `rule`; `None` if shapes alone are asked for.

    Raises:
        ValueError: if the model of the rule does not run, or its call lacks what the rule reads.
        RuntimeError: if a compiled function would keep what it traces now.
    """
    tensors = tensors_of(rule)
    if tensors is None:
        what = f"The attention layer '{layer.name}' was called outside"
        raise ValueError(ALONE.format(what=what, model=rule.owner.name))
    if tensors is SHAPES:
        if not _keras.for_shapes_alone():
            raise RuntimeError(in_own_function(layer.name))
        return None
    if lacking := [name for name in rule.reads if name not in tensors]:
        raise ValueError(
            f"The rule of the attention layer '{layer.name}' reads {rule.reads}, and this call of "
            f"'{rule.owner.name}' lacks {lacking}. Received: {sorted(tensors)}. Pass them by name. "
            "(KerasHub's cache passes the newest token alone: there rules on positions hold, such "
            "as Window, Chunk, Keys, and, for a causal language model that has the rule itself, "
            "what `generate()` is given.)"
        )
    if rule.reads:
        _check_not_in_own_function(layer.name, current_frame().graph)
    return tensors


# --- Functions inside a model, whose traces would stay --------------------------------------------

_COMPILERS = {
    "tensorflow": "`tf.function`",
    "jax": "`jax.jit`, `keras.remat`, `ops.cond` or loop",  # JAX keeps what each of them traced
    "torch": "`torch.compile`",
}


def graph_being_built() -> Any:
    """The TensorFlow graph that is being built; `None` outside of graphs and on other backends."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _check_not_in_own_function(name: str, bound_in: Any) -> None:
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


# --- Files ----------------------------------------------------------------------------------------

_filing: ContextVar[frozenset[int]] = ContextVar("filing", default=frozenset())


def filing(model: keras.Model) -> AbstractContextManager[Any]:
    """Let the layers of a masked model give their stock configs: the model files the rules."""
    return holding(_filing, _filing.get() | {id(model)})


def is_filing(model: keras.Model | None) -> bool:
    return id(model) in _filing.get()
