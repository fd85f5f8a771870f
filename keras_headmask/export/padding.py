"""`serve_padded`, and the trial before it is offered: whether padding changes the outputs."""

import contextlib

import numpy as np
from keras import ops

from keras_headmask.export import samples
from keras_headmask.export.interface import (
    LENGTHS,
    PADDING,
    Input,
    Interface,
    Tensors,
    answer,
    distance,
)
from keras_headmask.export.position_mixing import what_mixes
from keras_headmask.export.precision import TOLERANCES, computing_in

_SHORT = 8  # positions; enough to see whether two axes must be of one length


def padded(interface: Interface) -> Interface:
    """Positions past an example's length, in `lengths`, are not attended, and 0 in outputs.

    Lengths are clipped to the sequence: an error would fail the server's whole batch.
    """
    import tensorflow as tf

    from keras_headmask.retrofit.observe import keys_limited  # needs all of retrofit/

    first = next(name for name, x in interface.inputs.items() if x.is_sequence)

    def serve_padded(given: Tensors) -> Tensors:
        given = dict(given)
        lengths = given.pop(LENGTHS)
        batch, length = ops.shape(given[first])[:2]
        # The error for lengths of another batch shows this name.
        lengths = tf.reshape(lengths, (batch, 1), "lengths_of_another_batch")
        live = ops.arange(length)[None, :] < lengths
        if PADDING in interface.inputs:
            given[PADDING] = ops.where(live, given[PADDING], ops.zeros_like(given[PADDING]))
            outputs = interface.call(given)
        else:
            with keys_limited(interface.model, live):
                outputs = interface.call(given)
        shapes = interface.output_shapes or {name: tuple(x.shape) for name, x in outputs.items()}
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
    if PADDING not in interface.inputs and (mixes := what_mixes(interface.model)) is not None:
        return f"{mixes}, so that padding would be seen"
    try:
        with computing_in(interface.model, "float32"):
            return _seen_in_a_trial(interface, length)
    except Exception as error:  # whatever the model raises is the reason
        return f"with lengths the model fails: {type(error).__name__}: {error}"[:400]


def _seen_in_a_trial(interface: Interface, length: int) -> str | None:
    given = samples.request(interface, (2, _SHORT))
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
        for request, wanted in samples.padded_cases(interface, size):
            apart = distance(answer(with_lengths, request), wanted)
            if apart > TOLERANCES["float32"]:
                return (
                    "what is padded in changes the outputs at real positions, by up to "
                    f"{apart:.2g}: something beside attention sees it"
                )
    return None
