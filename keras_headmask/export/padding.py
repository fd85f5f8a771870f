"""`serve_padded`, and the trial before it is offered: whether padding changes the outputs."""

import contextlib
from collections.abc import Iterator

import numpy as np
from keras import ops

from keras_headmask.export import samples
from keras_headmask.export.interface import (
    PADDING,
    Arrays,
    Input,
    Interface,
    Shape,
    Tensors,
    answer,
    distance,
)
from keras_headmask.export.position_mixing import what_mixes
from keras_headmask.export.precision import TOLERANCES, computing_in
from keras_headmask.export.signatures import Signature
from keras_headmask.masks import Tensor
from keras_headmask.retrofit.observing import keys_limited

LENGTHS = "lengths"  # the input that says how long each example really is
_SHORT = 8  # positions; enough to see whether two axes must be of one length


def padded(interface: Interface) -> Signature:
    """Positions past an example's length, in `lengths`, are not attended, and 0 in outputs."""
    inputs = interface.inputs | {LENGTHS: Input((None,), "int32")}
    first = next(name for name, x in interface.inputs.items() if x.is_sequence)

    def serve_padded(given: Tensors) -> Tensors:
        given = dict(given)
        lengths = given.pop(LENGTHS)
        batch, length = ops.shape(given[first])[:2]
        lengths = ops.reshape(lengths, (batch, 1))  # an error for one length and many examples
        live = ops.arange(length)[None, :] < lengths
        if PADDING in interface.inputs:
            given[PADDING] = ops.where(live, given[PADDING], ops.zeros_like(given[PADDING]))
            outputs = interface.call(given)
        else:
            with keys_limited(interface.model, live):
                outputs = interface.call(given)
        shapes = interface.output_shapes or {name: tuple(x.shape) for name, x in outputs.items()}
        return {name: _zero_past(x, shapes[name], live) for name, x in outputs.items()}

    return Signature(serve_padded, inputs)


def _zero_past(output: Tensor, shape: Shape, live: Tensor) -> Tensor:
    """0 along every axis whose size is the length."""
    for axis in [i for i, size in enumerate(shape) if i > 0 and size is None]:
        others = [i for i in range(1, len(shape)) if i != axis]
        along = ops.expand_dims(live, others) if others else live
        output = ops.where(along, output, ops.zeros_like(output))
    return output


# --- The trial ------------------------------------------------------------------------------------


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
    with_lengths = interface._replace(call=padded(interface).function)
    try:
        with computing_in(interface.model, "float32"):
            if axis := _axis_of_its_own(interface):
                return (
                    f"axis {axis[1]} of {axis[0]!r} may have another length than the rest, so "
                    "`lengths` would not say what is padding there"
                )
            for size in sorted({min(_SHORT, length), length}):
                for request, wanted in _cases(interface, size):
                    apart = distance(answer(with_lengths, request), wanted)
                    if apart > TOLERANCES["float32"]:
                        return (
                            "what is padded in changes the outputs at real positions, by up to "
                            f"{apart:.2g}: something beside attention sees it"
                        )
    except Exception as error:  # whatever the model raises is the reason
        return f"with lengths the model fails: {type(error).__name__}: {error}"[:400]
    return None


def padded_case(interface: Interface, length: int) -> tuple[Arrays, Arrays]:
    """A batch padded as TensorFlow Serving does it, and what its examples give alone."""
    return next(_cases(interface, length))


def _axis_of_its_own(interface: Interface) -> tuple[str, int] | None:
    """An input and its axis that may be shorter than the length."""
    given = samples.request(interface, (2, _SHORT))
    first = next(name for name, x in interface.inputs.items() if x.is_sequence)
    for name, x in interface.inputs.items():
        for axis in range(1, len(x.shape)):
            if x.shape[axis] is None and (name, axis) != (first, 1):
                with contextlib.suppress(Exception):  # they must be of one length
                    answer(interface, given | {name: np.delete(given[name], -1, axis)})
                    return name, axis
    return None


def _cases(interface: Interface, length: int) -> Iterator[tuple[Arrays, Arrays]]:
    """A request padded with first elements, one padded with others, and the right answers.

    These are what the examples give alone, and 0 past their lengths.
    """
    inputs, rules = interface.inputs.items(), interface.rules.values()
    given = samples.sample(interface, rules, 3, length)
    lengths = np.array([length, length - length // 3, max(1, length // 2)], "int32")
    wanted = {name: np.zeros_like(x) for name, x in answer(interface, given).items()}
    for i, n in enumerate(lengths):
        alone = answer(interface, {name: given[name][_real(x, i, n)] for name, x in inputs})
        for name, value in alone.items():
            wanted[name][(slice(i, i + 1), *map(slice, value.shape[1:]))] = value
    for filler in (None, samples.sample(interface, rules, 3, length, seed=1)):
        request = {}
        for name, x in inputs:
            first = given[name][(slice(None), *(slice(1) for _ in x.shape[1:]))]
            padded = np.broadcast_to(first, given[name].shape) if filler is None else filler[name]
            request[name] = padded.copy()
            for i, n in enumerate(lengths):
                request[name][_real(x, i, n)] = given[name][_real(x, i, n)]
        yield request | {LENGTHS: lengths}, wanted


def _real(x: Input, example: int, length: int) -> tuple[slice, ...]:
    """Where an input holds an example's own positions."""
    return (slice(example, example + 1), *(slice(n or length) for n in x.shape[1:]))
