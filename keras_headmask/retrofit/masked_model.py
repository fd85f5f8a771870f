"""The masked model: its class opens a frame with its inputs around the `call` of its stock class.

Its config holds that of the stock model, and the rules, which are applied again when it is loaded.
"""

import contextlib
import dataclasses
import gc
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_headmask import _keras, masks
from keras_headmask.attention import scopes
from keras_headmask.attention.scopes import adapt_exports
from keras_headmask.layers.call_checks import supports_unknown_lengths
from keras_headmask.retrofit.adapters import adapted, attention, holds
from keras_headmask.retrofit.frame import (
    ALONE,
    SHAPES,
    STATE,
    LayerRule,
    current_frame,
    filing,
    is_filing,
    names_in,
    opened,
    prepared_names,
    rules_of,
)
from keras_headmask.retrofit.masked_attention import (
    Part,
    Remats,
    become,
    become_part,
    become_stock,
    obey,
)
from keras_headmask.rules.base import MaskSpec, check_heads, leaves
from keras_headmask.rules.protocol import Sides

_FILED_AS = "keras_headmask>HeadMaskedModel"


class Compiles(Remats):
    """A model with rules inside, which XLA may compile on TensorFlow if its lengths are known."""

    @property
    def supports_jit(self) -> bool:
        inputs = getattr(_keras.functional_of(self), "inputs", ())
        rules = (rule for layer in attention(self) for rule in rules_of(layer))
        is_unknown = any(None in x.shape[1:2] for x in inputs)
        if is_unknown and any(rule.restricts for rule in rules):
            return supports_unknown_lengths(self)
        return vars(self).get("supports_jit", vars(self).get("_supports_jit", True))

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        self.__dict__["supports_jit"] = value


