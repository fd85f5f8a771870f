"""The signatures of an export, each an `Interface`: made, traced and written."""

import contextlib
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.half_precision import half_products
from keras_headmask.attention.tuning import forward_only
from keras_headmask.export.interface import (
    LENGTHS,
    Arrays,
    Input,
    Interface,
    Tensors,
    answer,
    distance,
    padded_cases,
    request,
)
from keras_headmask.export.precision import TOLERANCES, computing_in
from keras_headmask.retrofit.adapters import AttentionLayer
from keras_headmask.retrofit.survey import Survey
from keras_headmask.rules.examples import padding_inputs

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
        for layer in _keras.layers_of(interface.survey.model)
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


# --- `serve_padded` -------------------------------------------------------------------------------

_SHORT = 8  # positions; enough to see whether two axes must be of one length


def padded(interface: Interface) -> Interface:
    """Positions past an example's length, in `lengths`, are not attended, and 0 in outputs.

    Lengths are clipped to the sequence: an error would fail the server's whole batch.
    """
    import tensorflow as tf

    from keras_headmask.retrofit.observe import keys_limited  # needs all of retrofit/

    first = next(name for name, x in interface.inputs.items() if x.is_sequence)
    mask = _padding_mask(interface)
    shapes = interface.output_shapes  # where `None` is a length; eager outputs would have numbers
    if shapes is None:
        outputs = traced(DEFAULT, interface).structured_outputs
        shapes = {name: tuple(x.shape) for name, x in outputs.items()}

    def serve_padded(given: Tensors) -> Tensors:
        given = dict(given)
        lengths = given.pop(LENGTHS)
        batch, length = ops.shape(given[first])[:2]
        # The error for lengths of another batch shows this name.
        lengths = tf.reshape(lengths, (batch, 1), "lengths_of_another_batch")
        live = ops.arange(length)[None, :] < lengths
        if mask is not None:
            given[mask] = ops.where(live, given[mask], ops.zeros_like(given[mask]))
            outputs = interface.call(given)
        else:
            with keys_limited(interface.survey.known, live):
                outputs = interface.call(given)
        for name, shape in shapes.items():
            for axis in [i for i, size in enumerate(shape) if i > 0 and size is None]:
                others = [i for i in range(1, len(shape)) if i != axis]
                along = ops.expand_dims(live, others) if others else live
                outputs[name] = ops.where(along, outputs[name], ops.zeros_like(outputs[name]))
        return outputs

    inputs = interface.inputs | {LENGTHS: Input((None,), "int32")}
    return interface._replace(inputs=inputs, call=serve_padded)


def why_not_padded(interface: Interface, length: int) -> str | None:
    """Why `serve_padded` is left out; `None` if neither the graph nor a trial finds a reason.

    The trial is in float32: half precision would take what padding changes for rounding. It pads
    with first elements, as TensorFlow Serving does, and with others, in short examples, too: a
    maximum does not change when an element is repeated, and seldom in long examples.
    """
    if not any(x.is_sequence for x in interface.inputs.values()):
        return "no input has a length that varies"
    if LENGTHS in interface.inputs:
        return f"the model has an input named {LENGTHS!r} of its own"
    if _padding_mask(interface) is None and (mixes := _what_mixes(interface.survey)) is not None:
        return f"{mixes}, so that padding would be seen"
    try:
        with computing_in(interface.survey.model, "float32"):
            return _seen_in_a_trial(interface, length)
    except Exception as error:  # whatever the model raises is the reason
        return f"with lengths the model fails: {type(error).__name__}: {error}"[:400]


def _padding_mask(interface: Interface) -> str | None:
    """The input that marks real tokens, if there is one and no other does."""
    names = padding_inputs(interface.inputs)
    return names[0] if len(names) == 1 else None


def _what_mixes(survey: Survey) -> str | None:
    """The first thing in a model that may mix positions, in words; `None` if all is known.

    If only attention carries something from one position to another, padding that a server puts
    behind an example does no harm where it is not attended.
    """
    if survey.unknown:
        return f"the attention layer {survey.unknown[0]} is out of reach"
    if survey.graph is None:
        return f"`{type(survey.model).__name__}` is a subclassed model, without a graph"
    if cross := [entry for entry in survey.known if entry.kind != "self"]:
        return f"{cross[0]} attends, or may attend, to another sequence, which has its own lengths"
    return str(survey.mixing[0]) if survey.mixing else None


def _seen_in_a_trial(interface: Interface, length: int) -> str | None:
    given = request(interface, (2, _SHORT))
    axes = [
        (name, axis)
        for name, x in sorted(interface.inputs.items(), key=lambda item: not item[1].is_sequence)
        for axis, size in enumerate(x.shape)
        if axis > 0 and size is None
    ]
    for name, axis in axes[1:]:  # may one be shorter than the first?
        with contextlib.suppress(Exception):  # they must be of one length
            answer(interface, given | {name: np.delete(given[name], -1, axis)})
            return (
                f"axis {axis} of {name!r} may have another length than the rest, so `lengths` "
                "would not say what is padding there"
            )
    with_lengths = padded(interface)
    for size in sorted({min(_SHORT, length), length}):
        for one, wanted in padded_cases(interface, size):
            apart = distance(answer(with_lengths, one), wanted)
            if apart > TOLERANCES["float32"]:
                return (
                    "what is padded in changes the outputs at real positions, by up to "
                    f"{apart:.2g}: something beside attention sees it"
                )
    return None
