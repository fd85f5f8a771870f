"""The signatures of an export, each an `Interface`: made, traced and written."""

import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.precision import half_products
from keras_headmask.attention.tuning import forward_only
from keras_headmask.export.interface import Arrays, Input, Interface, Tensors
from keras_headmask.retrofit.find import AttentionLayer

DEFAULT, XLA = "serving_default", "serve_xla_"


def signatures_of(
    interface: Interface, entries: list[AttentionLayer], in_buckets: Mapping[str, Arrays]
) -> dict[str, Interface]:
    """The signatures of any export, by name; `serve_scores` for the attention of `entries`.

    `in_buckets`: requests whose shapes those for XLA have, by name.
    """
    from keras_headmask.retrofit.observe import watched  # needs all of retrofit/

    def serve_scores(given: Tensors) -> Tensors:
        with watched(entries) as seen:
            interface.call(given)
        return {one.path: ops.cast(one.probabilities, "float32") for one in seen}

    signatures = {DEFAULT: interface}
    if entries:
        signatures["serve_scores"] = interface._replace(call=serve_scores)
    for name, given in in_buckets.items():
        inputs = {key: Input(given[key].shape, x.dtype) for key, x in interface.inputs.items()}
        signatures[name] = interface._replace(inputs=inputs)
    return signatures


def traced(name: str, signature: Interface) -> Any:
    """The concrete function of a signature."""
    import tensorflow as tf

    def checked(given: Tensors) -> Tensors:
        """Check shapes in the graph, since servers do not. The error shows the node's name.

        (XLA would pad a smaller batch, and return rows that nobody sent.)
        """
        return signature.call(
            {
                key: tf.ensure_shape(
                    x, signature.inputs[key].shape, name=f"input_{key}_of_another_shape"
                )
                for key, x in given.items()
            }
        )

    jit_compile = True if name.startswith(XLA) else None
    function = tf.function(checked, autograph=False, jit_compile=jit_compile)
    with forward_only(), half_products():  # an accelerator may run it, whatever traces it
        return function.get_concrete_function(_specs(signature))


def described(signature: Interface, function: Any) -> dict[str, Any]:
    """The inputs and outputs of a signature: (dtype, shape) by name."""
    outputs = function.structured_outputs.items()
    return {
        "inputs": {name: (x.dtype, x.shape) for name, x in signature.inputs.items()},
        "outputs": {name: (x.dtype.name, tuple(x.shape)) for name, x in outputs},
    }


def keeping_dtypes(interface: Interface, precision: str | None) -> Interface:
    """`interface` with outputs of half precision cast to the dtypes that they have now."""
    if precision is None:
        return interface
    outputs = traced(DEFAULT, interface).structured_outputs
    dtypes = {name: x.dtype.name for name, x in outputs.items()}

    def call(given: Tensors) -> Tensors:
        return {
            name: ops.cast(x, dtypes[name]) if x.dtype == precision else x
            for name, x in interface.call(given).items()
        }

    return interface._replace(call=call)


def write(interface: Interface, functions: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Write the traced signatures as a SavedModel, with the variables and tables that they read.

    By TensorFlow's own saver: Keras' ExportArchive would trace the functions again.
    """
    import tensorflow as tf

    variables = {id(v): v for function in functions.values() for v in function.variables}
    tables = [
        value
        for layer in _keras.layers_of(interface.model)
        for value in list(vars(layer).values())  # (another thread may look at the layer)
        if isinstance(value, tf.saved_model.experimental.TrackableResource)
    ]
    root = tf.Module()
    root.read = [*variables.values(), *tables]
    root.serve = _as_called(interface, functions[DEFAULT])
    save = functools.partial(tf.saved_model.save, root, str(folder), signatures=dict(functions))
    try:
        try:  # with the custom gradients of the model's code: a missing one warns on each load
            save()
        except ValueError:  # TensorFlow cannot save one: requests need no gradient
            save(options=tf.saved_model.SaveOptions(experimental_custom_gradients=False))
    except tf.errors.OpError as error:  # a full disk has many names there
        raise OSError(error.message) from error


def _as_called(interface: Interface, default: Callable[[Tensors], Tensors]) -> Any:
    """A `tf.function` called as the model itself, as `serve` of Keras' own exports."""
    import tensorflow as tf

    arguments = list(interface.arguments.values())
    names = keras.tree.flatten(arguments)

    def serve(*given: Any) -> Any:
        tensors = keras.tree.flatten(list(given))
        return interface.as_returned(default(dict(zip(names, tensors, strict=True))))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in interface.arguments]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect says
    function = tf.function(serve, autograph=False)
    function.get_concrete_function(
        *keras.tree.map_structure(_specs(interface).__getitem__, arguments)
    )
    return function


def _specs(interface: Interface) -> dict[str, Any]:
    import tensorflow as tf

    inputs = interface.inputs.items()
    return {name: tf.TensorSpec(x.shape, x.dtype, name=name) for name, x in inputs}
