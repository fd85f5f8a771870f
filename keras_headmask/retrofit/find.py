"""Which attention layers a model holds, in which order, and which are out of reach.

A survey of the model's calls says whether a layer attends to its own sequence or to another, and
on which weights. Calls in a graph show in its nodes. Layers that hold attention, or code that is
not Keras' own, run once more as Keras runs a layer to infer shapes: on symbolic tensors, in the
calling thread alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention import observers
from keras_headmask.retrofit.adapters import adapted, adapter_of
from keras_headmask.retrofit.handwritten import recorder, softmaxes_among, softmaxes_of_attention


def walk(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and layers inside `layer`, in forward order as far as the graph shows it."""
    if adapter_of(layer) is not None:
        return  # (no attention is inside attention)
    inner = children(layer)
    # Operations without a layer: `keras.ops.dot_product_attention` in a graph, say.
    if isinstance(layer, _keras.Functional):
        inner += [x for x in layer.operations if not isinstance(x, keras.Layer)]
    for child in inner:
        place = f"{path}/{child.name}" if path else child.name
        yield place, child
        yield from walk(child, place)


def children(layer: Any) -> list[Any]:
    """The layers that `layer` holds, in forward order as far as its graph shows it."""
    inner = list(layer.layers) if isinstance(layer, keras.Model) else []
    seen = {id(x) for x in inner}
    return inner + [x for x in _keras.sublayers(layer) if id(x) not in seen]


def attention(layer: Any) -> list[keras.Layer]:
    """The attention layers that `layer` is or holds, each once, in the order of `walk`."""
    found = (layer, *(inner for _, inner in walk(layer)))
    return list(dict.fromkeys(x for x in found if adapter_of(x) is not None))


def holds(outer: Any, inner: Any) -> bool:
    """Whether `inner` is `outer`, or a layer inside it."""
    return any(x is inner for x in _keras.layers_of(outer))


def is_inside(layer: Any, owner: Any) -> bool:
    """Whether `owner` is a layer inside `layer`."""
    return owner is not layer and holds(layer, owner)


@contextlib.contextmanager
def without_remat(root: keras.Layer) -> Iterator[None]:
    """Run layers of a RematScope without it: remat copies or traces tensors."""
    name, as_it_is = _keras.REMATERIALIZED_CALL, lambda _, call, *args, **kwargs: call
    with contextlib.ExitStack() as stack:
        for layer in _keras.layers_of(root):
            if _keras.remat_mode(layer) is not None:
                stack.enter_context(observers.overriding(layer, name, as_it_is))
        yield


class Call(NamedTuple):
    """One call of an attention layer; `same`: the query is also the value, or the key."""

    layer: keras.Layer
    same: bool
    other_length: bool = False  # the lengths of query and value are known to differ


class Survey:
    """What one forward pass of a model shows of its attention."""

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
        if adapted(layer).is_self:
            self.calls.append(Call(layer, True))
            return
        given = dict(zip(("query", "value", "key"), args, strict=False)) | kwargs
        query = given.get("query")
        value = given.get("value") if given.get("value") is not None else query
        same = query is value or query is given.get("key")
        # (A subclass may take arguments without a shape.)
        shapes: list[Any] = [getattr(x, "shape", ()) for x in (query, value)]
        lengths = {shape[1] for shape in shapes if len(shape) > 1} - {None}
        self.calls.append(Call(layer, same, len(lengths) > 1))

    def _run(self, layer: keras.Layer, node: Any) -> None:
        """Run the body of `layer` for shapes; a layer that fails shows nothing."""
        before, seen = len(self.calls), _Seen(self)
        given = node.arguments.args, node.arguments.kwargs
        tensors = list({id(x): x for x in node.input_tensors}.values())  # each once

        def body(*values: Any) -> None:
            del self.calls[before:]  # (JAX may run this twice)
            seen.hooked.clear()
            seen.ran.clear()
            by_id = dict(zip(map(id, tensors), values, strict=True))
            args, kwargs = keras.tree.map_structure(lambda x: by_id.get(id(x), x), given)
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
    """What one run of a layer's body shows."""

    def __init__(self, survey: Survey):
        self.survey = survey
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
    given = {id(x) for x in earlier.outputs}
    behind = _inputs_behind(now, given)
    return now is before or (bool(behind & given) and behind - given <= _inputs_behind(before))


