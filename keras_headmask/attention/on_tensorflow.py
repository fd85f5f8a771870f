"""Which implementation TensorFlow runs, by sizes that may show only when the graph runs.

Such a choice has one gradient, of its own: that of `tf.cond` would hand all that a branch computed
on to the backward pass, which takes longer than attention over a short sequence.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_headmask._keras import in_forward_mode
from keras_headmask.attention import head_by_head, parts, tiles_python, tiles_tensorflow
from keras_headmask.attention.parts import Part
from keras_headmask.attention.tensorflow_graph import (
    Passes,
    guarded,
    shared,
    with_own_gradient,
)
from keras_headmask.attention.tuning import is_forward_only
from keras_headmask.masks import Tensor
from keras_headmask.rules.divided import divided

_SOME = 1024  # positions, by which to see what a rule leaves to skip


def attend(part: Part, tiles: Callable[[], Tensor], *operands: Tensor) -> Tensor:
    """The context `(B, T, H, Dv)` of all heads, by `tiles()` where known lengths ask for them.

    `operands`: query, key, value, and the tensors of `part.changes`.
    """
    batch, queries, heads, _ = operands[0].shape
    keys = operands[1].shape[1]
    if None in (queries, keys):
        return _by_length(part, *operands)
    if part.dropout is not None:
        return tiles()
    # (Tiles of rules that read nothing are a part of the graph here, and start at once.)
    is_of_loops = part.rule.inputs and batch is not None and len(parts.by_rule(part)) > 1
    if is_of_loops and batch * heads * queries * keys <= _most_at_once(part):
        return _all_logits(part, *operands)
    if queries * keys > _most_pairs(part):
        return tiles()
    if part.changes.are_some:
        return _all_logits(part, *operands)
    return head_by_head.attend(part, *operands)


def _most_pairs(part: Part) -> int:
    """Of a head; up to so many go head by head."""
    tuning = part.tuning
    if not part.rule.inputs:
        return tuning.most_pairs_by_head
    # Each example may have tiles of its own, with little work in each.
    return max(tuning.most_pairs_by_head, tuning.most_logits_by_head // len(part.heads))


def _most_at_once(part: Part) -> int:
    """Of a batch; up to so many logits are computed at once."""
    most, groups = part.tuning.most_logits_at_once, parts.by_rule(part)
    if all(map(_skips_little, groups)):
        return 16 * most
    if len(groups) > 1:  # each group has loops of its own
        return 8 * most
    return most if part.dropout is None else 4 * most  # tiles would draw it again for gradients


def _skips_little(part: Part) -> bool:
    """Whether tiles would compute nearly all logits, by what the rule says of positions.

    Beside that flags may hide keys, of padding as a rule; ids hide more, and so may flags alone.
    """
    rule = divided(part.rule)
    if rule is None or rule.ids is not None or (rule.flags and rule.positional.constant):
        return False
    plan = tiles_python.plan_of(part._replace(rule=rule.positional), _SOME, _SOME, 0)
    seen = 0
    for runs in filter(None, plan.runs):
        first_gap = runs[1][0] - runs[0][1] if len(runs) > 1 else 0
        seen += runs[-1][1] - runs[0][0] - first_gap  # the loop skips no other
    return seen > 0.75 * _SOME * len(plan.runs)


@shared
def _all_logits(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(tiles_tensorflow.at_once(part), *operands)


def _by_length(part: Part, *operands: Tensor) -> Tensor:
    # (In a file, one branch more for each layer; and OpenVINO computes it wrongly.)
    is_one = is_forward_only() or not part.tuning.most_logits_at_once
    if is_one or in_forward_mode(*operands):
        return _of_many(part, *operands)
    at_once = tiles_tensorflow.at_once(part)

    def is_small(query: Tensor, key: Tensor) -> Tensor:
        return tf.reduce_prod(_sizes(query)[:3]) * _sizes(key)[1] <= _most_at_once(part)

    # Few logits are computed here, not in a function, whose call would take longer than they do.
    # The other branch is one: what is not run takes no time then.
    def forward(*operands: Tensor) -> list[Tensor]:
        nothing = [tf.zeros([0, 0, 0, 0], operands[0].dtype)] * at_once.keeps
        return tf.cond(
            is_small(*operands[:2]),
            lambda: at_once.forward(*operands),
            lambda: [_of_many(part, *operands), *nothing],
        )

    def backward(*given: Tensor) -> tuple:
        return tf.cond(
            is_small(*given[:2]),
            lambda: at_once.backward(*given),
            lambda: _gradients_of_many(part, *given[: len(given) - at_once.keeps]),
        )

    return with_own_gradient(Passes(forward, backward, at_once.keeps), *operands)


@shared
def _of_many(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(_short_or_tiled(part), *operands)


@shared
def _gradients_of_many(part: Part, *given: Tensor) -> tuple:
    return _short_or_tiled(part).backward(*given)


def _short_or_tiled(part: Part) -> Passes:
    tiles = guarded(_of_groups(part))
    if part.changes.are_some:
        short = tiles_tensorflow.at_once(part)
    elif part.dropout is None:
        short = guarded(head_by_head.passes(part))
    else:
        return tiles

    def chosen(first: Callable, second: Callable, query: Tensor, key: Tensor) -> Any:
        pairs = _sizes(query)[1] * _sizes(key)[1]
        return tf.cond(pairs <= _most_pairs(part), first, second)

    def forward(*operands: Tensor) -> list[Tensor]:
        first, second = (lambda x=x: x.forward(*operands) for x in (short, tiles))
        return chosen(first, second, *operands[:2])

    def backward(*given: Tensor) -> tuple:
        first, second = (lambda x=x: x.backward(*given) for x in (short, tiles))
        return chosen(first, second, *given[:2])

    return Passes(forward, backward)


def _sizes(tensor: Tensor) -> Tensor:
    return tf.shape(tensor, out_type=tf.int64)  # of 16 heads, 16,384 squared is 0 in 32 bits


def _of_groups(part: Part) -> Passes:
    """Tiles of each head group, put together."""
    groups = parts.by_rule(part)
    each = [tiles_tensorflow.passes(group) for group in groups]
    if len(each) == 1:
        return each[0]
    sets = [group.heads for group in groups]
    of_keys = [parts.key_heads(heads, part.sharing) for heads in sets]

    def cut(*operands: Tensor) -> list[tuple]:
        """The operands of each group."""
        query, key, value, *tensors = operands
        own = [parts.cut_into(query, sets, 2)]
        own += [parts.cut_into(x, of_keys, 2) for x in (key, value)]
        changes = part.changes.with_tensors(tensors)
        of_changes = [parts.changes_of_heads(changes, heads).tensors for heads in sets]
        return [(*operands, *tensors) for *operands, tensors in zip(*own, of_changes, strict=True)]

    def forward(*operands: Tensor) -> list[Tensor]:
        made = [x.forward(*own)[0] for x, own in zip(each, cut(*operands), strict=True)]
        return [parts.joined(made, sets, 2)]

    def backward(*given: Tensor) -> tuple:
        *operands, upstream, context = given
        of_context = [parts.cut_into(x, sets, 2) for x in (upstream, context)]
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
            parts.added_up(list(gradients), own, axis)
            for gradients, (own, axis) in zip(zip(*made, strict=True), whole, strict=True)
        )

    return Passes(forward, backward)
