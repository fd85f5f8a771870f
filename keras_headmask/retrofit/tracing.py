"""How a model calls its attention layers: in which order, and on one sequence or on two.

The model is run once on symbolic tensors, by Keras' shape inference, with the bodies of composite
layers in place of the layers: so what they do with their inputs is seen as a graph is.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention import looking

# In place of unknown dimensions. 83 is what Keras itself puts there; layers may be built for it.
# (420 and 240: layers may cut lengths into parts.)
_BATCH, _SIZES = 2, (83, 8, 256, 420, 240)

# What a call shows of its query and its value or key.
SAME = "same tensor"
ALIKE = "made of the same inputs"
OTHER = "made of other inputs"
UNKNOWN = "two tensors of unclear origin"

_ONE_AT_A_TIME = threading.RLock()  # a trace keeps the nodes that it adds to a graph apart


class Call(NamedTuple):
    layer: keras.Layer
    shows: str | None  # one of the above; None: not even the tensors are known
    stream: "_Stream | None" = None  # the sequence of the query; None: made of weights, or not seen


def attention_calls(model: keras.Model) -> list[Call]:
    """The calls of attention layers in one forward of `model`, in their order.

    A model that does not run on symbolic tensors gives those that its graph shows.
    """
    best: list[Call] | None = None
    with _ONE_AT_A_TIME:
        has_graph = isinstance(_keras.functional_of(model), _keras.Functional)
        for size in _SIZES if has_graph else ():
            try:
                calls = _Trace(model).run(size)
            except Exception:  # whatever a layer raises at this size
                continue
            if best is None or _unseen(calls) < _unseen(best):
                best = calls
            if not _unseen(best):
                break
    return _Trace(model).read_graphs() if best is None else best


def called_in_functions(model: keras.Model) -> set[int]:
    """The ids of attention layers that a `tf.function` inside `model` calls.

    Such a function keeps what it traced first, and nobody sees the calls in it: they show when
    its Python code is run in its place.
    """
    if keras.backend.backend() != "tensorflow":
        return set()
    import tensorflow as tf

    def counted() -> collections.Counter[int]:
        return collections.Counter(id(call.layer) for call in attention_calls(model))

    with _ONE_AT_A_TIME:
        attention_calls(model)  # from here on the functions have a trace of these sizes
        usual, before = counted(), tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)  # other threads get the same numbers, more slowly
        try:
            return set(counted() - usual)
        finally:
            tf.config.run_functions_eagerly(before)


def _unseen(calls: list[Call]) -> int:
    return sum(call.shows in (UNKNOWN, None) for call in calls)


class _Stream(NamedTuple):
    """A sequence, by what it is made of.

    What one sequence alone gives is that sequence still, so `key` stands for an input, or for an
    operation on two and more: equal operations on equal sequences give one. `inputs` are all that
    had a part in it.
    """

    key: Any
    inputs: frozenset[int]


class _Trace:
    def __init__(self, model: keras.Model):
        self.model = model
        self.calls: list[Call] = []
        self._origins: dict[int, _Stream | None] = {}  # `None` for what is made of weights alone
        self._joints: dict[Any, object] = {}  # keys of streams: by operation and what it reads
        self._kept: list[Any] = []  # so that no id is used twice
        self._by_shapes = False  # inside a layer whose body takes no symbolic tensors

    def run(self, size: int) -> list[Call]:
        def symbolic(x: Any) -> Any:
            sizes = [_BATCH] + [size] * len(x.shape)
            shape = [
                n if known is None else known for known, n in zip(x.shape, sizes, strict=False)
            ]
            return keras.KerasTensor(shape, x.dtype, name=x.name)

        inputs = keras.tree.map_structure(symbolic, _keras.functional_of(self.model).input)
        with self._in_place(), keras.StatelessScope():  # no variable is changed
            self.model.call(inputs)
        return self.calls

    def read_graphs(self) -> list[Call]:
        """The calls in the graphs of functional models, without looking into layers."""
        for model in _keras.layers_of(self.model):
            for node in _keras.nodes(model) if isinstance(model, _keras.Functional) else ():
                if isinstance(node.operation, keras.layers.MultiHeadAttention):
                    given = _operands(node.arguments.args, node.arguments.kwargs)
                    query, *_ = self._record(node.operation, *given)
                    self._of_query(node.outputs, query)
        return self.calls

    # --- Bodies in place of layers ---------------------------------------------------------------

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let layers with attention inside run their bodies, and attention layers be recorded.

        Other threads may run the model meanwhile, or build on its layers: they see the graph as it
        is without the trace, and the nodes that they add stay.
        """
        layers = list(_keras.layers_of(self.model))
        operations = {id(x): x for x in layers[1:]}  # (the model's own body is run, no node of it)
        for layer in layers:
            if isinstance(layer, _keras.Functional):
                operations |= {id(x): x for x in layer.operations}
        nodes = [(x, name) for x in operations.values() for name in _keras.CALLS_OF_OPERATION]
        before = [vars(x)[name] for x, name in nodes]
        with contextlib.ExitStack() as stack:
            for layer in layers[1:]:
                for name, override in self._overrides(layer):
                    stack.enter_context(looking.overriding(layer, name, override))
            for (x, name), held in zip(nodes, before, strict=True):
                vars(x)[name] = _Apart(held)  # a symbolic call adds to it
            try:
                yield
            finally:
                for (x, name), held in zip(nodes, before, strict=True):
                    vars(x)[name] = held

    def _overrides(self, layer: keras.Layer) -> list[tuple[str, Callable]]:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            return [(_keras.SYMBOLIC_CALL, self._attention(layer)), ("call", self._recorded(layer))]
        if _attention_inside(layer):
            return [(_keras.SYMBOLIC_CALL, self._body(layer))]
        return []

    def _body(self, layer: keras.Layer) -> Callable:
        def symbolic_call(usual: Callable, *args: Any, **kwargs: Any) -> Any:
            before = len(self.calls)
            try:
                outputs = layer.call(*args, **kwargs)
                for tensor in keras.tree.flatten(outputs):
                    if not keras.backend.is_keras_tensor(tensor):
                        raise TypeError("not a tensor that has a history")
                    self._origin(tensor)  # now: the layer itself becomes its history
                return outputs
            except Exception:  # TensorFlow's or JAX's own functions in the body, say
                del self.calls[before:]
            try:
                return self._of_shapes(layer, args, kwargs)
            except Exception:  # whatever such a body raises
                del self.calls[before:]
                inner = _keras.layers_inside(layer)
                attention = (x for x in inner if isinstance(x, keras.layers.MultiHeadAttention))
                self.calls += [Call(x, None) for x in attention]
                return usual(*args, **kwargs)

        return symbolic_call

    def _of_shapes(self, layer: keras.Layer, args: Any, kwargs: Any) -> Any:
        """Run `layer` on stand-ins of the backend, which show whether two are one, but no more."""
        before, self._by_shapes = self._by_shapes, True
        try:
            return keras.Operation.compute_output_spec(layer, *args, **kwargs)
        finally:
            self._by_shapes = before

    def _attention(self, layer: keras.Layer) -> Callable:
        def symbolic_call(usual: Callable, *args: Any, **kwargs: Any) -> Any:
            query, value, key = self._record(layer, *_operands(args, kwargs))
            shapes = [tuple(x.shape) for x in (query, value, key)]
            outputs = keras.KerasTensor(layer.compute_output_shape(*shapes), layer.compute_dtype)
            self._of_query([outputs], query)
            if not kwargs.get("return_attention_scores"):
                return outputs
            scores = (shapes[0][0], layer.num_heads, shapes[0][1], shapes[2][1])
            return outputs, keras.KerasTensor(scores, layer.compute_dtype)

        return symbolic_call

    def _recorded(self, layer: keras.Layer) -> Callable:
        def call(usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self._record(layer, *_operands(args, kwargs))
            return usual(*args, **kwargs)

        return call

    # --- What a call shows -----------------------------------------------------------------------

    def _record(self, layer: keras.Layer, query: Any, value: Any, key: Any) -> tuple:
        value = query if value is None else value
        key = value if key is None else key
        seen = query is not None and not self._by_shapes
        origin = self._origin(query) if seen else None
        self.calls.append(Call(layer, self._shown(query, value, key), origin))
        return query, value, key

    def _shown(self, query: Any, value: Any, key: Any) -> str | None:
        if query is None:
            return None
        if query is value or query is key:
            return SAME
        lengths = {x.shape[1] for x in (query, value) if len(x.shape) > 1}
        if len(lengths - {None}) > 1:
            return OTHER
        if self._by_shapes:
            return UNKNOWN
        origin, others = self._origin(query), (self._origin(value), self._origin(key))
        if origin in others:
            return ALIKE
        if origin is None:
            return OTHER
        # One sequence, changed by a further input on one side? Or two, one changed by the other?
        held = [x.inputs for x in others if x is not None]
        return UNKNOWN if any(origin.inputs >= x or origin.inputs < x for x in held) else OTHER

    def _of_query(self, outputs: Any, query: Any) -> None:
        """What attention gives stands at the places of its queries, whatever it looked at."""
        for tensor in outputs:
            self._origins[id(tensor)] = self._origin(query)
            self._kept.append(tensor)

    def _origin(self, tensor: Any) -> _Stream | None:
        """The sequence of which a tensor is made; `None` for one made of weights alone."""
        waiting = [tensor]
        while waiting:
            last = waiting[-1]
            if id(last) not in self._origins:
                read = _made_of(last)
                if missing := [x for x in read or () if id(x) not in self._origins]:
                    waiting += missing
                    continue
                if read is None:
                    self._origins[id(last)] = _Stream(id(last), frozenset({id(last)}))
                else:
                    self._origins[id(last)] = self._joined(last, read)
                self._kept.append(last)
            waiting.pop()
        return self._origins[id(tensor)]

    def _joined(self, tensor: Any, read: list[Any]) -> _Stream | None:
        """The sequence that an operation makes of those that it reads.

        What has another length, a vector that conditions each position or a mean over all of
        them, changes a sequence, but the positions stay those of the other.
        """
        made = [self._origins[id(x)] for x in read]
        pairs = [(x, s) for x, s in zip(read, made, strict=True) if s is not None]
        if not pairs:
            return None
        inputs = frozenset().union(*(s.inputs for _, s in pairs))
        along = [s.key for x, s in pairs if _is_as_long(x, tensor)]
        keys = along or [s.key for _, s in pairs]
        if len(set(keys)) == 1:
            return _Stream(keys[0], inputs)
        joint = _what_it_does(_keras.made_by(tensor)[0]), tuple(keys)
        return _Stream(self._joints.setdefault(joint, object()), inputs)


class _Apart(collections.UserList):
    """The nodes of an operation: a copy for the thread that traces, the list itself for others.

    (A node is found by its number: to delete those of a trace afterwards would shift others'.)
    """

    def __init__(self, usual: Any):
        self._usual, self._copy, self._thread = usual, list(usual), threading.get_ident()

    @property
    def data(self) -> Any:  # type: ignore[override]  # which list it is depends on the thread
        return self._copy if threading.get_ident() == self._thread else self._usual


def _made_of(tensor: Any) -> list[Any] | None:
    """The symbolic tensors from which `tensor` was computed; `None` for an input."""
    if not keras.backend.is_keras_tensor(tensor):
        return []
    operation, read = _keras.made_by(tensor)
    return None if operation is None or isinstance(operation, keras.layers.InputLayer) else read


def _what_it_does(operation: Any) -> Any:
    """Equal for operations that are known to do the same."""
    if isinstance(operation, keras.Layer):
        return id(operation)
    settings = {k: v for k, v in vars(operation).items() if k != "name" and k[0] != "_"}
    return type(operation), repr(sorted(settings.items()))


def _is_as_long(x: Any, tensor: Any) -> bool:
    return len(x.shape) > 1 and len(tensor.shape) > 1 and x.shape[1] == tensor.shape[1]


def _attention_inside(layer: keras.Layer) -> bool:
    inner = _keras.layers_inside(layer)
    return any(isinstance(x, keras.layers.MultiHeadAttention) for x in inner)


def _operands(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    given = dict(zip(("query", "value", "key"), args, strict=False)) | kwargs
    return given.get("query"), given.get("value"), given.get("key")
