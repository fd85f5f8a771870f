"""How a model calls its attention: in which order, on one sequence or on two, and on which weights.

Calls in a graph show in its nodes. Layers that hold attention, or code that is not Keras' own, run
once more as Keras runs a layer to infer shapes: on symbolic tensors, in the calling thread alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.retrofit import steps
from keras_headmask.retrofit.families import adapted, adapter_of
from keras_headmask.retrofit.handwritten import softmaxes_among
from keras_headmask.retrofit.nesting import attention, without_remat


class Call(NamedTuple):
    """One call of an attention layer; `same` is whether query and value, or key, are one tensor."""

    layer: keras.Layer
    same: bool
    other_length: bool = False  # known to differ


class Survey:
    """What the calls in one forward of a model show."""

    def __init__(self, model: keras.Model):
        self.calls: list[Call] = []
        self.on_two: set[int] = set()  # the ids of layers that run on several sequences
        self.by_hand: set[int] = set()  # and of those that compute attention out of reach
        self.untracked: dict[int, str] = {}  # by layer: a weight that Keras does not track
        self._tracked = {id(weight) for weight in _keras.all_weights(model)}
        graph = _keras.functional_of(model)
        if isinstance(graph, _keras.Functional):
            self._read(graph)

    def _read(self, graph: Any) -> None:
        runs: dict[int, list[Any]] = {}  # by attention layer: the calls of what it stands in
        read: set[int] = set()
        for node in _keras.nodes(graph):
            operation, first = node.operation, id(node.operation) not in read
            read.add(id(operation))
            for layer in attention(operation):
                runs.setdefault(id(layer), []).append(node)
            inner = _keras.functional_of(operation)
            if adapter_of(operation) is not None:
                before = len(self.calls)
                if _runs_code_of_others(operation):
                    self._run(operation, node)
                del self.calls[before:]  # the node shows more
                self._seen(operation, node.arguments.args, node.arguments.kwargs)
            elif isinstance(inner, _keras.Functional):
                if first:
                    self._read(inner)
            elif isinstance(operation, keras.Layer) and _runs_code_of_others(operation):
                self._run(operation, node)
        for layer_id, nodes in runs.items():
            if not all(map(_follows, nodes, nodes[1:])):
                self.on_two.add(layer_id)

    def _seen(self, layer: keras.Layer, args: Any, kwargs: Any) -> None:
        if adapted(layer).is_self:
            self.calls.append(Call(layer, True))
            return
        given = dict(zip(("query", "value", "key"), args, strict=False)) | kwargs
        query = given.get("query")
        value = given.get("value") if given.get("value") is not None else query
        same = query is value or query is given.get("key")
        # (A subclass may take arguments that have none.)
        shapes: list[Any] = [getattr(x, "shape", ()) for x in (query, value)]
        lengths = {shape[1] for shape in shapes if len(shape) > 1} - {None}
        self.calls.append(Call(layer, same, len(lengths) > 1))

    def _run(self, layer: keras.Layer, node: Any) -> None:
        """Run the body of `layer` for shapes; a layer that fails shows nothing."""
        before, seen = len(self.calls), _Seen(self)
        given = node.arguments.args, node.arguments.kwargs
        tensors = list({id(x): x for x in node.input_tensors}.values())  # one stays one

        def body(*values: Any) -> None:
            del self.calls[before:]  # (JAX runs it twice)
            seen.hooked.clear()
            seen.ran.clear()
            by_id = dict(zip(map(id, tensors), values, strict=True))
            args, kwargs = keras.tree.map_structure(lambda x: by_id.get(id(x), x), given)
            with _keras.weights_watched(seen.weights):
                layer(*args, **kwargs)

        def record(*values: Any) -> Any:
            seen.recorder = steps.recorder()
            seen.recorder.run(body, *values)
            return values  # (Keras asks for tensors.)

        operation = _Body(record)
        try:
            # (What a layer around hands to its rules is not there.)
            with seen.watching(layer), observers.rules_off():
                operation.compute_output_spec(*tensors)
        except Exception:  # whatever a layer raises that wants numbers
            return
        if seen.attends or any(softmaxes_among(seen.recorder.steps)):
            self.by_hand.add(id(layer))
        self.by_hand |= {id(x) for x in seen.ran if id(x) not in seen.hooked}
        ran = [id(x) for x in seen.ran]
        self.on_two |= {x for x in ran if ran.count(x) > 1}
        if lost := [x.path for x in seen.weights if id(x) not in self._tracked]:
            self.untracked[id(layer)] = lost[0]


class _Body(keras.Operation):
    """Runs a function as Keras runs a layer's `call` to infer shapes."""

    def __init__(self, function: Callable):
        super().__init__()
        self.call = function


class _Seen:
    """What one run of a layer's body shows."""

    def __init__(self, survey: Survey):
        self.survey = survey
        self.ran: list[keras.Layer] = []
        self.hooked: set[int] = set()
        self.weights: list[Any] = []
        self.attends = False  # by an operation, outside of the attention layers
        self.recorder = steps.recorder()  # of all operations

    @contextlib.contextmanager
    def watching(self, root: keras.Layer) -> Iterator[None]:
        def called(layer: keras.Layer, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self.ran.append(layer)
            self.survey._seen(layer, args, kwargs)
            with observers.operations_seen(None), self.recorder.hiding():
                return usual(*args, **kwargs)

        def computed(layer: keras.Layer, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self.hooked.add(id(layer))
            return usual(*args, **kwargs)

        def attends() -> None:
            self.attends = True

        with contextlib.ExitStack() as stack:
            for layer in attention(root):
                for name, see in (("call", called), (adapted(layer).hook, computed)):
                    see = functools.partial(see, layer)
                    stack.enter_context(observers.overriding(layer, name, see))
            stack.enter_context(without_remat(root))
            stack.enter_context(observers.operations_seen(attends))
            yield


def _runs_code_of_others(layer: Any) -> bool:
    """Whether code runs in it that is not Keras' own: then its calls show only when it runs."""
    return any(
        isinstance(x, keras.layers.Lambda) or not _keras.is_own(x, "layers")
        for x in _keras.layers_of(layer)
    )


def _follows(earlier: Any, later: Any) -> bool:
    """Whether a call is on the sequence of an earlier one, by the first operands.

    It has the same, or one made of what the earlier call gave and of no further input.
    """
    before, now = (call.input_tensors[0] for call in (earlier, later))
    given = {id(x) for x in earlier.outputs}
    behind = _inputs_behind(now, given)
    return now is before or (bool(behind & given) and behind - given <= _inputs_behind(before))


def _inputs_behind(tensor: Any, ends: Set[int] = frozenset()) -> set[int]:
    """The ids of the inputs that a tensor of a graph is made of, back to those of `ends`."""
    waiting, seen, found = [tensor], set(), set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in seen:
            seen.add(id(tensor))
            read = [] if id(tensor) in ends else _keras.made_by(tensor)[1]
            waiting += read
            if not read:
                found.add(id(tensor))
    return found
