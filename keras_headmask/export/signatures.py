"""The signatures of one export: decided, traced and written, and held against the model."""

import functools
import inspect
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_headmask import _keras
from keras_headmask.attention.tuning import forward_only
from keras_headmask.export import checking, fresh_process, padding, warmup
from keras_headmask.export.interface import (
    PADDING,
    Arrays,
    Input,
    Interface,
    Tensors,
    answer,
    as_tensors,
)
from keras_headmask.export.padding import LENGTHS
from keras_headmask.export.position_mixing import what_mixes
from keras_headmask.export.precision import computing_in_float32
from keras_headmask.retrofit.finding import AttentionLayer
from keras_headmask.retrofit.observing import watched
from keras_headmask.retrofit.report import mask_specs

_DEFAULT = "serving_default"
_XLA = "serve_xla_"


class Plan:
    """The signatures of one export: their functions and inputs, as they are written and tried."""

    def __init__(
        self,
        interface: Interface,
        entries: list[Any],
        buckets: list[tuple[int, int]],
        precision: str | None,
    ):
        self.interface, self.precision = interface, precision
        self.left_out: dict[str, str] = {}
        self.paths = {entry.path for entry in entries}
        self.functions: dict[str, Callable] = {_DEFAULT: interface.call}
        self.inputs: dict[str, dict[str, Input]] = {_DEFAULT: dict(interface.inputs)}
        self.traced: dict[str, Any] = {}
        self.padded_case: checking.Case | None = None
        self.tolerance = checking.tolerance_of(interface.model, precision)
        if entries:
            self.functions["serve_scores"] = with_scores(interface, entries)
            self.inputs["serve_scores"] = dict(interface.inputs)
        for bucket in buckets:
            name = f"{_XLA}{bucket[0]}x{bucket[1]}"
            self.functions[name] = interface.call
            self.inputs[name] = {
                key: Input(
                    (bucket[0], *(bucket[1] if n is None else n for n in x.shape[1:])), x.dtype
                )
                for key, x in interface.inputs.items()
            }

    def offer_padded(self, given: Sequence[Arrays]) -> None:
        """Add `serve_padded`, or the reason why not: by the graph, and by trying it in float32,

        since half precision would pass what padding changes for rounding.
        """
        interface = self.interface
        sequences = [x for x in interface.inputs.values() if x.is_sequence]
        mixes = None if PADDING in interface.inputs else what_mixes(interface.model)
        if not sequences:
            reason = "no input has a length that varies"
        elif LENGTHS in interface.inputs:
            reason = f"the model has an input named {LENGTHS!r} of its own"
        elif mixes is not None:
            reason = f"{mixes}, so that padding would be seen"
        else:
            length = max((_length(interface, one) for one in given), default=8)
            rounding = checking.TOLERANCES["float32"]
            with computing_in_float32(interface.model):
                reason = padding.what_padding_changes(interface, length, rounding)
            if reason is None and given:
                case = padding.padded_case(interface, length)
                self.padded_case = checking.Case("serve_padded", *case)
        if reason is not None:
            self.left_out["serve_padded"] = reason
            return
        self.functions["serve_padded"] = padding.padded(interface)
        self.inputs["serve_padded"] = interface.inputs | {LENGTHS: Input((None,), "int32")}

    def write(self, folder: pathlib.Path) -> dict[str, float]:
        """Trace each signature and write them all; milliseconds of the two.

        By TensorFlow's own saver: Keras' ExportArchive hands it functions that it traces again.
        """
        import tensorflow as tf

        start = time.perf_counter()
        for name, function in self.functions.items():
            specs = {
                key: tf.TensorSpec(x.shape, x.dtype, name=key)
                for key, x in self.inputs[name].items()
            }
            compiled = True if name.startswith(_XLA) else None
            traced = tf.function(function, autograph=False, jit_compile=compiled)
            with forward_only():
                self.traced[name] = traced.get_concrete_function(specs)
        took = {"trace": milliseconds_since(start)}
        start = time.perf_counter()
        root = tf.Module()
        root.read = _read_by(self.traced.values(), self.interface.model)
        root.serve = as_called(self.interface, self.traced[_DEFAULT])
        try:
            self._save(root, folder)
        except tf.errors.OpError as error:  # a full disk has many names there
            raise OSError(error.message) from error
        return took | {"write": milliseconds_since(start)}

    def _save(self, root: Any, folder: pathlib.Path) -> None:
        """With the custom gradients of the model's own code, as Keras saves them.

        Left out, each would be a warning on every load. One that TensorFlow cannot save is no
        reason not to serve: requests ask for no gradient.
        """
        import tensorflow as tf

        save = functools.partial(tf.saved_model.save, root, str(folder), signatures=self.traced)
        try:
            save()
        except ValueError:
            save(options=tf.saved_model.SaveOptions(experimental_custom_gradients=False))

    def write_warmup(self, folder: pathlib.Path, requests: list[Arrays]) -> int:
        """Records for the signatures that run anywhere: a failing one fails the whole version."""
        records = []
        for given in requests:
            tensors = as_tensors(self.interface, given)
            answer(self.interface, given)  # raises what the model refuses
            records.append((_DEFAULT, tensors))
            if "serve_padded" in self.functions:
                batch, length = len(next(iter(given.values()))), _length(self.interface, given)
                lengths = keras.ops.full((batch,), length, "int32")
                records.append(("serve_padded", tensors | {LENGTHS: lengths}))
        return warmup.write(folder / warmup.EXTRA, records) if records else 0

    def checked(
        self,
        folder: pathlib.Path,
        given: Sequence[Arrays],
        reference: Sequence[Arrays],
        graphs: dict[str, dict[str, Any]],
    ) -> checking.CheckResult:
        interface = self.interface
        cases = checking.default_cases(interface, given)
        apart = [
            fresh_process.distance(case.answer, of_float32)
            for case, of_float32 in zip(cases, reference, strict=False)
        ]
        outside = []
        for one in given:  # a rule may forbid nothing in the short ones
            seen = checking.looked_at(interface, one) if mask_specs(interface.model) else []
            outside.append(checking.mass_outside(seen))
            if "serve_scores" in self.functions:
                cases.append(checking.scores_case(one, seen, self.paths))
        if self.padded_case is not None:
            cases.append(self.padded_case)
        specs = tuple(mask_specs(interface.model).values())
        for name in self.functions:
            if name.startswith(_XLA):
                batch, length = map(int, name.removeprefix(_XLA).split("x"))
                one = checking.request(interface, (batch, length), specs)
                cases.append(checking.Case(name, one, answer(interface, one)))
        found = checking.run_fresh(folder, cases)
        return checking.judged(
            found,
            cases,
            self.tolerance,
            max((mass for mass in outside if mass is not None), default=None),
            max(apart, default=None),
            graphs,
        )

    def described(self) -> dict[str, dict[str, Any]]:
        """The inputs and outputs of each signature: (dtype, shape) by name."""
        return {
            name: {
                "inputs": {key: (x.dtype, x.shape) for key, x in self.inputs[name].items()},
                "outputs": {
                    key: (x.dtype.name, tuple(x.shape))
                    for key, x in traced.structured_outputs.items()
                },
            }
            for name, traced in self.traced.items()
        }


