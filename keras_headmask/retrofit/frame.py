"""Rules of a masked model, and the frame in which its attention finds what they read.

A masked model opens a frame around its stock `call`. A frame belongs to one call in one thread, so
a model may run in many threads at once. Each model that runs, one inside another perhaps, has its
tensors there; each rule names the model that it belongs to.
"""

import contextlib
import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras

from keras_headmask import _keras
from keras_headmask.attention.scopes import holding
from keras_headmask.rules import base
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import Sides

Source = str | tuple[str | None, str | None]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRule:
    """A rule of one attention layer, and the names of the inputs that it reads.

    `sources` maps each name that the spec reads to an input of the model, or to a pair of them,
    `(query_side, key_side)`. `owner` is the masked model whose inputs these are. A rule that
    `replaces` ends that of a layer of ours. In cross-attention (`is_cross`) the positions of
    queries start at 0, however many keys there are.
    """

    spec: MaskSpec
    num_heads: int
    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    replaces: bool = False
    owner: Any = None
    is_cross: bool = False

    @functools.cached_property
    def restricts(self) -> bool:
        """Whether the rule hides any key from any head."""
        return base.restricts(self.spec, self.num_heads)

    @functools.cached_property
    def reads(self) -> list[str]:
        """The names of the inputs that a call of the model must have."""
        return sorted({name for source in self.sources.values() for name in names_in(source)})

    def inputs_from(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The mask inputs of the spec, taken from `tensors` by name."""

        def side(name: str | None) -> Any:
            return None if name is None else tensors[name]

        return {
            name: side(source) if isinstance(source, str) else tuple(map(side, source))
            for name, source in self.sources.items()
        }

    @functools.cached_property
    def _prepared_names(self) -> list[tuple[MaskSpec, dict[str, Sides]]]:
        return [
            (leaf, {name: prepared_names(leaf, name, self.sources) for name in leaf.inputs})
            for leaf in leaves(self.spec)
        ]

    def prepared(self, tensors: Mapping[str, Any]) -> dict[MaskSpec, dict[str, Sides]]:
        """By leaf of the spec, what the model prepared for it and `tensors` holds."""
        prepared = {}
        for leaf, names in self._prepared_names:
            sides = [side for pair in names.values() for side in pair if side is not None]
            if sides and all(side in tensors for side in sides):
                prepared[leaf] = {
                    name: Sides(*(None if side is None else tensors[side] for side in pair))
                    for name, pair in names.items()
                }
        return prepared


def names_in(source: Source) -> list[str]:
    return [name for name in ((source,) if isinstance(source, str) else source) if name is not None]


def whole_masks(rules: Iterable[LayerRule]) -> set[str]:
    """The names of what `rules` read that are masks of queries and keys."""
    return {
        place
        for rule in rules
        for name, source in rule.sources.items()
        if rule.spec.inputs[name].rank is None
        for place in names_in(source)
    }


def prepared_names(leaf: MaskSpec, name: str, sources: Mapping[str, Source]) -> Sides:
    """The names of the tensors that are prepared for an input of a leaf, one for each side."""
    source, config = sources[name], _config_of(leaf)
    if isinstance(source, str):
        return Sides(f"{config} of {source}", f"{config} of {source}")
    of_both = ", ".join(names_in(source))
    sides = zip(source, ("queries", "keys"), strict=True)
    return Sides(*(None if s is None else f"{config} of {of_both}: {side}" for s, side in sides))


@functools.lru_cache
def _config_of(leaf: MaskSpec) -> str:
    return json.dumps(leaf.get_config(), sort_keys=True)  # (two classes may have one repr)


# --- What an attention layer obeys ----------------------------------------------------------------

STATE = "headmask_state"  # the one attribute of ours on a layer or model; Keras does not track it


def is_masked(layer: Any) -> bool:
    """Whether it is a masked model or a part of one: its class was made for a stock class."""
    return hasattr(type(layer), "_stock_class")


def rules_of(layer: Any) -> tuple[LayerRule, ...]:
    """The rules that an attention layer obeys, that of the innermost model first."""
    return getattr(vars(layer)[STATE], "rules", ()) if is_masked(layer) else ()


def spec_of(layer: Any) -> MaskSpec | None:
    """All that an attention layer obeys: its own `mask_spec`, unless replaced, and its rules."""
    rules, own = rules_of(layer), getattr(layer, "mask_spec", None)
    specs = [] if own is None or any(rule.replaces for rule in rules) else [own]
    specs += [rule.spec for rule in rules]
    return functools.reduce(operator.and_, specs) if specs else None


# --- The frame ------------------------------------------------------------------------------------

# In place of tensors, while Keras infers the shapes of a graph: these depend on no rule.
SHAPES: Any = "shapes alone"

ALONE = (
    "{what} of the masked model '{model}', where its rule would be lost. Mask last: build, cut or "
    "clone the stock model (`hm.unmasked(model)`), and mask the result; or call the masked model "
    "as a layer of the new one, `keras.Model(masked.input, head(masked.output))`."
)


class Frame(NamedTuple):
    """The state of the calls that run."""

    tensors: Mapping[int, Any]  # inputs by name, or `SHAPES`, by the id of each masked model
    offset: Any  # the position of the first query in a cache; `None` without a cache
    graph: Any  # TensorFlow's, in which the tensors were given
    used: set[int]  # the ids of the attention layers that have run


_frame: ContextVar[Frame | None] = ContextVar("frame", default=None)


def current_frame() -> Frame:
    return _frame.get() or Frame({}, None, graph_being_built(), set())


def in_frame(frame: Frame) -> AbstractContextManager[Any]:
    """Run in `frame`, which another call opened: a RematScope runs layers again, later."""
    return holding(_frame, frame)


@contextlib.contextmanager
def opened(by_model: Mapping[keras.Model, Any]) -> Iterator[Frame]:
    """Let attention read the tensors of each model, by name, beside those of models around it."""
    before = current_frame()
    held = {**before.tensors, **{id(model): tensors for model, tensors in by_model.items()}}
    frame = Frame(held, before.offset, graph_being_built(), set())
    with in_frame(frame):
        yield frame
    before.used.update(frame.used)


def moved(offset: Any) -> AbstractContextManager[Any]:
    """A frame whose queries start at `offset`, unless a layer around has said where they start."""
    frame = current_frame()
    return in_frame(frame if frame.offset is not None else frame._replace(offset=offset))


def tensors_of(rule: LayerRule) -> Mapping[str, Any] | None:
    """The inputs of the model that `rule` belongs to, in the running call; `None` if it rests."""
    return current_frame().tensors.get(id(rule.owner))


def tensors_for(rule: LayerRule, layer: keras.Layer) -> Mapping[str, Any] | None:
    """What attention `layer` finds for `rule`; `None` if shapes alone are asked for.

    Raises:
        ValueError: if the model of the rule does not run, or its call lacks what the rule reads.
        RuntimeError: if a compiled function would keep what it traces now.
    """
    tensors = tensors_of(rule)
    if tensors is None:
        what = f"The attention layer '{layer.name}' was called outside"
        raise ValueError(ALONE.format(what=what, model=rule.owner.name))
    if tensors is SHAPES:
        if not _keras.for_shapes_alone():
            raise RuntimeError(in_own_function(layer.name))
        return None
    if lacking := [name for name in rule.reads if name not in tensors]:
        raise ValueError(
            f"The rule of the attention layer '{layer.name}' reads {rule.reads}, and this call of "
            f"'{rule.owner.name}' lacks {lacking}. Received: {sorted(tensors)}. Pass them by name. "
            "(KerasHub's cache passes the newest token alone: there rules on positions hold, such "
            "as Window, Chunk, Keys, and, for a causal language model that has the rule itself, "
            "what `generate()` is given.)"
        )
    is_tensorflow = keras.backend.backend() == "tensorflow"
    if rule.reads and is_tensorflow and _keras.in_function(current_frame().graph):
        raise RuntimeError(in_own_function(layer.name))
    return tensors


# --- Functions inside a model, whose traces would stay --------------------------------------------

_COMPILERS = {
    "tensorflow": "`tf.function`",
    "jax": "`jax.jit`, `keras.remat`, `ops.cond` or loop",  # JAX keeps what each of them traced
    "torch": "`torch.compile`",
}


def graph_being_built() -> Any:
    """The TensorFlow graph that is being built; `None` outside of graphs and on other backends."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def in_own_function(name: str) -> str:
    backend = keras.backend.backend()
    way_out = ""
    if backend == "jax":
        way_out = (
            " If it is no `jax.jit`, you can also define `compute_output_spec` in the layer that "
            "has it, and give it a new function in each call: then nothing is traced before the "
            "rule has its inputs."
        )
    return (
        f"The attention layer '{name}' is called in a {_COMPILERS[backend]} inside the model. Such "
        "a function keeps what it traced first: attention without the rule, or under the ids of "
        "another call. Call the layer outside of it; `compile`, `predict` and `export` make one "
        f"graph of the whole model.{way_out}"
    )


def were_traced(layers: Iterable[Any], attention: Iterable[Any]) -> list[Any]:
    """The `attention` that ran in a `tf.function` among the attributes of `layers`."""
    if keras.backend.backend() != "tensorflow":
        return []
    scopes = set().union(*map(_keras.scopes_in_traces, layers))
    return [x for x in attention if _keras.without_number(x.name) in scopes]


# --- Files ----------------------------------------------------------------------------------------

_filing: ContextVar[frozenset[int]] = ContextVar("filing", default=frozenset())


def filing(model: keras.Model) -> AbstractContextManager[Any]:
    """Let the layers of a masked model give their stock configs: the model files the rules."""
    return holding(_filing, _filing.get() | {id(model)})


def is_filing(model: keras.Model | None) -> bool:
    return id(model) in _filing.get()
