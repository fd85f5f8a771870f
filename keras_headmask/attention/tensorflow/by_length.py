"""What TensorFlow runs by sizes that show only when the graph runs, and the choice.

It has one gradient, of its own: that of `tf.cond` would hand all that a branch computed on to the
backward pass, which takes longer than attention over a short sequence.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask._keras import in_forward_mode
from keras_headmask.attention import head_groups, limits
from keras_headmask.attention.head_groups import Part
from keras_headmask.attention.tensorflow import head_by_head, loop
from keras_headmask.attention.tensorflow.graph import (
    Passes,
    guarded,
    shared,
    traced_once,
    with_own_gradient,
)
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Tensor, sizes


def compute(part: Part, *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` of all heads, of sequences of any length.

    `operands`: query, key, value, and the tensors of `part.changes`.
    """
    # (In a file, one branch more for each layer; and OpenVINO computes it wrongly.)
    is_one = is_forward_only() or not part.tuning.most_logits_at_once
    if is_one or in_forward_mode(*operands):
        return _of_many(part, *operands)
    forward, backward = (functools.partial(one, part) for one in (_forward, _backward))
    return with_own_gradient(Passes(forward, backward, loop.at_once(part).keeps), *operands)


# Few logits are computed in place, not in a function, whose call would take longer than they do.
# The other branch is one: what is not run takes no time then.


@traced_once
def _forward(part: Part, *operands: Tensor) -> list[Tensor]:
    at_once = loop.at_once(part)
    nothing = [tf.zeros([0, 0, 0, 0], operands[0].dtype)] * at_once.keeps
    return tf.cond(
        _is_small(part, *operands[:2]),
        lambda: at_once.forward(*operands),
        lambda: [_of_many(part, *operands), *nothing],
    )


@traced_once
def _backward(part: Part, *given: Tensor) -> tuple:
    at_once = loop.at_once(part)
    return tf.cond(
        _is_small(part, *given[:2]),
        lambda: at_once.backward(*given),
        lambda: _gradients_of_many(part, *given[: len(given) - at_once.keeps]),
    )


def _is_small(part: Part, query: Tensor, key: Tensor) -> Tensor:
    most = limits.most_at_once(part, part.dropout is not None)
    batch, queries, heads, _ = sizes(query, "int64")  # 16,384 squared is 0 in 32 bits, times 16
    return batch * queries * heads * sizes(key, "int64")[1] <= most


@shared
def _of_many(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(_short_or_tiled(part), *operands)


@shared
def _gradients_of_many(part: Part, *given: Tensor) -> tuple:
    return _short_or_tiled(part).backward(*given)


def _short_or_tiled(part: Part) -> Passes:
    tiles = guarded(_of_groups(part))
    if part.changes.are_some:
        short = loop.at_once(part)
    elif part.dropout is None:
        short = guarded(head_by_head.passes(part))
    else:
        return tiles

    def chosen(first: Callable, second: Callable, query: Tensor, key: Tensor) -> Any:
        pairs = sizes(query, "int64")[1] * sizes(key, "int64")[1]
        return tf.cond(pairs <= limits.most_pairs(part), first, second)

    def forward(*operands: Tensor) -> list[Tensor]:
        first, second = (lambda x=x: x.forward(*operands) for x in (short, tiles))
        return chosen(first, second, *operands[:2])

    def backward(*given: Tensor) -> tuple:
        first, second = (lambda x=x: x.backward(*given) for x in (short, tiles))
        return chosen(first, second, *given[:2])

    return Passes(forward, backward)


def _of_groups(part: Part) -> Passes:
    """Tiles of each head group, put together."""
    groups = head_groups.by_rule(part)
    each = [loop.passes(group) for group in groups]
    if len(each) == 1:
        return each[0]
    sets = [group.heads for group in groups]
    of_keys = [head_groups.key_heads(heads, part.sharing) for heads in sets]

    def cut(*operands: Tensor) -> list[tuple]:
        """The operands of each group."""
        query, key, value, *tensors = operands
        own = [head_groups.cut_into(query, sets, 2)]
        own += [head_groups.cut_into(x, of_keys, 2) for x in (key, value)]
        changes = part.changes.with_tensors(tensors)
        of_changes = [head_groups.changes_of_heads(changes, heads).tensors for heads in sets]
        return [(*operands, *tensors) for *operands, tensors in zip(*own, of_changes, strict=True)]

    def forward(*operands: Tensor) -> list[Tensor]:
        made = [x.forward(*own)[0] for x, own in zip(each, cut(*operands), strict=True)]
        return [head_groups.joined(made, sets, 2)]

    def backward(*given: Tensor) -> tuple:
        *operands, upstream, context = given
        of_context = [head_groups.cut_into(x, sets, 2) for x in (upstream, context)]
        made = [
            x.backward(*own, *rest)
            for x, own, *rest in zip(each, cut(*operands), *of_context, strict=True)
        ]
        changes = part.changes.with_tensors(operands[3:])
        whole = [(sets, 2), (of_keys, 2), (of_keys, 2)]
        for tensor, axis in zip(changes.tensors, changes.axes_of_heads, strict=True):
            is_for_all = tensor.shape[axis] == 1 != len(part.heads)
            whole.append(([(0,)] * len(sets) if is_for_all else sets, axis))
        return tuple(
            head_groups.added_up(list(gradients), own, axis)
            for gradients, (own, axis) in zip(zip(*made, strict=True), whole, strict=True)
        )

    return Passes(forward, backward)