def _inputs_behind(tensor: Any, ends: Set[int] = frozenset()) -> set[int]:
    """The ids of the inputs that a tensor of a graph is made of; the search stops at `ends`."""
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


class AttentionLayer(NamedTuple):
    """An attention layer and the names of the layers around it, outermost first.

    `kind` is "self", "cross", or "unclear". `runs_on_two`: it is called more than once, and not on
    one sequence after the other. `untracked`: a weight in it that Keras does not track. `ran`: a
    call of it was seen, in a graph or by running the layer around it for shapes.
    """

    layer: keras.Layer
    path: str
    kind: str
    runs_on_two: bool = False
    untracked: str = ""
    ran: bool = True

    @property
    def num_heads(self) -> Any:
        """The number of query heads; `None` if the layer has no `num_heads`."""
        adapter = adapter_of(self.layer)
        return getattr(self.layer, "num_heads", None) if adapter is None else adapter.num_heads

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.layer).__name__})"


class Found(NamedTuple):
    """The attention layers of a model in forward order, and those that no rule reaches.

    `untracked`: the paths of weights that its layers read and Keras does not track.
    """

    known: list[AttentionLayer]
    unknown: list[AttentionLayer]
    untracked: list[str]


def find_attention(model: keras.Model) -> Found:
    """Every attention layer inside `model`, in nested layers and models too, each once."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: {model!r}.")
    survey = Survey(model)
    found = Found([], [], list(survey.untracked.values()))
    seen: set[int] = set()
    paths: dict[str, int] = {}
    calls: dict[int, list[Call]] = {}  # in forward order
    for call in survey.calls:
        calls.setdefault(id(call.layer), []).append(call)
    handwritten = survey.handwritten | {id(x) for x in softmaxes_of_attention(model)}
    for path, layer in walk(model):
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        paths[path] = paths.get(path, 0) + 1
        if paths[path] > 1:  # layers inside a layer may share a name
            path = f"{path}#{paths[path]}"
        adapter = adapter_of(layer)
        kind = _kind(layer.name.lower(), calls.get(id(layer), []))
        kind = "self" if adapter is not None and adapter.is_self else kind
        held = survey.untracked.get(id(layer), "")
        is_twice, ran = id(layer) in survey.on_two, id(layer) in calls
        entry = AttentionLayer(layer, path, kind, is_twice, held, ran)
        if id(layer) in handwritten or "attention" in held or _attends_by_its_name(layer):
            found.unknown.append(entry)
        elif adapter is not None:
            found.known.append(entry)
    # List attention classes before layers around them, which were seen to attend.
    found.unknown.sort(key=lambda entry: not _is_named_for_attention(entry.layer))
    if all(id(entry.layer) in calls for entry in found.known):
        order = {layer: number for number, layer in enumerate(calls)}
        found.known.sort(key=lambda entry: order[id(entry.layer)])
    return found


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
    _, found, rest = name.partition("attention")
    return bool(found) and "mask" not in rest  # a layer that makes attention masks does not attend


def longest_sequence(model: keras.Model) -> int | None:
    """How long a sequence may be, if layers have a limit, as KerasHub's position embeddings."""
    sizes = [getattr(layer, "sequence_length", None) for layer in _keras.layers_of(model)]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def numbered(found: Found) -> Iterator[tuple[int | None, AttentionLayer]]:
    """All attention layers, with the numbers by which `layers` names self-attention."""
    number = 0
    for entry in (*found.known, *found.unknown):
        counted = entry.kind == "self" and entry in found.known
        yield number if counted else None, entry
        number += counted


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]
