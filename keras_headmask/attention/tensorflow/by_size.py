"""Attention in TensorFlow's graphs: all logits where they are few, else the loop over tiles.

What follows from the rule and its inputs alone, the mask of short sequences or the plan of long
ones, is traced once in a graph, and made once for all layers whose sizes are known to be equal. The
sizes that the run has decide between them.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask import _keras
from keras_headmask.attention.request import Part, by_rule
from keras_headmask.attention.scopes import is_forward_only
from keras_headmask.attention.tensorflow import loop
from keras_headmask.attention.tensorflow.graph import attended, hiding, on_gpu, one_function
from keras_headmask.attention.tensorflow.plan import Plan, planned
from keras_headmask.masks import Length, Tensor
from keras_headmask.rules.evaluation import mask_of_all_heads
from keras_headmask.rules.graphs import made_once
from keras_headmask.rules.protocol import Sizes


class Shared(NamedTuple):
    """The mask or the plans that all layers under one rule share.

    `is_short`, a bool or a tensor: whether all logits are computed. Then `mask` `(B or 1, H or 1,
    T, S)` is added to them: -inf for what is hidden, 0 for the rest and in rows that see nothing.
    `alive` `(B or 1, T, H or 1, 1)` is 0 for these rows, else 1. Otherwise `plans` holds one for
    each head group.
    """

    is_short: bool | Tensor
    mask: Tensor
    alive: Tensor
    plans: list[Plan]


def compute(part: Part, *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` for `query` `(B, T, H, D)`, `key` and `value` `(B, S, Hk, ...)`.

    H = `part.sharing` * Hk. `operands`: these, and sinks if there are some.
    """
    # (TensorFlow has no derivative of a branch there.)
    by_tiles_alone = _keras.in_forward_mode(*operands)
    # (Nothing else of the part matters.)
    of_rule = Part(part.rule, part.heads, part.bound, 1.0, part.tuning, sharing=part.sharing)
    shared = _shared(of_rule, operands[0].dtype.name, by_tiles_alone)
    if shared.is_short is False:
        return loop.attend(part, shared.plans, *operands)
    return (_attend_to_all if shared.is_short is True else _attend)(part, shared, *operands)


@one_function
def _attend(part: Part, shared: Shared, *operands: Tensor) -> Tensor:
    """By all logits or by tiles, as `shared.is_short` says when the graph runs.

    TensorFlow keeps what the gradients of two branches need side by side, and logs an "invalid
    graph" where the types differ: each branch stands beside one that computes nothing.
    """
    query, _, value = operands[:3]
    shape = [*query.shape[:3], value.shape[3]]
    if is_forward_only():  # nothing is kept for gradients
        context = tf.cond(
            shared.is_short,
            lambda: _attended_to_all(part, shared, *operands),
            lambda: loop.attend(part, shared.plans, *operands),
        )
        return tf.ensure_shape(context, shape)
    # (Empty, and of a shape that TensorFlow does not know: else it logs that shapes differ.)
    nothing = tf.zeros([0, 0, *shape[2:]], value.dtype)
    nothing = tf.raw_ops.PlaceholderWithDefault(input=nothing, shape=[None, None, *shape[2:]])
    short, long = _keras.for_branches(shared.is_short, operands)
    context = tf.cond(
        shared.is_short, lambda: _attended_to_all(part, shared, *short), lambda: nothing
    )
    context = tf.cond(
        shared.is_short, lambda: context, lambda: loop.attend(part, shared.plans, *long)
    )
    return tf.ensure_shape(context, shape)


