"""`serve_padded`, and the trial before it is offered: whether padding changes the outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_headmask.export import fresh_process, samples
from keras_headmask.export.interface import (
    PADDING,
    Arrays,
    Input,
    Interface,
    Tensors,
    answer,
    as_array,
    as_tensors,
)
from keras_headmask.retrofit.observing import keys_limited
from keras_headmask.retrofit.report import mask_specs
from keras_headmask.rules.base import MaskSpec

LENGTHS = "lengths"  # the input that says how long each example really is
_SHORT = 8  # positions; enough to see whether two axes must be of one length


def padded(interface: Interface) -> Callable[[Tensors], Tensors]:
    """Takes `lengths` too: what lies past an example's length is not attended, and 0 in outputs."""
    sequences = [name for name, x in interface.inputs.items() if x.is_sequence]

    def serve_padded(given: Tensors) -> Tensors:
        given = dict(given)
        lengths = given.pop(LENGTHS)
        batch, length = ops.shape(given[sequences[0]])[:2]
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

    return serve_padded


def _zero_past(output: Any, shape: tuple[int | None, ...], live: Any) -> Any:
    """0 along every axis whose size is the length."""
    for axis in [i for i, size in enumerate(shape) if i > 0 and size is None]:
        others = [i for i in range(1, len(shape)) if i != axis]
        along = ops.expand_dims(live, others) if others else live
        output = ops.where(along, output, ops.zeros_like(output))
    return output


# --- The trial ------------------------------------------------------------------------------------


def what_padding_changes(interface: Interface, length: int, tolerance: float) -> str | None:
    """What is wrong with `serve_padded`, in words; `None` if nothing was found.

    Padded with first elements, as TensorFlow Serving does, and with what comes: a largest element
    does not change where one is repeated, nor often in long examples. So short ones are tried, too.
    """
    specs = tuple(mask_specs(interface.model).values())
    try:
        if axis := _axis_of_its_own(interface, samples.sample(interface, specs, 2, _SHORT)):
            return (
                f"axis {axis[1]} of {axis[0]!r} may have another length than the rest, so "
                "`lengths` would not say what is padding there"
            )
        for size in sorted({min(_SHORT, length), length}):
            apart = _apart_when_padded(interface, specs, size)
            if apart > tolerance:
                return (
                    "what is padded in changes the outputs at real positions, by up to "
                    f"{apart:.2g}: something beside attention sees it"
                )
    except Exception as error:  # whatever the model raises is the reason
        return f"with lengths the model fails: {type(error).__name__}: {error}"[:400]
    return None


def _apart_when_padded(interface: Interface, specs: Sequence[MaskSpec], length: int) -> float:
    given = samples.sample(interface, specs, 3, length)
    lengths, wanted = _alone(interface, given)
    apart = 0.0
    for filler in (None, samples.sample(interface, specs, 3, length, seed=1)):
        request = _padded(interface, given, lengths, filler)
        with keras.device("cpu:0"):
            outputs = padded(interface)(as_tensors(interface, request))
        got = {name: as_array(x) for name, x in outputs.items()}
        apart = max(apart, fresh_process.distance(got, wanted))
    return apart


def padded_case(interface: Interface, length: int) -> tuple[Arrays, Arrays]:
    """A batch padded as TensorFlow Serving does it, and what its examples give alone."""
    given = samples.sample(interface, tuple(mask_specs(interface.model).values()), 3, length)
    lengths, wanted = _alone(interface, given)
    return _padded(interface, given, lengths), wanted


def _axis_of_its_own(interface: Interface, given: Arrays) -> tuple[str, int] | None:
    """An input and its open axis that the model lets be shorter than the length."""
    first = next(name for name, x in interface.inputs.items() if x.is_sequence)
    for name, x in interface.inputs.items():
        for axis in range(1, len(x.shape)):
            if x.shape[axis] is not None or (name, axis) == (first, 1):
                continue
            try:
                answer(interface, given | {name: np.delete(given[name], -1, axis)})
            except Exception:  # they must be of one length, as wished
                continue
            return name, axis
    return None


def _alone(interface: Interface, given: Arrays) -> tuple[np.ndarray, Arrays]:
    """Lengths, and what the examples give alone, each as long as that, and 0 past it."""
    inputs = interface.inputs.items()
    batch, length = next(given[name].shape for name, x in inputs if x.is_sequence)[:2]
    lengths = np.array([max(1, length - i * (length // 3)) for i in range(batch)], "int32")
    lengths[-1] = max(1, length // 2)
    parts = [
        answer(interface, {name: given[name][_real(x, i, n)] for name, x in inputs})
        for i, n in enumerate(lengths)
    ]
    whole = {name: x.shape for name, x in answer(interface, given).items()}
    joined = {name: np.zeros(shape, parts[0][name].dtype) for name, shape in whole.items()}
    for i, part in enumerate(parts):
        for name, value in part.items():
            joined[name][(slice(i, i + 1), *(slice(0, size) for size in value.shape[1:]))] = value
    return lengths, joined


def _padded(
    interface: Interface, given: Arrays, lengths: np.ndarray, filler: Arrays | None = None
) -> Arrays:
    """`given`, past each example's length its first element, or what `filler` has there."""
    padded = {}
    for name, x in interface.inputs.items():
        first = given[name][(slice(None), *(slice(0, 1) for _ in x.shape[1:]))]
        padded[name] = np.broadcast_to(first, given[name].shape).copy()
        if filler is not None:
            padded[name] = filler[name].copy()
        for i, n in enumerate(lengths):
            padded[name][_real(x, i, n)] = given[name][_real(x, i, n)]
    return padded | {LENGTHS: lengths}


def _real(x: Input, example: int, length: int) -> tuple[slice, ...]:
    """Where an input holds an example's own positions."""
    open_axes = (slice(0, length if size is None else size) for size in x.shape[1:])
    return (slice(example, example + 1), *open_axes)
