"""The rule of one attention layer, and what it reads while layers run.

A masked layer that is called with `head_mask_inputs` opens a frame. Attention inside reads it. A
frame belongs to one call in one thread, so a model may run in many threads at once.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras

from keras_headmask.retrofit.compiled import graph_being_built
from keras_headmask.retrofit.nesting import holds
from keras_headmask.rules import heads
from keras_headmask.rules.base import MaskSpec, leaves
from keras_headmask.rules.protocol import Sides

Source = str | tuple[str | None, str | None]
Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRule:
    """A rule of one attention layer, and the names under which its inputs are given.

    `sources` maps each name that the spec reads to one of `head_mask_inputs`, or to a pair of
    them, `(query_side, key_side)`. `owner` is the layer that is called with these. A rule that
    `replaces` stands for all rules that the layer had before. In cross-attention (`is_cross`) the
    queries count from 0, however many keys there are.
    """

    spec: MaskSpec
    num_heads: int
    sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    replaces: bool = False
    owner: keras.Layer | None = None
    is_cross: bool = False

    @functools.cached_property
    def restricts(self) -> bool:
        """Whether any head is kept from any key."""
        return heads.restricts(self.spec, self.num_heads)

    @functools.cached_property
    def reads(self) -> list[str]:
        """The names that must be among `head_mask_inputs`."""
        return sorted({name for source in self.sources.values() for name in names_in(source)})

    def given(self, tensors: Tensors) -> dict[str, Any]:
        """The mask inputs of the spec, out of tensors by name."""

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

    def prepared(self, tensors: Tensors) -> dict[MaskSpec, dict[str, Sides]]:
        """What was prepared before for leaves of the spec: see `HeadMaskInputs`."""
        found = {}
        for leaf, names in self._prepared_names:
            sides = [side for pair in names.values() for side in pair if side is not None]
            if sides and all(side in tensors for side in sides):
                found[leaf] = {
                    name: Sides(*(None if side is None else tensors[side] for side in pair))
                    for name, pair in names.items()
                }
        return found


def names_in(source: Source) -> list[str]:
    return [name for name in ((source,) if isinstance(source, str) else source) if name is not None]


def prepared_names(leaf: MaskSpec, name: str, sources: Mapping[str, Source]) -> Sides:
    """The names of what is prepared for an input of a leaf, one for each side."""
    source = sources[name]
    config = json.dumps(leaf.get_config(), sort_keys=True)  # two classes may look alike in a repr
    if isinstance(source, str):
        return Sides(f"{config} of {source}", f"{config} of {source}")
    of_both = ", ".join(names_in(source))
    sides = zip(source, ("queries", "keys"), strict=True)
    return Sides(*(None if s is None else f"{config} of {of_both}: {side}" for s, side in sides))


class Frame(NamedTuple):
    """What is known while a masked layer runs."""

    inputs: tuple[tuple[keras.Layer, Tensors], ...]  # for which layer; the outermost call first
    offset: Any  # the position of the first query in a cache; `None` without a cache
    graph: Any  # TensorFlow's, in which the inputs were given
    used: set[int]  # the attention layers that have run


_frame: ContextVar[Frame | None] = ContextVar("frame", default=None)


def current() -> Frame:
    return _frame.get() or Frame((), None, graph_being_built(), set())


@contextlib.contextmanager
def being(frame: Frame) -> Iterator[None]:
    """Run in `frame`, which another call opened."""
    token = _frame.set(frame)
    try:
        yield
    finally:
        _frame.reset(token)


@contextlib.contextmanager
def opened(layers: Iterable[keras.Layer], inputs: Tensors | None, offset: Any) -> Iterator[Frame]:
    """The frame of a call with `inputs` for `layers`, inside the one that is open.

    An outer offset holds.
    """
    outer = _frame.get()
    before = outer or Frame((), None, graph_being_built(), set())
    given, graph = before.inputs, before.graph
    if inputs is not None:
        given = (*given, *((layer, inputs) for layer in layers))
        graph = graph_being_built()
    frame = Frame(given, offset if before.offset is None else before.offset, graph, set())
    with being(frame):
        yield frame
    if outer is not None:
        outer.used.update(frame.used)


def inputs_of(rule: LayerRule, attention: Any = None) -> Tensors | None:
    """What `rule` reads in this call: what its owner was called with.

    Or a layer that stands for it: one inside that is called by itself, or one beside it that holds
    the same `attention`. What a layer around it was called with may be of another sequence.
    """
    given = current().inputs[::-1]
    own = [tensors for layer, tensors in given if layer is rule.owner]
    if not own and attention is not None:
        own = [
            tensors
            for layer, tensors in given
            if holds(layer, attention) and not holds(layer, rule.owner)
        ]
    return next((tensors for tensors in own if set(rule.reads) <= tensors.keys()), None)
