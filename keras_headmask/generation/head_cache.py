"""A cache that keeps, for the heads of one reach, only the keys that a later query may see.

A head that sees the first keys and the last ones keeps just these: the first at places of their
own, the last in a ring. Which position a place holds follows from the position of the newest key
alone, so nothing about it is stored.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_headmask import _keras, masks
from keras_headmask.attention.head_groups import in_order
from keras_headmask.attention.logits import select_heads
from keras_headmask.generation import one_query
from keras_headmask.layers import changing
from keras_headmask.masks import Length, Tensor
from keras_headmask.retrofit.adapters import CACHES, Attention, adapter_of
from keras_headmask.retrofit.call import inputs_of
from keras_headmask.retrofit.rule import LayerRule
from keras_headmask.rules import evaluation, reaching
from keras_headmask.rules.by_head import head_groups
from keras_headmask.rules.protocol import Bound, Cuts, Reach


class Slots(NamedTuple):
    """Where the keys of some heads are kept: `fixed` positions (ranges), and the last `ring`."""

    heads: tuple[int, ...]  # of keys
    fixed: tuple[tuple[int, int], ...]
    ring: int

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.fixed) + self.ring

    def positions(self, last: Length) -> Tensor:
        """Which position each slot holds, `(size,)`, once `last` is written; negative: none."""
        slots = ops.arange(self.ring, dtype="int32")
        newest = last - ops.mod(last - slots, self.ring)
        for start, stop in self.fixed:  # these have slots of their own
            newest = ops.where(ops.logical_and(newest >= start, newest < stop), -1, newest)
        fixed = [i for start, stop in self.fixed for i in range(start, stop)]
        if not fixed:
            return newest
        known = ops.convert_to_tensor(fixed, "int32")
        return ops.concatenate([ops.where(known <= last, known, -1), newest])

    def place(self, position: Length) -> Tensor:
        """The slot of a new position."""
        before = self.size - self.ring
        place = before + ops.mod(position, self.ring)
        before = 0
        for start, stop in self.fixed:
            inside = ops.logical_and(position >= start, position < stop)
            place = ops.where(inside, before + position - start, place)
            before += stop - start
        return place


def with_own_window(adapter: Attention, rules: Sequence[LayerRule]) -> list[LayerRule]:
    """`rules`, and what the class restricts by itself."""
    window = adapter.window({})
    return [*rules, *([] if window is None else [LayerRule(window, adapter.num_heads)])]


def slots_of(adapter: Attention, rules: Sequence[LayerRule], length: int) -> list[Slots]:
    """The slots of each group of key heads, for sequences of up to `length` tokens."""
    shared = adapter.num_heads // adapter.num_key_heads  # query heads that share keys
    heads_by_reach: dict[Reach, list[int]] = {}
    for first in range(0, adapter.num_heads, shared):
        of_group = reaching.union(
            reaching.intersection([rule.spec.for_head(head).looks_back() for rule in rules])
            for head in range(first, first + shared)
        )
        heads_by_reach.setdefault(of_group, []).append(first // shared)
    return [_slots(tuple(heads), of_group, length) for of_group, heads in heads_by_reach.items()]


def _slots(heads: tuple[int, ...], reach: Reach, length: int) -> Slots:
    if reach.before is not None:
        # (A ring has a slot at least, for what is written last.)
        slots = Slots(heads, reach.fixed, max(reach.before + 1, 1))
        if slots.size < length:
            return slots
    return Slots(heads, (), length)


# --- One forward of a model ----------------------------------------------------------------------

State = list[dict[str, Tensor]]  # of one layer: "key" and "value" of each group of heads


class Run:
    """One cached forward: of the prompt, which seeds the cache, or of one token.

    `last` is the position of the newest token. `states` are those of the layers, in the order in
    which they run; the prompt's forward makes them.
    """

    def __init__(self, length: int, last: Length, states: Sequence[State] | None = None):
        self.length, self.last = length, ops.convert_to_tensor(last, "int32")
        self.states = None if states is None else list(states)
        self.made: list[State] = []
        self._bound: dict[LayerRule, Bound] = {}

    def called(self, layer: Any, call: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
        """`call(...)`; a cached attention layer gets a cache for the new keys alone.

        It writes its new keys into the cache that it is given, at a place that TensorFlow and JAX
        clamp to it, and attends to all of that. PyTorch needs the places before.
        """
        adapter = adapter_of(layer)
        name = next((name for name in CACHES if kwargs.get(name) is not None), None)
        if name is None or adapter is None:
            return call(*args, **kwargs)
        tokens_at = next(iter(_keras.arguments_of(layer, args, kwargs).values()))
        batch, tokens = ops.shape(tokens_at)[:2]
        if _is_torch():
            tokens += int(kwargs[f"{name}_update_index"])
        shape, dtype = (tokens, adapter.num_key_heads, adapter.head_dim), layer.compute_dtype
        new = keras.tree.map_structure(  # (one tensor `(B, 2, ...)`, or a pair of them)
            lambda x: ops.zeros((batch, *x.shape[1:-3], *shape), dtype), kwargs[name]
        )
        output, _ = call(*args, **kwargs | {name: new})
        return output, kwargs[name]

    def context(
        self,
        adapter: Attention,
        rules: Sequence[LayerRule],
        usual: Callable,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Context under `rules`; `usual` computes it, and probabilities, where all keys are there.

        `arguments` are those of the hook: see `families`.
        """
        query, mask = arguments["query"], arguments["attention_mask"]
        keys = {name: arguments[name] for name in ("key", "value")}
        if _is_torch():  # see `called`
            keys = {name: x[:, -query.shape[1] :] for name, x in keys.items()}
        unrepeated = {name: x[:, :, :: adapter.key_repeats] for name, x in keys.items()}
        rules = with_own_window(adapter, rules)
        slots = slots_of(adapter, rules, self.length)
        if self.states is None:
            self.made.append([self._seeds(of_group, unrepeated) for of_group in slots])
            return usual(arguments | keys)
        state, parts = self.states[len(self.made)], []
        contexts: list[Tensor] = []
        order: list[int] = []
        for of_group, kept in zip(slots, state, strict=True):
            place = of_group.place(self.last)
            new = {
                name: one_query.written(kept[name], _heads_first(x, of_group), place)
                for name, x in unrepeated.items()
            }
            parts.append(new)
            heads = _query_heads(adapter, of_group)
            seen = self._mask(rules, of_group, heads, mask)
            queries = select_heads(query, heads, axis=2)
            operands = queries, new["key"], new["value"], seen
            changes = adapter.changes.of_heads(heads)
            contexts.append(one_query.attention(*operands, adapter.scale, changes))
            order.extend(heads)
        self.made.append(parts)
        context = contexts[0] if len(contexts) == 1 else ops.concatenate(contexts, axis=2)
        return in_order(context, order, axis=2), None

    def _seeds(self, slots: Slots, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill the slots from the keys `(B, T, K, D)` of a prompt."""
        place = ops.maximum(slots.positions(self.last), 0)
        return {name: ops.take(_heads_first(x, slots), place, axis=2) for name, x in keys.items()}

    def _mask(
        self,
        rules: Sequence[LayerRule],
        slots: Slots,
        heads: tuple[int, ...],
        attention_mask: Any,
    ) -> Tensor:
        """Which slots the newest token sees, `(B or 1, len(heads) or 1, 1, slots)`."""
        positions = slots.positions(self.last)
        place = ops.maximum(positions, 0)
        cuts = Cuts(
            lambda x, axis: ops.take(x, ops.reshape(self.last, (1,)), axis=axis),
            lambda x, axis: ops.take(x, place, axis=axis),
        )
        mask = (positions >= 0)[None, None, None, :]
        if attention_mask is not None:
            lifted = masks.lift(masks.as_bool(attention_mask, "attention_mask"))
            of_slots = ops.take(lifted, place, axis=3)
            if lifted.shape[1] != 1:
                of_slots = select_heads(of_slots, heads, axis=1)
            mask = ops.logical_and(mask, of_slots)
        for rule in rules:
            groups = [
                (spec, tuple(i for i, head in enumerate(heads) if head in of_rule))
                for spec, of_rule in head_groups(rule.spec, rule.num_heads)
            ]
            groups = [(spec, members) for spec, members in groups if members]
            bound = self._bind(rule)
            allowed = [evaluation.allowed_tile(spec, bound, heads, cuts) for spec, _ in groups]
            mask = ops.logical_and(mask, evaluation.by_head(groups, len(heads), allowed))
        return mask

    def _bind(self, rule: LayerRule) -> Bound:
        """The mask inputs of `rule`, bound for the whole sequence as far as it is known."""
        if rule not in self._bound:
            tensors: Any = inputs_of(rule) or {}
            inputs, length = rule.inputs_from(tensors), self.length
            prepared = rule.prepared(tensors)
            bound = evaluation.bind(rule.spec, inputs, length, length, prepared=prepared)
            self._bound[rule] = bound
        return self._bound[rule]


def _query_heads(adapter: Attention, slots: Slots) -> tuple[int, ...]:
    shared = adapter.num_heads // adapter.num_key_heads
    return tuple(head * shared + i for head in slots.heads for i in range(shared))


def _heads_first(x: Tensor, slots: Slots) -> Tensor:
    return ops.transpose(select_heads(x, slots.heads, axis=2), (0, 2, 1, 3))


def keeps(layer: Any) -> bool:
    """Whether the keys of an attention layer can be kept by heads.

    Not where its class, or a kernel, computes attention by code of its own, nor with biases, nor
    where layers read the keys of others.
    """
    adapter = adapter_of(layer)
    if adapter is None or changing.are_set(layer) or adapter.shares_keys:
        return False
    return adapter.softmax is None and not adapter.has_own_code


def _is_torch() -> bool:
    return keras.backend.backend() == "torch"


def generates(model: Any) -> bool:
    """Whether it is a causal language model of KerasHub's, or one that works alike."""
    return all(hasattr(model, name) for name in ("generate_step", "call_with_cache"))
