"""The signatures of an export: what each computes, traced and written."""

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.tuning import forward_only
from keras_headmask.export.interface import Input, Interface, Tensors
from keras_headmask.retrofit.finding import AttentionLayer
from keras_headmask.retrofit.observing import watched

DEFAULT = "serving_default"


@dataclasses.dataclass
class Signature:
    """A function of named tensors."""

    function: Callable[[Tensors], Tensors]
    inputs: dict[str, Input]
    bucket: tuple[int, int] | None = None  # (batch, length) for which XLA compiles it
    traced: Any = None  # the concrete function, after `trace()`

    def trace(self) -> None:
        import tensorflow as tf

        jit_compile = None if self.bucket is None else True
        function = tf.function(self.function, autograph=False, jit_compile=jit_compile)
        with forward_only():
            self.traced = function.get_concrete_function(_specs(self.inputs))

    def described(self) -> dict[str, Any]:
        """The inputs and outputs: (dtype, shape) by name."""
        outputs = self.traced.structured_outputs.items()
        return {
            "inputs": {name: (x.dtype, x.shape) for name, x in self.inputs.items()},
            "outputs": {name: (x.dtype.name, tuple(x.shape)) for name, x in outputs},
        }


def signatures_of(
    interface: Interface, entries: list[AttentionLayer], buckets: list[tuple[int, int]]
) -> dict[str, Signature]:
    """The signatures of any export, by name; `serve_scores` for the attention of `entries`."""
    signatures = {DEFAULT: Signature(interface.call, interface.inputs)}
    if entries:
        signatures["serve_scores"] = Signature(_scores(interface, entries), interface.inputs)
    for batch, length in buckets:
        inputs = {
            name: Input((batch, *(length if n is None else n for n in x.shape[1:])), x.dtype)
            for name, x in interface.inputs.items()
        }
        name = f"serve_xla_{batch}x{length}"
        signatures[name] = Signature(interface.call, inputs, (batch, length))
    return signatures


def _scores(interface: Interface, entries: list[AttentionLayer]) -> Callable[[Tensors], Tensors]:
    def serve_scores(given: Tensors) -> Tensors:
        with watched(entries) as seen:
            interface.call(given)
        return {one.path: ops.cast(one.scores, "float32") for one in seen}

    return serve_scores


def keeping_dtypes(interface: Interface, precision: str) -> Interface:
    """`interface` with outputs of half precision cast to the dtypes that they have now."""
    now = Signature(interface.call, interface.inputs)
    now.trace()
    dtypes = {name: x.dtype.name for name, x in now.traced.structured_outputs.items()}

    def call(given: Tensors) -> Tensors:
        return {
            name: ops.cast(x, dtypes[name]) if x.dtype == precision else x
            for name, x in interface.call(given).items()
        }

    return interface._replace(call=call)


def write(interface: Interface, signatures: Mapping[str, Signature], folder: pathlib.Path) -> None:
    """Write the traced signatures as a SavedModel, with the variables and tables that they read.

    By TensorFlow's own saver: Keras' ExportArchive would trace the functions again.
    """
    import tensorflow as tf

    traced = {name: signature.traced for name, signature in signatures.items()}
    variables = {id(v): v for function in traced.values() for v in function.variables}
    tables = [
        value
        for layer in _keras.layers_of(interface.model)
        for value in list(vars(layer).values())  # (another thread may look at the layer)
        if isinstance(value, tf.saved_model.experimental.TrackableResource)
    ]
    root = tf.Module()
    root.read = [*variables.values(), *tables]
    root.serve = as_called(interface, traced[DEFAULT])
    save = functools.partial(tf.saved_model.save, root, str(folder), signatures=traced)
    try:
        try:  # with the custom gradients of the model's code: a missing one warns on each load
            save()
        except ValueError:  # TensorFlow cannot save one: requests need no gradient
            save(options=tf.saved_model.SaveOptions(experimental_custom_gradients=False))
    except tf.errors.OpError as error:  # a full disk has many names there
        raise OSError(error.message) from error


def as_called(interface: Interface, default: Callable[[Tensors], Tensors]) -> Any:
    """A `tf.function` called as the model itself, as `serve` of Keras' own exports."""
    import tensorflow as tf

    names = keras.tree.flatten(list(interface.arguments.values()))

    def serve(*given: Any) -> Any:
        tensors = keras.tree.flatten(list(given))
        return interface.as_returned(default(dict(zip(names, tensors, strict=True))))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in interface.arguments]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as inspect says
    function = tf.function(serve, autograph=False)
    specs = _specs(interface.inputs)
    function.get_concrete_function(
        *keras.tree.map_structure(specs.__getitem__, list(interface.arguments.values()))
    )
    return function


def _specs(inputs: Mapping[str, Input]) -> dict[str, Any]:
    import tensorflow as tf

    return {name: tf.TensorSpec(x.shape, x.dtype, name=name) for name, x in inputs.items()}