def _read_by(functions: Any, model: keras.Model) -> list[Any]:
    """The variables that functions read, and the tables of Keras' lookup layers."""
    import tensorflow as tf

    variables = {id(v): v for function in functions for v in function.variables}
    tables = [
        value
        for layer in _keras.layers_of(model)
        for value in list(vars(layer).values())  # (another thread may look at the layer)
        if isinstance(value, tf.saved_model.experimental.TrackableResource)
    ]
    return [*variables.values(), *tables]


def _length(interface: Interface, given: Arrays) -> int:
    return next((given[k].shape[1] for k, x in interface.inputs.items() if x.is_sequence), 1)


def milliseconds_since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


# --- The functions --------------------------------------------------------------------------------


def keeping_dtypes(interface: Interface, precision: str | None) -> Interface:
    """`interface` with outputs of half precision cast to the dtypes that they have now."""
    if precision is None:
        return interface
    import tensorflow as tf

    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in interface.inputs.items()}
    traced = tf.function(interface.call, autograph=False).get_concrete_function(specs)
    dtypes = {name: x.dtype.name for name, x in traced.structured_outputs.items()}

    def call(given: Tensors) -> Tensors:
        return {
            name: ops.cast(x, dtypes[name]) if x.dtype == precision else x
            for name, x in interface.call(given).items()
        }

    return interface._replace(call=call)


def as_called(interface: Interface, default: Callable[[Tensors], Tensors]) -> Any:
    """`default` under the structures of the model's own call: what Keras' exports have as `serve`.

    A `tf.function`, traced for the inputs of `interface`.
    """
    import tensorflow as tf

    structures = list(interface.arguments.values())
    names = keras.tree.flatten(structures)

    def serve(*given: Any) -> Any:
        tensors = keras.tree.flatten(list(given))
        return interface.as_returned(default(dict(zip(names, tensors, strict=True))))

    serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in interface.arguments
        ]
    )

    def spec(name: str) -> Any:
        return tf.TensorSpec(interface.inputs[name].shape, interface.inputs[name].dtype, name=name)

    function = tf.function(serve, autograph=False)
    function.get_concrete_function(*keras.tree.map_structure(spec, structures))
    return function


def with_scores(interface: Interface, entries: list[AttentionLayer]) -> Callable:
    """A function to the attention of some layers, float32 `(batch, heads, queries, keys)`."""

    def serve_scores(given: Tensors) -> Tensors:
        with watched(entries) as seen:
            interface.call(given)
        return {one.path: ops.cast(one.scores, "float32") for one in seen}

    return serve_scores
