"""One look at a model: what attends, what may attend unseen, what reads its inputs.

A public call that takes a model makes one `Found` and passes it on. It is kept no longer than the
call, since a model may change between two calls.

What attends is known by its class. The model runs once as Keras runs a layer to infer shapes, on
symbolic tensors, in the calling thread alone: this shows the order, self- and cross-attention,
calls that go past the method where a rule is added, calls in a function that TensorFlow compiled
before, and weights that Keras does not track.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import keras

from keras_headmask import _keras
from keras_headmask.attention import scopes
from keras_headmask.retrofit.adapters import (
    AttentionLayer,
    adapted,
    adapter_of,
    attention,
    walk,
    without_remat,
)
from keras_headmask.retrofit.frame import STATE, graph_being_built, rules_of, spec_of
from keras_headmask.rules.base import MaskSpec, check_spec
from keras_headmask.rules.leaves import padding_inputs


class Found:
    """The attention of a model, found once and passed on.

    Attributes:
        graph: The functional model of `model`; `None` for a subclassed or unbuilt model.
        inputs: The symbolic inputs by the names of their tensors; none without a graph.
        known: The attention layers that a rule reaches, in forward order, each once.
        unknown: Layers that attend by code that no rule reaches.
        unseen: Layers and operations whose code may attend; attention that is known among them.
        rules: All that a layer obeys, as one spec, by the path of each layer that has a rule.
        in_functions: The ids of attention layers that the model calls in a `tf.function` of its
            own.
        untracked: The paths of weights that layers read and Keras does not track.

    Raises:
        TypeError: if it is not a Keras model.
    """

    def __init__(self, model: keras.Model):
        if not isinstance(model, keras.Model):
            hint = ""
            if isinstance(model, keras.Layer):
                hint = " A layer takes a rule by `PerHeadMaskedMultiHeadAttention(mask_spec=...)`."
            raise TypeError(f"`model` must be a Keras model. Received: {model!r}.{hint}")
        for layer in _keras.layers_of(model):  # rules of a file wait for their attention
            if attach := getattr(vars(layer).get(STATE), "attach", None):
                attach(layer)
        graph = _keras.functional_of(model)
        self.model, self.graph = model, graph if isinstance(graph, _keras.Functional) else None
        self.inputs: dict[str, Any] = {x.name: x for x in getattr(self.graph, "inputs", ())}
        run = _SymbolicRun(model, self.graph)
        self.known, self.unknown, self.unseen = self._attention(run)
        specs = {entry.path: spec_of(entry.layer) for entry in self.known}
        self.rules: dict[str, MaskSpec] = {k: x for k, x in specs.items() if x is not None}
        self.in_functions = run.in_functions
        tracked = {id(x) for layer in _keras.layers_of(model) for x in layer.variables}
        self.untracked = list(dict.fromkeys(x.path for x in run.read if id(x) not in tracked))

    def _attention(self, run: "_SymbolicRun") -> tuple[list[AttentionLayer], ...]:
        """What is known, unknown and unseen."""
        calls, softmaxes = self._calls(run), _softmaxes(self.graphs)
        counted = {} if self.graph is None else _calls_in(self.graph)
        known: list[AttentionLayer] = []
        unknown: list[AttentionLayer] = []
        unseen: list[AttentionLayer] = []
        seen: set[int] = set()
        paths: dict[str, int] = {}
        for path, layer in ((self.model.name, self.model), *walk(self.model)):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            paths[path] = paths.get(path, 0) + (layer is not self.model)
            if paths[path] > 1:  # layers inside a layer may share a name
                path = f"{path}#{paths[path]}"
            adapter, ran = adapter_of(layer), run.calls.get(id(layer), [])
            count, on_two = counted.get(id(layer), (len(ran), False))
            kind = _kind(layer, calls.get(id(layer), []))
            on_two = on_two or len(ran) > count
            entry = AttentionLayer(layer, path, kind, on_two, id(layer) in calls)
            is_past_hook = run.is_whole and ran and id(layer) not in run.hooked
            if _attends_by_its_name(layer) if adapter is None else is_past_hook:
                unknown.append(entry)
            else:
                known += [entry] if adapter is not None else []
                if _runs_unknown_code(layer) or id(layer) in softmaxes:
                    unseen.append(entry)
        if all(id(entry.layer) in calls for entry in known):
            order = {layer: number for number, layer in enumerate(calls)}
            known.sort(key=lambda entry: order[id(entry.layer)])
        return known, unknown, unseen

    def _calls(self, run: "_SymbolicRun") -> dict[int, list[bool | None]]:
        """`run.calls`, by nodes for layers in a graph: what a dtype policy casts is one tensor."""
        calls = dict(run.calls if run.is_whole else {})
        by_node: dict[int, list[bool | None]] = {}
        around: set[int] = set()  # attention that layers without a graph hold
        for node in (node for graph in self.graphs for node in _keras.nodes(graph)):
            operation, (args, kwargs) = node.operation, (node.arguments.args, node.arguments.kwargs)
            if adapter_of(operation) is not None:
                is_self = _is_self(operation, args, kwargs)
                by_node.setdefault(id(operation), []).append(is_self)
            elif not isinstance(_keras.functional_of(operation), _keras.Functional):
                around |= set(map(id, attention(operation)))
        for layer, found in by_node.items():
            calls[layer] = found + (calls.get(layer, []) if layer in around else [])
        return calls

    def numbered(self) -> Iterator[tuple[int | None, AttentionLayer]]:
        """All attention layers, with the numbers by which `layers` names self-attention."""
        number = 0
        for entry in (*self.known, *self.unknown):
            counted = entry.kind == "self" and entry in self.known
            yield number if counted else None, entry
            number += counted

    @functools.cached_property
    def graphs(self) -> list[Any]:
        """The graphs of `model` and of the models inside it, each once."""
        inside = {id(x): x for x in map(_keras.functional_of, _keras.layers_of(self.model))}
        return [x for x in inside.values() if isinstance(x, _keras.Functional)]

    @functools.cached_property
    def unread_inputs(self) -> list[str]:
        """Inputs that neither a layer nor a rule reads."""
        operations = getattr(self.graph, "operations", ())
        calls = (call for operation in operations for call in _keras.calls_of(operation))
        read = {id(tensor) for call in calls for tensor in call.input_tensors}
        rules = (rule for entry in self.known for rule in rules_of(entry.layer))
        read_by_rules = {x for rule in rules if rule.owner is self.model for x in rule.reads}
        unread = [name for name, tensor in self.inputs.items() if id(tensor) not in read]
        return [name for name in unread if name not in read_by_rules]

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


# --- One run --------------------------------------------------------------------------------------


class _Reads(keras.StatelessScope):
    """Notes the variables that are read inside."""

    def __init__(self, read: list[Any]):
        super().__init__()
        self.read = read

    def get_current_value(self, variable: Any) -> Any:
        self.read.append(variable)
        return super().get_current_value(variable)


class _SymbolicRun(keras.Operation):
    """The model once on symbolic tensors; a model without a graph, or that fails, shows nothing."""

    def __init__(self, model: Any, graph: Any):
        super().__init__()
        self.model, self.graph = model, graph
        # By attention layer, in forward order: whether each call has one sequence, for queries and
        # for keys or values; `None` if their lengths are known to differ.
        self.calls: dict[int, list[bool | None]] = {}
        self.hooked: set[int] = set()  # layers that computed where a rule is added
        self.in_functions: set[int] = set()
        self.read: list[Any] = []  # weights
        self.is_whole = False
        if graph is not None:
            with contextlib.suppress(Exception):  # a layer that needs numbers may raise anything
                self._watch()
                self.is_whole = True

    def call(self, *inputs: Any) -> Any:
        for seen in (self.calls, self.hooked, self.read):
            seen.clear()  # (JAX may run this twice)
        with _Reads(self.read):
            outputs = self.model(keras.tree.pack_sequence_as(self.graph.input, list(inputs)))
        self.in_functions = set(_in_functions(attention(self.model)))
        return outputs

    def _watch(self) -> None:
        def called(layer: Any, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault(id(layer), []).append(_is_self(layer, args, kwargs))
            return usual(*args, **kwargs)

        def computed(layer: Any, usual: Callable, *args: Any, **kwargs: Any) -> Any:
            self.hooked.add(id(layer))
            return usual(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            for layer in attention(self.model):
                for name, see in (("call", called), (adapted(layer).hook, computed)):
                    see = functools.partial(see, layer)
                    stack.enter_context(scopes.overriding(layer, name, see))
            stack.enter_context(without_remat(self.model))
            stack.enter_context(scopes.rules_off())  # (the inputs of rules may not be there)
            self.compute_output_spec(*keras.tree.flatten(self.graph.input))


def _in_functions(layers: list[keras.Layer]) -> Iterator[int]:
    """The ids of `layers` whose weights a `tf.function` takes that the graph being built calls."""
    if (graph := graph_being_built()) is None:
        return
    functions = "PartitionedCall", "StatefulPartitionedCall"
    taken = {x.name for op in graph.get_operations() if op.type in functions for x in op.inputs}
    handles = {id(outer) for outer, inner in graph.captures if inner.name in taken}
    for layer in layers:
        if any(id(getattr(x.value, "handle", None)) in handles for x in layer.weights):
            yield id(layer)


def _is_self(layer: Any, args: Any, kwargs: Any) -> bool | None:
    """Whether the query of a call is also the value, or the key; `None`: of another length."""
    if adapted(layer).is_self:
        return True
    operands = adapted(layer).sequences(args, kwargs)
    query = operands.get("query")
    value = operands.get("value") if operands.get("value") is not None else query
    # (A subclass may take arguments without a shape.)
    shapes: list[Any] = [getattr(x, "shape", ()) for x in (query, value)]
    if len({shape[1] for shape in shapes if len(shape) > 1} - {None}) > 1:
        return None
    return query is value or query is operands.get("key")


def _kind(layer: Any, calls: list[bool | None]) -> str:
    """The `kind` of a layer: by its class, by the tensors of its calls, and else by its name."""
    adapter, name = adapter_of(layer), layer.name.lower()
    if None in calls:
        return "cross"
    if (adapter is not None and adapter.is_self) or (calls and all(calls)):
        return "self"
    return "cross" if "cross" in name else "self" if "self" in name else "unclear"


def _calls_in(graph: Any) -> dict[int, tuple[int, bool]]:
    """By attention layer: how many calls the nodes show, and if these are on several sequences.

    A call of a layer around attention counts as one.
    """
    nodes: dict[int, list[Any]] = {}
    inside: dict[int, dict[int, tuple[int, bool]]] = {}  # by graph
    for node in _keras.nodes(graph):
        inner = _keras.functional_of(node.operation)
        if isinstance(inner, _keras.Functional) and id(inner) not in inside:
            inside[id(inner)] = _calls_in(inner)
        for layer in attention(node.operation):
            nodes.setdefault(id(layer), []).append(node)
    counted = {}
    for layer_id, calls in nodes.items():
        graphs = (inside.get(id(_keras.functional_of(x.operation)), {}) for x in calls)
        found = [in_graph.get(layer_id, (1, False)) for in_graph in graphs]
        apart = any(x[1] for x in found) or not all(map(_follows, calls, calls[1:]))
        counted[layer_id] = sum(x[0] for x in found), apart
    return counted


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
    waiting, seen, behind = [tensor], set(), set()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            read = [] if id(one) in ends else _keras.made_by(one)[1]
            behind |= set() if read else {id(one)}
            waiting += read
    return behind


# --- What may attend unseen -----------------------------------------------------------------------

_KNOWN_CODE = "keras.", "keras_hub.", "keras_headmask."
# fmt: off
# Layers and operations of Keras that run a function, or a model of another library.
_RUN_CODE = {
    "Lambda", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "TFSMLayer", "Map", "VectorizedMap",
    "Scan", "AssociativeScan", "WhileLoop", "ForiLoop", "Cond", "Switch",
}
# fmt: on
_SOFTMAX = "softmax", "log_softmax"
_PRODUCTS = {"Matmul", "Einsum", "Dot", "Tensordot"}
_ATTENDS = {"MMDiTBlock"}  # of KerasHub, beside classes named for attention


def _attends_by_its_name(layer: Any) -> bool:
    """Whether its class is named for attention, and no layer inside it is."""

    def is_named(layer: Any) -> bool:
        name = type(layer).__name__.lower()
        name = name.replace("deltanet", "attention")  # linear attention, which has no mask
        _, found, rest = name.partition("attention")
        return bool(found) and "mask" not in rest  # a layer that makes attention masks

    if type(layer).__name__ in _ATTENDS:
        return True
    inside = (inner for _, inner in walk(layer))
    return is_named(layer) and not any(is_named(x) or adapter_of(x) is not None for x in inside)


def _runs_unknown_code(operation: Any) -> bool:
    """Whether it may compute by code that is neither Keras', KerasHub's nor ours."""
    cls = getattr(type(operation), "_stock_class", type(operation))
    if isinstance(operation, keras.Model) or adapter_of(operation) is not None:
        # (What else a class of these overrides does not attend, or is refused under a rule.)
        cls = next(x for x in cls.__mro__ if "call" in vars(x))
    activation = getattr(operation, "activation", None)
    backends = "tensorflow.", "jax.", "torch."  # e.g. `tf.nn.relu`
    is_plain = not callable(activation) or _is_of(activation, (*_KNOWN_CODE, *backends))
    return cls.__name__ in _RUN_CODE or not is_plain or not _is_of(cls, _KNOWN_CODE)


def _is_of(code: Any, known: tuple[str, ...]) -> bool:
    module = getattr(code, "__module__", None) or type(code).__module__
    return f"{module}.".startswith(known)


def _softmaxes(graphs: list[Any]) -> set[int]:
    """The ids of each softmax of `graphs`, if these have a product of two tensors, too."""
    nodes = [node for graph in graphs for node in _keras.nodes(graph)]

    def is_softmax(operation: Any) -> bool:
        named = getattr(getattr(operation, "activation", None), "__name__", "")
        return named in _SOFTMAX or type(operation).__name__ in ("Softmax", "LogSoftmax", "Exp")

    if not any(type(x.operation).__name__ in _PRODUCTS and len(x.input_tensors) > 1 for x in nodes):
        return set()
    return {id(x.operation) for x in nodes if is_softmax(x.operation)}


# --- Which embeddings read an input ---------------------------------------------------------------


def _embeddings(graph: Any, tensor: Any) -> Iterator[Any]:
    """All embeddings that may read an input of a functional graph."""
    for operation in graph.operations:
        for node in _keras.calls_of(operation):
            args, kwargs = node.arguments.args, node.arguments.kwargs
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


# --- Which attention layers a selector names -----------------------------------------------------

_NUMBERS = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*", re.ASCII)

_NONE = (
    "Attention layers: none. If the model makes them when it is built or first called, call it "
    "once on data before. Attention that `call` makes anew each time is out of reach: make it in "
    "`__init__` or `build`, and assign it to an attribute."
)


def specs_by_layer(
    mask_spec: MaskSpec | Mapping[Any, Any], layers: Any, found: Found, ignore: Any = None
) -> dict[int, MaskSpec]:
    """The spec of each selected layer, by its number among `found.known`.

    `ignore`: see `apply_head_masks`; `None` if nothing in the model can attend unseen.
    """
    hidden = None
    if ignore is not None:
        ignored = _patterns(ignore)
        entries = (*found.unknown, *found.unseen)
        hidden = [x for x in entries if not any(regex.search(x.path) for regex in ignored)]
    is_config = isinstance(mask_spec, Mapping) and "kind" in mask_spec
    if isinstance(mask_spec, Mapping) and not is_config:
        if layers is not None:
            raise ValueError(
                "`layers` and a mapping from layers to specs say the same twice: give one of them. "
                f"Received: layers={layers!r}."
            )
        if not mask_spec:
            raise ValueError("`mask_spec` is an empty mapping: it names no layer.")
        pairs = list(mask_spec.items())
        for selector, _ in pairs:
            _refuse_number(selector)
    else:
        pairs = [(layers, mask_spec)]
    chosen: dict[int, MaskSpec] = {}
    for selector, spec in pairs:
        if isinstance(spec, Mapping):
            spec = MaskSpec.from_config(spec)
        check_spec(spec, "mask_spec", "hm.apply_head_masks(model, SPEC)")
        for number in select(found, selector, hidden):
            if number in chosen:
                raise ValueError(
                    f"The layer {found.known[number]} has two rules, the second from "
                    f"{selector!r}. Name each layer once, or combine the rules with &."
                )
            chosen[number] = spec
    return dict(sorted(chosen.items()))


def _refuse_number(key: Any) -> None:
    """Raise for a key of a mapping that `PerHead` would read as a head."""
    if any(map(_is_number, key if isinstance(key, (tuple, list, range)) else (key,))):
        raise ValueError(
            f"The key {key!r} may mean a layer or a head. Write layers as a text, "
            '`{"0-3": ...}`, and heads of all layers as `PerHead({...})`.'
        )


def selected(found: Found, selector: Any) -> list[AttentionLayer]:
    """The attention layers that `selector` names: see `apply_head_masks`."""
    return [found.known[number] for number in select(found, selector)]


def select(found: Found, selector: Any, hidden: list[AttentionLayer] | None = None) -> list[int]:
    """The numbers among `found.known` of the layers that `selector` names.

    `hidden`: what may attend without a rule, which `None` and regexes must not name. By default
    attention of unknown classes, as no rule is meant.
    """
    of_self = [i for i, entry in enumerate(found.known) if entry.kind == "self"]
    if selector is None:
        _refuse(found, hidden)
        _check_all_clear(found)
        if not of_self:
            more = (
                f"Attention layers: {_names(found)}. Cross-attention is masked only when `layers` "
                "names it."
            )
            raise ValueError(
                "The model holds no self-attention layer (keras.layers.MultiHeadAttention, a "
                f"subclass, or that of a KerasHub decoder). {more if found.known else _NONE}"
            )
        return of_self
    if isinstance(selector, str) and not selector:
        raise ValueError("`layers` is an empty text: it names no layer. None names all.")
    if isinstance(selector, (tuple, list, range)) or getattr(selector, "ndim", False):
        numbers: set[int] = set()
        numbers.update(*(select(found, part, hidden) for part in selector))
        if not numbers:
            raise ValueError(f"{selector!r} names no layer.")
        return sorted(numbers)
    if isinstance(selector, str) and not _NUMBERS.fullmatch(selector):
        return _matching(found, selector, hidden)
    _check_all_clear(found)
    return [of_self[n] for n in _numbers(selector, len(of_self))]


def _refuse(found: Found, hidden: list[AttentionLayer] | None, named: str = "") -> None:
    """Raise if there is something `hidden`, see `select`; `named` says what named it."""
    regex = re.compile(named)
    entries = found.unknown if hidden is None else hidden
    entries = [entry for entry in entries if regex.search(entry.path)]
    if not entries:
        return
    some = ", ".join(map(str, entries[:5]))
    some += f", ... ({len(entries)})" if len(entries) > 5 else ""
    some += f", which {named!r} names," if named else ""
    if hidden is None:
        message = f"The attention layer {some} is of a class whose masks are out of reach."
    else:
        message = (
            f"{some} may attend without the rule. A rule reaches the attention classes of Keras "
            "and KerasHub that are known, not other code. Name in `ignore`, by regexes on paths, "
            f"what may do so, or does not attend: ignore={[x.path for x in entries[:5]]}."
        )
    if found.known and not named:
        message += f" To leave it as it is, name the others in `layers`: {_names(found)}."
    raise ValueError(message)


def _patterns(ignore: Any) -> list[re.Pattern[str]]:
    """`ignore` of `apply_head_masks` as regexes."""
    texts = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(texts, (list, tuple)) or not all(isinstance(x, str) for x in texts):
        raise TypeError(
            f"`ignore` must be a regex on layer paths or a list of them. Received: {ignore!r}."
        )
    return [_regex(text, "ignore") for text in texts]


def _regex(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{argument}` is not a regex: {pattern!r} ({error}).") from error


def _check_all_clear(found: Found) -> None:
    """Raise if a layer may be self- or cross-attention: numbers count self-attention only."""
    if unclear := [entry for entry in found.known if entry.kind == "unclear"]:
        raise ValueError(
            f"{unclear[0].why_unclear} Name the layers by regexes on their paths in `layers`: "
            f"{_names(found)}."
        )


def _is_number(x: Any) -> bool:
    is_integer = hasattr(type(x), "__index__") and getattr(x, "shape", ()) == ()
    return is_integer and not isinstance(x, bool)


def _numbers(selector: Any, count: int) -> list[int]:
    """3, "3", "1-3" or "0,2-3" as numbers below `count`."""
    if not (isinstance(selector, str) or _is_number(selector)):
        raise TypeError(
            "Layers are named by None (all self-attention), a number, an inclusive range '0-3', a "
            f"regex on layer paths, or a tuple or list of those. Received: {selector!r}."
        )
    numbers: list[int] = []
    for part in str(selector).split(","):
        first, dash, last = part.strip().partition("-")
        if not dash or not first:  # one number, a negative one perhaps
            first = last = part
        if int(first) > int(last):
            raise ValueError(f"The range {part.strip()!r} of layers runs backwards.")
        numbers.extend(range(int(first), int(last) + 1))
    beyond = [n for n in numbers if not 0 <= n < count]
    if beyond:
        raise ValueError(
            f"There is no self-attention layer {beyond[0]}: the model has {count}, numbered from 0 "
            f"in forward order. Received: {selector!r}."
        )
    return numbers


def _matching(found: Found, pattern: str, hidden: list[AttentionLayer] | None) -> list[int]:
    regex = _regex(pattern, "layers")
    _refuse(found, hidden, pattern)
    numbers = [i for i, entry in enumerate(found.known) if regex.search(entry.path)]
    if not numbers:
        paths = f"Paths: {_names(found)}." if found.known else _NONE
        raise ValueError(f"No attention layer's path matches {pattern!r}. {paths}")
    return numbers


def _names(found: Found) -> str:
    paths = [repr(entry.path) for entry in found.known]
    return ", ".join(paths if len(paths) <= 8 else [*paths[:7], f"... ({len(paths)} layers)"])
