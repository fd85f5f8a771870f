"""A model as a function from named tensors to named tensors, traced for any batch."""

import keyword
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention.scopes import forward_only
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.find import Found

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Ops that run Python code, or a compiler that a server starts only with special flags.
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_COMPILED = {"XlaCallModule", "XlaLaunch", "XlaLaunchV2"}


class Input(NamedTuple):
    """One input of a model: sizes along `None` axes are known when a request comes."""

    shape: tuple[int | None, ...]
    dtype: str


class Signature(NamedTuple):
    """A model with its inputs by name; `structure` has these names where its call takes tensors."""

    survey: Found  # of the model
    inputs: dict[str, Input]
    structure: Any

    def call(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        filled = keras.tree.map_structure(given.__getitem__, self.structure)
        return named_outputs(self.survey.model(filled))


def signature_of(survey: Found) -> Signature:
    """How the model of `survey` is called, by its graph."""
    model, graph = survey.model, survey.graph
    if graph is None:
        name = type(model).__name__
        raise ValueError(
            f"`model` must have a graph, which names its inputs; `{name}` is subclassed or not "
            "built. Call a subclassed model on inputs with names: x = keras.Input((None,), "
            'dtype="int32", name="token_ids"), keras.Model(x, model(x)). Start a Sequential model '
            "with a keras.Input."
        )
    # The keys of a dict of inputs, else the tensors' names.
    struct, names = graph.input, [tensor.name for tensor in graph.inputs]
    if isinstance(struct, Mapping) and all(hasattr(x, "shape") for x in struct.values()):
        keys = {id(tensor): key for key, tensor in struct.items()}
        names = [keys[id(tensor)] for tensor in graph.inputs]
    for name in names:
        if keyword.iskeyword(name) or not _NAME.fullmatch(name):
            raise ValueError(
                f"The input {name!r} has a name that is reserved in Python, or that TensorFlow "
                "would change. Use letters, digits and _: keras.Input(..., name='token_ids')."
            )
    inputs = {
        name: Input((None, *x.shape[1:]), keras.backend.standardize_dtype(x.dtype))
        for name, x in zip(names, graph.inputs, strict=True)
    }
    named_outputs(graph.output)
    return Signature(survey, inputs, keras.tree.pack_sequence_as(struct, names))


def named_outputs(outputs: Any) -> dict[str, Tensor]:
    """A dict keeps its keys; else `output_0`, `output_1`, ..., as TensorFlow names them."""
    if not isinstance(outputs, Mapping):
        several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        outputs = {f"output_{i}": x for i, x in enumerate(several)}
    for name, x in outputs.items():
        if not isinstance(name, str) or not hasattr(x, "shape"):
            raise ValueError(
                f"The outputs must be one tensor, a flat list, or a flat dict with text as its "
                f"keys. Received: {type(x).__name__} for the output {name!r}."
            )
    return dict(outputs)


def traced(signature: Signature) -> tuple[Any, Any]:
    """A `tf.function` that is called as the model is, and its concrete function for any request.

    It checks shapes, since servers do not: a tensor of another rank might broadcast. The error
    shows the node's name.

    Raises:
        RuntimeError: for what no server runs, or only one started with special flags.
    """
    import tensorflow as tf

    inputs, model = signature.inputs.items(), signature.survey.model
    specs = {name: tf.TensorSpec(x.shape, x.dtype, name=name) for name, x in inputs}

    def checked(name: str, x: Tensor) -> Tensor:
        return tf.ensure_shape(x, specs[name].shape, name=f"input_{name}_of_another_shape")

    @tf.function(autograph=False)
    def serve(inputs: Any) -> Any:
        return model(keras.tree.map_structure(checked, signature.structure, inputs))

    with forward_only():
        arguments = keras.tree.map_structure(specs.__getitem__, signature.structure)
        function = serve.get_concrete_function(arguments)
    _refuse_what_no_server_runs(function)
    return serve, function


def _refuse_what_no_server_runs(function: Any) -> None:
    graph, mark = function.graph.as_graph_def(), _keras.XLA_MUST_COMPILE
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    kinds = {node.op for node in nodes}
    if python := sorted(kinds & _PYTHON):
        raise RuntimeError(
            f"The model calls Python in its graph ({', '.join(python)}), which a server lacks. "
            "Write tf.py_function and the like in TensorFlow or keras.ops."
        )
    marked = [one.attr for one in (*graph.library.function, *nodes) if mark in one.attr]
    if kinds & _COMPILED or any(attributes[mark].b for attributes in marked):
        raise RuntimeError(
            "The model has parts that XLA compiles, which TensorFlow Serving runs only with its "
            "flags for XLA. Take jit_compile=True out of the model's code."
        )