class InnerModel(Compiles, Part):
    """A functional model inside a masked one, as the backbone of a task.

    Called alone, it obeys if the model around it passes on to it, under the same names, all inputs
    that its rules read.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone(lambda: named_inputs(self, super(InnerModel, self).call, args, kwargs)):
            return super().call(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone(lambda: SHAPES):
            return super().compute_output_spec(*args, **kwargs)

    def _alone(self, tensors: Callable[[], Any]) -> AbstractContextManager[Any]:
        owner = vars(self)[STATE].owner
        state = vars(owner)[STATE]
        rules = [rule for layer in attention(self) for rule in rules_of(layer)]
        passed = state.passed_on.get(id(self), set())
        obeys = all(rule.owner is owner and passed.issuperset(rule.reads) for rule in rules)
        if id(owner) in current_frame().tensors or scopes.are_rules_off() or not obeys:
            return contextlib.nullcontext()  # (if it does not obey, the attention inside raises)
        given = tensors()
        return opened({owner: given if given is SHAPES else state.prepared(given)})


class MaskedModel(Compiles):
    """Adds rules to the class of a model: functional, Sequential or subclassed."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        state, call = vars(self)[STATE], super().call
        if state.waiting and current_frame().tensors.get(id(self)) is SHAPES:
            return call(*args, **kwargs)  # to make layers
        state.make_whole(self, lambda: self.compute_output_spec(*args, **kwargs))
        off = scopes.are_rules_off()
        tensors = {} if off else state.prepared(named_inputs(self, call, args, kwargs))
        with opened({self: tensors}) as frame:
            outputs = call(*args, **kwargs)
        for layer, rule in () if off else state.obeyed:
            if rule.restricts and id(layer) not in frame.used:
                raise RuntimeError(
                    f"The rule of the attention layer '{layer.name}' was not used in this call of "
                    f"'{self.name}': either the layer did not run, or it ran in a function that "
                    "was compiled before, or its class computed attention without "
                    "`_compute_attention`, as KerasHub's do inside vLLM. Leave it out by `layers=`."
                )
        return outputs

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        with opened({self: SHAPES}):
            return super().compute_output_spec(*args, **kwargs)

    @property
    def output(self) -> Any:
        """What this model returns as a layer, so that a model built on it calls it whole."""
        state = vars(self)[STATE]
        graph = _keras.functional_of(self)
        if id(self) in current_frame().tensors or not isinstance(graph, _keras.Functional):
            return super().output
        if state.as_a_layer is None:
            state.as_a_layer = self(graph.input)
        return state.as_a_layer

    @property
    def outputs(self) -> list[Any]:
        """Those of the stock model in its own `call`, which opened the frame; else see `output`."""
        if id(self) in current_frame().tensors:
            return super().outputs
        return keras.tree.flatten(self.output)

    def get_config(self) -> dict[str, Any]:
        if _keras.in_hdf5():
            raise ValueError(
                f"A whole model in HDF5 cannot hold the rules of '{self.name}': its reader knows "
                "no classes made for rules. Save `model.keras`, or `model.weights.h5` alone."
            )
        state, layers = vars(self)[STATE], attention(self)
        if state.stock is None:  # always the same object: files know shared layers by id
            state.stock = object.__new__(type(self)._stock_class)
        vars(state.stock).update(scopes.attributes(self))
        del vars(state.stock)[STATE]
        if state.stock_inputs is not None:
            _keras.set_inputs(state.stock, state.stock_inputs)
        with filing(self):
            for rule in (rule for layer in layers for rule in rules_of(layer)):
                if not is_filing(rule.owner) and not holds(self, rule.owner):
                    what = f"The config of the model '{self.name}' was asked for outside"
                    raise ValueError(ALONE.format(what=what, model=rule.owner.name))
            stock = keras.saving.serialize_keras_object(state.stock)
        stock.pop("compile_config", None)
        places = {id(layer): place for place, layer in enumerate(layers)}
        rules = rules_config([(places[id(x)], rule) for x, rule in state.obeyed])
        added = [[x.name, x.dtype, list(x.shape[1:])] for x in state.added]
        config = {"model": stock, "rules": state.waiting or rules, "inputs": added}
        return config | {"attention": state.awaited if state.waiting else len(layers)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> keras.Model:
        stock = getattr(cls, "_stock_class", None)  # (it may be registered nowhere)
        known = {} if stock is None else {stock.__name__: stock}
        model, rules = stock_and_rules(config, known | dict(custom_objects or {}))
        count, added = entries(config, "attention", "inputs")
        inputs = [keras.Input(shape, dtype=dtype, name=name) for name, dtype, shape in added]
        masked(model, [], inputs)
        state = vars(model)[STATE]
        state.waiting, state.awaited = rules, count
        state.attach(model)
        return model

    def __reduce__(self) -> Any:
        # (Pickle cannot find the class by its name.)
        return _keras.unpickle_model, super().__reduce__()[1]


class ModelState:
    """What a masked model knows beside its stock class; Keras does not track it."""

    def __init__(self) -> None:
        self.obeyed: list[tuple[Any, LayerRule]] = []  # attention layers and their rules
        self.parts: list[tuple[Any, Any]] = []  # leaves of the rules, and the names of their inputs
        self.added: list[Any] = []  # inputs that the stock model lacks
        self.stock_inputs: Any = None  # those of the stock model, if it lacks some
        self.stock: Any = None  # a stock model to be saved in its place
        self.as_a_layer: Any = None  # see `MaskedModel.output`
        # By id of a model inside: names of inputs that the model around passes on as they are.
        self.passed_on: dict[int, set[str]] = {}
        # Rules of a file, until all attention is made that obeys them, and how much that will be.
        self.waiting: list[dict[str, Any]] = []
        self.awaited = 0

    def attach(self, model: keras.Model) -> None:
        """Give the rules of a file to attention, if all of it is made."""
        layers = attention(model) if self.waiting else []
        if self.waiting and len(layers) == self.awaited:
            rules, self.waiting = self.waiting, []
            masked(model, list(rules_from_config(rules, layers, model.name)))

    def make_whole(self, model: keras.Model, run_for_shapes: Callable[[], Any]) -> None:
        """Attach the rules of a file; in some models the first call makes the layers."""
        self.attach(model)
        if self.waiting:
            run_for_shapes()
            self.attach(model)
        if self.waiting:
            raise ValueError(
                f"The saved rules of '{model.name}' number {self.awaited} attention layers, and it "
                f"has {len(attention(model))}. Was it saved with another version of its code?"
            )

    def prepared(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """`tensors`, and what all layers share of them, as the number of each token's sentence."""
        made = dict(tensors)

        def tensor(name: str | None) -> Any:
            return None if name is None else masks.as_mask_input(tensors[name])

        for leaf, sources in self.parts:
            pairs = {k: (x, x) if isinstance(x, str) else x for k, x in sources.items()}
            if not all(name in tensors for pair in pairs.values() for name in names_in(pair)):
                continue  # (attention says which)
            sides = {
                k: Sides(one := tensor(a), one if a == b else tensor(b))
                for k, (a, b) in pairs.items()
            }
            for name, pair in leaf.prepare(sides).items():
                names = prepared_names(leaf, name, sources)
                made |= {k: x for k, x in zip(names, pair, strict=True) if k is not None}
        return made


def named_inputs(model: Any, call: Callable, args: Any, kwargs: Any) -> dict[str, Any]:
    """The tensors of a call by name: of the inputs of a graph, else of arguments and dict keys."""
    graph = _keras.functional_of(model)
    if isinstance(graph, _keras.Functional):
        return _keras.tensors_by_input(graph, args[0] if args else kwargs["inputs"])
    tensors: dict[str, Any] = {}
    for name, value in inspect.signature(call).bind(*args, **kwargs).arguments.items():
        tensors |= value if isinstance(value, Mapping) else {name: value}
    return {name: x for name, x in tensors.items() if hasattr(x, "shape")}


# Functions that Keras makes, and makes again when they are needed.
_FUNCTIONS = "train_function", "test_function", "predict_function", "generate_function"


def drop_compiled(layers: list[keras.Layer]) -> None:
    """Drop what Keras has compiled of every model that holds one of `layers`."""
    sought = {id(layer) for layer in layers}
    # (By the type: `isinstance` reads `__class__`, at which lazy objects load something.)
    for model in [x for x in gc.get_objects() if issubclass(type(x), keras.Model)]:
        if sought & {id(layer) for layer in _keras.layers_of(model)}:
            vars(model).update(dict.fromkeys(vars(model).keys() & set(_FUNCTIONS)))


# --- Models become masked, and stock again --------------------------------------------------------

# Subclasses of `MaskedModel`, and what a model has that becomes one.
_kinds: list[tuple[type[MaskedModel], tuple[str, ...]]] = []


def add_kind(kind: type[MaskedModel], *names: str) -> None:
    """Let models that have attributes of all `names` become a `kind`, not just a `MaskedModel`."""
    _kinds.append((kind, names))


def masked(
    model: Any, planned: list[tuple[Any, LayerRule]], inputs: Iterable[Any] = ()
) -> keras.Model:
    """`model` itself, each attention layer of `planned` under its rule; it also takes `inputs`."""
    if not isinstance(model, MaskedModel):
        adapt_exports()
        vars(model)[STATE] = ModelState()
        fitting = (kind for kind, names in _kinds if all(hasattr(model, x) for x in names))
        kind = next(fitting, MaskedModel)
        become(model, kind, _FILED_AS)
    state, graph = vars(model)[STATE], _keras.functional_of(model)
    _add_inputs(state, graph, list(inputs))
    ids = {id(layer) for layer, _ in planned}
    for around in [*_keras.layers_of(model), graph]:
        if not ids.isdisjoint(map(id, attention(around))):
            is_inner = isinstance(around, _keras.Functional) and around is not graph
            become_part(around, model, InnerModel if is_inner else Part)
    for layer, rule in planned:
        rule = dataclasses.replace(rule, owner=model)
        obey(layer, rule)
        state.obeyed = [(x, old) for x, old in state.obeyed if x is not layer] + [(layer, rule)]
    order = {id(x): place for place, x in enumerate(attention(model))}
    state.obeyed.sort(key=lambda pair: order[id(pair[0])])
    state.parts = _parts_of(rule for _, rule in state.obeyed)
    state.passed_on = _passed_on(graph) if isinstance(graph, _keras.Functional) else {}
    return model


def unmask(model: keras.Model) -> keras.Model:
    """`model` as a stock model, and those inside it; its own inputs for rules are gone."""
    for layer in list(_keras.layers_of(model)):
        if isinstance(layer, MaskedModel):
            state, graph = vars(layer)[STATE], _keras.functional_of(layer)
            if layer is model and state.stock_inputs is not None:
                _keras.set_inputs(graph, state.stock_inputs)
            become_stock(graph)
        become_stock(layer)
    return model


def _add_inputs(state: ModelState, graph: Any, new: list[Any]) -> None:
    """Let a graph take more inputs, which none of its layers reads."""
    if not new:
        return
    inputs = graph.input
    if state.stock_inputs is None:
        state.stock_inputs = inputs
    state.added = [*state.added, *new]
    state.as_a_layer = None
    if isinstance(inputs, dict):
        inputs = inputs | {x.name: x for x in new}
    else:
        inputs = [*(inputs if isinstance(inputs, (list, tuple)) else [inputs]), *new]
    _keras.set_inputs(graph, inputs)


def _parts_of(rules: Iterable[LayerRule]) -> list[tuple[Any, Any]]:
    """What is prepared once for all layers: leaves that read ids, each with its sources once."""
    parts: dict[Any, Any] = {}
    for rule in rules:
        for leaf in leaves(rule.spec):
            kinds = leaf.inputs.values() if rule.restricts else ()
            if kinds and all(kind.rank is not None for kind in kinds):
                sources = {name: rule.sources[name] for name in leaf.inputs}
                parts[leaf, tuple(sorted(sources.items()))] = leaf, sources
    return list(parts.values())


def _passed_on(graph: Any) -> dict[int, set[str]]:
    """By id of each model in a graph: names of inputs that it gets as the graph gets them."""
    own: dict[str, Any] = {x.name: x for x in graph.inputs}
    passed: dict[int, set[str]] = {}
    for node in _keras.nodes(graph):
        if isinstance(node.operation, _keras.Functional):
            args = node.arguments.args
            taken = _keras.taken_by_inputs(node.operation, args[0] if args else None)
            names = {inner.name for x, inner in taken if x is own.get(inner.name)}
            passed[id(node.operation)] = passed.get(id(node.operation), names) & names
    return passed


# --- Files ----------------------------------------------------------------------------------------

_FORMAT = 1  # of the configs of masked models
_FLAGS = "replaces", "is_cross"  # of a rule
_WAY_OUT = "Was it edited, or saved with another version of its code? Save the masked model again."


def rules_config(rules: list[tuple[int, LayerRule]]) -> list[dict[str, Any]]:
    """The rules as JSON, each with the numbers of its layers and the names of what it reads."""
    parts: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, rule in rules:
        part: dict[str, Any] = {"spec": rule.spec.get_config()}
        if rule.sources:
            part["inputs"] = dict(rule.sources)
        part |= {flag: True for flag in _FLAGS if getattr(rule, flag)}
        _, places = parts.setdefault(json.dumps(part, sort_keys=True), (part, []))
        places.append(place)
    return [{"layers": places} | part for part, places in parts.values()]


def rules_from_config(
    config: Any, attention: list[keras.Layer], name: str
) -> Iterator[tuple[keras.Layer, LayerRule]]:
    """The layers and rules of what `rules_config` returned; the rules have no owner yet."""
    for part in config:
        of_spec, places = entries(part, "spec", "layers")
        read = part.get("inputs", {}).items()
        sources = {k: x if isinstance(x, str) else tuple(x) for k, x in read}
        wrong = [x for x in places if type(x) is not int or not 0 <= x < len(attention)]
        if wrong or not places:
            raise ValueError(
                f"A saved rule must name attention layers of '{name}', which has "
                f"{len(attention)}, numbered from 0. Received: {places}. {_WAY_OUT}"
            )
        for layer in (attention[place] for place in places):
            spec, num_heads = MaskSpec.from_config(of_spec), adapted(layer).num_heads
            check_heads(spec, num_heads)
            flags = {flag: part.get(flag, False) for flag in _FLAGS}
            yield layer, LayerRule(spec, num_heads, sources, **flags)


def entries(config: Any, *keys: str) -> list[Any]:
    """The values of `keys`, each of which a file must hold."""
    values = dict(config) if isinstance(config, Mapping) else {}
    if lacking := [key for key in keys if key not in values]:
        raise ValueError(
            f"The file of a masked model lacks {lacking}, which format {_FORMAT} of "
            f"keras_headmask has. Received: {sorted(values)}. {_WAY_OUT}"
        )
    return [values[key] for key in keys]


def stock_and_rules(config: Any, custom_objects: Any) -> tuple[Any, list[Any]]:
    """The stock model in the config of a masked one, and the configs of its rules."""
    of_stock, of_rules = entries(config, "model", "rules")
    if not isinstance(of_rules, (list, tuple)) or not of_rules:
        raise ValueError(
            "The file of a masked model has no rule in 'rules', so the model would run without "
            f"its mask. Received: {of_rules!r}. {_WAY_OUT}"
        )
    model = keras.saving.deserialize_keras_object(of_stock, custom_objects=custom_objects)
    return model, list(of_rules)


def _refuse_clone(model: Any) -> AbstractContextManager[Any]:
    if isinstance(model, Compiles):
        raise ValueError(ALONE.format(what="A clone was made", model=model.name))
    return contextlib.nullcontext()


_keras.run_in_scopes("keras.src.models.cloning", dict.fromkeys(_keras.CLONES, _refuse_clone))

# The name under which masked models of any class are filed; known before the first one is made.
keras.saving.register_keras_serializable(*_FILED_AS.split(">"))(MaskedModel)
