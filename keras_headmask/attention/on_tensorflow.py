"""Which implementation TensorFlow runs, by sizes that may show only when the graph runs.

Such a choice has one gradient, of its own: that of `tf.cond` would hand all that a branch computed
on to the backward pass, which takes longer than attention over a short sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_headmask._keras import NOT_INLINED
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
    if not part.rule.inputs and all(_share(group) > 0.75 for group in groups):
        return 16 * most
    return most if len(groups) == 1 else 8 * most  # each group has loops of its own


def _share(part: Part) -> float:
    """The share of all logits that tiles would compute, where nothing but positions decides."""
    plan = tiles_python.plan_of(part, _SOME, _SOME, 0)
    seen = 0
    for runs in filter(None, plan.runs):
        first_gap = runs[1][0] - runs[0][1] if len(runs) > 1 else 0
        seen += runs[-1][1] - runs[0][0] - first_gap  # the loop skips no other
    return seen / (_SOME * len(plan.runs))


@shared
def _all_logits(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(tiles_tensorflow.at_once(part), *operands)


@shared
def _by_length(part: Part, *operands: Tensor) -> Tensor:
    return with_own_gradient(_chosen_by_length(part), *operands)


class _Choice(NamedTuple):
    """What to do up to so many logits, of a head of one example or of the whole batch."""

    most: int
    is_of_batch: bool
    passes: Passes


def _choices(part: Part) -> list[_Choice]:
    """Of what is not tiled; the first that suits is taken."""
    at_once, found = tiles_tensorflow.at_once(part), []
    # (In a file, one branch more for each layer; and OpenVINO computes it wrongly.)
    if part.tuning.most_logits_at_once and not is_forward_only():
        found.append(_Choice(_most_at_once(part), True, at_once))
    if part.changes.are_some:
        found.append(_Choice(_most_pairs(part), False, at_once))
    elif part.dropout is None:  # head by head knows neither
        found.append(_Choice(_most_pairs(part), False, guarded(head_by_head.passes(part))))
    return found


def _chosen_by_length(part: Part) -> Passes:
    choices, tiles = _choices(part), guarded(_of_groups(part))
    passes = [*(choice.passes for choice in choices), tiles]
    keeps = max(x.keeps for x in passes)

    def chosen(branches: list[Callable], query: Tensor, key: Tensor) -> Any:
        batch, pairs = tf.shape(query)[0], tf.shape(query)[1] * tf.shape(key)[1]
        of_batch = batch * len(part.heads) * pairs

        def from_choice(number: int) -> Any:
            if number == len(choices):
                return branches[number]()
            most, is_of_batch, _ = choices[number]
            suits = (of_batch if is_of_batch else pairs) <= most
            return tf.cond(suits, branches[number], _apart(lambda: from_choice(number + 1)))

        return from_choice(0)

    def forward(*operands: Tensor) -> list[Tensor]:
        def branch(passes: Passes) -> Callable:
            nothing = [tf.zeros([0, 0, 0, 0], operands[0].dtype)] * (keeps - passes.keeps)
            return lambda: [*passes.forward(*operands), *nothing]

        return chosen([branch(x) for x in passes], *operands[:2])

    def backward(*given: Tensor) -> tuple:
        def branch(passes: Passes) -> Callable:
            own = given[: len(given) - keeps + passes.keeps]
            return lambda: passes.backward(*own)

        return chosen([branch(x) for x in passes], *given[:2])

    return Passes(forward, backward, keeps)


def _apart(branch: Callable) -> Callable:
    """As one operation: what is not run takes no time, where each operation of it would."""
    if tf.executing_eagerly() or is_forward_only():
        return branch
    return tf.function(branch, autograph=False, experimental_attributes=NOT_INLINED)


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