class Limits(NamedTuple):
    """Up to which sizes all logits of a batch are computed in one product.

    A batch has at most `logits` (examples x heads x pairs), or at most `of_short` where a sequence
    has at most `short` pairs (queries x keys): a tile would be most of such a sequence. Where the
    lengths alone are known, any number of examples will do: a graph without the loop is built in
    two thirds of the time.
    """

    logits: int
    of_short: int
    short: int

    @classmethod
    def of(cls, part: Part) -> "Limits":
        most, few = part.tuning.most_logits, part.tuning.fewest_pairs
        rules = [rule for rule, _ in part.groups()]
        are_local = all(part.is_local(rule) for rule in rules)  # few keys a query
        return cls(most // 16 if are_local else most, 8 * most, 2 * few)

    def hold(self, heads: int, batch: Length, queries: Length, keys: Length) -> bool | Tensor:
        """Whether the sizes are within; a bool where those that are ints say so."""
        sizes = batch, queries, keys
        is_known = self.hold_of(heads, *(None if tf.is_tensor(x) else x for x in sizes))
        if is_known is not None:
            return is_known
        # (65,536 squared is 0 in 32 bits.)
        return self._are_within(heads, *(tf.cast(x, tf.int64) for x in sizes))

    def hold_of(
        self, heads: int, batch: int | None, queries: int | None, keys: int | None
    ) -> bool | None:
        """Whether known sizes are within; `None` where others decide."""
        if not self.logits:
            return False
        if queries is None or keys is None:
            return None
        if batch is None:
            return queries * keys <= self.short or None
        return self._are_within(heads, batch, queries, keys)

    def _are_within(self, heads: int, batch: Any, queries: Any, keys: Any) -> Any:
        pairs = queries * keys
        logits = heads * batch * pairs
        return (logits <= self.logits) | ((pairs <= self.short) & (logits <= self.of_short))


@made_once
def _shared(part: Part, dtype: str, by_tiles_alone: bool) -> Shared:
    sizes = part.bound.sizes
    is_short = not by_tiles_alone and Limits.of(part).hold(len(part.heads), *sizes)
    if is_short is True and not part.bound.leaf_inputs:  # a constant, whatever the batch
        mask, alive = _short_mask(part._replace(bound=part.bound._replace(sizes=None)), dtype)
        return Shared(True, mask, alive, [])
    # (Out here: it would be a state of a function.)
    is_gpu = 0 if is_short is True else on_gpu()
    return Shared(is_short, *_found(part, (is_short, sizes, is_gpu, dtype)))


@made_once
def _short_mask(part: Part, dtype: str) -> tuple[Tensor, Tensor]:
    mask = mask_of_all_heads(part.rule, part.bound, len(part.heads))
    sees_some = tf.reduce_any(mask, -1, keepdims=True)
    # (Grappler transposes before a cast, and of booleans oneDNN logs that it cannot.)
    alive = tf.where(sees_some, tf.ones([], dtype), tf.zeros([], dtype))
    return hiding(mask, sees_some, tf.as_dtype(dtype)), tf.transpose(alive, (0, 2, 1, 3))


@one_function
def _found(part: Part, known: tuple) -> tuple[Tensor, Tensor, list[Plan]]:
    """The last three of `Shared`: traced once for layers whose lengths are not known to be equal.

    A rule on positions alone has those of each layer's own query, so each runs it for itself.
    """
    is_short, sizes, is_gpu, dtype = known
    part = part._replace(bound=part.bound._replace(sizes=Sizes(*sizes)))
    nothing = tf.zeros([0] * 4, dtype)

    def long_plans() -> list[Plan]:
        return [planned(group, is_gpu) for group in by_rule(part)]

    if is_short is True:
        return *_short_mask(part, dtype), []
    if is_short is False:
        return nothing, nothing, long_plans()
    # A function: TensorFlow optimises it when it first runs.
    plans = tf.function(long_plans, autograph=False, experimental_attributes=_keras.NOT_INLINED)
    plans = plans.get_concrete_function()
    no_plans = tf.nest.map_structure(_empty, plans.structured_outputs)
    return tf.cond(
        is_short,
        lambda: (*_short_mask(part, dtype), no_plans),
        lambda: (nothing, nothing, plans()),
    )


def _empty(like: tf.TensorSpec | None) -> Tensor | None:
    return None if like is None else tf.zeros([size or 0 for size in like.shape], like.dtype)


def _attended_to_all(part: Part, shared: Shared, *operands: Tensor) -> Tensor:
    query, key, value, *sinks = operands
    heads_first = [tf.transpose(x, (0, 2, 1, 3)) for x in (query * part.scale, key, value)]
    context = attended(part, shared.mask, 0, *heads_first, *sinks)
    return tf.transpose(context, (0, 2, 1, 3)) * shared.alive


_attend_to_all = one_function(_attended_to_all)
