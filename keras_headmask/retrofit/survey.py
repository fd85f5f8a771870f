"""One look at a model: what attends, what else mixes positions, where padding is named and lost.

A public call that takes a model makes one `Survey` and passes it on. Each part is computed when it
is first asked for, and kept as long as the `Survey`: no longer than the call, since a model may
change between two calls.

How layers attend shows in one forward pass. Calls in a graph show in its nodes. Layers that hold
attention, or code that is not Keras' own, run once more as Keras runs a layer to infer shapes: on
symbolic tensors, in the calling thread alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.retrofit.adapters import (
    AttentionLayer,
    adapted,
    adapter_of,
    attention,
    walk,
    without_remat,
)
from keras_headmask.retrofit.edges import ARGUMENT
from keras_headmask.retrofit.handwritten import recorder, softmaxes_among, softmaxes_of_attention
from keras_headmask.retrofit.rule import spec_of
from keras_headmask.rules.base import MaskSpec
from keras_headmask.rules.examples import padding_inputs


class Survey:
    """The attention of a model, found once and passed on.

    Raises:
        TypeError: if it is not a Keras model.
    """

    def __init__(self, model: keras.Model):
        if not isinstance(model, keras.Model):
            hint = ""
            if isinstance(model, keras.Layer):
                hint = " A layer takes a rule by `PerHeadMaskedMultiHeadAttention(mask_spec=...)`."
            raise TypeError(f"`model` must be a Keras model. Received: {model!r}.{hint}")
        self.model = model

    # --- Attention ---

    @functools.cached_property
    def known(self) -> list[AttentionLayer]:
        """The attention layers that a rule reaches, in forward order, each once."""
        return self._attention[0]

    @functools.cached_property
    def unknown(self) -> list[AttentionLayer]:
        """Layers that attend by code that no rule reaches."""
        return self._attention[1]

    @functools.cached_property
    def untracked(self) -> list[str]:
        """The paths of weights that layers read and Keras does not track."""
        return list(self._forward.untracked.values())

    @property
    def calls(self) -> list["Call"]:
        """The calls of attention layers that the forward pass shows, in its order."""
        return self._forward.calls

    @functools.cached_property
    def _forward(self) -> "_ForwardPass":
        return _ForwardPass(self.model)

    @functools.cached_property
    def _attention(self) -> tuple[list[AttentionLayer], list[AttentionLayer]]:
        forward = self._forward
        known: list[AttentionLayer] = []
        unknown: list[AttentionLayer] = []
        seen: set[int] = set()
        paths: dict[str, int] = {}
        calls: dict[int, list[Call]] = {}  # in forward order
        for call in forward.calls:
            calls.setdefault(id(call.layer), []).append(call)
        softmaxes = softmaxes_of_attention(self.graphs)
        handwritten = forward.handwritten | {id(x) for x in softmaxes}
        for path, layer in walk(self.model):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            paths[path] = paths.get(path, 0) + 1
            if paths[path] > 1:  # layers inside a layer may share a name
                path = f"{path}#{paths[path]}"
            adapter = adapter_of(layer)
            kind = _kind(layer.name.lower(), calls.get(id(layer), []))
            kind = "self" if adapter is not None and adapter.is_self else kind
            held = forward.untracked.get(id(layer), "")
            is_twice, ran = id(layer) in forward.on_two, id(layer) in calls
            entry = AttentionLayer(layer, path, kind, is_twice, held, ran)
            if id(layer) in handwritten or "attention" in held or _attends_by_its_name(layer):
                unknown.append(entry)
            elif adapter is not None:
                known.append(entry)
        # List attention classes before layers around them, which were seen to attend.
        unknown.sort(key=lambda entry: not _is_named_for_attention(entry.layer))
        if all(id(entry.layer) in calls for entry in known):
            order = {layer: number for number, layer in enumerate(calls)}
            known.sort(key=lambda entry: order[id(entry.layer)])
        return known, unknown

    def numbered(self) -> Iterator[tuple[int | None, AttentionLayer]]:
        """All attention layers, with the numbers by which `layers` names self-attention."""
        number = 0
        for entry in (*self.known, *self.unknown):
            counted = entry.kind == "self" and entry in self.known
            yield number if counted else None, entry
            number += counted

    # --- Rules ---

    @functools.cached_property
    def rules(self) -> dict[str, MaskSpec]:
        """All that a layer obeys, as one spec, by the path of each layer that has a rule."""
        specs = {entry.path: spec_of(entry.layer) for entry in self.known}
        return {path: spec for path, spec in specs.items() if spec is not None}

    # --- Inputs ---

    @functools.cached_property
    def graph(self) -> Any:
        """The functional model of `model`; `None` for a subclassed or unbuilt model."""
        graph = _keras.functional_of(self.model)
        return graph if isinstance(graph, _keras.Functional) else None

    @functools.cached_property
    def graphs(self) -> list[Any]:
        """The graphs of `model` and of the models inside it, each once."""
        inside = {id(x): x for x in map(_keras.functional_of, _keras.layers_of(self.model))}
        return [x for x in inside.values() if isinstance(x, _keras.Functional)]

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """The symbolic inputs by the names of their tensors; none without a graph."""
        return {} if self.graph is None else {tensor.name: tensor for tensor in self.graph.inputs}

    @functools.cached_property
    def unread_inputs(self) -> list[str]:
        """Inputs that neither a layer nor a rule reads."""
        calls = (x for op in _keras.operations(self.model) for x in _keras.calls_of(op))
        read = {id(tensor) for call in calls for tensor in call.input_tensors}
        return [name for name, tensor in self.inputs.items() if id(tensor) not in read]

    @functools.cached_property
    def padding_inputs(self) -> list[str]:
        """Inputs that are true at real tokens, by their names."""
        return padding_inputs(self.inputs)

    @functools.cached_property
    def zero_padded_inputs(self) -> list[str]:
        """Inputs of ids that an embedding reads and takes 0 for padding (`mask_zero=True`)."""
        return [
            name
            for name in self.inputs
            if any(getattr(layer, "mask_zero", False) for layer in self.embeddings_of(name))
        ]

    def embeddings_of(self, name: str) -> list[Any]:
        """All embeddings that may read an input; none without a graph."""
        return list(_embeddings(self.graph, self.inputs[name])) if name in self.inputs else []

    @functools.cached_property
    def longest_sequence(self) -> int | None:
        """The most positions, if layers have a limit, as KerasHub's position embeddings."""
        sizes = [getattr(x, "sequence_length", None) for x in _keras.layers_of(self.model)]
        return min((size for size in sizes if isinstance(size, int)), default=None)


# --- A forward pass -------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of an attention layer; `same`: the query is also the value, or the key."""

    layer: keras.Layer
    arguments: Mapping[str, Any]  # by name; tensors without values
    same: bool
    other_length: bool = False  # the lengths of query and value are known to differ


class _ForwardPass:
    """The attention that one forward pass of a model shows."""

    def __init__(self, model: keras.Model):
        self.calls: list[Call] = []
        self.on_two: set[int] = set()  # the ids of layers that run on several sequences
        self.handwritten: set[int] = set()  # ids of layers whose code attends by itself
        self.untracked: dict[int, str] = {}  # by layer: a weight that Keras does not track
        self._tracked = {id(weight) for weight in _keras.all_weights(model)}
        graph = _keras.functional_of(model)
        if isinstance(graph, _keras.Functional):
            self._read(graph)

    def _read(self, graph: Any) -> None:
        runs: dict[int, list[Any]] = {}  # by attention layer: the calls of layers around it
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
                del self.calls[before:]  # (the node shows more than the run did)
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
        arguments = dict(zip(_keras.argument_names(layer), args, strict=False)) | kwargs
        if adapted(layer).is_self:
            self.calls.append(Call(layer, arguments, True))
            return
        operands = adapted(layer).sequences(args, kwargs)
        query = operands.get("query")
        value = operands.get("value") if operands.get("value") is not None else query
        same = query is value or query is operands.get("key")
        # (A subclass may take arguments without a shape.)
        shapes: list[Any] = [getattr(x, "shape", ()) for x in (query, value)]
        lengths = {shape[1] for shape in shapes if len(shape) > 1} - {None}
        self.calls.append(Call(layer, arguments, same, len(lengths) > 1))

    def _run(self, layer: keras.Layer, node: Any) -> None:
        """Run the body of `layer` for shapes; a layer that fails shows nothing."""
        before, seen = len(self.calls), _Seen(self)
        arguments = node.arguments.args, node.arguments.kwargs
        tensors = list({id(x): x for x in node.input_tensors}.values())  # each once

        def body(*values: Any) -> None:
            del self.calls[before:]  # (JAX may run this twice)
            seen.hooked.clear()
            seen.ran.clear()
            by_id = dict(zip(map(id, tensors), values, strict=True))
            args, kwargs = keras.tree.map_structure(lambda x: by_id.get(id(x), x), arguments)
            with _keras.weights_watched(seen.weights):
                layer(*args, **kwargs)

        def record(*values: Any) -> Any:
            seen.recorder = recorder()
            seen.recorder.run(body, *values)
            return values  # (Keras wants tensors back.)

        operation = _Body(record)
        try:
            # (The inputs of rules are not there.)
            with seen.watching(layer), observers.rules_off():
                operation.compute_output_spec(*tensors)
        except Exception:  # a layer that needs numbers may raise anything
            # (Code that raises in a `call` of its own did not come to the hook that a rule needs.)
            self.handwritten |= {id(x) for x in seen.unhooked() if _has_own_call(x)}
            return
        if seen.attends or any(softmaxes_among(seen.recorder.steps)):
            self.handwritten.add(id(layer))
        self.handwritten |= set(map(id, seen.unhooked()))
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
    """The attention that one run of a layer's body shows."""

    def __init__(self, forward: _ForwardPass):
        self.forward = forward
        self.ran: list[keras.Layer] = []
        self.hooked: set[int] = set()
        self.weights: list[Any] = []
        self.attends = False  # by an operation, outside of the attention layers
        self.recorder = recorder()  # of all operations

    def unhooked(self) -> list[keras.Layer]:
        """Attention layers that ran and did not compute where a rule is added."""
        return [layer for layer in self.ran if id(layer) not in self.hooked]

    @contextlib.contextmanager
    def watching(self, root: keras.Layer) -> Iterator[None]:
        def called(layer: keras.Layer, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self.ran.append(layer)
            self.forward._seen(layer, args, kwargs)
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
    """Whether it runs code that is not Keras' own, so that its calls show only when it runs."""
    return any(
        isinstance(x, keras.layers.Lambda) or not _keras.is_own(x, "layers")
        for x in _keras.layers_of(layer)
    )


def _has_own_call(layer: Any) -> bool:
    """Whether a subclass of Keras' attention, out of Keras and this package, overrides `call`."""
    home = next(cls for cls in type(layer).__mro__ if "call" in vars(cls))
    is_known = home.__module__.partition(".")[0] in ("keras", "keras_headmask")
    stock = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
    return isinstance(layer, stock) and not is_known


def _follows(earlier: Any, later: Any) -> bool:
    """Whether a call is on the same sequence as an earlier one, by their first inputs.

    It is if these are one tensor, or if the later one is made of outputs of the earlier call and of
    no input that the earlier one is not made of.
    """
    before, now = (call.input_tensors[0] for call in (earlier, later))
    outputs = {id(x) for x in earlier.outputs}
    behind = _inputs_behind(now, outputs)
    return now is before or (bool(behind & outputs) and behind - outputs <= _inputs_behind(before))


def _inputs_behind(tensor: Any, ends: Set[int] = frozenset()) -> set[int]:
    """The ids of the inputs that a tensor of a graph is made of; `ends` count as inputs."""
    behind = _keras.made_of([tensor], ends)
    return {id(x) for x in behind if id(x) in ends or not _keras.made_by(x)[1]}


def _kind(name: str, calls: list[Call]) -> str:
    """The `kind` of a layer: by the tensors of its calls, and else by its name."""
    if any(call.other_length for call in calls):
        return "cross"
    if calls and all(call.same for call in calls):
        return "self"
    if "cross" in name:
        return "cross"
    return "self" if "self" in name else "unclear"


def _attends_by_its_name(layer: Any) -> bool:
    """Whether its class is named for attention, and no layer inside it is."""
    return (
        adapter_of(layer) is None
        and _is_named_for_attention(layer)
        and not any(
            _is_named_for_attention(inner) or adapter_of(inner) is not None
            for _, inner in walk(layer)
        )
    )


def _is_named_for_attention(layer: Any) -> bool:
    name = type(layer).__name__.lower()
    name = name.replace("deltanet", "attention")  # linear attention, which has no mask
    _, found, rest = name.partition("attention")
    return bool(found) and "mask" not in rest  # a layer that makes attention masks does not attend


# --- Which embeddings read an input ---------------------------------------------------------------


def _embeddings(graph: Any, tensor: Any) -> Iterator[Any]:
    """All embeddings that may read an input of a functional graph."""
    for operation in graph.operations:
        for node in _keras.calls_of(operation):
            args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
            kwargs.pop(ARGUMENT, None)  # (what rules read, no embedding reads there)
            if all(x is not tensor for x in keras.tree.flatten((args, kwargs))):
                continue
            taken = []
            if isinstance(operation, _keras.Functional):
                taken = _keras.taken_by_inputs(operation, args[0] if args else None)
            if taken:
                for inner in (own for x, own in taken if x is tensor):
                    yield from _embeddings(operation, inner)
            elif isinstance(operation, keras.Layer):
                layers_inside = _keras.layers_of(operation)
                yield from (x for x in layers_inside if isinstance(x, keras.layers.Embedding))
